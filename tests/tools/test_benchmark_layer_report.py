"""What benchmarks/layers/layer.py reports of its rows, and what it measures."""

from __future__ import annotations

import copy
import functools
import json
import re
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


def fp8_rows(transport="p2p"):
    """Rows of a layer with fp8 experts, and of what is measured with it."""
    layer_name = layer_report.fp8_experts(transport)
    coded = functools.partial(row, layer_name, format="fp8_block128", matmul="fp8")
    none = {"exchange_share": None, "experts_ms": None}
    return [
        coded(2.5, experts_ms=1.0, exchange_share=0.6),
        coded(0.5, "quantize", **none, bytes=2e9, gb_s=4000.4),
        *(row(transport, 4.1 * m, "step", microbatches=m, **none) for m in (8, 1)),
        *(coded(0.5 + 2.5 * m, "step", microbatches=m, **none) for m in (8, 1)),
    ]


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


def test_fp8_experts_have_columns_where_they_were_timed():
    found = record()
    before = layer_report.table(found)
    assert not set(before[0]) & set(layer_report.FP8_COLUMNS)
    found["results"] += fp8_rows()
    # Rows of another transport are not in this table.
    found["results"].append(
        row(layer_report.fp8_experts("collective"), 1.0, format="fp8_block128")
    )
    header, cells = layer_report.table(found)
    assert set(header) - set(before[0]) == set(layer_report.FP8_COLUMNS)
    shown = dict(zip(header, cells, strict=True))
    assert shown["p2p, fp8 experts"] == "2.50 (60%)"
    assert shown["fp8 over bf16"] == "1.60"
    # The rest of the table has not changed.
    assert [shown[name] for name in before[0]] == list(before[1])
    assert ("mid", "both", "fp8", "1.00") in list(layer_report.matmuls(found))


def test_codes_and_steps_are_shown(capsys):
    found = record()
    assert list(layer_report.steps(found)) == []
    found["results"] += fp8_rows()
    wanted = [
        ("mid", "0.50", "4000", "1", "4.10", "3.00", "1.37"),
        ("mid", "0.50", "4000", "8", "32.80", "20.50", "1.60"),
    ]
    assert list(layer_report.steps(found)) == wanted
    assert {len(each) for each in wanted} == {len(layer_report.STEP_COLUMNS)}
    layer_report.print_table(found)
    shown = [tuple(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert set(wanted) <= set(shown)
    codes, *steps = (layer_report.line(row) for row in found["results"][-5:])
    assert "4000 GB/s" in codes
    assert re.findall(r"step of \d", "".join(steps)) == ["step of 8", "step of 1"] * 2
    # Without a step, only the codes are shown.
    found["results"] = [r for r in found["results"] if r.get("pass") != "step"]
    assert list(layer_report.steps(found)) == [("mid", "0.50", "4000", *[""] * 4)]


def test_fp8_experts_that_are_wrong_or_missing_are_failures():
    found = record()
    found["results"][5]["wrong"] = False
    found["results"] += fp8_rows("collective")
    assert layer_report.failures(found) == []
    for at in (-6, -5, -1):
        wrong = copy.deepcopy(found)
        wrong["results"][at]["wrong"] = True
        assert len(layer_report.failures(wrong)) == 1
        lost = wrong["results"][at]
        wrong["results"][at] = {"case": "mid", "layer": lost["layer"], "error": "no"}
        assert len(layer_report.failures(wrong)) == 1


def test_old_records_are_shown():
    paths = sorted(generate.RESULTS.glob("layer*-*.json"))
    assert paths
    for path in paths:
        old = json.loads(path.read_text())
        text = layer_tables.all_layers(old, generate.table)
        new = any("fp8 experts" in row["layer"] for row in old["results"])
        assert ("fp8 over bf16" in text) == new


def test_table_of_the_docs():
    found = record()
    with pytest.raises(SystemExit, match="unfit"):
        layer_tables.all_layers(found, generate.table)
    del found["results"][5]
    text = layer_tables.all_layers(found, generate.table)
    assert text.startswith(layer_tables.layers(found, generate.table))
    row = next(line for line in text.splitlines() if "forward + backward |" in line)
    assert row.split(" | ")[0] == "| 2048 x 1024, 64 experts"
    # A column that is empty in all rows is left out.
    assert row.endswith("| 8.00 (75%), update an expert | 1.50 | 10.00 | 2.00 |")
    assert "over ragged, flags" not in text
    assert "(here padded)" in text
    assert "| mid | both | 4.00 | 4.04 | +1.0% |" in text
    assert ") of default, update an expert. " in text
    assert "fp8 experts" not in text
    found["results"] += fp8_rows()
    text = layer_tables.all_layers(found, generate.table)
    assert "| p2p, fp8 experts |" in text
    assert "`fp8 experts` is p2p's layer with tokens in `fp8_block128`" in text
    assert "| mid | 0.50 | 4000 | 8 | 32.80 | 20.50 | 1.60 |" in text
    assert "(here padded)" in text
    assert layer.chosen_matmuls(found["results"], {"mid": []}) == {"mid": ["padded"]}


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
    spec |= {"matmul": {"mid": offered}, "transport": "p2p", "fp8": []}
    case = types.SimpleNamespace(sizes={}, capacity=8)
    made = layer_worker.Worker(spec, case, "mid", None).layers(None, chosen)
    found = [f for f, _ in made if f["layer"] == layer_report.default_experts()]
    assert [facts["matmul"] for facts in found] == wanted


@pytest.mark.parametrize(
    ("words", "ours", "fp8"),
    [
        ("", 2, ["p2p", "collective"]),
        ("--experts bf16", 2, []),
        ("--experts fp8 --layers collective ragged", 0, ["collective"]),
        ("--formats bf16", 1, []),
        ("--layers ragged dense", 0, []),
    ],
)
def test_fp8_experts_go_with_tokens_as_fp8(words, ours, fp8):
    """fp8 experts are timed with fp8 tokens, by the first worker."""
    args = layer.parse([*words.split(), "--devices", "2"])
    first, *others = (spec for *_, spec in layer.workers(args, {}))
    assert first["fp8"] == fp8
    of_each = [transport for transport, _ in first["ours"]]
    assert set(map(of_each.count, of_each)) == ({ours} if ours else set())
    assert all(spec["fp8"] == [] for spec in others)


@pytest.mark.parametrize(
    ("hidden", "inner", "wanted"),
    [(256, 128, ["p2p", "collective"]), (64, 128, []), (128, 64, [])],
)
def test_fp8_experts_are_measured_where_sizes_allow(hidden, inner, wanted):
    spec = {"ours": [], "dense": False, "ragged": (), "matmul": {"mid": []}}
    spec |= {"transport": "p2p", "fp8": ["p2p", "collective"]}
    sizes = {"hidden": hidden, "inner": inner}
    case = types.SimpleNamespace(sizes=sizes, capacity=8)
    made = layer_worker.Worker(spec, case, "mid", None).layers(None, "padded")
    layers = [layer_report.fp8_experts(name) for name in wanted]
    if layers:
        # Only with the main transport.
        layers.insert(1, layer_report.default_capacity(layers[0]))
    assert [facts for facts, _ in made] == [
        {"layer": name, "format": "fp8_block128", "flags": "", "matmul": "fp8"}
        for name in layers
    ]


def test_memory_of_programs_and_windows():
    found = record()
    sizes = {"temp_bytes": 3 << 20, "window_bytes": 5 << 20}
    found["results"] += [
        row("p2p", 4.0, **sizes),
        row("p2p", 2.0, "forward", **sizes | {"temp_bytes": 1 << 20}),
        row("dense", 2.0, "forward", **sizes | {"window_bytes": 0}),
    ]
    assert list(layer_report.memory(found)) == [
        ("2048 x 1024, 64 experts", "p2p, padded", "1", "3", "5"),
        ("2048 x 1024, 64 experts", "dense, padded", "3", "", "0"),
    ]


def test_sizes_name_tokens_of_their_own():
    found = record()
    found["cases"]["decode"] = layer.CASES["decode"] | {"top_k": 8}
    said = layer_report.sizes(found, "decode")
    assert said == "7168 x 2048, 128 experts, 128 tokens"


def test_what_room_for_the_worst_case_costs():
    found, coded = record(), layer_report.fp8_experts()
    roomy = layer_report.default_capacity
    found["results"] += [*fp8_rows(), row(roomy(), 6.0)]
    found["results"].append(row(roomy(coded), 3.0, format="fp8_block128"))
    assert list(layer_report.capacity_cost(found)) == [
        ("bfloat16", "mid", "both", "4.00", "6.00", "+50.0%"),
        ("fp8", "mid", "both", "2.50", "3.00", "+20.0%"),
    ]


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
    # Cases that the second run did not reach keep the rows of the first.
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
