"""Operands of dispatch and combine, checked and varying alike. Used by the API."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core import checks
from jax_ep._core.arrays import as_array
from jax_ep._core.handle import EPHandle


def of_dispatch(
    function: str,
    ep: EPHandle,
    tokens: Any,
    topk_ids: Any,
    router_weights: Any,
    input_scale: Any,
) -> tuple[bool, tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """Whether there are weights; tokens, ids, weights and scale, varying alike."""
    checks.require_open(function, ep)
    checks.require_scope(function, ep)
    config = ep.config
    tokens = as_array(function, "tokens", tokens)
    topk_ids = as_array(function, "topk_ids", topk_ids)
    checks.require_dtype(function, "tokens", tokens, config.dtype)
    checks.require_dtype(function, "topk_ids", topk_ids, "int32")
    if tokens.ndim != 2 or tokens.shape[1] != config.hidden_size:
        raise ValueError(
            f"jax_ep.{function}: tokens must have shape [n, hidden_size] with "
            f"hidden_size {config.hidden_size}, got {tokens.shape}; "
            "reshape the tokens or init with their hidden_size"
        )
    n = tokens.shape[0]
    if n > config.max_tokens_per_rank:
        raise ValueError(
            f"jax_ep.{function}: tokens must have at most max_tokens_per_rank = "
            f"{config.max_tokens_per_rank} rows, got {n}; init with a larger one or "
            "split the call"
        )
    ids_shape = (n, config.top_k)
    checks.require_shape(
        function,
        "topk_ids",
        topk_ids,
        ids_shape,
        "[n, top_k]",
        "give each row of tokens its top_k ids, -1 where it has fewer",
    )
    scale = formats.global_scale(function, config.dispatch_format, tokens, input_scale)
    weighted = router_weights is not None
    if router_weights is None:
        weights = jnp.ones(ids_shape, jnp.float32)
    else:
        weights = checks.widened_weights(function, router_weights)
        checks.require_shape(
            function,
            "router_weights",
            weights,
            ids_shape,
            "[n, top_k]",
            "give each id of topk_ids its weight",
        )
    return weighted, checks.vary_together(ep, tokens, topk_ids, weights, scale)


def of_combine(
    function: str,
    ep: EPHandle,
    expert_out: Any,
    route: Any,
    router_weights: Any,
    residual: Any,
) -> Any:
    """Route, rows, weights or None and residual or None, varying alike."""
    checks.require_open(function, ep)
    checks.require_scope(function, ep)
    config = ep.config
    route = checks.require_route(function, ep, route)
    checks.require_route_shapes(function, ep, route)
    n, rows = route.slot_of.shape[0], ep.recv_capacity

    def checked(
        name: str, value: Any, dtype: str, *shape: int, why: str, remedy: str
    ) -> jax.Array:
        array = as_array(function, name, value)
        checks.require_dtype(function, name, array, dtype)
        checks.require_shape(function, name, array, shape, why, remedy)
        return array

    checks.require_combinable(function, ep, router_weights, residual)
    hidden = config.hidden_size
    expert_out = as_array(function, "expert_out", expert_out)
    remedy = checks.CODES_REMEDY if checks.is_codes(expert_out.dtype) else None
    checks.require_dtype(function, "expert_out", expert_out, config.dtype, remedy)
    expert_out = checked(
        "expert_out",
        expert_out,
        config.dtype,
        rows,
        hidden,
        why="[N, hidden_size]",
        remedy="pass a row for each row of d.tokens, padding included",
    )
    weights = skip = None
    if router_weights is not None:
        shape: tuple[int, ...] = (rows,)
        why, remedy = "[N]", "pass d.router_weights"
        if config.reduce == "source":
            shape, why = (n, config.top_k), '[n, top_k] with reduce="source"'
            remedy = "pass the weights that belong to topk_ids"
        weights = checks.widened_weights(function, router_weights)
        checks.require_shape(function, "router_weights", weights, shape, why, remedy)
    if residual is not None:
        skip = checked(
            "residual",
            residual,
            config.dtype,
            n,
            hidden,
            why="[n, hidden_size]",
            remedy="pass a row for each token that was dispatched",
        )
    return checks.vary_together(ep, route, expert_out, weights, skip)
