"""formats.quantize and dequantize against NumPy and ml_dtypes, bit for bit."""

from __future__ import annotations

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jax_ep import formats
from support import helpers, oracle, quantizer

QUANTIZED = tuple(quantizer.BLOCKS)
HALVES = ("bfloat16", "float16")
DTYPES = (*HALVES, "float32")
# The error that an element may have, relative to the block's largest element, if
# neither the scale nor a value is at the end of its range.
LOSS = {
    "fp8_block128": 1 / 28,
    "mxfp8": 1 / 17,
    "mxfp4": 1 / 5,
    "fp8_block128_e8m0": 1 / 17,
    "nvfp4": 3 / 17,
}

# The bytes of a bad block's scale.
NAN = {
    "float32": b"\x00\x00\xc0\x7f",
    "float8_e8m0fnu": b"\xff",
    "float8_e4m3fn": b"\x7f",
}

each_format = pytest.mark.parametrize("name", QUANTIZED)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def check(tokens: np.ndarray, name: str, input_scale: float | None = None) -> None:
    """Codes, scales and dequantised values equal NumPy's."""
    g = 1.0 if input_scale is None else input_scale
    scale = None if input_scale is None else jnp.float32(input_scale)
    payload, scales = formats.quantize(tokens, name, scale)
    wanted, wanted_scales = quantizer.quantize(tokens, name, g)
    helpers.assert_bits(payload, wanted, "payload")
    helpers.assert_bits(scales, wanted_scales, "scales")
    back = quantizer.dequantize(wanted, wanted_scales, name, g)
    for dtype in ("float32", tokens.dtype.name):
        values = formats.dequantize(payload, scales, name, scale, dtype=dtype)
        with np.errstate(over="ignore"):
            helpers.assert_bits(np.asarray(values), back.astype(values.dtype), dtype)


def every_pattern(dtype: str) -> np.ndarray:
    return np.arange(65536, dtype=np.uint16).view(oracle.DTYPES[dtype])


@each_format
@pytest.mark.parametrize("dtype", HALVES)
def test_every_pattern_among_its_neighbours(dtype: str, name: str) -> None:
    check(every_pattern(dtype).reshape(64, 1024), name)
    order = np.random.default_rng(1).permutation(65536)
    check(every_pattern(dtype)[order].reshape(64, 1024), name)


@pytest.mark.few(12)
@each_format
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("anchor", [448.0, 6.0, 0.75, 1e-4])
def test_every_pattern_in_one_scale(anchor: float, dtype: str, name: str) -> None:
    """All elements that leave the scale to the first element of the block."""
    block, patterns = quantizer.BLOCKS[name], every_pattern(dtype)
    small = patterns[np.abs(patterns.astype(np.float32)) <= anchor]
    small = np.resize(small, (-(-len(small) // (block - 1)), block - 1))
    first = np.full((len(small), 1), anchor, small.dtype)
    blocks = np.concatenate([first, small], axis=1)
    rows = np.resize(blocks, (-(-len(blocks) // 2) * 2, block)).reshape(-1, 2 * block)
    check(rows, name)
    if name == "nvfp4":
        check(rows, name, 448 * 6 / anchor)


@each_format
def test_every_scale(name: str) -> None:
    """Every byte (for float32 scales every exponent) as a scale, with every code."""
    block = quantizer.BLOCKS[name]
    payload_dtype = formats.payload_dtype(name, "float32")
    scale_dtype = formats.scale_dtype(name)
    assert scale_dtype is not None
    codes = np.arange(256, dtype=np.uint8)
    if payload_dtype == np.uint8:
        payload = codes.repeat(4)[None].repeat(256, 0)
    else:
        payload = codes.repeat(4)[None].repeat(256, 0).view(payload_dtype)
    columns = payload.shape[1] * (2 if payload_dtype == np.uint8 else 1) // block
    if scale_dtype.itemsize == 1:
        scales = np.arange(256, dtype=np.uint8)[:, None].repeat(columns, 1)
        scales = scales.view(scale_dtype)
    else:
        exponents = np.arange(256, dtype=np.uint32)[:, None] << 23
        scales = (exponents.repeat(columns, 1) | 0x1234).view(np.float32)
    for g in (None, 3.7) if name == "nvfp4" else (None,):
        scale = None if g is None else jnp.float32(g)
        actual = formats.dequantize(payload, scales, name, scale)
        wanted = quantizer.dequantize(payload, scales, name, g or 1.0)
        helpers.assert_bits(np.asarray(actual), wanted)


def block_of(draw, dtype: np.dtype, size: int) -> np.ndarray:
    kind = draw(st.sampled_from(("bits", "normal", "tiny", "huge", "zero", "bad")))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "bits":
        return helpers.any_bits(rng, size, dtype)
    values = rng.standard_normal(size).astype(np.float32)
    if kind in ("tiny", "huge"):
        info = jnp.finfo(dtype)
        end = info.smallest_subnormal * 5 if kind == "tiny" else info.max
        with np.errstate(all="ignore"):
            values = values / np.abs(values).max() * np.float32(end)
    elif kind == "zero":
        values = values * 0
    block = values.astype(dtype)
    if kind == "bad":
        block[draw(st.integers(0, size - 1))] = draw(
            st.sampled_from((np.nan, np.inf, -np.inf))
        )
    return block


@st.composite
def tokens(draw, dtype: str, name: str) -> np.ndarray:
    block = quantizer.BLOCKS[name]
    unit = max(block, 32) // block
    count = unit * draw(st.integers(1, 3))
    blocks = [block_of(draw, oracle.DTYPES[dtype], block) for _ in range(count)]
    return np.concatenate(blocks)[None]


@pytest.mark.few(3)
@each_dtype
@each_format
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=25, deadline=None)
def test_blocks(dtype: str, name: str, data) -> None:
    scales = [None]
    if name == "nvfp4":
        scales += [0.0, 1e-30, 448.0, 2688.0, 1e30, -2.0]
        scales += [float("inf"), float("nan")]
    check(data.draw(tokens(dtype, name)), name, data.draw(st.sampled_from(scales)))


@each_dtype
@each_format
def test_special_blocks(dtype: str, name: str) -> None:
    """The contract's rules for special blocks; a bad block does not affect others."""
    block = quantizer.BLOCKS[name]
    rng = np.random.default_rng(2)
    x = helpers.normal(rng, (5, 4 * block), oracle.DTYPES[dtype])
    x[1, block : 2 * block] = 0
    x[2, block] = np.nan
    x[3, 2 * block - 1] = -np.inf
    x[4, block : 2 * block] = np.finfo(np.float16).tiny / 8
    check(x, name)
    plain = formats.quantize(x[:1], name)
    payload, scales = (np.asarray(part) for part in formats.quantize(x, name))
    helpers.assert_bits(payload[:1], plain[0])
    codes = payload.view(np.uint8)
    width = codes.shape[1] // 4
    for row in (2, 3):
        assert set(codes[row, width : 2 * width]) == {
            0 if payload.dtype == np.uint8 else 0x7F
        }
        assert scales[row, 1].tobytes() == NAN[scales.dtype.name]
        alone = np.delete(x[row : row + 1].reshape(4, block), 1, 0).reshape(1, -1)
        if alone.shape[1] % 32 == 0:
            rest = np.delete(codes[row].reshape(4, width), 1, 0).ravel()
            wanted = np.asarray(formats.quantize(alone, name)[0]).view(np.uint8)
            helpers.assert_bits(rest, wanted[0])
    assert not codes[1, width : 2 * width].any()
    zero = {4: np.float32(1e-4) / np.float32(448), 1: 0}[scales.dtype.itemsize]
    if scales.dtype.itemsize == 1:
        assert scales.view(np.uint8)[1, 1] == zero
    else:
        assert scales[1, 1] == zero


@each_dtype
@each_format
def test_round_trip_is_within_the_bound(dtype: str, name: str) -> None:
    block = quantizer.BLOCKS[name]
    rng = np.random.default_rng(3)
    x = helpers.normal(rng, (64, 8 * max(block, 32)), oracle.DTYPES[dtype])
    values = np.asarray(formats.dequantize(*formats.quantize(x, name), name))
    x = x.astype(np.float32).reshape(-1, block)
    lost = np.abs(values.reshape(x.shape) - x).max(1) / np.abs(x).max(1)
    assert lost.max() <= LOSS[name] * (1 + 1e-5)  # the scale is rounded, too
    assert lost.max() > LOSS[name] / 3


@pytest.mark.few(2)
@each_format
def test_shapes(name: str) -> None:
    """Any leading dimensions, also under vmap and inside shard_map."""
    rng = np.random.default_rng(4)
    hidden = 256
    x = jnp.asarray(helpers.normal(rng, (2, 3, 5, hidden), np.float32))
    wanted = formats.quantize(x.reshape(-1, hidden), name)
    for got in (
        formats.quantize(x, name),
        jax.jit(formats.quantize, static_argnums=1)(x, name),
        jax.vmap(lambda rows: formats.quantize(rows, name))(x),
        jax.vmap(jax.vmap(lambda rows: formats.quantize(rows, name)))(x),
    ):
        for part, whole in zip(got, wanted, strict=True):
            assert part.shape[:3] == (2, 3, 5)
            helpers.assert_bits(part.reshape(whole.shape), whole)
    back = formats.dequantize(*formats.quantize(x, name), name)
    assert back.shape == x.shape
    single = formats.quantize(x[0, 0, 0], name)
    assert formats.dequantize(*single, name).shape == (hidden,)
    empty = formats.quantize(x[:0], name)
    assert formats.dequantize(*empty, name).shape == (0, 3, 5, hidden)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    rows = x.reshape(-1, hidden)[:4]
    mapped = jax.shard_map(
        lambda rows: formats.dequantize(*formats.quantize(rows, name), name),
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    helpers.assert_bits(mapped(rows), back.reshape(-1, hidden)[:4])


def test_global_scale_under_vmap() -> None:
    x = jnp.asarray(helpers.normal(np.random.default_rng(5), (3, 4, 64), np.float32))
    g = jnp.asarray([[1.0], [7.5], [448.0]])
    payload, scales = jax.vmap(lambda a, b: formats.quantize(a, "nvfp4", b))(x, g)
    back = jax.vmap(lambda a, b, c: formats.dequantize(a, b, "nvfp4", c))(
        payload, scales, g
    )
    for i in range(3):
        wanted = quantizer.quantize(np.asarray(x[i]), "nvfp4", float(g[i, 0]))
        helpers.assert_bits(payload[i], wanted[0])
        helpers.assert_bits(scales[i], wanted[1])
        helpers.assert_bits(
            np.asarray(back[i]), quantizer.dequantize(*wanted, "nvfp4", float(g[i, 0]))
        )


def test_as_they_are() -> None:
    x = jnp.ones((3, 5), jnp.bfloat16)
    assert formats.quantize(x, "bf16")[1] is None
    helpers.assert_bits(formats.quantize(x, "bf16")[0], x)
    helpers.assert_bits(formats.dequantize(x, None, "bf16"), x)
