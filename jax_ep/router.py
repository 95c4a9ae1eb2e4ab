"""Routers of mixture-of-experts layers, with their losses and bias updates.

All functions are pure, and take the arrays of one rank or global arrays.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_ep._core import calls, errors, operands, pytrees
from jax_ep._core.arrays import as_array
from jax_ep._core.literals import SCORES, Score
from jax_ep._core.operands import Operand
from jax_ep._ops import router_choice

# Scores whose sum is less are divided as powers of e: they may underflow, and
# derivatives divide by powers of the sum. Within rounding, a sigmoid as small is e to
# the logit, and a sqrtsoftplus is e to half of it.
_LEAST_SUM = 1e-8
# Below this logit, sqrtsoftplus is e to half of it, within rounding. The square root of
# a softplus that underflows would have no finite derivative.
_LEAST_SOFTPLUS = -20.0


@calls.explained_class("router.Router")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How logits become experts and weights; frozen and hashable.

    `Router()` is softmax top-k with weights that sum to 1 if K > 1. If K = 1 the weight
    is the expert's probability, as in Switch Transformer: divided by itself it would
    always be 1, and the task would not train the router. DeepSeek-V3's router is
    `Router(score="sigmoid", num_groups=8, top_groups=4, scale=2.5)` with a bias.

    Attributes:
        score: "softmax" over the experts, "sigmoid" of each logit, or "sqrtsoftplus",
            the square root of the softplus of each logit, as in DeepSeek-V4.
        normalize: whether a token's K weights are divided by their sum; None means
            only if K > 1. True with K = 1 warns, because the router then gets no
            gradient from the task.
        scale: factor that the weights are multiplied by last.
        num_groups: number of groups of consecutive experts; 1 sets no limit.
        top_groups: how many groups the experts of one token may come from.
        best_of_group: a group's score is the sum of this many of its best scores: 2 in
            DeepSeek-V3, 1 in V2.

    Raises:
        ValueError: a field is not as described above.
    """

    score: Score = "softmax"
    normalize: bool | None = None
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2

    def __post_init__(self) -> None:
        """Validates everything that does not depend on the number of experts."""
        errors.require(
            errors.is_one_of(self.score, SCORES),
            "router.Router",
            f"score must be one of {list(SCORES)}",
            errors.brief(self.score),
            'the default is "softmax"',
        )
        real = isinstance(self.scale, numbers.Real) and _is_finite(self.scale)
        errors.require(
            (self.normalize is None or isinstance(self.normalize, bool)) and real,
            "router.Router",
            "normalize must be a bool or None and scale a finite number",
            (self.normalize, self.scale),
            "the defaults are None and 1.0",
        )
        remedy = "num_groups=1 and top_groups=1 set no limit"
        for name in ("num_groups", "top_groups", "best_of_group"):
            count = getattr(self, name)
            what = f"{name} must be an int of at least 1"
            good = type(count) is int and count >= 1
            errors.require(good, "router.Router", what, errors.brief(count), remedy)
        errors.require(
            self.top_groups <= self.num_groups,
            "router.Router",
            f"top_groups must be at most num_groups, {errors.brief(self.num_groups)}",
            self.top_groups,
            remedy,
        )

    def _check_choice(self, function: str, experts: int, top_k: int) -> None:
        """Raises unless it can choose `top_k` of `experts` experts."""
        errors.require(
            isinstance(top_k, numbers.Integral) and 1 <= top_k <= experts,
            function,
            f"top_k must be an int from 1 to num_experts, {experts}",
            errors.brief(top_k),
            "pass a value within these bounds",
        )
        groups = self.num_groups
        size = experts // groups
        errors.require(
            experts % groups == 0 and size * self.top_groups >= top_k,
            function,
            "num_groups must divide the experts and top_groups must hold top_k experts",
            f"{experts} experts in {errors.brief(groups)} groups, top "
            f"{errors.brief(self.top_groups)}, top_k {top_k}",
            "change num_groups or top_groups",
        )
        errors.require(
            groups == 1 or self.best_of_group <= size,
            function,
            f"best_of_group must be at most {size}, the experts per group",
            self.best_of_group,
            "pass a smaller value",
        )
        if top_k == 1 and self.normalize:
            warnings.warn(
                f"jax_ep.{function}: Router(normalize=True) makes every weight 1 if "
                "top_k is 1, so the task does not train the router; leave normalize "
                "out",
                UserWarning,
                stacklevel=3,
            )


@pytrees.register()
@dataclasses.dataclass(frozen=True)
class Routing:
    """A router's decision for n tokens, or for `[..., K]` in place of `[n, K]`.

    Attributes:
        ids: int32 `[n, K]`, experts of each token, best first unless they were given;
            -1 if masked.
        weights: float32 `[n, K]`; 0 if masked.
        logits: float32 `[n, E]`, as passed to `route`.
        probabilities: float32 `[n, E]`, scores that sum to 1 for each token; all equal
            if masked.
        loss: float32 `[]`, your own balance loss for these tokens, or None for the one
            of `Losses`.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array
    probabilities: jax.Array
    loss: jax.Array | None = None


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


# What moe_ffn and the layers accept as `router=` besides a `Router`: a function of
# logits `[n, E]` (and of the keywords that it names). It returns ids and weights
# `[n, K]`, or these and a loss, or a `Routing`.
RouterFunction = Callable[
    ...,
    Routing | tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array],
]


_OPERANDS = (
    Operand("logits", "[..., E]", operands.ANY, "pass one row per token"),
    Operand("bias", "[E]", operands.ANY, "pass one number per expert", optional=True),
    Operand(
        "topk_ids",
        "[..., K]",
        operands.IDS,
        "pass top_k experts per token",
        optional=True,
    ),
    Operand(
        "mask",
        "[...]",
        "bool",
        "pass one bool per token",
        "pass one bool per token",
        optional=True,
    ),
)


def route(
    logits: ArrayLike,
    top_k: int,
    router: Router | None = None,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    topk_ids: ArrayLike | None = None,
) -> Routing:
    """Chooses `top_k` experts for each token.

    Args:
        logits: float32 `[n, E]`, or `[..., E]` for results with these dimensions.
        top_k: K.
        router: the kind of router; None means `Router()`.
        bias: float32 `[E]`, added to the scores for the choice of experts but not for
            their weights, so it has no gradient; see `update_bias`.
        mask: bool `[n]`, False for tokens that go to no expert (padding).
        topk_ids: int32 `[n, K]`, experts that were chosen elsewhere: by a table of
            token ids, as in a hash layer of DeepSeek-V4, or when a sequence was
            generated. Only their weights come from the logits. -1 means no expert.

    Returns:
        A `Routing`. Among experts with equal scores, the one with the lower id wins.

    Raises:
        ValueError: an array has another shape, the experts do not divide into the
            groups, or the top groups hold fewer than `top_k` experts. Ids outside
            [-1, E) are no error here: they get weight 0, and dispatch counts them.
        TypeError: `mask` is not bool, or `router` is not a `Router`.
    """
    router = Router() if router is None else router
    what, remedy = "a jax_ep.router.Router", "leave it out for softmax top-k"
    errors.require_type("router.route", "router", router, Router, what, remedy)
    given = {"logits": logits, "bias": bias, "topk_ids": topk_ids, "mask": mask}
    given = {n: None if v is None else jnp.asarray(v) for n, v in given.items()}
    arrays = operands.checked("router.route", _OPERANDS, given, {"K": (top_k, "top_k")})
    logits, bias, mask = arrays["logits"], arrays.get("bias"), arrays.get("mask")
    experts = logits.shape[-1]
    router._check_choice("router.route", experts, top_k)
    logits = logits.astype(jnp.float32)
    # NaN logits of padding would reach derivatives even though their weights are 0.
    real = logits if mask is None else jnp.where(mask[..., None], logits, 0.0)
    scores = _scores(router, real)
    softmax = router.score == "softmax"
    probabilities = scores if softmax else _shares(router, scores, real)
    if "topk_ids" in arrays:
        ids = arrays["topk_ids"]
        weights = _weights_of_given(router, scores, real, ids)
    elif router_choice.has_kernel(experts, top_k, router.num_groups):
        ids, weights = _chosen_by_kernel(router, top_k, real, bias)
    else:
        ids, weights = _chosen(router, top_k, scores, real, bias)
    if mask is not None:
        ids = jnp.where(mask[..., None], ids, -1)
        weights = jnp.where(mask[..., None], weights, 0.0)
    return Routing(ids, weights, logits, probabilities)


def _scores(router: Router, logits: jax.Array) -> jax.Array:
    if router.score == "sqrtsoftplus":
        large = logits > _LEAST_SOFTPLUS
        # Both sides must have finite derivatives, since 0 * NaN is NaN.
        root = jnp.sqrt(jax.nn.softplus(jnp.where(large, logits, 0.0)))
        return jnp.where(large, root, jnp.exp(jnp.where(large, 0.0, logits) / 2))
    return (jax.nn.softmax if router.score == "softmax" else jax.nn.sigmoid)(logits)


def _chosen(
    router: Router,
    top_k: int,
    scores: jax.Array,
    logits: jax.Array,
    bias: jax.Array | None,
) -> router_choice.Choice:
    """Returns ids and weights, in plain JAX."""
    wanted = jax.lax.stop_gradient(scores)
    if bias is not None:
        own = jax.lax.stop_gradient(bias)
        wanted = wanted + jnp.broadcast_to(own, wanted.shape)
    if router.top_groups < router.num_groups:
        wanted = _within_best_groups(router, wanted)
    ids = _best(wanted, top_k)
    return ids, _weights(router, scores, logits, ids)


def _weights(
    router: Router, scores: jax.Array, logits: jax.Array, ids: jax.Array
) -> jax.Array:
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if _normalizes(router, ids.shape[-1]):
        weights = _shares(router, weights, jnp.take_along_axis(logits, ids, axis=-1))
    return weights * float(router.scale)


def _weights_of_given(
    router: Router, scores: jax.Array, logits: jax.Array, ids: jax.Array
) -> jax.Array:
    """Returns the weights of ids that may be of no expert, which get 0."""
    there = (ids >= 0) & (ids < scores.shape[-1])
    at = jnp.where(there, ids, 0)
    weights = jnp.where(there, jnp.take_along_axis(scores, at, axis=-1), 0.0)
    if _normalizes(router, ids.shape[-1]):
        powers = jnp.where(there, jnp.take_along_axis(logits, at, axis=-1), -jnp.inf)
        weights = _shares(router, weights, powers)
    return weights * float(router.scale)


def _normalizes(router: Router, top_k: int) -> bool:
    return top_k > 1 if router.normalize is None else router.normalize


def _chosen_by_kernel(
    router: Router, top_k: int, logits: jax.Array, bias: jax.Array | None
) -> router_choice.Choice:
    """Does what `_chosen` does, but from logits, and with a kernel on GPUs."""
    front = logits.shape[:-1]
    logits = logits.reshape(-1, logits.shape[-1])
    kernel = partial(
        router_choice.choose,
        top_k=top_k,
        score=router.score,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        best_of_group=router.best_of_group,
        least_sum=_LEAST_SUM if _normalizes(router, top_k) else 0.0,
        scale=float(router.scale),
    )

    def plain(logits: jax.Array, bias: jax.Array | None) -> router_choice.Choice:
        return _chosen(router, top_k, _scores(router, logits), logits, bias)

    fixed = jax.lax.stop_gradient((logits, bias))
    ids, weights = router_choice.on_gpus(kernel, plain, *fixed)
    weights = _of_logits(router, weights, ids, logits)
    return ids.reshape(*front, top_k), weights.reshape(*front, top_k)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_logits(
    router: Router, weights: jax.Array, ids: jax.Array, logits: jax.Array
) -> jax.Array:
    """Returns `weights` unchanged, with the derivative of their formula."""
    return weights


@_of_logits.defjvp
def _(router: Router, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    _, ids, logits = primals

    def formula(logits: jax.Array) -> jax.Array:
        return _weights(router, _scores(router, logits), logits, ids)

    _, tangent = jax.jvp(formula, (logits,), (tangents[2],))
    return _of_logits(router, *primals), tangent


def _shares(router: Router, scores: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns scores `[..., K]` divided by their sum, however small it is."""
    total = jnp.sum(scores, axis=-1, keepdims=True)
    small = total < _LEAST_SUM
    # Both sides must have finite derivatives, since 0 * NaN is NaN.
    powers = jnp.where(small, logits, 0.0)
    largest = jnp.max(powers, axis=-1, keepdims=True)
    least = jnp.finfo(powers.dtype).min  # where all logits are -inf, all shares are 0
    powers = powers - jax.lax.stop_gradient(jnp.maximum(largest, least))
    if router.score == "sqrtsoftplus":
        powers = powers / 2
    powers = jnp.exp(powers)
    sums = jnp.sum(powers, axis=-1, keepdims=True)
    shares = scores / jnp.where(small, 1.0, total)
    return jnp.where(small, powers / jnp.where(sums > 0, sums, 1.0), shares)


@partial(jax.jit, static_argnums=1)
def _best(scores: jax.Array, count: int) -> jax.Array:
    """Returns the indices of the `count` highest scores per row, best first; int32.

    On GPUs, XLA of jax 0.11.2 returns zeros for indices that the program does not use
    if the scores are sharded by row (as in openxla/xla#49005). Outside of jit, top_k is
    a program of its own. The minimum makes it use the indices, and changes none.
    """
    _, at = jax.lax.top_k(scores, count)
    return jnp.minimum(at.astype(jnp.int32), scores.shape[-1] - 1)


def _within_best_groups(router: Router, wanted: jax.Array) -> jax.Array:
    """Returns `wanted` with -inf outside each token's best groups."""
    *tokens, experts = wanted.shape
    size = experts // router.num_groups  # -1 has no meaning if there are no tokens
    grouped = wanted.reshape(*tokens, router.num_groups, size)
    best, _ = jax.lax.top_k(grouped, router.best_of_group)
    groups = _best(jnp.sum(best, axis=-1), router.top_groups)
    chosen = jnp.any(jax.nn.one_hot(groups, router.num_groups, dtype=bool), axis=-2)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(wanted.shape)


@pytrees.register()
@dataclasses.dataclass(frozen=True)
class Losses:
    """Losses and load of a whole batch.

    Attributes:
        balance_loss: float32 `[]`, `E * sum_e load[e] * mean probability[e]`; 1 if all
            experts get the same. If the `Routing` has a `loss`, this is its mean over
            the ranks, each weighted by its number of tokens.
        z_loss: float32 `[]`, mean over tokens of `logsumexp(logits) ** 2`.
        load: float32 `[E]`, each expert's share of the (token, k) pairs.
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


def losses(routing: Routing, axis_names: str | Sequence[str] = ()) -> Losses:
    """Returns load-balance loss and router z loss; masked tokens do not count.

    As in Switch Transformer (arXiv:2101.03961) and ST-MoE (arXiv:2202.08906).

    Args:
        routing: what `route` returned.
        axis_names: inside shard_map, the mesh axes that the batch is split over. The
            losses are then those of the whole batch, equal on every rank.

    Returns:
        The `Losses`, without a factor; usual factors are 1e-2 and 1e-3.

    Raises:
        TypeError: `routing` is not a `Routing`.
    """
    what, remedy = "a jax_ep.router.Routing", "pass what jax_ep.router.route returned"
    errors.require_type("router.losses", "routing", routing, Routing, what, remedy)
    experts = routing.logits.shape[-1]
    real = jnp.any(routing.ids >= 0, axis=-1).astype(jnp.float32)
    # one_hot of -1 is all zeros.
    chosen = jax.nn.one_hot(routing.ids.reshape(-1), experts, dtype=jnp.float32)
    chosen = jnp.sum(chosen, axis=0)
    # No product of matrices, which JAX would round to the default precision.
    mass = real[..., None] * routing.probabilities
    mass = jnp.sum(mass.reshape(-1, experts), axis=0)
    logits = jnp.where(real[..., None] > 0, routing.logits, 0.0)  # padding may be NaN
    z = jnp.sum(real * jnp.square(jax.nn.logsumexp(logits, axis=-1)))
    tokens = jnp.sum(real)
    sums = [chosen, mass, z, tokens]
    if routing.loss is not None:
        # where, because a mean over no tokens may be NaN.
        sums.append(jnp.where(tokens > 0, tokens * routing.loss, 0.0))
    if axis_names:
        sums = jax.lax.psum(sums, axis_names)
    chosen, mass, z, tokens, *own = sums
    tokens = jnp.maximum(tokens, 1.0)
    load = chosen / jnp.maximum(jnp.sum(chosen), 1.0)
    balance = experts * jnp.sum(load * (mass / tokens))
    if own:
        balance = own[0] / tokens
    return Losses(balance, z / tokens, load)


_UPDATED = (
    Operand("bias", "[..., E]", operands.ANY),
    Operand("load", "[..., E]", operands.ANY, "pass aux.load of the same layer"),
)


def update_bias(bias: ArrayLike, load: ArrayLike, rate: float = 1e-3) -> jax.Array:
    """Moves the bias up by `rate` if an expert's load is below the mean, else down.

    Balances experts without a loss, as DeepSeek-V3 does (arXiv:2408.15664).

    Args:
        bias: float32 `[E]`, as passed to `route`.
        load: float32 `[E]`, `Losses.load` of the step.
        rate: how far the bias moves; a number, or an array of one, as from a schedule.

    Returns:
        float32 `[E]`, the bias of the next step.

    Raises:
        ValueError, TypeError: `load` is not an array of the shape of `bias`, or `rate`
            is not a number.
    """
    function = "router.update_bias"
    kinds, what = numbers.Real | jax.Array | np.ndarray, "a number"
    errors.require_type(function, "rate", rate, kinds, what, "convert it with float()")
    if not isinstance(rate, numbers.Real):
        array = as_array(function, "rate", rate)
        errors.require(
            array.shape == () and jnp.issubdtype(array.dtype, jnp.floating),
            function,
            "rate must be one number",
            f"{array.dtype} of shape {array.shape}",
            "pass a float, the same for all experts",
        )
    given = {"bias": jnp.asarray(bias), "load": load}
    arrays = operands.checked(function, _UPDATED, given)
    load = arrays["load"]
    return arrays["bias"] + rate * jnp.sign(jnp.mean(load) - load)
