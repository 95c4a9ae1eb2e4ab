"""apply_experts in a layer like MaxText's, on its axes, against the dense formula.

Outputs and gradients agree to 1e-6 in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, maxtext

pytestmark = pytest.mark.usefixtures("quick_compiles")
MESHES: dict[str, dict[str, int]] = {
    "data_ep": {"data": 2, "expert": 4},
    "fsdp_ep": {"fsdp": 2, "expert": 4},
    "fsdp_tensor_ep": {"fsdp": 2, "tensor": 2, "expert": 2},
    "context_ep": {"context": 2, "expert": 4},
}
OPTIONS = (("transport", helpers.TRANSPORT), *helpers.on_nodes().items())


def loss(y: Any) -> Any:
    """Smooth, and different for every element."""
    at = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)
    return jnp.mean(jnp.sin(y + at))


def gradients(layer: Any, *, beside: bool = True) -> Any:
    """Compiled gradients of the loss, with y and the layer's other results."""

    def of_layer(inputs: Any, params: Any) -> Any:
        y, *others = layer(inputs, params) if beside else (layer(inputs, params),)
        return loss(y), (y, *others)

    return jax.jit(jax.grad(of_layer, (0, 1), has_aux=True))


dense_gradients = gradients(maxtext.dense, beside=False)


def check(layer: Any, inputs: Any, params: Any, host: Any, dense: Any = None) -> Any:
    """Compares outputs and all gradients; returns the numbers of dropped rows."""
    grads, (y, dropped) = gradients(layer)(inputs, params)
    of_dense = gradients(dense, beside=False) if dense else dense_gradients
    wanted, (y_dense,) = of_dense(*host)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    close(y, y_dense)
    jax.tree.map(close, grads, wanted)
    assert all(np.abs(g).max() > 1e-4 for g in jax.tree.leaves(wanted))
    return dropped


@pytest.mark.few(2)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", MESHES)
def test_layer(name: str, biases: bool) -> None:
    mesh = maxtext.make_mesh(**MESHES[name])
    layer = maxtext.Layer(mesh, options=OPTIONS, check_vma=not biases)
    host = maxtext.make_inputs(), maxtext.make_params(biases=biases)
    dropped = check(layer, *maxtext.placed(mesh, *host), host)
    assert not np.any(dropped)


@pytest.mark.parametrize("check_vma", [True, False])
def test_scattered_columns(check_vma: bool) -> None:
    mesh = maxtext.make_mesh(**MESHES["fsdp_tensor_ep"])
    layer = maxtext.Layer(mesh, scatter=True, options=OPTIONS, check_vma=check_vma)
    host = maxtext.make_inputs(), maxtext.make_params(biases=True)
    check(layer, *maxtext.placed(mesh, *host), host)


@pytest.mark.parametrize("name", ["fsdp_tensor_ep", "context_ep"])
def test_capacity(name: str) -> None:
    """Dropped rows are counted and contribute nothing."""
    mesh = maxtext.make_mesh(**MESHES[name])
    capacity = {"recv_capacity": 12}
    layer = maxtext.Layer(mesh, options=(*OPTIONS, *capacity.items()))
    host = maxtext.make_inputs(), maxtext.make_params(biases=True)
    ids = np.asarray(maxtext.route(host[0], host[1]["gate"])[0])
    config = helpers.make_config(num_experts=8, top_k=2, **capacity)
    kept = maxtext.kept_rows(mesh, ids, config)
    assert 0 < kept.mean() < 1
    dense = functools.partial(maxtext.dense, kept=kept)
    dropped = check(layer, *maxtext.placed(mesh, *host), host, dense)
    assert np.sum(dropped) == np.sum(kept == 0)


def test_scan_over_layers() -> None:
    mesh = maxtext.make_mesh(**MESHES["fsdp_ep"])
    layer = maxtext.Layer(mesh, options=OPTIONS)

    def stacked(step: Any) -> Any:
        def body(x: Any, own: Any) -> Any:
            y, beside = step(x, own)
            return x + jnp.tanh(y), beside

        def run(inputs: Any, params: Any) -> Any:
            kept = jax.checkpoint(body, policy=jax_ep.save_route)
            return jax.lax.scan(kept, inputs, params)

        return run

    def dense(inputs: Any, params: Any) -> Any:
        return stacked(lambda x, own: (maxtext.dense(x, own), None))(inputs, params)[0]

    host = maxtext.make_inputs(), maxtext.make_params(biases=True, leading=(3,))
    dropped = check(stacked(layer), *host, host, dense)
    assert dropped.shape == (3, 8)


def test_pipeline_of_stages() -> None:
    """vmap over stages, each of which has its own devices."""
    mesh = maxtext.make_mesh(stage=2, expert=2)
    layer = maxtext.Layer(mesh, options=OPTIONS, check_vma=False)
    host = (
        maxtext.make_inputs(leading=(2,)),
        maxtext.make_params(biases=True, leading=(2,)),
    )
    stages = jax.vmap(layer, spmd_axis_name="stage")
    given = maxtext.placed(mesh, *host, leading=P("stage"))
    check(stages, *given, host, jax.vmap(maxtext.dense))


def test_swap_is_short() -> None:
    assert maxtext.lines_of_the_swap() <= 15
