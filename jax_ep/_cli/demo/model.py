"""The byte-level language model of the demo, for both kinds of expert layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_ep._cli.demo.moe import LayerStats

VOCABULARY = 256  # bytes
BALANCE_WEIGHT = 0.6

Params = dict[str, Any]
# (the layer's parameters, tokens, residual) -> (result, balance loss, statistics)
MoELayer = Callable[
    [Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array, LayerStats]
]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch; `experts` and `sequences` count all ranks."""

    experts: int
    sequences: int
    length: int = 64
    hidden: int = 128
    heads: int = 4
    expert_hidden: int = 96
    blocks: int = 2
    top_k: int = 2
    capacity_factor: float = 1.5


def init_params(sizes: Sizes, seed: int) -> Params:
    """Returns parameters as NumPy float32, the same on every machine."""
    rng = np.random.default_rng(seed)
    hidden, inner = sizes.hidden, sizes.expert_hidden

    def normal(*shape: int, fan_in: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(fan_in**-0.5)

    def block() -> Params:
        return {
            "attention": normal(hidden, 3 * hidden, fan_in=hidden),
            "attention_out": normal(hidden, hidden, fan_in=hidden),
            "moe": {
                "router": normal(hidden, sizes.experts, fan_in=16),
                "up": normal(sizes.experts, hidden, 2 * inner, fan_in=hidden),
                "down": normal(sizes.experts, inner, hidden, fan_in=inner),
            },
        }

    return {
        "token": normal(VOCABULARY, hidden, fan_in=4),
        "position": _waves(sizes.length, hidden),
        "blocks": [block() for _ in range(sizes.blocks)],
        "head": normal(hidden, VOCABULARY, fan_in=64 * hidden),
    }


def param_specs(params: Params, axis: str) -> Params:
    """Returns specs that split experts over `axis` and replicate the rest."""

    def spec(path: tuple[Any, ...], _: Any) -> P:
        return P(axis) if path[-1].key in ("up", "down") else P()

    return jax.tree_util.tree_map_with_path(spec, params)


def loss(
    params: Params, text: jax.Array, sizes: Sizes, moe_layer: MoELayer
) -> tuple[jax.Array, jax.Array, LayerStats]:
    """Computes the next-byte loss of uint8 text `[sequences, length + 1]`.

    Returns:
        Mean cross-entropy in nats per byte; mean balance loss of the layers;
        statistics, stacked over the layers.
    """
    inputs, targets = text[:, :-1].astype(jnp.int32), text[:, 1:].astype(jnp.int32)
    x = params["token"][inputs] + params["position"]
    balances, stats = [], []
    for block in params["blocks"]:
        x = x + _attention(block, _normalise(x), sizes.heads)
        tokens = _normalise(x).reshape(-1, sizes.hidden)
        y, balance, layer_stats = moe_layer(
            block["moe"], tokens, x.reshape(tokens.shape)
        )
        x = y.reshape(x.shape)
        balances.append(balance)
        stats.append(layer_stats)
    log_probabilities = jax.nn.log_softmax(_normalise(x) @ params["head"])
    chosen = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)
    return (
        -jnp.mean(chosen),
        jnp.mean(jnp.stack(balances)),
        jax.tree.map(lambda *layers: jnp.stack(layers), *stats),
    )


def _waves(length: int, hidden: int) -> np.ndarray:
    """Returns sines and cosines, from which attention learns positions quickly."""
    rates = np.geomspace(1, 1e-3, hidden // 2)
    angles = np.arange(length)[:, None] * rates
    return np.float32(0.5) * np.concatenate(
        [np.sin(angles), np.cos(angles)], axis=1, dtype=np.float32
    )


def _normalise(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _attention(block: Params, x: jax.Array, heads: int) -> jax.Array:
    sequences, length, hidden = x.shape
    qkv = (x @ block["attention"]).reshape(sequences, length, 3, heads, hidden // heads)
    query, key, value = jnp.moveaxis(qkv, 2, 0)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return mixed.reshape(x.shape) @ block["attention_out"]
