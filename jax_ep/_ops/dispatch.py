"""dispatch: sends tokens to the ranks of their experts, in one call or in two halves.

Derivatives, with i = row(t, k): dx[t] = sum_k drow[i] and dw[t, k] = dwrow[i]. For a
quantised dispatch drow is the cotangent of grad_port. Tokens that are quantised already
have no cotangent, so drow is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep import formats
from jax_ep._core import checks, errors, operands
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Format
from jax_ep._core.operands import Operand
from jax_ep._core.types import Dispatched, Route
from jax_ep._native import tables
from jax_ep._ops import options
from jax_ep._ops import pending as pendings
from jax_ep._ops.cached import dispatch_unchanged, return_rows, return_weights
from jax_ep._ops.ordering import OrderedCall
from jax_ep._ops.pending import Pending
from jax_ep._ops.remat import named_dispatch
from jax_ep._transport import split_transport_of, transport_of
from jax_ep._transport.base import Arrived, DispatchInputs, Token


def dispatch(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike | None = None,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    token_scales: ArrayLike | None = None,
    route: Route | None = None,
) -> Dispatched:
    """Sends each token to the ranks of its experts, and groups the rows by expert.

    Call it inside `jax.shard_map` over the mesh of `ep`, on the arrays of one rank,
    with the same n on every rank. A token crosses to each rank only once, even if
    several of that rank's experts get it. The order of rows depends only on the inputs.
    Differentiable with respect to `tokens` and `router_weights`. Under `jax.vmap` the
    calls of the batch are made one after the other.

    With `token_scales` the tokens are quantised already, for example by the kernel of
    the preceding norm: their codes and scales are sent as they are, and the result is
    that of a dispatch that quantises. Gradients then reach `router_weights` only;
    nothing is sent back for the tokens. `jax_ep.dequantize` works, but its cotangent
    ends here.

    With `route`, other tokens take the route of an earlier dispatch: each row of the
    result comes from the token at the same rank and position as the row of that
    dispatch. Nothing is routed, and the tokens are sent as they are, whatever the
    config's `dispatch_format`. They may have fewer columns, for example to send a
    second tensor of another width.

    Args:
        ep: handle from `jax_ep.init`.
        tokens: `[n, H]` in the config's dtype, n <= max_tokens_per_rank. With `route`
            `[n, H']` with H' <= H: a row must be a multiple of 16 bytes, and of the
            block of `combine_format` and `grad_format` if they are set. With
            `token_scales` the codes, `[n, H]`, or `[n, H / 2]` for 4-bit formats.
        topk_ids: int32 `[n, K]`, global expert ids. -1 means no expert; a repeated id
            makes two rows. Ids outside [-1, E) are treated as -1, counted in
            `num_invalid` and reported by `ep.check()`. None with `route`.
        router_weights: float32 `[n, K]`, sent with the tokens; None means 1. Narrower
            float types are widened, and get gradients of their own type.
        input_scale: global scale of "nvfp4", float32 `[]` or `[1]`, the same on every
            rank; None means 1. It must be None for other formats, and with `route`.
        token_scales: scales of tokens that are quantised already, as
            `jax_ep.formats.quantize` makes them in the config's `dispatch_format`:
            `[n, H / block]`, whatever `scale_layout`. None if `tokens` are in the
            config's dtype, and with `route`.
        route: `d.route` of an earlier dispatch of `ep` with the same n, or None.

    Returns:
        A `Dispatched` with N = `ep.recv_capacity` rows. With `route` its format is
        "bf16", and its other fields are those of the earlier dispatch.

    Raises:
        ValueError, TypeError: while tracing, if an argument is not as described above,
            the call is outside shard_map, or `ep` is closed.
    """
    if route is not None:
        excluded = {
            "topk_ids": topk_ids,
            "input_scale": input_scale,
            "token_scales": token_scales,
        }
        with checks.calling("dispatch"):
            return _along(ep, tokens, router_weights, route, excluded)
    arguments = (tokens, topk_ids, router_weights, input_scale, token_scales)
    return dispatch_routed(ep, *arguments, zero_tail=ep.config.zero_tail)


def dispatch_routed(
    ep: EPHandle,
    tokens: Any,
    topk_ids: Any,
    router_weights: Any,
    input_scale: Any,
    token_scales: Any,
    *,
    zero_tail: bool,
) -> Dispatched:
    """Does `dispatch` without a route; `zero_tail` replaces the config's."""
    given = _Given(router_weights is not None, token_scales is not None, zero_tail)
    arguments = (tokens, topk_ids, router_weights, input_scale, token_scales)
    inputs = _checked("dispatch", ep, *arguments)
    with checks.calling("dispatch"):
        return _DISPATCH(ep, inputs, static=given)


def dispatch_async(
    ep: EPHandle,
    tokens: ArrayLike,
    topk_ids: ArrayLike,
    router_weights: ArrayLike | None = None,
    *,
    input_scale: ArrayLike | None = None,
    token_scales: ArrayLike | None = None,
) -> Pending:
    """Starts a dispatch, which `dispatch_wait` completes.

    Computations that do not need the result can run in between. At most the config's
    `pending_calls` dispatches of a handle may be pending; under `jax.vmap` each entry
    of the batch counts.

    Args:
        ep: handle from `jax_ep.init`.
        tokens: `[n, H]`, or codes, as in `jax_ep.dispatch`.
        topk_ids: int32 `[n, K]`, as in `jax_ep.dispatch`.
        router_weights: float32 `[n, K]` or None, as in `jax_ep.dispatch`.
        input_scale: float32 `[]` or `[1]` or None, as in `jax_ep.dispatch`.
        token_scales: scales of codes or None, as in `jax_ep.dispatch`.

    Returns:
        A `Pending` for `dispatch_wait`.

    Raises:
        ValueError, TypeError: for the reasons of `jax_ep.dispatch`, or if this trace
            already has as many pending dispatches as allowed.
    """
    function = "dispatch_async"
    given = _Given(router_weights is not None, token_scales is not None)
    arguments = (tokens, topk_ids, router_weights, input_scale, token_scales)
    inputs = _checked(function, ep, *arguments)
    pendings.require_room(function, "dispatch", ep, inputs)
    with checks.calling(function):
        held, ports = _SEND(ep, inputs, static=given)
    return pendings.opened(Pending("dispatch", ep.key, held, ports))


def begun(ep: EPHandle, pending: Pending) -> tuple[jax.Array, ...]:
    """Returns arrays of a pending dispatch that are there before its exchange."""
    sent, _ = pending.held
    return split_transport_of(ep).begun(sent)


def dispatch_wait(pending: Pending) -> Dispatched:
    """Completes a dispatch; the result equals that of `jax_ep.dispatch`, bit for bit.

    Args:
        pending: result of `dispatch_async` on the same rank.

    Returns:
        A `Dispatched`.

    Raises:
        ValueError, TypeError: while tracing, if `pending` is not the `Pending` of a
            dispatch, was already waited on, or holds several ranks; or if its handle
            is closed.
    """
    ep = pendings.awaited("dispatch_wait", "dispatch", pending)
    with checks.calling("dispatch_wait"):
        d = _RECV(ep, (pending.held, pending.ports), None)
    pendings.closed(pending)
    return d


def resumed(
    ep: EPHandle,
    tokens: jax.Array,
    topk_ids: jax.Array,
    router_weights: jax.Array | None,
    *,
    input_scale: Any,
    d: Dispatched,
) -> Dispatched:
    """Returns `d`, the dispatch of these operands, with its derivative by them."""
    arguments = (tokens, topk_ids, router_weights, input_scale, None)
    inputs = _checked("dispatch", ep, *arguments)
    with checks.calling("dispatch"):
        given = _Given(router_weights is not None, False)
        return _RESUMED(ep, (inputs, d), static=given)


def _of_tokens(dtype: Any) -> str | None:
    """Returns what to do about tokens of a wrong dtype; None to cast them."""
    if not operands.is_codes(dtype):
        return None
    return "pass their scales as token_scales, if they are quantised already"


_WEIGHTS = Operand(
    "router_weights",
    "[n, K]",
    operands.WEIGHTS,
    "give each id of topk_ids its weight",
    optional=True,
)
_OPERANDS = (
    Operand(
        "tokens",
        "[n, H]",
        None,
        "reshape the tokens or init with their hidden_size",
        cast=_of_tokens,
    ),
    Operand(
        "topk_ids",
        "[n, K]",
        operands.IDS,
        "give each row of tokens its top_k ids, -1 where it has fewer",
    ),
    _WEIGHTS,
)
_ALONG = (
    Operand("tokens", "[n, columns]", None, "pass a row for each token of the route"),
    _WEIGHTS._replace(remedy="give each entry of the route its weight"),
)


class _Given(NamedTuple):
    """Which operands were given, and whether whole calls clear rows past the groups."""

    weights: bool
    scales: bool
    zero_tail: bool = True


def _checked(
    function: str,
    ep: EPHandle,
    tokens: Any,
    topk_ids: Any,
    router_weights: Any,
    input_scale: Any,
    token_scales: Any,
) -> DispatchInputs:
    """Returns checked operands that vary alike, with weights of 1 by default."""
    checks.require_open(function, ep)
    checks.require_scope(function, ep)
    config = ep.config
    if topk_ids is None:
        raise errors.invalid(
            function,
            "topk_ids must be an array",
            "None",
            "pass int32 ids, or to dispatch the route= of an earlier dispatch",
            operand="topk_ids",
            kind=TypeError,
        )
    if token_scales is not None and not formats.is_quantized(config.dispatch_format):
        raise errors.invalid(
            function,
            "token_scales must be None unless the config's dispatch_format has scales",
            f"an array with dispatch_format {config.dispatch_format!r}",
            "leave it out, or init with the tokens' format",
            operand="token_scales",
        )
    given = {
        "tokens": tokens,
        "topk_ids": topk_ids,
        "router_weights": router_weights,
        "token_scales": token_scales,
    }
    table, sizes = (
        _OPERANDS,
        {
            "H": (config.hidden_size, "hidden_size"),
            "K": (config.top_k, "top_k"),
        },
    )
    if token_scales is not None:
        table = (*_coded(config.dispatch_format), *_OPERANDS[1:])
        sizes |= _sizes_of_codes(config)
    arrays = operands.checked(function, table, given, sizes, config.dtype)
    tokens, topk_ids = arrays["tokens"], arrays["topk_ids"]
    weights = arrays.get("router_weights")
    n = tokens.shape[0]
    if n > config.max_tokens_per_rank:
        raise errors.invalid(
            function,
            "tokens must have at most max_tokens_per_rank = "
            f"{config.max_tokens_per_rank} rows",
            n,
            "init with a larger max_tokens_per_rank or split the call",
            operand="tokens",
        )
    scale = formats.global_scale(function, config.dispatch_format, tokens, input_scale)
    if weights is None:
        weights = jnp.ones((n, config.top_k), jnp.float32)
    inputs = (tokens, topk_ids, weights, scale, arrays.get("token_scales"))
    return DispatchInputs(*checks.vary_together(ep, *inputs))


def _coded(name: Format) -> tuple[Operand, ...]:
    """Returns the rows of tokens that are quantised already, and of their scales."""
    remedy = f"pass what jax_ep.formats.quantize(tokens, {name!r}) returns"
    codes, scales = formats.payload_dtype(name, ""), formats.scale_dtype(name)
    codes_of = ("tokens", "[n, columns]", codes, f"the codes of {name!r}")
    scales_of = ("token_scales", "[n, blocks]", scales, f"the scales of {name!r}")
    return tuple(operands.of_codes(*row, remedy) for row in (codes_of, scales_of))


def _sizes_of_codes(config: EPConfig) -> dict[str, tuple[int, str]]:
    name, hidden = config.dispatch_format, config.hidden_size
    words = f"for hidden_size {hidden}"
    blocks = hidden // formats.block(name)
    return {
        "columns": (formats.columns(name, hidden), words),
        "blocks": (blocks, words),
    }


def _along(
    ep: EPHandle,
    tokens: Any,
    router_weights: Any,
    route: Any,
    excluded: Mapping[str, Any],
) -> Dispatched:
    """Dispatches along a route."""
    function = "dispatch"
    checks.require_open(function, ep)
    checks.require_scope(function, ep)
    for name, value in excluded.items():
        if value is not None:
            raise errors.invalid(
                function,
                f"{name} must be None with route",
                "an array",
                "leave it out, or leave route out to route anew",
                operand=name,
            )
    checks.require_route(function, ep, route)
    checks.require_route_shapes(function, ep, route)
    config, n = ep.config, route.slot_of.shape[0]
    given = {"tokens": tokens, "router_weights": router_weights}
    sizes = {"n": (n, "the tokens of the route"), "K": (config.top_k, "top_k")}
    arrays = operands.checked(function, _ALONG, given, sizes, config.dtype)
    tokens, weights = arrays["tokens"], arrays.get("router_weights")
    checks.require_columns(function, ep, "tokens", tokens)
    route, tokens, weights = checks.vary_together(ep, route, tokens, weights)
    rows, weights = dispatch_unchanged(ep, route, tokens, weights)
    # Rows of the shared expert have the weight 1 in any case.
    source, _, k = jnp.split(route.src_info, 3, axis=1)
    ones = jnp.where(source[:, 0] >= 0, jnp.float32(1), jnp.float32(0))
    if weights is None:
        weights = ones
    elif config.fused_shared_expert:
        weights = jnp.where(k[:, 0] < 0, ones, weights)
    groups = jnp.arange(ep.groups, dtype=jnp.int32) - config.fused_shared_expert
    _, groups = checks.vary_together(ep, rows, groups)
    return Dispatched(
        tokens=rows,
        scales=None,
        row_offsets=route.row_offsets,
        group_sizes=jnp.diff(route.row_offsets),
        expert_counts=route.expert_counts,
        expert_ids=groups,
        src_info=route.src_info,
        router_weights=weights,
        num_dropped=route.num_dropped,
        num_invalid=route.num_invalid,
        route=route,
        grad_port=None,
        rows_dtype=config.dtype,
    )


def _tokens(inputs: DispatchInputs) -> jax.Array:
    return inputs.tokens


def _run(
    ep: EPHandle, given: _Given, inputs: DispatchInputs, after: Token
) -> tuple[Dispatched, Token]:
    routed = options.routed(ep, inputs)
    arrived, done = transport_of(ep).dispatch(ep, routed, given.zero_tail, after)
    return _dispatched(ep, inputs.like(ep), inputs.input_scale, arrived), done


def _route(ep: EPHandle, given: _Given, inputs: Any, d: Dispatched) -> Route:
    return d.route


def _transpose(ep: EPHandle, given: _Given, route: Route, cotangent: Dispatched) -> Any:
    dx, dw = _cotangents(ep, given, route, cotangent)
    return _of_inputs(dx, dw)


def _of_inputs(tokens: jax.Array | None, weights: jax.Array | None) -> Any:
    """Returns cotangents in the structure of the operands."""
    of: Any = DispatchInputs
    return of(tokens, None, weights, None)


def _cotangents(
    ep: EPHandle, given: _Given, route: Route, cotangent: Dispatched
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the cotangents of tokens and weights, None for those without one."""
    dweights = cotangent.router_weights if given.weights else None
    if given.scales:
        if dweights is None:
            return None, None
        return None, return_weights(ep, route, dweights)
    port = cotangent.grad_port
    return return_rows(ep, route, cotangent.tokens if port is None else port, dweights)


_DISPATCH = OrderedCall(
    "dispatch", _run, _route, _transpose, like=_tokens, named=named_dispatch
)


_RESUMED = OrderedCall(
    "dispatch",
    lambda ep, given, args, after: (args[1], after),
    lambda ep, given, args, d: d.route,
    lambda *args: (_transpose(*args), None),
    like=lambda args: _tokens(args[0]),
    ordered=lambda ep: False,
)


# The first half returns `held`, which is what arrived, and `ports`, which are float
# zeros in the shapes of tokens and weights. The second half makes its result from both.
# Its reverse rule turns the result's cotangents into those of `ports`, and the first
# half's reverse rule returns these as cotangents of tokens and weights. The port of
# tokens that have no cotangent has no columns.


def _run_send(
    ep: EPHandle, given: _Given, inputs: DispatchInputs, after: Token
) -> tuple[Any, Token]:
    routed = options.routed(ep, inputs)
    sent, done = split_transport_of(ep).dispatch_send(ep, routed, after)
    weights = jnp.zeros_like(inputs.router_weights) if given.weights else None
    n, columns = inputs.tokens.shape
    shape = (n, 0 if given.scales else columns)
    tokens = tables.zeros(inputs.tokens, shape, ep.config.dtype)
    return ((sent, inputs.input_scale), (tokens, weights)), done


def _transpose_send(ep: EPHandle, given: _Given, kept: None, cotangents: Any) -> Any:
    dx, dw = cotangents[1]
    return _of_inputs(None if given.scales else dx, dw)


_SEND = OrderedCall(
    "dispatch_async",
    _run_send,
    lambda *_: None,
    _transpose_send,
    like=_tokens,
    ordered=lambda ep: split_transport_of(ep).ordered,
    most_batched=lambda ep: ep.config.most_pending,
)


def _run_recv(
    ep: EPHandle, static: None, halves: Any, after: Token
) -> tuple[Dispatched, Token]:
    (sent, input_scale), (port, _) = halves
    shape = (port.shape[0], ep.config.hidden_size)
    like = port if port.shape == shape else tables.zeros(port, shape, port.dtype)
    arrived, done = split_transport_of(ep).dispatch_recv(ep, sent, like, after)
    return _dispatched(ep, like, input_scale, arrived), done


def _keep_recv(ep: EPHandle, static: None, halves: Any, d: Dispatched) -> Any:
    _, (tokens, weights) = halves
    # None or (), so that the structure alone says what takes gradients.
    given = _Given(weights is not None, tokens.shape[1] == 0)
    return d.route, [() if each else None for each in given[:2]]


def _transpose_recv(
    ep: EPHandle, static: None, kept: Any, cotangent: Dispatched
) -> Any:
    route, kept = kept
    given = _Given(*(each is not None for each in kept))
    return None, _cotangents(ep, given, route, cotangent)


_RECV = OrderedCall(
    "dispatch_wait",
    _run_recv,
    _keep_recv,
    _transpose_recv,
    like=lambda halves: jax.tree.leaves(halves[0])[0],
    named=named_dispatch,
    ordered=lambda ep: split_transport_of(ep).ordered,
)


def _dispatched(
    ep: EPHandle, tokens: jax.Array, input_scale: jax.Array, arrived: Arrived
) -> Dispatched:
    """Makes the result; `tokens` only gives shape, dtype and mesh axes of the port."""
    arrived = options.placed(ep, arrived)
    name = ep.config.dispatch_format
    port = tables.zeros(tokens, (ep.recv_capacity, tokens.shape[1]), tokens.dtype)
    return Dispatched(
        tokens=arrived.tokens,
        scales=arrived.scales,
        row_offsets=arrived.row_offsets,
        group_sizes=arrived.group_sizes,
        expert_counts=arrived.expert_counts,
        expert_ids=arrived.expert_ids,
        src_info=arrived.src_info,
        router_weights=arrived.router_weights,
        num_dropped=arrived.num_dropped,
        num_invalid=arrived.num_invalid,
        route=tables.pick(Route, arrived, key=ep.key),
        grad_port=port if formats.is_quantized(name) else None,
        scales_offsets=arrived.scales_offsets,
        input_scale=input_scale if formats.takes_input_scale(name) else None,
        format=name,
        rows_dtype=ep.config.dtype,
        scale_layout=ep.config.scale_layout,
    )
