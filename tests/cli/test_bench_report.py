"""What `jax-ep bench` prints, and which records it calls unfit."""

from __future__ import annotations

import pytest

from jax_ep._cli.bench import report as p2p_report
from jax_ep._cli.bench import routings as p2p_cases
from jax_ep._cli.bench import worker as p2p_worker


def row(us, **changes):
    facts = {
        "transport": "p2p",
        "op": "dispatch",
        "tokens": 128,
        "routing": "uniform",
        "zero_tail": False,
        "num_sms": None,
        "bytes": 1000,
        "floor_us": 1.0,
        "us": us,
        "us_least": us,
        "us_most": us,
        "gb_s": 1 / us,
        "of_peak": 1 / us,
        "wrong": False,
        "tie": "barrier",
    }
    return facts | changes


def record(*rows):
    return {
        "count": 4,
        "device": "made up",
        "kind": "p2p",
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "command": "python -m benchmarks.calls.p2p",
        "seed": 7,
        "peak_gb_s": 100.0,
        "hidden": 16,
        "dtype": "bfloat16",
        "top_k": 2,
        "experts": 8,
        "results": list(rows),
        "problems": [],
    }


def test_summary_takes_right_rows_at_the_default_number_of_sms(capsys):
    rows = [
        row(20.0),
        row(10.0, num_sms=8),
        row(5.0, wrong=True, differences={"y": 3}),
        row(70.0, transport="collective"),
        row(900.0, transport="ragged", flags="default", updates="rank"),
        row(500.0, transport="ragged", flags="other", updates="rank"),
        row(300.0, transport="ragged", flags="decomposer", updates="expert"),
        row(1.0, zero_tail=True),
    ]
    (found,) = p2p_report.summary(rows)
    assert found["p2p"]["us"] == 20.0
    assert found["collective_us"] == 70.0
    assert (found["ragged_default_us"], found["ragged_best_us"]) == (900.0, 300.0)
    assert found["ragged_best"] == "decomposer"
    assert found["ragged"] == {"default": 900.0, "other": 500.0, "decomposer": 300.0}
    # A way for which there was no time is not shown.
    (found,) = p2p_report.summary([*rows[:5], *rows[6:]])
    assert found["ragged"] == {"default": 900.0, "decomposer": 300.0}
    p2p_report.print_table(record(*rows))
    assert "WRONG: {'y': 3}" in " ".join(capsys.readouterr().out.split())


def rows_of_formats():
    sizes = {"bytes": 500, "floor_us": 0.5, "tokens": 4096}
    return [
        row(1000.0, tokens=4096, format="bf16"),
        row(800.0, **sizes, format="fp8_block128"),
        row(540.0, **sizes, format="mxfp8"),
        row(300.0, **sizes, format="mxfp8", num_sms=8),
        row(70.0, op="combine", format="fp8_block128"),
        row(100.0, op="combine", format="bf16"),
    ]


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_tables_fit_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [row(20.0), row(12.0, num_sms=8), row(70.0, transport="collective")]
    rows += [*rows_of_formats(), row(15.0, zero_tail=True)]
    p2p_report.print_table(record(*rows))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    words = " ".join(said.split())
    for told in ("20.0", "70.0", "0.540", "p2p us by num_sms", "zeroed tail"):
        assert told in words
    # Nothing was measured of ragged_all_to_all.
    assert "speed-up" not in words


def test_an_error_of_all_cases_is_told_once(capsys):
    facts = {"transport": "p2p", "zero_tail": False, "format": "bf16"}
    facts["error"] = "ValueError: jax_ep.init: no GPUs"
    cases = [(t, r) for t in (128, 16) for r in p2p_cases.ROUTINGS]
    failed = [{**facts, "tokens": t, "routing": r} for t, r in cases]
    line = p2p_worker.line_of_new()
    first, *others = map(line, failed)
    assert first == "T 128  uniform p2p: jax_ep.init: no GPUs"
    assert others == ["", "", ""]
    assert "20.0 us" in line(row(20.0))
    assert "20.0 us" in line(row(20.0))
    p2p_report.print_table(record(*failed))
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("no GPUs") == 1
    assert "not measured: T 128 uniform, T 128 zipf, T 16 uniform, T 16 zipf" in said


def test_wrong_or_missing_results_make_a_record_unfit():
    assert p2p_report.failures(record(row(20.0))) == []
    error = {key: row(1.0)[key] for key in ("tokens", "routing", "zero_tail")}
    error |= {"transport": "p2p", "error": "timed out"}
    of_xla = {**error, "transport": "ragged"}
    assert len(p2p_report.failures(record(error, of_xla))) == 1
    wrong = row(5.0, transport="ragged", wrong=True, differences={"y": 3})
    assert len(p2p_report.failures(record(wrong))) == 1
    hung = {"worker": p2p_report.OURS, "problem": "killed"}
    assert p2p_report.failures(record() | {"problems": [hung]}) == [hung]


def test_nothing_sent_has_no_share_of_a_peak(capsys):
    """With one rank nothing is sent, and no peak is measured either."""
    sent = {"bytes": 0, "floor_us": None, "gb_s": 0.0, "of_peak": None}
    rows = [row(20.0, **sent), row(25.0, **sent, format="mxfp8")]
    mxfp8 = next(r for r in p2p_report.formats(rows) if r["format"] == "mxfp8")
    assert mxfp8["us_ratio"] == 1.25
    assert mxfp8["bytes_ratio"] is mxfp8["recovered"] is None
    print(p2p_report.line(rows[0]))
    p2p_report.print_table(record(*rows) | {"count": 1, "peak_gb_s": None})
    printed = " ".join(capsys.readouterr().out.split())
    assert "20.0 us 0.0 GB/s (20.0 to 20.0)" in printed
    assert "made up, peak not measured, hidden 16" in printed
    assert "uniform dispatch 128 20.0 0 uniform" in printed
    assert "128 mxfp8 25.0 1.250" in printed
