"""Pallas kernel for Hopper: a grouped matmul that skips rows of no group.

JAX's own kernel (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`) multiplies all N
rows. Most rows of a dispatch may be room for the worst case: with R ranks all but 1
in R.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._experts import hopper
from jax_ep._experts.hopper import (
    DEPTH,
    OUT_COLUMNS,
    OUT_SLOTS,
    OWN,
    ROWS,
    SWIZZLED_ROWS,
    WARPGROUPS,
)


class Tiles(NamedTuple):
    """Tiles of ROWS rows that cover the groups; int32 `[tiles]`, valid up to `total`.

    Attributes:
        group: the group whose matrix the tile is multiplied with.
        first: the first row to load; all ROWS rows are inside the operand.
        skipped: rows of the tile before the first one of the group.
        rows: rows of the tile in the group, 1 to ROWS.
        total: `[1]`, the number of valid tiles.
    """

    group: jax.Array
    first: jax.Array
    skipped: jax.Array
    rows: jax.Array
    total: jax.Array


def tiles_of(group_sizes: jax.Array, count: int) -> Tiles:
    """Returns the tiles of groups in `count` rows, a multiple of SWIZZLED_ROWS."""
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    loaded = starts // SWIZZLED_ROWS * SWIZZLED_ROWS
    per_group = jnp.where(sizes > 0, (ends - loaded + ROWS - 1) // ROWS, 0)
    tile_ends = jnp.cumsum(per_group)
    # A group's first tile may have SWIZZLED_ROWS - 1 other rows, its last just one row.
    most = (count + len(sizes) * (ROWS + SWIZZLED_ROWS - 2)) // ROWS
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    group = jnp.minimum(group, len(sizes) - 1).astype(jnp.int32)
    at = loaded[group] + (tile - tile_ends[group] + per_group[group]) * ROWS
    begin, end = jnp.maximum(at, starts[group]), jnp.minimum(at + ROWS, ends[group])
    first = jnp.clip(at, 0, count - ROWS)
    return Tiles(group, first, begin - first, end - begin, tile_ends[-1:])


def grouped_rows(
    rows: jax.Array,
    matrices: jax.Array,
    *,
    group_sizes: jax.Array,
    transpose_rhs: bool = False,
) -> jax.Array:
    """Multiplies each row by the matrix of its group; leaves rows of no group unset.

    Args:
        rows: `[N, A]` of a 16-bit dtype; A a multiple of 64.
        matrices: `[L, A, B]` of the same dtype; B a multiple of 128.
        group_sizes: integers `[L]`, with a sum of at most N.
        transpose_rhs: whether `matrices` is `[L, B, A]`.

    Returns:
        `[N, B]`.
    """
    count = rows.shape[0]
    more = max(-count % SWIZZLED_ROWS, ROWS - count)
    rows = jnp.pad(rows, ((0, more), (0, 0)))
    tiles = tiles_of(group_sizes, rows.shape[0])
    shape = (rows.shape[0], matrices.shape[1 if transpose_rhs else 2])
    kernel = functools.partial(_kernel, transposed=transpose_rhs)
    result = hopper.launch(kernel, shape, rows.dtype, *tiles, rows, matrices)
    return result[:count]


def _kernel(*refs: Any, transposed: bool) -> None:
    """The kernel's body, with (*tiles, rows, matrices, out); see `hopper.launch`."""
    pl, gpu = hopper.pallas()
    *tiles, rows, matrices, out = refs
    tiles = Tiles(*tiles)
    steps, columns = rows.shape[1] // DEPTH, out.shape[1]
    block = hopper.columns_of_block(columns)
    panel = hopper.panel(columns // block)
    swizzled = hopper.swizzled()
    specs = [
        gpu.BlockSpec((ROWS, DEPTH), lambda k: (0, k), transforms=swizzled),
        gpu.BlockSpec(
            (block, DEPTH) if transposed else (DEPTH, block),
            lambda k: (0, k) if transposed else (k, 0),
            transforms=swizzled,
        ),
    ]

    @functools.partial(
        pl.run_scoped,
        stages=hopper.pipeline(specs, steps).get_allocations(rows, matrices.at[0]),
        staged=gpu.SMEM((WARPGROUPS, OUT_SLOTS, OWN, OUT_COLUMNS), out.dtype),
        collective_axes="warpgroup",
    )
    def _(stages: Any, staged: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        own = pl.ds(warpgroup * OWN, OWN)
        in_panel = tiles.total[0] * panel

        @gpu.nd_loop((in_panel * (columns // block // panel),), collective_axes="sm")
        def _(loop: Any) -> None:
            (work,) = loop.index
            tile = lax.rem(work, in_panel) // panel
            column = work // in_panel * panel + lax.rem(work, jnp.int32(panel))
            column = pl.multiple_of(column * block, block)
            first = pl.multiple_of(tiles.first[tile], SWIZZLED_ROWS)

            def context(run: Any) -> None:
                def whole(sums: Any) -> None:
                    run(sums)
                    found = sums[...].astype(out.dtype)
                    begin = jnp.clip(tiles.skipped[tile] - warpgroup * OWN, 0, OWN)
                    end = tiles.skipped[tile] + tiles.rows[tile] - warpgroup * OWN
                    held = begin, jnp.clip(end, 0, OWN) - begin
                    place = first + warpgroup * OWN, column
                    _store(found, staged.at[warpgroup], out, place, held)

                pl.run_scoped(whole, gpu.ACC((OWN, block)))

            def multiply(_: Any, left: Any, right: Any, sums: Any) -> Any:
                right = hopper.transposed(right) if transposed else right
                gpu.wgmma(sums, left.at[own], right)
                gpu.wgmma_wait(0)
                return sums

            matrix, beside = matrices.at[tiles.group[tile]], pl.ds(column, block)
            hopper.pipeline(specs, steps, multiply, context)(
                rows.at[pl.ds(first, ROWS)],
                matrix.at[beside] if transposed else matrix.at[:, beside],
                allocations=stages,
            )

    gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(found: Any, staged: Any, out: Any, place: Any, held: Any) -> None:
    """Writes the rows of a tile that belong to its group, through shared memory.

    Args:
        found: `[OWN, C]`, the results of this warpgroup.
        staged: `[OUT_SLOTS, OWN, OUT_COLUMNS]`, shared memory of this warpgroup; not
            swizzled, so that a copy can start at any row.
        out: `[N, B]`.
        place: row and column of `out` for the first row of `found`.
        held: the first row to write and the number of rows.
    """
    pl, gpu = hopper.pallas()
    row, column = place
    for part in range(found.shape[1] // OUT_COLUMNS):
        slot, at = staged.at[part % OUT_SLOTS], part * OUT_COLUMNS
        gpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
        slot[...] = found[:, at : at + OUT_COLUMNS]
        gpu.commit_smem()
        to = out.at[pl.ds(row, OWN), pl.ds(column + at, OUT_COLUMNS)]
        _copy_rows(slot, to, *held)
        gpu.commit_smem_to_gmem_group()


def _copy_rows(slot: Any, to: Any, first: Any, count: Any) -> None:
    """Starts to copy `count` rows of `[OWN, OUT_COLUMNS]` from row `first` on."""
    pl, gpu = hopper.pallas()
    # The size of a copy is a compile-time constant, so there is one per bit of count.
    for bit in range(OWN.bit_length()):
        size = 1 << bit

        @pl.when(count & size != 0)
        def _(size: int = size) -> None:
            rows = pl.ds(first + (count & (size - 1)), size)
            gpu.copy_smem_to_gmem(slot.at[rows], to.at[rows], commit_group=False)
