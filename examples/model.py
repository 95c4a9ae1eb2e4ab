"""A byte-level mixture-of-experts transformer in Flax NNX, for train.py.

Its expert layers can be of several classes: `jax_ep.flax.MoE`, the layer on
`jax_ep.sharded` (global_arrays.py), or `DenseMoE`, which makes no jax_ep call.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

BYTES = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch, over all devices."""

    experts: int = 16
    top_k: int = 2
    hidden: int = 64
    inner: int = 64
    heads: int = 4
    blocks: int = 2
    sequences: int = 32
    length: int = 64


class Report(NamedTuple):
    """What a dense layer reports, named as in `jax_ep.MoEAux`."""

    balance_loss: jax.Array
    load: jax.Array


class DenseMoE(nnx.Module):
    """The formula: every expert on every token, weighted by the router."""

    def __init__(self, sizes, rngs):
        wide = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", 1, (2, 3), (0,)
        )
        narrow = jax.nn.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal", 1, 2, (0,)
        )
        hidden, inner, experts = sizes.hidden, sizes.inner, sizes.experts
        flat = nnx.initializers.lecun_normal()
        self.router = nnx.Param(flat(rngs.params(), (hidden, experts)))
        self.gate_up = nnx.Param(wide(rngs.params(), (experts, hidden, 2, inner)))
        self.down = nnx.Param(narrow(rngs.params(), (experts, inner, hidden)))
        self.top_k = sizes.top_k

    def __call__(self, x, return_aux=True):
        flat, experts = x.reshape(-1, x.shape[-1]), self.router.shape[1]
        probabilities = jax.nn.softmax(flat @ self.router[...])
        best, ids = jax.lax.top_k(probabilities, self.top_k)
        chosen = jax.nn.one_hot(ids, experts, dtype=x.dtype)
        best /= best.sum(-1, keepdims=True)
        weights = jnp.einsum("nke,nk->ne", chosen, best)
        both = jnp.einsum("nh,ehcf->necf", flat, self.gate_up[...])
        rows = jax.nn.silu(both[:, :, 0]) * both[:, :, 1] * weights[..., None]
        y = jnp.einsum("nef,efh->nh", rows, self.down[...])
        load = chosen.sum((0, 1)) / ids.size
        balance = experts * jnp.sum(load * probabilities.mean(0))
        return y.reshape(x.shape), Report(balance, load)


class Block(nnx.Module):
    """One block of the model: attention, then experts."""

    def __init__(self, sizes, make_moe, rngs):
        self.heads = sizes.heads
        hidden = sizes.hidden
        self.norms = nnx.List([nnx.RMSNorm(hidden, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(hidden, 3 * hidden, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)
        self.moe = make_moe(rngs)

    def __call__(self, x, **options):
        sequences, length, hidden = x.shape
        qkv = self.qkv(self.norms[0](x))
        qkv = qkv.reshape(sequences, length, 3, self.heads, hidden // self.heads)
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        x = x + self.out(mixed.reshape(x.shape))
        y, aux = self.moe(self.norms[1](x), return_aux=True, **options)
        return x + y, aux


class Model(nnx.Module):
    """The model: bytes `[sequences, length]` to logits `[sequences, length, 256]`."""

    def __init__(self, sizes, make_moe, rngs):
        self.embed = nnx.Embed(BYTES, sizes.hidden, rngs=rngs)
        self.position = nnx.Param(
            0.1 * jax.random.normal(rngs.params(), (sizes.length, sizes.hidden))
        )
        self.blocks = nnx.List(
            [Block(sizes, make_moe, rngs) for _ in range(sizes.blocks)]
        )
        self.norm = nnx.RMSNorm(sizes.hidden, rngs=rngs)
        self.head = nnx.Linear(sizes.hidden, BYTES, use_bias=False, rngs=rngs)

    def __call__(self, text, codes=None):
        """Runs the model; `codes` are each block's, made by `quantize_weights`."""
        x = self.embed(text) + self.position[...]
        reports = []
        for index, block in enumerate(self.blocks):
            options = {} if codes is None else {"quantized": codes[index]}
            x, aux = block(x, **options)
            reports.append(aux)
        return self.head(self.norm(x)), reports


def loss(model, text, codes=None, balance_weight=1e-2):
    """Returns (loss to minimise, (nats per byte, what the expert layers report))."""
    logits, reports = model(text[:, :-1], codes)
    logs = jax.nn.log_softmax(logits)
    nats = -jnp.mean(jnp.take_along_axis(logs, text[:, 1:, None], axis=-1))
    balance = sum(aux.balance_loss for aux in reports) / len(reports)
    return nats + balance_weight * balance, (nats, reports)
