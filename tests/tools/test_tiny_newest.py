"""Like test_benchmarks.py, for what needs a new JAX; CI's step newest runs it.

That is XLA's stream of collectives for calls in halves, and lowering without a GPU.
"""

from __future__ import annotations

import pytest

import jax_ep
from benchmarks.layers import grouped
from benchmarks.overlap import overlap
from support import helpers
from support.tiny import ON_CPU, RANKS, tiny

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_overlap_in_every_arrangement(tmp_path):
    asked = ["--arrangements", *overlap.ARRANGEMENTS, "--graph-tokens"]
    asked += ["--beside", "elementwise", "two_batches"]
    asked += ["--transport", helpers.TRANSPORT]
    record = tiny(overlap, tmp_path, *asked)
    assert record["problems"] == []
    assert not any(row.get("wrong") for row in record["results"])
    missing = {row["arrangement"] for row in record["results"] if "us" not in row}
    # A single rank has no copies.
    assert missing == ({"copies"} if RANKS == 1 else set())


def test_grouped_kernels_are_lowered(tmp_path):
    """Left to GPUs: running the kernels that are lowered for them."""
    if not ON_CPU and jax_ep.experts.hopper_obstacle(128, 128) is not None:
        pytest.skip("needs compute capability 9.0")
    rows = tiny(grouped, tmp_path)["results"]
    wholes = {(row["op"], row["way"]) for row in rows if row["matrix"] == "experts"}
    # The portable kernels are not lowered for an absent GPU.
    timed = [way for way in grouped.WAYS if way != "portable" or not ON_CPU]
    ways = {(op, way) for op in ("forward", "gradients") for way in timed}
    # Forward it is what fp8 is.
    assert wholes == {("quantize", "fp8"), *ways} - {("forward", "fp8_wgrad")}
    assert not any(row.get("wrong") for row in rows)
    assert all(row.get("kernels") or row["us"] > 0 for row in rows)
