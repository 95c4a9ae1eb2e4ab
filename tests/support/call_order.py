"""Finds the calls of a p2p handle in a program's text, and what each comes after."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers

# The index of the result that a later call takes as its token: a dispatch's num_dropped
# or num_invalid, or another call's done.
WHOLE = {"ep_dispatch": 9, "ep_dispatch_cached": 2, "ep_combine": 2}
HALVES = {
    "ep_dispatch_send": 2,
    "ep_dispatch_recv": 9,
    "ep_combine_send": 1,
    "ep_combine_recv": 1,
}
TOKEN_INDEX = WHOLE | HALVES


@pytest.fixture
def mesh():
    if jax.default_backend() != "cpu":
        # p2p's native module is replaced; on GPUs test_p2p*.py runs the real one.
        pytest.skip("fakes p2p on CPU devices")
    return helpers.make_mesh(2)


def p2p_handle(mesh: Any, **changes: Any) -> Any:
    """A handle without windows that traces as a p2p handle does."""
    config = helpers.make_config(**helpers.HALVES | changes)
    ep = jax_ep.init(mesh, "ep", config, transport="collective")
    vars(ep)["transport"] = "p2p"
    return ep


@pytest.fixture
def ep(mesh):
    return p2p_handle(mesh)


def arguments(ranks: int = 2) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(3)
    config = helpers.make_config()
    x = rng.standard_normal((ranks * 8, config.hidden_size))
    ids = [helpers.make_ids(rng, config, 8, "full") for _ in range(ranks)]
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(np.concatenate(ids))


def mapped(mesh: Any, body: Any, **options: Any) -> Any:
    spec = P("ep")
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def lowered(mesh: Any, body: Any, **options: Any) -> str:
    return jax.jit(mapped(mesh, body, **options)).lower(*arguments()).as_text()


def layer(ep: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    d = jax_ep.dispatch(ep, x, ids)
    return jax_ep.combine(ep, d.tokens, d.route)


def square(x: jax.Array) -> jax.Array:
    return jnp.sum(x.astype(jnp.float32) ** 2)


class Call(NamedTuple):
    """One custom call, and the index of the call that it comes after.

    `after` is None for a call that comes after a constant.
    """

    target: str
    key: int
    after: int | None


def calls(text: str) -> list[Call]:
    """The calls of a StableHLO text, in order; checks the form of their tokens."""
    found: list[Call] = []
    defined: dict[str, int | None] = {}
    passed: dict[str, list[str]] = {}  # through a barrier
    for line in text.splitlines():
        if "func.func" in line:
            defined, passed = {}, {}
        if not (result := re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line)):
            continue
        name, operation = result.groups()
        call = re.match(r"stablehlo\.custom_call @(ep_\w+)\((.*?)\)", operation)
        defined[name] = len(found) if call else None
        if barrier := re.match(r"stablehlo\.optimization_barrier (.*?) :", operation):
            passed[name] = barrier[1].split(", ")
        if not call:
            continue
        value, _, index = call[2].split(", ")[-1].partition("#")
        if value in passed:
            value, _, index = passed[value][int(index or 0)].partition("#")
        after = defined.get(value)
        if after is not None:
            assert int(index) == TOKEN_INDEX[found[after].target]
        kind = re.search(r" : \((.*?)\) -> ", operation)
        assert kind is not None
        assert kind[1].split(", ")[-1] == "tensor<1xi32>"
        key = re.search(r"key = (-?\d+) : i64", operation)
        assert key is not None
        found.append(Call(call[1], int(key[1]), after))
    return found


def afters(text: str) -> list[int | None]:
    return [call.after for call in calls(text)]


def chain(length: int, start: int = 0) -> list[int | None]:
    """What `afters` returns for one chain whose first call has index `start`."""
    return [None, *range(start, start + length - 1)]


def split_layer(ep: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, ids))
    return jax_ep.combine_wait(jax_ep.combine_async(ep, d.tokens, d.route))
