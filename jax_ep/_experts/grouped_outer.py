"""Pallas kernel for Hopper that computes gradients of a grouped matmul's matrices.

JAX's own kernel (`jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu`) has one
warpgroup per block, which both loads and multiplies.
"""

from __future__ import annotations

import functools
from typing import Any

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

REACH = DEPTH  # rows past the end of the last group that may be read, times 0


def grouped_outer(
    left: jax.Array, right: jax.Array, *, group_sizes: jax.Array
) -> jax.Array:
    """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`.

    Args:
        left: `[N, A]` of a 16-bit dtype; N a multiple of 8, A of 128. A NaN or infinity
            within REACH rows of a group makes that group's matrix NaN.
        right: `[N, B]` of the same dtype; B a multiple of 128.
        group_sizes: integers `[L]`, with a sum of at most N.
    """
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    firsts = starts // SWIZZLED_ROWS * SWIZZLED_ROWS
    shape = (len(sizes), left.shape[1], right.shape[1])
    operands = (firsts, starts - firsts, ends - firsts, left, right)
    return hopper.launch(_kernel, shape, left.dtype, *operands)


def _kernel(
    firsts: Any, befores: Any, afters: Any, left: Any, right: Any, out: Any
) -> None:
    """The kernel's body; `hopper.launch` describes its grid.

    Args:
        firsts: int32 `[L]`, the first row loaded for each group.
        befores: int32 `[L]`, rows from there to the start of the group.
        afters: int32 `[L]`, rows from there to the end of the group.
        left: `[N, A]`.
        right: `[N, B]`.
        out: `[L, A, B]`.
    """
    pl, gpu = hopper.pallas()
    groups, high, wide = out.shape
    block = hopper.columns_of_block(wide)
    panel = hopper.panel(wide // block)
    in_panel = high // ROWS * panel
    in_group = high // ROWS * (wide // block)
    swizzled = hopper.swizzled()
    specs = [
        gpu.BlockSpec((DEPTH, columns), lambda k: (k, 0), transforms=swizzled)
        for columns in (ROWS, block)
    ]

    @functools.partial(
        pl.run_scoped,
        stages=hopper.pipeline(specs).get_allocations(left, right),
        staged=gpu.SMEM(
            (WARPGROUPS, OUT_SLOTS, OWN, OUT_COLUMNS), out.dtype, transforms=swizzled
        ),
        collective_axes="warpgroup",
    )
    def _(stages: Any, staged: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        own = pl.ds(warpgroup * OWN, OWN)

        @gpu.nd_loop((groups * in_group,), collective_axes="sm")
        def _(loop: Any) -> None:
            (work,) = loop.index
            group, within = work // in_group, lax.rem(work, jnp.int32(in_group))
            in_it = lax.rem(within, jnp.int32(in_panel))
            row = pl.multiple_of(in_it // panel * ROWS, ROWS)
            column = within // in_panel * panel + lax.rem(in_it, jnp.int32(panel))
            column = pl.multiple_of(column * block, block)
            first = pl.multiple_of(firsts[group], SWIZZLED_ROWS)
            before, after = befores[group], afters[group]
            steps = jnp.where(after > before, (after + DEPTH - 1) // DEPTH, 0)

            def context(run: Any) -> None:
                def whole(sums: Any) -> None:
                    run(sums)
                    found = sums[...].astype(out.dtype)
                    to = out.at[group, pl.ds(row, ROWS), pl.ds(column, block)]
                    _store(found, staged.at[warpgroup], to.at[own])

                pl.run_scoped(whole, gpu.ACC((OWN, block)))

            def multiply(step: Any, left: Any, right: Any, sums: Any) -> Any:
                mine = left.at[:, own]

                @pl.when((step[0] == 0) | (step[0] == steps - 1))
                def _() -> None:
                    at = lax.broadcasted_iota(jnp.int32, (DEPTH, OWN), 0)
                    at = gpu.layout_cast(at, gpu.Layout.WGMMA) + step[0] * DEPTH
                    mine[...] = jnp.where((at >= before) & (at < after), mine[...], 0)
                    gpu.commit_smem()

                gpu.wgmma(sums, hopper.transposed(mine), right)
                gpu.wgmma_wait(0)
                return sums

            hopper.pipeline(specs, steps, multiply, context)(
                # These slices may end past the operands; no block there is loaded.
                left.at[pl.ds(first, left.shape[0]), pl.ds(row, ROWS)],
                right.at[pl.ds(first, right.shape[0]), pl.ds(column, block)],
                allocations=stages,
            )

    gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store(found: Any, staged: Any, out: Any) -> None:
    """Writes `[OWN, C]` through `[OUT_SLOTS, OWN, OUT_COLUMNS]` of shared memory."""
    pl, gpu = hopper.pallas()
    for part in range(found.shape[1] // OUT_COLUMNS):
        slot, at = staged.at[part % OUT_SLOTS], part * OUT_COLUMNS
        gpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
        slot[...] = found[:, at : at + OUT_COLUMNS]
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(slot, out.at[:, pl.ds(at, OUT_COLUMNS)])
