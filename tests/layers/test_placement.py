"""jax_ep.placement: evens out ranks without changing what layers compute."""

from __future__ import annotations

import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import placement as placements
from jax_ep._placement import moving, packing
from support import helpers, moe_dense
from support.moe_ffn import N, config, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")

# (experts, places, ranks), with few enough ways to try all.
TINY = [
    (1, 4, 4),
    (3, 4, 2),
    (3, 6, 3),
    (3, 8, 2),
    (4, 4, 2),
    (4, 6, 3),
    (4, 8, 4),
    (5, 6, 2),
    (6, 6, 3),
    (6, 8, 2),
]


def rank_loads(load, placed, ranks):
    """Loads by the definition: copies take equal parts of their expert's load."""
    expert_of = np.asarray(placed.expert_of)
    copies = np.bincount(expert_of, minlength=len(load))
    return (np.asarray(load, float) / copies)[expert_of].reshape(ranks, -1).sum(1)


def best(load, slots, ranks):
    """The least load of the fullest rank, over all ways to fill the places."""
    experts, own = len(load), slots // ranks
    kinds = itertools.combinations_with_replacement(range(experts), own)
    held = np.array([np.bincount(kind, minlength=experts) for kind in kinds])
    choices = itertools.combinations_with_replacement(range(len(held)), ranks)
    counts = held[np.array(list(choices))]
    copies = counts.sum(1)
    whole = (copies > 0).all(1)
    share = load / copies[whole]
    return (counts[whole] * share[:, None]).sum(2).max(1).min()


def draw(rng, kind, experts):
    if kind == "even":
        return rng.random(experts) + 0.1
    if kind == "skewed":
        return rng.pareto(1, experts)
    return rng.integers(0, 4, experts) + (np.arange(experts) == 0)  # ties and zeros


def check_shape(placed, experts, slots):
    """The three arrays agree."""
    assert placed.num_experts == experts
    assert placed.num_slots == slots
    for array, size in ((placed.expert_of, slots), (placed.places, slots)):
        assert array.dtype == np.int32
        assert array.shape == (size,)
    copies = np.bincount(placed.expert_of, minlength=experts)
    assert copies.min() >= 1
    np.testing.assert_array_equal(np.diff(placed.offsets), copies)
    assert placed.offsets[0] == 0
    np.testing.assert_array_equal(
        placed.expert_of[placed.places], np.repeat(np.arange(experts), copies)
    )
    assert sorted(placed.places) == list(range(slots))


@pytest.mark.parametrize("kind", ["even", "skewed", "ties"])
@pytest.mark.parametrize(("experts", "slots", "ranks"), TINY)
def test_near_the_best_of_all(experts, slots, ranks, kind):
    """Within a quarter of the best, mostly much closer; exact without copies."""
    rng = np.random.default_rng(experts * slots)
    ratios = []
    for _ in range(8):
        load = draw(rng, kind, experts)
        placed = placements.balance(load, slots, ep_size=ranks)
        check_shape(placed, experts, slots)
        ratios.append(rank_loads(load, placed, ranks).max() / best(load, slots, ranks))
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) <= (1 + 1e-9 if slots == experts else 1.25)
    assert np.mean(ratios) < 1.1


@pytest.mark.parametrize("per_node", [None, 2])
def test_never_fuller_than_in_order(per_node):
    """Not even with copies that swaps cannot even out."""
    rng = np.random.default_rng(0)
    for trial in range(60):
        ranks = int(rng.choice([2, 4, 8]))
        experts = ranks * int(rng.integers(1, 6))
        slots = experts + ranks * int(rng.integers(0, 5))
        load = draw(rng, ("even", "skewed", "ties")[trial % 3], experts)
        placed = placements.balance(load, slots, ep_size=ranks, ranks_per_node=per_node)
        check_shape(placed, experts, slots)
        plain = rank_loads(load, placements.identity(experts), ranks).max()
        fullest = rank_loads(load, placed, ranks).max()
        assert fullest <= plain * (1 + 1e-9)
        if fullest < plain * (1 - 1e-9):
            # No rank has two copies of an expert that could be elsewhere.
            copies = np.diff(placed.offsets)
            for own in placed.expert_of.reshape(ranks, -1):
                held = np.bincount(own, minlength=experts)
                assert (held <= -(-copies // ranks)).all()


@pytest.mark.parametrize(
    "load", [[13, 15, 21, 7], [28, 16, 11, 33], [12, 10, 26, 8, 7, 21, 19, 9]]
)
def test_copies_that_would_make_it_worse(load):
    """Ranks are even, but would not be with any two experts on both ranks."""
    experts = len(load)
    placed = placements.balance(load, experts + 2, ep_size=2)
    assert rank_loads(load, placed, 2).tolist() == [sum(load) / 2] * 2


def test_spare_places_go_to_hot_experts_on_other_ranks():
    load = np.ones(32)
    load[[3, 5]] = 40, 20
    placed = placements.balance(load, 40, ep_size=8)
    copies = np.diff(placed.offsets)
    assert copies[3] > copies[5] > 1
    assert set(copies[np.arange(32) % 32 > 5]) == {1}
    for own in placed.expert_of.reshape(8, 5):
        assert len(set(own)) == 5
    assert rank_loads(load, placed, 8).max() < 1.1 * load.sum() / 8
    assert rank_loads(load, placements.identity(32), 8).max() > 3.5 * load.sum() / 8


def test_any_copies_fit():
    """At most one copy per rank, also if the last ones find no room at first."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        ranks, own = int(rng.integers(2, 6)), int(rng.integers(2, 5))
        copies = np.ones(int(rng.integers(own, own * ranks + 1)), int)
        while copies.sum() < own * ranks:
            copies[rng.choice(np.flatnonzero(copies < ranks))] += 1
        load = rng.integers(0, 9, len(copies))
        shape = packing.Shape(own * ranks, ranks, ranks)
        expert_of, _ = packing._packed(load, copies, shape)
        np.testing.assert_array_equal(np.bincount(expert_of), copies)
        assert all(len(set(rank)) == own for rank in expert_of.reshape(ranks, own))


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(1, 8, 4), (3, 24, 4)])
def test_more_copies_than_ranks(experts, slots, ranks):
    """Every rank gets equally many copies of each expert, so that all are even."""
    load = np.arange(1.0, experts + 1)
    placed = placements.balance(load, slots, ep_size=ranks)
    check_shape(placed, experts, slots)
    np.testing.assert_allclose(rank_loads(load, placed, ranks), load.sum() / ranks)


def test_without_any_load_all_are_equal():
    placed = placements.balance(np.zeros(6, int), 8, ep_size=4)
    assert np.diff(placed.offsets).max() == 2
    same = placements.balance(np.full(6, 1e308), 8, ep_size=4)
    np.testing.assert_array_equal(placed.expert_of, same.expert_of)


def test_nodes_come_first():
    """Copies are on different nodes, and nodes are as even as ranks."""
    load = np.ones(16)
    load[0] = 8
    placed = placements.balance(load, 24, ep_size=8, ranks_per_node=4)
    where = placed.places[placed.offsets[0] : placed.offsets[1]] // 12
    assert abs(np.diff(np.bincount(where, minlength=2))[0]) <= 1
    loads = rank_loads(load, placed, 8).reshape(2, 4)
    assert loads.sum(1).max() < 1.02 * load.sum() / 2
    assert loads.max() < 1.1 * load.sum() / 8


def test_a_stack_of_layers_and_its_time():
    loads = np.random.default_rng(0).pareto(1.2, (61, 256))
    began = time.perf_counter()
    placed = placements.balance(loads, 288, ep_size=32, ranks_per_node=8)
    assert time.perf_counter() - began < 20  # some 0.5 s
    assert placed.offsets.shape == (61, 257)
    one = placements.balance(jnp.asarray(loads[7]), 288, ep_size=32, ranks_per_node=8)
    own = jax.tree.map(lambda leaf: leaf[7], placed)
    check_shape(own, 256, 288)
    np.testing.assert_array_equal(one.expert_of, own.expert_of)
    for load, expert_of in zip(loads, placed.expert_of, strict=True):
        layer = placements._placement(expert_of)
        found = rank_loads(load, layer, 32)
        assert found.max() < 1.02 * found.mean()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"num_slots": 7},
            r"num_slots must be a multiple of ep_size, 2, .*got 7; 6 is",
        ),
        ({"num_slots": 4}, r"at least the number of experts, 6, got 4; 6 is the least"),
        ({"num_slots": 8.0}, "num_slots must be a positive int, got 8.0; "),
        ({"num_slots": 2**40}, "num_slots must be at most 2048, .*; use fewer copies"),
        ({"ep_size": 0}, "ep_size must be a positive int, got 0; "),
        ({"ranks_per_node": 3}, "ranks_per_node must divide ep_size, 2, got 3; leave"),
        ({"load": [1, -2.0]}, r"finite and not negative, got \[-2.0\] among them; "),
        ({"load": [1, np.nan]}, r"finite and not negative, got \[nan\] among them; "),
        ({"load": 3.0}, r"load must be an array of numbers .*, got \(\); pass jax_ep"),
        ({"load": object()}, "load must be an array .*, got object; pass jax_ep.stats"),
        ({"load": []}, r"load must be an array .*, got \(0,\); "),
    ],
)
def test_wrong_arguments_of_balance(change, words):
    arguments = {"load": np.ones(6), "num_slots": 8, "ep_size": 2} | change
    kind = TypeError if "got object" in words else ValueError
    with pytest.raises(kind, match=f"^jax_ep.placement.balance: .*{words}"):
        placements.balance(**arguments)


def test_a_traced_load_is_refused():
    def balance(load):
        return placements.balance(load, 4, ep_size=2)

    with pytest.raises(ValueError, match="load must have values, but is traced; "):
        jax.jit(balance)(jnp.ones(4))
    with pytest.raises(ValueError, match=r"^jax_ep\.placement\.identity: num_"):
        placements.identity(-1)


def some(slots=12, experts=8, ranks=4, seed=0):
    load = np.random.default_rng(seed).pareto(1, experts)
    return placements.balance(load, slots, ep_size=ranks)


def test_assign():
    """Copy (token + offset) mod copies; what is invalid stays invalid."""
    placed = some()
    ids = np.random.default_rng(1).integers(0, 8, (2, 9, 3), np.int32)
    ids[0, :4, 0] = -1, -2, helpers.INT_MIN, -1
    ids[1, 5:, 1] = 8, 11, 12, helpers.INT_MAX
    assign = jax.jit(jax.vmap(type(placed).assign, in_axes=(None, 0, 0)))
    found = np.asarray(assign(placed, ids, np.array([3, 0])))
    for batch, token, k in np.ndindex(ids.shape):
        e, got = ids[batch, token, k], found[batch, token, k]
        if e < 0:
            assert got == e
        elif e >= 8:
            assert not 0 <= got < 12
        else:
            own = placed.places[placed.offsets[e] : placed.offsets[e + 1]]
            assert got == own[(token + (3, 0)[batch]) % len(own)]
            assert placed.expert_of[got] == e
    # With more dimensions, the leading ones are flattened to tokens.
    flat = placed.assign(ids.reshape(-1, 3), 5)
    np.testing.assert_array_equal(placed.assign(ids, 5).reshape(-1, 3), flat)
    wrong = ids.astype(np.int16)
    with pytest.raises(TypeError, match=r"^jax_ep.placement.assign: topk_ids must be"):
        placed.assign(wrong)
    with pytest.raises(ValueError, match=r"offset must be one integer, got float32"):
        placed.assign(ids, jnp.ones(2))
    stack = jax.tree.map(lambda leaf: np.stack([leaf] * 3), placed)
    with pytest.raises(ValueError, match=r"one layer, got a stack \(3,\); take one"):
        stack.assign(ids)


def test_decode_spreads_over_copies():
    """One token per rank, all for one expert: copies get equally many."""
    placed = placements.balance(np.eye(8)[2] + 1e-3, 16, ep_size=8)
    copies = np.diff(placed.offsets)[2]
    assert copies == 8
    ids = np.full((1, 1), 2, np.int32)
    got = [int(placed.assign(ids, rank)[0, 0]) for rank in range(8)]
    assert len(set(got)) == 8


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("chunk", [2**28, 256])
def test_weights_keep_their_sharding(kind, chunk, monkeypatch):
    """Inside and outside of jit, whole and in chunks, also if nothing divides."""
    monkeypatch.setattr(moving, "_CHUNK_BYTES", chunk)
    moving._moved.clear_cache()
    mesh = helpers.make_mesh({"ep": 4, "tp": 2}, kind=kind)
    old, new = some(), some(16, seed=5)
    whole = {"a": (8, 4, 6), "b": (8, 10), "c": (8,)}
    specs = {"a": P("ep", None, "tp"), "b": P("ep"), "c": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    rng = np.random.default_rng(0)
    logical = {name: rng.standard_normal(shape) for name, shape in whole.items()}
    logical = {name: each.astype(np.float32) for name, each in logical.items()}
    params = jax.device_put(logical, shardings)

    def check(found, placed):
        for name, array in found.items():
            np.testing.assert_array_equal(array, logical[name][placed.expert_of])
            want = shardings[name]
            assert array.sharding.is_equivalent_to(want, array.ndim), name

    with jax.set_mesh(mesh):
        gathered = old.gather(params)
        check(gathered, old)
        run = jax.jit(lambda placed, p: placed.gather(p, sharding=shardings))
        check(run(old, params), old)
        again = jax.jit(lambda new, old, p: new.reshard(p, old, sharding=shardings))
        check(again(new, old, gathered), new)
        check(new.reshard(gathered, old), new)
        by_expert = placements.identity(8).reshard(gathered, old)
    for name, array in by_expert.items():
        np.testing.assert_array_equal(array, logical[name])
    moving._moved.clear_cache()


def test_experts_that_do_not_divide():
    """6 experts on 4 ranks: replicated by expert, split by place."""
    mesh = helpers.make_mesh({"ep": 4})
    placed = placements.balance(np.ones(6), 8, ep_size=4)
    array = np.arange(12.0, dtype=np.float32).reshape(6, 2)
    split = NamedSharding(mesh, P("ep"))
    found = placed.gather(array, sharding=split)
    assert found.sharding.is_equivalent_to(split, 2)
    np.testing.assert_array_equal(found, array[placed.expert_of])
    back = placements.identity(6).reshard(found, placed)
    np.testing.assert_array_equal(back, array)


def test_gradients_of_copies_are_summed():
    mesh = helpers.make_mesh({"ep": 4})
    split = NamedSharding(mesh, P("ep"))
    placed = some()
    w = jax.device_put(np.ones((8, 3), np.float32), split)
    factors = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)

    def loss(w, placed):
        return jnp.sum(factors * placed.gather(w, sharding=split))

    found = jax.jit(jax.grad(loss))(w, placed)
    want = np.zeros((8, 3), np.float32)
    np.add.at(want, placed.expert_of, factors)
    np.testing.assert_allclose(found, want, rtol=1e-6)


def test_gradients_of_many_copies_are_rounded_once():
    """Whether a rank holds several copies or one; without a scatter."""
    placed = placements.balance(np.array([97.0, 1.0, 1.0, 1.0]), 12, ep_size=2)
    copies = np.bincount(placed.expert_of, minlength=4)
    assert copies.max() > 2
    # A sum of bfloat16 would stay at 256.
    first = np.unique(placed.expert_of, return_index=True)[1]
    factors = np.ones((12, 3), np.float32)
    factors[first] = 256
    want = np.broadcast_to(255 + copies[:, None], (4, 3))
    w = jnp.ones((4, 3), jnp.bfloat16)

    def loss(w, power=1):
        rows = placed.gather(w).astype(jnp.float32)
        return jnp.sum(factors * rows**power)

    found = jax.jit(jax.grad(loss))(w)
    np.testing.assert_array_equal(found, jnp.asarray(want, jnp.bfloat16))
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss))(w))

    def of_gradient(w):
        return jnp.sum(jax.grad(loss)(w, 3))

    again = jax.grad(of_gradient)(w.astype(jnp.float32))
    np.testing.assert_allclose(again, 6 * want, rtol=1e-6)
    several = jax.vmap(jax.grad(loss))(jnp.stack([w, 2 * w]))
    np.testing.assert_array_equal(several, jnp.stack([found, found]))


def test_a_new_placement_compiles_nothing():
    mesh = helpers.make_mesh({"ep": 4})
    w = jax.device_put(np.ones((8, 3)), NamedSharding(mesh, P("ep")))
    traces = []

    @jax.jit
    def run(placed, ids):
        traces.append(1)
        return placed.assign(ids)

    for seed in range(3):
        placed = some(seed=seed)
        run(placed, np.zeros((2, 2), np.int32))
        placed.gather(w)
        if seed == 0:
            before = moving._moved._cache_size()
    assert len(traces) == 1
    assert moving._moved._cache_size() == before


def test_counts_by_expert():
    placed = some()
    counts = np.random.default_rng(0).integers(0, 2**40, (5, 12))
    want = np.zeros((5, 8), np.int64)
    for place, e in enumerate(placed.expert_of):
        want[:, e] += counts[:, place]
    found = placed.to_logical(counts)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, want)
    small = (counts % 1000).astype(np.int32)
    traced = jax.jit(lambda p, c: p.to_logical(c))(placed, small)
    np.testing.assert_array_equal(traced, placed.to_logical(small))
    assert traced.dtype == np.int32
    with pytest.raises(
        ValueError, match=r"end with the dimensions \(12,\), .*\(5, 11\)"
    ):
        placed.to_logical(counts[:, :11])


def test_stacks_of_layers():
    """Each layer's weights, loads and counts follow its own placement."""
    loads = np.random.default_rng(0).pareto(1, (3, 8))
    placed = placements.balance(loads, 12, ep_size=4)
    mesh = helpers.make_mesh({"ep": 4})
    split = NamedSharding(mesh, P(None, "ep"))
    w = np.random.default_rng(1).standard_normal((3, 8, 5)).astype(np.float32)
    found = placed.gather(jax.device_put(w, split))
    assert found.sharding.is_equivalent_to(split, 3)
    moved = jax.tree.map(lambda leaf: leaf[::-1], placed).reshard(found, placed)
    counts = np.arange(2 * 3 * 12).reshape(2, 3, 12)
    sums, traced = placed.to_logical(counts), placed.to_logical(jnp.asarray(counts))
    np.testing.assert_array_equal(sums, traced)
    for layer in range(3):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], placed)
        np.testing.assert_array_equal(found[layer], w[layer][one.expert_of])
        other = placed.expert_of[2 - layer]
        np.testing.assert_array_equal(moved[layer], w[layer][other])
        np.testing.assert_array_equal(sums[:, layer], one.to_logical(counts[:, layer]))


def test_weights_that_do_not_fit():
    placed = some()
    for call, words in (
        (
            lambda: placed.gather({"w": np.ones((7, 2))}),
            r"gather: each array must begin with .* \(8,\), got params\['w'",
        ),
        (lambda: placed.gather(np.ones(8), sharding=P("ep")), "gather: sharding must"),
        (
            lambda: placed.reshard(np.ones(12), some(12, 6)),
            r"reshard: before must have the layers .* \(8,\), got \(6,\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"^jax_ep.placement.{words}"):
            call()
    with pytest.raises(TypeError, match=r"^jax_ep\.placement\.reshard: before"):
        placed.reshard(np.ones(12), None)


def moe(mesh, placed, **options):
    """moe_ffn on global arrays with weights by expert; a function of (params, x)."""
    slots = placed.num_slots if placed else moe_dense.EXPERTS
    ep = helpers.make_ep(mesh, config(num_experts=slots))
    tokens = P(mesh.axis_names)

    def run(placed, params, x):
        def body(placed, params, x):
            return jax_ep.moe_ffn(ep, x, params, placement=placed, **options)

        if placed is not None:
            names = ("gate_up", "down")
            split = NamedSharding(mesh, P("ep"))
            own = placed.gather({n: params[n] for n in names}, sharding=split)
            params = params | own
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P(), param_specs(params, None), tokens),
            out_specs=(tokens, jax_ep.MoEAux.specs(mesh.axis_names)),
        )(placed, params, x)

    return ep, run


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"dp": 2, "ep": 4}])
def test_a_layer_with_copies_is_the_layer_without(sizes):
    """Result, losses, loads and every gradient are equal, with a skewed router."""
    mesh = helpers.make_mesh(helpers.fit(sizes))
    params = moe_dense.params(bias=True)
    params["router_bias"][3] += 1  # hot
    x = np.random.default_rng(0).standard_normal((N * mesh.size, moe_dense.HIDDEN))
    x = x.astype(np.float32)

    def value(run):
        def loss(params, x, placed):
            y, aux = run(placed, params, x)
            total = jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[1])))
            return total + 3 * aux.balance_loss + aux.z_loss, (y, aux)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))

    _, plain = moe(mesh, None)
    (_, (want, before)), want_grads = value(plain)(params, x, None)
    ranks = mesh.shape["ep"]
    slots = moe_dense.EXPERTS + 2 * ranks
    placed = placements.balance(before.load, slots, ep_size=ranks)
    assert np.diff(placed.offsets)[3] > 1 or ranks == 1
    ep, run = moe(mesh, placed)
    (_, (got, after)), grads = value(run)(params, x, placed)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(after.load, before.load)
    np.testing.assert_allclose(after.balance_loss, before.balance_loss, rtol=1e-6)
    helpers_close = zip(
        jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True
    )
    for found, expected in helpers_close:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    groups = mesh.shape.get("dp", 1)
    by_place = np.asarray(after.expert_counts).reshape(groups, slots).sum(0)
    by_expert = np.asarray(before.expert_counts).reshape(groups, -1).sum(0)
    np.testing.assert_array_equal(placed.to_logical(by_place), by_expert)
    if ranks > 1:
        # Ranks may have been equally even before, by chance; the hottest place is not.
        assert by_place.max() < by_expert.max()
    # Invalid ids from a custom router are still reported.
    ids = jnp.full((N, moe_dense.TOP_K), 3, jnp.int32).at[1, 0].set(moe_dense.EXPERTS)
    zeros = jnp.zeros((N, moe_dense.EXPERTS))
    routing = jax_ep.router.Routing(ids, jnp.ones(ids.shape), zeros, zeros)
    with jax_ep.init(mesh, "ep", ep.config, transport=helpers.TRANSPORT) as own:

        def body(params, x):
            rest = {"routing": routing, "placement": placed}
            aux = jax_ep.moe_ffn(own, x, params, **rest)[1]
            return aux.num_invalid, aux.expert_counts

        bare = placed.gather({name: params[name] for name in ("gate_up", "down")})
        specs = (param_specs(bare, None), P(mesh.axis_names))
        run = jax.shard_map(
            body, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names)
        )
        invalid, counts = map(np.asarray, jax.jit(run)(bare, x))
        assert invalid.tolist() == [1] * mesh.size
        # Each rank starts with another copy.
        at = np.concatenate([placed.assign(ids, rank).ravel() for rank in range(ranks)])
        want = np.bincount(at[at < slots], minlength=slots)
        np.testing.assert_array_equal(counts.reshape(groups, slots), [want] * groups)
        with pytest.raises(jax_ep.InvalidIdError, match="token 1"):
            own.check()


def test_a_wrong_placement_is_refused():
    mesh = helpers.make_mesh(1)
    params = moe_dense.params()
    x = np.ones((N, moe_dense.HIDDEN), np.float32)
    stack = jax.tree.map(lambda leaf: np.stack([leaf] * 2), placements.identity(16))
    for placed, kind, words in (
        (placements.identity(15), ValueError, r"must have the 16 places .* \(15,\)"),
        (stack, ValueError, r"one layer, got places of shape \(2, 16\)"),
        (3, TypeError, "must be a jax_ep.placement.Placement, got 3"),
    ):
        ep = helpers.make_ep(mesh, config())

        def body(params, x, ep=ep, placed=placed):
            return jax_ep.moe_ffn(ep, x, params, placement=placed)[0]

        with pytest.raises(kind, match=f"^jax_ep.moe_ffn: placement .*{words}"):
            jax.shard_map(
                body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
            )(params, x)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dispatch_to_places(ranks):
    """Without a layer: ids become ids of places, and rows reach the right experts."""
    mesh = helpers.make_mesh(helpers.some_ranks(ranks))
    experts, slots = 4 * mesh.size, 6 * mesh.size
    load = np.random.default_rng(0).pareto(1, experts)
    placed = placements.balance(load, slots, ep_size=mesh.size)
    ep = helpers.make_ep(mesh, helpers.make_config(num_experts=slots))
    rng = np.random.default_rng(1)
    tokens = rng.standard_normal((8 * mesh.size, 16)).astype(jnp.bfloat16)
    ids = rng.integers(0, experts, (8 * mesh.size, 3), np.int32)

    def body(placed, tokens, ids):
        rank = jax.lax.axis_index("ep")
        d = jax_ep.dispatch(ep, tokens, placed.assign(ids, rank))
        own = jnp.asarray(placed.expert_of).reshape(ep.ep_size, -1)[rank]
        at = jnp.searchsorted(
            d.row_offsets[1:], jnp.arange(len(d.tokens)), side="right"
        )
        return d.tokens, d.src_info, own[jnp.minimum(at, len(own) - 1)]

    run = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P("ep"), P("ep")), out_specs=P("ep")
    )
    rows, src, expert = map(np.asarray, jax.jit(run)(placed, tokens, ids))
    real = src[:, 0] >= 0
    assert real.sum() == ids.size
    rank, token, k = src[real].T
    np.testing.assert_array_equal(expert[real], ids[rank * 8 + token, k])
    helpers.assert_bits(rows[real], tokens[rank * 8 + token])
