"""Compares what two transports return for the same inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

_EXACT = (
    "row_offsets",
    "group_sizes",
    "expert_counts",
    "expert_ids",
    "num_dropped",
    "num_invalid",
    "slot_of",
    "slot_counts",
)
_ROWS = ("tokens", "scales", "src_info", "router_weights")
_ROUTE = ("slot_of", "slot_counts", "row_slot", "row_of")


def differs(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns which entries of dimension 0 have different bits."""
    kind = f"uint{8 * a.dtype.itemsize}"
    different = lax.bitcast_convert_type(a, kind) != lax.bitcast_convert_type(b, kind)
    return different.reshape(a.shape[0], -1).any(axis=1)


def _differences(
    a: dict[str, Any], b: dict[str, Any], zero_tail: bool
) -> dict[str, jax.Array]:
    """Counts the entries of dimension 0 that differ on one rank: int32 [1] by field."""
    rows = jnp.arange(a["tokens"].shape[0]) < a["row_offsets"][-1]
    different = {name: differs(a[name], b[name]) for name in _EXACT}
    for name in _ROWS:
        if a[name] is None:  # scales, of a format without any
            continue
        different[name] = differs(a[name], b[name]) & (zero_tail | rows)
    different["row_slot"] = differs(a["row_slot"], b["row_slot"]) & rows
    _, n, top_k = a["row_of"].shape
    received = jnp.arange(n) < a["slot_counts"][:, None]
    row_of = [each["row_of"].reshape(-1, top_k) for each in (a, b)]
    different["row_of"] = differs(*row_of) & received.reshape(-1)
    return {
        name: jnp.sum(each, dtype=jnp.int32)[None] for name, each in different.items()
    }


def _fields(d: Any) -> dict[str, Any]:
    # Without the route's static key: one compiled comparison serves all handles.
    fields = {name: getattr(d.route, name) for name in _ROUTE}
    return fields | {
        name: getattr(d, name) for name in (*_EXACT, *_ROWS) if name not in fields
    }


def _names(counts: dict[str, jax.Array]) -> dict[str, int]:
    # jnp, because a count may be an array of several processes.
    found = {name: int(jnp.sum(count)) for name, count in counts.items()}
    return {name: count for name, count in found.items() if count}


@functools.cache
def _compare_dispatched(mesh: Mesh, zero_tail: bool) -> Callable[..., Any]:
    return mapped(mesh, functools.partial(_differences, zero_tail=zero_tail))


def dispatched(mesh: Mesh, config: Any, a: Any, b: Any) -> dict[str, int]:
    """Counts the entries that differ between two Dispatched, by field; {} if none."""
    compare = _compare_dispatched(mesh, config.zero_tail)
    return _names(compare(_fields(a), _fields(b)))


@jax.jit
def _compare_arrays(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(differs(a, b), dtype=jnp.int32)


def combined(a: jax.Array, b: jax.Array) -> dict[str, int]:
    """Counts the rows that differ between two combines, in the form of `dispatched`."""
    return _names({"y": _compare_arrays(a, b)})


@jax.jit
def _largest_error(got: jax.Array, want: jax.Array, skip: Any) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    skip = skip.reshape(-1, *[1] * (got.ndim - 1))
    error = jnp.where(skip, 0, jnp.abs(got - want))
    # A NaN must not pass for a small error.
    return jnp.max(jnp.where(jnp.isnan(error), jnp.inf, error)) / jnp.max(jnp.abs(want))


def largest_error(got: jax.Array, want: jax.Array, skip: Any = None) -> float:
    """Returns the largest error over the largest element.

    The entries `skip` of dimension 0 are left out of the error.
    """
    skip = jnp.zeros(1, bool) if skip is None else skip
    return float(_largest_error(got, want, skip))


def call_dispatch(mesh: Mesh, ep: Any) -> Callable[..., Any]:
    """Returns `dispatch` for global arrays: tokens, ids, weights, codes' scales."""

    def dispatch(tokens: Any, ids: Any, weights: Any, scales: Any = None) -> Any:
        return jax_ep.dispatch(ep, tokens, ids, weights, token_scales=scales)

    return mapped(mesh, dispatch)


def call_combine(mesh: Mesh, ep: Any) -> Callable[..., Any]:
    """Returns `combine` for global arrays: expert rows, route, weights."""
    return mapped(mesh, functools.partial(jax_ep.combine, ep))


def mapped(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Jits `function` of one rank's arrays for global arrays, stacked on dim 0."""
    spec = P("ep")
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
