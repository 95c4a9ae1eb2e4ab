"""Chained calls have the same results and exchanges as unchained ones; needs no GPU.

XLA's exchange runs behind p2p's interface.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep._transport import base
from jax_ep._transport.collective import Collective
from support import helpers
from support.call_order import arguments, layer, mapped, p2p_handle, split_layer, square


@pytest.fixture
def mesh():
    if jax.default_backend() != "cpu":
        # p2p's native module is replaced; on GPUs test_p2p*.py runs the real one.
        pytest.skip("fakes p2p on CPU devices")
    return helpers.make_mesh(2)


@pytest.fixture
def ep(mesh):
    return p2p_handle(mesh)


def tied(x: jax.Array, to: jax.Array) -> jax.Array:
    """`x`, made to depend on `to`."""
    return jax.lax.optimization_barrier((x, to))[0]


class Chained(Collective):
    """XLA's exchange with ordered calls: each depends on what it comes after."""

    name = "p2p"
    ordered = True

    def __init__(self) -> None:
        self.came_after: list[str] = []

    def _call(self, call: Any, ep: Any, *operands: Any) -> Any:
        *given, token = operands
        if not token:  # the second half of a whole call
            return call(ep, *given, token)
        (after,) = token
        self.came_after.append(f"{after.dtype}{list(after.shape)}")
        given = jax.tree.map(
            lambda x: tied(x, after) if isinstance(x, jax.Array) else x, given
        )
        out, _ = call(ep, *given, ())
        like = jax.tree.leaves(out)[0]
        return out, (tied(jax.lax.full_like(like, 0, jnp.int32, (1,)), like),)

    def dispatch(self, *args: Any) -> Any:
        return self._call(super().dispatch, *args)

    def dispatch_send(self, *args: Any) -> Any:
        return self._call(super().dispatch_send, *args)

    def dispatch_recv(self, *args: Any) -> Any:
        return self._call(super().dispatch_recv, *args)

    def dispatch_cached(self, *args: Any) -> Any:
        return self._call(super().dispatch_cached, *args)

    def combine(self, ep: Any, inputs: Any, wire: Any, after: Any) -> Any:
        whole = super().combine
        return self._call(
            lambda ep, inputs, after: whole(ep, inputs, wire, after), ep, inputs, after
        )

    def combine_send(self, ep: Any, inputs: Any, wire: Any, after: Any) -> Any:
        send = super().combine_send
        return self._call(
            lambda ep, inputs, after: send(ep, inputs, wire, after), ep, inputs, after
        )

    def combine_recv(
        self, ep: Any, sent: Any, sums: Any, like: Any, wire: Any, after: Any
    ) -> Any:
        receive = super().combine_recv
        return self._call(
            lambda ep, sent, sums, like, after: receive(
                ep, sent, sums, like, wire, after
            ),
            *(ep, sent, sums, like, after),
        )


@pytest.fixture
def runs(monkeypatch):
    """Lets handles of p2p run; returns the form of what each call came after."""
    chained = Chained()
    monkeypatch.setitem(base._registry, "p2p", chained)
    return chained.came_after


def stacked(ep: Any, one: Any, wrap: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    """The gradient of a scan over rematerialised layers `one`, and of one more."""

    def step(x: Any, _: Any) -> Any:
        return one(ep, x, ids) / 4, None

    def loss(x: Any) -> Any:
        y, _ = jax.lax.scan(wrap(step), x, jnp.arange(3.0))
        return square(one(ep, y, ids))

    return jax.grad(loss)(x)


@pytest.mark.few(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrapped", ["bare", "remat", "save_route"])
@pytest.mark.parametrize("one", [layer, split_layer])
def test_results_and_exchanges_are_the_same(
    mesh, ep, runs, one, wrapped, check_vma
) -> None:
    wrap = {
        "bare": lambda step: step,
        "remat": jax.checkpoint,
        "save_route": functools.partial(jax.checkpoint, policy=jax_ep.save_route),
    }[wrapped]
    plain = jax_ep.init(mesh, "ep", ep.config, transport="collective")
    results, counts = [], []
    for handle in (ep, plain):
        body = functools.partial(stacked, handle, one, wrap)
        run = jax.jit(mapped(mesh, body, check_vma=check_vma))
        text = run.lower(*arguments()).compile().as_text()
        counts.append(len(re.findall(r" all-to-all(?:-start)?\(", text)))
        results.append(run(*arguments()))
    helpers.assert_bits(*results)
    assert counts[0] == counts[1] > 0
    assert set(runs) == {"int32[1]"}


@pytest.mark.slow
def test_eager(mesh, ep, runs) -> None:
    def body(x: Any, ids: Any) -> Any:
        gradient = jax.grad(lambda x: square(layer(ep, x, ids)))(x)
        return gradient + layer(ep, x, ids)

    result = mapped(mesh, body)(*arguments())
    assert runs == ["int32[1]"] * 6
    helpers.assert_bits(result, jax.jit(mapped(mesh, body))(*arguments()))
