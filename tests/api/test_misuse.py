"""Wrong use of handles and bad ids at run time: errors, after which all else works."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, oracle
from support.errors import check_form, check_state, raises

pytestmark = pytest.mark.usefixtures("others_go_on")


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


def arrays(ep, mesh, seed: int = 0, **options):
    inputs = helpers.make_inputs(
        np.random.default_rng(seed), ep.config, mesh.size, **options
    )
    parts = inputs.tokens, inputs.ids, inputs.weights
    return inputs, [helpers.put(mesh, part) for part in parts]


def test_outside_shard_map(mesh, ep) -> None:
    _, (x, ids, w) = arrays(ep, mesh)
    d = helpers.dispatch_fn(ep, mesh, P(("ep",)))(x, ids, w)
    with raises() as caught:
        jax_ep.dispatch(ep, x, ids, w)
    check_form(caught, "dispatch", "ep", "shard_map")
    with raises() as caught:
        jax.jit(functools.partial(jax_ep.dispatch, ep))(x, ids, w)
    check_form(caught, "dispatch", "ep", "shard_map")
    with raises() as caught:
        jax_ep.combine(ep, d.tokens, d.route)
    check_form(caught, "combine", "ep", "shard_map")


def test_inside_shard_map_of_other_axes(ep) -> None:
    mesh = helpers.make_mesh({"other": helpers.some_ranks(4)})
    _, (x, ids, w) = arrays(ep, mesh)
    with raises() as caught:
        helpers.dispatch_fn(ep, mesh, P("other"))(x, ids, w)
    check_form(caught, "dispatch", "ep", "shard_map")


def test_axis_of_another_size(ep) -> None:
    """The axis has the same name, but the handle was made for another mesh."""
    mesh = helpers.make_mesh(2 if ep.ep_size != 2 else 1)
    _, (x, ids, w) = arrays(ep, mesh)
    with raises() as caught:
        helpers.dispatch_fn(ep, mesh, P("ep"))(x, ids, w)
    check_form(caught, "dispatch", "ep", str(ep.ep_size), str(mesh.size))


@pytest.mark.parametrize("twin", [True, False])
def test_route_of_another_handle(mesh, ep, twin: bool) -> None:
    """Also from a handle of equal content, which has other buffers."""
    config = ep.config if twin else helpers.make_config(top_k=1)
    other = jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT)
    _, (x, ids, w) = arrays(other, mesh)

    def body(x, ids, w):
        d = jax_ep.dispatch(other, x, ids, w)
        rows = jnp.zeros((ep.recv_capacity, ep.config.hidden_size), x.dtype)
        return jax_ep.combine(ep, rows, d.route)

    with raises() as caught:
        jax.eval_shape(moe.sharded(mesh, body), x, ids, w)
    check_form(caught, "combine", "route")
    other.close()


def test_stale_route(mesh) -> None:
    """An old route is valid after newer dispatches, but not after its handle closes."""
    handle = helpers.init(mesh)
    inputs, operands = arrays(handle, mesh, 1, fill=helpers.normal)
    _, newer = arrays(handle, mesh, 2, fill=helpers.normal)
    run = helpers.dispatch_fn(handle, mesh, P("ep"))
    combine = helpers.combine_fn.__wrapped__
    old = run(*operands)
    args = old.tokens, old.route, old.router_weights, None
    for _ in range(5):
        new = run(*newer)
    sums = np.asarray(combine(handle, mesh, P("ep"))(*args))
    want = oracle.combine(
        handle.config,
        inputs.ids,
        *(list(helpers.unstack(a, mesh.size).values()) for a in (args[0], args[2])),
    )
    helpers.assert_bits(sums, np.concatenate(want))
    assert (np.asarray(new.route.slot_of) != np.asarray(old.route.slot_of)).any()
    handle.close()
    with helpers.init(mesh) as again:
        with raises() as caught:
            combine(again, mesh, P("ep"))(*args)
        check_form(caught, "combine", "route")


def test_route_of_no_kind(mesh, ep) -> None:
    def body(rows):
        return jax_ep.combine(ep, rows, (rows, rows))

    rows = jax.ShapeDtypeStruct((mesh.size * ep.recv_capacity, 16), jnp.bfloat16)
    with raises() as caught:
        jax.eval_shape(moe.sharded(mesh, body), rows)
    check_form(caught, "combine", "route", "tuple")


def test_closed(mesh) -> None:
    handle = helpers.init(mesh)
    _, operands = arrays(handle, mesh)
    d = helpers.dispatch_fn(handle, mesh, P("ep"))(*operands)
    handle.close()
    with raises() as caught:
        helpers.dispatch_fn.__wrapped__(handle, mesh, P("ep"))(*operands)
    check_state(caught, "dispatch", "closed")
    with raises() as caught:
        helpers.combine_fn(handle, mesh, P("ep"))(d.tokens, d.route, None, None)
    check_state(caught, "combine", "closed")
    with raises() as caught:
        jax_ep.sharded.dispatch(handle, *operands)
    check_state(caught, "sharded.dispatch", "closed")


@pytest.mark.parametrize("value", [-2, 24, 1000, helpers.INT_MIN, helpers.INT_MAX])
def test_check_names_the_first_invalid_id(mesh, value: int) -> None:
    """ep.check() names rank, token, k and value; check() of other handles does not."""
    config = helpers.make_config(recv_capacity=17)
    with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as ep:
        inputs, operands = arrays(ep, mesh)
        run = helpers.dispatch_fn(ep, mesh, P(("ep",)))
        helpers.assert_dispatched(config, run(*operands), inputs)
        assert ep.check() is None
        rank = mesh.size - 1
        inputs.ids[rank][5, 1] = value
        inputs.ids[rank][5, 2] = 77
        inputs.ids[rank][6, 0] = -9
        d = run(operands[0], helpers.put(mesh, inputs.ids), operands[2])
        helpers.assert_dispatched(config, d, inputs)
        assert np.asarray(d.num_invalid)[rank] == 3
        with pytest.raises((ValueError, RuntimeError)) as caught:
            ep.check()
        message = str(caught.value)
        for what in (f"rank {rank}", "token 5", "k 1", f"got {value}"):
            assert re.search(rf"\b{what}\b", message), message
        # The handle itself also works: the call lost nothing.
        helpers.assert_dispatched(config, run(*operands), arrays(ep, mesh)[0])


def test_check_is_refused_where_calls_have_not_run(mesh) -> None:
    """In jit it would run once, while tracing; eager derivatives may have it."""

    def checked(x):
        ep.check()
        return x * x

    config = helpers.make_config()
    with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as ep:
        for traced in (
            jax.jit(checked),
            jax.jit(jax.vmap(checked)),
            jax.make_jaxpr(checked),
        ):
            with raises() as caught:
                traced(jnp.ones(2))
            check_state(caught, "check", "JAX is tracing a program")
        assert jax.grad(checked)(3.0) == 6
        assert jax.vmap(checked)(jnp.ones(2)).sum() == 2


def test_psum_behind_invalid_ids() -> None:
    """One rank with bad ids, then a collective over another axis: nothing aborts."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config = helpers.make_config(dtype="float32")
    with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as ep:
        inputs = helpers.make_inputs(
            np.random.default_rng(2), config, 4, fill=helpers.normal
        )
        inputs.ids[1][...] = helpers.INT_MAX

        def body(x, ids, w, p):
            y = moe.layer(ep, x, ids, w, p)
            return jax.lax.psum(jnp.sum(y**2), ("dp", "ep"))

        params = helpers.normal(np.random.default_rng(3), (24, 16, 16), np.float32) / 4
        spec = P(("dp", "ep"))
        total = moe.sharded(
            mesh, body, in_specs=(spec, spec, spec, P("ep")), out_specs=P()
        )
        whole = [np.concatenate(part) for part in vars(inputs).values()]
        x, ids, w = (helpers.put(mesh, [a], spec) for a in whole)
        p = helpers.put(mesh, [params], P("ep"))
        run = jax.jit(jax.value_and_grad(lambda x, p: total(x, ids, w, p), (0, 1)))

        def dense(x, p):
            return jnp.sum(moe.dense(x, whole[1], whole[2], p) ** 2)

        for _ in range(3):
            value, grads = run(x, p)
        want, want_grads = jax.value_and_grad(dense, (0, 1))(whole[0], params)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        moe.assert_close(grads, want_grads)
        with pytest.raises((ValueError, RuntimeError), match="rank"):
            ep.check()
