"""Compares what two transports return for the same inputs, bit for bit. For p2p.py."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
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


def differs(a, b):
    """Which entries of dimension 0 have different bits."""
    kind = f"uint{8 * a.dtype.itemsize}"
    different = lax.bitcast_convert_type(a, kind) != lax.bitcast_convert_type(b, kind)
    return different.reshape(a.shape[0], -1).any(axis=1)


def _differences(a, b, zero_tail):
    """int32 [1] entries of dimension 0 that differ, by field; of one rank."""
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


def _fields(d):
    # Without the route's static key: one compiled comparison serves all handles.
    fields = {name: getattr(d.route, name) for name in _ROUTE}
    return fields | {
        name: getattr(d, name) for name in (*_EXACT, *_ROWS) if name not in fields
    }


def _names(counts):
    # jnp: a count may be of several processes.
    found = {name: int(jnp.sum(count)) for name, count in counts.items()}
    return {name: count for name, count in found.items() if count}


@functools.cache
def _compare_dispatched(mesh, zero_tail):
    return mapped(mesh, functools.partial(_differences, zero_tail=zero_tail))


def dispatched(mesh, config, a, b):
    """Entries that differ between two Dispatched, by field; {} if none do."""
    compare = _compare_dispatched(mesh, config.zero_tail)
    return _names(compare(_fields(a), _fields(b)))


@jax.jit
def _compare_arrays(a, b):
    return jnp.sum(differs(a, b), dtype=jnp.int32)


def combined(a, b):
    """Rows that differ between two combines, as dispatched."""
    return _names({"y": _compare_arrays(a, b)})


def call_dispatch(mesh, ep):
    """dispatch on global arrays, compiled on first use."""
    return mapped(mesh, functools.partial(jax_ep.dispatch, ep))


def call_combine(mesh, ep):
    """combine on global arrays: expert rows, route, weights."""
    return mapped(mesh, functools.partial(jax_ep.combine, ep))


def mapped(mesh, function):
    """`function` of a rank's arrays, jitted for global arrays stacked on dim 0."""
    spec = P("ep")
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
