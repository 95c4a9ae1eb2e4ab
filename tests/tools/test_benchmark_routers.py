"""benchmarks/layers/routers.py: what it compares, and the table of its record."""

from __future__ import annotations

import generate
import layer_tables
import numpy as np
import pytest

from benchmarks.layers import routers
from support.tiny import ON_CPU, rows_by, written


def rows_of(record):
    return rows_by(record["results"], "router", "tokens", "part", "way")


def with_times(record):
    """The record with times as from a GPU: the kernel takes a quarter of the time."""
    for row in record["results"]:
        plain = row["way"] == "plain"
        row |= {"us": 8.0 if plain else 2.0, "kernels": 5 if plain else 1}
    return record


def test_every_row(tmp_path):
    assert routers.main(["--tiny", "--results", str(tmp_path)]) == 0
    record = written(tmp_path)
    rows = rows_of(record)
    choices = {
        (name, 3, part, way)
        for name in routers.ROUTERS
        for part in routers.PARTS
        for way in routers.WAYS
    }
    logits = {(None, 3, "logits", way) for way in ("plain", "layer", "parts")}
    assert rows.keys() == choices | logits
    for (*_, part, _), row in rows.items():
        assert not row["wrong"]
        assert ("same_ids" in row) == (part != "logits")
        assert ("us" in row) != ON_CPU
    lines = layer_tables.routers(with_times(record), generate.table).splitlines()
    assert "| softmax | forward | 3 | 8.0 (5) | 2.0 (1) | 4.00 |" in lines
    assert "| hidden 7168 | logits | 3 | 8.0 (5) | 2.0 (1) | 4.00 |" in lines
    record["results"][-1]["wrong"] = True
    with pytest.raises(SystemExit, match="unfit"):
        layer_tables.routers(record, generate.table)


@pytest.mark.parametrize("what", ["ids", "weights", "gradient"])
def test_wrong_results_are_seen(what, tmp_path, monkeypatch):
    """Wrong results of either way are noticed."""
    true_program = routers.program

    def program(mesh, way, part, router):
        run = true_program(mesh, way, part, router)
        if way == "plain" or (part == "gradient") != (what == "gradient"):
            return run

        def other(*given):
            *others, (ids, values) = run(*given)
            last = (ids + 1, values) if what == "ids" else (ids, values * 1.001)
            return *others, last

        return other

    monkeypatch.setattr(routers, "program", program)
    assert routers.main(["--tiny", "--results", str(tmp_path)]) == 1
    part = "gradient" if what == "gradient" else "forward"
    for (*_, found, way), row in rows_of(written(tmp_path)).items():
        assert row["wrong"] == (found == part and way == "kernel")


def test_without_times_it_fails(tmp_path, monkeypatch):
    """Without times the run fails, unless it was told to go without."""
    monkeypatch.setattr(routers, "timed", lambda *_: {"untimed": "no profiler"})
    words = ["--tokens", "3", "--calls", "1", "--results", str(tmp_path)]
    assert routers.main(words) == 1
    assert routers.main([*words, "--tiny"]) == 0


def test_tokens_with_other_experts_are_left_out():
    """Otherwise scores that differ only by rounding would dominate the difference."""
    ids = np.tile(np.arange(8), (2000, 1))
    values = np.ones((2000, 256))
    other, apart = ids.copy(), values.copy()
    other[5, 7], apart[5] = 9, 3.0
    row = routers.compared((other, apart), (ids, values))
    assert row == {"same_ids": 1 - 1 / 16000, "difference": 0.0, "wrong": False}
    apart[6, 1] = 1.001
    assert routers.compared((other, apart), (ids, values))["wrong"]
    other[:, 0] = 9
    assert routers.compared((other, values), (ids, values))["wrong"]
