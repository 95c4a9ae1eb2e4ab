"""Chained calls have the results and the exchanges of unchained ones; needs no GPU.

XLA's exchange runs behind p2p's interface.
"""

from __future__ import annotations

import functools
import re
import types
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import pytest
from test_chain import arguments, layer, mapped, p2p_handle, square
from test_chain_options import split_layer

import jax_ep
from jax_ep._ops import dispatch
from jax_ep._transport import collective


@pytest.fixture
def mesh():
    if jax.default_backend() != "cpu":
        # Its native module is replaced; on GPUs test_p2p*.py runs the real one.
        pytest.skip("imagines p2p on CPU devices")
    return helpers.make_mesh(2)


@pytest.fixture
def ep(mesh):
    return p2p_handle(mesh)


def tied(x: jax.Array, to: jax.Array) -> jax.Array:
    """`x`, which now needs `to`."""
    return jax.lax.optimization_barrier((x, to))[0]


def done(out: Any) -> jax.Array:
    like = jax.tree.leaves(out)[0]
    return tied(jax.lax.full_like(like, 0, jnp.int32, (1,)), like)


@pytest.fixture
def runs(monkeypatch):
    """Lets handles of p2p run; the form of what each call came after."""
    given: list[str] = []

    def chained(ordinary: Any, operand: int, yields: bool) -> Any:
        def call(ep: Any, *operands: Any) -> Any:
            *first, after = operands
            given.append(f"{after.dtype}{list(after.shape)}")
            first[operand] = jax.tree.map(lambda x: tied(x, after), first[operand])
            out = ordinary(ep, *first)
            return (*out, done(out[0])) if yields else out

        return call

    module = types.SimpleNamespace(
        dispatch=chained(collective.dispatch, 0, False),
        dispatch_cached=chained(collective.dispatch_cached, 1, True),
        combine=chained(collective.combine, 1, True),
        held_rows=collective.held_rows,
        dispatch_send=chained(collective.dispatch_send, 0, True),
        dispatch_place=chained(collective.dispatch_place, 2, False),
        combine_send=chained(collective.combine_send, 1, True),
        combine_sum=chained(collective.combine_sum, 0, True),
    )
    monkeypatch.setitem(dispatch._TRANSPORTS, "p2p", module)
    return given


def stacked(ep: Any, one: Any, wrap: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    """Gradient of rematerialised layers `one` in a scan, and of one more."""

    def step(x: Any, _: Any) -> Any:
        return one(ep, x, ids) / 4, None

    def loss(x: Any) -> Any:
        y, _ = jax.lax.scan(wrap(step), x, jnp.arange(3.0))
        return square(one(ep, y, ids))

    return jax.grad(loss)(x)


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


def test_eager(mesh, ep, runs) -> None:
    def body(x: Any, ids: Any) -> Any:
        gradient = jax.grad(lambda x: square(layer(ep, x, ids)))(x)
        return gradient + layer(ep, x, ids)

    result = mapped(mesh, body)(*arguments())
    assert runs == ["int32[1]"] * 6
    helpers.assert_bits(result, jax.jit(mapped(mesh, body))(*arguments()))
