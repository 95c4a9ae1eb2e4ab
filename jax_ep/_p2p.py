"""Transport "p2p": one custom call an op, whose kernel stores into the peers' windows.

The functions are those of `_collective`, with the same results bit for bit. Each takes
`after` besides, what `_chain` has the call come after, and those without `num_dropped`
or `num_invalid` among their results yield one more to come after. The first half of an
op leaves the place of the call in the windows, which the second is given.
"""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ep import _ffi, formats
from jax_ep._results import dispatched, received, struct, zeros
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle

_PENDING_INTS = 4  # of PendingCall in xla_ffi/protocol/pending.h

# Their frames, and those of what wraps functions, lie between a user's line and a call.
_NOT_USERS = {"jax_ep", "jax", "jaxlib", "contextlib", "functools"}


def _site() -> int:
    """Digest of the user's line that is being traced: the same in every process.

    It goes into the tags of a call's flags, so that ranks that run different calls see
    an error.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_USERS:
            break
        frame = frame.f_back
    code = frame.f_code
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    place = f"{file}:{frame.f_lineno}:{code.co_name}"
    return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little") >> 1


def dispatch(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    after: jax.Array,
) -> Dispatched:
    """Routes and exchanges tokens `[n, H]` by ids `[n, K]`."""
    results = (
        *received(ep, tokens),
        struct(tokens, topk_ids.shape, jnp.int32),
        struct(tokens, (1,), jnp.int32),
    )
    *arrived, slot_of, num_invalid = _ffi.call(
        "ep_dispatch",
        results,
        tokens,
        topk_ids,
        router_weights,
        input_scale,
        after,
        key=ep.key,
        site=_site(),
        expert_alignment=ep.config.expert_alignment,
        zero_tail=ep.config.zero_tail,
        format=ep.config.dispatch_format,
        scale_layout=ep.config.scale_layout,
    )
    return dispatched(ep, tokens, input_scale, arrived, slot_of, num_invalid)


def held_rows(ep: EPHandle) -> int:
    """Dimension 0 of what the first half of a call leaves at a rank."""
    return 1


# What dispatch_send leaves: pending, slot_of, num_invalid, what is sent as it is.
Sent = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _pending(like: jax.Array) -> Any:
    return struct(like, (1, _PENDING_INTS), jnp.int32)


def dispatch_send(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array,
    input_scale: jax.Array,
    after: jax.Array,
) -> Sent:
    """The part of `dispatch` that routes and sends."""
    pending, slot_of, num_invalid = _ffi.call(
        "ep_dispatch_send",
        (
            _pending(tokens),
            struct(tokens, topk_ids.shape, jnp.int32),
            struct(tokens, (1,), jnp.int32),
        ),
        tokens,
        topk_ids,
        router_weights,
        input_scale,
        after,
        key=ep.key,
        site=_site(),
        ranks=ep.route_ranks,
        local_experts=ep.groups,
        format=ep.config.dispatch_format,
    )
    # Own rows come from the tokens themselves, unless they are encoded.
    encoded = formats.is_quantized(ep.config.dispatch_format)
    own = zeros(tokens, (0, tokens.shape[1]), tokens.dtype) if encoded else tokens
    return pending, slot_of, num_invalid, own


def dispatch_place(
    ep: EPHandle,
    like: jax.Array,
    input_scale: jax.Array,
    sent: Sent,
    after: jax.Array,
) -> Dispatched:
    """The rest of `dispatch`; `like` has the shape and dtype of the tokens."""
    pending, slot_of, num_invalid, own = sent
    arrived = _ffi.call(
        "ep_dispatch_place",
        received(ep, like),
        pending,
        own,
        after,
        key=ep.key,
        expert_alignment=ep.config.expert_alignment,
        zero_tail=ep.config.zero_tail,
        format=ep.config.dispatch_format,
        scale_layout=ep.config.scale_layout,
    )
    return dispatched(ep, like, input_scale, arrived, slot_of, num_invalid)


def dispatch_cached(
    ep: EPHandle,
    route: Route,
    tokens: jax.Array,
    weights: jax.Array | None,
    after: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Sends tokens `[n, H]` and weights `[n, K]` along `route`: rows `[N, H]`, `[N]`.

    Rows that no token reaches are zero. On the wire tokens are in `grad_format`.
    """
    n, hidden = tokens.shape
    rows = ep.recv_capacity
    weighted = weights is not None
    out, row_weights, done = _ffi.call(
        "ep_dispatch_cached",
        (
            struct(tokens, (rows, hidden), tokens.dtype),
            struct(tokens, (rows if weighted else 0,), jnp.float32),
            struct(tokens, (1,), jnp.int32),
        ),
        tokens,
        zeros(tokens, (n, 0), jnp.float32) if weights is None else weights,
        route.slot_of,
        route.row_of,
        route.row_slot,
        after,
        key=ep.key,
        site=_site(),
        format=ep.config.grad_wire_format,
    )
    return out, row_weights if weighted else None, done


def combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    weight_grads: jax.Array | None,
    residual: jax.Array | None,
    wire: str,
    after: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Sums rows `[N, H]` back to tokens `[n, H]`; `weight_grads` `[N]` become `[n, K]`.

    `router_weights` scale the rows, `weight_grads` travel beside them unsummed. `wire`
    is what the sums travel as: a dtype or a quantised format.
    """
    hidden = expert_out.shape[1]
    n, top_k = route.slot_of.shape
    none = zeros(expert_out, (0,), jnp.float32)
    no_tokens = zeros(expert_out, (0, hidden), expert_out.dtype)
    out, grads, done = _ffi.call(
        "ep_combine",
        (
            struct(expert_out, (n, hidden), expert_out.dtype),
            struct(expert_out, (n, 0 if weight_grads is None else top_k), jnp.float32),
            struct(expert_out, (1,), jnp.int32),
        ),
        expert_out,
        none if router_weights is None else router_weights,
        none if weight_grads is None else weight_grads,
        route.row_of,
        route.slot_counts,
        route.slot_of,
        no_tokens if residual is None else residual,
        after,
        key=ep.key,
        site=_site(),
        weighted=router_weights is not None,
        with_weight_grads=weight_grads is not None,
        with_residual=residual is not None,
        combine_dtype=wire,
    )
    return out, None if weight_grads is None else grads, done


def combine_send(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    row_weights: jax.Array | None,
    weight_grads: None,
    wire: str,
    by_entry: bool,
    after: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The part of `combine` that sums and sends: the pending call, `done`."""
    pending, done = _ffi.call(
        "ep_combine_send",
        (_pending(expert_out), struct(expert_out, (1,), jnp.int32)),
        expert_out,
        zeros(expert_out, (0,), jnp.float32) if row_weights is None else row_weights,
        route.row_of,
        route.slot_counts,
        after,
        key=ep.key,
        site=_site(),
        weighted=row_weights is not None,
        combine_dtype=wire,
    )
    return pending, done


def combine_sum(
    ep: EPHandle,
    pending: jax.Array,
    slot_of: jax.Array,
    expert_out: jax.Array,
    entry_weights: jax.Array | None,
    residual: jax.Array | None,
    wire: str,
    by_entry: bool,
    after: jax.Array,
) -> tuple[jax.Array, None, jax.Array]:
    """The rest of `combine`; `expert_out` has the width and dtype of the rows."""
    n, hidden = slot_of.shape[0], expert_out.shape[1]
    no_tokens = zeros(expert_out, (0, hidden), expert_out.dtype)
    out, done = _ffi.call(
        "ep_combine_place",
        (
            struct(expert_out, (n, hidden), expert_out.dtype),
            struct(expert_out, (1,), jnp.int32),
        ),
        pending,
        slot_of,
        no_tokens if residual is None else residual,
        after,
        key=ep.key,
        ranks=ep.route_ranks,
        with_residual=residual is not None,
        combine_dtype=wire,
    )
    return out, None, done
