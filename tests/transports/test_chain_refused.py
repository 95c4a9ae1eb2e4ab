"""Calls of a p2p handle that nothing would order are refused; needs no GPU."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._core import traces
from support import helpers
from support.call_order import afters, arguments, chain, layer, lowered, p2p_handle
from support.call_order import mesh as mesh
from support.errors import check_state, raises

CONCURRENT = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"


@pytest.fixture(params=["stream", "concurrent"])
def ep(request, mesh, monkeypatch):
    """A handle whose calls XLA may put on several streams."""
    if request.param == "stream":
        return p2p_handle(mesh, overlap="stream")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_foo=1 {CONCURRENT}")
    return p2p_handle(mesh)


def scanned(ep: Any, x: Any, ids: Any) -> Any:
    def step(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids), None

    return jax.lax.scan(step, x, jnp.stack([ids, ids]))[0]


def jitted(ep: Any, x: Any, ids: Any) -> Any:
    return jax.jit(functools.partial(layer, ep))(x, ids)


def branched(ep: Any, x: Any, ids: Any) -> Any:
    return jax.lax.cond(True, functools.partial(layer, ep), lambda x, _: x, x, ids)


def remade(ep: Any, x: Any, ids: Any) -> Any:
    return jax.checkpoint(functools.partial(layer, ep))(x, ids)


def gradient(inner: Any) -> Any:
    """Of an inner function, which JAX traces for its derivative."""

    def run(ep: Any, x: Any, ids: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(inner(ep, x, ids).astype(jnp.float32)))(x)

    return run


def stacked(ep: Any, x: Any, ids: Any) -> Any:
    """Rematerialised layers in a scan, as in a trainer."""
    step = jax.checkpoint(lambda x, ids: (layer(ep, x, ids), None))
    return jax.lax.scan(step, x, jnp.stack([ids, ids]))[0]


INNER = [scanned, jitted, branched, remade, gradient(scanned), gradient(stacked)]


@pytest.mark.few(3)
@pytest.mark.parametrize("inner", INNER)
def test_first_calls_of_inner_functions(mesh, ep, inner) -> None:
    def body(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids) + inner(ep, x, ids)

    with raises() as caught:
        lowered(mesh, body)
    check_state(caught, "dispatch", "beside another", "after a call outside")
    plain = p2p_handle(mesh)
    ep = jax_ep.init(mesh, "ep", plain.config, transport="collective")
    assert "all_to_all" in lowered(mesh, body)


@pytest.mark.parametrize("inner", INNER)
def test_calls_after_inner_functions(mesh, ep, inner) -> None:
    def body(x: Any, ids: Any) -> Any:
        return inner(ep, x, ids) + layer(ep, x, ids)

    with raises() as caught:
        lowered(mesh, body)
    check_state(caught, "dispatch", "beside another", "made a call before it")


@pytest.mark.parametrize("inner", INNER)
def test_an_inner_function_alone(mesh, ep, inner) -> None:
    """Nothing outside of it that it could run beside, as in a stack of layers."""
    text = lowered(mesh, functools.partial(inner, ep))
    assert "ep_dispatch" in text


def test_all_calls_in_one_trace(mesh, ep) -> None:
    def body(x: Any, ids: Any) -> Any:
        return gradient(layer)(ep, x, ids) + layer(ep, x, ids)

    assert afters(lowered(mesh, body)) == chain(6)


def test_gradients_of_global_calls(mesh, ep) -> None:
    """Their passes have a shard_map each, as those of Flax's layers, and share data."""

    def run(x: Any, ids: Any) -> Any:
        y = x
        for _ in range(2):
            d = jax_ep.sharded.dispatch(ep, y, ids)
            y = jax_ep.sharded.combine(ep, d.tokens, d.route)
        return jnp.sum(y.astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(run))
    assert step.lower(*arguments()).as_text().count("custom_call @ep_") == 8


def test_handles_of_their_own(mesh, ep) -> None:
    other = p2p_handle(mesh, overlap=ep.config.overlap)

    def body(x: Any, ids: Any) -> Any:
        return layer(ep, x, ids) + scanned(other, x, ids) + layer(ep, x, ids)

    assert "ep_dispatch" in lowered(mesh, body)


def test_fewer_axes(ep) -> None:
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    ep = p2p_handle(mesh, overlap=ep.config.overlap)

    def body(wide: Any, x: Any, ids: Any) -> Any:
        return layer(ep, wide, ids), layer(ep, x, ids)

    x, ids = arguments()
    specs = (P(("dp", "ep")), P("ep"))
    run = jax.shard_map(body, mesh=mesh, in_specs=(*specs, P("ep")), out_specs=specs)
    with raises() as caught:
        jax.jit(run).lower(jnp.concatenate([x, x]), x, ids)
    check_state(caught, "dispatch", "fewer mesh axes")


class TestWhereJaxLacks:
    """What tells traces apart is private to JAX."""

    def refused(self, mesh: Any, name: str) -> None:
        ep = p2p_handle(mesh)
        with raises() as caught:
            lowered(mesh, functools.partial(layer, ep))
        check_state(caught, "dispatch", "one after the other", f"lacks {name}")
        with raises() as caught:
            jax.jit(functools.partial(jax_ep.sharded.dispatch, ep)).lower(*arguments())
        check_state(caught, "sharded.dispatch", f"lacks {name}")
        plain = jax_ep.init(mesh, "ep", ep.config, transport="collective")
        assert "all_to_all" in lowered(mesh, functools.partial(layer, plain))

    def test_the_current_trace(self, mesh, monkeypatch) -> None:
        monkeypatch.setattr(traces, "_core", types.SimpleNamespace)
        self.refused(mesh, "jax._src.core.take_current_trace")

    def test_the_trace_of_a_vmap(self, mesh, monkeypatch) -> None:
        monkeypatch.setattr(traces, "_batching", types.SimpleNamespace)
        self.refused(mesh, "jax._src.interpreters.batching.BatchTrace")

    def test_the_trace_around(self, mesh, monkeypatch) -> None:
        monkeypatch.setattr(traces, "current_trace", types.SimpleNamespace)
        self.refused(mesh, "parent_trace of SimpleNamespace")
