"""The first halves of `overlap="stream"`: one array, on XLA's stream of collectives."""

from __future__ import annotations

import types

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import check_form, raises
from gpus import needs_stream
from jax.sharding import PartitionSpec as P

from jax_ep import _ffi, _p2p_calls
from jax_ep._results import struct


@pytest.fixture
def program(monkeypatch):
    """A call of three results, of every rank's first element, in place of a kernel."""

    def call(target, results, x, **attributes):
        assert (target, attributes) == ("made_up", {"key": 7})
        first = x.reshape(-1)[0]
        return [
            jnp.full(r.shape, 10 * i, r.dtype) + first for i, r in enumerate(results)
        ]

    def body(x):
        shapes = ((1, 4), (3, 2), (1,))
        results = [struct(x, shape, jnp.int32) for shape in shapes]
        return _ffi.parted(_ffi.call_aside("made_up", results, x, key=7), results)

    monkeypatch.setattr(_ffi, "call", call)
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    x = jnp.arange(2 * mesh.size, dtype=jnp.int32)
    return jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x


@needs_stream
@pytest.mark.parametrize("transform", [jax.jit, lambda run: run], ids=["jit", "eager"])
def test_results_are_those_of_a_call(program, transform) -> None:
    run, x = program
    found = transform(run)(x)
    ranks = x.size // 2
    for i, (result, rows) in enumerate(zip(found, (1, 3, 1), strict=True)):
        firsts = np.repeat(2 * np.arange(ranks), rows)
        assert result.shape[0] == ranks * rows
        np.testing.assert_array_equal(
            result.reshape(ranks * rows, -1)[:, 0], firsts + 10 * i
        )


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
        return _p2p_calls.first_half(ep, "made_up", (1, 2))

    monkeypatch.setattr(_ffi, "call", lambda *_, **__: [1, 2])
    monkeypatch.setattr(_ffi, "call_aside", lambda *_, **__: 12)
    assert first("sm") == (1, 2)
    monkeypatch.setattr(_p2p_calls, "STREAM_SINCE", (0, 1))
    assert first("stream") == (12,)
    monkeypatch.setattr(_p2p_calls, "STREAM_SINCE", (99, 0))
    with raises() as caught:
        first("stream")
    check_form(caught, "EPConfig", "overlap", jax.__version__, "update jax")
