"""jax_ep.stats: loads over steps against counts taken on the host."""

from __future__ import annotations

import math
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import stats

EXPERTS, STEPS, ROWS = 8, 5, 24


def make(seed=0, kind=AxisType.Auto, sizes=None):
    """A handle of two EP groups, and the ids of some steps."""
    mesh = helpers.make_mesh(sizes or {"dp": 2, "ep": 2}, kind=kind)
    config = helpers.make_config(num_experts=EXPERTS, recv_capacity=ROWS - 8)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(seed)
    ids = rng.integers(-2, EXPERTS, (STEPS, mesh.size * 8, 3), np.int32)
    return mesh, ep, ids


def step(mesh, ep, tokens=None, load=None, check_vma=True, **options):
    """A layer and update, with tokens and load over these axes; default: all."""
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


def all_to_rank_0(mesh, ep, axes):
    """Of every EP group, with tokens over `axes`: what `step` takes besides a load."""
    rows = 8 * math.prod(mesh.shape[axis] for axis in axes)
    ids = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3) % ep.local_experts
    return placed(mesh, axes, np.zeros((rows, 16), jnp.bfloat16), ids)


def check_numbers(kind, sizes=None):
    """Also in a job of several processes, each of which calls this."""
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
        lines = text.splitlines()
        assert lines[0].endswith(f"@ = {rows.sum(0).max():,}")
        for rank, line in enumerate(lines[1:-1]):
            own = f"| {rows.sum((0, 2))[rank]:,}, {lost[rank]:,} dropped, "
            assert line.startswith(f"rank {rank} "), line
            assert own in line, line
        assert lines[-1].endswith(f"fullest rank {numbers.fullest:,} rows a step")


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
    sums = rows, dropped, np.array([2, 2]), 3 * ones, 2 * ones, ones, invalid
    return stats.Load(*sums, np.array([-1, -1]))


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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_numbers_without_implicit_transfers(kind):
    check_numbers(kind)


@pytest.mark.parametrize("axes", [("dp", "ep"), ("ep", "dp")])
def test_ranks_are_the_mesh_s_however_they_were_stacked(axes):
    mesh, ep, _ = make()
    operands = all_to_rank_0(mesh, ep, axes)
    inside, aux = step(mesh, ep, axes)(stats.init(ep, axes), *operands)
    update = jax.jit(stats.update)
    loads = [inside, *(update(stats.init(ep, a), aux) for a in (None, axes))]
    for load in loads:
        each = stats.summary(load).rows.sum(1).tolist()
        assert each == [2 * ROWS, 0, 2 * ROWS, 0]
        lines = stats.heat_map(load).splitlines()[1:-1]
        assert [line.split("|")[1] == "    " for line in lines] == [False, True] * 2


def test_steps_stacked_in_different_orders_are_refused():
    mesh, ep, _ = make()
    load = stats.init(ep)
    for axes in (("dp", "ep"), ("ep", "dp"), ("dp", "ep")):
        _, aux = step(mesh, ep, axes)(
            stats.init(ep, axes), *all_to_rank_0(mesh, ep, axes)
        )
        load = jax.jit(stats.update)(load, aux)
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.summary: load must be .* at \[1, 2\]; make"
    ):
        stats.summary(load)


def test_explicit_axes_in_another_order_are_refused():
    mesh, ep, _ = make(kind=AxisType.Explicit)
    axes = "ep", "dp"
    operands = all_to_rank_0(mesh, ep, axes)
    load, aux = step(mesh, ep, axes)(stats.init(ep, axes), *operands)
    load = jax.jit(stats.update)(load, aux)
    assert stats.summary(load).rows.sum(1).tolist() == [4 * ROWS, 0, 4 * ROWS, 0]
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.update: load must lie .*'dp'"
    ):
        jax.jit(stats.update)(stats.init(ep), aux)


def test_rows_that_would_count_once_for_each_tensor_parallel_rank():
    mesh, ep, _ = make(sizes={"ep": 2, "tp": 2})
    operands = all_to_rank_0(mesh, ep, ("ep",))
    load, _ = step(mesh, ep, ("ep",))(stats.init(ep, "ep"), *operands)
    assert stats.summary(load).rows.sum(1).tolist() == [2 * ROWS, 0]
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.update: load must be .*\['tp'\].*spec"
    ):
        step(mesh, ep, ("ep",), ("ep", "tp"))(stats.init(ep), *operands)
    # Without check_vma a trace cannot know.
    run = step(mesh, ep, ("ep",), ("ep", "tp"), check_vma=False, tp_axis="tp")
    load, _ = run(stats.init(ep), *operands)
    with pytest.raises(
        ValueError, match=r"^jax_ep\.stats\.heat_map: load must count .*\[0, 0, 1, 1\]"
    ):
        stats.heat_map(load)


def some_aux(ranks, experts):
    shares = [jnp.zeros(())] * 2
    return jax_ep.MoEAux(*shares, *[jnp.zeros(experts)] * 2, *[jnp.zeros(ranks)] * 2)


@pytest.mark.parametrize(
    ("ranks", "experts"),
    [(6, 6), (4, 8), (1, 4), (2, 8), (8, 32)],
    ids=["both", "experts", "one rank", "fewer ranks", "more ranks"],
)
def test_aux_of_another_layer_is_refused(ranks, experts):
    _, ep, _ = make()
    with pytest.raises(
        ValueError, match=rf"^jax_ep\.stats\.update: aux must be .*got {ranks} ranks"
    ):
        stats.update(stats.init(ep), some_aux(ranks, experts))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda load: stats.update(load, 3), "update: aux must be .*got int; "),
        (lambda load: stats.update(None, 3), "update: load must be .*got NoneType; "),
        (lambda _: stats.summary(None), "summary: load must be .*got NoneType; "),
        (lambda _: stats.heat_map({}), "heat_map: load must be .*got dict; "),
        (lambda _: stats.init(None), "init: ep must be .*got NoneType; "),
    ],
)
def test_what_is_of_another_kind_is_refused(call, words):
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    with pytest.raises(TypeError, match=rf"^jax_ep\.stats\.{words}"):
        call(load)


def test_a_stack_of_layers():
    """As a scan reports it: update maps over it, and what takes one says so."""
    _, ep, _ = make()
    load, aux = stats.init(ep), some_aux(4, 16)
    loads, auxs = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (load, aux))
    found = jax.jit(jax.vmap(stats.update))(loads, auxs)
    assert stats.summary(jax.tree.map(lambda leaf: leaf[2], found)).steps == 1
    words = r": (load|aux) must be of one layer, got a stack of shape \(3,\); "
    for call, *given in (
        (stats.update, loads, aux),
        (stats.update, load, auxs),
        (stats.heat_map, found),
    ):
        with pytest.raises(ValueError, match=call.__name__ + words):
            call(*given)


def test_no_numbers_inside_of_jit():
    load = stats.init(helpers.make_ep(helpers.make_mesh(1), helpers.make_config()))
    with pytest.raises(ValueError, match=r"^jax_ep\.stats\.summary: load must hold"):
        jax.jit(lambda load: stats.summary(load).steps)(load)


def test_axes_of_a_load():
    _, ep, _ = make()
    assert stats.init(ep, "ep").steps.shape == (2,)


@pytest.mark.parametrize(
    ("axes", "kind"),
    [
        (("ep", "tp"), ValueError),
        (("ep", "ep"), ValueError),
        ("dp", ValueError),
        ((), ValueError),
        (5, TypeError),
        (("ep", None), TypeError),
    ],
)
def test_what_are_no_axes_of_a_load(axes, kind):
    _, ep, _ = make()
    must = f"jax_ep.stats.init: axis_names must be axes .*got {axes!r}; leave"
    with pytest.raises(kind, match="^" + re.escape(must).replace(r"\.\*", ".*")):
        stats.init(ep, axes)
