"""options_cost.py reports what is wrong or missing and shows the rest."""

from __future__ import annotations

import json

import generate
import performance_tables
import pytest

from benchmarks.calls import options_cost, options_report, options_worker
from jax_ep._cli.bench import measure, process
from jax_ep._cli.bench import transports as p2p_transports
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

TINY = [
    *("--transport", helpers.TRANSPORT, "--tokens", "6", "--hidden", "128"),
    *("--experts", "8", "--top-k", "2", "--num-sms", "8", "--seed", "3"),
    *("--repeats", "1", "--milliseconds", "0.001"),
]


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    monkeypatch.setattr(options_worker, "_sizes", lambda *_: (1, 1))


@pytest.fixture(scope="module")
def case():
    spec = options_cost.specification(options_cost.parse(TINY))
    spec["deadline"] = float("inf")
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    made = p2p_transports.make_case(mesh, spec, 6, "uniform", defaults=False)
    return spec, made


def test_wrong_results_are_seen(case, monkeypatch):
    """Wrong results are noticed in compared calls and in timed calls."""
    spec, made = case
    option = options_worker.Option(made, spec, "added", None)
    right, combine = [option.other], options_worker._CALLS["combine"]

    def off_by_one(ep, name, *inputs):
        y = combine(ep, name, *inputs)
        return y if ep in right else y.at[-1, -1].add(1)

    monkeypatch.setitem(options_worker._CALLS, "combine", off_by_one)
    assert options_worker._measured(spec, option, "combine")["differences"]["y"] > 0
    monkeypatch.setitem(options_worker._CALLS, "combine", combine)
    last = option.last("combine")
    monkeypatch.setattr(option, "last", lambda op: [each + 1 for each in last])
    found = options_worker._measured(spec, option, "combine")["differences"]
    assert found == {"checksum of the timed calls": 1}
    option.close()


def test_what_fails_or_has_no_time_is_said(case, monkeypatch):
    spec, made = case
    rows = []
    options_worker.measure(spec | {"deadline": 0}, made, rows.append, "plain", None)
    assert [row["error"] for row in rows] == [process.NO_TIME] * 2
    rows.clear()
    monkeypatch.setitem(options_worker._CONFIGS, "shared", {"top_k": 0})
    options_worker.measure(spec, made, rows.append, "shared", None)
    assert [row["op"] for row in rows] == ["dispatch", "combine"]
    assert all("top_k must be" in row["error"] for row in rows)


def row(option, op, us, num_sms=None, **changes):
    facts = {"option": option, "op": op, "num_sms": num_sms, "tokens": 128, "us": us}
    return facts | {"wrong": False, "differences": {}} | changes


def record(**changes):
    lost = row("none", "combine", 0.0) | {"error": "RuntimeError: no memory"}
    del lost["us"]
    return {
        "results": [
            *(row("plain", "dispatch", 20.0), row("plain", "combine", 30.0)),
            *(row("source", "combine", 90.0), lost),
            *(
                row("first_half", "dispatch", 10.0),
                row("first_half", "dispatch", 14, 16),
            ),
        ],
        "problems": [],
        "device": "made up",
        "count": 4,
        "jax": "9.9",
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "command": "python -m benchmarks.calls.options_cost",
        "hidden": 7168,
        "top_k": 8,
        "experts": 256,
    } | changes


def test_tables():
    text = performance_tables.options(record(), generate.table)
    assert "| plain | dispatch | 20.0 |" in text
    assert '| `reduce="source"` | combine | 90.0 (3.00) |' in text
    assert '| `reduce="none"` | combine | failed |' in text
    text = performance_tables.halves(record(), generate.table)
    assert "| dispatch | 128 | 10.0 | 14.0 (1.40) |" in text
    assert len(options_report.missing(record())) == 1
    assert not options_report.unfit(record())
    assert options_report.unfit(record(results=[]))
    wrong = record(results=[row("plain", "dispatch", 1.0, wrong=True)])
    for part in (performance_tables.options, performance_tables.halves):
        with pytest.raises(SystemExit, match="unfit"):
            part(wrong, generate.table)


def test_record_is_what_the_worker_wrote(tmp_path, monkeypatch, capsys):
    def run_worker(flags, spec, script, root):
        assert (flags, script) == (measure.GRAPHS, options_cost.WORKER)
        assert spec["options"] == list(options_report.NAMES)
        rows = [{"device": "Made Up", "count": 4, "jax": "9.9"}]
        return rows + record()["results"], "worker killed"

    monkeypatch.setattr(process, "start", run_worker)
    assert options_cost.main(["--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("options-made-upx4-*.json")
    written = json.loads(path.read_text())
    assert written["results"] == record()["results"]
    out = capsys.readouterr().out
    assert "90.0 (3.00)" in out
    assert "MISSING: worker killed" in out
