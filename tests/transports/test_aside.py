"""The first halves of `overlap="stream"`: one array, on XLA's stream of collectives."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep._native import ffi
from jax_ep._transport import p2p
from jax_ep._transport.results import struct
from support import helpers
from support.errors import check_form, raises
from support.gpus import needs_stream

SHAPES = ((1, 4), (3, 2), (1,))
SIZES = (4, 6, 1)


@pytest.fixture
def program(monkeypatch):
    """A call that counts from every rank's first element on, in place of a kernel."""

    def call(target, results, x, **attributes):
        assert target == "made_up_aside"
        assert attributes["key"] == 7
        (whole,) = results
        return [x.reshape(-1)[0] + jnp.arange(11, dtype=jnp.int32).reshape(whole.shape)]

    ep = types.SimpleNamespace(
        config=helpers.make_config(overlap="stream"), transport="p2p", key=7
    )

    def body(x):
        results = [struct(x, shape, jnp.int32) for shape in SHAPES]
        first = p2p._first_half(ep, "made_up", results, x)
        return tuple(p2p._results_of(first, results))

    monkeypatch.setattr(ffi, "call", call)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    x = 100 * jnp.arange(2 * mesh.size, dtype=jnp.int32)
    return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x


@needs_stream
@pytest.mark.parametrize("transform", [jax.jit, lambda run: run], ids=["jit", "eager"])
def test_results_are_those_of_a_call(program, transform) -> None:
    run, x = program
    found = transform(run)(x)
    for rank in range(x.size // 2):
        begin = 200 * rank
        for result, shape, size in zip(found, SHAPES, SIZES, strict=True):
            own = result[rank * shape[0] : (rank + 1) * shape[0]]
            expected = np.arange(begin, begin + size).reshape(shape)
            np.testing.assert_array_equal(own, expected)
            begin += size


@needs_stream
def test_xla_is_given_one_result(program) -> None:
    """It wraps an element of several as work of that stream, and waits before it."""
    run, x = program
    text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if "call @compute_on" in line)
    assert '_xla_stream_annotation = "collective"' in line
    assert line.rstrip().endswith("-> tensor<1x11xi32>")


def test_which_calls_and_which_jax(monkeypatch) -> None:
    def first(overlap):
        config = helpers.make_config(overlap=overlap)
        ep = types.SimpleNamespace(config=config, transport="p2p", key=7)
        x = jnp.zeros(1)
        results = [struct(x, shape, jnp.int32) for shape in SHAPES[:2]]
        return p2p._first_half(ep, "made_up", results, x)

    monkeypatch.setattr(ffi, "call", lambda *_, **__: [1, 2])
    monkeypatch.setattr(ffi, "call_aside", lambda _, whole, *__, **___: whole.shape)
    assert first("sm") == (1, 2)
    monkeypatch.setattr(p2p, "STREAM_SINCE", (0, 1))
    assert first("stream") == ((1, 10),)
    monkeypatch.setattr(p2p, "STREAM_SINCE", (99, 0))
    with raises() as caught:
        first("stream")
    check_form(caught, "EPConfig", "overlap", jax.__version__, "update jax")
