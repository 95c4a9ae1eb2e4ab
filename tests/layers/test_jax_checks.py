"""Layers under the checks of JAX: checkify, debug_nans, enable_checks, leak checks.

The router's choice by platform is in the programs, as if there were a GPU.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._ops import router_choice
from jax_ep.router import Router, route
from support import flax_layers, helpers, moe_dense, moe_ffn
from support.flax_layers import nnx

pytestmark = pytest.mark.usefixtures("quick_compiles", "kernel")
ROUTER = Router(score="sigmoid", num_groups=4, top_groups=2, scale=2.5)
# JAX differentiates no checked shard_map that has a custom_vjp, and finds leaks in the
# gradient of any jitted one with a collective (docs/sharp_bits.md).
INSIDE = ("moe_ffn, gradients inside", "apply_experts, gradients inside")
BY_NAME = pytest.mark.parametrize(
    "name", ["nnx", pytest.param("linen", marks=pytest.mark.thorough), *INSIDE]
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the router choose between plain JAX and its kernel."""
    if jax.default_backend() != "gpu":
        names = frozenset({"ep_router"})
        monkeypatch.setattr(router_choice.ffi, "gpu_target_names", lambda: names)


def total(y: Any, aux: Any = None) -> Any:
    losses = 0.0 if aux is None else aux.balance_loss + aux.z_loss
    return flax_layers.wave(y) + losses


def layer_of(name: str) -> tuple[Any, Any, Any]:
    """A function of parameters and tokens, and values of these."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    params = moe_dense.params(bias=True)
    x = flax_layers.inputs()
    if name == "nnx":
        layer = flax_layers.nnx_layer(mesh, params, router=ROUTER)
        graph, state = nnx.split(layer)

        def of_state(state: Any, x: Any) -> Any:
            return nnx.merge(graph, state)(x, return_aux=True)

        return of_state, state, x
    if name == "linen":
        told = flax_layers.fields(mesh, router=ROUTER, router_bias=True)
        layer = jax_ep.flax.linen.MoE(**told)
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        return (lambda state, x: layer.apply(state, x, return_aux=True)), variables, x
    rows = x.reshape(-1, moe_dense.HIDDEN)
    config = moe_ffn.config(max_tokens_per_rank=len(rows) // mesh.size)
    ep = helpers.make_ep(mesh, config)

    def apply_experts(params: Any, x: Any) -> Any:
        def matmuls(rows: Any, sizes: Any, expert_of_row: Any) -> Any:
            inner = jax.lax.ragged_dot(rows, params["gate_up"][:, :, 0], sizes)
            return jax.lax.ragged_dot(jnp.tanh(inner), params["down"], sizes)

        logits = x @ params["router"]
        found = route(logits, config.top_k, ROUTER, bias=params["router_bias"])
        return jax_ep.apply_experts(
            matmuls,
            x,
            found.ids,
            found.weights,
            num_experts=config.num_experts,
            axis_name="ep",
            mesh=mesh,
            transport=helpers.TRANSPORT,
            **helpers.on_nodes(),
        )

    def inside(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            if name.startswith("apply_experts"):
                return total(apply_experts(params, x))
            return total(*jax_ep.moe_ffn(ep, x, params, router=ROUTER))

        return jax.grad(loss, (0, 1))(params, x)

    specs = moe_ffn.param_specs(params, None)
    run = jax.shard_map(
        inside, mesh=mesh, in_specs=(specs, P("ep")), out_specs=(specs, P("ep"))
    )
    return run, params, rows


def gradients(name: str) -> tuple[Any, Any, Any]:
    """As `layer_of`, but the function returns gradients."""
    run, params, x = layer_of(name)
    if name in INSIDE:
        return run, params, x

    def loss(params: Any, x: Any) -> Any:
        return total(*run(params, x))

    return jax.grad(loss, (0, 1)), params, x


@pytest.mark.few(2)
@BY_NAME
def test_checkify(name: str) -> None:
    """Float checks find nothing, but they do find a token of NaN."""
    run, params, x = layer_of(name)
    checked = jax.jit(checkify.checkify(run, errors=checkify.float_checks))
    error, found = checked(params, x)
    assert error.get() is None
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    x = x.copy()
    x[0] = np.nan
    error, _ = checked(params, x)
    assert "nan generated" in error.get()


@BY_NAME
def test_debug_nans(name: str) -> None:
    run, params, x = gradients(name)
    with jax.debug_nans(True):
        jax.block_until_ready(jax.jit(run)(params, x))


@BY_NAME
def test_enable_checks(name: str) -> None:
    run, params, x = gradients(name)
    with jax.enable_checks(True):
        jax.jit(run).lower(params, x)


@pytest.mark.few(2)
@BY_NAME
def test_leak_checks(name: str) -> None:
    run, params, x = layer_of(name)
    with jax.checking_leaks():
        jax.eval_shape(run, params, x)
