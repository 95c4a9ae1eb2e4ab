"""The kernels of fp8 experts for Hopper, and the operations that use them.

On a Hopper GPU tests of kernels run the real ones. On CPUs they check the stand-ins of
support/grouped_kernels.py, which the other tests use there.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import experts, formats
from jax_ep._experts import (
    activations,
    devices,
    hopper_fp8,
    kernels,
    mxfp4,
    operations,
    quantized,
    select,
)
from jax_ep._experts.hopper_fp8 import HopperOperations
from jax_ep._experts.kernels import Fp8Rows
from jax_ep._experts.operations import Inner, Operations, Rows
from jax_ep._native import tables
from support import fp8_experts as formula
from support import grouped_kernels, helpers
from support.fp8_experts import dispatched, distance
from support.grouped_kernels import group_masks, skip_without_hopper

pytestmark = pytest.mark.usefixtures("quick_compiles")

THOROUGH = pytest.mark.thorough
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
# Group sizes, rows of the operand, A, B.
CASES = [
    ((10, 0, 25), 48, 256, 128),
    ((1,) * 8, 104, 128, 256),
    ((7, 0, 3, 70, 64, 0, 1, 50), 200, 128, 128),
    ((0, 0), 16, 128, 128),
]
LARGE = [
    ((700, 0, 3, 129, 64, 0, 1, 100), 1000, 1536, 640),
    ((512, 512), 1024, 512, 1024),
    ((300, 0, 20), 2048, 1024, 256),
    (tuple(range(0, 330, 10)), 6000, 256, 512),
]
ALL = grouped_kernels.weighed(CASES, LARGE)
# The tensor cores keep some 14 bits of the sums of 128 products.
SUMS = 3e-4


@pytest.fixture
def ready(monkeypatch):
    """The real kernels on Hopper; elsewhere stand-ins, whose names are collected."""
    if jax.default_backend() == "cpu":
        return grouped_kernels.fake(monkeypatch)
    return skip_without_hopper()


def codes_and_values(values, axes):
    """Codes, scales and float64 values of float32 input, per 128 along `axes`."""
    shape, at = [], []
    for axis, size in enumerate(values.shape):
        if axis in axes:
            at.append(len(shape) + 1)
            shape += [size // 128, 128]
        else:
            shape.append(size)
    codes, scales = formula.block_codes(values.reshape(shape), tuple(at), 1e-4)
    exact = codes.astype(np.float64) * scales
    return (
        jnp.asarray(codes.reshape(values.shape)),
        jnp.asarray(np.squeeze(scales, tuple(at))),
        exact.reshape(values.shape),
    )


def rows_of(rng, sizes, count, columns):
    """Codes and values; rows past the groups are NaN in both."""
    values = rng.standard_normal((count, columns)).astype(np.float32)
    values *= np.exp2(rng.integers(-3, 4, (count, 1))).astype(np.float32)
    codes, scales, exact = codes_and_values(values, (1,))
    past = np.arange(count) >= sum(sizes)
    codes = codes.at[past].set(jnp.nan)
    scales = scales.at[past].set(jnp.nan)
    return Fp8Rows(codes, scales), exact


def matrices_of(rng, *shape):
    """Codes, scales and values of `[L, A, ..., B]`."""
    values = rng.standard_normal(shape).astype(np.float32) / np.float32(shape[1] ** 0.5)
    values[:, :128] *= 4  # so that scales differ
    return codes_and_values(values, (1, len(shape) - 1))


def products(rows, matrices, sizes):
    """Products of rows in groups with `[L, A, B]`, and the products of magnitudes."""
    out = np.zeros((2, sum(sizes), matrices.shape[2]))
    ends = np.cumsum(sizes)
    for group, end in enumerate(ends):
        own = slice(end - sizes[group], end)
        out[0, own] = rows[own] @ matrices[group]
        out[1, own] = np.abs(rows[own]) @ np.abs(matrices[group])
    return out


def assert_within(found, want, bound):
    excess = np.abs(np.asarray(found).astype(np.float64) - want) - bound
    assert np.all(excess <= 0), excess.max(initial=0)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("dtype", "unit"),
    [("bfloat16", 2.0**-8), ("float32", 2.0**-23), ("float16", 2.0**-10)],
)
@pytest.mark.parametrize("name", ["fprop", "dgrad"])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_fp8_matmuls(sizes, count, a, b, name, dtype, unit, ready):
    """With transposed codes, and with transposed matrices in place."""
    rng = np.random.default_rng(0)
    rows, values = rows_of(rng, sizes, count, a)
    shape = (len(sizes), a, b) if name == "fprop" else (len(sizes), b, a)
    codes, scales, matrices = matrices_of(rng, *shape)
    given = quantized.transpose(codes) if name == "fprop" else codes
    run = jax.jit(getattr(kernels, f"fp8_{name}"), static_argnames="dtype")
    groups = jnp.array(sizes, jnp.int32)
    found = run(rows, given, scales, groups, dtype=jnp.dtype(dtype))
    assert found.dtype == jnp.dtype(dtype)
    assert found.shape == (count, b)
    matrices = matrices if name == "fprop" else matrices.swapaxes(1, 2)
    want, magnitudes = products(values, matrices, sizes)
    bound = SUMS * magnitudes + unit * np.abs(want)
    assert_within(found[: sum(sizes)], want, bound)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_fp8_gate_up(sizes, count, a, b, keep, ready):
    rng = np.random.default_rng(0)
    rows, values = rows_of(rng, sizes, count, a)
    codes, scales, matrices = matrices_of(rng, len(sizes), a, 2, b)
    run = jax.jit(functools.partial(kernels.fp8_gate_up, keep=keep))
    groups, total = jnp.array(sizes, jnp.int32), sum(sizes)
    h, gate_up_rows = run(rows, quantized.transpose(codes), scales, groups)
    assert h.codes.shape == (count, b)
    side_by_side = matrices.reshape(len(sizes), a, 2 * b)
    sums, magnitudes = products(values, side_by_side, sizes)
    (gate, up), (gates, ups) = (np.split(e, 2, axis=1) for e in (sums, magnitudes))
    want = gate * formula.sigmoid(gate) * up
    bound = 2 * SUMS * (gates * np.abs(up) + ups * np.abs(gate) + SUMS * gates * ups)
    bound += 1e-6 * np.abs(want)
    # A code is off by half a unit: 1/16 of its value or of the least normal value.
    spread = np.repeat(np.asarray(h.scales, np.float64), 128, 1)[:total]
    found = np.asarray(h.codes, np.float64)[:total] * spread
    assert_within(found, want, 1.01 * bound + np.abs(want) / 16 + spread * 2.0**-10)
    largest, widest = (
        each.reshape(total, b // 128, 128).max(2) for each in (np.abs(want), bound)
    )
    floor = np.maximum(largest, 1e-4)
    assert_within(h.scales[:total] * 448.0, floor, widest + 1e-6 * floor)
    assert (gate_up_rows is not None) == keep
    if gate_up_rows is not None:
        assert gate_up_rows.dtype == jnp.bfloat16
        flat = gate_up_rows[:total].reshape(total, 2 * b)
        assert_within(flat, sums, SUMS * magnitudes + 2.0**-8 * np.abs(sums))


@pytest.mark.few(6)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_mxfp4(sizes, count, a, b, gate_up, coded, ready):
    rng = np.random.default_rng(0)
    rows, values = rows_of(rng, sizes, count, a)
    scales = rows.scales
    if not coded:
        plain = jnp.asarray(np.where(np.isnan(values), 0, values), jnp.bfloat16)
        past = np.arange(count) >= sum(sizes)
        rows, scales = Fp8Rows(plain.at[past].set(jnp.nan), scales), None
        values = np.asarray(plain, np.float64)
    sides = (2,) if gate_up else ()
    codes = rng.integers(0, 256, (len(sizes), a // 2, *sides, b)).astype(np.uint8)
    exponents = rng.integers(112, 128, (len(sizes), a // 32, *sides, b))
    powers = jnp.asarray(exponents, jnp.uint8)
    powers = jax.lax.bitcast_convert_type(powers, jnp.float8_e8m0fnu)
    tiles = mxfp4.tiles(jnp.asarray(codes), powers)
    nibbles = np.stack([codes & 15, codes >> 4], 2).reshape(len(sizes), a, *sides, b)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7]
    matrices = np.where(nibbles & 8, -magnitudes, magnitudes)
    matrices = matrices * np.repeat(np.exp2(exponents - 127.0), 32, 1)
    total = sum(sizes)
    sums, sizes_of_sums = products(values, matrices.reshape(len(sizes), a, -1), sizes)
    for dtype, unit in ((jnp.float32, 2.0**-23), (jnp.bfloat16, 2.0**-8)):
        run = kernels.mxfp4_gate_up if gate_up else kernels.mxfp4_fprop
        given = rows.codes.astype(jnp.bfloat16)
        found = run(given, scales, tiles, jnp.array(sizes, jnp.int32), b, dtype)
        assert found.dtype == dtype
        assert found.shape == (count, b)
        # Only the order of float32 sums differs.
        off = 1e-5 * sizes_of_sums
        want, bound = sums, off
        if gate_up:
            (gate, up), (gate_off, up_off) = (
                np.split(x, 2, axis=1) for x in (sums, off)
            )
            want = gate * formula.sigmoid(gate) * up
            bound = 2 * (gate_off * np.abs(up) + up_off * np.abs(gate))
            bound += 2 * gate_off * up_off + 1e-5 * np.abs(want)
        assert_within(found[:total], want, bound + unit * np.abs(want) + 1e-30)


def whole_numbers(rng, sizes, count, a, b):
    """Rows and matrices `[L, A, 2, B]` of small integers, with a scale of 1.

    Gate is from 64 to 448, so that its sigmoid is 1 and h is a product of integers.
    """
    rows = rng.integers(-1, 2, (count, a)).astype(np.float32)
    matrices = rng.integers(-1, 2, (len(sizes), a, 2, b)).astype(np.float32)
    rows[:, 0], matrices[:, 0, 0] = 16, 16
    # Few other terms in gate.
    matrices[:, 1:, 0] *= rng.random((len(sizes), a - 1, b)) < 0.25
    parts = products(rows, matrices.reshape(len(sizes), a, -1), sizes)[0]
    gate, up = np.split(parts, 2, axis=1)
    assert gate.min(initial=256) > 100
    assert gate.max(initial=256) < 448
    scales = jnp.ones((count, a // 128), jnp.float32)
    of_matrices = jnp.ones((len(sizes), a // 128, 2, b // 128), jnp.float32)
    rows = Fp8Rows(jnp.asarray(rows, E4M3), scales)
    return rows, jnp.asarray(matrices, E4M3), of_matrices, gate, up


@pytest.mark.parametrize("count", [35, 200])
def test_h_is_quantised_as_rows_are(count, ready):
    """Codes of h are, bit for bit, those of `formats.quantize` of its float32."""
    rng = np.random.default_rng(0)
    sizes, a, b = (10, 0, 25), 256, 384
    rows, matrices, scales, gate, up = whole_numbers(rng, sizes, count, a, b)
    up_scale = np.float32(2.0**-16)  # the last blocks are below the floor
    scales = scales.at[:, :, 1, 2].set(up_scale)
    h, gate_up_rows = kernels.fp8_gate_up(
        rows, quantized.transpose(matrices), scales, jnp.array(sizes, jnp.int32), True
    )
    assert gate_up_rows is not None
    up[:, 256:] *= up_scale
    want = (gate * up).astype(np.float32)
    codes, want_scales = formats.quantize(want, "fp8_block128")
    helpers.assert_bits(h.codes[: sum(sizes)], codes)
    helpers.assert_bits(h.scales[: sum(sizes)], want_scales)
    kept = np.stack([gate, up], 1).astype(np.float32).astype(BF16)
    helpers.assert_bits(gate_up_rows[: sum(sizes)], kept)


@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_fp8_down_dgrad(sizes, count, a, b, ready):
    rng = np.random.default_rng(0)
    rows, values = rows_of(rng, sizes, count, a)
    codes, scales, matrices = matrices_of(rng, len(sizes), b, a)
    gate_up_rows = rng.standard_normal((count, 2, b)).astype(BF16)
    groups, total = jnp.array(sizes, jnp.int32), sum(sizes)
    found, found_scales, plain = jax.jit(kernels.fp8_down_dgrad)(
        rows, codes, scales, jnp.asarray(gate_up_rows), groups
    )
    to_h, magnitudes = products(values, matrices.swapaxes(1, 2), sizes)
    gate, up = np.moveaxis(gate_up_rows[:total].astype(np.float64), 1, 0)
    sigmoid = formula.sigmoid(gate)
    slopes = np.stack([up * sigmoid * (1 + gate * (1 - sigmoid)), gate * sigmoid], 1)
    want = to_h[:, None] * slopes
    bound = SUMS * magnitudes[:, None] * np.abs(slopes)
    bound += 2e-6 * np.abs(to_h[:, None]) * (1 + np.abs(up[:, None]))
    assert plain.dtype == jnp.bfloat16
    assert_within(plain[:total], want, bound + 2.0**-8 * np.abs(want))
    spread = np.repeat(np.asarray(found_scales, np.float64), 128, 2)[:total]
    decoded = np.asarray(found, np.float64)[:total] * spread
    assert_within(decoded, want, 1.01 * bound + np.abs(want) / 16 + spread * 2.0**-10)


@pytest.mark.parametrize("exponent", [0, -33, -70, -118])
def test_cotangents_are_quantised_with_their_own_floor(exponent, ready):
    """Bit for bit; cotangents of 2^-33, about 1e-10, lose nothing."""
    rng = np.random.default_rng(0)
    sizes, count, a, b = (10, 0, 25), 48, 128, 256
    cotangents = rng.integers(-3, 4, (count, a)).astype(np.float32)
    matrices = rng.integers(-1, 2, (3, b, a)).astype(np.float32)
    gate_up_rows = np.stack(
        [rng.integers(64, 128, (count, b)), rng.integers(-8, 9, (count, b))], 1
    ).astype(np.float32)
    size = np.float32(2.0**exponent)
    given = Fp8Rows(
        jnp.asarray(cotangents, E4M3), jnp.full((count, a // 128), size, jnp.float32)
    )
    found, scales, plain = kernels.fp8_down_dgrad(
        given,
        jnp.asarray(matrices, E4M3),
        jnp.ones((3, b // 128, a // 128), jnp.float32),
        jnp.asarray(gate_up_rows, BF16),
        jnp.array(sizes, jnp.int32),
    )
    total = sum(sizes)
    to_h = products(cotangents, matrices.swapaxes(1, 2), sizes)[0] * size
    # The slope of silu is 1 there.
    want = (to_h[:, None] * gate_up_rows[:total, ::-1]).astype(np.float32)
    blocks = want.reshape(total, 2, b // 128, 128)
    codes, want_scales = formula.block_codes(blocks, (3,), 2.0**-80)
    helpers.assert_bits(found[:total], codes.reshape(want.shape))
    helpers.assert_bits(scales[:total], want_scales[..., 0])
    helpers.assert_bits(plain[:total], want.astype(BF16))
    assert np.any(codes.astype(np.float32)) == (exponent > -90)


# Group sizes and numbers of rows; sizes may reach past the rows or be negative.
ROWS_IN_GROUPS = [
    ((3, 0, 2), 5),
    ((1, 0, 2), 5),
    ((0,), 5),
    ((2, 9), 5),
    ((-3, 2), 5),
    ((300, *range(70)), 3000),
]


@pytest.mark.few(24)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("amax", [0.0, 1e-30, 1e-10, 3.0])
@pytest.mark.parametrize(("sizes", "count"), ROWS_IN_GROUPS)
def test_rows_of_cotangents(amax, dtype, sizes, count, ready):
    """Quantises with the floor of gradients, and no row past the groups."""
    rng = np.random.default_rng(0)
    values = rng.uniform(-amax, amax, (count, 384)).astype(dtype)
    values[1, 130] = np.nan
    groups = jnp.array(sizes, jnp.int32)
    made = jax.jit(kernels.quantize_cotangents)(jnp.asarray(values), groups)
    blocks = values.astype(np.float32).reshape(count, 3, 128)
    codes, scales = formula.block_codes(blocks, (2,), 2.0**-80)
    real = slice(min(sum(max(size, 0) for size in sizes), count))
    helpers.assert_bits(made.codes[real], codes.reshape(values.shape)[real])
    helpers.assert_bits(made.scales[real], scales[real, :, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "count"), ROWS_IN_GROUPS)
def test_rows_of_codes(dtype, sizes, count, ready):
    """The same values as from `formats.dequantize`."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((count, 384)).astype(np.float32)
    values[1, 130] = np.nan
    rows = Fp8Rows(*formats.quantize(jnp.asarray(values), "fp8_block128"))
    groups = jnp.array(sizes, jnp.int32)
    run = functools.partial(kernels.dequantize, dtype=dtype)
    real = slice(min(sum(max(size, 0) for size in sizes), count))
    want = formats.dequantize(*rows, "fp8_block128", dtype=dtype)
    helpers.assert_bits(jax.jit(run)(rows, groups)[real], want[real])


def test_nan_stays_in_its_row(ready):
    sizes, count, a, b = (10, 0, 25), 48, 128, 128
    rng = np.random.default_rng(0)
    rows, _ = rows_of(rng, sizes, count, a)
    codes, scales, _ = matrices_of(rng, 3, a, 2, b)
    bad = Fp8Rows(rows.codes.at[3].set(jnp.nan), rows.scales.at[3].set(jnp.nan))
    groups = jnp.array(sizes, jnp.int32)
    run = jax.jit(functools.partial(kernels.fp8_gate_up, keep=True))
    (want, gate_up_rows), (found, bad_rows) = (
        run(each, quantized.transpose(codes), scales, groups) for each in (rows, bad)
    )
    others = np.delete(np.arange(sum(sizes)), 3)
    for got, one in ((found.codes, want.codes), (found.scales, want.scales)):
        helpers.assert_bits(got[others], one[others])
        assert np.isnan(np.asarray(got[3], np.float32)).all()
    assert np.all(np.asarray(found.codes[3]).view(np.uint8) == 0x7F)
    assert np.all(np.asarray(found.scales[3]).view(np.uint32) == 0x7FC00000)
    helpers.assert_bits(bad_rows[others], gate_up_rows[others])


@pytest.mark.gpu
def test_sums_of_one_sign_lose_nothing():
    """Without promotion to float32 a sum of 7168 products would be far too small."""
    skip_without_hopper()
    rng = np.random.default_rng(0)
    sizes, a, b = (200, 0, 56), 7168, 256
    given = rng.uniform(0.5, 1.5, (256, a)).astype(np.float32)
    codes, row_scales, values = codes_and_values(given, (1,))
    weights = rng.uniform(0.5, 1.5, (3, a, b)).astype(np.float32)
    matrices, matrix_scales, exact = codes_and_values(weights, (1, 2))
    found = kernels.fp8_fprop(
        Fp8Rows(codes, row_scales),
        quantized.transpose(matrices),
        matrix_scales,
        jnp.array(sizes, jnp.int32),
        jnp.float32,
    )
    want, _ = products(values, exact, sizes)
    assert abs(np.sum(np.asarray(found, np.float64)) / np.sum(want) - 1) < 5e-4


def odd_matrices(dtype, *shape):
    """Blocks of many sizes, with denormals, NaN, infinities and -0."""
    rng = np.random.default_rng(0)
    values = helpers.normal(rng, shape, np.float32, spread=8)
    values[0, :, :, 128:] *= np.float32(1e-7)
    values[-1, :32] *= np.float32(2.0**-130)
    values[-1, 70, 0, 3] = np.inf
    values[0, 2, -1, 5] = np.nan
    values[0, 40] = -0.0
    values[-1, 128:, -1] = 0.0
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "shape", [(2, 256, 2, 384), (1, 128, 1, 128), (3, 384, 1, 256)], ids=str
)
def test_matrices_become_codes(shape, dtype, ready):
    """Bit for bit as in NumPy, in both orders."""
    matrices = odd_matrices(dtype, *shape)
    codes, scales, transposed = jax.jit(kernels.quantize_matrices)(
        jnp.asarray(matrices)
    )
    for group in range(shape[0]):
        for side in range(shape[2]):
            want = formula.matrix_codes(matrices[group, :, side])
            helpers.assert_bits(codes[group, :, side], want[0])
            helpers.assert_bits(scales[group, :, side], want[1])
            helpers.assert_bits(
                transposed[group, side], np.ascontiguousarray(want[0].T)
            )


@pytest.mark.parametrize("sides", [(), (2,)])
@pytest.mark.parametrize("octaves", [14, 40])
def test_mxfp4_becomes_fp8(sides, octaves, ready):
    """Exact within 14 octaves of a block, and beyond rounded by a share of it."""
    random = np.random.default_rng(octaves)
    codes = random.integers(0, 256, (2, 128, *sides, 256), np.uint8)
    byte = random.integers(120 - octaves, 121, (2, 8, *sides, 256)).astype(np.uint8)
    byte[:, 0, ..., 0] = 120
    byte[1] -= 75  # small scales, too
    byte[0, 4, ..., 3] = 0xFF
    byte[1, :4, ..., 128:] = 0
    scales = jax.lax.bitcast_convert_type(jnp.asarray(byte), jnp.float8_e8m0fnu)
    made, shared = jax.jit(kernels.fp8_of_mxfp4)(codes, scales)
    assert made.dtype == jnp.float8_e4m3fn
    assert shared.dtype == jnp.float32
    assert shared.shape == (2, 2, *sides, 2)
    own = np.repeat(np.repeat(np.asarray(shared, np.float64), 128, 1), 128, -1)
    found = np.moveaxis(np.asarray(made, np.float64), -1, 1) * own
    bits = np.stack([codes & 0xF, codes >> 4], 2).reshape(found.shape)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[bits & 7] * (1.0 - (bits >> 3) * 2)
    bad = np.repeat(byte == 0xFF, 32, 1)
    wanted = values * 2.0 ** (np.repeat(byte, 32, 1) - 127.0)
    np.testing.assert_array_equal(np.isnan(found), bad)
    # Half of e4m3's smallest number.
    bound = 0 if octaves == 14 else 2.0**-10
    assert np.all((np.abs(found - wanted) <= bound * own) | bad)
    assert octaves == 14 or np.any((found != wanted) & ~bad)
    if ready is None:
        want = jax.jit(grouped_kernels.fp8_of_mxfp4)(codes, scales)
        bits = [np.asarray(each).view(np.uint8) for each in (made, want[0])]
        # A NaN may have a sign.
        bad = np.moveaxis(bad, 1, -1)
        helpers.assert_bits(*(np.where(bad, 0, each) for each in bits))
        helpers.assert_bits(shared, want[1])


# Group sizes, rows of the operand.
TRANSPOSED = [((10, 0, 25), 48), ((130, 1, 0, 257), 400), ((0, 0), 16), ((5, 300), 200)]


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["rows", "codes", "powers"])
@pytest.mark.parametrize(("sizes", "count"), TRANSPOSED, ids=str)
def test_rows_are_transposed(sizes, count, kind, ready):
    """By blocks of a group's 128 rows; codes by powers of two stay exact."""
    rng = np.random.default_rng(count)
    held = np.diff(np.minimum(np.cumsum((0, *sizes)), count))
    rows, values = rows_of(rng, held, count, 256)
    if kind == "rows":
        rows = jnp.asarray(values.astype(BF16)).at[held.sum() :].set(jnp.nan)
        values = np.asarray(rows, np.float64)
    elif kind == "powers":
        powers = np.exp2(rng.integers(-9, 3, (count, 2))).astype(np.float32)
        rows = Fp8Rows(rows.codes, jnp.asarray(powers))
        values = np.asarray(rows.codes, np.float64) * np.repeat(powers, 128, 1)
    made = jax.jit(kernels.transpose)(rows, jnp.array(sizes, jnp.int32))
    padded = -(-held // 128) * 128
    np.testing.assert_array_equal(made.padded_sizes, padded)
    assert made.codes.shape == (256, kernels.padded_rows(count, len(sizes)))
    assert made.codes.dtype == jnp.float8_e4m3fn
    factors = np.repeat(np.repeat(np.asarray(made.scales, np.float64), 128, 0), 128, 1)
    found = np.asarray(made.codes, np.float64).T * factors
    start = at = 0
    for size, room in zip(held, padded, strict=True):
        own = values[start : start + size]
        np.testing.assert_array_equal(found[at : at + size], formula.block_values(own))
        exact = (np.abs(own) >= np.abs(own).max(initial=0) * 2.0**-13) | (own == 0)
        assert kind != "powers" or np.all((found[at : at + size] == own) | ~exact)
        assert not found[at + size : at + room].any()
        start, at = start + size, at + room


@pytest.mark.parametrize("side", [None, 0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(10, 0, 25), (130, 1, 300, 5)], ids=str)
def test_fp8_wgrad(sizes, dtype, side, ready):
    rng = np.random.default_rng(len(sizes))
    count, a, b = sum(sizes) + 9, 128, 256
    rows, values = rows_of(rng, sizes, count, a)
    back = rng.standard_normal((count, b if side is None else 2 * b)).astype(BF16)
    back[sum(sizes) :] = np.nan

    @jax.jit
    def run(rows, back, sizes):
        given = (kernels.transpose(each, sizes) for each in (rows, back))
        return kernels.fp8_wgrad(*given, jnp.dtype(dtype), side)

    found = run(rows, back, jnp.array(sizes, jnp.int32))
    assert found.dtype == jnp.dtype(dtype)
    back = back.astype(np.float64)
    back = back if side is None else back[:, side * b : (side + 1) * b]
    start = 0
    for size, got in zip(sizes, found, strict=True):
        own = slice(start, start + size)
        start += size
        left, right = (formula.block_values(each[own]) for each in (values, back))
        want = left.T @ right
        bound = SUMS * (np.abs(left).T @ np.abs(right)) + 1e-30
        # Tokens differ in size, and each loses what is below 14 bits of the largest.
        most = (np.abs(each).max(0, initial=0) for each in (left, right))
        bound += size * 2.0**-14 * np.outer(*most)
        rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-22
        assert_within(got, want, bound + rounding * np.abs(want))


# ---- Operations made of them ----------------------------------------------------

SIZES, COUNT, H, F = (10, 0, 25), 48, 256, 128


# Relative to a norm. The kernels' sums have 14 bits, so some codes of them differ.
CLOSE = 3e-3 if jax.default_backend() == "cpu" else 1e-2


def weights_of():
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    made = both()[0].quantize_weights(gate_up, down, "fp8_block128", True)
    values = np.nan_to_num(rows).astype(np.float32)
    return operations.quantized_rows(jnp.asarray(values)), made


class Compiled:
    """Operations that are a program each; outside of jit each has dozens."""

    def __init__(self, operations):
        self._operations = operations

    def __getattr__(self, name):
        return helpers.in_one_program(getattr(self._operations, name))


def both():
    """The operations of Hopper and those of every device."""
    return Compiled(HopperOperations()), Compiled(Operations())


def reference_codes(gate_up, down):
    """Computed on the CPU, as XLA's division on GPUs is off by a unit."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return quantized.quantize(
            jnp.asarray(gate_up), jnp.asarray(down), "fp8_block128"
        )


@pytest.mark.slow
def test_weights_are_transposed_in_one_pass(ready):
    _, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    made = experts.quantize_weights(gate_up, down)
    plain = reference_codes(gate_up, down)
    jax.tree.map(helpers.assert_bits, made.canonical(), plain)
    assert made.canonical().gate_up_transposed is None
    helpers.assert_bits(
        made.gate_up_transposed, np.transpose(plain.gate_up, (0, 2, 3, 1))
    )
    helpers.assert_bits(made.down_transposed, np.transpose(plain.down, (0, 2, 1)))
    if ready is not None:
        assert ready == ["quantize_matrices"] * 2
    assert len(jax.tree.leaves(made)) == 6
    assert len(jax.tree.leaves(made.canonical())) == 4
    four = experts.quantize_weights(gate_up, down, format="mxfp4")
    assert four.gate_up_transposed.shape == (3, 2 * F // 128, H // 32, 2176)
    assert four.down_transposed.shape == (3, H // 128, F // 32, 2176)
    # Edges are padded to whole tiles.
    odd = experts.quantize_weights(gate_up[..., :96], down[:, :96], format="mxfp4")
    assert odd.gate_up_transposed.shape == (3, 2, H // 32, 2176)
    assert odd.down_transposed.shape == (3, H // 128, 4, 2176)


def test_a_pair_of_masters_is_not_joined(monkeypatch):
    """Inside of shard_map, where a training step quantises them."""
    grouped_kernels.pretend(monkeypatch)
    axes = (AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("ep",), axes, devices=jax.devices()[:1])
    side = jax.ShapeDtypeStruct((3, 256, 128), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((3, 128, 256), jnp.bfloat16)

    def run(gate, up, down):
        return experts.quantize_weights((gate, up), down)

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    traced = jax.jit(mapped).trace(side, side, down)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ep_quantize_matrices(") == 2
    assert "tensor<3x256x2x128xbf16>" not in text


@pytest.mark.parametrize("canonical", [False, True])
def test_operations_equal_the_reference(canonical, ready):
    """All operations; the call transposes codes that come from a checkpoint."""
    rows, weights = weights_of()
    weights = weights.canonical() if canonical else weights
    sizes = jnp.array(SIZES, jnp.int32)
    real = slice(sum(SIZES))
    inner = Inner(None, None, (), None, kernels.SWIGLU)
    here, there = both()
    h, gate_up_rows = here.gate_up(rows, weights, sizes, inner, True, "bfloat16")
    want, wanted = there.gate_up(rows, weights, sizes, inner, True, "bfloat16")
    assert distance(h.to("float32")[real], want.to("float32")[real]) < CLOSE
    assert distance(gate_up_rows[real], wanted[real]) < CLOSE
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((COUNT, H)), jnp.float32)
    cotangents = here.quantize_cotangents(dy, sizes)
    others = there.quantize_cotangents(dy, sizes)
    assert distance(cotangents.to("float32")[real], others.to("float32")[real]) < CLOSE
    found = here.down_dgrad(cotangents, weights, sizes, inner, gate_up_rows)
    reference = there.down_dgrad(cotangents, weights, sizes, inner, gate_up_rows)
    assert found[2] == reference[2] == ()
    assert distance(found[1][real], reference[1][real]) < CLOSE
    codes, others = (each[0].to("float32")[real] for each in (found, reference))
    assert codes.shape == others.shape == (sum(SIZES), 2 * F)
    assert distance(codes, others) < CLOSE
    for name, which, operand in (
        ("fprop", "gate_up", rows),
        ("dgrad", "gate_up", found[0]),
        ("fprop", "down", h),
        ("dgrad", "down", cotangents),
    ):
        got, one = (
            getattr(each, name)(operand, weights, which, sizes, jnp.float32)
            for each in (here, there)
        )
        assert got.shape == one.shape
        assert distance(got[real], one[real]) < CLOSE, (name, which)
    for dtype in ("float32", "bfloat16", "float16"):
        got, one = (
            each.wgrad(rows, dy, sizes, jnp.dtype(dtype)) for each in (here, there)
        )
        assert got.dtype == one.dtype == jnp.dtype(dtype)
        assert distance(got, one) < CLOSE
        for side in (None, 1):
            for operand in (rows, Rows(rows.to("bfloat16"), None)):
                got, one = (
                    each.fp8_wgrad(
                        each.for_fp8_wgrad(operand, sizes),
                        each.for_fp8_wgrad(Rows(dy, None), sizes),
                        *(sizes, jnp.dtype(dtype), side),
                    )
                    for each in (here, there)
                )
                assert got.dtype == one.dtype == jnp.dtype(dtype)
                assert distance(got, one) < CLOSE


def four_bits():
    """Rows as codes, weights in "mxfp4", and the sizes of groups."""
    rows, _ = weights_of()
    _, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    given = map(jnp.asarray, (gate_up, down))
    weights = both()[0].quantize_weights(*given, "mxfp4", False)
    return rows, weights, jnp.array(SIZES, jnp.int32)


@pytest.mark.few(1)
@pytest.mark.parametrize("canonical", [False, pytest.param(True, marks=THOROUGH)])
@pytest.mark.parametrize(
    "form", ["codes", "bfloat16", pytest.param("float16", marks=THOROUGH)]
)
def test_weights_in_mxfp4(canonical, form, ready):
    """Rows of every kind, with and without biases."""
    rows, weights, sizes = four_bits()
    real, taken = slice(sum(SIZES)), ready if ready is not None else []
    here, there = both()
    weights = weights.canonical() if canonical else weights
    dtype = "bfloat16" if form == "codes" else form
    operand = rows if form == "codes" else Rows(rows.to(dtype), None)
    known = form != "float16"
    bias = jnp.ones((3, F), jnp.float32)
    for inner in (
        Inner(None, None, (), None, kernels.SWIGLU),
        Inner(bias, None, (), None, kernels.SWIGLU),
    ):
        taken.clear()
        given = (operand, weights, sizes, inner, False, jnp.dtype(dtype))
        (h, _), (want, _) = here.gate_up(*given), there.gate_up(*given)
        assert h.values.dtype == want.values.dtype
        assert distance(h.to("float32")[real], want.to("float32")[real]) < CLOSE
        if ready is not None:
            assert set(taken) == ({"mxfp4_gate_up"} if known else set())
        for out in (jnp.bfloat16, jnp.float32, jnp.float16):
            taken.clear()
            given = (h, weights, "down", sizes, out)
            got, one = here.fprop(*given), there.fprop(*given)
            assert got.dtype == one.dtype == out
            assert distance(got[real], one[real]) < CLOSE
            if ready is not None and known:
                assert set(taken) == {"mxfp4_fprop"}


def test_weights_in_mxfp4_become_fp8_for_many_rows(ready, monkeypatch):
    """The fp8 kernels multiply them then; the values are the same."""
    monkeypatch.setattr(hopper_fp8, "MANY_ROWS", COUNT // len(SIZES))
    rows, weights, sizes = four_bits()
    real, taken = slice(sum(SIZES)), ready if ready is not None else []
    here, there = both()
    bias = jnp.ones((3, F), jnp.float32)
    product = Inner(None, None, (), lambda g, u, _: g * u, None)
    for inner, keep, wanted in (
        (Inner(bias, None, (), None, kernels.SWIGLU), False, {"fp8_gate_up"}),
        (Inner(None, None, (), None, kernels.SWIGLU), True, {"fp8_gate_up"}),
        (product, True, {"fp8_fprop"}),
    ):
        taken.clear()
        given = (rows, weights, sizes, inner, keep, jnp.dtype("bfloat16"))
        (h, kept), (want, own) = here.gate_up(*given), there.gate_up(*given)
        assert distance(h.to("float32")[real], want.to("float32")[real]) < CLOSE
        assert (kept is not None) == keep
        assert not keep or distance(kept[real], own[real]) < CLOSE
        assert ready is None or set(taken) == wanted | {"fp8_of_mxfp4"}
        taken.clear()
        given = (h, weights, "down", sizes, jnp.float32)
        assert distance(here.fprop(*given)[real], there.fprop(*given)[real]) < CLOSE
        assert ready is None or set(taken) == {"fp8_of_mxfp4", "fp8_fprop"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("hidden", "inner"), [(160, 96), (32, 288)])
def test_mxfp4_of_multiples_of_32(hidden, inner, ready):
    """The kernels' tiles have edges that no matrix has."""
    rows, gate_up, down = formula.operands(SIZES, hidden, inner, COUNT)
    sizes, real = jnp.array(SIZES, jnp.int32), slice(sum(SIZES))
    here, there = both()
    weights = here.quantize_weights(*map(jnp.asarray, (gate_up, down)), "mxfp4", False)
    operand = Rows(jnp.asarray(rows, jnp.bfloat16), None)
    bias = jnp.ones((3, inner), jnp.float32)
    clamped = experts.swiglu_clamped(1.5, 1.0)
    closed = activations.closed(clamped, (COUNT, inner), jnp.float32, frozenset())
    inner_ops = Inner(bias, None, (), closed.run, activations.of_kernels(clamped))
    for keep in (False, True):
        given = operand, weights, sizes, inner_ops, keep, jnp.dtype("bfloat16")
        (h, _), (want, _) = here.gate_up(*given), there.gate_up(*given)
        assert distance(h.to("float32")[real], want.to("float32")[real]) < CLOSE
        bias_of_down = jnp.ones((3, hidden), jnp.float32)
        given = h, weights, "down", sizes, jnp.bfloat16, bias_of_down
        got, one = here.fprop(*given), there.fprop(*given)
        assert got.shape == (COUNT, hidden)
        assert distance(got[real], one[real]) < CLOSE
    assert ready is None or set(ready) == {"mxfp4_gate_up", "mxfp4_fprop"}


@pytest.mark.parametrize(
    ("name", "weights", "count", "targets"),
    [
        ("bf16", "mxfp4", COUNT, ["mxfp4_gate_up", "mxfp4_fprop"]),
        (
            *("fp8_block128", "mxfp4", COUNT),
            ["mxfp4_gate_up", "quantize", "mxfp4_fprop"],
        ),
        (
            *("fp8_block128", "mxfp4", 384),
            ["fp8_of_mxfp4", "fp8_gate_up", "fp8_of_mxfp4", "fp8_fprop"],
        ),
        ("fp8_block128", "fp8_block128", COUNT, ["fp8_experts"]),
        ("fp8_block128", "fp8_block128", 384, ["fp8_experts"]),
        ("fp8_block128", "fp8_block128", 385, ["fp8_gate_up", "fp8_fprop"]),
    ],
)
def test_what_experts_are_lowered_to(name, weights, count, targets, monkeypatch):
    """Lowered with the real kernels' tables; products include SwiGLU."""
    grouped_kernels.pretend(monkeypatch)
    rows, gate_up, down = formula.operands(SIZES, H, F, count)
    d = dispatched(np.nan_to_num(rows), SIZES, name, "bfloat16")

    made = Operations().quantize_weights(gate_up, down, weights, False)

    def run(d, made):
        return experts.fp8(d, made, None)

    lowered = jax.jit(run).trace(d, made)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @ep_(\w+)", text) == targets


def test_tiles_are_those_of_the_table():
    table = tables.TABLES["ep_mxfp4_fprop"].operands
    (row,) = (row for row in table if row.name == "tiles")
    assert row.shape[-1] == ((), mxfp4.ATOM_BYTES)


def test_what_lies_between_products_is_applied_by_the_reference(ready):
    """Other activations, and what the backward pass keeps of mxfp4 weights."""
    rows, weights = weights_of()
    _, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    sizes = jnp.array(SIZES, jnp.int32)
    real, taken = slice(sum(SIZES)), ready if ready is not None else []
    here, there = both()
    bias = jnp.ones((3, F), jnp.float32)
    four = experts.quantize_weights(gate_up, down, format="mxfp4")
    plain = Rows(rows.to("bfloat16"), None)
    for inner, operand, codes, wanted in (
        (Inner(bias, None, (), None, kernels.SWIGLU), rows, weights, {"fp8_gate_up"}),
        (
            Inner(None, None, (), lambda g, u, _: g * u, None),
            rows,
            weights,
            {"fp8_fprop"},
        ),
        (Inner(None, None, (), None, kernels.SWIGLU), plain, four, {"mxfp4_fprop"}),
        (Inner(None, None, (), None, kernels.SWIGLU), rows, four, {"mxfp4_fprop"}),
    ):
        taken.clear()
        given = (operand, codes, sizes, inner, True, "bfloat16")
        (h, gate_up_rows), (want, kept) = here.gate_up(*given), there.gate_up(*given)
        assert distance(h.to("float32")[real], want.to("float32")[real]) < CLOSE
        assert distance(gate_up_rows[real], kept[real]) < CLOSE
        assert ready is None or set(taken) == wanted


def test_which_operations_a_device_has(monkeypatch):
    if jax.default_backend() == "cpu":
        assert type(select.operations()) is Operations
    monkeypatch.setattr(devices, "device_obstacle", lambda *_: None)
    assert type(select.operations()) is HopperOperations


@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["bf16", "fp8_block128", "fp8_block128_e8m0"])
def test_experts_equal_the_formula(name, wgrad, ready):
    """Results and all gradients, with the expected kernels."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, name)
    dy = np.random.default_rng(1).standard_normal((COUNT, H)).astype(np.float32)
    real = (np.arange(COUNT) < sum(SIZES))[:, None]
    port = jnp.asarray(d.tokens if name == "bf16" else d.grad_port)
    field = "tokens" if name == "bf16" else "grad_port"

    def run(port, gate_up, down):
        own = dataclasses.replace(d, **{field: port})
        return experts.fp8(own, gate_up, down, wgrad=wgrad)

    y, back = jax.vjp(jax.jit(run), port, gate_up, down)
    if ready is not None:
        # JAX traces a partitioned function only once for all tests.
        # JAX traces it without a derivative as well.
        traced = {"fp8_experts", "fp8_gate_up", "fp8_fprop"}
        assert set(ready) - {"quantize_matrices"} == traced
    plain = jax.jit(run)(port, gate_up, down)
    helpers.assert_bits(plain[: sum(SIZES)], y[: sum(SIZES)])
    grads = jax.jit(back)(jnp.asarray(np.where(real, dy, np.nan), y.dtype))
    want = formula.experts(
        rows,
        gate_up,
        down,
        SIZES,
        row_format="fp8_block128" if name == "bf16" else name,
        dy=dy[: sum(SIZES)],
        biases=(None, None, None),
        activation=formula.SWIGLU,
        wgrad=wgrad,
    )
    assert distance(y[: sum(SIZES)], want.y) < CLOSE
    assert distance(grads[0][: sum(SIZES)], want.rows) < CLOSE
    assert distance(grads[1], want.gate_up) < CLOSE
    assert distance(grads[2], want.down) < CLOSE
    if ready is not None:
        of_weights = {"transpose", "fp8_wgrad"} if wgrad == "fp8" else {"wgrad"}
        assert {"fp8_down_dgrad"} | of_weights <= set(ready)


@pytest.mark.parametrize("batch", [1, 2])
def test_vmap(batch, ready):
    """Codes are made entry by entry; experts run entry by entry."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    stacked = [
        np.stack([each * (1 + i) for i in range(batch)]) for each in (gate_up, down)
    ]

    def run(gate_up, down):
        codes = experts.quantize_weights(gate_up, down, backward=True)
        return experts.fp8(d, gate_up, down, quantized=codes)[: sum(SIZES)]

    found = jax.jit(jax.vmap(run))(*stacked)
    for i, got in enumerate(found):
        helpers.assert_bits(got, jax.jit(run)(*(each[i] for each in stacked)))


def test_a_checkpoint_holds_canonical_codes(tmp_path, ready):
    """Restored codes multiply as well; the call transposes them."""
    pytest.importorskip("orbax.checkpoint")
    from orbax import checkpoint

    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    made = experts.quantize_weights(gate_up, down)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "codes", made.canonical())
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
        made.canonical(),
    )
    with checkpoint.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "codes", like)
    assert isinstance(restored, experts.QuantizedWeights)
    assert restored.gate_up_transposed is None
    d = dispatched(rows, SIZES, "fp8_block128")
    want, found = (
        jax.jit(experts.fp8)(d, codes, None)[: sum(SIZES)] for codes in (made, restored)
    )
    helpers.assert_bits(found, want)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(512, 256), (384, 256), (128, 256), (512, 128), (128, 128)]
)
def test_weights_that_are_sharded(hidden, inner, kind, ready):
    """Outside of shard_map each device quantises its part, without cutting blocks."""
    mesh = helpers.make_mesh(helpers.fit({"ep": 2, "fsdp": 2}), kind=kind)
    if mesh.shape["fsdp"] < 2:
        pytest.skip("needs two devices along an axis")
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((2, hidden, 2, inner)).astype(np.float32)
    down = rng.standard_normal((2, inner, hidden)).astype(np.float32)
    specs = P("ep", "fsdp"), P("ep", None, "fsdp")
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((gate_up, down), specs, strict=True)
    ]
    program = jax.jit(experts.quantize_weights).lower(*placed).compile()
    made = program(*placed)
    plain = reference_codes(gate_up, down)
    jax.tree.map(helpers.assert_bits, made.canonical(), plain)
    helpers.assert_bits(
        made.gate_up_transposed, np.transpose(plain.gate_up, (0, 2, 3, 1))
    )
    helpers.assert_bits(made.down_transposed, np.transpose(plain.down, (0, 2, 1)))
    whole = hidden % (128 * mesh.shape["fsdp"]) == 0
    # Only blocks that would be cut are gathered.
    assert ("all-gather" in program.as_text()) == (not whole)
    if whole:
        transposed = P("ep", None, None, "fsdp")
        for array, spec in (
            (made.gate_up, specs[0]),
            (made.gate_up_transposed, transposed),
        ):
            wanted = NamedSharding(mesh, spec)
            assert array.sharding.is_equivalent_to(wanted, array.ndim)


def test_masks_of_groups():
    masks = np.asarray(group_masks(jnp.array([2, 0, 1]), 4))
    assert masks.tolist() == [
        [True, True, False, False],
        [False] * 4,
        [False, False, True, False],
    ]
