"""dispatch and combine, as called inside `jax.shard_map`."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from jax_ep import formats
from jax_ep._core import checks
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, Route
from jax_ep._ops import combine as _autodiff_combine
from jax_ep._ops import dequantize as _dequantize
from jax_ep._ops import dispatch as _autodiff
from jax_ep._ops import operands


def dispatch(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
) -> Dispatched:
    """Sends each token to the ranks of its experts and groups what arrives by expert.

    Call it inside `jax.shard_map` over the mesh of `ep`, on a rank's own arrays, on
    every rank with the same n. A token crosses to a rank once, however many of that
    rank's experts it goes to. The order of rows depends on the inputs alone.
    Differentiable with respect to `tokens` and `router_weights`.

    Args:
        ep: handle of `jax_ep.init`.
        tokens: `[n, H]` in the config's dtype, n <= max_tokens_per_rank.
        topk_ids: int32 `[n, K]`, global expert ids. -1 is no expert; the same id twice
            makes two rows; ids outside [-1, E) count as -1, in `num_invalid` and for
            `ep.check()`.
        router_weights: float32 `[n, K]` that travel with the tokens, or None for 1.
            Narrower float types are widened; gradients come back in theirs.
        input_scale: the global scale of "nvfp4", float32 `[]` or `[1]`, the same on
            every rank; None is 1. Other formats take none.

    Returns:
        A `Dispatched` with N = `ep.recv_capacity` rows.

    Raises:
        ValueError, TypeError: while tracing, if an argument does not hold what is said
            above, outside shard_map, under vmap, or if `ep` is closed.
    """
    weighted, args = operands.of_dispatch(
        "dispatch", ep, tokens, topk_ids, router_weights, input_scale
    )
    with checks.calling("dispatch"):
        return _autodiff.dispatch(ep, weighted, *args)


def combine(
    ep: EPHandle,
    expert_out: ArrayLike,
    route: Route,
    router_weights: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
) -> jax.Array:
    """Brings expert rows home: `y[t] = sum_k w[t, k] * expert_out[row(t, k)]`.

    Call it inside `jax.shard_map`, as `dispatch`. With `reduce="rank"` a rank sums its
    rows of a token in float32 in k order and rounds once to `combine_dtype`; the source
    sums the ranks in ascending order, then the shared expert's row, then `residual`,
    and rounds once to `dtype`. With `reduce="source"` each row crosses, in
    `combine_dtype`, and the source sums them in k order; with "none" it returns them.
    Rows of padding and dropped rows are never read. Differentiable with respect to
    `expert_out`, `router_weights` and `residual`.

    Args:
        ep: the handle that dispatched.
        expert_out: `[N, H]` in the config's dtype.
        route: `d.route` of the dispatch.
        router_weights: float32 `[N]` or a narrower float type, usually
            `d.router_weights`, or None for 1: the
            route has no weights, so that leaving them out after a weighted dispatch
            gives the unweighted sum, and no error. With `reduce="source"` `[n, K]`;
            none with "none".
        residual: `[n, H]` in the config's dtype, added to the sum, or None. None with
            `reduce="none"`, and with `skip_a2a`, whose partial sums would each have it.

    Returns:
        `[n, H]` in the config's dtype: with `skip_a2a` this rank's part of the sum, for
        `jax.lax.psum`. With `reduce="none"` `[n, K, H]`, zero where there is no row.

    Raises:
        ValueError, TypeError: while tracing, if an argument does not hold what is said
            above, outside shard_map, under vmap, or if `ep` is closed.
    """
    args = operands.of_combine(
        "combine", ep, expert_out, route, router_weights, residual
    )
    with checks.calling("combine"):
        return _autodiff_combine.combine(ep, *args)


def dequantize(d: Dispatched) -> jax.Array:
    """Rows of a dispatch in the token dtype, differentiable.

    The derivative is straight-through: a cotangent of the rows is one of the tokens
    that were sent, as if nothing had been quantised. It goes through `d.grad_port`: a
    quantised `d` whose port was replaced by None has rows, and no derivative.
    `d.tokens` and `d.scales` of a quantised format carry none.

    Args:
        d: what `jax_ep.dispatch` returned, on one rank; `jax_ep.sharded.dequantize`
            takes what left shard_map.

    Returns:
        `[N, H]` in the config's dtype; for "bf16" these are `d.tokens` themselves.

    Raises:
        TypeError: `d` is no `Dispatched`.
        ValueError: `d` is of several ranks, or its scales are missing; in the backward
            pass, if its port is.
    """
    if not isinstance(d, Dispatched):
        raise TypeError(
            "jax_ep.dequantize: d must be what jax_ep.dispatch returned, got "
            f"{type(d).__name__}; pass the Dispatched, not its arrays"
        )
    if (d.scales is not None) != formats.is_quantized(d.format):
        raise ValueError(
            f"jax_ep.dequantize: d must have the scales of its format {d.format!r}, "
            f"got {'none' if d.scales is None else 'some'}; keep `scales` and `format` "
            "as the dispatch returned them"
        )
    if not formats.is_quantized(d.format):
        return d.tokens
    ranks = d.row_offsets.shape[0] - d.group_sizes.shape[0]
    if ranks != 1:
        raise ValueError(
            f"jax_ep.dequantize: d must be one rank's, got one of {ranks} ranks; use "
            "jax_ep.sharded.dequantize on global arrays"
        )
    with jax.named_scope("jax_ep.dequantize"):
        return _dequantize.dequantize(d)
