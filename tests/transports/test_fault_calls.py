"""The calls that tests of faults make equal those of the library, on any machine.

Those tests need several GPUs. Here their helpers run on all ranks at once.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import pytest

import jax_ep
from support import compare_transports, faults, helpers


@pytest.fixture(scope="module")
def scene() -> Any:
    return faults.Faulty(helpers.make_mesh(helpers.some_ranks(2)))


def operands(scene: Any, kind: str) -> list[Any]:
    d, (x, _, w) = scene.first, scene.args
    return {
        "dispatch": scene.args,
        "combine": [d.route, d.tokens, d.router_weights],
        "cached": [d.route, x, w],
    }[kind]


def combine(ep: Any, route: Any, rows: Any, w: Any) -> Any:
    return jax_ep.combine(ep, rows, route, w)


def cached(ep: Any, route: Any, x: Any, w: Any) -> Any:
    d = jax_ep.dispatch(ep, x, router_weights=w, route=route)
    return d.tokens, d.router_weights


def program(scene: Any, call: Any) -> Any:
    return compare_transports.mapped(scene.mesh, functools.partial(call, scene.ep))


@pytest.mark.parametrize(
    ("kind", "call", "public"),
    [
        ("dispatch", faults.dispatch, jax_ep.dispatch),
        ("combine", faults.combine, combine),
        ("combine", faults.combine_elsewhere, combine),
        ("cached", faults.cached, cached),
    ],
)
def test_results(scene: Any, kind: str, call: Any, public: Any) -> None:
    args = operands(scene, kind)
    found, want = (program(scene, each)(*args) for each in (call, public))
    for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        helpers.assert_bits(got, wanted)


def test_lines_of_combines_differ(scene: Any) -> None:
    """A call's tag depends on its line."""
    args = operands(scene, "combine")
    first, second = (
        re.findall(r"site = (\d+)", program(scene, call).lower(*args).as_text())
        for call in (faults.combine, faults.combine_elsewhere)
    )
    assert first
    assert len(first) == len(second)
    assert set(first).isdisjoint(second)
