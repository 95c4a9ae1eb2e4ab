"""jax_ep.moe_ffn: the dtype in which parameters' gradients are summed over ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe_dense
from support.moe_ffn import N, config, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")


def gradients(mesh, ep, params, x, dy, *, apart, check_vma=True):
    """Gradients of the parameters; with `apart`, of one copy per rank, stacked."""
    specs = param_specs(params, None)
    ranks = P(("dp", "ep"))

    def body(params, x, dy):
        if apart:
            params = jax.tree.map(lambda a: a[0], params)
        y, _ = jax_ep.moe_ffn(ep, x, params)
        return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))[None]

    if apart:
        dp, ranks_ep = mesh.shape["dp"], mesh.shape["ep"]

        def copies(name, value):
            split = name in ("gate_up", "down")
            parts = np.split(value, ranks_ep) if split else [value] * ranks_ep
            return np.stack(parts * dp)

        params = {name: copies(name, value) for name, value in params.items()}
        specs = dict.fromkeys(params, ranks)
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, ranks, ranks),
        out_specs=ranks,
        check_vma=check_vma,
    )
    return jax.jit(jax.grad(lambda p: jnp.sum(run(p, x, dy))))(params)


@pytest.mark.few(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("fused", [False, True], ids=["beside", "fused"])
def test_gradients_are_summed_in_the_dtype_of_the_parameters(fused, check_vma) -> None:
    """Ranks compute in bfloat16; sums over them are not rounded to it."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    ep = helpers.make_ep(mesh, config(dtype="bfloat16", fused_shared_expert=fused))
    params = moe_dense.params()
    if fused:
        rng = np.random.default_rng(8)
        for name, like in (("shared_gate_up", "gate_up"), ("shared_down", "down")):
            params[name] = rng.standard_normal(params[like].shape[1:], np.float32) / 4
    rng = np.random.default_rng(9)
    x, dy = (
        jnp.asarray(rng.standard_normal((N * mesh.size, moe_dense.HIDDEN)), "bfloat16")
        for _ in range(2)
    )
    found = gradients(mesh, ep, params, x, dy, apart=False, check_vma=check_vma)
    alone = gradients(mesh, ep, params, x, dy, apart=True)
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        each = np.asarray(alone[name])
        each = each.reshape(2, 2, *each.shape[1:])
        if name.startswith("shared"):
            wanted = each.sum(axis=(0, 1))
        else:
            wanted = each.sum(axis=0).reshape(params[name].shape)
        got = np.asarray(found[name])
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        # Sums in bfloat16 would be equal to their rounded values.
        assert (wanted != wanted.astype(jnp.bfloat16)).mean() > 0.1
