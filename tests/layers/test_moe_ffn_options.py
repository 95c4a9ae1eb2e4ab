"""jax_ep.moe_ffn: custom experts and the options of a config."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router, losses, route
from support import gpus, helpers, moe_dense
from support.errors import check_form, raises
from support.moe_ffn import N, config, expert_parallel, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_experts_of_ones_own():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, config())
    params = moe_dense.params(shared=False)
    x = np.random.default_rng(4).standard_normal((N * mesh.size, moe_dense.HIDDEN))
    operands = (params, x.astype(np.float32), np.ones(len(x), bool))
    names = []

    def experts(rows, gate_up, down, group_sizes):
        local = moe_dense.EXPERTS // mesh.size
        assert gate_up.shape == (local, moe_dense.HIDDEN, 2, moe_dense.INNER)
        assert down.shape == (local, moe_dense.INNER, moe_dense.HIDDEN)
        assert group_sizes.shape == (local,)
        names.append("called")
        return 3 * rows

    y, _ = jax.jit(expert_parallel(mesh, ep, params, Router(), experts=experts))(
        *operands
    )
    assert names
    # Weights sum to 1.
    np.testing.assert_allclose(y, 3 * operands[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "router", [Router(), Router(score="sigmoid", num_groups=4, top_groups=2)]
)
def test_router_of_scores_sharded_by_token(router) -> None:
    """Also if a program returns only the ids: see `router._best`."""
    ranks = helpers.some_ranks(2)
    logits = np.random.default_rng(5).standard_normal((8 * ranks, 16), np.float32)
    wanted = route(jnp.asarray(logits), 3, router)
    sharding = NamedSharding(helpers.make_mesh(ranks), P("ep"))
    sharded = jax.device_put(logits, sharding)

    def ids_of(logits):
        return route(logits, 3, router).ids

    assert len(np.unique(wanted.ids)) > 3
    for found in (ids_of(sharded), jax.jit(ids_of)(sharded)):
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, wanted.ids)
    # Without GPUs only the text can show it.
    assert "minimum" in jax.jit(ids_of).lower(sharded).as_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": np.ones(N - 1, bool)}, "mask must be [...] with ... = (8,)"),
        ({"mask": np.ones(N, np.float32)}, "mask must be bool, got float"),
        ({"batch_axes": ("dp",)}, "batch_axes must be a sequence of manual axes"),
        ({"batch_axes": "ep"}, "batch_axes must be a sequence of manual axes"),
        ({"batch_axes": 3}, "batch_axes must be a sequence of manual axes"),
        (
            {"residual": np.ones((1, 16), np.float32)},
            "residual must be [n, H] with n = 8",
        ),
        ({"residual": np.ones((N, 16), np.int32)}, "residual must be float32, got int"),
        ({"experts": 3}, "experts must be a function"),
        ({"experts": jax_ep.experts.Padded}, "experts must be a function"),
        (
            {"params": moe_dense.params() | {"router_bias": np.ones(3, np.float32)}},
            "router_bias must be [E]",
        ),
        (
            {
                "params": moe_dense.params()
                | {"router_logit_bias": np.ones((1, 16), np.float32)}
            },
            "router_logit_bias must be [E]",
        ),
        (
            {
                "params": moe_dense.params()
                | {"shared_down": np.ones((8, 16), np.float32)}
            },
            "shared_gate_up and shared_down must be [H, 2, S] and [S, H]",
        ),
        ({"router": "softmax"}, "router must be a jax_ep.router.Router"),
        ({"routing": 3}, "routing must be a jax_ep.router.Routing"),
        ({"params": None}, "params must be a mapping"),
        ({"tokens": "x"}, "tokens must be an array"),
    ],
)
def test_wrong_options(options, words):
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, config())
    x = np.ones((N, moe_dense.HIDDEN), np.float32)

    def layer(x):
        operands = {"tokens": x, "params": moe_dense.params(), **options}
        return jax_ep.moe_ffn(ep, **operands)[0]

    run = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with raises() as caught:
        jax.eval_shape(run, x)
    check_form(caught, "moe_ffn", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits": np.ones(())}, "logits must be [..., E]"),
        ({"top_k": 17}, "top_k must be an int from 1 to num_experts, 16"),
        ({"bias": np.ones(3)}, "bias must be [E] with E = 16"),
        ({"bias": np.ones((1, 16))}, "bias must be [E] with E = 16"),
        ({"mask": np.ones(3, bool)}, "mask must be [...] with ... = (4,)"),
        ({"mask": np.ones(4)}, "mask must be bool"),
    ],
)
def test_wrong_operands_of_a_router(changes, words):
    operands = {"logits": np.ones((4, 16), np.float32), "top_k": 2, **changes}
    with raises() as caught:
        route(**operands)
    check_form(caught, "router.route", words)


def test_groups_are_ints():
    with raises() as caught:
        Router(num_groups=2.0)
    check_form(caught, "router.Router", "must be an int", "2.0")


def test_a_routing_takes_no_mask():
    """A mask would be ignored, as the routing has already decided."""
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, config())
    x = np.ones((N, moe_dense.HIDDEN), np.float32)
    params = moe_dense.params()

    def layer(x, **options):
        routing = route(x @ params["router"], ep.config.top_k)
        return jax_ep.moe_ffn(ep, x, params, routing=routing, **options)[0]

    for options in ({"mask": np.ones(N, bool)}, {"router": Router()}):
        run = jax.shard_map(
            partial(layer, **options),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        with raises() as caught:
            jax.eval_shape(run, x)
        check_form(caught, "moe_ffn", "must be None with routing")


def test_outside_of_shard_map_names_a_layer_that_exists():
    ep = helpers.make_ep(helpers.make_mesh(1), config())
    x = np.ones((N, moe_dense.HIDDEN), np.float32)
    with raises() as caught:
        jax_ep.moe_ffn(ep, x, moe_dense.params())
    check_form(caught, "moe_ffn", "use jax_ep.flax.MoE on global arrays")


def test_a_fused_shared_expert_equals_one_beside():
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    params = moe_dense.params(shared=False)
    shared = np.random.default_rng(6).standard_normal((2, *params["down"].shape[1:]))
    params["shared_down"] = shared[0].astype(np.float32)
    params["shared_gate_up"] = np.moveaxis(shared, 2, 0).astype(np.float32) / 4
    x = np.random.default_rng(5).standard_normal((N * mesh.size, moe_dense.HIDDEN))
    mask = np.ones(len(x), bool)

    def run(transport, **changes):
        options = config(**changes)
        with jax_ep.init(mesh, "ep", options, transport=transport) as ep:
            layer = expert_parallel(mesh, ep, params, Router())

            def loss(params, x):
                y, aux = layer(params, x, mask)
                return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[1]))), aux

            grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
            return jax.jit(grad)(params, x.astype(np.float32))

    (fused, aux), fused_grads = run(helpers.TRANSPORT, fused_shared_expert=True)
    (beside, other), grads = run(helpers.TRANSPORT)
    np.testing.assert_allclose(fused, beside, rtol=1e-5)
    np.testing.assert_array_equal(aux.expert_counts, other.expert_counts)
    for got, want in zip(*map(jax.tree.leaves, (fused_grads, grads)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_a_residual_beside_tensor_parallel_experts():
    """The residual is added once, to the sum over the axis."""
    mesh = helpers.make_mesh(helpers.fit({"ep": 2, "tp": 2}))
    ep, params = helpers.make_ep(mesh, config()), moe_dense.params()
    count = N * mesh.shape["ep"]
    x = np.random.default_rng(8).standard_normal((count, moe_dense.HIDDEN))
    x, mask = x.astype(np.float32), np.ones(count, bool)
    plain, _ = jax.jit(expert_parallel(mesh, ep, params, Router()))(params, x, mask)

    def body(params, x):
        return jax_ep.moe_ffn(ep, x, params, residual=x, tp_axis="tp")[0]

    specs = param_specs(params, "tp")
    run = jax.shard_map(body, mesh=mesh, in_specs=(specs, P("ep")), out_specs=P("ep"))
    np.testing.assert_array_equal(jax.jit(run)(params, x), plain + x)


def test_axes_that_the_batch_is_split_over():
    """Losses over a single axis are those of each part of the batch."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    ep, params = helpers.make_ep(mesh, config()), moe_dense.params(shared=False)
    x = np.random.default_rng(9).standard_normal((N * mesh.size, moe_dense.HIDDEN))
    x = x.astype(np.float32)

    def body(params, x):
        aux = jax_ep.moe_ffn(ep, x, params, batch_axes=("ep",))[1]
        return aux.balance_loss[None], aux.load[None]

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(param_specs(params, None), P(("dp", "ep"))),
        out_specs=P("dp"),
    )
    found, loads = jax.jit(run)(params, x)
    logits = np.split(x @ params["router"], mesh.shape["dp"])
    for part, loss, load in zip(logits, found, loads, strict=True):
        want = losses(route(jnp.asarray(part), ep.config.top_k))
        np.testing.assert_allclose(loss, want.balance_loss, rtol=1e-5)
        np.testing.assert_allclose(load, want.load, atol=1e-6)
    assert mesh.shape["dp"] == 1 or found[0] != found[1]


@pytest.mark.parametrize("overlap", ["copy", "stream"])
def test_a_shared_expert_between_the_halves_of_the_dispatch(overlap):
    gpus.require_stream(overlap, helpers.TRANSPORT)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    params = moe_dense.params()
    x = np.random.default_rng(7).standard_normal((N * mesh.size, moe_dense.HIDDEN))
    x, mask = x.astype(np.float32), np.ones(len(x), bool)

    def run(overlap):
        ep = helpers.make_ep(mesh, config(overlap=overlap))
        layer = expert_parallel(mesh, ep, params, Router())

        def loss(params, x):
            y, _ = layer(params, x, mask)
            return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[1]))), y

        both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        traced = both.trace(params, x)
        halves = "dispatch_async" in traced.lower().as_text(debug_info=True)
        return halves, traced.lower().compile()(params, x)

    whole, ((_, want_y), want) = run("sm")
    halves, ((_, y), grads) = run(overlap)
    assert (whole, halves) == (False, True)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-6)
    for got, each in zip(*map(jax.tree.leaves, (grads, want)), strict=True):
        np.testing.assert_allclose(got, each, rtol=0, atol=1e-5 * np.abs(each).max())


@pytest.mark.parametrize(
    ("options", "shared", "message"),
    [
        ({"skip_a2a": True}, True, "must not have skip_a2a, got True"),
        (
            {"fused_shared_expert": True},
            False,
            r"must have shared_gate_up and shared_down",
        ),
        ({"fused_shared_expert": True}, True, r"must be \[H, 2, F\]"),  # S is not F
    ],
)
def test_options_that_need_more(options, shared, message):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    params = moe_dense.params(shared=shared)
    x = np.ones((N * mesh.size, moe_dense.HIDDEN), np.float32)
    with jax_ep.init(mesh, "ep", config(**options), transport="collective") as ep:
        layer = expert_parallel(mesh, ep, params, Router())
        with pytest.raises(ValueError, match=f"^jax_ep.moe_ffn: .*{message}"):
            layer(params, x, np.ones(len(x), bool))
