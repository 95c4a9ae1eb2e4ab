"""jax_ep.sharded on global arrays: the same results as the calls inside shard_map."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(helpers.assert_bits, actual, expected)


@KINDS
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_dispatch_and_combine(kind: AxisType, jit: bool) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4), kind=kind)
    config = helpers.make_config(expert_alignment=4)
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(1), config, mesh.size, fill=helpers.normal
    )
    x, ids, w = (
        helpers.put(mesh, part) for part in (inputs.tokens, inputs.ids, inputs.weights)
    )
    wrap = jax.jit if jit else lambda fn: fn
    d = wrap(functools.partial(jax_ep.sharded.dispatch, ep))(x, ids, w)
    same(d, helpers.run_dispatch(ep, mesh, inputs))
    assert d.tokens.shape == (mesh.size * ep.recv_capacity, config.hidden_size)
    assert d.num_dropped.shape == (mesh.size,)

    @wrap
    def combine(rows, route, weights, residual):
        return jax_ep.sharded.combine(
            ep, rows, route, router_weights=weights, residual=residual
        )

    y = combine(d.tokens, d.route, d.router_weights, x)
    inside = helpers.combine_fn(ep, mesh, P(("ep",)))
    same(y, inside(d.tokens, d.route, d.router_weights, x))
    same(
        combine(d.tokens, d.route, None, None),
        inside(d.tokens, d.route, None, None),
    )


@KINDS
def test_default_spec_is_all_axes(kind: AxisType) -> None:
    mesh = helpers.make_mesh({"dp": 2, "ep": 2}, kind=kind)
    config = helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(2), config, 4)
    parts = inputs.tokens, inputs.ids, inputs.weights
    d = jax_ep.sharded.dispatch(ep, *(helpers.put(mesh, part) for part in parts))
    helpers.assert_dispatched(config, d, inputs, [[0, 1], [2, 3]])


def test_spec_orders_the_ranks() -> None:
    """spec=P(("ep", "dp")) stacks along ep first."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config, spec = helpers.make_config(), P(("ep", "dp"))
    ep = helpers.make_ep(mesh, config, ("ep", "dp"))
    inputs = helpers.make_inputs(np.random.default_rng(3), config, 4)
    parts = [
        helpers.put(mesh, part, spec)
        for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    d = jax.jit(functools.partial(jax_ep.sharded.dispatch, ep, spec=spec))(*parts)
    helpers.assert_dispatched(config, d, inputs)
    combine = functools.partial(jax_ep.sharded.combine, ep, spec=spec)
    y = jax.jit(combine)(d.tokens, d.route, router_weights=d.router_weights)
    inside = helpers.combine_fn(ep, mesh, spec)
    same(y, inside(d.tokens, d.route, d.router_weights, None))


def test_spec_leaves_an_axis_out() -> None:
    """Tokens are replicated over "tp": every position on it dispatches the same."""
    mesh = helpers.make_mesh({"tp": 2, "ep": 2})
    config, spec = helpers.make_config(), P("ep")
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(4), config, 2)
    parts = [
        helpers.put(mesh, part, spec)
        for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    d = jax.jit(functools.partial(jax_ep.sharded.dispatch, ep, spec=spec))(*parts)
    assert d.tokens.shape[0] == 2 * ep.recv_capacity
    helpers.assert_dispatched(config, d, inputs)
    for shard in d.tokens.addressable_shards:
        at = shard.index[0].start // ep.recv_capacity
        expected = helpers.unstack(d.tokens, 2)[at]
        helpers.assert_bits(np.asarray(shard.data), expected)


def test_operands_of_another_sharding() -> None:
    """As in pjit code, operands with another sharding are moved first."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    config = helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(5), config, mesh.size, fill=helpers.normal
    )
    everywhere = NamedSharding(mesh, P())
    parts = [
        jax.device_put(np.concatenate(part), everywhere)
        for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    d = jax.jit(functools.partial(jax_ep.sharded.dispatch, ep))(*parts)
    helpers.assert_dispatched(config, d, inputs)


@KINDS
def test_gradients(kind: AxisType) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4), kind=kind)
    config = helpers.make_config(dtype="float32")
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(6), config, mesh.size, fill=helpers.normal
    )
    x, ids, w = map(np.concatenate, (inputs.tokens, inputs.ids, inputs.weights))

    def layer(x, w, ids):
        d = jax_ep.sharded.dispatch(ep, x, ids, w)
        rows = jnp.tanh(d.tokens)
        y = jax_ep.sharded.combine(
            ep, rows, d.route, router_weights=d.router_weights, residual=x
        )
        return moe.wave(y)

    def dense(x, w, ids):
        kept = jnp.where(ids >= 0, w, 0)
        return moe.wave(x + jnp.sum(kept[..., None] * jnp.tanh(x)[:, None], axis=1))

    operands = [helpers.put(mesh, [a]) for a in (x, w, ids)]
    actual = jax.jit(jax.grad(layer, (0, 1)))(*operands)
    moe.assert_close(actual, jax.grad(dense, (0, 1))(x, w, ids))


def test_errors_of_a_ranks_call_name_the_function() -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, helpers.make_config())
    tokens = np.ones((8 * mesh.size, ep.config.hidden_size), jnp.bfloat16)
    ids = np.zeros((4 * mesh.size, ep.config.top_k), np.int32)
    with pytest.raises(ValueError, match=r"^jax_ep.sharded.dispatch: topk_ids ") as e:
        jax_ep.sharded.dispatch(ep, tokens, ids)
    whole = f"topk_ids of all ranks is {ids.shape}"
    part = "raised by jax_ep.dispatch for the part of one rank"
    assert f"({part}; {whole})" in str(e.value)
    with pytest.raises(TypeError, match=r"^jax_ep.sharded.dequantize: d must be"):
        jax_ep.sharded.dequantize(ep, tokens)


def test_errors_of_shapes_have_the_whole_one() -> None:
    """Also for batches of sequences, and for errors that a rank finds in its part."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, helpers.make_config())
    hidden, top_k = ep.config.hidden_size, ep.config.top_k
    tokens = jnp.zeros((mesh.size, 4, hidden), jnp.bfloat16)
    ids = np.zeros((4 * mesh.size, top_k), np.int32)
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, tokens, ids)
    remedy = f"pass tokens.reshape(-1, {hidden})"
    check_form(caught, "sharded.dispatch", "tokens", str(tokens.shape), remedy)
    d = jax_ep.sharded.dispatch(ep, tokens.reshape(-1, hidden), ids)
    wide = jnp.zeros((4 * mesh.size, 2 * hidden), jnp.bfloat16)
    for function, name, call in (
        ("dispatch", "tokens", lambda: jax_ep.sharded.dispatch(ep, wide, ids)),
        ("combine", "expert_out", lambda: jax_ep.sharded.combine(ep, wide, d.route)),
    ):
        with raises() as caught:
            call()
        whole = f"; {name} of all ranks is {wide.shape})"
        check_form(caught, f"sharded.{function}", name, f"(4, {2 * hidden})", whole)
    # The same program's next call has other rows.
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, jnp.concatenate([wide, wide]), ids)
    check_form(caught, "sharded.dispatch", f"is {(8 * mesh.size, 2 * hidden)})")


def test_errors_of_an_operand_that_lies_on_few_axes() -> None:
    """A spec without an axis has fewer parts; a scale is equal on all ranks."""
    mesh = helpers.make_mesh({"tp": 2, "ep": 2})
    changes = {"hidden_size": 32, "dispatch_format": "nvfp4"}
    ep = helpers.make_ep(mesh, helpers.make_config(**changes))
    ids = np.zeros((4, ep.config.top_k), np.int32)
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, jnp.zeros((4, 64), jnp.bfloat16), ids, spec=P("ep"))
    check_form(caught, "sharded.dispatch", "(2, 64)", "tokens of all ranks is (4, 64)")
    tokens, scale = jnp.zeros((4, 32), jnp.bfloat16), jnp.ones(3)
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, tokens, ids, input_scale=scale, spec=P("ep"))
    check_form(caught, "sharded.dispatch", "input_scale of all ranks is (3,)")
