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


class Loop(NamedTuple):
    """A loop whose body makes calls, in a function of its own.

    Attributes:
        after: the index of the loop that it comes after, or None.
        targets: the calls of its body.
        chained: whether the first call of the body comes after the loop's token, each
            other one after the one before, and the next iteration after the last one.
    """

    after: int | None
    targets: list[str]
    chained: bool


_TOKEN = "tensor<1xi32>"


def loops(text: str) -> list[Loop]:
    """The loops of a StableHLO text that pass a token from one to the next."""
    functions = {
        match[1]: match[0]
        for match in re.finditer(
            r"^  func\.func private @(\w+)\(.*?^  }", text, re.MULTILINE | re.DOTALL
        )
    }
    found: list[Loop] = []
    made_by: dict[str, int] = {}
    lines = text.splitlines()
    for at, line in enumerate(lines):
        head = re.match(r"( *)(%\d+):\d+ = stablehlo\.while\((.*?)\) : (.*)", line)
        if not head:
            continue
        types = re.findall(r"tensor<[^>]*>", head[4])
        if _TOKEN not in types:
            continue
        index = types.index(_TOKEN)
        given = [each.split(" = ") for each in head[3].split(", ")]
        inside, token = given[index]
        end = next(i for i in range(at, len(lines)) if lines[i] == f"{head[1]}}}")
        start = next(i for i in range(at, end) if lines[i] == f"{head[1]}}} do {{")
        body = "\n".join(lines[start:end])
        # The last statement of the body, from which the next iteration gets its token.
        passed = lines[end - 1].partition("stablehlo.return ")[2].split(", ")[index]
        # Older versions of JAX put the body into a function.
        if called := re.search(r"@(closed_call\w*)\((.*?)\)", body):
            body = functions[called[1]]
            inside = f"%arg{called[2].split(', ').index(inside)}"
            which = int(passed.partition("#")[2])
            returned = re.findall(r"^    return (.*?) :", body, re.MULTILINE)[-1]
            passed = returned.split(", ")[which]
        made = calls(body)
        targets = [call.target for call in made]
        first = re.search(r"custom_call @ep_\w+\((.*?)\)", body)
        assert first is not None
        name, _, result = passed.partition("#")
        barrier = re.search(
            rf"{name}:\d+ = stablehlo.optimization_barrier (.*?) :", body
        )
        assert barrier is not None
        last = barrier[1].split(", ")[int(result)]
        last_call = re.findall(r"(%\d+):\d+ = stablehlo.custom_call @ep_\w+", body)[-1]
        chained = (
            [call.after for call in made] == [None, *range(len(made) - 1)]
            and first[1].split(", ")[-1] == inside
            and last == f"{last_call}#{TOKEN_INDEX[targets[-1]]}"
        )
        found.append(Loop(made_by.get(token), targets, chained))
        made_by[f"{head[2]}#{index}"] = len(found) - 1
    return found


def chain(length: int, start: int = 0) -> list[int | None]:
    """What `afters` returns for one chain whose first call has index `start`."""
    return [None, *range(start, start + length - 1)]


def split_layer(ep: Any, x: jax.Array, ids: jax.Array) -> jax.Array:
    d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, ids))
    return jax_ep.combine_wait(jax_ep.combine_async(ep, d.tokens, d.route))
