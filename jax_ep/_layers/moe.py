"""moe_ffn: a whole mixture-of-experts layer inside `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_ep import experts as _experts
from jax_ep import placement as placements
from jax_ep import router as routers
from jax_ep._core import calls, checks, pytrees, traces
from jax_ep._core.arrays import as_array
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, ExpertsFunction
from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import activations, interface
from jax_ep._layers import columns, expert_rows, moe_checks
from jax_ep._layers import routing as choosing
from jax_ep._ops import combine as combining
from jax_ep._ops import dispatch as dispatching


@pytrees.register()
@dataclasses.dataclass(frozen=True)
class MoEAux:
    """Losses and statistics that a layer returns with its result.

    Outside shard_map, `expert_counts` and the fields after it stack all ranks' values.

    Attributes:
        balance_loss: float32 `[]`, over the whole batch; see `jax_ep.router.Losses`.
        z_loss: float32 `[]`, over the whole batch.
        load: float32 `[E]`, each expert's share of the routed rows of the whole batch.
        expert_counts: int32 `[L]`, rows sent to each of this rank's experts, or of its
            places if the layer has a placement.
        num_dropped: int32 `[1]`, rows that this rank dropped because N was too small.
        num_invalid: int32 `[1]`, ids outside [-1, E) among this rank's tokens.
        place: int32 `[1]`, this rank's position in the mesh, by which `jax_ep.stats`
            identifies ranks whatever order they were stacked in; None if unknown.
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    place: jax.Array | None = None

    @classmethod
    def specs(cls, axis_names: str | Sequence[str]) -> Any:
        """Returns `out_specs` for shard_map if tokens are split over `axis_names`."""
        names = axis_names if isinstance(axis_names, str) else tuple(axis_names)
        # Any, because the fields hold specs here, not arrays.
        whole: Any = jax.sharding.PartitionSpec()
        stacked: Any = jax.sharding.PartitionSpec(names)
        return cls(whole, whole, whole, *[stacked] * 4)


@calls.explained("moe_ffn")
def moe_ffn(
    ep: EPHandle,
    tokens: ArrayLike,
    params: Mapping[str, Any],
    *,
    router: routers.Router | routers.RouterFunction | None = None,
    routing: routers.Routing | None = None,
    topk_ids: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    input_scale: ArrayLike | None = None,
    batch_axes: Sequence[str] | None = None,
    tp_axis: str | None = None,
    experts: ExpertsFunction | None = None,
    activation: _experts.Activation | None = None,
    shared_activation: _experts.Activation | None = None,
    apply_router_weight_on_input: bool = False,
    num_identity_experts: int = 0,
    placement: placements.Placement | None = None,
    chunks: int = 1,
) -> tuple[jax.Array, MoEAux]:
    """Applies router, dispatch, SwiGLU experts, combine and an optional shared expert.

    Call it inside `jax.shard_map` over the mesh of `ep`, on the arrays of one rank. It
    keeps no state, so any layer library can wrap it. Weights are cast to the dtype of
    the tokens; their gradients are summed over ranks in the wider of the two dtypes.
    The router computes in float32.

    Args:
        ep: handle of `jax_ep.init`.
        tokens: `[n, H]` in the config's dtype.
        params: a mapping with
            "router" `[H, E]`, not needed with `routing`;
            "router_bias" float32 `[E]`, optional: it only chooses experts, and has no
            gradient (`jax_ep.router.route`);
            "router_logit_bias" `[E]`, optional: it is added to the logits, for any
            router, and is trained;
            "gate_up" `[L, H, 2, F]` of this rank's experts, gate first, or instead
            "gate" and "up" `[L, H, F]`; for experts without a gate, as in Nemotron-H,
            "up" alone, or "gate_up" `[L, H, 1, F]`;
            "down" `[L, F, H]`;
            "experts": a `jax_ep.experts.QuantizedWeights` of this rank's experts,
            which `jax_ep.experts.fp8` multiplies, either together with "gate_up" and
            "down", which then get the gradients, or in their place;
            "gate_bias" and "up_bias" `[L, F]`, "down_bias" `[L, H]`, optional biases
            of the routed experts;
            "shared_gate_up" `[H, 2, S]` (`[H, 1, S]` if experts have no gate) and
            "shared_down" `[S, H]`, optional: an expert
            that every token goes to with weight 1. Its matmuls wait for no exchange;
            if the config's `overlap` is "copy" or "stream" they run between
            `dispatch_async` and `dispatch_wait`. With `fused_shared_expert=True` in the
            config they belong to group 0 of the rows, and S must be F. A function of
            your own for `experts` gets them in front of the other experts' weights;
            "shared_expert_gate" `[H, 1]`, optional: a token's result of the shared
            expert is multiplied by the sigmoid of its product with this vector, as in
            Qwen2-MoE. Not with `fused_shared_expert`.
        router: the kind of router, or your own function; None means
            `jax_ep.router.Router()`. A function is called with the logits, float32
            `[n, E]`, and with those of these keywords that it takes: `tokens` `[n, H]`;
            `top_k`; `mask` bool `[n]`, or None; `bias`, "router_bias" or None. It
            returns (ids int32 `[n, K]`, weights `[n, K]`), or (ids, weights, loss),
            where the mean of loss, a float32 `[]`, over the ranks replaces the balance
            loss (each rank is weighted by its tokens), or a `jax_ep.router.Routing`. An
            id of -1 means no expert. Masked tokens go to no expert whatever the
            function returns for them.
        routing: the decision of your own router, in place of "router".
        topk_ids: int32 `[n, K]`, the experts of each token if they were chosen
            elsewhere; see `jax_ep.router.route`. The router then only makes their
            weights.
        mask: bool `[n]`, False for padding, which goes to no expert (except the shared
            one) and counts in no loss. Without a shared expert, padding may be NaN.
        residual: `[n, H]` in the config's dtype, added to the result before it is
            rounded. Exceptions: with `tp_axis` it is added to the rounded sum over that
            axis; with a shared expert that is not fused, to that expert's rounded rows.
        input_scale: global scale of dispatch_format "nvfp4", as in `jax_ep.dispatch`.
        batch_axes: mesh axes that tokens are split over, for the losses. None means
            all manual axes of the call, which is also right if tokens are equal along
            some of them. An axis that is the `spmd_axis_name` of a `jax.vmap` is left
            out, so that each entry of the batch has its own losses.
        tp_axis: a mesh axis outside of the EP group over which F and S are split
            (tensor parallel); tokens must be equal along it. If the config has room for
            at most twice the rows that arrive, and the axis divides H, the experts'
            partial sums are scattered by columns before they go back.
        experts: a function of (rows `[N, H]`, "gate_up", "down", group_sizes) that
            returns `[N, H]` in the dtype of the rows; rows past the last group are
            ignored. A function marked by `jax_ep.experts.takes_dispatched` is called
            with (d, "gate_up", "down"). Biases and `activation`, if any, are passed as
            keywords of these names. If `params` has "experts" alone, it is passed in
            place of "gate_up", and None in place of "down"; if `params` has all three,
            it is passed as the keyword `quantized`. None means `jax_ep.experts.fp8` if
            `params` has "experts", else `jax_ep.experts.auto`: SwiGLU by XLA, or by
            kernels on Hopper GPUs if XLA's ragged_dot is dense there. `jax_ep.experts`
            has more, and your own grouped matmul works as well.
        activation: a function of (gate, up) `[N, F]` for all experts; None means
            `silu(gate) * up`. For experts without a gate a function of up, which has no
            default.
        shared_activation: that of the shared expert; None means `activation`. Not with
            `fused_shared_expert`.
        apply_router_weight_on_input: whether tokens are multiplied by their weights
            before the experts, as in Llama 4, and not the results after them. The
            config must have top_k 1, and no `fused_shared_expert`.
        num_identity_experts: Z, experts after the E with weights whose result is the
            token itself, as in LongCat-Flash. They cost no exchange. The router, its
            biases, `routing`, the losses and `MoEAux.load` then have E + Z experts.
        placement: which experts the places hold, if the config's `num_experts` counts
            places, some of them for copies (`jax_ep.placement`). "router", its biases,
            `routing`, the losses and `MoEAux.load` then refer to the placement's E
            experts; the weights of routed experts and `MoEAux.expert_counts` refer to
            this rank's places.
        chunks: n may be up to this many times T, the config's `max_tokens_per_rank`.
            Beyond T, tokens go through dispatch, experts and combine in parts of T, one
            after the other, so that N, windows and experts' rows are those of T tokens
            (docs/layers.md, layers in chunks). The router and the losses are over all
            tokens. The backward pass dispatches and computes each part again.

    Returns:
        `[n, H]` in the config's dtype, and a `MoEAux`.

    Raises:
        ValueError, TypeError: while tracing, if an argument is not as described above,
            and for the reasons of `jax_ep.dispatch`.
    """
    checks.require_open("moe_ffn", ep)
    checks.require_scope("moe_ffn", ep)
    tokens = as_array("moe_ffn", "tokens", tokens)
    moe_checks.check_choices(ep, router, routing, mask, topk_ids, batch_axes, experts)
    moe_checks.require_sent_weights("moe_ffn", ep.config, apply_router_weight_on_input)
    moe_checks.require_count("moe_ffn", "num_identity_experts", num_identity_experts)
    moe_checks.require_chunks("moe_ffn", chunks)
    count = moe_checks.checked_placement(ep, placement)
    params = moe_checks.checked_params(
        ep,
        tokens,
        residual,
        topk_ids,
        params,
        routing,
        tp_axis,
        count + num_identity_experts,
        chunks,
    )
    run = expert_rows.implementation(experts, "experts" in params)
    moe_checks.require_gate(run, params)
    moe_checks.require_activations(
        "moe_ffn",
        moe_checks.is_gated(params),
        "shared_down" in params,
        ep.config.fused_shared_expert,
        activation,
        shared_activation,
    )
    params = params if run.takes_pair else moe_checks.stacked(params)
    moe_checks.require_blocks(ep, run, params, tp_axis)
    if tp_axis is not None:
        moe_checks.require_split(ep, tokens, params, tp_axis)
    if mask is not None:
        mask = moe_checks.checked_mask("moe_ffn", mask, tokens.shape[:1])
    if residual is not None:
        residual = jnp.asarray(residual)
    if routing is None:
        with jax.named_scope("jax_ep.router"):
            routing = choosing.routed(ep, tokens, params, router, mask, topk_ids)
    params = _spread(ep, params, tokens, routing)
    axes = _batch_axes(ep, batch_axes)
    losses = _losses(ep, routing, axes)
    ids, weights, x = routing.ids, routing.weights, tokens
    if num_identity_experts:
        last = count + num_identity_experts
        ids, residual = _of_identity(ids, weights, x, residual, count, last)
    if apply_router_weight_on_input:
        x, weights = _weighed(ids, weights, x), jnp.ones_like(weights)
    if placement is not None:
        ids = placement.assign(ids, jax.lax.axis_index(ep.axis_names))
    own = tokens if x is not tokens and "shared_down" in params else None
    both = activation, shared_activation or activation
    part = functools.partial(_part, ep, run, tp_axis, both)
    per_token = _PerToken(x, ids, weights, residual, own)
    y, (expert_counts, dropped, invalid) = _in_parts(
        ep, run, tp_axis, part, params, input_scale, per_token
    )
    aux = MoEAux(
        losses.balance_loss,
        losses.z_loss,
        losses.load,
        expert_counts,
        dropped,
        invalid,
        _place(ep, dropped, [name for name in axes if name != tp_axis]),
    )
    return y, aux


class _PerToken(NamedTuple):
    """What dispatch, experts and combine take for each token.

    Attributes:
        x: `[n, H]`, what is sent.
        ids: int32 `[n, K]`.
        weights: float32 `[n, K]`.
        residual: `[n, H]`, or None.
        own: `[n, H]`, the input of a shared expert, or None if it is x.
    """

    x: jax.Array
    ids: jax.Array
    weights: jax.Array
    residual: jax.Array | None
    own: jax.Array | None


def _part(
    ep: EPHandle,
    run: interface.Experts,
    tp_axis: str | None,
    activations_of: tuple[Any, Any],
    params: Mapping[str, Any],
    frozen: Any,
    given: _PerToken,
    sent: bool = True,
    d: Dispatched | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Dispatches some tokens, applies the experts, and combines.

    Args:
        ep: the handle.
        run: the experts.
        tp_axis: as in `moe_ffn`.
        activations_of: those of the routed experts and of a shared one.
        params: as in `moe_ffn`, without codes.
        frozen: codes of weights, or None, and the input scale.
        given: the tokens.
        sent: if not, only the derivative of the result is right (`parts.Part`).
        d: the dispatch of these tokens, if it was made ahead.

    Returns:
        `[n, H]`; and the counts of experts, dropped rows and bad ids.
    """
    config, (activation, of_shared) = ep.config, activations_of
    codes, input_scale = frozen
    params = params if codes is None else {**params, "experts": codes}
    residual, fused = given.residual, config.fused_shared_expert
    beside = None if tp_axis else residual
    varied = _along(ep, tp_axis, given)
    tokens = _sent_of(ep, varied)
    case = interface.Case(ep.mesh.local_devices[0], config.dtype)
    reads_tail = run.reads_tail(case)
    zero_tail = config.zero_tail and reads_tail
    if "shared_down" in params and not fused:
        own = given.x if given.own is None else given.own
        beside_it = own, params, of_shared
        if d is None:
            d, shared = _dispatch_beside(*tokens, input_scale, beside_it, zero_tail)
        else:
            shared = _shared_expert(*beside_it)
        beside = shared if beside is None else shared + beside
    elif d is None:
        d = dispatching.dispatch_routed(*tokens, input_scale, None, zero_tail=zero_tail)
    with jax.named_scope("jax_ep.experts"):
        rows = expert_rows.apply(
            ep, d, params, given.x.shape[0], tp_axis, run, activation
        )
    scattered = tp_axis is not None and columns.are_scattered(ep, tp_axis)
    if tp_axis and scattered:
        rows = columns.scatter(rows, tp_axis)
        if beside is not None:
            beside = columns.scatter(jnp.asarray(beside), tp_axis)
    how = combining.How(zero_tail=reads_tail, sent=sent)
    factors = varied.weights if config.reduce == "source" else d.router_weights
    y = combining.combine_routed(ep, rows, d.route, factors, beside, how=how)
    counts = (d.expert_counts, d.num_dropped, d.num_invalid)
    if tp_axis:
        # Unless scattered, sums after combine: n rows are sent, not the experts' N.
        y = columns.gather(y, tp_axis) if scattered else jax.lax.psum(y, tp_axis)
        y = y if residual is None else y + residual
        counts = _equal_along(tp_axis, counts)
    return y, (counts[0][1:] if fused else counts[0], *counts[1:])


def _along(ep: EPHandle, tp_axis: str | None, given: _PerToken) -> _PerToken:
    """Returns the tokens, of which those that are sent vary along the axis, if any."""
    if tp_axis is None:
        return given
    # Their gradients differ along the axis. With the cast here, they are summed for n
    # tokens; with a cast at the experts' weights, for N rows.
    order, least = ep.mesh.axis_names, frozenset((tp_axis,))
    x, ids, weights = vary_alike(order, least, given.x, given.ids, given.weights)
    return given._replace(x=x, ids=ids, weights=weights)


def _sent_of(
    ep: EPHandle, given: _PerToken
) -> tuple[EPHandle, jax.Array, jax.Array, jax.Array | None]:
    """Returns the handle and the first operands of a dispatch of these tokens."""
    weights = None if ep.config.reduce == "source" else given.weights
    return ep, given.x, given.ids, weights


def _ahead(ep: EPHandle, tp_axis: str | None) -> Any:
    """Returns the `parts.Ahead`; None unless a GPU runs a dispatch beside matmuls."""
    from jax_ep._ops import parts  # as in _in_parts

    if ep.config.overlap == "sm" or ep.config.most_pending == 0:
        # A single kernel cannot be split, and XLA overlaps its exchanges by itself.
        return None

    def send(frozen: Any, given: _PerToken) -> Any:
        tokens = _sent_of(ep, _along(ep, tp_axis, given))
        return dispatching.dispatch_async(*tokens, input_scale=frozen[1])

    def resume(frozen: Any, given: _PerToken, d: Dispatched) -> Dispatched:
        tokens = _sent_of(ep, _along(ep, tp_axis, given))
        return dispatching.resumed(*tokens, input_scale=frozen[1], d=d)

    def only_if(given: _PerToken, real: jax.Array) -> _PerToken:
        return given._replace(ids=jnp.where(real, given.ids, -1))

    begun = functools.partial(dispatching.begun, ep)
    return parts.Ahead(send, begun, dispatching.dispatch_wait, resume, only_if)


def _in_parts(
    ep: EPHandle,
    run: interface.Experts,
    tp_axis: str | None,
    part: Callable[..., Any],
    params: Mapping[str, Any],
    input_scale: Any,
    given: _PerToken,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns what `part` does of all tokens, in parts if they are more than T."""
    n = given.x.shape[0]
    most = ep.config.max_tokens_per_rank
    trained = {name: value for name, value in params.items() if name != "experts"}
    codes = params.get("experts")
    if n <= most:
        return part(trained, (codes, input_scale), given)
    from jax_ep._ops import parts  # few programs need it

    if codes is None and run.quantizes:
        # Once, not for each part.
        weights = params["gate_up"], params["down"]
        fixed = jax.lax.stop_gradient(weights)
        codes = _experts.quantize_weights(*fixed, run.quantizes, backward=True)
    count = -(-n // most)
    missing = count * most - n
    if missing:
        # Ids of -1 go to no expert.
        empty = (0, -1, 0, 0, 0)
        padded: Any = (
            None
            if array is None
            else jnp.pad(array, ((0, missing), (0, 0)), constant_values=value)
            for array, value in zip(given, empty, strict=True)
        )
        given = _PerToken(*padded)
    operands = parts.Given(trained, (codes, input_scale))
    wide = _WEIGHTS if run.casts_weights else ()
    ahead = _ahead(ep, tp_axis)
    y, counts = parts.in_parts("moe_ffn", ep, part, operands, given, count, wide, ahead)
    return y[:n], counts


# Weights that experts of the package take in any dtype.
_WEIGHTS = ("gate_up", "down", "gate_bias", "up_bias", "down_bias")


def _of_identity(
    ids: jax.Array,
    weights: jax.Array,
    tokens: jax.Array,
    residual: jax.Array | None,
    first: int,
    last: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns ids without experts from `first` to `last`, and their result as residual.

    It is added to `residual` before it is rounded.
    """
    own = (ids >= first) & (ids < last)
    share = jnp.sum(jnp.where(own, weights, 0.0), axis=-1, keepdims=True)
    # Padding may be NaN.
    real = jnp.where(jnp.any(own, axis=-1, keepdims=True), tokens, 0)
    y = share * real.astype(jnp.float32)
    if residual is not None:
        y = y + residual.astype(jnp.float32)
    return jnp.where(own, -1, ids), y.astype(tokens.dtype)


def _weighed(ids: jax.Array, weights: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns tokens times the weight of their only expert, rounded once."""
    # Padding may be NaN, and its row is not sent.
    real = jnp.where(ids >= 0, tokens, 0).astype(jnp.float32)
    return (real * weights).astype(tokens.dtype)


def _equal_along(axis: str, counts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Marks arrays of ints that are equal along `axis` as such for JAX."""
    if axis not in varying(counts[0]):
        return counts
    sizes = [count.shape[0] for count in counts]
    largest = jax.lax.pmax(jnp.concatenate(counts), axis)
    return tuple(jnp.split(largest, np.cumsum(sizes)[:-1]))


def _batch_axes(ep: EPHandle, given: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the axes to sum losses over, which must be manual in this call."""
    if given is not None:
        return tuple(given)
    # Each entry of a vmap over stages has its own batch.
    names = traces.unmapped(ep.mesh.axis_names)
    return tuple(name for name in names if checks.in_scope((name,)))


def _place(ep: EPHandle, like: jax.Array, split: Sequence[str]) -> jax.Array:
    """Returns `MoEAux.place`, this rank's index over the axes that `like` varies over.

    Without check_vma these axes are unknown, and `split` is used instead.
    """
    least = frozenset(ep.axis_names)
    axes = (varying(like) or frozenset(split)) | least
    names = [name for name in ep.mesh.axis_names if name in axes]
    return jax.lax.axis_index(tuple(n for n in names if checks.in_scope((n,))))[None]


def _spread(
    ep: EPHandle, params: Mapping[str, Any], tokens: jax.Array, routing: Any
) -> dict[str, Any]:
    """Casts params that are wider than tokens to vary over the axes of tokens.

    The backward pass of this cast sums gradients over ranks, in the params' dtype. If
    params were first cast to the tokens' dtype, the sum would be in that dtype.
    """
    axes = frozenset().union(*map(varying, jax.tree.leaves((tokens, routing))))

    def spread(value: Any) -> Any:
        value = jnp.asarray(value)
        if value.dtype.itemsize <= tokens.dtype.itemsize:
            return value
        return vary_alike(ep.mesh.axis_names, axes, value)[0]

    # Codes have no gradients.
    return {
        name: value if name == "experts" else jax.tree.map(spread, value)
        for name, value in params.items()
    }


def _dispatch_beside(
    ep: EPHandle,
    tokens: jax.Array,
    ids: jax.Array,
    weights: jax.Array | None,
    input_scale: ArrayLike | None,
    given: tuple[jax.Array, Mapping[str, Any], Any],
    zero_tail: bool,
) -> tuple[Dispatched, jax.Array]:
    """Dispatches, and computes the shared expert's rows while the exchange runs.

    `given` is what `_shared_expert` is called with.
    """
    sent = (ep, tokens, ids, weights)
    if ep.config.overlap == "sm":
        # A single kernel cannot be split, and XLA overlaps its exchanges by itself.
        d = dispatching.dispatch_routed(*sent, input_scale, None, zero_tail=zero_tail)
        return d, _shared_expert(*given)
    pending = dispatching.dispatch_async(*sent, input_scale=input_scale)
    # Without barriers XLA may run the shared expert before the first half has begun, or
    # after the second half, and nothing overlaps.
    begun = dispatching.begun(ep, pending), ids
    own, _ = jax.lax.optimization_barrier((given[0], begun))
    shared = _shared_expert(own, *given[1:])
    both = jax.lax.optimization_barrier((pending, shared))
    return dispatching.dispatch_wait(both[0]), both[1]


@jax.named_scope("jax_ep.shared_expert")
def _shared_expert(
    tokens: jax.Array, params: Mapping[str, Any], activation: Any
) -> jax.Array:
    gate_up = params["shared_gate_up"].astype(tokens.dtype)
    # gate, if there is one, and up
    products = jnp.einsum("nh,hcs->ncs", tokens, gate_up)
    sides = [products[:, side] for side in range(gate_up.shape[1])]
    inner = (activation or activations.swiglu)(*sides).astype(tokens.dtype)
    y = inner @ params["shared_down"].astype(tokens.dtype)
    if "shared_expert_gate" not in params:
        return y
    opening = params["shared_expert_gate"].astype(tokens.dtype)
    logits = jnp.matmul(tokens, opening, preferred_element_type=jnp.float32)
    return (jax.nn.sigmoid(logits) * y).astype(tokens.dtype)


def _losses(
    ep: EPHandle, routing: routers.Routing, axes: tuple[str, ...]
) -> routers.Losses:
    # psum over an axis needs operands that vary over it, even if tokens are equal.
    least = frozenset(ep.axis_names).union(axes)
    (routing,) = vary_alike(ep.mesh.axis_names, least, routing)
    return routers.losses(routing, axes)
