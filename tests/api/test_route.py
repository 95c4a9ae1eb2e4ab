"""dispatch along a route gives the same as a dispatch of these tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, options
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

RANKS, N = 4, 6
CASES = {
    "plain": ({}, 16),
    "fewer_columns": ({}, 8),
    "one_rank_group": ({"num_experts": 4, "top_k": 2, "dtype": "float32"}, 4),
    "drops_and_padding": ({"recv_capacity": 9, "expert_alignment": 4}, 8),
    "tail": ({"zero_tail": False}, 16),
    "quantised": ({"dispatch_format": "mxfp8", "hidden_size": 64}, 32),
    "quantised_gradients": (
        {"grad_format": "fp8_block128", "hidden_size": 256, "dtype": "float32"},
        128,
    ),
    "wires": ({"combine_dtype": "float32", "hidden_size": 32}, 16),
    **{mode: (changes, 8) for mode, changes in options.MODES.items()},
}


def along(ep: Any, mesh: Any, weighted: bool, columns: int) -> Any:
    """Both dispatches of one rank, and their cotangents of tokens and weights."""

    def body(first, tokens, ids, w, cotangents):
        route = jax_ep.dispatch(ep, first, ids, w).route
        w = w if weighted else None

        def sent(whole: bool, tokens, w):
            if whole:
                d = jax_ep.dispatch(plain_of(ep, mesh), tokens, ids, w)
            else:
                d = jax_ep.dispatch(ep, tokens[:, :columns], None, w, route=route)
            return (d.tokens, d.router_weights), d

        results = []
        for whole in (False, True):
            run = functools.partial(sent, whole)
            (rows, row_weights), pull, d = jax.vjp(run, tokens, w, has_aux=True)
            given = cotangents[:, : rows.shape[1]]
            # The same cotangents, with zeros in columns that were not sent.
            given = jnp.where(jnp.arange(rows.shape[1]) < columns, given, 0)
            d = dataclasses.replace(d, route=None)
            results.append((d, pull((given.astype(rows.dtype), jnp.cos(row_weights)))))
        return results

    return jax.jit(moe.sharded(mesh, body))


@functools.cache
def plain_of(ep: Any, mesh: Any) -> Any:
    """A handle that sends tokens unquantised, but gradients as `ep` does."""
    config = dataclasses.replace(ep.config, dispatch_format="bf16")
    return ep if config == ep.config else helpers.make_ep(mesh, config)


@pytest.mark.few(3)
@pytest.mark.parametrize("weighted", [True, False], ids=["weights", "none"])
@pytest.mark.parametrize("name", CASES)
def test_equals_a_dispatch_of_these_tokens(name: str, weighted: bool) -> None:
    changes, columns = CASES[name]
    config = helpers.make_config(**changes)
    mesh = helpers.make_mesh(RANKS)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(columns)
    for routing in ("invalid", "duplicates"):
        first, inputs = (
            options.make_inputs(
                rng, config, RANKS, n=N, routing=routing, fill=helpers.normal
            )
            for _ in range(2)
        )
        dtype = inputs.tokens[0].dtype
        shape = (ep.recv_capacity, config.hidden_size)
        cotangents = [helpers.normal(rng, shape, dtype) for _ in inputs.ids]
        given = (first.tokens, inputs.tokens, inputs.ids, inputs.weights, cotangents)
        run = along(ep, mesh, weighted, columns)
        part, whole = run(*(helpers.put(mesh, each) for each in given))
        for field in dataclasses.fields(part[0]):
            got, want = (getattr(d, field.name) for d, _ in (part, whole))
            if field.name == "tokens":
                want = want[:, :columns]
            if field.name in ("tokens", "router_weights") and not config.zero_tail:
                ends = np.asarray(whole[0].row_offsets).reshape(RANKS, -1)[:, -1]
                got, want = (
                    np.concatenate(
                        [a[:end] for a, end in zip(parts, ends, strict=True)]
                    )
                    for parts in (
                        np.split(np.asarray(each), RANKS) for each in (got, want)
                    )
                )
            if isinstance(want, jax.Array | np.ndarray):
                helpers.assert_bits(got, want, field.name)
            else:
                assert got == want, field.name
        for got, want in zip(*map(jax.tree.leaves, (part[1], whole[1])), strict=True):
            helpers.assert_bits(got, want)
        assert np.asarray(part[1][0], np.float32).any()


def test_layer_of_two_tensors() -> None:
    """Combined along the same route, with and without vmap and remat."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(dtype="float32")
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(5)
    made = [
        helpers.make_inputs(rng, config, mesh.size, n=N, fill=helpers.normal)
        for _ in range(2)
    ]
    x, ids, w = (
        jnp.stack([np.concatenate(getattr(each, name)) for each in made])
        for name in ("tokens", "ids", "weights")
    )

    def layer(x, ids, w):
        d = jax_ep.dispatch(ep, x, ids, w)
        beside = jax_ep.dispatch(ep, 2 * x[:, :8], route=d.route)
        rows = d.tokens.at[:, :8].multiply(beside.tokens)
        return jax_ep.combine(ep, rows, beside.route, d.router_weights)

    def gradients(run, x, ids, w):
        return jax.grad(lambda x, w: jnp.sum(run(x, ids, w) ** 2), (0, 1))(x, w)

    def mapped(run):
        spec = P(None, "ep")
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))

    def one_by_one(x, ids, w):
        found = [gradients(layer, *(a[i] for a in (x, ids, w))) for i in range(2)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *found)

    want = mapped(one_by_one)(x, ids, w)
    kept = jax.checkpoint(layer, policy=jax_ep.save_route)
    for run in (layer, kept):
        got = mapped(jax.vmap(functools.partial(gradients, run)))(x, ids, w)
        for a, b in zip(got, want, strict=True):
            assert np.asarray(b).any()
            helpers.assert_bits(a, b)
    text = str(
        jax.make_jaxpr(mapped(jax.vmap(functools.partial(gradients, kept))))(x, ids, w)
    )
    assert "jax_ep_rows" in text


def test_sharded() -> None:
    mesh, config = helpers.make_mesh(RANKS), helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(1), config, RANKS, fill=helpers.normal
    )
    x, ids, w = (helpers.put(mesh, each) for each in dataclasses.astuple(inputs))
    d = jax_ep.sharded.dispatch(ep, x, ids, w)
    again = jax_ep.sharded.dispatch(ep, x[:, :8], None, w, route=d.route)
    helpers.assert_bits(again.tokens, d.tokens[:, :8])
    helpers.assert_bits(again.router_weights, d.router_weights)
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, x, ids, w, route=d.route)
    check_form(caught, "sharded.dispatch", "topk_ids", "None with route")


WRONG: dict[str, Any] = {
    "ids": ({"ids": True}, "topk_ids must be None with route"),
    "scale": ({"scale": True}, "input_scale must be None with route"),
    "columns": (
        {"columns": 12},
        "tokens must have at most hidden_size = 16 columns, a multiple of 8",
        "(8, 12)",
    ),
    "more_columns": ({"columns": 24}, "at most hidden_size = 16 columns"),
    "tokens": ({"n": 4}, "tokens must be [n, columns] with n = 8", "(4, 16)"),
    "dtype": ({"dtype": "float32"}, "tokens must be bfloat16, got float32"),
    "weights": ({"weights": (8, 2)}, "router_weights must be [n, K] with n = 8"),
    "other_handle": ({"other": True}, "route must come from a dispatch of the same ep"),
    "no_route": ({"route": 3}, "route must be the `route` of a Dispatched"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, *words = WRONG[name]
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, helpers.make_config())
    other = helpers.init(mesh)

    def body():
        ids = jnp.zeros((8, 3), jnp.int32)
        dispatched = other if changes.get("other") else ep
        route = jax_ep.dispatch(dispatched, jnp.zeros((8, 16), "bfloat16"), ids).route
        shape = changes.get("n", 8), changes.get("columns", 16)
        shape_of_weights = changes.get("weights")
        return jax_ep.dispatch(
            ep,
            jnp.zeros(shape, changes.get("dtype", "bfloat16")),
            ids if changes.get("ids") else None,
            shape_of_weights and jnp.zeros(shape_of_weights),
            input_scale=1.0 if changes.get("scale") else None,
            route=changes.get("route", route),
        )

    with raises() as caught:
        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep")))
    check_form(caught, "dispatch", *words)


def test_neither_ids_nor_a_route() -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.make_ep(mesh, helpers.make_config())

    def body():
        return jax_ep.dispatch(ep, jnp.zeros((8, 16), "bfloat16")).tokens

    with raises() as caught:
        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep")))
    check_form(caught, "dispatch", "topk_ids", "None")
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, jnp.zeros((8 * mesh.size, 16), "bfloat16"))
    check_form(caught, "sharded.dispatch", "topk_ids", "None")
