"""A layer's default experts equal ragged_dot, with gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep._experts import of_rows
from jax_ep.router import Router
from support import grouped_kernels, helpers, moe_ffn

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.few(2)
@pytest.mark.parametrize("faked", [True, False])
@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("sizes", [{"ep": 4}, {"dp": 2, "ep": 2}], ids=str)
def test_default_experts(sizes, zero_tail, faked, monkeypatch):
    """On Hopper they use its kernels; rows past the groups may hold anything."""
    mesh = helpers.make_mesh(helpers.fit(sizes))
    size, devices = 128, []
    fields = {"hidden_size": size, "dtype": "bfloat16", "zero_tail": zero_tail}
    ep = helpers.make_ep(mesh, moe_ffn.config(**fields))
    apply = of_rows.Auto.apply

    def seen(auto, case, *args):
        devices.append(case.device)
        return apply(auto, case, *args)

    monkeypatch.setattr(of_rows.Auto, "apply", seen)
    taken = grouped_kernels.fake(monkeypatch) if faked else None
    rng = np.random.default_rng(4)
    shapes = {"router": (size, 16), "gate_up": (16, size, 2, size)}
    shapes["down"] = (16, size, size)
    params = {
        key: (rng.standard_normal(shape) / size**0.5).astype(np.float32)
        for key, shape in shapes.items()
    }
    x = jnp.asarray(rng.standard_normal((moe_ffn.N * mesh.size, size)), jnp.bfloat16)
    mask = np.ones(len(x), bool)

    def run(**options):
        layer = moe_ffn.expert_parallel(mesh, ep, params, Router(), **options)

        def loss(params, x):
            y = layer(params, x, mask)[0].astype(jnp.float32)
            return jnp.sum(y**2), y

        grads, y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
        return jax.tree.leaves((y, grads))

    found, wanted = run(), run(experts=jax_ep.experts.ragged_dot)
    assert devices
    assert taken is None or set(taken) == {
        "gate_up",
        "fprop",
        "dgrad",
        "down_dgrad",
        "wgrad",
    }
    assert all(device in mesh.local_devices for device in devices)
    for each, want in zip(found, wanted, strict=True):
        each, want = (np.asarray(array, np.float32) for array in (each, want))
        assert np.abs(each - want).max() <= 0.03 * np.abs(want).max()
