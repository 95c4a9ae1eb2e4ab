"""The calls of a p2p handle follow each other within a trace, by programs' texts.

Needs no GPU; test_chain_runs.py has programs that run.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import take_current_trace
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers
from support.call_order import (
    WHOLE,
    Call,
    afters,
    arguments,
    calls,
    chain,
    layer,
    lowered,
    mapped,
    p2p_handle,
    square,
)
from support.call_order import ep as ep
from support.call_order import mesh as mesh


def lengths(found: list[Call]) -> list[int]:
    """The length of each chain; a call that two calls come after would begin two."""
    ends: dict[int, int] = {}
    for i, call in enumerate(found):
        before = 0 if call.after is None else ends.pop(call.after)
        ends[i] = before + 1
    return sorted(ends.values())


@pytest.mark.parametrize("check_vma", [True, False])
def test_independent_calls(mesh, ep, check_vma: bool) -> None:
    def body(x: Any, ids: Any) -> Any:
        first, second = (jax_ep.dispatch(ep, x, i) for i in (ids, ids + 1))
        y = jax_ep.combine(ep, second.tokens, second.route)
        return y + jax_ep.combine(ep, first.tokens, first.route)

    text = lowered(mesh, body, check_vma=check_vma)
    assert [call.target for call in calls(text)] == ["ep_dispatch"] * 2 + [
        "ep_combine"
    ] * 2
    assert afters(text) == chain(4)
    assert lowered(mesh, body, check_vma=check_vma) == text


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", [1, 2])
def test_derivatives(mesh, ep, order: int, check_vma: bool) -> None:
    """Two independent layers, and all calls of their gradients, with other work."""

    def run(x: Any, ids: Any) -> Any:
        return square(layer(ep, x, ids)) + square(layer(ep, x, ids + 1))

    function = jax.grad(run)
    if order == 2:
        once = function
        function = jax.grad(lambda x, ids: square(once(x, ids)))

    def body(x: Any, ids: Any) -> Any:
        before = layer(ep, x, ids)
        return function(before, ids) + layer(ep, x, ids)

    text = lowered(mesh, body, check_vma=check_vma)
    found = calls(text)
    assert {call.target for call in found} == set(WHOLE)
    assert len(found) >= 4 + 8 * order
    assert afters(text) == chain(len(found))


def test_gradient_around_shard_map(mesh, ep) -> None:
    """The forward and the backward pass are two traces, with a chain each."""

    def body(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids) + layer(ep, x, ids + 1)

    run = mapped(mesh, body)
    gradient = jax.jit(jax.grad(lambda x, ids: square(run(x, ids))))
    text = gradient.lower(*arguments()).as_text()
    assert afters(text) == [*chain(4), *chain(4, 4)]


def test_two_handles(mesh, ep) -> None:
    other = p2p_handle(mesh)

    def body(x: Any, ids: Any) -> Any:
        return sum(layer(e, x, ids) for e in (ep, other, ep, other))

    found = calls(lowered(mesh, body))
    for e in (ep, other):
        own = [i for i, call in enumerate(found) if call.key == e.key]
        assert [found[i].after for i in own] == [None, *own[:-1]]
        assert len(own) == 4


def test_around_and_inside_a_scan(mesh, ep) -> None:
    def step(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids) + layer(ep, x, ids + 1), None

    def body(x: Any, ids: Any) -> Any:
        first = layer(ep, x, ids)
        looped, _ = jax.lax.scan(step, x, jnp.stack([ids, ids]))
        return first + looped + layer(ep, x, ids)

    assert lengths(calls(lowered(mesh, body))) == [4, 4]


def test_after_the_gradient_of_a_scan(mesh, ep) -> None:
    """Some traces of derivatives do not know the trace that goes on after them."""

    def step(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids), None

    def run(x: Any, ids: Any) -> Any:
        looped, _ = jax.lax.scan(jax.checkpoint(step), x, jnp.stack([ids, ids]))
        return square(looped)

    def body(x: Any, ids: Any) -> Any:
        first = layer(ep, x, ids)
        return first + jax.grad(run)(x, ids) + layer(ep, x, ids)

    assert lengths(calls(lowered(mesh, body)))[-1] == 4


def test_inner_jits(mesh, ep) -> None:
    """The inner trace is reused, so it must contain nothing of an outer trace."""
    inner = jax.jit(functools.partial(layer, ep))

    def body(x: Any, ids: Any) -> Any:
        first = jax_ep.dispatch(ep, x, ids)
        y = inner(x, ids) + inner(x, ids + 1)
        return y + jax_ep.combine(ep, first.tokens, first.route)

    for _ in range(2):
        text = lowered(mesh, functools.partial(body))
        assert lengths(calls(text)) == [2, 2]


def test_fewer_axes() -> None:
    """A call's results never vary over more axes than its operands."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    ep = p2p_handle(mesh)

    def body(x: Any, wide: Any, ids: Any) -> Any:
        return tuple(layer(ep, value, ids) for value in (x, wide, x))

    x, ids = arguments()
    specs = (P("ep"), P(("dp", "ep")), P("ep"))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs)
    text = jax.jit(run).lower(x, jnp.concatenate([x, x]), ids).as_text()
    assert afters(text) == [*chain(4), *chain(2, 4)]


def test_nothing_leaks(mesh, ep) -> None:
    def body(x: Any, ids: Any) -> Any:
        return jax.grad(lambda x: square(layer(ep, x, ids)))(x) + layer(ep, x, ids)

    with jax.checking_leaks():
        assert afters(lowered(mesh, body)) == chain(6)
    assert afters(lowered(mesh, functools.partial(body))) == chain(6)


def test_order_under_leak_checks(mesh, ep) -> None:
    """The same calls come after each other, in loops and in their gradients too."""

    def step(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids) + layer(ep, x, ids + 1), None

    def run(x: Any, ids: Any) -> Any:
        looped, _ = jax.lax.scan(jax.checkpoint(step), x, jnp.stack([ids, ids]))
        return square(looped) + square(jax.jit(functools.partial(layer, ep))(x, ids))

    def body(x: Any, ids: Any) -> Any:
        first = layer(ep, x, ids)
        both = jax.vmap(functools.partial(layer, ep), (0, None))(x[None], ids)
        return first + jax.grad(run)(x, ids) + both[0] + layer(ep, x, ids)

    wanted = calls(lowered(mesh, functools.partial(body)))
    assert lengths(wanted)[-1] == 6
    with jax.checking_leaks():
        assert calls(lowered(mesh, functools.partial(body))) == wanted


def test_ended_traces_are_let_go(mesh) -> None:
    traces = []
    ep = p2p_handle(mesh)

    def body(ep: Any, x: Any, ids: Any) -> Any:
        with take_current_trace() as trace:
            traces.append(weakref.ref(trace))
        return layer(ep, x, ids)

    for _ in range(2):
        lowered(mesh, functools.partial(body, ep))
    gc.collect()
    first, second = (trace() for trace in traces)
    assert first is None
    assert second is not None
    del second
    handle = weakref.ref(ep)
    del ep
    gc.collect()
    assert handle() is None


def test_threads_have_chains_of_their_own(mesh, ep) -> None:
    turn = threading.Barrier(2, timeout=300)
    texts = {}

    def body(x: Any, ids: Any) -> Any:
        for _ in range(3):
            turn.wait()
            x = layer(ep, x, ids)
        return x

    def trace(name: int) -> None:
        texts[name] = lowered(mesh, functools.partial(body))

    threads = [threading.Thread(target=trace, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert [afters(texts[i]) for i in range(2)] == [chain(6)] * 2
