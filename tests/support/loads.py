"""Compares loads that jax_ep.stats gathers with counts on the host."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import stats
from support import helpers

EXPERTS, STEPS, ROWS = 8, 5, 24


def make(seed=0, kind=AxisType.Auto, sizes=None):
    """A mesh, a handle of two EP groups, and the ids of some steps."""
    mesh = helpers.make_mesh(sizes or {"dp": 2, "ep": 2}, kind=kind)
    config = helpers.make_config(num_experts=EXPERTS, recv_capacity=ROWS - 8)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(seed)
    ids = rng.integers(-2, EXPERTS, (STEPS, mesh.size * 8, 3), np.int32)
    return mesh, ep, ids


def step(mesh, ep, tokens=None, load=None, check_vma=True, **options):
    """A layer and `stats.update`; `tokens` and `load` are the axes to shard over."""
    tokens = tokens or mesh.axis_names
    at, out = P(tokens), P(load or tokens)

    def body(load, x, ids):
        zeros = jnp.zeros((*ids.shape[:1], EXPERTS))
        weights = jnp.ones(ids.shape)
        routing = jax_ep.router.Routing(ids, weights, zeros, zeros)
        hidden = x.shape[1]
        params = {
            "gate_up": jnp.zeros((ep.local_experts, hidden, 2, 4)),
            "down": jnp.zeros((ep.local_experts, 4, hidden)),
        }
        _, aux = jax_ep.moe_ffn(ep, x, params, routing=routing, **options)
        return stats.update(load, aux), aux

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(out, at, at),
            out_specs=(out, jax_ep.MoEAux.specs(tokens)),
            check_vma=check_vma,
        ),
        donate_argnums=0,
    )


def placed(mesh, axes, *arrays):
    return [jax.device_put(one, NamedSharding(mesh, P(axes))) for one in arrays]


def check_numbers(kind, sizes=None):
    """Checks all counts. In a job of several processes, each process calls this."""
    mesh, ep, ids = make(kind=kind, sizes=sizes)
    run, load = step(mesh, ep), stats.init(ep)
    outside = stats.init(ep)
    x = np.zeros((ids.shape[1], 16), jnp.bfloat16)
    for each in ids:
        load, aux = run(load, *placed(mesh, mesh.axis_names, x, each))
        outside = jax.jit(stats.update)(outside, aux)
    groups = ids.reshape(STEPS, 2, -1)
    counts = [[np.bincount(g[g >= 0], minlength=EXPERTS) for g in s] for s in groups]
    rows = np.reshape(counts, (STEPS, mesh.size, -1))
    busiest = np.sum(counts, axis=1)
    with jax.transfer_guard("disallow"):
        found = [(stats.summary(one), stats.heat_map(one)) for one in (load, outside)]
    for numbers, text in found:
        assert numbers.steps == STEPS
        np.testing.assert_array_equal(numbers.rows, rows.sum(0))
        lost = np.maximum(rows.sum(2) - ep.recv_capacity, 0).sum(0)
        np.testing.assert_array_equal(numbers.dropped, lost)
        worst = EXPERTS * (busiest.max(1) / busiest.sum(1)).max()
        np.testing.assert_allclose(numbers.worst_imbalance, worst, rtol=1e-5)
        assert numbers.fullest == rows.sum(2).max()
        by_id = busiest.sum(0)
        np.testing.assert_array_equal(numbers.expert_rows, by_id)
        np.testing.assert_allclose(numbers.imbalance, by_id.max() / by_id.mean())
        np.testing.assert_array_equal(
            numbers.expert_ids,
            np.arange(mesh.size * ep.local_experts).reshape(rows[0].shape) % EXPERTS,
        )
        lines = text.splitlines()
        ranks = "1 rank" if ep.ep_size == 1 else f"{ep.ep_size} ranks"
        assert lines[0] == f"{EXPERTS} experts on {ranks}, sum of 2 EP groups, 5 steps"
        assert f"@ {by_id.max():,} rows" in lines[1]
        lost = lost.reshape(2, -1).sum(0)
        own = by_id.reshape(ep.ep_size, -1).sum(1)
        for rank, line in enumerate(lines[3 : 3 + ep.ep_size]):
            assert line.split()[0] == str(rank), line
            assert line.split("|")[2].split() == [f"{own[rank]:,}", f"{lost[rank]:,}"]
        assert f"fullest rank {numbers.fullest:,} rows per step" in text
