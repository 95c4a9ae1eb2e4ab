"""Experts' weights as codes and scales, and the rules that make them.

The rules are plain JAX, so XLA partitions them over sharded arrays, and they work in
`shard_map`, `vmap` and a scan. Amax is found by the bits of the floats: as integers
they have the same order as the floats, with infinities and NaN above all others, and an
integer maximum flushes no denormals.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_ep._core import pytrees
from jax_ep._core.literals import WeightFormat
from jax_ep._experts import mxfp4
from jax_ep._native.loader import cpu as native

Which = Literal["gate_up", "down"]

BLOCK = 128  # rows and columns of a matrix that share a scale of "fp8_block128"
PER_SCALE = 32  # elements of a column that share a scale of "mxfp4"
E4M3 = jnp.float8_e4m3fn
E8M0 = jnp.float8_e8m0fnu
_E4M3_LARGEST = float(jnp.finfo(E4M3).max)
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN_CODE = 0x7F
# Magnitudes of e2m1 codes 0 to 7, and the bound where code i + 1 begins. True if the
# bound itself has that code, because ties go to the even code.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BOUNDS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


# The fields of `QuantizedWeights` that every device has, and the extra copies in the
# order that kernels read.
CANONICAL = ("gate_up", "gate_up_scales", "down", "down_scales")
TRANSPOSED = ("gate_up_transposed", "down_transposed")


@pytrees.register(static=("format",))
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """The weights of L experts as codes and scales, a pytree of arrays.

    `jax_ep.experts.quantize_weights` makes one. Four of the arrays exist on every
    device, in the order of the weights themselves: dimension 0 is the expert, dimension
    1 the contracted one. A checkpoint can hold them, and `jax.tree.map` can shard or
    gather them along dimension 0 or 1.

    On Hopper GPUs there may be two more arrays, which kernels read in forward products.
    `canonical()` leaves them out: save its result in checkpoints. If they are missing,
    each call makes them again.

    Attributes:
        gate_up: "fp8_block128": float8_e4m3fn `[L, H, 2, F]`. "mxfp4": uint8
            `[L, H / 2, 2, F]`, two e2m1 codes per byte, with the code of the matrix's
            even row in the low nibble.
        gate_up_scales: "fp8_block128": float32 `[L, H / 128, 2, F / 128]`, one per
            block of 128 x 128. "mxfp4": float8_e8m0fnu `[L, H / 32, 2, F]`.
        down: float8_e4m3fn `[L, F, H]` or uint8 `[L, F / 2, H]`.
        down_scales: float32 `[L, F / 128, H / 128]` or float8_e8m0fnu
            `[L, F / 32, H]`.
        format: "fp8_block128" or "mxfp4" (static).
        gate_up_transposed: "fp8_block128": the codes of gate_up as `[L, 2, F, H]`.
            "mxfp4": its codes and scales in the tiles that kernels read, uint8. Or
            None.
        down_transposed: "fp8_block128": the codes of down as `[L, H, F]`. "mxfp4": as
            gate_up_transposed. Or None.
    """

    gate_up: jax.Array
    gate_up_scales: jax.Array
    down: jax.Array
    down_scales: jax.Array
    format: WeightFormat = "fp8_block128"
    gate_up_transposed: jax.Array | None = None
    down_transposed: jax.Array | None = None

    def canonical(self) -> QuantizedWeights:
        """Returns the same weights as the four arrays that every device has."""
        return dataclasses.replace(self, gate_up_transposed=None, down_transposed=None)

    def dequantized(self) -> tuple[jax.Array, jax.Array]:
        """Returns what the codes stand for, for example to check a loaded checkpoint.

        Returns:
            gate_up `[L, H, 2, F]` and down `[L, F, H]` in float32, exact.
        """
        weights = jax.tree.map(jnp.asarray, self.canonical())
        return dequantize(weights, "gate_up"), dequantize(weights, "down")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of gate_up and down that the codes stand for."""
        per_code = 2 if self.format == "mxfp4" else 1

        def whole(codes: jax.Array) -> tuple[int, ...]:
            groups, contracted, *rest = codes.shape
            return (groups, contracted * per_code, *rest)

        return whole(self.gate_up), whole(self.down)


def layout(
    name: WeightFormat, gate_up: tuple[int, ...], down: tuple[int, ...]
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns the dtype and shape of each field for matrices of these shapes."""
    groups, hidden, _, inner = gate_up
    if name == "mxfp4":
        return {
            "gate_up": (jnp.uint8, (groups, hidden // 2, 2, inner)),
            "gate_up_scales": (E8M0, (groups, hidden // PER_SCALE, 2, inner)),
            "down": (jnp.uint8, (groups, inner // 2, hidden)),
            "down_scales": (E8M0, (groups, inner // PER_SCALE, hidden)),
        }
    blocks = hidden // BLOCK, inner // BLOCK
    return {
        "gate_up": (E4M3, gate_up),
        "gate_up_scales": (jnp.float32, (groups, blocks[0], 2, blocks[1])),
        "down": (E4M3, (groups, inner, hidden)),
        "down_scales": (jnp.float32, (groups, blocks[1], blocks[0])),
    }


def transpose(codes: jax.Array) -> jax.Array:
    """Moves the contracted dimension of gate_up or down to the end."""
    return jnp.moveaxis(codes, 1, -1)


def transposed_layout(
    name: WeightFormat, gate_up: tuple[int, ...], down: tuple[int, ...]
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns the dtype and shape of each transposed field that kernels support."""
    found: dict[str, tuple[Any, tuple[int, ...]]] = {}
    for field, matrix in zip(TRANSPOSED, (gate_up, down), strict=True):
        group, contracted, *rest = matrix
        if name == "fp8_block128":
            found[field] = E4M3, (group, *rest, contracted)
        elif (tiles := mxfp4.shape(matrix)) is not None:
            found[field] = jnp.uint8, tiles
    return found


def transposed_entries(name: WeightFormat, matrix: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the spec's entries for a transposed field, from those for its matrix."""
    group, contracted, *rest = matrix
    if name == "fp8_block128":
        return (group, *rest, contracted)
    return group, rest[-1], contracted, None


def concatenate(first: QuantizedWeights, rest: QuantizedWeights) -> QuantizedWeights:
    """Returns the experts of `first`, followed by those of `rest`."""
    # If one of them comes from a checkpoint, it may lack transposed fields.
    for name in TRANSPOSED:
        if getattr(first, name) is None or getattr(rest, name) is None:
            first = dataclasses.replace(first, **{name: None})
            rest = dataclasses.replace(rest, **{name: None})
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), first, rest)


def multiple_of(name: WeightFormat) -> int:
    """Returns what H and F must be multiples of."""
    return PER_SCALE if name == "mxfp4" else BLOCK


def quantize(
    gate_up: jax.Array, down: jax.Array, name: WeightFormat
) -> QuantizedWeights:
    """Returns the weights in format `name`; H and F suit `multiple_of`."""
    to_codes = _to_e2m1 if name == "mxfp4" else to_blocks
    return QuantizedWeights(*to_codes(gate_up), *to_codes(down), format=name)


def dequantize(weights: QuantizedWeights, which: Which) -> jax.Array:
    """Returns gate_up `[L, H, 2, F]` or down `[L, F, H]` in float32."""
    values = _of_e2m1 if weights.format == "mxfp4" else _of_blocks
    return values(getattr(weights, which), getattr(weights, f"{which}_scales"))


def quantize_cotangents(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns e4m3 codes and float32 scales per 128 elements of `[N, A]`."""
    blocks = _split(values.astype(jnp.float32), 1, BLOCK)
    codes, scales = _to_e4m3(blocks, (2,), native.FP8_LEAST_AMAX_OF_GRADIENTS)
    return _merge(codes, 1), scales


def rounded_by_blocks(values: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns bfloat16 for rows `[N, A]`: what codes per 128 x 128 stand for.

    A block has 128 rows of a group, from its first one on, and 128 columns. The rule is
    that of "fp8_block128_e8m0". Rows past the groups may become anything.
    """
    count, columns = values.shape
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes, 0)), count)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    blocks = -(-(ends - starts) // BLOCK)
    row = jnp.arange(count)
    group = jnp.searchsorted(ends, row, side="right", method="compare_all")
    group = jnp.minimum(group, sizes.shape[0] - 1)
    block = (jnp.cumsum(blocks) - blocks)[group] + (row - starts[group]) // BLOCK
    within = row < ends[-1]
    most = -(-count // BLOCK) + min(count, sizes.shape[0])
    block = jnp.where(within, block, most)
    tiles = _split(values.astype(jnp.float32), 1, BLOCK)
    largest = jnp.max(_bits(tiles) & _MAGNITUDE, axis=2)
    largest = (
        jnp.zeros((most + 1, columns // BLOCK), largest.dtype).at[block].max(largest)
    )
    bad = largest >= _INFINITY
    # 448 is 1.75 * 2^8. A power of two stays a normal float.
    power = jnp.clip((largest + 0x1FFFFF >> 23).astype(jnp.int32) - 8, 1, 253)
    scales = _floats((power << 23).astype(largest.dtype))
    inverse = _floats((254 - power << 23).astype(largest.dtype))
    own, by = (each[block][:, :, None] for each in (scales, inverse))
    # Without the barrier XLA may leave out both conversions, and so the rounding.
    codes = jax.lax.optimization_barrier((tiles * by).astype(E4M3))
    found = codes.astype(jnp.float32) * own
    found = jnp.where(bad[block][:, :, None], jnp.nan, found)
    return _merge(found, 1).astype(jnp.bfloat16)


def to_blocks(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises `[L, A, ..., B]` per 128 x 128 of A and B."""
    last = matrices.ndim - 1
    blocks = _split(_split(matrices.astype(jnp.float32), last, BLOCK), 1, BLOCK)
    codes, scales = _to_e4m3(blocks, (2, last + 2), native.FP8_LEAST_AMAX)
    return _merge(_merge(codes, 1), last), scales


def _of_blocks(codes: jax.Array, scales: jax.Array) -> jax.Array:
    last = codes.ndim - 1
    blocks = _split(_split(codes.astype(jnp.float32), last, BLOCK), 1, BLOCK)
    values = blocks * jnp.expand_dims(scales, (2, last + 2))
    return _merge(_merge(values, 1), last)


def _to_e4m3(
    values: jax.Array, block: tuple[int, ...], floor: float
) -> tuple[jax.Array, jax.Array]:
    """Quantises float32 with one scale for all elements along the axes `block`."""
    largest = jnp.max(_bits(values) & _MAGNITUDE, axis=block, keepdims=True)
    bad = largest >= _INFINITY
    amax = jnp.maximum(_floats(largest), floor)
    # XLA turns divisions by constants and by broadcast scales into multiplications by
    # reciprocals, which round differently. It does not see through jnp.where.
    divisor = jnp.where(bad, 1.0, _E4M3_LARGEST).astype(jnp.float32)
    scales = jnp.where(bad, jnp.nan, amax / divisor)
    own = jnp.where(jnp.isnan(values), 1.0, scales)
    ratio = jnp.clip(values / own, -_E4M3_LARGEST, _E4M3_LARGEST)
    codes = jnp.where(bad, 0.0, ratio).astype(E4M3)
    byte = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    byte = jnp.where(bad, jnp.uint8(_NAN_CODE), byte)
    codes = jax.lax.bitcast_convert_type(byte, E4M3)
    return codes, jnp.squeeze(scales, block)


def _to_e2m1(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises `[L, A, ...]` per 32 elements of A, two codes per byte."""
    values = _split(matrices.astype(jnp.float32), 1, PER_SCALE)
    bits = _bits(values)
    magnitude = bits & _MAGNITUDE
    largest = jnp.max(magnitude, axis=2, keepdims=True)
    bad = largest >= _INFINITY
    byte = jnp.clip(((largest + 0x200000) >> 23) - 2, 0, 254)
    # Denormals are taken as integers, because XLA's CPU code may flush float denormals.
    denormal = magnitude < 0x800000
    mantissa = magnitude.astype(jnp.float32)
    scaled = jnp.where(
        denormal,
        _times_power(mantissa, 127 - 149 - byte),
        _times_power(_floats(magnitude), 127 - byte),
    )
    codes = jnp.zeros_like(bits)
    for bound, reached in _E2M1_BOUNDS:
        codes += (scaled >= bound if reached else scaled > bound).astype(bits.dtype)
    codes = jnp.where(bad, 0, codes | ((bits >> 31) & 1) << 3)
    pairs = _split(codes, 2, 2)
    packed = (pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4).astype(jnp.uint8)
    scales = jnp.where(bad, 0xFF, byte).astype(jnp.uint8)
    scales = jax.lax.bitcast_convert_type(jnp.squeeze(scales, 2), E8M0)
    return _merge(packed, 1), scales


def _of_e2m1(codes: jax.Array, scales: jax.Array) -> jax.Array:
    nibbles = _merge(jnp.stack([codes & 0xF, codes >> 4], axis=2), 1)
    low = (nibbles & 7).astype(jnp.int32)
    values = sum(
        jnp.where(low == code, jnp.float32(value), 0)
        for code, value in enumerate(_E2M1)
    )
    values = jnp.where(nibbles >> 3 == 1, -values, values)
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)[:, :, None]
    values = _times_power(_split(values, 1, PER_SCALE), byte - 127)
    return _merge(jnp.where(byte == 0xFF, jnp.nan, values), 1)


def without_cuts(
    mesh: Any, shape: tuple[int, ...], spec: Sequence[Any], units: Mapping[int, int]
) -> tuple[Any, ...]:
    """Returns `spec` without the entries that would cut a unit of a dimension."""
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    for dim, unit in units.items():
        entry = entries[dim]
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        parts = math.prod(mesh.shape[name] for name in names)
        if shape[dim] % (unit * parts):
            entries[dim] = None
    return tuple(entries)


def _split(values: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits a dimension into blocks of `size`, which become the dimension after it."""
    kind = jax.typeof(values).sharding
    spec = without_cuts(kind.mesh, values.shape, kind.spec, {axis: size})
    if spec != _spec(values):
        # The spec shows only explicit axes. Over other axes, XLA gathers by itself.
        whole = jax.sharding.PartitionSpec(*spec)
        values = jax.sharding.reshard(values, kind.update(spec=whole))
    before, after = values.shape[:axis], values.shape[axis + 1 :]
    shape = (*before, values.shape[axis] // size, size, *after)
    return _reshaped(values, shape, (*spec[: axis + 1], None, *spec[axis + 1 :]))


def _merge(values: jax.Array, axis: int) -> jax.Array:
    """Merges a dimension with the one after it, which is not sharded."""
    before, after = values.shape[:axis], values.shape[axis + 2 :]
    shape = (*before, values.shape[axis] * values.shape[axis + 1], *after)
    spec = _spec(values)
    return _reshaped(values, shape, (*spec[: axis + 1], *spec[axis + 2 :]))


def _spec(values: jax.Array) -> tuple[Any, ...]:
    return tuple(jax.typeof(values).sharding.spec)


def _reshaped(
    values: jax.Array, shape: tuple[int, ...], spec: tuple[Any, ...]
) -> jax.Array:
    # With explicit axes, JAX must be told which new dimension the sharding applies to.
    explicit = any(entry is not None for entry in spec)
    kind = jax.typeof(values).sharding
    where = kind.update(spec=jax.sharding.PartitionSpec(*spec)) if explicit else None
    return jax.lax.reshape(values, shape, out_sharding=where)


def _times_power(values: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns values * 2 ** exponent, for exponents of -281 to 254.

    Multiplies by several factors, because 2 ** -127 is denormal and 2 ** 254 infinite.
    """
    for _ in range(3):
        part = jnp.clip(exponent, -100, 127)
        values = values * _floats((part + 127) << 23)
        exponent = exponent - part
    return values


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
