"""A transport in a single class: `jax_ep.init` accepts it, and everything works."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._transport import base
from jax_ep._transport.collective import Collective
from support import helpers


class Gathered(Collective):
    """Every rank gets everything and takes its own part."""

    name = "gathered"

    def exchange(self, ep: Any, send: jax.Array) -> jax.Array:
        if ep.route_ranks == 1:
            return send
        everything = jax.lax.all_gather(send, ep.axis_names)
        rank = jax.lax.axis_index(ep.axis_names)
        return jax.lax.dynamic_index_in_dim(everything, rank, 1, keepdims=False)


@pytest.fixture
def gathered(monkeypatch) -> None:
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    base.register(Gathered)


def layer(ep: Any, x: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
    d = jax_ep.dispatch(ep, x, ids, w)
    rows = jnp.tanh(jax_ep.dequantize(d))
    pending = jax_ep.combine_async(ep, rows, d.route, d.router_weights)
    return jax_ep.combine_wait(pending)


@pytest.mark.parametrize(
    "fields",
    [{}, {"dispatch_format": "mxfp8", "fused_shared_expert": True}, {"skip_a2a": True}],
)
def test_results_and_gradients(gathered, fields) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(hidden_size=32, **helpers.HALVES, **fields)
    rng = np.random.default_rng(2)
    made = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
    x, ids, w = (helpers.put(mesh, p) for p in (made.tokens, made.ids, made.weights))
    results = []
    for name in ("gathered", "collective"):
        with jax_ep.init(mesh, "ep", config, name) as ep:
            assert ep.transport == name

            def body(x: Any, ids: Any, w: Any, ep: Any = ep) -> Any:
                y, back = jax.vjp(lambda x, w: layer(ep, x, ids, w), x, w)
                return y, back(y)

            run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            results.append(jax.tree.leaves(jax.jit(run)(x, ids, w)))
    for a, b in zip(*results, strict=True):
        assert np.asarray(b, np.float32).any()
        helpers.assert_bits(a, b)


def test_it_is_named_among_the_others(gathered) -> None:
    mesh = helpers.make_mesh(1)
    with pytest.raises(ValueError, match="'gathered'"):
        jax_ep.init(mesh, "ep", helpers.make_config(), "carrier pigeons")  # type: ignore[arg-type]
