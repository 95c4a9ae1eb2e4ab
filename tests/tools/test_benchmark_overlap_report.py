"""What overlap.py computes from its rows: tables, verdicts, joined records."""

from __future__ import annotations

import generate
import performance_tables
import pytest

from benchmarks.overlap import overlap
from benchmarks.overlap import report as overlap_report
from jax_ep._cli.bench import process

RUN = {
    "commit": "0123456789abcdef",
    "date": "2001-02-03",
    "seed": 1,
    "command": "overlap.py",
    "driver": "1.2",
    "seconds": 3.0,
}


def row(us, **changes):
    facts = {
        "op": "dispatch",
        "beside": "matmul",
        "arrangement": "stream_halves",
        "num_sms": None,
        "flags": "",
        "us": us,
        "wrong": False,
        "differences": {},
        "tokens": 4096,
    }
    return facts | overlap_report.exposed(us, 1400.0, 500.0) | changes


def graph_row(tokens, us, graphs):
    facts = {"tokens": tokens, "op": "combine", "us": us, "wrong": False}
    counts = {"calls": 640, "captured": 48 * graphs, "streamed": 5000 * (not graphs)}
    return facts | {"graphs": graphs} | counts


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
        "runs": [RUN],
        "device": "made up",
        "count": 4,
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "command": "overlap.py",
        "jax": "9.9",
        "transport": "p2p",
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
        (1, "combine", "30.0", "12.0", "2.50", "0/5000", "48/0")
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


def copied(exposed_us, **changes):
    made = row(1400.0 + exposed_us, arrangement="copy_halves", **changes)
    return made | overlap_report.over_parts(made, 60.0, 450.0, 150.0)


def part(name, us):
    facts = {"beside": None, "arrangement": name, "exposed_us": None}
    return row(us, **facts)


@pytest.mark.parametrize(
    ("exposed_us", "beside_us", "wanted"),
    [(240.0, 1400.0, "30 (met)"), (241.0, 1400.0, "31 (missed)"), (300.0, 400.0, "90")],
)
def test_what_copies_leave_is_judged(exposed_us, beside_us, wanted):
    """Exposed copy time is judged only beside work that is longer than the copies."""
    results = [
        *(part("pack", 60.0), part("copies", 450.0), part("place", 150.0)),
        copied(exposed_us, beside_us=beside_us),
    ]
    (cells,) = overlap_report.cells(record(results=results))
    assert cells[-1] == wanted
    text = performance_tables.overlap(record(results=results), generate.table)
    assert "| dispatch | 60 | 450 | 150 |" in text


def test_what_is_missing_is_said_and_the_rest_shown():
    late = {"error": process.NO_TIME}
    lost = {key: v for key, v in row(0.0, arrangement="halves").items() if key != "us"}
    lost |= {"exposed_us": None}
    unmade = lost | {"op": None, "arrangement": None, "beside": "hopper"}
    results = [
        row(1500.0),
        lost | {"error": "RuntimeError: out of memory"},
        lost | late | {"arrangement": "whole"},
        unmade | {"error": "ValueError: hopper is not for this device"},
    ]
    data = record(results=results, problems=[{"problem": "worker killed"}])
    matmul, hopper = overlap_report.cells(data)
    assert matmul[4:7] == ("no time", "failed", "100 (80%)")
    assert hopper[1:5] == ("hopper", "", "", "failed")
    assert overlap_report.failures(data) == []
    assert len(overlap_report.missing(data)) == 4
    assert not overlap_report.unfit(data)
    assert overlap_report.unfit(data | {"results": results[1:], "graphs": []})
    assert "| no time | failed |" in performance_tables.overlap(data, generate.table)


def test_graphs_that_were_not_captured():
    on = graph_row(1, 12.0, True)
    rows = [on | {"streamed": 321}, graph_row(1, 30.0, False)]
    (cells,) = overlap_report.graphs(record(graphs=rows))
    assert cells[3:5] == ("not captured", "")


def test_two_batches_in_the_table():
    facts = {"op": "layer", "beside": "two_batches", "exposed_us": None}
    results = [
        row(12_000.0, **facts, arrangement=None),
        row(10_000.0, **facts, arrangement="stream_halves"),
        row(11_000.0, **facts, arrangement="halves", wrong=True),
    ]
    assert list(overlap_report.batches(record(results=results))) == [
        ("two streams, halves", "`default`", "10.00", "12.00", "1.20"),
        ("one stream, halves", "`default`", "failed", "12.00", ""),
    ]


def test_runs_of_a_day_make_one_record():
    """A later row replaces one, unless it has no time or the earlier one was wrong.

    Rows of work that is no longer measured are left out.
    """
    lost = {key: v for key, v in row(0.0).items() if key != "us"} | {"error": "failed"}
    first = record(graphs=[])
    first["results"].append(row(2.0, beside="measured no more"))
    second = record(
        results=[lost, row(1250.0, num_sms=32), row(1.0, beside="attention")],
        problems=[{"problem": "worker killed"}],
        runs=[RUN | {"commit": "fedcba"}],
    )
    data = overlap.merged(first, second)
    assert [each["us"] for each in data["results"]] == [1700, 1500, 1300, 1900, 1]
    assert data["results"][2]["wrong"]
    assert len(data["graphs"]) == 2
    assert len(data["problems"]) == 1
    fit = [each for each in data["results"] if not each["wrong"]]
    text = performance_tables.overlap(data | {"results": fit}, generate.table)
    assert "commit 0123456789ab; " in text
    assert "commit fedcba; " in text
    with pytest.raises(SystemExit, match="must have the same tokens"):
        overlap.merged(first, record(tokens=8))


def test_timelines_are_the_first_gpus_streams():
    def stream(gpu, **spans):
        found = {
            kind: {"start_us": start, "end_us": end, "busy_us": busy}
            for kind, (start, end, busy) in spans.items()
        }
        return {"gpu": f"/device:GPU:{gpu}", "stream": "Stream #1"} | found

    streams = [
        stream(0, other=(60, 700, 640), exchange=(710, 800, 90)),
        stream(0, exchange=(0, 540, 300)),
        stream(1, exchange=(5, 6, 1)),
    ]
    traced = {"beside": "elementwise", "trace": {"streams": streams}}
    rows = [
        row(
            1000.0, **traced, arrangement="stream_halves", exposed_us=100, op="combine"
        ),
        row(
            900.0,
            beside="two_batches",
            arrangement="whole",
            exposed_us=90,
            op="combine",
        ),
        row(900.0, beside="matmul", arrangement="whole", exposed_us=90, op="combine"),
    ]
    assert list(overlap_report.timelines({"results": rows})) == [
        (
            *("combine", "elementwise", "two streams, halves"),
            "0 to 540 (300 in all); 710 to 800",
            "60 to 700",
        )
    ]
