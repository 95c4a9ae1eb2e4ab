"""Reduce-scatters partial sums over a tensor axis by columns, and gathers columns."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._core.handle import EPHandle
from jax_ep._core.varying import all_gather, psum_scatter, varying

# Columns are scattered if N is at most this many times the rows that arrive when all
# ranks get the same number.
_ROOM = 2


def are_scattered(ep: EPHandle, axis: str) -> bool:
    """Whether a layer scatters columns over `axis` before combine.

    Combine then sends each column once, rather than once per rank of the axis. In
    return, all N rows are reduced over the axis in float32. If N is much larger than
    the number of rows that arrive, that takes more time and memory than it saves.
    """
    config, size = ep.config, ep.mesh.shape[axis]
    fits = config.hidden_size % (size * config.column_multiple) == 0
    arriving = config.max_tokens_per_rank * (config.top_k + config.fused_shared_expert)
    return fits and ep.recv_capacity <= _ROOM * arriving


def scatter(rows: jax.Array, axis: str, dtype: str | None = None) -> jax.Array:
    """Sums `[N, H]` over `axis` in float32, rounds once, returns `[N, H / size]` of it.

    `dtype` is the dtype of the result, by default that of the rows.
    """
    given = rows.dtype.name
    return _scattered(_Wire(axis, given, dtype or given), rows)


class _Wire(NamedTuple):
    """The axis of a reduce-scatter of columns, and the dtypes of operand and result."""

    axis: str
    given: str
    made: str

    @property
    def back(self) -> _Wire:
        """The same for cotangents."""
        return _Wire(self.axis, self.made, self.given)


# Each is the other's transpose. Without this rule XLA would gather float32 columns,
# because of the cast to float32; gathered in their own dtype they are just as exact.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered(wire: _Wire, rows: jax.Array) -> jax.Array:
    """Sums rows `[N, H]` over an axis in float32; returns `[N, H / size]` of it."""
    return psum_scatter(rows.astype(jnp.float32), (wire.axis,), 1).astype(wire.made)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(wire: _Wire, columns: jax.Array) -> jax.Array:
    """Gathers columns `[N, H / size]` to `[N, H]`."""
    return all_gather(columns, (wire.axis,), 1).astype(wire.made)


_scattered.defvjp(
    lambda wire, rows: (_scattered(wire, rows), None),
    lambda wire, _, cotangent: (_gathered(wire.back, cotangent),),
)
_gathered.defvjp(
    lambda wire, columns: (_gathered(wire, columns), None),
    lambda wire, _, cotangent: (_scattered(wire.back, cotangent),),
)


def gather(part: jax.Array, axis: str) -> jax.Array:
    """Gathers columns `[n, H / size]` to `[n, H]`, equal on all ranks of `axis`."""
    # Without check_vma nothing varies, and cotangents are summed outside.
    if axis not in varying(part):
        return all_gather(part, (axis,), 1)
    if jax.lax.axis_size(axis) == 1:
        return jax.lax.psum(part, axis)  # changes the type alone
    return jax.lax.all_gather(part, axis, axis=1, tiled=True, to="invarying")
