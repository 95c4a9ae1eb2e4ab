"""Routers of mixture-of-experts layers, their losses and their bias.

Pure functions of one rank's arrays or of global ones; `jax_ep.moe_ffn` calls them.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_ep._core import checks
from jax_ep._core.arrays import as_array
from jax_ep._core.literals import SCORES, Score

# Keeps a division by the sum of sigmoids finite where all of them underflow, and its
# derivative, which has the square.
_LEAST_SUM = 1e-16


def _require(holds: bool, function: str, what: str, value: Any, remedy: str) -> None:
    if not holds:
        raise ValueError(f"jax_ep.{function}: {what}, got {value!r}; {remedy}")


def _require_type(function: str, name: str, value: Any, kind: type, maker: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"jax_ep.{function}: {name} must be a jax_ep.router.{kind.__name__}, got "
            f"{value!r}; {maker} makes one"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How logits become experts and weights; frozen and hashable.

    `Router()` is softmax top-k with weights that sum to 1 where K > 1. A single
    expert's weight is its probability, as in Switch Transformer: divided by itself it
    would be 1 whatever the router says, and the task would not train it.
    DeepSeek-V3's router is
    `Router(score="sigmoid", num_groups=8, top_groups=4, scale=2.5)` with a bias.

    Attributes:
        score: "softmax" over the experts, or "sigmoid" of each.
        normalize: whether a token's K weights are divided by their sum; None is yes
            where K > 1. True with K = 1 warns: the router then gets no gradient from
            the task.
        scale: factor of the weights, after that or without it.
        num_groups: groups of consecutive experts; 1 is no limit.
        top_groups: groups that a token may take experts of.
        best_of_group: a group's score is the sum of so many of its best scores: 2 in
            DeepSeek-V3, 1 (the best) in V2.

    Raises:
        ValueError: a field does not hold what is said above.
    """

    score: Score = "softmax"
    normalize: bool | None = None
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2

    def __post_init__(self) -> None:
        """Validates what needs no number of experts."""
        _require(
            self.score in SCORES,
            "router.Router",
            f"score must be one of {list(SCORES)}",
            self.score,
            '"softmax" is the default',
        )
        real = isinstance(self.scale, numbers.Real) and math.isfinite(self.scale)
        _require(
            (self.normalize is None or isinstance(self.normalize, bool)) and real,
            "router.Router",
            "normalize must be a bool or None and scale a finite number",
            (self.normalize, self.scale),
            "None and 1.0 are the defaults",
        )
        remedy = "num_groups=1 and top_groups=1 are no limit"
        for name in ("num_groups", "top_groups", "best_of_group"):
            count = getattr(self, name)
            what = f"{name} must be an int of at least 1"
            good = type(count) is int and count >= 1
            _require(good, "router.Router", what, count, remedy)
        _require(
            self.top_groups <= self.num_groups,
            "router.Router",
            f"top_groups must be at most num_groups, {self.num_groups}",
            self.top_groups,
            remedy,
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("ids", "weights", "logits", "probabilities"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """What a router decides for n tokens.

    Attributes:
        ids: int32 `[n, K]`, experts of each token, best first; -1 where masked.
        weights: float32 `[n, K]`; 0 where masked.
        logits: float32 `[n, E]`, as they were given.
        probabilities: float32 `[n, E]`, scores that sum to 1 for each token; all equal
            where masked.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array
    probabilities: jax.Array


def route(
    logits: ArrayLike,
    top_k: int,
    router: Router | None = None,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> Routing:
    """Chooses `top_k` experts for each token.

    Args:
        logits: float32 `[n, E]`.
        top_k: K.
        router: the kind of router; None is `Router()`.
        bias: float32 `[E]`, added to the scores where experts are chosen and not in
            their weights, so that it has no gradient; see `update_bias`.
        mask: bool `[n]`, False for tokens that go to no expert (padding).

    Returns:
        A `Routing`. Equal scores go to the lower expert.

    Raises:
        ValueError: an array has another shape, the experts do not divide into the
            groups, or too few are left.
        TypeError: `mask` is not of bool, or `router` none.
    """
    router = Router() if router is None else router
    _require_type("router.route", "router", router, Router, "Router()")
    logits = jnp.asarray(logits)
    _require(
        logits.ndim == 2,
        "router.route",
        "logits must be [n, E]",
        logits.shape,
        "reshape them to a row for each token",
    )
    n, experts = logits.shape
    check_choice("router.route", router, experts, top_k)
    if bias is not None:
        bias, remedy = jnp.asarray(bias), "give one number an expert"
        checks.require_shape("router.route", "bias", bias, (experts,), "[E]", remedy)
    if mask is not None:
        mask, remedy = jnp.asarray(mask), "give one bool a token"
        checks.require_dtype("router.route", "mask", mask, "bool", remedy)
        checks.require_shape("router.route", "mask", mask, (n,), "[n]", remedy)
    logits = logits.astype(jnp.float32)
    # Padding may be NaN, and with it what nobody uses but derivatives.
    real = logits if mask is None else jnp.where(mask[:, None], logits, 0.0)
    if router.score == "softmax":
        scores = probabilities = jax.nn.softmax(real)
    else:
        scores = jax.nn.sigmoid(real)
        probabilities = _shares(scores)
    wanted = jax.lax.stop_gradient(scores)
    if bias is not None:
        wanted = wanted + jax.lax.stop_gradient(bias)[None, :]
    if router.top_groups < router.num_groups:
        wanted = _within_best_groups(router, wanted)
    ids = _best(wanted, top_k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if top_k > 1 if router.normalize is None else router.normalize:
        weights = _shares(weights)
    weights = weights * float(router.scale)
    if mask is not None:
        ids = jnp.where(mask[:, None], ids, -1)
        weights = jnp.where(mask[:, None], weights, 0.0)
    return Routing(ids, weights, logits, probabilities)


def _shares(scores: jax.Array) -> jax.Array:
    total = jnp.sum(scores, axis=-1, keepdims=True)
    return scores / jnp.maximum(total, _LEAST_SUM)


@partial(jax.jit, static_argnums=1)
def _best(scores: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` highest scores of each row, best first; int32.

    On GPUs XLA of jax 0.11.2 returns zeros for indices that nothing in the program
    uses, if the scores are sharded by row (as in openxla/xla#49005); outside of jit
    top_k alone is a program. The minimum uses them and changes none.
    """
    _, at = jax.lax.top_k(scores, count)
    return jnp.minimum(at.astype(jnp.int32), scores.shape[-1] - 1)


def check_choice(function: str, router: Router, experts: int, top_k: int) -> None:
    """Raises unless `router` can choose `top_k` of so many experts."""
    _require(
        isinstance(top_k, numbers.Integral) and 1 <= top_k <= experts,
        function,
        f"top_k must be an int from 1 to num_experts, {experts}",
        top_k,
        "give one of these",
    )
    groups = router.num_groups
    size = experts // groups
    _require(
        experts % groups == 0 and size * router.top_groups >= top_k,
        function,
        "num_groups must divide the experts and top_groups of them hold top_k",
        f"{experts} experts in {groups} groups, top {router.top_groups}, top_k {top_k}",
        "change num_groups or top_groups",
    )
    _require(
        groups == 1 or router.best_of_group <= size,
        function,
        f"best_of_group must be at most {size}, the experts of a group",
        router.best_of_group,
        "give a smaller one",
    )
    if top_k == 1 and router.normalize:
        warnings.warn(
            f"jax_ep.{function}: Router(normalize=True) makes every weight 1 where "
            "top_k is 1, so the task does not train the router; leave normalize out",
            UserWarning,
            stacklevel=3,
        )


def _within_best_groups(router: Router, wanted: jax.Array) -> jax.Array:
    """`wanted` with -inf in all but each token's best groups."""
    n, experts = wanted.shape
    grouped = wanted.reshape(n, router.num_groups, experts // router.num_groups)
    best, _ = jax.lax.top_k(grouped, router.best_of_group)
    groups = _best(jnp.sum(best, axis=-1), router.top_groups)
    chosen = jnp.any(jax.nn.one_hot(groups, router.num_groups, dtype=bool), axis=1)
    return jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(n, experts)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("balance_loss", "z_loss", "load"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Losses:
    """Of a whole batch.

    Attributes:
        balance_loss: float32 `[]`, `E * sum_e load[e] * mean probability[e]`: 1 where
            all experts get the same.
        z_loss: float32 `[]`, mean over tokens of `logsumexp(logits) ** 2`.
        load: float32 `[E]`, share of the (token, k) that each expert was chosen for.
    """

    balance_loss: jax.Array
    z_loss: jax.Array
    load: jax.Array


def losses(routing: Routing, axis_names: str | Sequence[str] = ()) -> Losses:
    """Load-balance loss and router z loss; masked tokens do not count.

    As in Switch Transformer (arXiv:2101.03961) and ST-MoE (arXiv:2202.08906).

    Args:
        routing: what `route` returned.
        axis_names: inside shard_map, the mesh axes that the batch is split over: the
            losses are then of the whole batch, equal on every rank.

    Returns:
        The `Losses`, without any factor; usual ones are 1e-2 and 1e-3.

    Raises:
        TypeError: `routing` is no `Routing`.
    """
    _require_type("router.losses", "routing", routing, Routing, "jax_ep.router.route")
    experts = routing.logits.shape[-1]
    real = jnp.any(routing.ids >= 0, axis=-1).astype(jnp.float32)
    # ids of -1 are one-hot nowhere.
    chosen = jnp.sum(jax.nn.one_hot(routing.ids, experts, dtype=jnp.float32), (0, 1))
    mass = real @ routing.probabilities
    logits = jnp.where(real[:, None] > 0, routing.logits, 0.0)  # padding may be NaN
    z = real @ jnp.square(jax.nn.logsumexp(logits, axis=-1))
    sums = (chosen, mass, z, jnp.sum(real))
    if axis_names:
        sums = jax.lax.psum(sums, axis_names)
    chosen, mass, z, tokens = sums
    tokens = jnp.maximum(tokens, 1.0)
    load = chosen / jnp.maximum(jnp.sum(chosen), 1.0)
    return Losses(experts * jnp.sum(load * (mass / tokens)), z / tokens, load)


def update_bias(bias: ArrayLike, load: ArrayLike, rate: float = 1e-3) -> jax.Array:
    """One step of balancing without a loss: up by `rate` where load is low, else down.

    As in DeepSeek-V3; its source is arXiv:2408.15664.

    Args:
        bias: float32 `[E]` of `route`.
        load: float32 `[E]`, `Losses.load` of the step.
        rate: the step.

    Returns:
        float32 `[E]`, the bias of the next step.

    Raises:
        ValueError, TypeError: `load` is no array of the shape of `bias`.
    """
    function, why = "router.update_bias", "that of bias"
    load, remedy = as_array(function, "load", load), "pass aux.load of its layer"
    checks.require_shape(function, "load", load, jnp.shape(bias), why, remedy)
    return jnp.asarray(bias) + rate * jnp.sign(jnp.mean(load) - load)
