"""Pending: a call between its two halves, and how many a trace has open."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import jax

from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import CallKind
from jax_ep._ops import ordering


class Pending:
    """What `dispatch_async` or `combine_async` returns and its `_wait` takes: a pytree.

    Its arrays are opaque and stack on dimension 0, so that it may leave shard_map. It
    holds the operands that the second half needs, which live until then.

    Attributes:
        kind: "dispatch" or "combine".
        key: of the handle whose call it is.
        held: integer arrays that arrived, and operands; they carry no cotangent.
        ports: float zeros that carry the cotangents to the first half.
    """

    kind: CallKind
    key: int
    held: Any
    ports: Any

    def __init__(self, kind: CallKind, key: int, held: Any, ports: Any) -> None:
        """Of the two halves; users get theirs from the `_async` calls."""
        self.kind, self.key, self.held, self.ports = kind, key, held, ports
        self._waited_in: Any = None

    def __repr__(self) -> str:
        """Kind, handle and shapes."""
        shapes = jax.tree.map(lambda a: jax.typeof(a), (self.held, self.ports))
        return f"Pending({self.kind!r}, key={self.key:#x}, {shapes})"


# Pendings that the trace which made them can still see, with that trace: those that
# became leaves have gone to where nobody can count them.
_open: weakref.WeakKeyDictionary[Pending, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def require_room(function: str, kind: CallKind, ep: EPHandle) -> None:
    """Raises ValueError where this trace has as many pendings of `kind` as may be."""
    trace = ordering.current_trace()
    most = ep.config.most_pending
    with _lock:
        count = sum(
            where is trace and (pending.kind, pending.key) == (kind, ep.key)
            for pending, where in _open.items()
        )
    if most == 0:
        raise ValueError(
            f"jax_ep.{function}: the config's pending_calls must be at least 1 for "
            f"calls in halves, got {ep.config.pending_calls}; init with "
            f"EPConfig(pending_calls=1), or call jax_ep.{kind}"
        )
    if trace is not None and count >= most:
        raise ValueError(
            f"jax_ep.{function}: at most {most} calls of a kind must be pending, the "
            f"config's pending_calls, got {count + 1}; call jax_ep.{kind}_wait on an "
            "earlier one first"
        )


def opened(pending: Pending) -> Pending:
    """Notes that this trace has begun a call."""
    trace = ordering.current_trace()
    if trace is not None:
        with _lock:
            _open[pending] = trace
    return pending


def closed(pending: Pending) -> None:
    """Notes that a call has been waited for in this trace."""
    pending._waited_in = ordering.current_trace()
    _forget(pending)


def was_closed(pending: Pending) -> bool:
    """Whether this trace has waited for it: the branches of a `cond` are others."""
    trace = ordering.current_trace()
    return trace is not None and pending._waited_in is trace


def _forget(pending: Pending) -> None:
    with _lock:
        _open.pop(pending, None)


def _flatten(pending: Pending) -> tuple[tuple[Any, Any], tuple[CallKind, int]]:
    _forget(pending)
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
