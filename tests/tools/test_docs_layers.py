"""docs/layers.md and migrate.md run, and what they say about other layers is true."""

from __future__ import annotations

import ast
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli.bench import ragged
from jax_ep.router import Router
from support import ROOT, helpers, moe_dense
from support.pages import python_blocks

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
    kept = names["sharded"].gate_up[...]
    assert kept.sharding.shard_shape(kept.shape)[0] == 2  # of 2 experts per device
    assert float(names["hash_aux"].z_loss) > 0
    assert np.isfinite(np.asarray(names["hash_y"], np.float32)).all()
    assert names["one_token"].shape == (1, 1, 64)
    assert names["biased"].down_bias[...].shape == (2 * names["devices"], 64)
    assert np.diff(names["placement"].offsets).sum() == 3 * names["devices"]
    assert names["seen"].expert_rows.sum() == 2 * 32 * names["devices"]
    names["ep"].close()
    assert names["result"].shape == names["x"].shape
    assert not np.any(names["dropped"])
    moe, optimizer = (names[name] for name in ("moe", "optimizer"))
    before = np.asarray(moe.down[...])
    names["save"](tmp_path / "state", moe, optimizer)
    moe.down[...] = 0 * moe.down[...]
    names["restore"](tmp_path / "state", names["mesh"], moe, optimizer)
    np.testing.assert_array_equal(moe.down[...], before)


def test_both_sides_of_the_migration_agree(monkeypatch):
    names: dict = {}
    exec("\n".join(python_blocks("docs/migrate.md")), names)
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged.reference_exchange)
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
        functools.partial(names["moe_applied"], top_k=TOP_K, mesh=mesh),
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


def test_lines_that_the_migration_counts():
    text = (ROOT / "docs" / "migrate.md").read_text()
    page = " ".join(text.split())
    counts = {}
    for block in python_blocks("docs/migrate.md"):
        for node in ast.parse(block).body:
            code = block.splitlines()[node.lineno - 1 : node.end_lineno]
            code = [line for line in code if line.split("#")[0].strip()]
            target = getattr(node, "targets", [None])[0]
            name = getattr(node, "name", getattr(target, "id", ""))
            counts[name] = len(code)
    before, applied = counts["moe_before"], counts["moe_applied"]
    said = f"`moe_before` has {before} lines of code, `moe_applied` {applied}"
    assert said in page, said
    change = re.search(r"```diff\n(.*?)```", text, re.DOTALL)[1]
    added = [line for line in change.splitlines() if line[:1] == "+" and line[1:]]
    said = f"{len(added)} lines of code instead of"
    assert said in page, said


def test_migrated_layers_cast_float32_experts():
    names: dict = {}
    exec("\n".join(python_blocks("docs/migrate.md")), names)
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    experts = 4 * mesh.size
    rng = np.random.default_rng(2)
    tokens = rng.standard_normal((N * mesh.size, HIDDEN)).astype(jnp.bfloat16)
    shapes = [(HIDDEN, experts), *[(experts, HIDDEN, INNER)] * 2]
    shapes.append((experts, INNER, HIDDEN))
    params = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    with names["make_ep"](mesh, experts, TOP_K, HIDDEN, N) as ep:
        after, in_one = (
            names["run_layer"](mesh, functools.partial(layer, ep), tokens, *params)
            for layer in (names["moe_after"], names["moe_in_one"])
        )
    assert after.dtype == in_one.dtype == jnp.bfloat16
    after, in_one = (np.asarray(y, np.float32) for y in (after, in_one))
    np.testing.assert_allclose(after, in_one, atol=0.02 * np.abs(in_one).max())


def switch_loss(ids, scores, sequences):
    """The loss per sequence, with a softmax of scores `[n, E]`; ids are `[n, K]`."""
    losses = []
    for chosen, mine in zip(
        np.split(np.asarray(ids), sequences),
        np.split(np.asarray(scores, np.float64), sequences),
        strict=True,
    ):
        tokens, experts = mine.shape
        shares = np.exp(mine) / np.exp(mine).sum(1, keepdims=True)
        tokens_of = [np.count_nonzero(chosen == expert) for expert in range(experts)]
        losses.append(experts * np.dot(tokens_of, shares.sum(0)) / tokens**2)
    return np.mean(losses)


def test_losses_of_maxtext():
    """migrate.md's figures, its code and the formula in NumPy agree."""
    names: dict = {}
    exec("\n".join(python_blocks("docs/migrate.md")), names)
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    sequences, experts, top_k = 8, 16, 4
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((8 * sequences, experts)).astype(np.float32)
    bias = 0.3 * rng.standard_normal(experts).astype(np.float32)
    soft = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    kinds = {
        "Mixtral": (names["MIXTRAL"], logits),
        "DeepSeek-V2": (names["DEEPSEEK_V2"], soft),
        "DeepSeek-V3": (names["DEEPSEEK_V3"], 1 / (1 + np.exp(-logits)) + bias),
    }
    # Tokens are the logits, as the router's matrix is the identity.
    params = {
        "router": np.eye(experts, dtype=np.float32),
        "gate_up": np.ones((experts, experts, 2, INNER), np.float32),
        "down": np.ones((experts, INNER, experts), np.float32),
    }
    specs = {"router": P(), "gate_up": P("ep"), "down": P("ep")}
    sizes = experts, top_k, experts, len(logits) // mesh.size
    ep = names["make_ep"](mesh, *sizes, "float32")
    page = (ROOT / "docs" / "migrate.md").read_text()
    for kind, (router, scores) in kinds.items():
        biased = router.score == "sigmoid"
        extra = {"router_bias": bias} if biased else {}

        def body(tokens, params, router=router):
            here = sequences // mesh.size
            return names["layer_with_maxtext_loss"](ep, tokens, params, router, here)

        run = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(P("ep"), specs | dict.fromkeys(extra, P())),
            out_specs=(P("ep"), P()),
        )
        _, found = jax.jit(run)(logits, params | extra)
        routing = jax_ep.router.route(
            logits, top_k, router, bias=bias if biased else None
        )
        np.testing.assert_allclose(
            found, switch_loss(routing.ids, scores, sequences), rtol=1e-5
        )
        ours = top_k * float(jax_ep.router.losses(routing).balance_loss)
        row = f"| {kind} | {0.01 * float(found):.4f} | {0.01 * ours:.4f} |"
        assert row in page, row
    ep.close()


def test_experts_sharded_over_a_data_axis():
    names: dict = {}
    exec("\n".join(python_blocks("docs/migrate.md")), names)
    mesh = helpers.make_mesh(helpers.fit({"data": 2, "ep": 2}))
    experts = 4 * mesh.shape["ep"]
    ep = names["make_ep"](mesh, experts, TOP_K, HIDDEN, N, "float32")
    rng = np.random.default_rng(3)
    shapes = {"router": (HIDDEN, experts), "gate_up": (experts, HIDDEN, 2, INNER)}
    shapes["down"] = (experts, INNER, HIDDEN)
    params = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    tokens = rng.standard_normal((N * mesh.size, HIDDEN)).astype(np.float32)
    batch, whole = P(("data", "ep")), {"router": P(), "gate_up": P("ep")}

    def plain(ep, tokens, params):
        return jax.shard_map(
            lambda tokens, params: jax_ep.moe_ffn(ep, tokens, params)[0],
            mesh=mesh,
            in_specs=(batch, whole | {"down": P("ep")}),
            out_specs=batch,
        )(tokens, params)

    def grad(layer):
        return jax.jit(
            jax.grad(lambda params, tokens: jnp.mean(layer(ep, tokens, params) ** 2))
        )

    sharded = {
        name: jax.device_put(value, NamedSharding(mesh, names["FSDP"][name]))
        for name, value in params.items()
    }
    lowered = grad(names["fsdp_layer"]).lower(sharded, tokens)
    text = lowered.as_text()
    assert text.count('"stablehlo.reduce_scatter"') == 2
    assert text.count('"stablehlo.all_gather"') == 4  # again in the backward pass
    found = lowered.compile()(sharded, tokens)
    for name, want in grad(plain)(params, tokens).items():
        assert found[name].sharding.is_equivalent_to(sharded[name].sharding, want.ndim)
        np.testing.assert_allclose(
            found[name], want, atol=1e-5 * float(np.abs(want).max())
        )
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
