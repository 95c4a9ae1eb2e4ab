"""What benchmarks/layers/layer.py says of its rows, and what it chooses to measure."""

from __future__ import annotations

import copy
import json
import types

import generate
import layer_tables
import pytest

from benchmarks.layers import layer
from benchmarks.layers import report as layer_report
from benchmarks.layers import worker as layer_worker
from jax_ep._cli.bench import process
from jax_ep._cli.bench import record as bench_record
from support.layer_rows import timing


def row(name, ms, each="both", **changes):
    return {
        "case": "mid",
        "layer": name,
        "format": "bf16",
        "flags": "",
        "matmul": "padded",
        "pass": each,
        "experts_ms": 2.0,
        "exchange_share": 1 - 2.0 / ms,
        "errors": {"y": 0.01},
        "wrong": False,
    } | (timing(ms) | changes)


def record():
    rows = [
        row("p2p", 4.0),
        row("p2p", 3.5, format="fp8_block128"),
        row("collective", 5.0),
        row("ragged", 40.0, flags="default"),
        row("ragged", 8.0, flags="update an expert"),
        row("ragged", 1.0, flags="decomposer", wrong=True),
        row("dense", 6.0),
        row(layer_report.default_experts(), 9.0, exchange_share=None),
        row(layer_report.counted(), 4.04),
        {"case": "mid", "layer": "experts", "matmul": "hopper", "error": "no"},
    ]
    return {
        "cases": {"mid": layer.CASES["mid"] | {"tokens": 4096, "top_k": 8}},
        "device": "NVIDIA X",
        "count": 4,
        "jax": "1",
        "date": "2026-01-01",
        "commit": "abc",
        "seed": 1,
        "command": "benchmarks/layers/layer.py",
        "tokens": 4096,
        "top_k": 8,
        "results": rows,
        "problems": [],
    }


def test_summary_takes_the_fastest_right_rows():
    (found,) = layer_report.summary(record())
    assert found["pass"] == "both"
    assert found["ragged"]["flags"] == "update an expert"
    assert found["speed_ups"]["ragged"] == 2.0
    (cells,) = layer_report.cells(record())
    assert (cells[3], cells[5]) == ("4.00 (50%)", "9.00")
    assert cells[-4:] == ("1.50", "10.00", "", "2.00")
    assert len(cells) == len(layer_report.COLUMNS)


def test_table_of_the_docs():
    found = record()
    with pytest.raises(SystemExit, match="unfit"):
        layer_tables.all_layers(found, generate.table)
    del found["results"][5]
    text = layer_tables.all_layers(found, generate.table)
    assert text.startswith(layer_tables.layers(found, generate.table))
    row = next(line for line in text.splitlines() if "forward + backward |" in line)
    assert row.split(" | ")[0] == "| 2048 x 1024, 64 experts"
    assert "| 8.00 (75%) | 1.50 | 10.00 |  | 2.00 |" in row
    assert "(here padded;" in text
    assert "| mid | both | 4.00 | 4.04 | +1.0% |" in text
    assert "fastest of default, update an expert;" in text


def test_failures_are_wrong_results_and_what_jax_ep_lacks():
    found = record()
    assert len(layer_report.failures(found)) == 1  # the wrong ragged row
    found["results"][5]["wrong"] = False
    assert layer_report.failures(found) == []
    missing = copy.deepcopy(found)
    missing["results"].append({"case": "mid", "layer": "p2p", "error": "timed out"})
    assert len(layer_report.failures(missing)) == 1
    assert layer_report.failures(found | {"problems": ["killed"]}) == ["killed"]


def test_later_workers_multiply_as_the_first():
    offered = {"mid": ["padded", "hopper"], "large-64": ["padded", "hopper"]}
    rows = [row("p2p", 4.0, matmul="hopper")]
    assert layer.chosen_matmuls(rows, offered) == offered | {"mid": ["hopper"]}


@pytest.mark.parametrize(
    ("words", "large", "mid"),
    [
        ("", ["padded", "hopper"], ["padded", "hopper", "ragged_dot"]),
        ("--matmul ragged_dot", ["ragged_dot"], ["ragged_dot"]),
    ],
)
def test_large_cases_take_ragged_dot_where_asked_for(words, large, mid):
    args = layer.parse(words.split())
    assert layer.offered_matmuls(args, "large-64") == large
    assert layer.offered_matmuls(args, "mid") == mid


@pytest.mark.parametrize(
    ("default", "offered", "chosen", "wanted"),
    [
        ("ragged_dot", ["padded", "ragged_dot"], "padded", ["ragged_dot"]),
        ("ragged_dot", ["padded"], "padded", []),
        ("hopper", ["padded", "hopper"], "padded", ["hopper"]),
        ("hopper", ["padded", "hopper"], "hopper", []),
    ],
)
def test_the_default_experts_are_measured_where_they_are_offered(
    default, offered, chosen, wanted, monkeypatch
):
    monkeypatch.setattr(layer_worker.layer_experts, "default", lambda sizes: default)
    spec = {"ours": [("p2p", "bf16")], "dense": False, "ragged": ()}
    spec |= {"matmul": {"mid": offered}, "transport": "p2p"}
    case = types.SimpleNamespace(sizes={})
    made = layer_worker.Worker(spec, case, "mid", None).layers(None, chosen)
    found = [f for f, _ in made if f["layer"] == layer_report.default_experts()]
    assert [facts["matmul"] for facts in found] == wanted


def test_cases_without_time_are_said_and_can_be_joined_later():
    found = record()
    del found["results"][5]
    found |= {"driver": "1", "seconds": 2.0}
    found["cases"]["large-256"] = found["cases"]["mid"]
    late = {"error": f"RuntimeError: {layer_report.NO_TIME}", "case": "large-256"}
    found["results"] += [late | {"layer": "p2p"}, late | {"layer": "all"}]
    found["results"] += [late | {"layer": "experts", "ms": 1.0, "wrong": False}]
    assert layer_report.untimed(found) == ["large-256"]
    assert layer_report.failures(found) == []
    text = layer_tables.layers(found, generate.table)
    assert text.endswith("No time was left for 2048 x 1024, 64 experts.")
    again = found | {"commit": "def", "results": [row("p2p", 9.0, case="large-256")]}
    joined = layer.merged(found, again)
    assert layer_report.untimed(joined) == []
    assert [run["commit"] for run in joined["runs"]] == ["abc", "def"]
    # Of the case that the second run did not come to, the first one's rows.
    times = {each["case"]: each["p2p"]["ms"] for each in layer_report.summary(joined)}
    assert times == {"mid": 4.0, "large-256": 9.0}
    for name in ("device", "tokens"):
        with pytest.raises(SystemExit, match=f"the same {name}"):
            layer.merged(found, again | {name: "other"})
    again["cases"] = again["cases"] | {"mid": {}}
    with pytest.raises(SystemExit, match="the same sizes of mid"):
        layer.merged(found, again)


@pytest.mark.parametrize("device", ["NVIDIA X", "another"])
def test_a_run_is_kept_whether_it_can_be_joined_or_not(device, tmp_path, monkeypatch):
    earlier = record() | {"driver": "1", "seconds": 2.0}
    del earlier["results"][5]
    earlier["cases"] = {"large-64": earlier["cases"]["mid"]}
    for each in earlier["results"]:
        each["case"] = "large-64"
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))

    def run_worker(flags, spec, script, root):
        facts = {"device": device, "count": 4, "jax": "1"}
        rows = [facts, row("p2p", 9.0), row("p2p", 9.5, "forward")]
        return rows, None

    monkeypatch.setattr(process, "start", run_worker)
    monkeypatch.setattr(bench_record, "driver", lambda: "1")
    words = (
        f"--cases mid --layers p2p --results {tmp_path} --merge {tmp_path}/earlier.json"
    )
    if device == "another":
        with pytest.raises(SystemExit, match="the same device"):
            layer.main(words.split())
    else:
        assert layer.main(words.split()) == 0
    (path,) = tmp_path.glob("layer-*x4-*.json")
    found = json.loads(path.read_text())
    wanted = ["mid"] if device == "another" else ["large-64", "mid"]
    assert sorted({each["case"] for each in found["results"]}) == wanted
