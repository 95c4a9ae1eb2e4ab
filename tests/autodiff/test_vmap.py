"""vmap makes the calls of a batch one by one, inside and around shard_map."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers
from support.call_order import (
    afters,
    arguments,
    calls,
    chain,
    layer,
    mapped,
    p2p_handle,
)
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIELDS = {"dtype": "float32", **helpers.HALVES}


@pytest.fixture
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


def operands(config: Any, batch: int, ranks: int) -> tuple[jax.Array, ...]:
    """tokens, ids and router weights of a batch, for all ranks."""
    rng = np.random.default_rng(batch)
    made = [
        helpers.make_inputs(rng, config, ranks, n=6, fill=helpers.normal)
        for _ in range(batch)
    ]
    return tuple(
        jnp.stack([np.concatenate(getattr(each, name)) for each in made])
        for name in ("tokens", "ids", "weights")
    )


def bent(rows: jax.Array) -> jax.Array:
    """A nonlinear, exact function; `tanh` may round differently at another shape."""
    return jnp.where(rows > 0, rows, rows / 2)


def whole(ep: Any, x: Any, ids: Any, w: Any, residual: Any = None) -> jax.Array:
    d = jax_ep.dispatch(ep, x, ids, w)
    rows = bent(jax_ep.dequantize(d))
    return jax_ep.combine(ep, rows, d.route, d.router_weights, residual=residual)


def halves(ep: Any, x: Any, ids: Any, w: Any, residual: Any = None) -> jax.Array:
    d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, ids, w))
    rows = bent(jax_ep.dequantize(d))
    sent = jax_ep.combine_async(ep, rows, d.route, d.router_weights, residual=residual)
    return jax_ep.combine_wait(sent)


def one_by_one(run: Any, batched: tuple[Any, ...]) -> Any:
    entries = [run(*(a[i] for a in batched)) for i in range(len(batched[0]))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *entries)


def gradients(one: Any, ep: Any, x: Any, ids: Any, w: Any) -> Any:
    def loss(x: Any, w: Any, residual: Any) -> Any:
        return jnp.sum(one(ep, x, ids, w, residual) ** 2)

    return jax.grad(loss, (0, 1, 2))(x, w, 2 * x)


REMAT = {
    "bare": lambda run: run,
    "remat": jax.checkpoint,
    "save_route": functools.partial(jax.checkpoint, policy=jax_ep.save_route),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrapped", REMAT)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("one", [whole, halves])
def test_inside_of_shard_map(mesh, one, batch: int, wrapped: str) -> None:
    """Results and gradients equal those of single calls, bit for bit."""
    batch = min(batch, 2) if one is halves else batch  # two calls may be pending
    ep = helpers.init(mesh, **FIELDS)
    args = operands(ep.config, batch, mesh.size)

    spec = P(None, "ep")
    # In separate programs: calls in a checkpoint are not chained with those around it,
    # so that one more than `pending_calls` might be pending.
    for run in (
        functools.partial(one, ep),
        REMAT[wrapped](functools.partial(gradients, one, ep)),
    ):

        def in_turn(*batched: Any, run: Any = run) -> Any:
            return one_by_one(run, batched)

        found, expected = (
            jax.jit(mapped_over(mesh, body, spec))(*args)
            for body in (jax.vmap(run), in_turn)
        )
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.asarray(b).any()
            helpers.assert_bits(a, b)


def mapped_over(mesh: Any, body: Any, spec: Any, **options: Any) -> Any:
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options)


@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
def test_around_shard_map(mesh, order: str) -> None:
    """Without a mesh axis for the batch, each rank has the whole batch."""
    ep = helpers.init(mesh, **FIELDS)
    x, ids, w = operands(ep.config, 3, mesh.size)
    run = mapped_over(mesh, functools.partial(whole, ep), P("ep"), check_vma=False)

    def loss(run: Any, x: Any, ids: Any, w: Any) -> Any:
        return jnp.sum(run(x, ids, w) ** 2)

    if order == "grad of vmap":
        found = jax.jit(jax.grad(functools.partial(loss, jax.vmap(run))))(x, ids, w)
    else:
        found = jax.jit(jax.vmap(jax.grad(functools.partial(loss, run))))(x, ids, w)
    single = jax.jit(jax.grad(functools.partial(loss, run)))
    expected = one_by_one(single, (x, ids, w))
    assert np.asarray(expected).any()
    helpers.assert_bits(found, expected)


def test_what_the_entries_share(mesh) -> None:
    """Gradients of operands that all entries share are sums over entries."""
    ep = helpers.init(mesh, **FIELDS, hidden_size=32, dispatch_format="mxfp8")
    x, ids, w = operands(ep.config, 3, mesh.size)

    def body(batched: bool, x: Any, ids: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            run = functools.partial(whole, ep)
            if batched:
                return jnp.sum(jax.vmap(run, (0, None, None))(x, ids, w) ** 2)
            return sum(jnp.sum(run(entry, ids, w) ** 2) for entry in x)

        return jax.grad(loss)(w)

    specs = (P(None, "ep"), P("ep"), P("ep"))
    found, expected = (
        jax.jit(
            jax.shard_map(
                functools.partial(body, batched),
                mesh=mesh,
                in_specs=specs,
                out_specs=P("ep"),
            )
        )(x, ids[0], w[0])
        for batched in (True, False)
    )
    assert np.asarray(expected).any()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.thorough
def test_batches_within_batches(mesh) -> None:
    ep = helpers.init(mesh, **FIELDS)
    x, ids, w = operands(ep.config, 6, mesh.size)
    args = [a.reshape(2, 3, *a.shape[1:]) for a in (x, ids, w)]
    run = functools.partial(whole, ep)
    spec = P(None, None, "ep")
    found = mapped_over(mesh, jax.vmap(jax.vmap(run)), spec)(*args)
    body = functools.partial(one_by_one, run)
    expected = mapped_over(mesh, lambda *a: body(a), P(None, "ep"))(x, ids, w)
    helpers.assert_bits(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("batch", [1, 3])
def test_calls_of_a_batch_come_in_order(batch: int) -> None:
    """Each comes after the previous one, and the next op after the last."""
    if jax.default_backend() != "cpu":
        pytest.skip("a handle of p2p without GPUs")
    mesh = helpers.make_mesh(2)
    ep = p2p_handle(mesh)

    def body(x: Any, ids: Any) -> Any:
        many = jnp.stack([x, 2 * x, 3 * x][:batch])
        y = jax.vmap(lambda x: layer(ep, x, ids))(many)
        return y[0] + layer(ep, x, ids)

    text = jax.jit(mapped(mesh, body)).lower(*arguments()).as_text()
    assert len(calls(text)) == 2 * batch + 2
    assert afters(text) == chain(2 * batch + 2)


def stages() -> Any:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh(
        (2, 2),
        ("stage", "ep"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )


def test_pipeline_of_stages() -> None:
    """vmap over stages, each on its part of the mesh: a batch of 1 copies nothing."""
    mesh = stages()
    ep = helpers.init(mesh, **FIELDS)
    x, ids, w = operands(ep.config, 2, ep.ep_size)
    run = mapped_over(mesh, functools.partial(whole, ep), P("ep"), check_vma=False)

    def loss(run: Any, x: Any, w: Any) -> Any:
        return jnp.sum(run(x, ids, w) ** 2)

    step = jax.value_and_grad(loss, (1, 2))
    over = jax.jit(functools.partial(step, jax.vmap(run, spmd_axis_name="stage")))
    value, found = over(x, w)
    single = [
        jax.jit(
            jax.value_and_grad(
                lambda x, w, ids=ids[i]: jnp.sum(run(x, ids, w) ** 2), (0, 1)
            )
        )(x[i], w[i])
        for i in range(2)
    ]
    np.testing.assert_allclose(value, sum(v for v, _ in single), rtol=1e-6)
    for part, array in enumerate(found):
        helpers.assert_bits(array, np.stack([g[part] for _, g in single]))


def ffn_params(config: Any, rng: np.random.Generator) -> dict[str, jax.Array]:
    hidden, inner, experts = config.hidden_size, 8, config.num_experts
    shapes = {
        "router": (hidden, experts),
        "gate_up": (experts, hidden, 2, inner),
        "down": (experts, inner, hidden),
    }
    return {
        name: jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32)
        for name, shape in shapes.items()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "experts", [jax_ep.experts.ragged_dot, jax_ep.experts.Padded(64)]
)
def test_moe_ffn(mesh, experts, shared: bool) -> None:
    """With weights that the entries share, and with separate ones."""
    ep = helpers.init(mesh, **FIELDS)
    rng = np.random.default_rng(5)
    many = [ffn_params(ep.config, rng) for _ in range(2)]
    params = many[0] if shared else jax.tree.map(lambda *a: jnp.stack(a), *many)
    x = operands(ep.config, 2, mesh.size)[0]
    axes = (0, None) if shared else (0, 0)

    def body(batched: bool, x: Any, params: Any) -> Any:
        def loss(x: Any, params: Any) -> Any:
            y, aux = jax_ep.moe_ffn(ep, x, params, experts=experts)
            return jnp.sum(y**2) + aux.balance_loss

        def total(x: Any, params: Any) -> Any:
            if batched:
                return jnp.sum(jax.vmap(loss, axes)(x, params))
            own = [jax.tree.map(lambda a, i=i: a[i], params) for i in range(2)]
            return sum(loss(x[i], params if shared else own[i]) for i in range(2))

        return jax.grad(total, (0, 1))(x, params)

    def spec(name: str) -> P:
        lead = () if name == "router" else ("ep",)
        return P(*(lead if shared else (None, *lead)))

    specs = (P(None, "ep"), {name: spec(name) for name in params})
    found, expected = (
        jax.jit(
            jax.shard_map(
                functools.partial(body, batched),
                mesh=mesh,
                in_specs=specs,
                out_specs=specs,
            )
        )(x, params)
        for batched in (True, False)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(b).any()
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_global_calls_of_stages() -> None:
    """By default they split their arrays over the other axes."""
    mesh = stages()
    ep = helpers.init(mesh, **FIELDS)
    x, ids, w = operands(ep.config, 2, ep.ep_size)

    def both(x: Any, ids: Any, w: Any) -> Any:
        d = jax_ep.sharded.dispatch(ep, x, ids, w)
        return jax_ep.sharded.combine(ep, bent(d.tokens), d.route, d.router_weights)

    found = jax.jit(jax.vmap(both, spmd_axis_name="stage"))(x, ids, w)
    run = jax.jit(mapped_over(mesh, functools.partial(whole, ep), P("ep")))
    for stage in range(2):
        expected = run(x[stage], ids[stage], w[stage])
        np.testing.assert_array_equal(found[stage], expected)


def test_losses_of_stages_are_their_own() -> None:
    mesh = stages()
    ep = helpers.init(mesh, **FIELDS)
    rng = np.random.default_rng(6)
    many = [ffn_params(ep.config, rng) for _ in range(2)]
    x = operands(ep.config, 2, ep.ep_size)[0]

    def body(x: Any, params: Any) -> Any:
        y, aux = jax_ep.moe_ffn(ep, x, params)
        return y, aux.balance_loss, aux.load

    specs = {"router": P(), "gate_up": P("ep"), "down": P("ep")}
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("ep"), specs),
        out_specs=(P("ep"), P(), P()),
        check_vma=False,
    )
    params = jax.tree.map(lambda *a: jnp.stack(a), *many)
    found = jax.jit(jax.vmap(run, spmd_axis_name="stage"))(x, params)
    for stage in range(2):
        expected = jax.jit(run)(x[stage], many[stage])
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a[stage], b, rtol=1e-5, atol=1e-6)
    assert abs(found[1][0] - found[1][1]) > 1e-4


def test_more_than_may_be_pending(mesh) -> None:
    """Each call of a batch counts as pending, besides earlier and outer ones."""
    ep = helpers.init(mesh, **FIELDS)
    assert ep.config.pending_calls == 2

    def body(inner: int, outer: int, first: bool, x: Any, ids: Any) -> Any:
        def begin(scale: Any) -> Any:
            return jax_ep.dispatch_async(ep, scale * x, ids)

        earlier = begin(jnp.float32(1)) if first else None
        run = jax.vmap(jax.vmap(begin)) if outer > 1 else jax.vmap(begin)
        shape = (outer, inner) if outer > 1 else (inner,)
        pending = run(jnp.ones(shape))
        return x + sum(jnp.sum(p) for p in jax.tree.leaves((pending.ports, earlier)))

    x, ids, _ = operands(ep.config, 1, mesh.size)

    def trace(*how: Any, wrap: Any = lambda run: run) -> None:
        run = mapped_over(mesh, wrap(functools.partial(body, *how)), P("ep"))
        jax.eval_shape(run, x[0], ids[0])

    trace(2, 1, False)
    for how, wrap in (
        ((3, 1, False), lambda run: run),
        ((2, 2, False), lambda run: run),
        ((2, 1, True), lambda run: run),
        ((3, 1, False), jax.checkpoint),
    ):
        with raises() as caught:
            trace(*how, wrap=wrap)
        check_form(caught, "dispatch_async", "pending_calls")


def test_compiled_program_has_one_exchange_for_each_call(mesh) -> None:
    if mesh.size < 2:
        pytest.skip("one rank exchanges nothing")
    ep = helpers.make_ep(mesh, helpers.make_config(**FIELDS))
    x, ids, w = operands(ep.config, 3, mesh.size)
    body = jax.vmap(functools.partial(whole, ep))
    run = jax.jit(mapped_over(mesh, body, P(None, "ep")))
    text = run.lower(x, ids, w).compile().as_text() or ""
    found = len(re.findall(r" all-to-all(?:-start)?\(", text))
    assert found == (6 if ep.transport == "collective" else 0)
