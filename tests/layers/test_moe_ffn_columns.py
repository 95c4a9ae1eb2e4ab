"""Tensor-parallel experts whose columns are scattered before the combine."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep._layers import columns
from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import N, config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

TIGHT = N * moe_dense.TOP_K
# Configs for which columns are summed after the combine.
WHOLE = {
    "room": {"recv_capacity": 4 * TIGHT},
    "narrow": {"hidden_size": 4},
}


def program(mesh, params, **changes):
    """A function of (params, x) with gradients, and x."""
    ep = helpers.make_ep(mesh, config(**changes))
    layer = expert_parallel(mesh, ep, params, Router())
    hidden = ep.config.hidden_size
    x = np.random.default_rng(6).standard_normal((2 * N, hidden)).astype(np.float32)
    mask = np.ones(len(x), bool)

    def loss(params, x):
        y, _ = layer(params, x.astype(ep.config.dtype), mask)
        y = y.astype(jnp.float32)
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[1]))), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)), x


def moved(program, params, x):
    """Names and shapes of the collectives of floats over the tensor axis."""
    text = program.lower(params, x).compile().as_text()
    found = []
    for shapes, name in re.findall(
        r"= (.*?) (all-reduce|reduce-scatter|all-gather)(?:-start)?\(", text
    ):
        for dims in re.findall(r"\w\d+\[([\d,]*)\]", shapes):
            found.append((name, tuple(map(int, filter(None, dims.split(","))))))
    return found


def experts_alone(params):
    return {name: params[name] for name in ("router", "gate_up", "down")}


def test_one_reduce_scatter_in_place_of_all_reduces():
    mesh = helpers.make_mesh({"ep": 2, "tp": 2})
    params = experts_alone(moe_dense.params())
    rows, hidden = 2 * TIGHT, moe_dense.HIDDEN
    run, x = program(mesh, params, recv_capacity=rows)
    found = moved(run, params, x)
    by_name = [name for name, _ in found]
    assert by_name.count("reduce-scatter") == 1
    assert ("reduce-scatter", (rows, hidden // 2)) in found
    # The result, and the cotangent of all rows (the transposed reduce-scatter).
    gathers = [shape for name, shape in found if name == "all-gather"]
    assert sorted(gathers) == [(N, hidden), (rows, hidden)]
    # The gradient of the tokens, which are equal along the axis, is still all-reduced.
    reduced = [shape for name, shape in found if name == "all-reduce"]
    assert reduced.count((N, hidden)) == 1
    assert all(rows not in shape for shape in reduced)


@pytest.mark.parametrize("name", WHOLE)
def test_columns_that_stay_together(name):
    """If there is room for many more rows, or if a part would be too narrow."""
    mesh = helpers.make_mesh({"ep": 2, "tp": 2})
    hidden = WHOLE[name].get("hidden_size", moe_dense.HIDDEN)
    params = experts_alone(moe_dense.params())
    params["router"] = params["router"][:hidden]
    params["gate_up"] = params["gate_up"][:, :hidden]
    params["down"] = params["down"][..., :hidden]
    run, x = program(mesh, params, **WHOLE[name])
    found = moved(run, params, x)
    assert "reduce-scatter" not in [each for each, _ in found]
    # For the result, and for the gradient of the tokens.
    assert found.count(("all-reduce", (N, hidden))) == 2


@pytest.mark.parametrize("shared", [True, False])
def test_both_ways_agree(shared):
    mesh = helpers.make_mesh({"ep": 2, "tp": 2})
    params = moe_dense.params(shared=shared)
    tight, wide = (
        run(params, x)
        for run, x in (
            program(mesh, params, recv_capacity=rows) for rows in (2 * TIGHT, 4 * TIGHT)
        )
    )
    for a, b in zip(*map(jax.tree.leaves, (tight, wide)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max())


def test_partial_sums_are_added_in_float32():
    """Four bfloat16 sums are rounded once, and so is what is gathered again."""
    mesh = helpers.make_mesh({"tp": 4})
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((4 * N, moe_dense.HIDDEN)).astype(jnp.bfloat16)

    def body(rows):
        return columns.gather(columns.scatter(rows, "tp"), "tp")

    run = jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    y, back = jax.vjp(jax.jit(run), parts)
    apart = parts.reshape(4, N, -1)
    want = apart.astype(np.float32).sum(0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, want)
    assert (want != apart[0] + apart[1] + apart[2] + apart[3]).any()
    np.testing.assert_array_equal(back(want)[0], np.tile(want, (4, 1)))
