"""Like test_benchmark_tiny.py, for what needs a new JAX; CI's step newest runs it.

That is XLA's stream of collectives for calls in halves, and lowering without a GPU.
"""

from __future__ import annotations

import pytest

import jax_ep
from benchmarks.layers import grouped
from benchmarks.overlap import cases as overlap_cases
from benchmarks.overlap import overlap
from benchmarks.overlap import report as overlap_report
from support import helpers
from support.tiny import ON_CPU, RANKS, TRACE, rows_by, tiny, unmeasured

pytestmark = pytest.mark.usefixtures("quick_compiles")

AVAILABLE = [name for name in overlap.ARRANGEMENTS if overlap_cases.available(name)]
PARTS = overlap_report.PARTS


def test_overlap_in_every_arrangement(tmp_path):
    """Left to GPUs: streams and copy engines, which only change the order of work."""
    asked = ["--arrangements", *overlap.ARRANGEMENTS, "--graph-tokens"]
    asked += ["--beside", "elementwise", "two_batches", *TRACE]
    asked += ["--transport", helpers.TRANSPORT]
    record = tiny(overlap, tmp_path, *asked)
    # A single rank has no copies.
    assert unmeasured(record) == ({"copies"} if RANKS == 1 else set())
    rows = [row for row in record["results"] if row["beside"] == "elementwise"]
    rows = [row for row in rows if row["arrangement"] is not None]
    counts = {
        name: (None, 8) if overlap_report.OVERLAPS[name] == "stream" else (None,)
        for name in AVAILABLE
    }
    assert rows_by(rows, "op", "arrangement", "num_sms").keys() == {
        (op, name, sms)
        for op in ("dispatch", "combine")
        for name in AVAILABLE
        for sms in counts[name]
    }
    copies = [row["arrangement"] == "copy_halves" for row in rows]
    assert ["over_parts_us" in row for row in rows] == copies
    batches = [row for row in record["results"] if row["beside"] == "two_batches"]
    in_turns = {row["arrangement"] for row in batches} - {None}
    assert in_turns == {name for name in AVAILABLE if name.endswith("halves")}
    assert all(row["facts"]["largest_error"] == 0 for row in batches)
    parts = [row for row in record["results"] if row["arrangement"] in PARTS]
    assert rows_by(parts, "op", "arrangement").keys() == {
        (op, part) for op in ("dispatch", "combine") for part in PARTS
    }


def test_grouped_kernels_are_lowered(tmp_path):
    """Left to GPUs: running the kernels that are lowered for them."""
    if not ON_CPU and jax_ep.experts.hopper_obstacle(128, 128) is not None:
        pytest.skip("needs compute capability 9.0")
    record = tiny(grouped, tmp_path)
    found = rows_by(record["results"], "case", "matrix", "op", "way")
    singles = {row for row in found if row[1] != "experts"}
    assert {way for *_, way in singles} == {"hopper", "jax", "batched"}
    assert len(singles) == 2 * 3 * 3
    wholes = {(op, way) for _, matrix, op, way in found if matrix == "experts"}
    ways = [(op, way) for op in ("forward", "gradients") for way in grouped.WAYS]
    assert wholes == {("quantize", "fp8"), *ways}
    kernels = {
        ("forward", "hopper"): 1,  # both products
        ("gradients", "hopper"): 6,
        ("quantize", "fp8"): 2,
        ("forward", "fp8"): 1,
        # Includes the kernels that quantise cotangents and decode rows.
        ("gradients", "fp8"): 9,
    }
    for row in record["results"]:
        assert not row.get("wrong")
        if "kernels" not in row:
            assert row["us"] > 0
            continue
        whole = row["matrix"] == "experts"
        assert row["kernels"] == (kernels[row["op"], row["way"]] if whole else 1)
