"""Partial sums over a tensor axis: scattered over it by columns, and gathered again."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep._core.handle import EPHandle
from jax_ep._core.varying import varying

# Room for rows, in rows that arrive if all ranks get the same, up to which the
# columns of all of them are scattered.
_ROOM = 2


def are_scattered(ep: EPHandle, axis: str) -> bool:
    """Whether a layer scatters columns over `axis` before the way back of its rows.

    The exchange then carries each column once, and not from each rank of the axis. In
    return all N rows cross the axis in float32. With room for many more rows than
    arrive, that takes more time and memory than it saves.
    """
    config, size = ep.config, ep.mesh.shape[axis]
    fits = config.hidden_size % (size * config.column_multiple) == 0
    arriving = config.max_tokens_per_rank * (config.top_k + config.fused_shared_expert)
    return fits and ep.recv_capacity <= _ROOM * arriving


def scatter(rows: jax.Array, axis: str) -> jax.Array:
    """Sums `[N, H]` over `axis` in float32, and returns `[N, H / size]` of the sum."""
    part: Any = _scatter(rows, axis)
    return part


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scatter(rows: jax.Array, axis: str) -> jax.Array:
    wide = rows.astype(jnp.float32)
    part = jax.lax.psum_scatter(wide, axis, scatter_dimension=1, tiled=True)
    return part.astype(rows.dtype)


def _scatter_forward(rows: jax.Array, axis: str) -> tuple[jax.Array, None]:
    return scatter(rows, axis), None


def _scatter_backward(axis: str, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # JAX's own derivative would cast to float32 before the gather, not after it.
    return (jax.lax.all_gather(cotangent, axis, axis=1, tiled=True),)


_scatter.defvjp(_scatter_forward, _scatter_backward)


def gather(part: jax.Array, axis: str) -> jax.Array:
    """Gathers columns `[n, H / size]` to `[n, H]`, equal on all ranks of `axis`."""
    # Without check_vma nothing varies, and cotangents are summed outside.
    kind = "invarying" if axis in varying(part) else "varying"
    return jax.lax.all_gather(part, axis, axis=1, tiled=True, to=kind)
