"""Pending, a call between its two halves, and how many of them each trace has."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import jax

from jax_ep._core import checks, errors, handle, pytrees, traces
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import CallKind
from jax_ep._ops.ordering import batch_error
from jax_ep._transport import split_transport_of


class Pending:
    """A call that `dispatch_async` or `combine_async` has started; a pytree.

    Pass it to `dispatch_wait` or `combine_wait`. Its arrays are opaque and stack on
    dimension 0, so it can leave shard_map. It keeps alive the operands that the second
    half needs.

    Attributes:
        kind: "dispatch" or "combine".
        key: key of the handle that made the call.
        held: integer arrays that arrived, and operands; they carry no cotangents.
        ports: float zeros that carry cotangents to the first half.
    """

    kind: CallKind
    key: int
    held: Any
    ports: Any

    def __init__(self, kind: CallKind, key: int, held: Any, ports: Any) -> None:
        """Internal; users get a Pending from the `_async` functions."""
        self.kind, self.key, self.held, self.ports = kind, key, held, ports
        self._waited_in: Any = None
        # How many calls vmaps make of this one; 0 once it was flattened, because copies
        # made from its leaves may be waited on unseen.
        self._calls = traces.batch_size(*jax.tree.leaves(held))

    def __repr__(self) -> str:
        """Shows kind, handle and shapes."""
        shapes = jax.tree.map(lambda a: jax.typeof(a), (self.held, self.ports))
        return f"Pending({self.kind!r}, key={self.key:#x}, {shapes})"


# Pendings not yet waited on, with the traces that made them.
_open: weakref.WeakKeyDictionary[Pending, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def require_room(function: str, kind: CallKind, ep: EPHandle, operands: Any) -> None:
    """Raises ValueError if this trace has as many pendings of `kind` as allowed."""
    trace = traces.current_trace()
    most = ep.config.most_pending
    with _lock:
        count = sum(
            pending._calls
            for pending, where in _open.items()
            if where is trace and (pending.kind, pending.key) == (kind, ep.key)
        )
    if most == 0:
        raise errors.invalid(
            function,
            "pending_calls of the config must be at least 1",
            ep.config.pending_calls,
            f"init with EPConfig(pending_calls=1), or call jax_ep.{kind}",
        )
    calls = traces.batch_size(*jax.tree.leaves(operands))
    if calls > most:
        raise batch_error(function, ep, calls)
    if trace is not None and count + calls > most:
        raise errors.invalid(
            function,
            f"at most pending_calls = {most} calls of {kind}_async must be pending",
            count + calls,
            f"call jax_ep.{kind}_wait on an earlier one first",
        )


def opened(pending: Pending) -> Pending:
    """Records that this trace has started a call."""
    trace = traces.current_trace()
    if trace is not None:
        with _lock:
            _open[pending] = trace
    return pending


def closed(pending: Pending) -> None:
    """Records that this trace has waited on a call."""
    pending._waited_in = traces.current_trace()
    with _lock:
        _open.pop(pending, None)


def was_closed(pending: Pending) -> bool:
    """Whether this trace has waited on it; branches of a `cond` are other traces."""
    trace = traces.current_trace()
    return trace is not None and pending._waited_in is trace


def awaited(function: str, kind: CallKind, pending: Pending) -> EPHandle:
    """Returns the handle of a per-rank call; raises if it cannot be waited on here."""
    ep = handle_of(function, kind, pending)
    checks.require_scope(function, ep)
    wanted = split_transport_of(ep).pending_rows(ep)
    held = jax.tree.leaves(pending.held)[0].shape[0]
    if held != wanted:
        raise errors.invalid(
            function,
            f"pending must hold the {wanted} rows of one rank",
            held,
            f"use jax_ep.sharded.{function} on global arrays",
            operand="pending",
        )
    return ep


def handle_of(function: str, kind: CallKind, pending: Pending) -> EPHandle:
    """Returns the open handle of a call; raises unless it is of that kind."""
    if not isinstance(pending, Pending):
        raise errors.invalid(
            function,
            f"pending must be the Pending that jax_ep.{kind}_async returned",
            type(pending).__name__,
            "pass the Pending itself",
            operand="pending",
            kind=TypeError,
        )
    if pending.kind != kind:
        raise errors.invalid(
            function,
            f"pending must come from {kind}_async",
            f"one of {pending.kind}_async",
            f"call jax_ep.{pending.kind}_wait on it",
            operand="pending",
        )
    if was_closed(pending):
        raise errors.unusable(
            function,
            "this Pending was already waited on",
            "keep the result of the first wait",
        )
    ep = handle.find(pending.key)
    if ep is None:
        raise errors.unusable(
            function,
            f"this process has no handle {pending.key:#x}, which made this Pending",
            "keep a reference to the handle until the wait; of a saved Pending, "
            f"{pytrees.SAME_HANDLE}",
        )
    checks.require_open(function, ep)
    return ep


def _flatten(pending: Pending) -> tuple[tuple[Any, Any], tuple[CallKind, int]]:
    pending._calls = 0
    return (pending.held, pending.ports), (pending.kind, pending.key)


def _flatten_with_keys(pending: Pending) -> Any:
    names = map(jax.tree_util.GetAttrKey, ("held", "ports"))
    children, static = _flatten(pending)
    return tuple(zip(names, children, strict=True)), static


def _unflatten(static: tuple[CallKind, int], children: Iterable[Any]) -> Pending:
    return Pending(*static, *children)


jax.tree_util.register_pytree_with_keys(
    Pending, _flatten_with_keys, _unflatten, _flatten
)
pytrees.serialisable(Pending, arrays=("held", "ports"), static=("kind", "key"))
