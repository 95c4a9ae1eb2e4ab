"""jax_ep.flax's layers with copies of experts compute the same as without."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import placement as placements
from support import helpers, moe_dense
from support.errors import check_form, raises

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import dense_grads, fields, inputs, nnx_layer, parts, wave

pytestmark = pytest.mark.usefixtures("quick_compiles")

EXPERTS = moe_dense.EXPERTS
HOT = 3


def skewed(**options):
    params = moe_dense.params(bias=True, **options)
    params["router_bias"][HOT] += 1
    return params


def balanced(slots, ranks, seed=0):
    load = np.random.default_rng(seed).random(EXPERTS)
    load[HOT] = 9
    return placements.balance(load, slots, ep_size=ranks)


def loss(y, aux):
    return wave(y) + 3 * aux.balance_loss + aux.z_loss


def nnx_grads(mesh, params, x, placement, **changes):
    """(y, aux) and gradients by name, with those of x."""
    layer = nnx_layer(mesh, params, **changes)

    def run(layer, x, placement):
        y, aux = layer(x, placement=placement, return_aux=True)
        return loss(y, aux), (y, aux)

    grad = nnx.grad(run, argnums=(nnx.DiffState(0, nnx.Param), 1), has_aux=True)
    (grads, to_x), found = nnx.jit(grad)(layer, x, placement)
    for name, value in grads.items():
        assert parts(value[...]) == parts(getattr(layer, name)[...])
    return found, {name: grads[name][...] for name in grads} | {"x": to_x}


def linen_grads(mesh, params, x, placement, **changes):
    layer = jax_ep.flax.linen.MoE(**fields(mesh, router_bias=True, **changes))
    names = {"router_kernel": "router"}
    made = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    values = {name: params[names.get(name, name)] for name in made}
    state = {"router_state": {"bias": params["router_bias"]}}

    def run(values, x, placement):
        variables = {"params": values, **state}
        y, aux = layer.apply(variables, x, placement=placement, return_aux=True)
        return loss(y, aux), (y, aux)

    grad = jax.jit(jax.grad(run, (0, 1), has_aux=True))
    (grads, to_x), found = grad(values, x, placement)
    return found, {names.get(name, name): grads[name] for name in grads} | {"x": to_x}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "sizes", "axes"),
    [
        ("nnx", {"dp": 2, "ep": 4}, AxisType.Explicit),
        ("nnx", {"fsdp": 2, "ep": 2, "tp": 2}, AxisType.Auto),
        ("linen", {"fsdp": 2, "ep": 4}, AxisType.Auto),
    ],
    ids=str,
)
def test_a_layer_with_copies_is_the_layer_without(kind, sizes, axes):
    """Result, losses, loads, counts and every gradient; biases move, too."""
    mesh = helpers.make_mesh(sizes, kind=axes)
    ranks = mesh.shape["ep"]
    slots = EXPERTS + 2 * ranks
    params = skewed(expert_bias=True)
    x = inputs()
    run = {"nnx": nnx_grads, "linen": linen_grads}[kind]
    fsdp = "fsdp" if "fsdp" in sizes else None
    changes = {"fsdp_axis_name": fsdp, "expert_bias": True}
    placed = balanced(slots, ranks)
    assert np.diff(placed.offsets)[HOT] > 1
    with jax.set_mesh(mesh):
        (want, before), wanted = run(mesh, params, x, None, **changes)
        (got, after), grads = run(mesh, params, x, placed, num_slots=slots, **changes)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(after.load, before.load)
    np.testing.assert_allclose(after.balance_loss, before.balance_loss, rtol=1e-6)
    assert grads.keys() == wanted.keys()
    for name, value in wanted.items():
        limit = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(grads[name], value, atol=limit, err_msg=name)
    groups = after.expert_counts.size // slots
    by_place, by_expert = (
        np.asarray(aux.expert_counts).reshape(groups, -1).sum(0)
        for aux in (after, before)
    )
    np.testing.assert_array_equal(placed.to_logical(by_place), by_expert)
    assert by_place.max() < by_expert.max()
    # The dense formula has no copies at all.
    (dense, _), _ = dense_grads(params, x, jax_ep.router.Router())
    np.testing.assert_allclose(got, dense, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_another_placement_compiles_nothing(kind):
    """The loads of one step place the experts of the next without compiling."""
    mesh = helpers.make_mesh({"ep": 4})
    slots, x, traced = EXPERTS + 4, inputs(), []
    if kind == "nnx":
        layer = jax_ep.flax.MoE(**fields(mesh, num_slots=slots), rngs=nnx.Rngs(0))
        definition, state = nnx.split(layer)
        ep = layer.ep

        def apply(state, placed):
            return nnx.merge(definition, state)(x, placement=placed, return_aux=True)
    else:
        module = jax_ep.flax.linen.MoE(**fields(mesh, num_slots=slots))
        state = nn.unbox(jax.jit(module.init)(jax.random.key(0), x))
        ep = jax_ep.flax.MoE(**fields(mesh, num_slots=slots), rngs=nnx.Rngs(0)).ep

        def apply(state, placed):
            return module.apply(state, x, placement=placed, return_aux=True)

    @jax.jit
    def step(state, load, placed):
        traced.append(1)
        y, aux = apply(state, placed)
        return y, jax_ep.stats.update(load, aux)

    placed = placements.balance(np.ones(EXPERTS), slots, ep_size=4)
    empty = jax_ep.stats.init(ep)
    results, seen, used = [], [], []
    for _ in range(3):
        used.append(np.asarray(placed.expert_of).tolist())
        y, load = step(state, empty, placed)
        results.append(y)
        seen.append(jax_ep.stats.summary(load, placement=placed))
        placed = placements.balance(seen[-1].expert_rows, slots, ep_size=4)
    assert used[0] != used[1]
    assert len(traced) == step._cache_size() == 1
    for y, summary in zip(results[1:], seen[1:], strict=True):
        np.testing.assert_allclose(y, results[0], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(summary.expert_rows, seen[0].expert_rows)


def test_experts_that_the_ranks_do_not_divide():
    """Without a placement, experts are spread evenly over the places."""
    x = inputs()
    sizes = {"num_experts": 10, "shared_intermediate_size": None}
    plain = jax_ep.flax.MoE(
        **fields(helpers.make_mesh({"ep": 2}), **sizes), rngs=nnx.Rngs(0)
    )
    told = fields(helpers.make_mesh({"ep": 4}), num_slots=12, **sizes)
    with raises() as caught:
        jax_ep.flax.MoE(**told | {"num_slots": None}, rngs=nnx.Rngs(0))
    assert "num_experts must be a multiple" in str(caught.value)
    layer = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0))
    assert layer.gate_up.shape == (10, 16, 2, 8)
    np.testing.assert_allclose(layer(x), plain(x), rtol=0, atol=1e-5)
    placed = placements.balance(np.arange(10) ** 2, 12, ep_size=4)
    y = layer(x, placement=placed)
    np.testing.assert_allclose(y, plain(x), rtol=0, atol=1e-5)


def test_stages_of_a_pipeline_have_placements_of_their_own():
    mesh = helpers.make_mesh({"stage": 2, "ep": 2})
    told = fields(mesh, spec=P("ep"), shared_intermediate_size=None)
    make = functools.partial(jax_ep.flax.MoE, **told)
    layer = make(num_slots=EXPERTS + 2, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), state)
    loads = np.random.default_rng(0).pareto(1, (2, EXPERTS))
    placed = placements.balance(loads, EXPERTS + 2, ep_size=2)
    x = np.stack([inputs(), inputs(1)])

    def run(state, x, placed):
        return nnx.merge(definition, state)(x, placement=placed)

    y = jax.jit(jax.vmap(run, spmd_axis_name="stage"))(states, x, placed)
    plain, _ = nnx.split(make(rngs=nnx.Rngs(0)))
    for stage in range(2):
        own = jax.tree.map(lambda leaf, i=stage: leaf[i], states)
        want = nnx.merge(plain, own)(x[stage])
        np.testing.assert_allclose(y[stage], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_slots": 15}, "num_slots must be at least num_experts, 16, got 15"),
        ({"num_slots": 18}, "num_slots must be a multiple of 4"),
        ({"num_slots": True}, "num_slots must be a positive int, got True"),
        ({"num_slots": np.int64(20)}, "got np.int64(20); convert it with int()"),
        ({"num_slots": 20, "top_k": 17}, "top_k must be at most num_experts, 16"),
        ({"num_slots": 20, "num_experts": 0}, "num_experts must be a positive int"),
    ],
)
def test_places_that_no_layer_has(changes, words):
    told = fields(helpers.make_mesh({"ep": 4}), **changes)
    for make, where in (
        (lambda: jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0)), "flax.MoE"),
        (
            lambda: jax_ep.flax.linen.MoE(**told).init(jax.random.key(0), inputs()),
            "flax.linen.MoE",
        ),
    ):
        with raises() as caught:
            make()
        check_form(caught, where, words)


def test_a_wrong_placement_is_refused():
    layer = jax_ep.flax.MoE(
        **fields(helpers.make_mesh({"ep": 4}), num_slots=20), rngs=nnx.Rngs(0)
    )
    stack = placements.balance(np.ones((2, EXPERTS)), 20, ep_size=4)
    for placed, words in (
        (3, "placement must be a jax_ep.placement.Placement"),
        (stack, "of one layer, with its 20 places (num_slots) and 16 experts"),
        (placements.identity(20), "places of shape (20,) and 20 experts"),
        (placements.identity(EXPERTS), "places of shape (16,) and 16 experts"),
    ):
        with raises() as caught:
            layer(inputs(), placement=placed)
        check_form(caught, "flax.MoE", words)
