"""What benchmarks/overlap.py rests on: work that is done, results that are compared."""

from __future__ import annotations

import json
import pathlib
import sys

import helpers
import jax
import numpy as np
import pytest

# It finds benchmarks/ itself.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "docs"))

import generate
import overlap
import overlap_cases
import overlap_report
import overlap_worker
import p2p
import p2p_programs
import performance_tables

TINY = [
    *("--transport", helpers.TRANSPORT, "--tokens", "8", "--hidden", "128"),
    *("--experts", "8", "--top-k", "2", "--inner", "128", "--matmul", "64"),
    *("--megabytes", "1", "--repeats", "2", "--milliseconds", "1", "--seed", "3"),
]


def specification(*arguments):
    args = overlap.parse([*TINY, *arguments])
    _, spec = next(overlap.overlap_workers(args))
    return spec | {"deadline": float("inf")}


@pytest.fixture
def worker():
    made = []

    def make(*arguments):
        rows = []
        mesh = helpers.make_mesh(helpers.some_ranks(2))
        made.append(overlap_worker.Worker(specification(*arguments), mesh, rows.append))
        return made[-1], rows

    yield make
    for each in made:
        for transport in (*each.transports.values(), each.other):
            transport.ep.close()


def test_every_arrangement_is_measured_and_right(worker):
    run, rows = worker(
        *("--num-sms", "8", "--beside", "matmul", "matmul_fitted", "grouped")
    )
    run.run()
    assert [row for row in rows if "error" in row or row["wrong"]] == []
    names = [n for n in overlap.ARRANGEMENTS if overlap_cases.available(n)]
    names.remove("copy_halves")
    found = [row for row in rows if row["beside"] and row["arrangement"]]
    wanted = {
        (op, beside, name, sms)
        for op in ("dispatch", "combine")
        for beside in ("matmul", "matmul_fitted", "grouped")
        for name in names
        for sms in ((None, 8) if name.startswith("stream") else (None,))
    }
    keys = [(r["op"], r["beside"], r["arrangement"], r["num_sms"]) for r in found]
    assert len(keys) == len(wanted)
    assert set(keys) == wanted
    for row in found:
        assert row["exposed_us"] == row["us"] - row["beside_us"]
        assert row["hidden"] == 1 - row["exposed_us"] / row["alone_us"]
    # Of each two, the halves alone as well.
    assert len([row for row in rows if row["beside"] is None]) == 8


def test_elementwise_work_is_all_done(worker):
    """A program's text has the work once a call, of the whole array."""
    run, _ = worker("--num-sms")
    run.open(None)
    beside = overlap_cases.elementwise(run.mesh, 1)
    made = overlap_cases.operation(run.transports[None], "combine", "whole", beside)
    lowered, _ = p2p_programs.trace(run.mesh, made, 3, 2, "data")
    rows = beside.operands[0].shape[0] // run.mesh.size
    text = lowered.as_text()
    assert f"tensor<{rows}x1024xbf16>" in text
    assert text.count("call @step") == 3


def test_wrong_results_are_seen(worker):
    run, rows = worker("--num-sms")
    run.open(None)
    y = run.other.combined[0]
    bits = np.array(jax.lax.bitcast_convert_type(y, np.uint16))
    bits[-1, -1] ^= 1
    changed = jax.lax.bitcast_convert_type(jax.numpy.asarray(bits), y.dtype)
    run.other.combined = [jax.device_put(changed, y.sharding)] * 4
    beside = overlap_cases.elementwise(run.mesh, 1)
    run.measure([("combine", "halves", None), ("dispatch", "halves", None)], beside)
    combine, dispatch = rows
    assert combine["differences"] == {"y": 1, "checksum of the timed calls": 1}
    assert combine["wrong"]
    assert not dispatch["wrong"]


def row(us, **changes):
    facts = {
        "op": "dispatch",
        "beside": "matmul",
        "arrangement": "stream_whole",
        "num_sms": None,
        "flags": "",
        "us": us,
        "wrong": False,
        "differences": {},
    }
    return facts | overlap_report.exposed(us, 1400.0, 500.0) | changes


def graph_row(tokens, us, graphs):
    facts = {"tokens": tokens, "op": "combine", "us": us, "wrong": False}
    return facts | {"graphs": graphs}


def record(**changes):
    return {
        "results": [
            row(1700.0),
            row(1500.0, num_sms=16, flags=overlap.SCHEDULER),
            row(1300.0, num_sms=32, wrong=True),
            row(1900.0, arrangement="whole"),
        ],
        "graphs": [graph_row(1, 12.0, True), graph_row(1, 30.0, False)],
        "problems": [],
        "device": "made up",
        "count": 4,
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "command": "benchmarks/overlap.py",
        "jax": "9.9",
        "tokens": 4096,
        "hidden": 7168,
        "top_k": 8,
        "experts": 256,
    } | changes


def test_table_has_the_least_exposed_right_row():
    (cells,) = overlap_report.cells(record())
    assert cells == (
        *("dispatch", "matmul", "500", "1400"),
        *("500 (0%)", "", "100 (80%) [16 SMs, scheduler]", "", ""),
    )
    assert list(overlap_report.graphs(record())) == [
        (1, "combine", "30.0", "12.0", "2.50")
    ]
    (failure,) = overlap_report.failures(record())
    assert "WRONG" in failure
    with pytest.raises(SystemExit, match="unfit"):
        performance_tables.overlap(record(), generate.table)


def test_page_shows_the_record():
    fit = [each for each in record()["results"] if not each["wrong"]]
    text = performance_tables.overlap(record(results=fit), generate.table)
    assert "| dispatch | matmul | 500 | 1400 | 500 (0%) |" in text
    assert "jax 9.9: 4096 tokens" in text
    text = performance_tables.graphs(record(), generate.table)
    assert "| 1 | combine | 30.0 | 12.0 | 2.50 |" in text
    assert performance_tables.graphs(record(graphs=[]), generate.table).startswith("No")


def test_record_has_what_every_worker_wrote(tmp_path, monkeypatch, capsys):
    calls = []

    def run_worker(flags, spec, script="p2p_worker.py"):
        calls.append((flags, spec, script))
        first = {"device": "Made Up", "count": 4, "jax": "9.9"}
        if script == overlap.WORKER:
            return [first, row(1500.0, flags=spec["flags"])], ""
        return [first, {"tokens": 1, "op": "combine", "us": 9.0, "wrong": False}], ""

    monkeypatch.setattr(p2p, "run_worker", run_worker)
    arguments = ["--results", str(tmp_path), "--graph-tokens", "1", "--seed", "1"]
    assert overlap.main(arguments) == 0
    (path,) = tmp_path.glob("overlap-made-upx4-*.json")
    written = json.loads(path.read_text())
    flags = ["", f"{overlap.COPIES} {overlap.SCHEDULER}", overlap.SCHEDULER]
    assert [each["flags"] for each in written["results"]] == flags
    # Made for each other: the flag says who copies, the option what is copied.
    assert [spec.get("overlap") for _, spec, _ in calls[:3]] == ["sm", "copy", "sm"]
    assert [each["graphs"] for each in written["graphs"]] == [True, False]
    assert [flags for flags, *_ in calls] == [*flags, *overlap.GRAPHS.values()]
    deadlines = [spec["deadline"] for _, spec, _ in calls]
    assert deadlines == sorted(deadlines)
    assert "100 (80%)" in capsys.readouterr().out
