"""jax_ep.moe_ffn: equal to the dense formula, forward and every gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import N, config, expert_parallel, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROUTERS = {
    "softmax": Router(),
    "softmax as is": Router(normalize=False),
    "groups": Router(num_groups=4, top_groups=2, best_of_group=1),
    "deepseek": Router(score="sigmoid", num_groups=4, top_groups=2, scale=2.5),
    "sigmoid as is": Router(score="sigmoid", normalize=False),
}
MESHES = {
    "ep": {"ep": 4},
    "dp x ep": {"dp": 2, "ep": 4},
    "ep x tp": {"ep": 2, "tp": 2},
    "dp x ep x tp": {"dp": 2, "ep": 2, "tp": 2},
}


def compare(mesh, router, *, bias=False, masked=False, seed=0, **changes):
    ep = helpers.make_ep(mesh, config(**changes))
    params = moe_dense.params(seed, bias=bias, logit_bias=True)
    count = N * mesh.size // mesh.shape.get("tp", 1)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, moe_dense.HIDDEN)).astype(np.float32)
    mask = rng.random(count) < 0.7 if masked else np.ones(count, bool)
    scores = moe_dense.scores(params, x, router)
    chosen = moe_dense.chosen_experts(
        scores, router, params.get("router_bias"), moe_dense.TOP_K
    )
    chosen &= mask[:, None]
    run = expert_parallel(mesh, ep, params, router)

    def total(y, balance, z):
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[1]))) + 3 * balance + z

    def actual(params, x):
        y, aux = run(params, x, mask)
        return total(y, aux.balance_loss, aux.z_loss), (y, aux)

    def dense(params, x):
        found = moe_dense.layer(params, x, chosen, router)
        return total(*found), found

    grad = functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    (_, (y, aux)), got = jax.jit(grad(actual))(params, x)
    (_, (want_y, balance, z)), want = jax.jit(grad(dense))(params, x)
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-4)
    np.testing.assert_allclose(aux.balance_loss, balance, rtol=1e-5)
    np.testing.assert_allclose(aux.z_loss, z, rtol=1e-5)
    np.testing.assert_allclose(aux.load, chosen.sum(0) / chosen.sum(), atol=1e-6)
    for name, expected in want[0].items():
        np.testing.assert_allclose(
            got[0][name], expected, rtol=0, atol=1e-3, err_msg=name
        )
        if name != "router_bias":
            assert np.abs(expected).max() > 1e-2, name
    np.testing.assert_allclose(got[1], want[1], rtol=0, atol=1e-3)
    assert int(aux.num_dropped.sum()) == 0
    groups = mesh.shape.get("dp", 1)
    counts = np.asarray(aux.expert_counts).reshape(groups, moe_dense.EXPERTS).sum(0)
    np.testing.assert_array_equal(counts, chosen.sum(0))


@pytest.mark.few(2)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_routers_against_the_dense_formula(router):
    bias = router.score == "sigmoid"
    compare(helpers.make_mesh(helpers.some_ranks(4)), router, bias=bias)


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_meshes_against_the_dense_formula(sizes):
    mesh = helpers.make_mesh(helpers.fit(sizes))
    compare(mesh, Router(), masked=True, seed=1)


@pytest.mark.parametrize("sizes", [MESHES["ep"], MESHES["ep x tp"]], ids=str)
def test_sums_at_the_source(sizes):
    mesh = helpers.make_mesh(helpers.fit(sizes))
    compare(mesh, Router(), masked=True, seed=1, reduce="source")


def test_routing_of_ones_own_and_residual():
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ep = helpers.make_ep(mesh, config())
    params = moe_dense.params(shared=False)
    count = N * mesh.size
    x = np.random.default_rng(2).standard_normal((count, moe_dense.HIDDEN))
    x = x.astype(np.float32)
    logits = np.asarray(x @ params["router"])
    bare = {name: params[name] for name in ("gate_up", "down")}

    def own(params, x, logits):
        routing = jax_ep.router.route(logits, moe_dense.TOP_K)
        return jax_ep.moe_ffn(ep, x, params, routing=routing, residual=x)[0]

    specs = (param_specs(bare, None), P("ep"), P("ep"))
    run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("ep"))
    got = jax.jit(run)(bare, x, logits)
    plain, _ = jax.jit(expert_parallel(mesh, ep, params, Router()))(
        params, x, np.ones(count, bool)
    )
    np.testing.assert_allclose(got - x, plain, rtol=0, atol=1e-5)


def test_drops_are_reported():
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ep = helpers.make_ep(mesh, config(recv_capacity=4))
    params = moe_dense.params()
    x = np.ones((N * mesh.size, moe_dense.HIDDEN), np.float32)
    mask = np.ones(len(x), bool)
    _, aux = jax.jit(expert_parallel(mesh, ep, params, Router()))(params, x, mask)
    lost = np.asarray(aux.expert_counts).reshape(mesh.size, -1).sum(1) - 4
    np.testing.assert_array_equal(aux.num_dropped, np.maximum(lost, 0))
    assert np.asarray(aux.num_dropped).sum() > 0


@pytest.mark.parametrize("name", ["fp8_block128", "mxfp8"])
def test_quantised_dispatch(name):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    hidden = 128
    rng = np.random.default_rng(3)
    x = rng.standard_normal((N * mesh.size, hidden)).astype(np.float32)
    shapes = {"router": (hidden, 16), "gate_up": (16, hidden, 2, 8)}
    shapes["down"] = (16, 8, hidden)
    params = {
        key: (rng.standard_normal(shape) / 8).astype(np.float32)
        for key, shape in shapes.items()
    }
    mask = np.ones(len(x), bool)

    def run(**changes):
        ep = helpers.make_ep(mesh, config(hidden_size=hidden, **changes))
        layer = expert_parallel(mesh, ep, params, Router())

        def loss(x):
            return jnp.sum(layer(params, x, mask)[0] ** 2)

        return jax.jit(jax.value_and_grad(loss))(x)

    plain, quantised = run(), run(dispatch_format=name)
    np.testing.assert_allclose(quantised[0], plain[0], rtol=0.1)
    error = np.abs(np.asarray(quantised[1]) - np.asarray(plain[1])).max()
    assert 0 < error < 0.2 * np.abs(np.asarray(plain[1])).max()


def test_names_in_the_program():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, config())
    params = moe_dense.params()
    x = np.ones((N * mesh.size, moe_dense.HIDDEN), np.float32)
    layer = jax.jit(expert_parallel(mesh, ep, params, Router()))
    text = layer.lower(params, x, np.ones(len(x), bool)).as_text(debug_info=True)
    for scope in ("router", "dispatch", "experts", "shared_expert", "combine"):
        assert f"jax_ep.{scope}/" in text, scope


def test_update_bias_raises_the_idle():
    load = jnp.array([0.5, 0.25, 0.25, 0.0])
    found = jax_ep.router.update_bias(jnp.zeros(4), load, 0.1)
    np.testing.assert_allclose(found, [-0.1, 0, 0, 0.1], atol=1e-7)


def halves(params):
    """gate_up in the shape of other libraries: `[L, H, 2F]`."""
    return params["gate_up"].reshape(*params["gate_up"].shape[:2], -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("down"), "params must have"),
        (lambda p: p.update(bias=0), "nothing besides"),
        (lambda p: p.pop("shared_down"), "must come together"),
        (lambda p: p.update(router=p["router"][:, :8]), r"router must be \[H, E\]"),
        (lambda p: p.update(gate_up=p["gate_up"][..., :4]), "down .*both the same F"),
        (
            lambda p: p.update(down=jnp.swapaxes(p["down"], 1, 2)),
            r"gate_up and down .*transpose down to \[L, F, H\]",
        ),
        (
            lambda p: p.update(gate_up=halves(p)),
            r"reshape it to \[L, H, 2, F\].* if gate comes first(?!.*and shard)",
        ),
        (
            lambda p: p.update(gate_up=halves(p)[:2]),
            "if gate comes first.*, and shard dimension",
        ),
        (lambda p: p.update(gate_up=halves(p)[..., 1:]), "pass the weights of this"),
        (
            lambda p: p.update(router=p["router"][:, :5]),
            "pass a column for each expert",
        ),
        (lambda p: p.update(router_weight=0), r"'down', .*'gate', .*'up', .*, got \["),
    ],
)
def test_wrong_params(change, message):
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, config())
    params = moe_dense.params()
    change(params)
    x = np.ones((N, moe_dense.HIDDEN), np.float32)
    body = functools.partial(jax_ep.moe_ffn, ep)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=f"^jax_ep.moe_ffn: .*{message}"):
        jax.jit(run)(x, params)


def test_experts_must_return_rows_of_h_columns():
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, config())
    x = np.ones((N, moe_dense.HIDDEN), np.float32)

    def narrow(rows, gate_up, down, group_sizes):
        return rows[:, :8]

    body = functools.partial(jax_ep.moe_ffn, ep, experts=narrow)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"experts must return \[N, H\].*from narrow"):
        jax.eval_shape(run, x, moe_dense.params())


@pytest.mark.parametrize("of", ["weights", "codes"])
def test_weights_that_tp_axis_does_not_split(of):
    """Each rank would add the whole result."""
    mesh = helpers.make_mesh({"ep": 1, "tp": 2})
    ep = helpers.make_ep(mesh, config())
    params = moe_dense.params(shared=False)
    x = np.ones((N, moe_dense.HIDDEN), np.float32)
    options = {"tp_axis": "tp"}
    if of == "codes":
        sizes = {"num_experts": 2, "top_k": 1, "max_tokens_per_rank": N}
        ep = helpers.make_ep(
            mesh, jax_ep.EPConfig(**sizes, hidden_size=128, dtype="float32")
        )
        rng = np.random.default_rng(0)
        shapes = {"gate_up": (2, 128, 2, 128), "down": (2, 128, 128)}
        matrices = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        codes = jax_ep.experts.quantize_weights(**matrices).canonical()
        params = {"router": np.ones((128, 2), np.float32), "experts": codes}
        x = np.ones((N, 128), np.float32)
        options["experts"] = jax_ep.experts.fp8
    body = functools.partial(jax_ep.moe_ffn, ep, **options)
    run = jax.shard_map(
        lambda x, params: body(x, params)[0],
        mesh=mesh,
        in_specs=(P("ep"), P()),
        out_specs=P("ep"),
    )
    with pytest.raises(ValueError, match="must be split along F over tp_axis 'tp'"):
        jax.eval_shape(run, x, params)


def test_tokens_of_another_width():
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, config())
    x = np.ones((N, moe_dense.HIDDEN // 2), np.float32)
    body = functools.partial(jax_ep.moe_ffn, ep)
    run = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    width = moe_dense.HIDDEN
    with pytest.raises(ValueError, match=f"pass tokens of {width} columns, or init ep"):
        jax.eval_shape(run, x, moe_dense.params())


def test_halves_that_an_axis_splits():
    """An axis's part of `[L, H, 2F]` is not its part of gate and up."""
    mesh = helpers.make_mesh({"ep": 1, "tp": 2})
    ep = helpers.make_ep(mesh, config())
    params = moe_dense.params()
    params["gate_up"] = halves(params)
    x = np.ones((N, moe_dense.HIDDEN), np.float32)
    body = functools.partial(jax_ep.moe_ffn, ep, tp_axis="tp")
    specs = param_specs(params, "tp") | {"gate_up": P("ep", None, "tp")}
    with pytest.raises(ValueError, match=r"; before 'tp' splits it, reshape"):
        jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), specs), out_specs=P())(
            x, params
        )


@pytest.mark.parametrize(
    "options",
    [
        {"score": "relu"},
        {"num_groups": 2, "top_groups": 3},
        {"num_groups": 0},
        {"best_of_group": 0},
    ],
)
def test_wrong_router(options):
    with pytest.raises(ValueError, match=r"^jax_ep.router.Router: .*got"):
        Router(**options)


def test_groups_must_fit():
    with pytest.raises(ValueError, match="num_groups must divide"):
        jax_ep.router.route(jnp.zeros((2, 10)), 2, Router(num_groups=3, top_groups=2))
    with pytest.raises(ValueError, match="hold top_k"):
        jax_ep.router.route(jnp.zeros((2, 8)), 3, Router(num_groups=4, top_groups=1))
