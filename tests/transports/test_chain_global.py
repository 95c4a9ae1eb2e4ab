"""Calls of `jax_ep.sharded` on a p2p handle follow each other, by programs' texts.

Needs no GPU, like test_chain.py, which it complements.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

import jax_ep
from support import helpers
from support.call_order import arguments, p2p_handle, square
from support.call_order import ep as ep
from support.call_order import mesh as mesh

__all__ = ["ep", "mesh"]


def mapped_links(jaxpr: Any) -> list[int | None]:
    """For each shard_map of calls, the earlier one whose last result it takes."""
    made: dict[Any, int] = {}
    found: list[int | None] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name not in ("jit", "pjit"):
            continue
        (*_, last), (*_, given) = equation.outvars, equation.invars
        assert (given.aval.shape, given.aval.dtype) == ((2,), jnp.int32)
        found.append(made.get(given))
        made[last] = len(found) - 1
    return found


def independent(ep: Any, x: Any, ids: Any) -> Any:
    """Two dispatches with jax_ep.sharded, one of them in halves, and both combines."""
    first = jax_ep.sharded.dispatch(ep, x, ids)
    pending = jax_ep.sharded.dispatch_async(ep, x, ids)
    second = jax_ep.sharded.dispatch_wait(pending)
    y = jax_ep.sharded.combine(ep, second.tokens, second.route)
    return y + jax_ep.sharded.combine(ep, first.tokens, first.route)


def test_calls_on_global_arrays(mesh, ep) -> None:
    """Each has its own shard_map, in which the call comes after an argument."""
    for _ in range(2):
        jaxpr = jax.make_jaxpr(functools.partial(independent, ep))(*arguments())
        assert mapped_links(jaxpr) == [None, 0, 1, 2, 3]
    text = jax.jit(functools.partial(independent, ep)).lower(*arguments()).as_text()
    found = [line for line in text.splitlines() if "custom_call @ep_" in line]
    assert len(found) == 5
    for line in found:
        operands = re.search(r"@ep_\w+\((.*?)\)", line)
        assert operands is not None
        # The last argument of its function, not a constant.
        assert operands[1].split(", ")[-1].startswith("%arg"), line


def test_calls_on_constants_that_a_program_holds(mesh, ep) -> None:
    jaxpr = jax.make_jaxpr(lambda: independent(ep, *arguments()))()
    assert mapped_links(jaxpr) == [None, 0, 1, 2, 3]


def test_calls_on_global_arrays_of_two_handles(mesh, ep) -> None:
    other = p2p_handle(mesh)

    def run(x: Any, ids: Any) -> Any:
        return [jax_ep.sharded.dispatch(e, x, ids).tokens for e in (ep, other, ep)]

    assert mapped_links(jax.make_jaxpr(run)(*arguments())) == [None, None, 0]


def test_collective_calls_on_global_arrays_are_not_chained(mesh) -> None:
    config = helpers.make_config(**helpers.HALVES)
    with jax_ep.init(mesh, "ep", config, transport="collective") as ep:
        text = str(jax.make_jaxpr(functools.partial(independent, ep))(*arguments()))
        assert "i32[2] = broadcast" not in text


def test_gradient_of_calls_on_global_arrays(mesh, ep) -> None:
    """The forward pass is chained; tokens have no derivative."""
    gradient = jax.grad(lambda x, ids: square(independent(ep, x, ids)))
    text = jax.jit(gradient).lower(*arguments()).as_text()
    targets = re.findall(r"custom_call @(ep_\w+)", text)
    assert len(targets) == 5 + 4
