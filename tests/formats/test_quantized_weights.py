"""jax_ep.experts.quantize_weights equals NumPy on each matrix, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from jax_ep._experts import hopper_fp8, quantized
from support import fp8_experts, helpers, quantizer
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

L, H, F = 2, 256, 128


def weights(dtype="float32", shape=(L, H, F)):
    """Blocks of many magnitudes, with tiny values, denormals, NaN and infinities."""
    rng = np.random.default_rng(0)
    groups, hidden, inner = shape
    made = []
    for size in ((groups, hidden, 2, inner), (groups, inner, hidden)):
        values = helpers.normal(rng, size, np.float32, spread=8)
        values[0, 128:] *= np.float32(1e-7)
        values[1, :32] *= np.float32(2.0**-130)
        values[1, 64:96] *= np.float32(2.0**115)
        values[1, 70, ..., 3] = np.inf
        values[0, 2, ..., 5] = np.nan
        values[0, 40] = -0.0
        made.append(values.astype(dtype))
    return made


def matrices(array):
    """Each [A, B] of [L, A, ..., B]."""
    flat = np.asarray(array, np.float32)
    flat = flat.reshape(len(flat), flat.shape[1], -1, flat.shape[-1])
    return [[flat[g, :, c] for c in range(flat.shape[2])] for g in range(len(flat))]


def wanted(array, name):
    """Codes and scales of all matrices, stacked as `array`."""
    parts = []
    for group in matrices(array):
        for matrix in group:
            if name == "mxfp4":
                made = quantizer.quantize(np.ascontiguousarray(matrix.T), name)
                parts.append([np.ascontiguousarray(each.T) for each in made])
            else:
                parts.append(fp8_experts.matrix_codes(matrix))
    joined = []
    for each in zip(*parts, strict=True):
        stack = np.stack(each)
        stack = stack.reshape(len(array), -1, *stack.shape[1:])
        joined.append(stack.swapaxes(1, 2) if array.ndim == 4 else stack[:, 0])
    return joined


def assert_codes(made, gate_up, down):
    for name, array in (("gate_up", gate_up), ("down", down)):
        codes, scales = wanted(np.asarray(array), made.format)
        helpers.assert_bits(getattr(made, name), codes, name)
        helpers.assert_bits(getattr(made, f"{name}_scales"), scales, name)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fp8_block128", "mxfp4"])
def test_bits(name, dtype):
    given = weights(dtype, (L, H, F) if name == "fp8_block128" else (L, 96, 160))
    made = jax.jit(experts.quantize_weights, static_argnames="format")(
        *given, format=name
    )
    assert made.format == name
    assert made.shapes == tuple(each.shape for each in given)
    assert_codes(made, *given)
    for which, array in zip(("gate_up", "down"), given, strict=True):
        back = np.asarray(quantized.dequantize(made, which))
        pairs = zip(matrices(back), matrices(array), strict=True)
        for got, matrix in ((a, b) for x in pairs for a, b in zip(*x, strict=True)):
            want = fp8_experts.matrix_values(matrix, name)
            # XLA may flush values below 2^-126.
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=2.0**-125)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fp8_block128", "mxfp4"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded(name, kind):
    """Sharded over experts, and over H as in FSDP; inside and outside of shard_map."""
    mesh = helpers.make_mesh(helpers.fit({"ep": 2, "fsdp": 2}), kind=kind)
    given = weights()
    specs = P("ep", "fsdp"), P("ep", None, "fsdp")
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(given, specs, strict=True)
    ]

    def quantize(gate_up, down):
        return experts.quantize_weights(gate_up, down, format=name).canonical()

    outside = jax.jit(quantize)(*placed)
    assert_codes(outside, *given)
    assert not outside.gate_up.sharding.is_fully_replicated or mesh.size == 1
    out = experts.QuantizedWeights(*specs[:1] * 2, *specs[1:] * 2, format=name)

    def gathered(gate_up, down):
        made = quantize(gate_up, down)
        gather = jax.lax.all_gather
        return experts.QuantizedWeights(
            *(
                gather(part, "fsdp", axis=1, tiled=True)
                for part in (made.gate_up, made.gate_up_scales)
            ),
            *(
                gather(part, "fsdp", axis=2, tiled=True)
                for part in (made.down, made.down_scales)
            ),
            format=name,
        )

    for body, result in ((quantize, out), (gathered, P("ep"))):
        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=specs,
            out_specs=result,
            check_vma=body is quantize,
        )
        assert_codes(jax.jit(run)(*placed), *given)


@pytest.mark.parametrize(("name", "hidden"), [("fp8_block128", 384), ("mxfp4", 96)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharding_that_would_cut_blocks(kind, name, hidden):
    """Blocks that sharding would cut are gathered, whatever the type of the axes."""
    mesh = helpers.make_mesh(helpers.fit({"fsdp": 2}), kind=kind)
    given = weights(shape=(L, hidden, 2 * hidden))
    specs = P(None, "fsdp"), P(None, None, "fsdp")
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip(given, specs, strict=True)
    ]
    quantize = jax.jit(experts.quantize_weights, static_argnames="format")
    assert_codes(quantize(*placed, format=name), *given)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tiles_of_sharded_codes(kind):
    """What Hopper's kernels read of "mxfp4", for codes that are sharded in any way."""
    given = weights(shape=(L, 128, 192))
    quantize = jax.jit(experts.quantize_weights, static_argnames="format")
    prepare = jax.jit(hopper_fp8.HopperOperations().prepare)
    whole = quantize(*given, format="mxfp4").canonical()
    mesh = helpers.make_mesh(helpers.fit({"ep": 2, "fsdp": 2}), kind=kind)
    for spec in (P("ep"), P("ep", "fsdp"), P(None, None, None, "fsdp")):
        placed = jax.tree.map(
            lambda part, spec=spec: jax.device_put(
                part, NamedSharding(mesh, P(*spec[: part.ndim]))
            ),
            whole,
        )
        made = prepare(placed)
        assert made.gate_up_transposed is not None
        jax.tree.map(helpers.assert_bits, made, prepare(whole))


def test_no_gradients_pass():
    given = weights()

    def loss(gate_up, down):
        return jnp.sum(experts.quantize_weights(gate_up, down).gate_up_scales)

    for each in jax.grad(loss, (0, 1))(*map(np.nan_to_num, given)):
        assert not np.any(each)


@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e-24, 1e-10, 3.0])
def test_cotangents_have_a_floor_of_their_own(amax):
    rng = np.random.default_rng(0)
    values = rng.uniform(-amax, amax, (3, 256)).astype(np.float32)
    values[1, 130] = np.nan
    codes, scales = jax.jit(quantized.quantize_cotangents)(values)
    blocks = values.reshape(3, 2, 128)
    want, want_scales = fp8_experts.block_codes(blocks, (2,), 2.0**-80)
    helpers.assert_bits(codes, want.reshape(values.shape))
    want_scales = want_scales[..., 0]
    if jax.default_backend() == "gpu":
        # XLA's division is not correctly rounded on GPUs.
        np.testing.assert_array_max_ulp(np.asarray(scales), want_scales, 1)
    else:
        helpers.assert_bits(scales, want_scales)
    assert np.any(np.asarray(codes[0], np.float32)) == (amax > 1e-25)


GATE_UP, DOWN = np.zeros((1, H, 2, F), np.float32), np.zeros((1, F, H), np.float32)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ((GATE_UP, DOWN), {"format": "mxfp8"}, ("format", "'mxfp8'")),
        ((GATE_UP[..., :64], DOWN[:, :64]), {}, ("128", "F = 64")),
        ((GATE_UP[:, :16], DOWN[..., :16]), {"format": "mxfp4"}, ("32", "H = 16")),
        ((GATE_UP, DOWN[..., :128]), {}, ("gate_up and down",)),
        ((GATE_UP.astype(jnp.float8_e4m3fn), DOWN), {}, ("gate_up", "float8_e4m3fn")),
        ((GATE_UP, [1.0]), {}, ("down", "array")),
    ],
)
def test_mistakes(given, options, words):
    with raises() as caught:
        experts.quantize_weights(*given, **options)
    check_form(caught, "experts.quantize_weights", *words)


def test_the_rule_of_rows_is_that_of_formats():
    """A matrix of 128 equal rows has the codes of one row in "fp8_block128"."""
    row = np.random.default_rng(0).standard_normal(128).astype(np.float32)
    matrix = np.tile(row, (1, 128, 1))
    gate_up = np.stack([matrix, matrix], 2)
    made = experts.quantize_weights(gate_up, matrix)
    codes, scales = jax_ep.formats.quantize(row, "fp8_block128")
    helpers.assert_bits(made.down[0, 5], codes)
    helpers.assert_bits(made.gate_up[0, 5, 1], codes)
    helpers.assert_bits(made.down_scales[0, 0], scales)
