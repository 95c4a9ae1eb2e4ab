"""Dispatch and combine as JAX has them: sort, `jax.lax.ragged_all_to_all`, regroup.

What p2p.py compares with. On a rank's arrays inside shard_map; every (token, k) crosses
as a row of its own, and weights are applied at the source, so they do not travel.
`updates` says what one piece of the exchange is:

* "rank": all rows for a rank. They arrive by source and are regrouped by expert.
* "expert": the rows for one expert, sent to their place among that expert's rows.

Either way dispatch returns jax_ep's order of rows. Ids must be in [0, E), and all rows
must fit; rows past the last group are unspecified.

Derivatives are written out: what was gathered forward is gathered backward, and an
exchange goes back by the sizes that are known from the way there. JAX's own rules
would scatter, and exchange the sizes anew.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

UPDATES = ("rank", "expert")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("order", "place_of", "there", "back", "grouped", "arrived"),
    meta_fields=(),
)
@dataclasses.dataclass
class Way:
    """What combine needs of a dispatch.

    Attributes:
        order: int32 [n * K], which (token, k) each sorted row is; the inverse of
            place_of.
        place_of: int32 [n * K], where each (token, k) is among the sorted rows.
        there, back: input_offsets, send_sizes, output_offsets and recv_sizes of the two
            exchanges.
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
def gather(x, at, back, kept=None):
    """`x[at]`; row i of x is at `back[i]` of the result, int32 [X, copies].

    Where `kept`, bool [X, copies], is given and False, it is not there.
    """
    del back, kept
    return x[at]


def _gather_forward(x, at, back, kept=None):
    return x[at], (back, kept)


def _gather_backward(saved, cotangent):
    back, kept = saved
    copies = cotangent[back].astype(jnp.float32)
    if kept is not None:
        copies = jnp.where(kept[:, :, None], copies, 0)
    return copies.sum(1).astype(cotangent.dtype), None, None, None


gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(exchange, axis, rows, operand, there, back):
    """`rows` rows of what was sent here; `back` is the exchange the other way."""
    del back
    room = jnp.zeros((rows, operand.shape[1]), operand.dtype)
    return exchange(operand, room, *there, axis_name=axis)


def _exchanged_forward(exchange, axis, rows, operand, there, back):
    received = _exchanged(exchange, axis, rows, operand, there, back)
    # For its shape alone.
    return received, (jnp.zeros((operand.shape[0], 0)), there, back)


def _exchanged_backward(exchange, axis, rows, kept, cotangent):
    del rows
    empty, there, back = kept
    sent = _exchanged(exchange, axis, empty.shape[0], cotangent, back, there)
    return sent, None, None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def _starts(sizes, axis=-1):
    return jnp.cumsum(sizes, axis) - sizes


def _regroup(sizes, rows):
    """For blocks of `sizes` [A, B] in row-major order: where each row is from.

    Returns int32 [rows]: row i of the column-major order is that row of the row-major.
    """
    ends = jnp.cumsum(sizes.T.reshape(-1))
    index = jnp.arange(rows, dtype=jnp.int32)
    block = jnp.searchsorted(ends, index, side="right", method="compare_all")
    block = jnp.minimum(block, ends.size - 1)
    starts_here = ends - sizes.T.reshape(-1)
    starts_there = _starts(sizes.reshape(-1)).reshape(sizes.shape).T.reshape(-1)
    moved = index - starts_here[block] + starts_there[block]
    return jnp.clip(moved, 0, rows - 1).astype(jnp.int32)


def _exchanges(counts, me, updates):
    """The two exchanges' arguments, from the rows of all (source, expert) pairs."""
    ranks, experts = counts.shape
    local = experts // ranks
    mine = lax.dynamic_slice_in_dim(counts, me * local, local, axis=1)
    if updates == "rank":
        sizes = counts.reshape(ranks, ranks, local).sum(2)
        send, receive = sizes[me], sizes[:, me]
        at_source = _starts(sizes, 1)
        at_expert = _starts(sizes, 0)
        there = (at_source[me], send, at_expert[me], receive)
        return there, (at_expert[:, me], receive, at_source[:, me], send)
    send, receive = counts[me], mine.reshape(-1)
    totals = counts.sum(0).reshape(ranks, local)
    at_source = _starts(counts, 1)
    at_expert = _starts(totals, 1).reshape(-1) + _starts(counts, 0)
    own = partial(lax.dynamic_slice_in_dim, start_index=me * local, slice_size=local)
    there = (at_source[me], send, at_expert[me], receive)
    from_here = own(at_expert, axis=1).reshape(-1)
    return there, (from_here, receive, own(at_source, axis=1).reshape(-1), send)


def dispatch(
    tokens, ids, *, axis, experts, rows, updates="rank", exchange=lax.ragged_all_to_all
):
    """Rows [N, H] by expert, group sizes [L], and the way back."""
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
    if updates == "rank":
        grouped, arrived = _regroup(mine, rows), _regroup(mine.T, rows)
        received = gather(received, grouped, arrived[:, None])
    way = Way(order, place_of, there, back, grouped, arrived)
    return received, mine.sum(0), way


def combine(expert_out, way, weights, *, axis, exchange=lax.ragged_all_to_all):
    """The weighted sum [n, H] of rows [N, H], in float32, weights [n, K]."""
    n, top_k = weights.shape
    hidden = expert_out.shape[1]
    if way.arrived is not None:
        expert_out = gather(expert_out, way.arrived, way.grouped[:, None])
    returned = _exchanged(exchange, axis, n * top_k, expert_out, way.back, way.there)
    rows = gather(returned, way.place_of, way.order[:, None])
    rows = rows.reshape(n, top_k, hidden).astype(jnp.float32)
    return jnp.sum(rows * weights[:, :, None], axis=1).astype(expert_out.dtype)


def reference_exchange(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """`jax.lax.ragged_all_to_all` for tests: XLA's CPU compiler has none."""
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
