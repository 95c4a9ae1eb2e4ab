"""Batches that the ranks do not divide, such as a single decoded sequence."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_ep.router import Router
from support import helpers, moe_dense

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import dense_grads, fields, nnx_layer, wave

pytestmark = pytest.mark.usefixtures("quick_compiles")


def tokens(*leading):
    rng = np.random.default_rng(len(leading))
    return rng.standard_normal((*leading, moe_dense.HIDDEN)).astype(np.float32)


def own_grads(kind, mesh, params, x, mask, **changes):
    """(loss, y, aux, gradients of params, gradient of x) of a layer."""
    router = {"router": Router(), **changes}

    def total(y, aux):
        return wave(y) + 3 * aux.balance_loss + aux.z_loss, (y, aux)

    if kind == "nnx":
        layer = nnx_layer(mesh, params, **router)

        def loss(layer, x):
            return total(*layer(x, mask=mask, return_aux=True))

        argnums = (nnx.DiffState(0, nnx.Param), 1)
        grad = nnx.value_and_grad(loss, argnums=argnums, has_aux=True)
        (value, (y, aux)), (of_params, of_x) = nnx.jit(grad)(layer, x)
        of_params = {name: each[...] for name, each in of_params.items()}
    else:
        layer = jax_ep.flax.linen.MoE(**fields(mesh, **router))

        def loss(params, x):
            named = {**params, "router_kernel": params["router"]}
            del named["router"]
            return total(*layer.apply({"params": named}, x, mask=mask, return_aux=True))

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (value, (y, aux)), (of_params, of_x) = jax.jit(grad)(params, x)
    return value, y, aux, of_params, of_x


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "leading", "spec", "axes"),
    [
        ("nnx", (1, 1), None, AxisType.Auto),
        ("nnx", (3,), None, AxisType.Explicit),
        ("linen", (3, 1), None, AxisType.Auto),
        ("nnx", (2, 5), P("dp", "ep"), AxisType.Auto),
    ],
    ids=str,
)
def test_against_the_dense_formula(kind, leading, spec, axes):
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 4}), kind=axes)
    params, x = moe_dense.params(), tokens(*leading)
    mask = None
    if np.prod(leading) > 3:
        mask = np.random.default_rng(0).random(leading) < 0.7
    (want_y, want_loss), want = dense_grads(params, x, Router(), mask)
    most = max(2, -(-int(np.prod(leading)) // mesh.size))
    with jax.set_mesh(mesh):
        value, y, aux, grads, of_x = own_grads(
            kind, mesh, params, x, mask, spec=spec, max_tokens_per_rank=most
        )
    assert y.shape == x.shape
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, want_loss, rtol=1e-5)
    for name, expected in {**want[0], "x": want[1]}.items():
        found = of_x if name == "x" else grads[name]
        limit = np.abs(expected).max()
        assert limit > 1e-2
        np.testing.assert_allclose(found, expected, atol=1e-5 * limit, err_msg=name)
    real = np.prod(leading) if mask is None else mask.sum()
    assert int(aux.expert_counts.sum()) == real * moe_dense.TOP_K
    assert int(aux.num_invalid.sum()) == int(aux.num_dropped.sum()) == 0
    np.testing.assert_allclose(aux.load.sum(), 1, rtol=1e-6)


def test_a_long_batch_is_spread_evenly():
    """3 sequences of 5 are 15 tokens: 2 on each of 8 ranks, not 5 on each of 3."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 4}))
    most = -(-15 // mesh.size)
    layer = nnx_layer(mesh, moe_dense.params(), max_tokens_per_rank=most)
    x = tokens(3, 5)
    want = nnx_layer(mesh, moe_dense.params(), max_tokens_per_rank=40)(
        np.concatenate([x, np.zeros((5, 5, moe_dense.HIDDEN), np.float32)])
    )[:3]
    np.testing.assert_allclose(layer(x), want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=rf"max_tokens_per_rank = {most} tokens"):
        layer(tokens(mesh.size * most + 1))
