"""Dispatch and combine with JAX alone: sort, `jax.lax.ragged_all_to_all`, regroup.

jax_ep's times are compared with these. All functions take one rank's arrays inside
shard_map. Every (token, k) is sent as a separate row; weights are applied at the
source, so they are not sent. `updates` says what one piece of the exchange is:

* "rank": all rows for a rank. They arrive by source and are regrouped by expert.
* "1/8 rank", "1/32 rank": the same rows, in up to as many parts of equal size.
* "expert": the rows for one expert, sent to their place among that expert's rows.

Either way dispatch returns jax_ep's order of rows. Ids must be in [0, E), and all rows
must fit; rows past the last group are unspecified.

Derivatives are explicit: a gather's derivative is also a gather, and an exchange goes
back with the sizes that are known from the way there. JAX's own rules would scatter,
and exchange the sizes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._core import pytrees

# How many parts the rows for a rank are sent in.
_PARTS = {"rank": 1, "1/8 rank": 8, "1/32 rank": 32}
UPDATES = (*_PARTS, "expert")
Exchange = Callable[..., jax.Array]


@pytrees.register()
@dataclasses.dataclass
class Way:
    """What combine needs of a dispatch.

    Attributes:
        order: int32 [n * K], which (token, k) each sorted row is; the inverse of
            place_of.
        place_of: int32 [n * K], where each (token, k) is among the sorted rows.
        there: input_offsets, send_sizes, output_offsets and recv_sizes of dispatch's
            exchange.
        back: the same for combine's exchange.
        grouped: int32 [N], which arrived row each row is; None for "expert".
        arrived: int32 [N], the inverse of grouped.
    """

    order: jax.Array
    place_of: jax.Array
    there: tuple[jax.Array, ...]
    back: tuple[jax.Array, ...]
    grouped: jax.Array | None
    arrived: jax.Array | None


@jax.custom_vjp
def gather(
    x: jax.Array, at: jax.Array, back: jax.Array, kept: jax.Array | None = None
) -> jax.Array:
    """Returns `x[at]`, with a derivative that gathers.

    Args:
        x: rows.
        at: int32, the row of x that each row of the result is.
        back: int32 [X, copies], the rows of the result that hold row i of x.
        kept: bool [X, copies], which entries of `back` are valid; None means all.

    Returns:
        The rows.
    """
    del back, kept
    return x[at]


def _gather_forward(
    x: jax.Array, at: jax.Array, back: jax.Array, kept: jax.Array | None = None
) -> Any:
    return x[at], (back, kept)


def _gather_backward(saved: Any, cotangent: jax.Array) -> Any:
    back, kept = saved
    copies = cotangent[back].astype(jnp.float32)
    if kept is not None:
        copies = jnp.where(kept[:, :, None], copies, 0)
    return copies.sum(1).astype(cotangent.dtype), None, None, None


gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(
    exchange: Exchange, axis: str, rows: int, operand: jax.Array, there: Any, back: Any
) -> jax.Array:
    """Returns `rows` rows of what was sent here; `back` is the opposite exchange."""
    del back
    room = jnp.zeros((rows, operand.shape[1]), operand.dtype)
    return exchange(operand, room, *there, axis_name=axis)


def _exchanged_forward(
    exchange: Exchange, axis: str, rows: int, operand: jax.Array, there: Any, back: Any
) -> Any:
    received = _exchanged(exchange, axis, rows, operand, there, back)
    # The array of zeros is kept for its shape alone.
    return received, (jnp.zeros((operand.shape[0], 0)), there, back)


def _exchanged_backward(
    exchange: Exchange, axis: str, rows: int, kept: Any, cotangent: jax.Array
) -> Any:
    del rows
    empty, there, back = kept
    sent = _exchanged(exchange, axis, empty.shape[0], cotangent, back, there)
    return sent, None, None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def _starts(sizes: jax.Array, axis: int = -1) -> jax.Array:
    return jnp.cumsum(sizes, axis) - sizes


def _regroup(sizes: jax.Array, rows: int) -> jax.Array:
    """Reorders blocks of `sizes` [A, B] from row-major to column-major order.

    Returns int32 [rows]: the row of the row-major order that row i of the result is.
    """
    ends = jnp.cumsum(sizes.T.reshape(-1))
    index = jnp.arange(rows, dtype=jnp.int32)
    block = jnp.searchsorted(ends, index, side="right", method="compare_all")
    block = jnp.minimum(block, ends.size - 1)
    starts_here = ends - sizes.T.reshape(-1)
    starts_there = _starts(sizes.reshape(-1)).reshape(sizes.shape).T.reshape(-1)
    moved = index - starts_here[block] + starts_there[block]
    return jnp.clip(moved, 0, rows - 1).astype(jnp.int32)


def _in_parts(sizes: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Returns where the parts of blocks begin, and their sizes, both `[..., parts]`."""
    most = -(-sizes[..., None] // parts)
    starts = jnp.minimum(jnp.arange(parts) * most, sizes[..., None])
    return starts, jnp.minimum(most, sizes[..., None] - starts)


def _exchanges(counts: jax.Array, me: jax.Array, updates: str) -> tuple[Any, Any]:
    """Returns the arguments of both exchanges, given counts by (source, expert)."""
    ranks, experts = counts.shape
    local = experts // ranks
    mine = lax.dynamic_slice_in_dim(counts, me * local, local, axis=1)
    if updates in _PARTS:
        sizes = counts.reshape(ranks, ranks, local).sum(2)
        at_source, at_expert = _starts(sizes, 1), _starts(sizes, 0)
        passed, sizes = _in_parts(sizes, _PARTS[updates])
        at_source, at_expert = (at[..., None] + passed for at in (at_source, at_expert))

        def sent(at: jax.Array) -> jax.Array:
            return at[me].reshape(-1)

        def received(at: jax.Array) -> jax.Array:
            return at[:, me].reshape(-1)

        there = (sent(at_source), sent(sizes), sent(at_expert), received(sizes))
        back = received(at_expert), received(sizes), received(at_source), sent(sizes)
        return there, back
    send, receive = counts[me], mine.reshape(-1)
    totals = counts.sum(0).reshape(ranks, local)
    at_source = _starts(counts, 1)
    at_expert = _starts(totals, 1).reshape(-1) + _starts(counts, 0)
    own = partial(lax.dynamic_slice_in_dim, start_index=me * local, slice_size=local)
    there = (at_source[me], send, at_expert[me], receive)
    from_here = own(at_expert, axis=1).reshape(-1)
    return there, (from_here, receive, own(at_source, axis=1).reshape(-1), send)


def dispatch(
    tokens: jax.Array,
    ids: jax.Array,
    *,
    axis: str,
    experts: int,
    rows: int,
    updates: str = "rank",
    exchange: Exchange = lax.ragged_all_to_all,
) -> tuple[Any, jax.Array, Way]:
    """Returns rows [N, H] by expert, group sizes [L], and the way back."""
    top_k = ids.shape[1]
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    me = lax.axis_index(axis)
    all_counts = lax.all_gather(counts, axis)
    there, back = _exchanges(all_counts, me, updates)
    place_of = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    )
    spread = gather(tokens, order // top_k, place_of.reshape(-1, top_k))
    received = _exchanged(exchange, axis, rows, spread, there, back)
    local = experts // all_counts.shape[0]
    mine = lax.dynamic_slice_in_dim(all_counts, me * local, local, axis=1)
    grouped = arrived = None
    if updates != "expert":
        grouped, arrived = _regroup(mine, rows), _regroup(mine.T, rows)
        received = gather(received, grouped, arrived[:, None])
    way = Way(order, place_of, there, back, grouped, arrived)
    return received, mine.sum(0), way


def combine(
    expert_out: jax.Array,
    way: Way,
    weights: jax.Array,
    *,
    axis: str,
    exchange: Exchange = lax.ragged_all_to_all,
) -> jax.Array:
    """Returns the sum [n, H] of rows [N, H] by weights [n, K], added in float32."""
    n, top_k = weights.shape
    hidden = expert_out.shape[1]
    if way.arrived is not None and way.grouped is not None:
        expert_out = gather(expert_out, way.arrived, way.grouped[:, None])
    returned = _exchanged(exchange, axis, n * top_k, expert_out, way.back, way.there)
    rows = gather(returned, way.place_of, way.order[:, None])
    rows = rows.reshape(n, top_k, hidden).astype(jnp.float32)
    return jnp.sum(rows * weights[:, :, None], axis=1).astype(expert_out.dtype)


def reference_exchange(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """Does `jax.lax.ragged_all_to_all` on CPUs, for which XLA does not compile it."""
    del recv_sizes
    me = lax.axis_index(axis_name)
    gather = partial(lax.all_gather, axis_name=axis_name)
    operands = gather(operand)
    starts, sizes, targets = map(gather, (input_offsets, send_sizes, output_offsets))
    ranks = operands.shape[0]
    pieces = starts.shape[1] // ranks
    index = jnp.arange(operand.shape[0])
    for source in range(ranks):
        for piece in range(pieces):
            at = me * pieces + piece
            here = (index >= starts[source, at]) & (
                index < starts[source, at] + sizes[source, at]
            )
            goes = index - starts[source, at] + targets[source, at]
            place = jnp.where(here, goes, output.shape[0])
            output = output.at[place].set(operands[source], mode="drop")
    return output


def exchange_here() -> Exchange:
    """Returns the exchange that works on this process's devices."""
    on_cpu = jax.default_backend() == "cpu"
    return reference_exchange if on_cpu else lax.ragged_all_to_all
