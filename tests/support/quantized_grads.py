"""Gradients of quantised calls, for tests."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle

HIDDEN = 128


def handle(**changes: Any) -> tuple[Any, Any]:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    config = helpers.make_config(**({"hidden_size": HIDDEN} | changes))
    return mesh, helpers.make_ep(mesh, config)


def pulled(mesh: Any, ep: Any, inputs: Any, ct: Any, ct_weights: Any) -> Any:
    """Cotangents of tokens and weights, from those of the rows and their weights."""

    def rows(tokens: Any, weights: Any, ids: Any) -> Any:
        d = jax_ep.dispatch(ep, tokens, ids, weights)
        return jax_ep.dequantize(d), d.router_weights

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def body(tokens: Any, weights: Any, ids: Any, ct: Any, ct_weights: Any) -> Any:
        _, pull = jax.vjp(lambda t, w: rows(t, w, ids), tokens, weights)
        return pull((ct, ct_weights))

    operands = (inputs.tokens, inputs.weights, inputs.ids, ct, ct_weights)
    return jax.jit(body)(*(helpers.put(mesh, part) for part in operands))


def cotangents(ep: Any, dtype: str, size: float) -> tuple[list, list]:
    rng = np.random.default_rng(3)
    shape = (ep.recv_capacity, HIDDEN)
    ct = [
        (rng.choice([-1.0, 1.0, 0.75], shape) * size).astype(oracle.DTYPES[dtype])
        for _ in range(ep.ep_size)
    ]
    ct_weights = [
        helpers.normal(rng, ep.recv_capacity, np.float32) for _ in range(ep.ep_size)
    ]
    return ct, ct_weights
