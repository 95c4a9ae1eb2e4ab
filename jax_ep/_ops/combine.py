"""combine: returns expert rows to their tokens and sums them, in one call or in two.

Derivatives, with weights w, expert rows E, i = row(t, k) and the sum y:
    dE[i] = w[i] dy[t(i)], dw[i] = <dy[t(i)], E[i]>, dresidual = dy
With `reduce="source"` dw is sent back to the source; with "none" each row is a token of
its own, without weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_ep import formats
from jax_ep._core import calls, checks, operands
from jax_ep._core.handle import EPHandle
from jax_ep._core.operands import Operand
from jax_ep._core.types import Route
from jax_ep._native.loader import cpu as native
from jax_ep._ops import options
from jax_ep._ops import pending as pendings
from jax_ep._ops.cached import dispatch_cached, return_rows
from jax_ep._ops.ordering import OrderedCall
from jax_ep._ops.pending import Pending
from jax_ep._ops.remat import OUT_NAME
from jax_ep._ops.rows_back import rows_back, rows_back_reference
from jax_ep._peers.windows import platform_of
from jax_ep._transport import split_transport_of, transport_of
from jax_ep._transport.base import CombineInputs, SumInputs, Token, Wire

# What combine takes, for who passes the whole Dispatched or leaves the route out.
ARGUMENTS = (
    "pass the experts' rows and the route of the dispatch, as in (ep, rows, d.route, "
    "d.router_weights)"
)
_ROW_BYTES = native.ROW_ALIGN_BYTES  # the smallest possible width of a row


class CombineArgs(NamedTuple):
    """The operands of a combine: arrays, or None if omitted."""

    expert_out: Any
    route: Any
    router_weights: Any
    residual: Any


class How(NamedTuple):
    """What a whole combine leaves out.

    Attributes:
        zero_tail: if not, cotangents past the groups may be anything.
        sent: if not, nothing is exchanged and the sums are zeros, for who needs only
            the derivative.
    """

    zero_tail: bool = True
    sent: bool = True


@calls.explained("combine", ARGUMENTS)
def combine(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
) -> jax.Array:
    """Sums expert rows back to tokens: `y[t] = sum_k w[t, k] * expert_out[row(t, k)]`.

    Call it inside `jax.shard_map`, like `dispatch`. With `reduce="rank"` each expert
    rank sums its rows of a token in float32 in k order and rounds once to
    `combine_dtype`; the source sums these in ascending order of ranks, adds the shared
    expert's row, then `residual`, and rounds once to `dtype`. With `reduce="source"`
    each row is sent in `combine_dtype`, and the source sums them in k order; with
    "none" it returns them. Rows of padding and dropped rows are never read. Rows may
    have fewer than H columns, as those of tensor-parallel experts that scatter their
    columns first; the result then has the same number.
    Differentiable with respect to `expert_out`, `router_weights` and `residual`. Under
    `jax.vmap` the calls of the batch are made one after the other.

    Args:
        ep: the handle that dispatched.
        expert_out: `[N, H']` in the config's dtype, with H' <= H. A row must be a
            multiple of 16 bytes, and of the block of `combine_format` and
            `grad_format` if they are set.
        route: `d.route` of the dispatch.
        router_weights: float32 `[N]`, usually `d.router_weights`; narrower float types
            are widened. With `reduce="source"` `[n, K]`; with "none" it must be None.
            None means 1: the route holds no weights, so without them the sum is
            unweighted even after a weighted dispatch.
        residual: `[n, H']` in the config's dtype, added to the sum, or None. It must
            be None with `reduce="none"`, and with `skip_a2a`, whose partial sums would
            each include it.

    Returns:
        `[n, H']` in the config's dtype; with `skip_a2a` this rank's part of the sum, to
        be added up by `jax.lax.psum`. With `reduce="none"` `[n, K, H']`, zero for
        entries without a row.

    Raises:
        ValueError, TypeError: while tracing, if an argument is not as described above,
            the call is outside shard_map, or `ep` is closed.
    """
    return combine_routed(ep, expert_out, route, router_weights, residual)


def combine_routed(
    ep: EPHandle,
    expert_out: Any,
    route: Any,
    router_weights: Any,
    residual: Any,
    *,
    how: How | None = None,
) -> jax.Array:
    """Does `combine`; `how` may leave out what the caller does not need."""
    given = CombineArgs(expert_out, route, router_weights, residual)
    args = _checked("combine", ep, given)
    with checks.calling("combine"):
        return _by_token(ep, _COMBINE(ep, args, static=how or How()))


@calls.explained("combine_async", ARGUMENTS)
def combine_async(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
) -> Pending:
    """Starts a combine, which `combine_wait` completes.

    Args:
        ep: the handle that dispatched.
        expert_out: `[N, H']`, as in `jax_ep.combine`.
        route: `d.route` of the dispatch.
        router_weights: as in `jax_ep.combine`, or None.
        residual: `[n, H']` or None, as in `jax_ep.combine`.

    Returns:
        A `Pending` for `combine_wait`.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.combine`, or if this trace
            already has as many pending combines as allowed.
    """
    function = "combine_async"
    given = CombineArgs(expert_out, route, router_weights, residual)
    args = _checked(function, ep, given)
    pendings.require_room(function, "combine", ep, args)
    with checks.calling(function):
        held, port = _SEND(ep, args, None)
    return pendings.opened(Pending("combine", ep.key, held, port))


def combine_wait(pending: Pending) -> jax.Array:
    """Completes a combine; the result equals that of `jax_ep.combine`, bit for bit.

    Args:
        pending: result of `combine_async` on the same rank.

    Returns:
        `[n, H']`, or `[n, K, H']` with `reduce="none"`, as from `jax_ep.combine`.

    Raises:
        ValueError, TypeError: while tracing, if `pending` is not the `Pending` of a
            combine, was already waited on, or holds several ranks; or if its handle
            is closed.
    """
    ep = pendings.awaited("combine_wait", "combine", pending)
    with checks.calling("combine_wait"):
        y = _by_token(ep, _RECV(ep, (pending.held, pending.ports), None))
    pendings.closed(pending)
    return y


_WEIGHTS = Operand(
    "router_weights", "[N]", operands.WEIGHTS, "pass d.router_weights", optional=True
)
_OPERANDS = (
    Operand(
        "expert_out",
        "[N, columns]",
        None,
        "pass a row for each row of d.tokens, padding included",
        operands.dequantized,
    ),
    _WEIGHTS,
    Operand(
        "residual",
        "[n, columns]",
        None,
        "pass a row for each token that was dispatched, with the columns of expert_out",
        optional=True,
    ),
)
_AT_SOURCE = (
    _OPERANDS[0],
    _WEIGHTS._replace(
        shapes="[n, K]",
        remedy='pass the weights that belong to topk_ids, with reduce="source"',
    ),
    _OPERANDS[2],
)


def _checked(function: str, ep: EPHandle, given: CombineArgs) -> CombineArgs:
    """Returns checked operands that vary alike, with `entry_route` for "none"."""
    checks.require_open(function, ep)
    checks.require_scope(function, ep)
    config = ep.config
    route = checks.require_route(function, ep, given.route)
    checks.require_route_shapes(function, ep, route)
    checks.require_combinable(function, ep, given.router_weights, given.residual)
    sizes = {
        "N": (ep.recv_capacity, "the rows of d.tokens"),
        "n": (route.slot_of.shape[0], "the tokens of the dispatch"),
        "K": (config.top_k, "top_k"),
    }
    table = _AT_SOURCE if config.reduce == "source" else _OPERANDS
    arrays = operands.checked(function, table, given._asdict(), sizes, config.dtype)
    checks.require_columns(function, ep, "expert_out", arrays["expert_out"])
    args = CombineArgs(*checks.vary_together(ep, *given._replace(**arrays)))
    if config.reduce == "none":
        args = args._replace(route=options.entry_route(args.route))
    return args


def _by_token(ep: EPHandle, y: jax.Array) -> jax.Array:
    """Returns `y`, with `reduce="none"` reshaped to `[n, K, H]`."""
    if ep.config.reduce != "none":
        return y
    top_k = ep.config.top_k
    return y.reshape(y.shape[0] // top_k, top_k, y.shape[1])


def _inputs(ep: EPHandle, args: CombineArgs) -> tuple[CombineInputs, Wire]:
    at_source = ep.config.reduce == "source"
    sums = SumInputs(residual=args.residual)
    given = CombineInputs(args.expert_out, args.router_weights, sums=sums)
    if at_source:
        sums = sums._replace(entry_weights=args.router_weights)
        given = given._replace(router_weights=None, sums=sums)
    inputs = options.summed(ep, args.route, given, by_entry=at_source)
    return inputs, Wire(ep.config.combine_wire, by_entry=at_source)


def _expert_out(args: CombineArgs) -> jax.Array:
    return args.expert_out


def _named(y: jax.Array) -> jax.Array:
    return checkpoint_name(y, OUT_NAME)


def _run(
    ep: EPHandle, how: How, args: CombineArgs, after: Token
) -> tuple[jax.Array, Token]:
    if not how.sent:
        shape = (args.route.slot_of.shape[0], args.expert_out.shape[1])
        return jnp.zeros_like(args.expert_out, shape=shape), after
    (y, _), done = transport_of(ep).combine(ep, *_inputs(ep, args), after)
    return y, done


def _keep(ep: EPHandle, how: Any, args: CombineArgs, results: Any) -> Any:
    """Returns what `_cotangents` needs; the rows only if there are weights."""
    weighted = args.router_weights is not None
    weighting = (args.router_weights, args.expert_out) if weighted else None
    # None or (), so that the structure alone says whether there was a residual.
    return args.route, weighting, None if args.residual is None else ()


def _cotangents(ep: EPHandle, how: How, kept: Any, dy: jax.Array) -> CombineArgs:
    route, weighting, had_residual = kept
    dresidual = None if had_residual is None else dy
    if weighting is None:
        rows, _ = dispatch_cached(ep, route, dy, None, how.zero_tail)
        return CombineArgs(rows, None, None, dresidual)
    router_weights, expert_out = weighting
    if not how.sent and ep.config.overlap == "stream":
        # A part that is computed again beside the next part's dispatch. The cotangents'
        # exchange waits for that, so the rows come first, which need not wait.
        dy, expert_out = jax.lax.optimization_barrier((dy, expert_out))
    at_source = ep.config.reduce == "source"
    sent_weights = router_weights if at_source else None
    rows, sent = dispatch_cached(ep, route, dy, sent_weights, how.zero_tail)
    of_rows: Any = sent if at_source else router_weights
    # E and w may hold anything in padding, whose cotangents must be zero.
    real = route.row_slot >= 0
    factor = jnp.where(real, of_rows, 0.0)
    if ep.config.fused_shared_expert:
        factor = jnp.where(options.shared_rows(ep, dy.shape[0]), 1.0, factor)
    back = rows_back if platform_of(ep.mesh) == "gpu" else rows_back_reference
    drows, dweights = back(rows, expert_out, factor, route.row_slot)
    if at_source:
        # Only weights are returned, so the rows beside them have the smallest width.
        wire = ep.config.grad_format
        width = formats.block(wire) if wire else _ROW_BYTES // rows.dtype.itemsize
        nothing = jnp.zeros_like(rows, shape=(rows.shape[0], width))
        _, dweights = return_rows(ep, route, nothing, dweights)
    return CombineArgs(drows, None, dweights, dresidual)


_COMBINE = OrderedCall(
    "combine", _run, _keep, _cotangents, like=_expert_out, named=_named
)


# The first half returns `held`, which is what arrived and the operands of the last sum,
# and `port`, which is zeros in the shape of the sums. The cotangent of the sums returns
# to the first half through `port`.


def _run_send(
    ep: EPHandle, static: None, args: CombineArgs, after: Token
) -> tuple[Any, Token]:
    inputs, wire = _inputs(ep, args)
    sent, done = split_transport_of(ep).combine_send(ep, inputs, wire, after)
    shape = (args.route.slot_of.shape[0], args.expert_out.shape[1])
    port = jnp.zeros_like(args.expert_out, shape=shape)
    return ((sent, inputs.sums), port), done


def _transpose_send(
    ep: EPHandle, static: None, kept: Any, cotangents: Any
) -> CombineArgs:
    return _cotangents(ep, How(), kept, cotangents[1])


_SEND = OrderedCall(
    "combine_async",
    _run_send,
    _keep,
    _transpose_send,
    like=_expert_out,
    ordered=lambda ep: split_transport_of(ep).ordered,
    most_batched=lambda ep: ep.config.most_pending,
)


def _run_recv(
    ep: EPHandle, static: None, halves: Any, after: Token
) -> tuple[jax.Array, Token]:
    (sent, sums), port = halves
    wire = Wire(ep.config.combine_wire, by_entry=ep.config.reduce == "source")
    return split_transport_of(ep).combine_recv(ep, sent, sums, port, wire, after)


_RECV = OrderedCall(
    "combine_wait",
    _run_recv,
    lambda *_: None,
    lambda ep, static, kept, dy: (None, dy),
    like=lambda halves: jax.tree.leaves(halves[0])[0],
    named=_named,
    ordered=lambda ep: split_transport_of(ep).ordered,
)
