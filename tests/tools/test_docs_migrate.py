"""docs/migrate_others.md runs: its code before and after computes the same."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import ROOT, helpers
from support.pages import python_blocks

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGE = "docs/migrate_others.md"
HIDDEN, INNER, TOP_K, N = 16, 8, 2, 8


def stand_in_for_equinox() -> types.ModuleType:
    """The part of Equinox that the page uses: modules are frozen dataclass pytrees."""
    module: Any = types.ModuleType("equinox")

    class Module:
        def __init_subclass__(cls) -> None:
            dataclasses.dataclass(frozen=True)(cls)
            fields = dataclasses.fields(cls)
            static = [f.name for f in fields if f.metadata.get("static")]
            data = [f.name for f in fields if f.name not in static]
            jax.tree_util.register_dataclass(cls, data, static)

    module.Module = Module
    module.field = lambda static: dataclasses.field(metadata={"static": static})
    return module


@dataclasses.dataclass(frozen=True)
class TransformerEngine:
    """Its `ep_dispatch` and `ep_combine`, implemented with jax_ep."""

    ep: Any

    def dispatch(self, cfg: Any, ids: Any, tokens: Any, weights: Any, capacity: int):
        assert capacity == self.ep.recv_capacity
        d = jax_ep.sharded.dispatch(self.ep, tokens, ids, weights)
        ranks = self.ep.ep_size
        filled = (d.router_weights != 0)[:, None]
        rows = jnp.where(filled, d.tokens, jnp.nan)  # other rows are unspecified
        parts = (rows, d.router_weights)
        parts = (part.reshape(ranks, capacity, *part.shape[1:]) for part in parts)
        return *parts, d.route, d.group_sizes.reshape(ranks, -1), d.expert_counts

    def combine(
        self, cfg: Any, state: Any, counts: Any, out: Any, n: int, out_sharding: Any
    ):
        assert out_sharding == ("ep", None)
        y = jax_ep.sharded.combine(self.ep, out.reshape(-1, out.shape[-1]), state)
        assert len(y) == n
        return y


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    try:
        import equinox as eqx
    except ImportError:
        eqx = stand_in_for_equinox()
    names["eqx"] = eqx
    exec("\n".join(python_blocks(PAGE)), names)
    return names


@pytest.fixture(scope="module")
def layer() -> tuple[Any, list[np.ndarray]]:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    experts = 4 * mesh.size
    rng = np.random.default_rng(0)
    shapes = [(N * mesh.size, HIDDEN), (HIDDEN, experts)]
    shapes += [(experts, HIDDEN, INNER)] * 2 + [(experts, INNER, HIDDEN)]
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    arrays[2:] = [a / np.sqrt(a.shape[1]) for a in arrays[2:]]
    return mesh, arrays


def gradients(run: Any, arrays: list[np.ndarray]) -> list[np.ndarray]:
    def loss(*arrays: Any) -> Any:
        y = run(*arrays)
        return jnp.sum(jnp.sin(y)), y

    found, y = jax.jit(jax.grad(loss, range(len(arrays)), has_aux=True))(*arrays)
    return [np.asarray(a) for a in (y, *found)]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["slabs", "applied", "te", "global", "equinox"])
def test_all_compute_the_same_layer(page, layer, name: str) -> None:
    mesh, arrays = layer
    want = gradients(lambda tokens, *a: page["AllExperts"](*a, TOP_K)(tokens), arrays)
    specs = (P("ep"), P(), P("ep"), P("ep"), P("ep"))

    def mapped(run: Any) -> Any:
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("ep"))

    if name == "slabs":
        # Room for all of a rank's tokens: nothing is dropped.
        run = mapped(functools.partial(page["slabs"], top_k=TOP_K, capacity=N))
    elif name == "applied":
        run = mapped(functools.partial(page["applied"], top_k=TOP_K, mesh=mesh))
    elif name == "te":
        config = jax_ep.EPConfig(
            num_experts=4 * mesh.size,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            max_tokens_per_rank=N,
            dtype="float32",
        )
        engine = TransformerEngine(helpers.make_ep(mesh, config))
        page |= {"ep_dispatch": engine.dispatch, "ep_combine": engine.combine}
        run = functools.partial(
            page["with_te"],
            engine,
            top_k=TOP_K,
            capacity=engine.ep.recv_capacity,
            mesh=mesh,
        )
        page["with_te"].__globals__.update(page)
    elif name == "global":
        run = functools.partial(page["on_global_arrays"], top_k=TOP_K, mesh=mesh)
    else:

        def run(tokens: Any, *a: Any) -> Any:
            return page["Experts"](*a, TOP_K, mesh)(tokens)

    got = gradients(run, arrays)
    for a, b in zip(got, want, strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_lines_are_counted_right(page) -> None:
    text = "\n".join(python_blocks(PAGE))
    said = {"slabs": 18, "applied": 12, "with_te": 15}
    said |= {"on_global_arrays": 13, "AllExperts": 13, "Experts": 10}
    page_text = (ROOT / PAGE).read_text().replace("\n", " ")
    assert sorted(said.values()) == sorted(
        int(count) for count in re.findall(r"(\d+) lines", page_text)
    )
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in said:
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            code = [x for x in lines if x.strip() and not x.strip().startswith("#")]
            assert len(code) == said.pop(node.name), node.name
    assert not said
