"""Transport "collective": pack -> all_to_all -> unpack, per rank, inside shard_map.

Each function is one op of the transport interface: what it takes and returns is what
`_autodiff` needs of any transport. Nothing here is differentiated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ep import _ffi, formats
from jax_ep._types import Dispatched, Route

if TYPE_CHECKING:
    from jax_ep._handle import EPHandle

_WORD_BYTES = 4  # the wire travels as uint32


def _struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    # The varying axes of a result are those of the operands; `like` carries them.
    return jax.typeof(like).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def _exchange(ep: EPHandle, send: jax.Array) -> jax.Array:
    if ep.ep_size == 1:
        return send
    return jax.lax.all_to_all(send, ep.axis_names, 0, 0, tiled=True)


def _empty(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """A zero-size operand that stands for "not given"."""
    return jax.lax.full_like(like, 0, dtype=jnp.dtype(dtype), shape=shape)


def dispatch(
    ep: EPHandle, tokens: jax.Array, topk_ids: jax.Array, router_weights: jax.Array
) -> Dispatched:
    """Routes and exchanges tokens `[n, H]` by ids `[n, K]`."""
    config, ranks = ep.config, ep.ep_size
    n, hidden = tokens.shape
    top_k, local_experts, rows = config.top_k, ep.local_experts, ep.recv_capacity
    region_bytes = _ffi.native.dispatch_region_bytes(
        config.dispatch_format, hidden, config.element_bytes, n, top_k, local_experts
    )

    def int32(*shape: int) -> Any:
        return _struct(tokens, shape, jnp.int32)

    send, slot_of, _, num_invalid = _ffi.call(
        "ep_pack",
        (
            _struct(tokens, (ranks, region_bytes // _WORD_BYTES), jnp.uint32),
            int32(n, top_k),
            int32(n, top_k),
            int32(1),
        ),
        tokens,
        topk_ids,
        router_weights,
        key=ep.key,
        num_experts=config.num_experts,
        format=config.dispatch_format,
    )
    payload = formats.payload_dtype(config.dispatch_format, config.dtype)
    out = _ffi.call(
        "ep_unpack",
        (
            _struct(tokens, (rows, hidden), payload),
            int32(local_experts + 1),
            int32(local_experts),
            int32(local_experts),
            int32(local_experts),
            int32(rows, 3),
            _struct(tokens, (rows,), jnp.float32),
            int32(1),
            int32(ranks, n, top_k),
            int32(rows),
            int32(ranks),
            int32(ranks, local_experts),
        ),
        _exchange(ep, send),
        expert_alignment=config.expert_alignment,
        zero_tail=config.zero_tail,
        format=config.dispatch_format,
    )
    row_of, row_slot, slot_counts = out[8:11]
    return Dispatched(
        tokens=out[0],
        scales=None,
        row_offsets=out[1],
        group_sizes=out[2],
        expert_counts=out[3],
        expert_ids=out[4],
        src_info=out[5],
        router_weights=out[6],
        num_dropped=out[7],
        num_invalid=num_invalid,
        route=Route(slot_of, row_of, row_slot, slot_counts, ep.key),
        grad_port=None,
    )


def dispatch_cached(
    ep: EPHandle, route: Route, tokens: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Sends tokens `[n, H]` and weights `[n, K]` along `route`: rows `[N, H]`, `[N]`.

    Rows that no token reaches are zero.
    """
    n, hidden = tokens.shape
    rows, top_k = ep.recv_capacity, ep.config.top_k
    num_weights = 0 if weights is None else top_k
    if weights is None:
        weights = _empty(tokens, (n, 0), jnp.float32)
    region_bytes = _ffi.native.cached_region_bytes(
        "bf16", hidden, ep.config.element_bytes, n, num_weights
    )
    (send,) = _ffi.call(
        "ep_pack_cached",
        (_struct(tokens, (ep.ep_size, region_bytes // _WORD_BYTES), jnp.uint32),),
        tokens,
        weights,
        route.slot_of,
        format="bf16",
    )
    out, row_weights = _ffi.call(
        "ep_unpack_cached",
        (
            _struct(tokens, (rows, hidden), tokens.dtype),
            _struct(tokens, (rows if num_weights else 0,), jnp.float32),
        ),
        _exchange(ep, send),
        route.row_of,
        route.row_slot,
        format="bf16",
    )
    return out, row_weights if num_weights else None


def combine(
    ep: EPHandle,
    route: Route,
    expert_out: jax.Array,
    router_weights: jax.Array | None,
    weight_grads: jax.Array | None,
    residual: jax.Array | None,
    wire_dtype: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums rows `[N, H]` back to tokens `[n, H]`; `weight_grads` `[N]` become `[n, K]`.

    `router_weights` scale the rows, `weight_grads` travel beside them unsummed.
    """
    hidden = expert_out.shape[1]
    n, top_k = route.slot_of.shape
    num_weights = 0 if weight_grads is None else top_k
    none = _empty(expert_out, (0,), jnp.float32)
    region_bytes = _ffi.native.combine_region_bytes(
        hidden * jnp.dtype(wire_dtype).itemsize, n, num_weights
    )
    (send,) = _ffi.call(
        "ep_combine_pack",
        (_struct(expert_out, (ep.ep_size, region_bytes // _WORD_BYTES), jnp.uint32),),
        expert_out,
        none if router_weights is None else router_weights,
        none if weight_grads is None else weight_grads,
        route.row_of,
        route.slot_counts,
        weighted=router_weights is not None,
        with_weight_grads=weight_grads is not None,
        combine_dtype=wire_dtype,
    )
    out, grads = _ffi.call(
        "ep_combine_unpack",
        (
            _struct(expert_out, (n, hidden), expert_out.dtype),
            _struct(expert_out, (n, num_weights), jnp.float32),
        ),
        _exchange(ep, send),
        route.slot_of,
        _empty(expert_out, (0, hidden), expert_out.dtype)
        if residual is None
        else residual,
        with_residual=residual is not None,
        combine_dtype=wire_dtype,
    )
    return out, grads if num_weights else None
