"""Stand-ins in plain JAX for the Hopper kernels, so that CPUs can run their callers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep import formats
from jax_ep._experts import (
    activations,
    devices,
    kernels,
    quantized,
)
from jax_ep._experts.kernels import Fp8Rows, TransposedRows
from jax_ep._layers import layer

H, F = 128, 128  # sizes of the tests' matrices
BLOCK = kernels.BLOCK


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the device is a Hopper GPU, so that tests can lower for one."""
    monkeypatch.setattr(devices, "device_obstacle", lambda *_: None)


def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes experts use the stand-ins; skips on GPUs, which may have the kernels.

    Returns a list that collects the names of the stand-ins that traces call.
    """
    if jax.default_backend() != "cpu":
        pytest.skip("the kernels may be real here")
    pretend(monkeypatch)
    taken: list[str] = []
    for place, stand_ins in ((kernels.Kernels, OF_KERNELS), (kernels, STAND_INS)):
        for stand_in in stand_ins:
            name = stand_in.__name__
            # Each stand-in takes the same arguments as its kernel.
            assert list(inspect.signature(getattr(place, name)).parameters) == list(
                inspect.signature(stand_in).parameters
            )
            monkeypatch.setattr(place, name, _seen(stand_in, taken))
    return taken


def weighed(cases: list[Any], large: list[Any]) -> list[Any]:
    """Cases of kernels as parameters: all on GPUs, and `large` ones only there.

    On CPUs the stand-ins compute them, for which any one case will do.
    """
    thorough, on_gpu = pytest.mark.thorough, pytest.mark.gpu
    return [
        cases[0],
        *(pytest.param(*case, marks=thorough, id=str(case)) for case in cases[1:]),
        *(pytest.param(*case, marks=on_gpu, id=str(case)) for case in large),
    ]


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Makes layers use the stand-ins; yields the names of those that traces call."""
    _forget_layers()
    yield fake(monkeypatch)
    _forget_layers()
    jax.clear_caches()


def _forget_layers() -> None:
    """Drops cached programs, which equal layers would share."""
    jax_ep.close_shared_handles()
    layer._quantizer.cache_clear()
    layer._preparer.cache_clear()


@pytest.fixture(params=["reference", "kernels"])
def either_operations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs fp8 experts by the reference and by the kernels' stand-ins."""
    if request.param == "reference":
        yield
        return
    taken = request.getfixturevalue("fake_kernels")
    yield
    assert {"fp8_gate_up", "fp8_experts"} & set(taken)


def _seen(stand_in: Callable[..., Any], taken: list[str]) -> Callable[..., Any]:
    @functools.wraps(stand_in)
    def run(*args: Any, **options: Any) -> Any:
        taken.append(stand_in.__name__)
        return stand_in(*args, **options)

    return run


def skip_without_hopper() -> None:
    """Skips where the kernels do not run."""
    obstacle = jax_ep.experts.hopper_obstacle(H, F)
    if obstacle is not None:
        pytest.skip(f"needs {obstacle}")


def group_masks(sizes: jax.Array, count: int) -> jax.Array:
    """Bool `[L, count]`: whether each row is in each group."""
    ends = jnp.cumsum(sizes)
    index = jnp.arange(count)
    return (index >= (ends - sizes)[:, None]) & (index < ends[:, None])


def product(left: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows `[N, A]` times `[L, A, B]` in float32; NaN for rows outside all groups."""
    left, matrices = left.astype(jnp.float32), matrices.astype(jnp.float32)
    out = jnp.full((left.shape[0], matrices.shape[2]), jnp.nan) + 0 * _zero(left)
    for own, matrix in zip(group_masks(sizes, len(left)), matrices, strict=True):
        out = jnp.where(own[:, None], jnp.dot(left, matrix, precision="highest"), out)
    return out


def _zero(like: jax.Array) -> jax.Array:
    """A zero that varies over the same mesh axes as `like`."""
    return jnp.zeros_like(like, shape=(1, 1))


def _plus(sums: jax.Array, bias: Any, sizes: jax.Array) -> jax.Array:
    """Adds each group's bias, `[L, B]` or `[L, 2, B]`, to float32 sums."""
    if bias is None:
        return sums
    assert bias.dtype == jnp.float32
    for own, of_group in zip(group_masks(sizes, len(sums)), bias, strict=True):
        sums = jnp.where(own[:, None], sums + of_group.reshape(-1), sums)
    return sums


def fprop(self, rows, matrices, sizes, bias=None, dtype=None):
    assert rows.dtype == matrices.dtype
    assert self.sums or (rows.dtype.itemsize == 2 and dtype in (None, rows.dtype))
    return _plus(product(rows, matrices, sizes), bias, sizes).astype(
        dtype or rows.dtype
    )


def dgrad(self, cotangents, matrices, sizes, dtype=None, up=None):
    if up is not None:
        cotangents = cotangents.reshape(len(cotangents), -1)
        matrices = jnp.concatenate([matrices, up], 2)
    given = cotangents, matrices.swapaxes(1, 2), sizes
    return fprop(self, *given, dtype=dtype)


def _both(gate_up: kernels.GateUp) -> jax.Array:
    return jnp.stack(gate_up, 2) if isinstance(gate_up, tuple) else gate_up


def gate_up(self, rows, matrices, sizes, keep, bias=None, activation=kernels.SWIGLU):
    matrices = _both(matrices)
    assert rows.dtype == matrices.dtype
    count, inner = len(rows), matrices.shape[3]
    gate_up_rows = product(rows, matrices.reshape(*matrices.shape[:2], -1), sizes)
    gate_up_rows = _plus(gate_up_rows, bias, sizes).reshape(count, 2, inner)
    h = activations.function_of(activation)(gate_up_rows[:, 0], gate_up_rows[:, 1])
    return h.astype(rows.dtype), gate_up_rows.astype(rows.dtype) if keep else None


def activation_dgrad(
    to_h: jax.Array, gate_up_rows: jax.Array, activation: kernels.Activation
) -> jax.Array:
    """Cotangents of gate and up in float32, from JAX's own derivative."""
    gate, up = (
        each.astype(jnp.float32) for each in (gate_up_rows[:, 0], gate_up_rows[:, 1])
    )
    _, back = jax.vjp(activations.function_of(activation), gate, up)
    return jnp.stack(back(to_h), 1)


def down_dgrad(
    self, cotangents, matrices, gate_up_rows, sizes, activation=kernels.SWIGLU
):
    assert cotangents.dtype == matrices.dtype == gate_up_rows.dtype
    to_h = product(cotangents, matrices.swapaxes(1, 2), sizes)
    return activation_dgrad(to_h, gate_up_rows, activation).astype(gate_up_rows.dtype)


def wgrad(self, rows, cotangents, sizes, dtype, side=None):
    cotangents = cotangents if side is None else cotangents[:, side]
    assert rows.dtype == cotangents.dtype
    assert dtype in (rows.dtype, jnp.float32)
    found = []
    for own in group_masks(sizes, len(rows)):
        pair = (
            jnp.where(own[:, None], each.astype(jnp.float32), 0)
            for each in (rows, cotangents)
        )
        found.append(jnp.dot(next(pair).T, next(pair), precision="highest"))
    return jnp.stack(found).astype(dtype)


def _spread(scales: jax.Array, *axes: int) -> jax.Array:
    for axis in axes:
        scales = jnp.repeat(scales, BLOCK, axis)
    return scales


def _values(rows: Fp8Rows) -> jax.Array:
    assert rows.scales.dtype == jnp.float32
    return rows.codes.astype(jnp.float32) * _spread(rows.scales, 1)


def fp8_fprop(rows, matrices, scales, sizes, dtype, bias=None):
    sums = fp8_dgrad(rows, matrices, scales.swapaxes(1, 2), sizes, jnp.float32)
    return _plus(sums, bias, sizes).astype(dtype)


def fp8_dgrad(cotangents, matrices, scales, sizes, dtype):
    values = (matrices.astype(jnp.float32) * _spread(scales, 1, 2)).swapaxes(1, 2)
    return product(_values(cotangents), values, sizes).astype(dtype)


def fp8_gate_up(
    rows, matrices, scales, sizes, keep, bias=None, activation=kernels.SWIGLU
):
    groups, _, inner, _ = matrices.shape
    scales = _spread(scales.transpose(0, 2, 3, 1), 2, 3)
    values = (matrices.astype(jnp.float32) * scales).reshape(groups, 2 * inner, -1)
    gate_up_rows = product(_values(rows), values.swapaxes(1, 2), sizes)
    gate_up_rows = _plus(gate_up_rows, bias, sizes).reshape(-1, 2, inner)
    function = activations.function_of(activation)
    h = formats.quantize(
        function(gate_up_rows[:, 0], gate_up_rows[:, 1]), "fp8_block128"
    )
    return Fp8Rows(*h), gate_up_rows.astype(jnp.bfloat16) if keep else None


def fp8_down_dgrad(
    cotangents, matrices, scales, gate_up_rows, sizes, activation=kernels.SWIGLU
):
    values = matrices.astype(jnp.float32) * _spread(scales, 1, 2)
    to_h = product(_values(cotangents), values.swapaxes(1, 2), sizes)
    back = activation_dgrad(to_h, gate_up_rows, activation)
    codes, code_scales = quantized.quantize_cotangents(back.reshape(len(back), -1))
    code_scales = code_scales.reshape(len(back), 2, -1)
    return (
        codes.reshape(gate_up_rows.shape),
        code_scales,
        back.astype(gate_up_rows.dtype),
    )


_gate_up = gate_up


def experts(
    rows,
    gate_up,
    down,
    sizes,
    biases=kernels.NO_BIASES,
    activation=kernels.SWIGLU,
):
    own = kernels.HOPPER
    h, _ = _gate_up(own, rows, gate_up, sizes, False, biases.gate_up, activation)
    return fprop(own, h, down, sizes, biases.down)


def fp8_experts(
    rows,
    gate_up,
    gate_up_scales,
    down,
    down_scales,
    sizes,
    dtype,
    biases=kernels.NO_BIASES,
    activation=kernels.SWIGLU,
):
    given = rows, gate_up, gate_up_scales, sizes, False, biases.gate_up, activation
    h, _ = fp8_gate_up(*given)
    return fp8_fprop(h, down, down_scales, sizes, dtype, biases.down)


def values_of_tiles(tiles: jax.Array, sides: int) -> jax.Array:
    """The values of tiles that `mxfp4.tiles` made, float32 `[L, A, sides * B]`."""
    groups, across, steps, _ = tiles.shape
    codes = tiles[..., :2048].reshape(groups, across, steps, 4, 8, 4, 2, 2, 2, 2)
    halves = codes[..., 0] | codes[..., 1].astype(jnp.uint16) << 8
    nibbles = [
        halves >> rest & 7 | (halves >> sign & 1) << 3
        for rest, sign in ((6, 15), (3, 12), (0, 9))
    ]
    # Elements 6 and 7 are each in the other half of their word.
    last = halves >> 14 & 1 | (halves >> 10 & 3) << 1 | (halves >> 13 & 1) << 3
    nibbles = jnp.stack([*nibbles, last[..., ::-1]], -1)
    # Dimensions pair, r, q, odd, half, j, i become i, q, j, pair, odd, half, r.
    order = (9, 5, 8, 3, 6, 7, 4)
    nibbles = jnp.transpose(nibbles, (0, 1, 2, *order))
    nibbles = nibbles.reshape(groups, across, steps, 32, 128)
    bytes_ = tiles[..., 2048:].reshape(groups, across, steps, 8, 8, 2)
    bytes_ = jnp.transpose(bytes_, (0, 1, 2, 4, 5, 3)).reshape(
        groups, across, steps, 1, 128
    )
    magnitude = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)[nibbles & 7]
    values = jnp.where(nibbles & 8, -magnitude, magnitude)
    values = values * 2.0 ** (bytes_.astype(jnp.float32) - 127)
    values = values.reshape(groups, across, steps * 32, -1, sides, 16)
    values = values.transpose(0, 2, 4, 1, 3, 5)
    return values.reshape(groups, steps * 32, -1)


def _mxfp4(rows, scales, tiles, sizes, columns, dtype, sides):
    assert dtype in (jnp.bfloat16, jnp.float32)
    assert rows.dtype == jnp.bfloat16
    values = rows if scales is None else _values(Fp8Rows(rows, scales))
    matrices = values_of_tiles(tiles, sides)
    # Edges of tiles are zeros.
    groups, contracted, _ = matrices.shape
    matrices = matrices.reshape(groups, contracted, sides, -1)
    real = matrices[:, : rows.shape[1], :, :columns]
    return product(values, real.reshape(groups, rows.shape[1], -1), sizes)


def mxfp4_fprop(rows, scales, tiles, sizes, columns, dtype, bias=None):
    sums = _plus(_mxfp4(rows, scales, tiles, sizes, columns, dtype, 1), bias, sizes)
    assert sums.shape[1] == columns
    return sums.astype(dtype)


def mxfp4_gate_up(
    rows,
    scales,
    tiles,
    sizes,
    columns,
    dtype,
    bias=None,
    activation=kernels.SWIGLU,
):
    sums = _plus(_mxfp4(rows, scales, tiles, sizes, columns, dtype, 2), bias, sizes)
    gate, up = jnp.split(sums, 2, axis=1)
    assert gate.shape[1] == columns
    return activations.function_of(activation)(gate, up).astype(dtype)


def quantize_matrices(matrices):
    codes, scales = quantized.to_blocks(_both(matrices))
    return codes, scales, jnp.transpose(codes, (0, 2, 3, 1))


def fp8_of_mxfp4(codes, scales):
    headroom = 6  # 6 * 2 ** 6 is below 448
    bad_power = headroom + 1
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    bad = byte == 0xFF
    groups, atoms, *sides, columns = byte.shape
    shape = groups, atoms // 4, 4, *sides, columns // BLOCK, BLOCK
    largest = jnp.where(bad, 0, byte).reshape(shape).max((2, len(shape) - 1))
    shared = jnp.maximum(largest - headroom, 1)
    own = jnp.expand_dims(shared, (2, len(shape) - 1))
    power = jnp.maximum(byte.reshape(shape) - own, -100).reshape(byte.shape)
    power = jnp.where(bad, bad_power, power)
    packed, power = quantized.transpose(codes), quantized.transpose(power)
    nibbles = jnp.stack([packed & 0xF, packed >> 4], -1)
    values = jnp.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], jnp.float32)[nibbles & 7]
    values = jnp.where(nibbles >> 3 == 1, -values, values)
    values = values.reshape(*packed.shape[:-1], atoms, 32)
    factors = jnp.where(power == bad_power, jnp.nan, jnp.exp2(power))
    values = values * factors[..., None]
    values = values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
    bits = jax.lax.bitcast_convert_type(shared << 23, jnp.float32)
    return values.astype(jnp.float8_e4m3fn), bits


def transpose(rows, sizes):
    values = _values(rows) if isinstance(rows, Fp8Rows) else rows.astype(jnp.float32)
    count, columns = values.shape
    sizes = jnp.maximum(sizes, 0)
    ends = jnp.minimum(jnp.cumsum(sizes), count)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    padded_sizes = -(-(ends - starts) // BLOCK) * BLOCK
    before = jnp.cumsum(padded_sizes) - padded_sizes
    padded = kernels.padded_rows(count, len(sizes))
    held = jnp.zeros((padded, columns))
    for group, own in enumerate(group_masks(ends - starts, count)):
        to = before[group] + jnp.arange(count) - starts[group]
        held = held.at[jnp.where(own, to, padded)].set(values, mode="drop")
    blocks = held.reshape(-1, BLOCK, columns // BLOCK, BLOCK).swapaxes(1, 2)
    least = jnp.maximum(jnp.abs(blocks).max((2, 3)), 2.0**-110) / 448
    mantissa, power = jnp.frexp(least)
    scales = jnp.ldexp(1.0, power - (mantissa == 0.5))
    scales = jnp.where(jnp.isfinite(blocks).all((2, 3)), scales, jnp.nan)
    codes = (blocks / scales[:, :, None, None]).astype(jnp.float8_e4m3fn)
    codes = codes.swapaxes(1, 2).reshape(held.shape).T
    return TransposedRows(codes, scales, padded_sizes.astype(jnp.int32))


def fp8_wgrad(rows, cotangents, dtype, side=None):
    def values(of):
        return of.codes.T.astype(jnp.float32) * _spread(of.scales, 0, 1)

    back = values(cotangents)
    if side is not None:
        back = jnp.split(back, 2, axis=1)[side]
    return wgrad(None, values(rows), back, rows.padded_sizes, jnp.float32).astype(dtype)


def _in_groups(values, sizes, otherwise):
    """Sets rows past the groups to `otherwise`, as kernels leave memory there as is."""
    in_group = jnp.arange(len(values)) < jnp.sum(jnp.maximum(sizes, 0))
    return jnp.where(in_group[:, None], values, jnp.asarray(otherwise, values.dtype))


def quantize_cotangents(values, sizes):
    codes, scales = quantized.quantize_cotangents(values)
    return Fp8Rows(
        _in_groups(codes, sizes, jnp.nan), _in_groups(scales, sizes, jnp.nan)
    )


def dequantize(rows, sizes, dtype):
    values = formats.dequantize(*rows, "fp8_block128", dtype=jnp.dtype(dtype).name)
    return _in_groups(values, sizes, jnp.nan)


OF_KERNELS = (fprop, dgrad, gate_up, down_dgrad, wgrad)
STAND_INS = (
    fp8_fprop,
    fp8_dgrad,
    fp8_gate_up,
    fp8_down_dgrad,
    fp8_wgrad,
    experts,
    fp8_experts,
    mxfp4_fprop,
    mxfp4_gate_up,
    quantize_matrices,
    fp8_of_mxfp4,
    quantize_cotangents,
    dequantize,
    transpose,
)
