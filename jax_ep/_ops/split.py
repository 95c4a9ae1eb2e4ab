"""dispatch and combine in two halves, as called inside `jax.shard_map`."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from jax_ep._core import checks, handle
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import CallKind
from jax_ep._core.types import Dispatched, Route
from jax_ep._ops import halves as _autodiff_split
from jax_ep._ops import operands
from jax_ep._ops import pending as _pending
from jax_ep._ops.dispatch import split_transport_of
from jax_ep._ops.pending import Pending


def dispatch_async(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
) -> Pending:
    """Begins a dispatch: `jax_ep.dispatch` up to the end of its exchange.

    What does not need its result may run before `dispatch_wait`. At most the config's
    `pending_calls` dispatches of a handle may be pending.

    Args:
        ep: handle of `jax_ep.init`.
        tokens: as in `jax_ep.dispatch`, like the others.
        topk_ids: int32 `[n, K]`.
        router_weights: float32 `[n, K]` or None.
        input_scale: of "nvfp4", or None.

    Returns:
        A `Pending` for `dispatch_wait`.

    Raises:
        ValueError, TypeError: as `jax_ep.dispatch`; one pending dispatch too many,
            where this trace sees it.
    """
    function = "dispatch_async"
    weighted, args = operands.of_dispatch(
        function, ep, tokens, topk_ids, router_weights, input_scale
    )
    _pending.require_room(function, "dispatch", ep)
    with checks.calling("dispatch_async"):
        halves = _autodiff_split.dispatch_async(ep, weighted, *args)
    return _pending.opened(Pending("dispatch", ep.key, *halves))


def dispatch_wait(pending: Pending) -> Dispatched:
    """Ends a dispatch: what `jax_ep.dispatch` returns, bit for bit.

    Args:
        pending: of `dispatch_async`, on the same rank.

    Returns:
        A `Dispatched`.

    Raises:
        ValueError, TypeError: while tracing, if `pending` is no dispatch's, was waited
            for already, is of several ranks, or if its handle is closed.
    """
    ep = _waiting("dispatch_wait", "dispatch", pending)
    with checks.calling("dispatch_wait"):
        d = _autodiff_split.dispatch_wait(ep, pending.held, pending.ports)
    _pending.closed(pending)
    return d


def combine_async(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
) -> Pending:
    """Begins a combine: `jax_ep.combine` up to the end of its exchange.

    Args:
        ep: the handle that dispatched.
        expert_out: as in `jax_ep.combine`, like the others.
        route: `d.route` of the dispatch.
        router_weights: weights or None.
        residual: `[n, H]` or None.

    Returns:
        A `Pending` for `combine_wait`.

    Raises:
        ValueError, TypeError: as `jax_ep.combine` and `dispatch_async`.
    """
    function = "combine_async"
    args = operands.of_combine(
        function, ep, expert_out, route, router_weights, residual
    )
    _pending.require_room(function, "combine", ep)
    with checks.calling("combine_async"):
        halves = _autodiff_split.combine_async(ep, *args)
    return _pending.opened(Pending("combine", ep.key, *halves))


def combine_wait(pending: Pending) -> jax.Array:
    """Ends a combine: what `jax_ep.combine` returns, bit for bit.

    Args:
        pending: of `combine_async`, on the same rank.

    Returns:
        As `jax_ep.combine`.

    Raises:
        ValueError, TypeError: as `dispatch_wait`.
    """
    ep = _waiting("combine_wait", "combine", pending)
    with checks.calling("combine_wait"):
        y = _autodiff_split.combine_wait(ep, pending.held, pending.ports)
    _pending.closed(pending)
    return y


def handle_of(function: str, kind: CallKind, pending: Pending) -> EPHandle:
    """The open handle of a call of that kind."""
    if not isinstance(pending, Pending):
        raise TypeError(
            f"jax_ep.{function}: pending must be what jax_ep.{kind}_async returned, "
            f"got {type(pending).__name__}; keep the Pending itself"
        )
    if pending.kind != kind:
        raise ValueError(
            f"jax_ep.{function}: pending must be of a {kind}, got one of a "
            f"{pending.kind}; call jax_ep.{pending.kind}_wait on it"
        )
    if _pending.was_closed(pending):
        raise ValueError(
            f"jax_ep.{function}: pending must be waited for once, got one that was; "
            "keep the result of the first wait"
        )
    ep = handle.find(pending.key)
    if ep is None:
        raise ValueError(
            f"jax_ep.{function}: the handle of pending must be open, got one that is "
            "gone; keep it until the wait"
        )
    checks.require_open(function, ep)
    return ep


def _waiting(function: str, kind: CallKind, pending: Pending) -> EPHandle:
    ep = handle_of(function, kind, pending)
    checks.require_scope(function, ep)
    wanted = split_transport_of(ep).held_rows(ep)
    held = jax.tree.leaves(pending.held)[0].shape[0]
    if held != wanted:
        raise ValueError(
            f"jax_ep.{function}: pending must be one rank's, which holds {wanted}, got "
            f"{held}; use jax_ep.sharded.{function} on global arrays"
        )
    return ep
