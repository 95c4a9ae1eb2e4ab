"""What benchmarks print, record and draw; most tests are for p2p.py."""

from __future__ import annotations

import json

import generate
import performance_tables
import pytest

from benchmarks.calls import p2p, window_kernels
from jax_ep._cli.bench import draw, measure
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


def specifications(*arguments):
    return list(measure.workers(p2p.plan(p2p.parse(arguments))))


def test_specifications_of_the_workers_are_json_and_cover_the_arguments():
    found = specifications("--tokens", "8", "--num-sms", "16", "24", "--seed", "5")
    assert len(found) == 1 + len(measure.RAGGED)
    spec = json.loads(json.dumps(found[0][3]))
    assert spec["num_sms"] == [None, 16, 24]
    assert spec["transports"] == ["p2p", "collective"]
    assert spec["defaults_at"] == 8
    assert spec["variants"] == [{"format": "bf16", "combine_format": None}]
    quick = specifications("--quick")
    assert [spec["transports"] for *_, spec in quick] == [["p2p"]]


def test_formats_are_variants_of_one_worker():
    arguments = ["--combine-format", "fp8_block128", "--formats"]
    names = ["bf16", "fp8_block128", "nvfp4"]
    ((*_, spec),) = specifications(*arguments, *names)
    assert spec["routings"] == ["uniform"]
    assert [each["format"] for each in spec["variants"]] == names
    combined = [
        each["combine_format"] for each in spec["variants"] if "combine" in each["ops"]
    ]
    assert combined == [None, "fp8_block128"]
    ((*_, spec),) = specifications("--format", "nvfp4")
    assert spec["transports"] == ["p2p", "collective"]
    assert spec["variants"] == [{"format": "nvfp4", "combine_format": None}]
    with pytest.raises(SystemExit):
        p2p.parse(["--format", "nvfp4", "--only", "ragged"])
    ((*_, spec),) = specifications("--codes", "nvfp4", "--tokens", "128", "4096")
    assert [each.get("coded", False) for each in spec["variants"]] == [False, True]
    assert spec["tokens"] == [128, 4096]
    with pytest.raises(SystemExit):
        p2p.parse(["--codes", "bf16"])


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


def test_formats_are_compared_with_bfloat16(capsys):
    found = {
        (each["op"], each["format"]): each
        for each in p2p_report.formats(rows_of_formats())
    }
    fp8, mxfp8 = (found["dispatch", name] for name in ("fp8_block128", "mxfp8"))
    assert (fp8["bytes_ratio"], fp8["us_ratio"]) == (0.5, 0.8)
    assert fp8["recovered"] == (1000 / 800) / (1000 / 500)
    assert mxfp8["us"] == 540.0
    combine = found["combine", "fp8_block128"]
    assert (combine["bytes_ratio"], combine["us_ratio"]) == (1.0, 0.7)
    (alone,) = p2p_report.formats([row(5.0, format="nvfp4")])
    assert alone["recovered"] is None
    p2p_report.print_table(record(*rows_of_formats()))
    printed = " ".join(capsys.readouterr().out.split())
    assert "4096 mxfp8 0.5 540.0 0.500 0.540 0.93" in printed


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


def test_page_shows_formats_and_their_targets():
    data = record(*rows_of_formats()) | {"kind": "formats"}
    lines = performance_tables.formats(data, generate.table).splitlines()
    assert "seed 7" in lines[0]
    (mxfp8,) = [line for line in lines if "mxfp8" in line]
    assert mxfp8.endswith("| 0.5 | 540.0 | 0.500 | 0.540 | 0.93 | reached |")
    assert "| 0.62 | missed |" in lines[-4]
    plain = record(row(25.0), row(1.0, tokens=4096, format="fp8_block128"))
    text = performance_tables.targets(plain, data, generate.table)
    assert text.count("commit") == 2
    # Each format's row is from its own record.
    assert "| dispatch | `bf16` | 128 | 1.0 | 28 | 20 | 25.0 | met |" in text
    assert "| `fp8_block128` | 4096 | 0.5 | 330 | 267 | 800.0 | missed |" in text
    assert "| `fp8_block128` | 128 |  | 22 | 14 |  | not recorded |" in text
    none = performance_tables.targets(None, None, generate.table)
    assert none.count("not recorded") == len(performance_tables.TARGETS)
    wrong = record(row(5.0, format="mxfp8", wrong=True, differences={"y": 3}))
    with pytest.raises(SystemExit, match="newest p2p file is unfit"):
        performance_tables.formats(wrong, generate.table)


def test_mark_names_a_record():
    first, second = record(row(20.0)), record(row(21.0))
    assert draw.mark(first) == draw.mark(json.loads(json.dumps(first)))
    assert draw.mark(first) != draw.mark(second)


def test_picture_holds_the_mark_of_its_record(tmp_path):
    # An extra, which only drawing the picture needs.
    pytest.importorskip("matplotlib")
    first = record(row(20.0))
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in paths:
        draw.save(first, path)
    assert draw.mark(first) in paths[0].read_text()
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
def test_picture_shows_whole_markers(device, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(us, op=op, tokens=tokens, transport="collective", floor_us=None)
        for op in ("dispatch", "combine")
        for tokens, us in ((16, 160.0), (128, 790.0))
    ]
    changes = {"device": device, "peak_gb_s": None}
    figure = draw.figure(record(*rows) | changes)
    figure.savefig(tmp_path / "a.png")
    shown = 0
    for axes in figure.axes:
        box = axes.get_window_extent()
        for line in axes.lines:
            radius = line.get_markersize() / 2 * figure.dpi / 72
            for x, y in axes.transData.transform(line.get_xydata()):
                assert box.x0 + radius < x < box.x1 - radius
                assert box.y0 + radius < y < box.y1 - radius
                shown += 1
    assert shown == 8
    labels = {axes.get_ylabel() for axes in figure.axes} - {""}
    unit = "device" if device == "cpu" else "GPU"
    assert labels == {"microseconds per call", f"GB/s per {unit}, sent or received"}


def test_record_of_window_kernels():
    lines = [
        "4 x NVIDIA H200, seed 7",
        "checked T 1, sms 0: right",
        "call                 T  sms         us     GB/s floor us",
        "cached dispatch   1024   24     139.26    287.3    113.0",
    ]
    record = window_kernels.record_of(lines, ["--tokens", "1024"])
    assert (record["count"], record["device"], record["seed"]) == (4, "NVIDIA H200", 7)
    assert record["checked"] == lines[1:2]
    (row,) = record["results"]
    assert row == {
        "call": "cached dispatch",
        "tokens": 1024,
        "sms": 24,
        "us": 139.26,
        "gb_s": 287.3,
        "floor_us": 113.0,
    }


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "p2p-h200x4-2026-01-31.json"),
        (["--quick"], "quick-p2p-h200x4-2026-01-31.json"),
        (["--format", "mxfp8"], "mxfp8-p2p-h200x4-2026-01-31.json"),
        (
            ["--format", "nvfp4", "--combine-format", "fp8_block128"],
            "nvfp4-fp8_block128-p2p-h200x4-2026-01-31.json",
        ),
        (["--formats", "bf16", "nvfp4"], "formats-h200x4-2026-01-31.json"),
        (["--codes", "nvfp4"], "codes-h200x4-2026-01-31.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_name_of_a_record(tmp_path, options: list[str], name: str) -> None:
    args = p2p.parse(["--results", str(tmp_path), *options])
    facts = {"device": "NVIDIA H200", "count": 4, "date": "2026-01-31"}
    p2p.save(args, facts)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_waits_of_two_gpus_have_a_column_each():
    def one(gpu, ms, *launches):
        beside = [{"gpu": i, "ms": worst} for i, worst in enumerate(launches)]
        return {"what": "load a module", "gpu": gpu, "ms": ms, "launches": beside}

    record = {
        "device": "GPU",
        "count": 2,
        "date": "2026-11-24",
        "commit": "c" * 40,
        "driver": "1",
        "hold_ms": 300,
        "rows": [one(0, 300.2, 299.0, 0.04), one(1, 0.26, 0.1, 0.2)],
    }
    lines = performance_tables.waits(record, generate.table).splitlines()
    assert lines[-1] == "| load a module | waits | waits | 0.0 | 0.3 | 0.1 | 0.2 |"
    between = {"what": "copy", "ms": 300.1, "launches_ms": 0.04}
    behind = {"what": "copy", "ms": 0.1, "launches_0_ms": 299, "launches_1_ms": 0.2}
    more = record | {"between": [between], "behind": [behind]}
    tables = performance_tables.waits(more, generate.table).split("\n\n")
    assert tables[:2] == "\n".join(lines).split("\n\n")
    assert tables[2].endswith("| copy | waits | 0.0 |")
    assert tables[3].endswith("| copy | 0.1 | waits | 0.2 |")
    assert lines[-3].count("|") == lines[-1].count("|")
    assert lines[-3].endswith(
        "| ms, done on GPU 1 | launches on GPU 0 | launches on GPU 1 |"
    )
