"""`jax_ep.checkpoints`: layouts and codes of published checkpoints, bit for bit."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import checkpoints
from support import helpers, quantizer

E, H, F = 4, 256, 128
NAME = "model.layers.3.mlp.experts.{}.gate_proj.weight"


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def test_a_tensor_per_expert(rng):
    matrices = [draw(rng, F, H) for _ in range(E)]
    tensors = {NAME.format(expert): each for expert, each in enumerate(matrices)}
    tensors |= {"bias.0": draw(rng, F), "bias.1": draw(rng, F)}
    gate = checkpoints.stack(tensors, NAME)
    assert (gate.shape, gate.dtype, len(gate)) == ((E, H, F), np.float32, E)
    x = draw(rng, H)
    for expert, matrix in enumerate(matrices):
        np.testing.assert_allclose(x @ gate[expert], matrix @ x, rtol=1e-4, atol=1e-4)
    as_is = checkpoints.stack(tensors, NAME, order="in_out")
    np.testing.assert_array_equal(as_is, np.stack(matrices))
    np.testing.assert_array_equal(
        checkpoints.stack(tensors, "bias.{}"), [tensors["bias.0"], tensors["bias.1"]]
    )
    back = checkpoints.unstack(gate, NAME)
    assert list(back) == [NAME.format(expert) for expert in range(E)]
    for name, matrix in back.items():
        np.testing.assert_array_equal(matrix, tensors[name])


def test_eleven_experts_are_in_the_order_of_their_numbers():
    tensors = {f"w.{expert}": np.full((1, 1), expert) for expert in range(11)}
    assert np.ravel(checkpoints.stack(tensors, "w.{}")).tolist() == list(range(11))


def halves(fused, interleaved):
    """Gate and up `[F, H]` of an expert, by the slices that PyTorch code has."""
    if interleaved:
        return fused[::2], fused[1::2]
    return np.split(fused, 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", ["out_in", "in_out"])
def test_gate_and_up_in_one_matrix(rng, interleaved, order):
    out_in = draw(rng, E, 2 * F, H)
    fused = out_in if order == "out_in" else np.swapaxes(out_in, 1, 2).copy()
    how = {"interleaved": interleaved, "order": order}
    found = checkpoints.gate_up(fused, **how)
    assert found.shape == (E, H, 2, F)
    for expert in range(E):
        for part, want in enumerate(halves(out_in[expert], interleaved)):
            np.testing.assert_array_equal(found[expert, :, part], want.T)
    back = checkpoints.fuse(found, **how)
    assert back.shape == fused.shape
    np.testing.assert_array_equal(back, fused)
    np.testing.assert_array_equal(checkpoints.fuse(np.asarray(found), **how), fused)
    pair = checkpoints.pair(found[:, :, 0], found[:, :, 1])
    np.testing.assert_array_equal(pair, found)


def test_transpose_is_its_own_inverse(rng):
    down = draw(rng, E, H, F)
    found = checkpoints.transpose(down)
    np.testing.assert_array_equal(found, np.swapaxes(down, 1, 2))
    np.testing.assert_array_equal(checkpoints.transpose(found), down)


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        np.int64(2),
        slice(None),
        slice(1, 3),
        slice(3, 0, -2),
        slice(2, 2),
        ...,
        (slice(1, 3), slice(0, 5), slice(2, 4)),
        (slice(2, 2), slice(0, 5)),
        (..., 0),
        (1, slice(0, 5)),
    ],
)
def test_indexing_is_that_of_the_array(rng, index):
    down = draw(rng, E, H, F)
    found = checkpoints.transpose(down)[index]
    np.testing.assert_array_equal(found, np.swapaxes(down, 1, 2)[index])
    assert type(found) is np.ndarray or found.ndim == 0


def test_iteration_ends():
    assert len(list(checkpoints.transpose(np.zeros((3, 2, 1))))) == 3


def gpt_oss(rng, inner=F):
    """Blocks and scales as gpt-oss stores them, and their values `[E, out, in]`."""
    sizes = {"gate_up": (2 * inner, H), "down": (H, inner)}
    tensors, values = {}, {}
    for name, (rows, columns) in sizes.items():
        shape = E, rows, columns // 32
        blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
        scales = rng.integers(120, 134, shape, np.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        payload = blocks.reshape(E, rows, columns // 2)
        values[name] = quantizer.dequantize(payload, scales, "mxfp4")
    return tensors, values


def load_gpt_oss(tensors):
    return checkpoints.quantized_weights(
        checkpoints.gate_up(tensors["gate_up_blocks"], interleaved=True),
        checkpoints.gate_up(tensors["gate_up_scales"], interleaved=True),
        checkpoints.transpose(tensors["down_blocks"]),
        checkpoints.transpose(tensors["down_scales"]),
    )


@pytest.mark.parametrize("inner", [F, 96])
def test_gpt_oss_blocks(rng, inner):
    tensors, values = gpt_oss(rng, inner)
    codes = load_gpt_oss(tensors)
    assert codes.format == "mxfp4"
    gate_up, down = codes.dequantized()
    for expert in range(E):
        for part, want in enumerate(halves(values["gate_up"][expert], True)):
            np.testing.assert_array_equal(gate_up[expert, :, part], want.T)
        np.testing.assert_array_equal(down[expert], values["down"][expert].T)
    # And back into the file's own layout.
    blocks = np.asarray(checkpoints.fuse(codes.gate_up, interleaved=True))
    blocks = blocks.reshape(tensors["gate_up_blocks"].shape)
    np.testing.assert_array_equal(blocks, tensors["gate_up_blocks"])
    scales = checkpoints.transpose(codes.down_scales.view(np.uint8))
    np.testing.assert_array_equal(scales, tensors["down_scales"])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, jnp.float8_e8m0fnu])
def test_deepseek_blocks(rng, dtype):
    tensors, values = {}, {}
    name = "experts.{}.%s_proj.%s"
    for part, (rows, columns) in {
        "gate": (F, H),
        "up": (F, H),
        "down": (H, F),
    }.items():
        for expert in range(E):
            byte = rng.integers(0, 127, (rows, columns), np.uint8)  # 127 is NaN
            byte |= rng.integers(0, 2, byte.shape, np.uint8) << 7
            weight = byte.view(jnp.float8_e4m3fn)
            scales = 2.0 ** rng.integers(-9, 9, (rows // 128, columns // 128))
            if dtype != jnp.float8_e8m0fnu:
                scales = scales * (1 + rng.integers(0, 8, scales.shape) / 8)
            scales = scales.astype(dtype)
            tensors[(name % (part, "weight")).format(expert)] = weight
            tensors[(name % (part, "weight_scale_inv")).format(expert)] = scales
            spread = np.kron(scales.astype(np.float32), np.ones((128, 128), np.float32))
            values[part, expert] = weight.astype(np.float32) * spread

    def both(kind):
        parts = (checkpoints.stack(tensors, name % (p, kind)) for p in ("gate", "up"))
        return checkpoints.pair(*parts)

    down = name % ("down", "weight")
    codes = checkpoints.quantized_weights(
        both("weight"),
        both("weight_scale_inv"),
        checkpoints.stack(tensors, down),
        checkpoints.stack(tensors, f"{down}_scale_inv"),
    )
    assert codes.format == "fp8_block128"
    assert codes.gate_up_scales.dtype == codes.down_scales.dtype == np.float32
    found_gate_up, found_down = codes.dequantized()
    for expert in range(E):
        for index, part in enumerate(("gate", "up")):
            np.testing.assert_array_equal(
                found_gate_up[expert, :, index], values[part, expert].T
            )
        np.testing.assert_array_equal(found_down[expert], values["down", expert].T)
    np.testing.assert_array_equal(
        np.asarray(codes.down).view(np.uint8)[1],
        tensors[down.format(1)].view(np.uint8).T,
    )


def test_a_device_reads_its_own_experts_only(rng):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    count = 2 * mesh.size
    whole = draw(rng, count, H, F)
    reads = []

    def read(expert):
        reads.append(expert)
        return whole[expert]

    lazy = checkpoints.Experts(whole.shape, whole.dtype, read)
    params = {"down": lazy, "codes": lazy.view(np.uint32), "half": lazy.astype("f2")}
    assert not reads
    sharding = NamedSharding(mesh, P("ep"))
    down = checkpoints.place(lazy, sharding)
    assert sorted(reads) == list(range(count))  # no expert twice
    assert down.sharding.is_equivalent_to(sharding, 3)
    np.testing.assert_array_equal(down, whole)
    reads.clear()
    own = checkpoints.stack({"w.0": whole[0], "w.1": whole[1]}, "w.{}")
    assert np.shares_memory(own.read(1), whole)  # a view until it is indexed
    placed = checkpoints.place(params, sharding)
    np.testing.assert_array_equal(placed["codes"], whole.view(np.uint32))
    np.testing.assert_array_equal(placed["half"], whole.astype(np.float16))


def test_a_device_reads_the_columns_of_its_shard():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    seen = []

    class Rows(np.ndarray):
        def __getitem__(self, index):
            seen.append(index)
            return np.asarray(super().__getitem__(index))

    wide = np.arange(3 * 4 * mesh.size * 2.0).reshape(3, 4, -1)
    lazy = checkpoints.Experts(wide.shape, wide.dtype, lambda e: wide[e].view(Rows))
    placed = checkpoints.place(lazy, NamedSharding(mesh, P(None, None, "ep")))
    np.testing.assert_array_equal(placed, wide)
    assert len(seen) == 3 * mesh.size
    assert {column.stop - column.start for _, column in seen} == {2}


def test_codes_are_placed(rng):
    mesh = helpers.make_mesh(helpers.some_ranks(E))
    codes = load_gpt_oss(gpt_oss(rng)[0])
    placed = checkpoints.place(codes, NamedSharding(mesh, P("ep")))
    assert type(placed) is type(codes)
    assert placed.gate_up_scales.dtype == jnp.float8_e8m0fnu
    jax.tree.map(
        np.testing.assert_array_equal, placed.dequantized(), codes.dequantized()
    )


def files(tmp_path):
    """A file as the format's page describes it, written by hand."""
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]},
        "b": {"dtype": "F8_E8M0", "shape": [3], "data_offsets": [4, 7]},
        "none": {"dtype": "F32", "shape": [0, 5], "data_offsets": [7, 7]},
        "new": {"dtype": "F1", "shape": [8], "data_offsets": [7, 8]},
    }
    text = json.dumps(header).encode()
    body = bytes([0x80, 0x3F, 0x00, 0xC0, 126, 127, 128, 7])
    file = tmp_path / "model-00001-of-00002.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return file


def test_reads_the_format(tmp_path):
    files(tmp_path)
    other = tmp_path / "model-00002-of-00002.safetensors"
    checkpoints.save_safetensors(other, {"c": np.arange(3, dtype=np.int64)})
    (tmp_path / "config.json").write_text("{}")
    tensors = checkpoints.open_safetensors(tmp_path)
    assert sorted(tensors) == ["a", "b", "c", "new", "none"]
    assert len(tensors) == 5
    assert "__metadata__" not in tensors
    assert tensors["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(tensors["a"].astype(np.float32), [[1], [-2]])
    np.testing.assert_array_equal(tensors["b"].astype(np.float32), [0.5, 1, 2])
    np.testing.assert_array_equal(tensors["c"], [0, 1, 2])
    assert tensors["none"].shape == (0, 5)
    with pytest.raises(ValueError, match=r"dtype of 'new' must be one of .* got 'F1'"):
        tensors["new"]
    with pytest.raises(KeyError):
        tensors["d"]


DTYPES = [
    *(np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32),
    *(np.uint64, np.int64, np.float16, np.float32, np.float64, jnp.bfloat16),
    *(jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu),
]


def test_writes_what_it_reads(tmp_path, rng):
    tensors = {}
    for dtype in map(np.dtype, DTYPES):
        byte = rng.integers(0, 2, (3, 5, dtype.itemsize), np.uint8)
        tensors[str(dtype)] = byte.view(dtype)[..., 0].T
    tensors["scalar"] = np.float32(3)
    tensors["empty"] = np.zeros((2, 0), np.int8)
    lazy = checkpoints.transpose(draw(rng, 2, 3, 4))
    file = tmp_path / "model.safetensors"
    for _ in range(2):  # the second replaces the first
        checkpoints.save_safetensors(file, tensors | {"lazy": lazy})
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    found = checkpoints.open_safetensors(file)
    assert sorted(found) == sorted([*tensors, "lazy"])
    for name, want in tensors.items():
        assert found[name].dtype == want.dtype
        assert found[name].tobytes() == want.tobytes()
        assert found[name].flags.aligned
        assert not found[name].flags.writeable
    np.testing.assert_array_equal(found["lazy"], lazy)


def test_is_the_library_s_format(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.int8([4])}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    checkpoints.save_safetensors(ours, tensors)
    library.save_file(tensors, theirs)
    for found in (library.load_file(ours), checkpoints.open_safetensors(theirs)):
        assert sorted(found) == ["x", "y"]
        for name, want in tensors.items():
            np.testing.assert_array_equal(found[name], want)


def damaged(file, what):
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    head = {"a": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [0, 4]}}
    if what == "empty":
        return b""
    if what == "short":
        return data[:5]
    if what == "long header":
        return (2**60).to_bytes(8, "little") + data[8:]
    if what == "text":
        return data[:8] + b"x" * size + data[8 + size :]
    if what == "cut":
        return data[:-4]
    if what == "list":
        text = b"[]"
    elif what == "no shape":
        del head["a"]["shape"]
        text = json.dumps(head).encode()
    elif what == "backwards":
        head["a"]["data_offsets"] = [4, 0]
        text = json.dumps(head).encode()
    elif what == "negative":
        head["a"]["shape"] = [-2, -1]
        text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "what",
    [
        *("empty", "short", "long header", "text", "cut", "list", "no shape"),
        *("backwards", "negative"),
    ],
)
def test_damaged_files_are_refused(tmp_path, what):
    file = files(tmp_path)
    file.write_bytes(damaged(file, what))
    with pytest.raises(
        ValueError, match=r"must be whole and in the safetensors format"
    ):
        checkpoints.open_safetensors(file)


def test_a_tensor_of_another_size_is_refused(tmp_path):
    head = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    text = json.dumps(head).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(ValueError, match=r"'a' must have 8 bytes, .* got 4"):
        checkpoints.open_safetensors(file)["a"]


def test_errors_of_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ends in \.safetensors"):
        checkpoints.open_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError):
        checkpoints.open_safetensors(tmp_path / "none.safetensors")
    for name in ("1", "2"):
        file = tmp_path / f"{name}.safetensors"
        checkpoints.save_safetensors(file, {"a": np.zeros(1)})
    with pytest.raises(ValueError, match=r"'a' in 2\.safetensors and in another"):
        checkpoints.open_safetensors(tmp_path)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def weights(**other):
    codes = {
        "gate_up": zeros(2, H, 2, F, dtype=jnp.float8_e4m3fn),
        "gate_up_scales": zeros(2, H // 128, 2, F // 128),
        "down": zeros(2, F, H, dtype=jnp.float8_e4m3fn),
        "down_scales": zeros(2, F // 128, H // 128),
    }
    return checkpoints.quantized_weights(**codes | other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoints.stack({"w.0": zeros(1)}, "v.{}"), r"\['w.0'\], \.\.\."),
        (lambda: checkpoints.stack({"w.0": zeros(1)}, "w.0"), r"must have \{\}"),
        (
            lambda: checkpoints.stack({"w.0": zeros(1), "w.1": zeros(2)}, "w.{}"),
            "one shape and dtype",
        ),
        (
            lambda: checkpoints.stack({"w.0": zeros(1)}, "w.{}", order="io"),
            "order must be",
        ),
        (lambda: checkpoints.unstack(zeros(1, 1, 1), "w.{}", order="io"), "order must"),
        (lambda: checkpoints.transpose(zeros(2, 2)), "at least 3 dimensions"),
        (lambda: checkpoints.transpose(zeros(0, 2, 2)), "at least 3 dimensions"),
        (lambda: checkpoints.gate_up(zeros(2, 3, 4)), r"must be even, got 3 in"),
        (lambda: checkpoints.gate_up(zeros(2, 3, 4), order="oi"), "order must be"),
        (lambda: checkpoints.pair(zeros(1, 2, 3), zeros(1, 3, 2)), "one shape and dty"),
        (lambda: checkpoints.fuse(zeros(1, 2, 3, 4)), r"must be \[E, H, 2, F\]"),
        (lambda: checkpoints.transpose(zeros(1, 2, 3)).view("f2"), "have 4 bytes"),
        (
            lambda: weights(gate_up=zeros(2, H, 2, F)),
            "must have codes in float8_e4m3fn",
        ),
        (lambda: weights(down=zeros(2, H, F, dtype=jnp.float8_e4m3fn)), "the shapes"),
        (
            lambda: weights(down_scales=zeros(2, 1, 2, dtype=np.uint8)),
            "must be float32",
        ),
        (lambda: weights(down_scales=zeros(2, 1, 2, dtype=np.float64)), "exactly, got"),
        (
            lambda: weights(down=zeros(2, F, H, dtype=np.uint8)),
            "float8_e4m3fn, or conv",
        ),
        (
            lambda: checkpoints.save_safetensors("x", {"a": zeros(1, dtype="c8")}),
            "dtype of 'a'",
        ),
        (
            lambda: np.array(checkpoints.transpose(zeros(1, 2, 3)), copy=False),
            "copy must not be False",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message) as found:
        call()
    assert "jax_ep.checkpoints." in str(found.value)


def test_sizes_that_the_format_has_no_blocks_for():
    scales = zeros(2, 1, 2, 1)
    codes = zeros(2, 64, 2, 64, dtype=jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="multiples of 128, and for H=64 and F=64"):
        weights(
            gate_up=codes,
            gate_up_scales=scales,
            down=codes[:, :, 0],
            down_scales=scales[:, :, 0],
        )
