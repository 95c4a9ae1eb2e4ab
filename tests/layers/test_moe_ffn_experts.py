"""jax_ep.moe_ffn: biases, activations, gate and up apart, experts that take `d`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router
from support import helpers, moe_dense
from support.errors import check_form, raises
from support.moe_dense import clipped, swiglu
from support.moe_ffn import N, config

pytestmark = pytest.mark.usefixtures("quick_compiles")

SPECS = {
    "router": ((), ()),
    "gate_up": ("ep", None, None, "tp"),
    "gate": ("ep", None, "tp"),
    "up": ("ep", None, "tp"),
    "down": ("ep", "tp"),
    "gate_bias": ("ep", "tp"),
    "up_bias": ("ep", "tp"),
    "down_bias": ("ep",),
    "shared_gate_up": (None, None, "tp"),
    "shared_down": ("tp",),
}


def with_biases(shared: int | None = None) -> dict[str, Any]:
    params = moe_dense.params(shared=False)
    rng = np.random.default_rng(7)
    experts, hidden, inner = moe_dense.EXPERTS, moe_dense.HIDDEN, moe_dense.INNER
    for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
        bias = rng.standard_normal((experts, size)) / 2
        params[f"{name}_bias"] = bias.astype(np.float32)
    if shared:
        params["shared_gate_up"] = rng.standard_normal((hidden, 2, shared)) / 4
        params["shared_down"] = rng.standard_normal((shared, hidden)) / 4
    return {name: np.float32(value) for name, value in params.items()}


def dense(params: Any, x: Any, activation: Any) -> jax.Array:
    logits = x @ params["router"]
    top, ids = jax.lax.top_k(jax.nn.softmax(logits), moe_dense.TOP_K)
    chosen = jax.nn.one_hot(ids, moe_dense.EXPERTS)
    weights = jnp.einsum("nk,nke->ne", top / top.sum(-1, keepdims=True), chosen)
    both = jnp.einsum("nh,ehcf->necf", x, params["gate_up"])
    inner = activation(
        both[:, :, 0] + params["gate_bias"], both[:, :, 1] + params["up_bias"]
    )
    rows = jnp.einsum("nef,efh->neh", inner, params["down"]) + params["down_bias"]
    y = jnp.einsum("ne,neh->nh", weights, rows)
    if "shared_down" in params:
        both = jnp.einsum("nh,hcs->ncs", x, params["shared_gate_up"])
        y = y + activation(both[:, 0], both[:, 1]) @ params["shared_down"]
    return y


def over(mesh: Any, ep: Any, params: Any, **options: Any) -> Any:
    tp = "tp" if "tp" in mesh.axis_names else None
    specs = {
        name: P(*(axis if axis != "tp" else tp for axis in SPECS[name]))
        if name != "router"
        else P()
        for name in params
    }

    def body(params: Any, x: Any) -> Any:
        return jax_ep.moe_ffn(ep, x, params, router=Router(), tp_axis=tp, **options)[0]

    return jax.shard_map(body, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"))


@jax_ep.experts.takes_dispatched
def of_dispatched(d: Any, gate_up: Any, down: Any, **options: Any) -> jax.Array:
    assert isinstance(d, jax_ep.Dispatched)
    rows = jax_ep.dequantize(d)
    return jax_ep.experts.ragged_dot(rows, gate_up, down, d.group_sizes, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("activation", [None, clipped])
@pytest.mark.parametrize(
    ("experts", "sizes", "fields"),
    [
        (None, {"ep": 2}, {}),
        (jax_ep.experts.Padded(256), {"ep": 2}, {}),
        (of_dispatched, {"ep": 2}, {}),
        (None, {"ep": 2, "tp": 2}, {}),
        (jax_ep.experts.ragged_dot, {"ep": 2}, {"fused_shared_expert": True}),
    ],
)
def test_against_the_dense_formula(experts, sizes, fields, activation) -> None:
    if jax.device_count() < np.prod(list(sizes.values())):
        pytest.skip(f"needs {sizes} devices")
    mesh = helpers.make_mesh(sizes)
    ep = helpers.make_ep(mesh, config(**fields))
    params = with_biases(moe_dense.INNER if fields else moe_dense.SHARED)
    x = np.random.default_rng(4).standard_normal((N * 2, moe_dense.HIDDEN))
    x = x.astype(np.float32)
    apart = {name: value for name, value in params.items() if name != "gate_up"}
    apart |= {"gate": params["gate_up"][:, :, 0], "up": params["gate_up"][:, :, 1]}
    run = over(mesh, ep, apart, experts=experts, activation=activation)

    def loss(run: Any, params: Any, x: Any) -> Any:
        y = run(params, x)
        return jnp.sum(jnp.sin(y)), y

    def joined(params: Any, x: Any) -> Any:
        both = jnp.stack([params["gate"], params["up"]], axis=2)
        return dense(params | {"gate_up": both}, x, activation or swiglu)

    (found, y), got = jax.jit(
        jax.value_and_grad(lambda p, x: loss(run, p, x), (0, 1), has_aux=True)
    )(apart, x)
    (expected, wanted), gradients = jax.jit(
        jax.value_and_grad(lambda p, x: loss(joined, p, x), (0, 1), has_aux=True)
    )(apart, x)
    np.testing.assert_allclose(y, wanted, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
        assert np.abs(b).max() > 1e-2
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)


def plain(rows: Any, gate_up: Any, down: Any, group_sizes: Any) -> Any:
    return rows


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"experts": plain}, ("experts", "gate_bias", "plain")),
        ({}, {"experts": plain, "activation": swiglu}, ("experts", "activation")),
        ({"gate_bias": (16, 9)}, {}, ("gate_bias",)),
        ({"down_bias": (16, 8)}, {}, ("down_bias",)),
        ({"gate": (16, 16, 8)}, {}, ("gate and up",)),
        ({"gate": (16, 16, 8), "up": (16, 16, 8)}, {}, ("gate_up",)),
    ],
)
def test_mistakes(changes, options, words) -> None:
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, config())
    params = with_biases()
    params |= {name: np.zeros(shape, np.float32) for name, shape in changes.items()}
    x = np.zeros((N, moe_dense.HIDDEN), np.float32)
    with raises() as caught:
        jax.eval_shape(over(mesh, ep, params, **options), params, x)
    check_form(caught, "moe_ffn", *words)
