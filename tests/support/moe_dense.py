"""The dense formula and the parameters of a whole MoE layer, for tests of layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EXPERTS, TOP_K, HIDDEN, INNER, SHARED = 16, 3, 16, 8, 12


def params(
    seed: int = 0,
    *,
    shared: bool = True,
    bias: bool = False,
    logit_bias: bool = False,
    expert_bias: bool = False,
    shared_gate: bool = False,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
    shared_inner: int = SHARED,
) -> dict[str, Any]:
    """Parameters of all experts in float32, named as `jax_ep.moe_ffn` names them."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return (rng.standard_normal(shape) * fan_in**-0.5).astype(np.float32)

    found = {
        "router": normal(hidden, experts, fan_in=4),
        "gate_up": normal(experts, hidden, 2, inner, fan_in=hidden),
        "down": normal(experts, inner, hidden, fan_in=inner),
    }
    if bias:
        found["router_bias"] = normal(experts, fan_in=100)
    if shared:
        found["shared_gate_up"] = normal(hidden, 2, shared_inner, fan_in=hidden)
        found["shared_down"] = normal(shared_inner, hidden, fan_in=shared_inner)
    if shared_gate:
        found["shared_expert_gate"] = normal(hidden, 1, fan_in=4)
    if expert_bias:
        for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
            found[f"{name}_bias"] = normal(experts, size, fan_in=4)
    if logit_bias:
        found["router_logit_bias"] = normal(experts, fan_in=1)
    return found


def swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def clipped(gate: Any, up: Any) -> Any:
    """Like gpt-oss's: the gate is clipped, and 1 is added to up."""
    gate = jnp.minimum(gate, 1.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def chosen_experts(scores: np.ndarray, router: Any, bias: Any, top_k: int):
    """bool [n, E]: which experts each token chooses, by loops in NumPy."""
    wanted = np.asarray(scores, np.float64) + (0 if bias is None else bias)
    size = wanted.shape[1] // router.num_groups
    chosen = np.zeros(wanted.shape, bool)
    for token, row in enumerate(wanted):
        parts = row.reshape(-1, size)
        value = np.sort(parts, axis=1)[:, -router.best_of_group :].sum(1)
        groups = np.argsort(-value, kind="stable")[: router.top_groups]
        allowed = np.full(row.shape, -np.inf)
        for group in groups:
            at = slice(group * size, (group + 1) * size)
            allowed[at] = row[at]
        chosen[token, np.argsort(-allowed, kind="stable")[:top_k]] = True
    return chosen


def layer(
    params: Any,
    x: Any,
    chosen: Any,
    router: Any,
    kept: Any = True,
    activation: Any = swiglu,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(y, balance loss, z loss) of all tokens.

    `chosen`, bool [n, E], is a constant. So is `kept`, False for dropped rows.
    """
    logits = x @ params["router"] + params.get("router_logit_bias", 0)
    if router.score == "softmax":
        scores = jnp.exp(logits) / jnp.sum(jnp.exp(logits), -1, keepdims=True)
        shares = scores
    else:
        scores = 1 / (1 + jnp.exp(-logits))
        shares = scores / jnp.sum(scores, -1, keepdims=True)
    weights = jnp.where(chosen, scores, 0)
    if router.normalize is not False:  # all have K > 1
        weights = weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-20)
    weights = jnp.where(kept, weights * router.scale, 0)
    both = jnp.einsum("nh,ehcf->necf", x, params["gate_up"])
    gate, up = both[:, :, 0], both[:, :, 1]
    if "gate_bias" in params:
        gate, up = gate + params["gate_bias"], up + params["up_bias"]
    y = jnp.einsum("ne,nef,efh->nh", weights, activation(gate, up), params["down"])
    if "down_bias" in params:
        y = y + weights @ params["down_bias"]
    if "shared_down" in params:
        both = jnp.einsum("nh,hcs->ncs", x, params["shared_gate_up"])
        shared = activation(both[:, 0], both[:, 1]) @ params["shared_down"]
        if "shared_expert_gate" in params:
            shared = shared / (1 + jnp.exp(-(x @ params["shared_expert_gate"])))
        y = y + shared
    load = chosen.sum(0) / chosen.sum()
    real = chosen.any(1)
    mean = jnp.sum(jnp.where(real[:, None], shares, 0), 0) / real.sum()
    z = jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2
    balance = chosen.shape[1] * jnp.sum(load * mean)
    return y, balance, jnp.sum(jnp.where(real, z, 0)) / real.sum()


def scores(params: Any, x: Any, router: Any) -> np.ndarray:
    logits = np.asarray(x) @ params["router"] + params.get("router_logit_bias", 0)
    if router.score == "softmax":
        return np.asarray(jax.nn.softmax(logits))
    return np.asarray(jax.nn.sigmoid(logits))
