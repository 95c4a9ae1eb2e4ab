"""First halves of `overlap="stream"`: one array, on XLA's stream of collectives."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep._native import ffi, tables
from jax_ep._transport import p2p
from jax_ep._transport.base import DispatchInputs
from support import helpers
from support.errors import check_form, raises
from support.gpus import needs_stream

TOKENS, TOP_K = 3, 2
SIZES = {"n": TOKENS, "K": TOP_K}
TOTAL = 4 + TOKENS * TOP_K + 1  # the sizes of pending, slot_of and num_invalid


def make_ep(overlap: str) -> Any:
    config = helpers.make_config(overlap=overlap, top_k=TOP_K)
    return types.SimpleNamespace(
        config=config, transport="p2p", key=7, route_ranks=2, groups=2, recv_capacity=8
    )


def send(ep: Any, x: jax.Array) -> tuple[jax.Array, ...]:
    tokens = jnp.zeros((TOKENS, ep.config.hidden_size)) + x[0]
    tokens = tokens.astype(ep.config.dtype)
    ids = jnp.zeros((TOKENS, TOP_K), jnp.int32)
    inputs = DispatchInputs(tokens, ids, ids.astype(jnp.float32), jnp.zeros(1))
    after = (jnp.zeros(1, jnp.int32),)
    (first, _), (token,) = p2p.P2P().dispatch_send(ep, inputs, after)
    assert token is first[-1]
    return first


@pytest.fixture
def program(monkeypatch):
    """A call that counts up from every rank's first element, in place of a kernel."""

    def call(target, results, tokens, *operands, **attributes):
        assert target == "ep_dispatch_send_on_stream"
        assert attributes["key"] == 7
        (whole,) = results
        counted = jnp.arange(TOTAL, dtype=jnp.int32).reshape(whole.shape)
        return [tokens[0, 0].astype(jnp.int32) + counted]

    def body(x):
        (whole,) = send(make_ep("stream"), x)
        return tuple(tables.unpack("ep_dispatch_send", whole, SIZES))

    monkeypatch.setattr(ffi, "call", call)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    x = 64 * jnp.arange(mesh.size, dtype=jnp.float32)
    return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x


@needs_stream
@pytest.mark.parametrize("transform", [jax.jit, lambda run: run], ids=["jit", "eager"])
def test_results_are_those_of_a_call(program, transform) -> None:
    run, x = program
    pending, slot_of, num_invalid = transform(run)(x)
    for rank in range(x.size):
        counted = 64 * rank + np.arange(TOTAL)
        rows = slice(TOKENS * rank, TOKENS * (rank + 1))
        np.testing.assert_array_equal(pending[rank], counted[:4])
        np.testing.assert_array_equal(slot_of[rows].ravel(), counted[4:-1])
        np.testing.assert_array_equal(num_invalid[rank], counted[-1])


@needs_stream
def test_xla_is_given_one_result(program) -> None:
    """XLA would read one of several results on that stream, after a wait."""
    run, x = program
    text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "call @compute_on" in line)
    assert '_xla_stream_annotation = "collective"' in line
    assert line.rstrip().endswith(f"-> tensor<1x{TOTAL}xi32>")


def test_which_calls_and_which_jax(monkeypatch) -> None:
    def first(overlap):
        return send(make_ep(overlap), jnp.zeros(1))

    monkeypatch.setattr(ffi, "call", lambda _, results, *__, **___: list(results))
    monkeypatch.setattr(ffi, "call_on_stream", lambda _, whole, *__, **___: whole)
    assert [part.shape for part in first("sm")] == [(1, 4), (TOKENS, TOP_K), (1,)]
    monkeypatch.setattr(p2p, "STREAM_SINCE", (0, 1))
    assert [part.shape for part in first("stream")] == [(1, TOTAL)]
    monkeypatch.setattr(p2p, "STREAM_SINCE", (99, 0))
    with raises() as caught:
        first("stream")
    check_form(caught, "EPConfig", "overlap", jax.__version__, "update jax")
