"""Records of several runs become one."""

from __future__ import annotations

import pytest

from benchmarks.layers import options as layer_options


def test_joined_options_of_a_layer():
    """Later rows win, but for the plain layer of a size that was there."""

    def record(commit, cases, *rows):
        names = "case", "option", "pass", "ms"
        found = [dict(zip(names, row, strict=True)) for row in rows]
        facts = {"device": "gpu", "count": 1, "jax": "1", "commit": commit}
        return {**facts, "cases": dict.fromkeys(cases), "results": found}

    before = record(
        "a",
        ["mid", "wide"],
        ("mid", "plain", "forward", 1),
        ("mid", "fp8", "forward", 2),
        ("wide", "plain", "forward", 3),
    )
    after = record(
        "b",
        ["mid", "new"],
        ("mid", "plain", "forward", 4),
        ("mid", "fp8", "forward", 5),
        ("new", "plain", "forward", 6),
    )
    joined = layer_options.merged(before, after)
    assert [row["ms"] for row in joined["results"]] == [1, 5, 3, 6]
    assert list(joined["cases"]) == ["mid", "wide", "new"]
    assert [run["commit"] for run in joined["runs"]] == ["a", "b"]
    with pytest.raises(SystemExit, match="device"):
        layer_options.merged(before, after | {"device": "another"})
