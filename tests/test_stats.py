"""jax_ep.stats: loads over steps against counts taken on the host."""

from __future__ import annotations

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import stats

EXPERTS, STEPS, ROWS = 8, 5, 24


def make(seed=0):
    """A handle of two EP groups, and the ids and aux of some steps."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config = helpers.make_config(num_experts=EXPERTS, recv_capacity=ROWS - 8)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(seed)
    ids = rng.integers(-2, EXPERTS, (STEPS, mesh.size * 8, 3), np.int32)
    return mesh, ep, ids


def step(mesh, ep):
    axes = P(mesh.axis_names)

    def body(load, x, ids):
        zeros = jnp.zeros((*ids.shape[:1], EXPERTS))
        weights = jnp.ones(ids.shape)
        routing = jax_ep.router.Routing(ids, weights, zeros, zeros)
        hidden = x.shape[1]
        params = {
            "gate_up": jnp.zeros((ep.local_experts, hidden, 2, 4)),
            "down": jnp.zeros((ep.local_experts, 4, hidden)),
        }
        _, aux = jax_ep.moe_ffn(ep, x, params, routing=routing)
        return stats.update(load, aux), aux

    out = jax_ep.MoEAux.specs(mesh.axis_names)
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=axes, out_specs=(axes, out)),
        donate_argnums=0,
    )


def test_sums_over_steps_inside_shard_map_and_outside():
    mesh, ep, ids = make()
    run = step(mesh, ep)
    load, outside = stats.init(ep), stats.init(ep)
    x = jnp.zeros((ids.shape[1], 16), jnp.bfloat16)
    for each in ids:
        load, aux = run(load, x, each)
        outside = jax.jit(stats.update)(outside, aux)
    for a, b in zip(jax.tree.leaves(load), jax.tree.leaves(outside), strict=True):
        np.testing.assert_array_equal(a, b)
    groups = ids.reshape(STEPS, 2, -1)
    counts = np.array(
        [[np.bincount(g[g >= 0], minlength=EXPERTS) for g in s] for s in groups]
    )
    by_rank = counts.reshape(STEPS, 4, EXPERTS // 2)
    found = stats.summary(load)
    assert found.steps == STEPS
    np.testing.assert_array_equal(found.rows, by_rank.sum(0))
    lost = np.maximum(by_rank.sum(2) - ep.recv_capacity, 0)
    np.testing.assert_array_equal(found.dropped, lost.sum(0))
    assert lost.sum() > 0
    invalid = (ids == -2).sum((0, 2)).reshape(4, -1).sum(1)
    np.testing.assert_array_equal(found.invalid, invalid)
    assert invalid.min() > 0
    whole = counts.sum(1)
    worst = EXPERTS * whole.max(1) / whole.sum(1)
    np.testing.assert_allclose(found.mean_imbalance, worst.mean(), rtol=1e-5)
    np.testing.assert_allclose(found.worst_imbalance, worst.max(), rtol=1e-5)
    assert found.fullest == by_rank.sum(2).max()


def test_a_layer_with_a_tensor_parallel_axis():
    mesh = helpers.make_mesh({"ep": 2, "tp": 2})
    ep = helpers.make_ep(mesh, helpers.make_config(num_experts=EXPERTS))
    load = stats.init(ep, ("ep",))
    assert load.rows.shape == (2, EXPERTS // 2, 2)
    counts = jnp.arange(EXPERTS, dtype=jnp.int32)
    zeros = jnp.zeros(2, jnp.int32)
    aux = jax_ep.MoEAux(*[jnp.zeros(())] * 2, counts / 28, counts, zeros, zeros)
    found = stats.summary(jax.jit(stats.update)(load, aux))
    np.testing.assert_array_equal(found.rows, [[0, 1, 2, 3], [4, 5, 6, 7]])
    np.testing.assert_allclose(found.worst_imbalance, 2.0)


def test_counts_pass_32_bits():
    total = jnp.array([[2**32 - 3, 7]], jnp.uint32)
    found = stats._add(total, jnp.array([5], jnp.int32))
    np.testing.assert_array_equal(found, [[2, 8]])


def some_load():
    rows = np.zeros((2, 4, 2), np.uint32)
    rows[:, :, 0] = [[0, 1, 50, 100], [10, 20, 30, 40]]
    dropped = np.array([[3, 0], [0, 0]], np.uint32)
    invalid = np.array([[0, 0], [1, 1]], np.uint32)
    ones = np.ones(2, np.float32)
    return stats.Load(
        rows, dropped, np.array([2, 2]), 3 * ones, 2 * ones, ones, invalid
    )


def test_heat_map_as_text():
    lines = stats.heat_map(some_load()).splitlines()
    assert lines[0].endswith("@ = 100")
    assert lines[1] == "rank 0   | .+@| 151, 3 dropped"
    assert lines[2] == "rank 1   |.:-=| 100, 4,294,967,297 invalid ids"
    assert lines[3].startswith("2 steps; busiest expert 1.50 x mean, at worst 2.00")


def test_heat_map_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    stats.heat_map(some_load(), str(tmp_path / "load.png"))
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_aux_of_another_layer_is_refused():
    _, ep, _ = make()
    aux = jax_ep.MoEAux(*[jnp.zeros(())] * 2, jnp.zeros(6), *[jnp.zeros(6)] * 3)
    with pytest.raises(ValueError, match=r"^jax_ep.stats.update: aux must be .*got 6"):
        stats.update(stats.init(ep), aux)


def test_what_is_no_aux_is_refused():
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    with pytest.raises(
        TypeError, match=r"^jax_ep\.stats\.update: aux must be .*got int"
    ):
        stats.update(load, 3)


def test_no_numbers_inside_of_jit():
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    with pytest.raises(ValueError, match=r"^jax_ep\.stats\.summary: load must hold"):
        jax.jit(lambda load: stats.summary(load).steps)(load)


def test_axes_of_a_load():
    _, ep, _ = make()
    assert stats.init(ep, "ep").steps.shape == (2,)
    with pytest.raises(
        ValueError, match=r"^jax_ep.stats.init: axis_names must be .*tp"
    ):
        stats.init(ep, ("ep", "tp"))
