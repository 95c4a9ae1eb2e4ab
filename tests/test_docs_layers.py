"""docs/layers.md runs; the two sides of docs/migrate.md return the same tokens."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys

import helpers
import jax
import jax.numpy as jnp
import moe_dense
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_readme import ROOT, python_blocks

from jax_ep.router import Router

pytestmark = pytest.mark.usefixtures("quick_compiles")

HIDDEN, INNER, TOP_K, N = 16, 8, 2, 8


def test_layers_page_runs(tmp_path):
    for name in ("flax", "optax", "orbax.checkpoint"):
        pytest.importorskip(name)
    names: dict = {}
    exec("\n".join(python_blocks("docs/layers.md")), names)
    assert names["y"].shape == (names["devices"] * 32, 64)
    grads = np.asarray(names["grads"].down[...], np.float32)
    assert np.abs(grads).max() > 0
    assert float(names["balance_loss"]) > 0.5
    names["ep"].close()
    moe, optimizer = (names[name] for name in ("moe", "optimizer"))
    before = np.asarray(moe.down[...])
    names["save"](tmp_path / "state", moe, optimizer)
    moe.down[...] = 0 * moe.down[...]
    names["restore"](tmp_path / "state", names["mesh"], moe, optimizer)
    np.testing.assert_array_equal(moe.down[...], before)


def reference_exchange():
    """benchmarks/ragged.py has one; XLA's CPU compiler has no ragged_all_to_all."""
    path = pathlib.Path(ROOT) / "benchmarks" / "ragged.py"
    spec = importlib.util.spec_from_file_location("ragged_for_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.reference_exchange


def test_both_sides_of_the_migration_agree(monkeypatch):
    names: dict = {}
    exec("\n".join(python_blocks("docs/migrate.md")), names)
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", reference_exchange())
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    experts = 4 * mesh.size
    rng = np.random.default_rng(0)
    shapes = [(N * mesh.size, HIDDEN), (HIDDEN, experts)]
    shapes += [(experts, HIDDEN, INNER)] * 2 + [(experts, INNER, HIDDEN)]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    ep = names["make_ep"](mesh, experts, TOP_K, HIDDEN, N, "float32")
    sides = (
        functools.partial(names["moe_before"], top_k=TOP_K),
        functools.partial(names["moe_after"], ep),
        functools.partial(names["moe_in_one"], ep),
    )
    specs = (P("ep"), P(), P("ep"), P("ep"), P("ep"))
    before, *others = (
        jax.jit(
            jax.shard_map(
                side, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False
            )
        )(*arrays)
        for side in sides
    )
    assert np.abs(np.asarray(before)).max() > 1
    for y in others:
        np.testing.assert_allclose(y, before, rtol=1e-4, atol=1e-4)
    ep.close()


def test_gradients_of_a_pytree_are_the_dense_formulas():
    names: dict = {"__name__": "migrate"}
    exec("\n".join(python_blocks("docs/migrate.md")), names)
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    sizes = moe_dense.EXPERTS, moe_dense.TOP_K, moe_dense.HIDDEN, N
    ep = names["make_ep"](mesh, *sizes, "float32")
    params, router = moe_dense.params(shared=False), Router()
    tokens = np.random.default_rng(1).standard_normal((N * mesh.size, sizes[2]))
    tokens = tokens.astype(np.float32)
    found = names["grad"](names["Experts"](**params), ep, tokens)
    scores = moe_dense.scores(params, tokens, router)
    chosen = moe_dense.chosen_experts(scores, router, None, moe_dense.TOP_K)

    def dense(params):
        y, balance, _ = moe_dense.layer(params, tokens, chosen, router)
        return jnp.mean(y**2) + 1e-2 * balance

    for name, want in jax.jit(jax.grad(dense))(params).items():
        got = getattr(found, name)
        np.testing.assert_allclose(got, want, atol=1e-3 * np.abs(want).max())
    ep.close()
