"""Layers of jax_ep.flax for their tests."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from support import helpers, moe_dense

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen

BATCH, LENGTH = 8, 4


def fields(mesh, **changes):
    found = {
        "mesh": mesh,
        "axis_name": "ep",
        "hidden_size": moe_dense.HIDDEN,
        "intermediate_size": moe_dense.INNER,
        "num_experts": moe_dense.EXPERTS,
        "top_k": moe_dense.TOP_K,
        "max_tokens_per_rank": BATCH * LENGTH,
        "shared_intermediate_size": moe_dense.SHARED,
        "tp_axis_name": "tp" if "tp" in mesh.axis_names else None,
        "dtype": "float32",
        "transport": helpers.TRANSPORT,
    }
    return found | changes


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    shape = (BATCH, LENGTH, moe_dense.HIDDEN)
    return rng.standard_normal(shape).astype(np.float32)


def wave(y):
    return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[-1])))


def dense_grads(params, x, router, mask=None):
    """(y, loss) and the gradients of (params, x), by the dense formula.

    The loss is the sum of `wave` of y, 3 times the balance loss and the z loss.
    """
    flat = x.reshape(-1, moe_dense.HIDDEN)
    scores = moe_dense.scores(params, flat, router)
    bias = params.get("router_bias")
    chosen = moe_dense.chosen_experts(scores, router, bias, moe_dense.TOP_K)
    if mask is not None:
        chosen &= mask.reshape(-1, 1)

    def loss(params, flat):
        y, balance, z = moe_dense.layer(params, flat, chosen, router)
        return wave(y) + 3 * balance + z, y

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (total, y), grads = jax.jit(grad)(params, flat)
    return (y.reshape(x.shape), total), (grads[0], grads[1].reshape(x.shape))


def parts(array):
    """The shape of each device's shard."""
    return array.sharding.shard_shape(array.shape)


def router_biases(params):
    """The argument `router_bias` of a layer with these parameters."""
    if "router_logit_bias" not in params:
        return "router_bias" in params
    return "both" if "router_bias" in params else "logits"


def nnx_layer(mesh, params, **changes):
    changes = {"router_bias": router_biases(params)} | changes
    layer = jax_ep.flax.MoE(**fields(mesh, **changes), rngs=nnx.Rngs(0))
    for name, value in params.items():
        variable = getattr(layer, name)
        variable[...] = jax.device_put(value, variable[...].sharding)
    return layer
