"""jax_ep.moe_ffn: a shared expert beside the exchange, drops, texts of programs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router
from support import gpus, helpers, moe_dense
from support.moe_ffn import N, config, expert_parallel, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")


def tokens(mesh, seed, hidden=moe_dense.HIDDEN):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((N * mesh.size, hidden)).astype(np.float32)


def layer(mesh, ep, params, **options):
    """A function of (params, x, residual, input_scale) on global arrays: y."""

    def body(params, x, residual, input_scale):
        given = {"residual": residual, "input_scale": input_scale, **options}
        return jax_ep.moe_ffn(ep, x, params, **given)[0]

    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(param_specs(params, None), P("ep"), P("ep"), P()),
        out_specs=P("ep"),
    )


def shared_rows(params, x):
    gate, up = params["shared_gate_up"][:, 0], params["shared_gate_up"][:, 1]
    return moe_dense.swiglu(x @ gate, x @ up) @ params["shared_down"]


def test_a_residual_beside_a_shared_expert():
    """Both are added, and the residual's cotangent is the result's."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ep, params = helpers.make_ep(mesh, config()), moe_dense.params()
    x, residual, dy = (tokens(mesh, seed) for seed in (1, 2, 3))
    routed = {name: params[name] for name in ("router", "gate_up", "down")}
    plain = jax.jit(layer(mesh, ep, routed))(routed, x, None, None)
    run = layer(mesh, ep, params)

    @jax.jit
    def both(residual):
        y, pull = jax.vjp(lambda residual: run(params, x, residual, None), residual)
        return y, *pull(dy)

    y, dresidual = both(residual)
    np.testing.assert_allclose(
        y, plain + shared_rows(params, x) + residual, rtol=0, atol=1e-5
    )
    np.testing.assert_array_equal(dresidual, dy)


def test_an_input_scale_beside_a_shared_expert():
    """The scale reaches the dispatch: without it the format's values saturate."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    hidden, far = 128, 1e4
    ep = helpers.make_ep(mesh, config(hidden_size=hidden, dispatch_format="nvfp4"))
    rng = np.random.default_rng(4)
    shapes = {
        "router": (hidden, moe_dense.EXPERTS),
        "gate_up": (moe_dense.EXPERTS, hidden, 2, 8),
        "down": (moe_dense.EXPERTS, 8, hidden),
        "shared_gate_up": (hidden, 2, 8),
        "shared_down": (8, hidden),
    }
    params = {
        name: (rng.standard_normal(shape) / 32).astype(np.float32)
        for name, shape in shapes.items()
    }
    x = far * tokens(mesh, 5, hidden)
    routed = {name: params[name] for name in ("router", "gate_up", "down")}
    scale = np.float32(1 / far)
    apart = jax.jit(layer(mesh, ep, routed))(routed, x, None, scale)
    run = jax.jit(layer(mesh, ep, params))
    y, without = (run(params, x, None, each) for each in (scale, None))
    shared = shared_rows(params, x)
    size = np.abs(np.asarray(y)).max()
    np.testing.assert_allclose(y, apart + shared, rtol=0, atol=1e-4 * size)
    assert np.abs(np.asarray(without) - np.asarray(y)).max() > 1e-2 * size


@pytest.mark.parametrize("overlap", ["copy", "stream"])
def test_the_shared_expert_stays_between_the_halves(overlap):
    """A barrier ties the second half's operands to the shared expert's rows."""
    gpus.require_stream(overlap, helpers.TRANSPORT)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    params, x = moe_dense.params(), tokens(mesh, 6)

    def barriers(overlap):
        """Barriers of several operands, whose last is the shared expert's rows."""
        ep = helpers.make_ep(mesh, config(overlap=overlap))
        run = jax.jit(layer(mesh, ep, params))
        text = run.lower(params, x, None, None).as_text()
        rows = f", tensor<{N}x{moe_dense.HIDDEN}xf32>"
        found = re.findall(r"optimization_barrier.* : (.*)", text)
        return [types for types in found if types.endswith(rows)]

    assert len(barriers(overlap)) == 1
    assert not barriers("sm")


def test_masked_tokens_may_be_nan():
    """They affect no result of another token, no loss and no gradient."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ep, params = helpers.make_ep(mesh, config()), moe_dense.params(shared=False)
    x = tokens(mesh, 8)
    mask = np.arange(len(x)) % 3 > 0

    def body(params, x, mask):
        return jax_ep.moe_ffn(ep, x, params, mask=mask)

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(param_specs(params, None), P("ep"), P("ep")),
        out_specs=(P("ep"), jax_ep.MoEAux.specs("ep")),
    )

    def loss(params, x):
        y, aux = run(params, x, mask)
        return jnp.sum(jnp.sin(y)) + aux.balance_loss + aux.z_loss, y

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    want, got = grad(params, x), grad(params, np.where(mask[:, None], x, np.nan))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def dots(jaxpr):
    """Equations of dot_general in `jaxpr`, nested ones included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda value: hasattr(value, "eqns") or hasattr(value, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from dots(inner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_router_is_of_the_highest_precision(dtype):
    """Whatever the default is, which conftest.py sets: bfloat16 changes choices."""
    if dtype == "bfloat16" and jax.default_backend() != "cpu":
        pytest.skip("GPUs sum products of bfloat16 parts: test_logits.py")
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep, params = helpers.make_ep(mesh, config(dtype=dtype)), moe_dense.params()
    x = jnp.asarray(tokens(mesh, 7), dtype)
    run = expert_parallel(mesh, ep, params, Router())
    with jax.default_matmul_precision("bfloat16"):
        found = [*dots(jax.make_jaxpr(run)(params, x, np.ones(len(x), bool)).jaxpr)]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    chosen = [each for each in found if each.params["precision"] == highest]
    assert len(found) > len(chosen) == 1
    operands = [(each.aval.shape, each.aval.dtype) for each in chosen[0].invars]
    wanted = (N, moe_dense.HIDDEN), (moe_dense.HIDDEN, moe_dense.EXPERTS)
    assert operands == [(shape, np.float32) for shape in wanted]


def kept_rows(chosen, ranks, capacity, alignment):
    """bool [n, E]: rows of `chosen` that find a place below their rank's `capacity`."""
    kept = np.zeros_like(chosen)
    for experts in np.split(np.arange(chosen.shape[1]), ranks):
        start = 0
        for expert in experts:
            # All ranks' tokens in order; a token has each expert at most once.
            at = np.flatnonzero(chosen[:, expert])
            kept[at, expert] = start + np.arange(len(at)) < capacity
            start += -(-len(at) // alignment) * alignment
    return kept


@pytest.mark.parametrize("alignment", [1, 4])
def test_gradients_under_drops_against_the_dense_formula(alignment):
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    # A rank's share is N K = 24 rows; fewer fit.
    options = {"recv_capacity": 16, "expert_alignment": alignment}
    ep, params = helpers.make_ep(mesh, config(**options)), moe_dense.params()
    router, x = Router(), tokens(mesh, 8)
    mask = np.ones(len(x), bool)
    chosen = moe_dense.chosen_experts(
        moe_dense.scores(params, x, router), router, None, moe_dense.TOP_K
    )
    kept = kept_rows(chosen, mesh.size, 16, alignment)
    run = expert_parallel(mesh, ep, params, router)

    def total(y, balance, z):
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[1]))) + 3 * balance + z

    def actual(params, x):
        y, aux = run(params, x, mask)
        return total(y, aux.balance_loss, aux.z_loss), aux.num_dropped

    def dense(params, x):
        return total(*moe_dense.layer(params, x, chosen, router, kept))

    grad = jax.value_and_grad(actual, argnums=(0, 1), has_aux=True)
    (value, dropped), got = jax.jit(grad)(params, x)
    want_value, want = jax.jit(jax.value_and_grad(dense, argnums=(0, 1)))(params, x)
    assert dropped.sum() == chosen.sum() - kept.sum() > 0
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)
        assert np.abs(b).max() > 1e-2
