"""A whole MoE step, captured and replayed thousands of times, with new routing each.

In "copied" XLA's copies, which run beside graphs, exchange the halves. In "stream" the
first halves run on XLA's stream of collectives.

CPUs have no graphs: there a few calls show that the step notices errors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import gpus, helpers
from support.gpus import CAPTURE
from workers import graph_layer_worker

CALLS = 10_000
FORMS = pytest.mark.parametrize("form", ["whole", "halves", "copied", "stream"])
# Copies by copy engines, and the scheduler that runs other work beside them.
COPIES = (
    "--xla_gpu_use_memcpy_local_p2p=true --xla_gpu_enable_latency_hiding_scheduler=true"
)


def right(found, calls):
    checks = found.pop("checks")
    assert checks >= 2
    found.pop("launches")
    return found == {
        "transport": helpers.TRANSPORT,
        "calls": calls,
        "counted": calls,
        "wrong": 0,
        "wrong_by_host": 0,
        "routings": checks,
    }


@pytest.mark.few(2)
@FORMS
def test_few_calls(form):
    gpus.require_stream(form, helpers.TRANSPORT)
    found = graph_layer_worker.main(form, 5, 8)
    assert right(dict(found), 8), found
    # Without graphs there are no counts of captured calls.
    assert (found["launches"] is None) == (jax.default_backend() == "cpu")


def test_the_step_sees_what_is_wrong(monkeypatch):
    layer = graph_layer_worker.layer

    def off_by_one(*args):
        counts, y, shared = layer(*args)
        return counts, y.at[0, 0].add(1), shared

    monkeypatch.setattr(graph_layer_worker, "layer", off_by_one)
    found = graph_layer_worker.main("whole", 5, 3)
    ranks = helpers.some_ranks(4)
    assert found["wrong"] == 3 * ranks
    assert found["wrong_by_host"] == found["checks"] * ranks


def test_numpy_and_jax_have_the_same_formula():
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (3, 2)).astype(np.float32)
    ids = np.array([[1, -1], [0, 2], [-1, -1]], np.int32)
    weights = np.full((3, 2), 0.5, np.float32)
    params = rng.integers(-1, 2, (4, 2, 2)).astype(np.float32)
    for numpy in (np, jnp):
        got = np.asarray(graph_layer_worker.dense(numpy, x, ids, weights, params))
        for token, row in enumerate(x):
            wanted = row @ params[0]
            for each in ids[token]:
                wanted = wanted + (0.5 * (row @ params[each]) if each >= 0 else 0)
            np.testing.assert_array_equal(got[token], wanted)


# Low-latency calls, calls that alternate between two regions, calls with one region.
@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("tokens", [8, 200, 600])
def test_replayed(form, tokens):
    gpus.require_stream(form, helpers.TRANSPORT)
    found = gpus.run_worker(
        "graph_layer_worker.py",
        *(form, str(tokens), str(CALLS)),
        timeout=600,
        XLA_FLAGS=f"{CAPTURE} {COPIES}" if form == "copied" else CAPTURE,
        JAX_EP_TEST_TRANSPORT=helpers.TRANSPORT,
    )
    assert right(dict(found), CALLS), found
    if form == "stream" and helpers.TRANSPORT != "collective":
        # Inside a graph nothing would run beside the first halves of the two calls.
        assert found["launches"][1] >= 2 * CALLS, found
    else:
        gpus.assert_captured(found["launches"], CALLS)
