"""Weights in "mxfp4" in the order in which kernels read them.

xla_ffi/protocol/matmul_steps.h describes the order: tiles of 128 columns (or 64 of gate
and 64 of up, 16 of each by turns), in atoms of 32 elements of the contracted dimension.
Each atom has its codes and then its scales.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

BLOCK_N = 128  # columns of a tile, gate and up together
ATOM_K = 32  # elements of the contracted dimension in an atom
ATOM_BYTES = BLOCK_N * ATOM_K // 2 + BLOCK_N  # bytes of codes and scales
ALIGNED = 128  # atoms come in as many as have this of the contracted dimension
_ONE = 127  # the byte of a scale of 1
COLUMNS = 8  # what those of a result must be a multiple of
_RUN = 16  # columns of gate, and then of up
# For each of the four codes in half a word: where its bits go, the lowest first.
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (14, 10, 11, 13))


def shape(matrix: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of the tiles of `[L, A, 2, B]` or `[L, A, B]`.

    Returns None if the kernels do not take such sizes.
    """
    groups, contracted, *sides, columns = matrix
    if contracted % ATOM_K or columns % COLUMNS:
        return None
    per_tile = BLOCK_N // 2 if sides else BLOCK_N
    atoms = -(-contracted // ALIGNED) * (ALIGNED // ATOM_K)
    return groups, -(-columns // per_tile), atoms, ATOM_BYTES


def tiles(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns uint8 `[L, tiles, A / 32, ATOM_BYTES]`.

    Args:
        codes: uint8 `[L, A / 2, 2, B]` or `[L, A / 2, B]`, as in `QuantizedWeights`.
        scales: float8_e8m0fnu `[L, A / 32, 2, B]` or `[L, A / 32, B]`.
    """
    found = shape((codes.shape[0], 2 * codes.shape[1], *codes.shape[2:]))
    assert found is not None
    groups, across, atoms, _ = found
    sides = codes.shape[2:-1]
    count = sides[0] if sides else 1
    columns = across * BLOCK_N // count
    bytes_ = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    codes = _padded(codes, atoms * ATOM_K // 2, columns, 0)
    bytes_ = _padded(bytes_, atoms, columns, _ONE)

    def by_tile(values: jax.Array) -> jax.Array:
        """Splits `[L, atoms, ..., columns]` to `[L, tiles, atoms, ..., BLOCK_N]`."""
        inner = values.shape[2 : values.ndim - 1 - len(sides)]
        runs = BLOCK_N // (_RUN * count)
        values = values.reshape(groups, atoms, *inner, count, across, runs, _RUN)
        values = jnp.moveaxis(values, (-3, -4), (1, -2))
        return values.reshape(groups, across, atoms, *inner, BLOCK_N)

    # Contracted element 8 i + 2 q + j of 32 is code i of half j of word q.
    pairs = codes.reshape(groups, atoms, 4, 4, *sides, columns).swapaxes(2, 3)
    pairs = by_tile(pairs).astype(jnp.uint16)  # [L, tiles, atoms, q, i, columns]

    def half(codes: jax.Array) -> jax.Array:
        """Places four codes so that few instructions decode them."""
        placed = [
            (codes[..., i, :] >> bit & 1) << to
            for i, places in enumerate(_PLACES)
            for bit, to in enumerate(places)
        ]
        return functools.reduce(jnp.bitwise_or, placed)

    even, odd = pairs & 0xF, pairs >> 4
    # Elements 6 and 7 are each in the other half.
    is_last = (jnp.arange(4) == 3)[:, None]
    lower, upper = jnp.where(is_last, odd, even), jnp.where(is_last, even, odd)
    halves = jnp.stack([half(lower), half(upper)], 4)
    # [L, tiles, atoms, q, j, byte of the half, columns]
    packed = jnp.stack([halves & 0xFF, halves >> 8], 5).astype(jnp.uint8)
    # Column 16 (2 pair + odd) + 8 half + r.
    packed = packed.reshape(groups, across, atoms, 4, 2, 2, 4, 2, 2, 8)
    # To pair, r, q, odd, half, j, byte.
    order = (6, 9, 3, 7, 8, 4, 5)
    packed = jnp.transpose(packed, (0, 1, 2, *order)).reshape(
        groups, across, atoms, BLOCK_N * ATOM_K // 2
    )
    bytes_ = by_tile(bytes_)
    bytes_ = bytes_.reshape(groups, across, atoms, 8, 2, 8)  # 16 m + 8 half + r
    bytes_ = jnp.transpose(bytes_, (0, 1, 2, 5, 3, 4))
    bytes_ = bytes_.reshape(groups, across, atoms, BLOCK_N)
    return jnp.concatenate([packed, bytes_], axis=-1)


def _padded(values: jax.Array, contracted: int, columns: int, by: int) -> jax.Array:
    """Pads dimension 1 and the last one to these sizes."""
    missing = [(0, 0)] * values.ndim
    missing[1] = 0, contracted - values.shape[1]
    missing[-1] = 0, columns - values.shape[-1]
    return jnp.pad(values, missing, constant_values=by) if any(missing) else values


def side_by_side(products: jax.Array, columns: int) -> jax.Array:
    """Returns all gate, then all up, `[N, 2 * columns]`, from products by whole tiles.

    Tiles have 16 columns of gate and the same columns of up by turns.
    """
    count = products.shape[0]
    split = jnp.moveaxis(products.reshape(count, -1, 2, _RUN), 2, 1)
    return split.reshape(count, 2, -1)[:, :, :columns].reshape(count, 2 * columns)
