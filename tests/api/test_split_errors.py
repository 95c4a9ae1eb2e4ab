"""What calls in halves refuse, and how many may be pending."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers
from support.errors import check_form, check_state, raises

N = 4


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


@pytest.fixture
def ep(mesh):
    return helpers.make_ep(mesh, helpers.make_config(**helpers.HALVES))


def operands(mesh: Any, config: Any) -> tuple[jax.Array, jax.Array]:
    x = jnp.zeros((N * mesh.size, config.hidden_size), config.dtype)
    return x, jnp.zeros((N * mesh.size, config.top_k), jnp.int32)


def trace(ep: Any, mesh: Any, body: Callable[..., Any]) -> Any:
    """The types of what `body(x, ids)` returns on a rank."""
    run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return jax.eval_shape(run, *operands(mesh, ep.config))


def test_third_dispatch(mesh, ep) -> None:
    def body(x, ids):
        begin = functools.partial(jax_ep.dispatch_async, ep, x, ids)
        first, second = begin(), begin()
        with raises() as caught:
            begin()
        check_form(caught, "dispatch_async", "2", "3", "dispatch_wait")
        jax_ep.dispatch_wait(first)
        third = begin()
        return jax_ep.dispatch_wait(second).tokens, jax_ep.dispatch_wait(third).tokens

    trace(ep, mesh, body)
    trace(ep, mesh, body)


def test_third_combine(mesh, ep) -> None:
    def body(x, ids):
        d = jax_ep.dispatch(ep, x, ids)
        begin = functools.partial(jax_ep.combine_async, ep, d.tokens, d.route)
        open_dispatches = [jax_ep.dispatch_async(ep, x, ids) for _ in range(2)]
        first, second = begin(), begin()
        with raises() as caught:
            begin()
        check_form(caught, "combine_async", "2", "3", "combine_wait")
        return jax_ep.combine_wait(first), jax_ep.combine_wait(second), open_dispatches

    trace(ep, mesh, body)


def test_other_handles_count_for_themselves(mesh, ep) -> None:
    other = helpers.make_ep(
        mesh, helpers.make_config(**helpers.HALVES, expert_alignment=2)
    )

    def body(x, ids):
        return [jax_ep.dispatch_async(e, x, ids) for e in (ep, other, ep, other)]

    trace(ep, mesh, body)


@pytest.mark.parametrize("how", ["barrier", "jit", "remat", "dropped"])
def test_no_false_alarm(mesh, ep, how: str) -> None:
    """A call whose Pending this trace cannot see any more is not counted."""

    def wait(pending):
        return jax_ep.dispatch_wait(pending).tokens

    def body(x, ids):
        total = 0
        for _ in range(5):
            pending = jax_ep.dispatch_async(ep, x, ids)
            if how == "barrier":
                total += wait(jax.lax.optimization_barrier(pending))
            elif how == "dropped":
                del pending
                gc.collect()
            else:
                total += {"jit": jax.jit, "remat": jax.checkpoint}[how](wait)(pending)
        return x + jnp.sum(total)

    trace(ep, mesh, body)


def test_after_an_error_in_the_trace(mesh, ep) -> None:
    """Pendings of a failed trace, which its traceback keeps alive, do not count."""

    def fails(x, ids):
        pendings = [jax_ep.dispatch_async(ep, x, ids) for _ in range(2)]
        raise RuntimeError(len(pendings))

    with pytest.raises(RuntimeError) as caught:
        trace(ep, mesh, fails)
    trace(ep, mesh, lambda x, ids: jax_ep.dispatch_async(ep, x, ids))
    del caught


@pytest.mark.parametrize(
    ("wait", "make", "words"),
    [
        ("dispatch_wait", lambda d, c: None, ("dispatch_async", "NoneType")),
        ("combine_wait", lambda d, c: d, ("combine", "dispatch")),
        ("dispatch_wait", lambda d, c: c, ("dispatch", "combine_wait")),
    ],
)
def test_wrong_pending(mesh, ep, wait: str, make: Any, words: Any) -> None:
    def body(x, ids):
        pending = jax_ep.dispatch_async(ep, x, ids)
        d = jax_ep.dispatch(ep, x, ids)
        back = jax_ep.combine_async(ep, d.tokens, d.route)
        return getattr(jax_ep, wait)(make(pending, back))

    with raises() as caught:
        trace(ep, mesh, body)
    check_form(caught, wait, *words)


def test_twice(mesh, ep) -> None:
    def body(x, ids):
        pending = jax_ep.dispatch_async(ep, x, ids)
        jax_ep.dispatch_wait(pending)
        return jax_ep.dispatch_wait(pending)

    with raises() as caught:
        trace(ep, mesh, body)
    check_state(caught, "dispatch_wait", "already waited")


def test_once_in_each_branch(mesh, ep) -> None:
    def body(x, ids):
        pending = jax_ep.dispatch_async(ep, x, ids)

        def wait(scale):
            return jax_ep.dispatch_wait(pending).tokens * scale

        return jax.lax.cond(jnp.all(x == 0), lambda: wait(1), lambda: wait(2))

    trace(ep, mesh, body)


def test_closed(mesh) -> None:
    with helpers.init(mesh, **helpers.HALVES) as ep:
        args = operands(mesh, ep.config)
        pending = jax_ep.sharded.dispatch_async(ep, *args)
    with raises() as caught:
        jax_ep.sharded.dispatch_wait(pending)
    check_state(caught, "sharded.dispatch_wait", "closed")
    with raises() as caught:
        jax_ep.sharded.dispatch_async(ep, *args)
    check_state(caught, "sharded.dispatch_async", "closed")


def test_pendings_hold_no_handle(mesh) -> None:
    ep = helpers.init(mesh, **helpers.HALVES)
    pending = jax_ep.sharded.dispatch_async(ep, *operands(mesh, ep.config))
    del ep
    jax.clear_caches()
    gc.collect()
    with raises() as caught:
        jax_ep.sharded.dispatch_wait(pending)
    check_state(caught, "sharded.dispatch_wait", "this process has no handle 0x")


def test_of_several_ranks(mesh, ep) -> None:
    pending = jax_ep.sharded.dispatch_async(ep, *operands(mesh, ep.config))
    run = jax.shard_map(jax_ep.dispatch_wait, mesh=mesh, in_specs=P(), out_specs=P())
    if mesh.size == 1:
        pytest.skip("one rank is all of them")
    with raises() as caught:
        jax.eval_shape(run, pending)
    check_form(caught, "dispatch_wait", "one rank", "sharded.dispatch_wait")


def test_outside_shard_map(mesh, ep) -> None:
    with raises() as caught:
        jax_ep.dispatch_async(ep, *operands(mesh, ep.config))
    check_form(caught, "dispatch_async", "scope", "sharded.dispatch_async")


def test_operands_are_checked_by_name(mesh, ep) -> None:
    def body(x, ids):
        return jax_ep.dispatch_async(ep, x.astype(jnp.float32), ids)

    with raises() as caught:
        trace(ep, mesh, body)
    check_form(caught, "dispatch_async", "bfloat16", "float32")


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({}, 0),
        ({"pending_calls": 0, "overlap": "copy"}, 0),
        ({"overlap": "copy"}, 1),
        ({"pending_calls": 1}, 1),
    ],
)
def test_fewer_pending_calls(mesh, fields, most: int) -> None:
    """By default no call may be pending, except with an overlap for halves."""
    config = helpers.make_config(**fields)
    assert config.most_pending == most
    ep = helpers.make_ep(mesh, config)

    def body(x, ids):
        begun = [jax_ep.dispatch_async(ep, x, ids) for _ in range(most)]
        with raises() as caught:
            jax_ep.dispatch_async(ep, x, ids)
        check_form(caught, "dispatch_async", "pending_calls")
        remedy = "on an earlier one first" if most else "EPConfig(pending_calls=1)"
        assert remedy in str(caught.value)
        d = [jax_ep.dispatch_wait(pending) for pending in begun]
        if not most:
            whole = jax_ep.dispatch(ep, x, ids)
            with raises() as caught:
                jax_ep.combine_async(ep, whole.tokens, whole.route)
            check_form(caught, "combine_async", "pending_calls", "at least 1")
        return [each.tokens for each in d]

    trace(ep, mesh, body)
