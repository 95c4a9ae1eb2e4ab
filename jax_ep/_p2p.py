"""Transport "p2p": one custom call an op, whose kernel stores into the peers' windows.

The functions are those of `_collective`, with the same results bit for bit. Each takes
`after` besides, what `_chain` has the call come after, and those without `num_dropped`
among their results yield one more to come after.
"""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jax_ep import _ffi
from jax_ep._results import dispatched, received, struct, zeros
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle

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
