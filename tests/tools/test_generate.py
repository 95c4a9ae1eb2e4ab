"""docs/generate.py: which records it shows, and what it says about them."""

from __future__ import annotations

import generate
import layer_tables
import matmul_tables
import pytest


def grouped(name="hopper", **changes):
    rows = [
        {"case": "one", "op": "forward", "room": 1, "way": way, "us": us}
        for way, us in ((name, 3.0), (name, 2.0), ("jax", 6.0), ("jax", 1.5))
    ]
    if name == "hopper":
        whole = {"case": "one", "matrix": "experts", "room": 1}
        rows += [
            whole | {"op": "forward", "way": "hopper", "us": 7.0},
            whole | {"op": "forward", "way": "fp8", "us": 4.0},
            whole | {"op": "forward", "way": "jax", "error": "out of memory"},
        ]
    return {
        "device": "made up",
        "count": 1,
        "jax": "9.9",
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "command": "benchmarks/layers/grouped.py",
        "cases": {"one": {"hidden": 100, "inner": 50, "groups": 2, "rows": 1000}},
        "results": [row | changes for row in rows],
    }


def test_grouped_matmuls():
    """Times of both matrices are added; 30 million operations in 5 us are 6 per ps."""
    text = layer_tables.grouped(grouped(), generate.table)
    assert "| one | rows | 1 | 5 | 6 | 8 |  | 1.50 |  |" in text.splitlines()
    assert "| one | forward | 1 | 7 | 4 |  |  |" in text.splitlines()
    assert "matmuls of `hopper`" in text
    older = layer_tables.grouped(grouped("ours"), generate.table)
    assert "matmuls of `mosaic`" in older
    assert "Whole experts" not in older
    with pytest.raises(SystemExit, match="unfit"):
        layer_tables.grouped(grouped(wrong=True), generate.table)


OF_MATMULS = {
    "device": "made up",
    "count": 1,
    "jax": "9.9",
    "date": "2001-02-03",
    "commit": "0123456789abcdef",
    "command": "python -m benchmarks",
}


def test_tables_of_kernels():
    """Times are added; results with a missing product are left out."""
    rows = [
        {"case": "one", "product": product, "us": us, "cublas_us": 4.0, "tflops": 2.0}
        for product, us in (("gate_up", 3.0), ("down", 2.0), ("fp8 down", 1.0))
    ]
    data = OF_MATMULS | {"results": [row | {"wrong": False} for row in rows]}
    data |= {"checks": [{"wrong": False}, {"wrong": False}]}
    text = matmul_tables.kernels(data, generate.table)
    assert "| one | forward | 5 | 2 | 8 | 0.62 |" in text.splitlines()
    assert "| one | fp8" not in text
    assert "2 checks of other sizes" in text
    for part in "results", "checks":
        data[part][0]["wrong"] = True
        with pytest.raises(SystemExit, match="unfit"):
            matmul_tables.kernels(data, generate.table)
        data[part][0]["wrong"] = False


def test_tables_of_decode():
    part = {"part": "experts", "rows": 16, "hit": 3.5, "wrong": False, "gb_s": 9.0}
    rows = [
        part | {"way": "read", "format": "bf16", "us": 10.0},
        part | {"way": "fp8", "format": "fp8_block128", "us": 12.0, "of_read": 1.2},
        {"part": "layer", "tokens": 8, "way": "fp8", "us": 30.0, "exchange_us": 7.0}
        | {"wrong": False},
    ]
    sizes = dict.fromkeys(("hidden", "inner", "groups", "top_k"), 2)
    data = OF_MATMULS | {"sizes": sizes, "results": rows}
    lines = matmul_tables.decode(data, generate.table, data).splitlines()
    assert lines[0].endswith("in microseconds: 16 rows, bf16 10.")
    assert "steps per call" not in lines[0]
    assert "| 16 | 3.5 | `fp8` | 12 | 9 | 1.20 |" in lines
    assert "| 8 | `fp8` | 30 | 7 |" in lines
    assert "Whole layers on 1 GPUs, by tokens" in "\n".join(lines)
    older = data | {"commit": "f" * 40}
    shown = matmul_tables.decode(data, generate.table, older)
    (line,) = (line for line in shown.splitlines() if "Whole layers" in line)
    assert "commit ffffffffffff" in line
    clocks = {"mhz": 1500.0, "most_mhz": 1980.0, "watts": 690.4, "most_watts": 700.0}
    for row in rows[:2]:
        row["clocks"] = clocks
    data["steps"] = 32
    data["xla_flags"] = "--some"
    (first, *_) = matmul_tables.decode(data, generate.table, data).splitlines()
    assert "`XLA_FLAGS='--some' " in first
    assert "experts per token and 32 steps per call." in first
    assert first.endswith(": 16 rows, 690 of 700 W at 1500 of 1980 MHz.")


def test_tables_of_few_rows():
    row = {"weights": "fp8", "rows": 16, "any_us": 176.1, "few_us": 173.8}
    row |= {"ratio": 0.987, "different": 0}
    sizes = {"groups": 64, "hidden": 7168, "inner": 2048, "top_k": 8}
    data = OF_MATMULS | sizes | {"results": [row]}
    lines = matmul_tables.few_rows(data, generate.table).splitlines()
    assert "| fp8 | 16 | 0.25 | 176 | 174 | 0.987 |" in lines
    row["different"] = 1
    with pytest.raises(SystemExit, match="few-rows file is unfit"):
        matmul_tables.few_rows(data, generate.table)


def test_curves_of_training_must_be_the_same():
    dense = [5.0 - step / 20 for step in range(60)]
    data = {
        "device": "made up",
        "count": 8,
        "mesh": {"dp": 2, "ep": 4},
        "jax": "9.9",
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "command": "examples/train.py",
        "seed": 0,
        "alike": {"flax": 40},
        "norms": {"flax": 2e-6},
        "sizes": dict.fromkeys(
            ("blocks", "hidden", "top_k", "experts", "sequences", "length"), 2
        ),
        "curves": {"dense": dense, "flax": [nats + 1e-5 for nats in dense]},
    }
    lines = layer_tables.train(data, generate.table).splitlines()
    assert "flax 1.0e-05 in 40 steps and 1.0e-05 in all 60" in lines[0]
    assert "off by more than 2.0e-06 of its value" in lines[0]
    assert lines[4] == "| 1 | 5.0000 | 5.0000 |"
    assert lines[-1] == "| 60 | 2.0500 | 2.0500 |"
    assert len(lines) == 4 + 13
    other = [*data["curves"]["flax"]]
    other[30] += 1
    for changes in (
        {"curves": {"dense": dense, "flax": other}},
        {"alike": {"flax": 0}},
        {"curves": {"dense": dense}},
    ):
        with pytest.raises(SystemExit, match="unfit"):
            layer_tables.train(data | changes, generate.table)
    with pytest.raises(SystemExit, match="other gradients"):
        layer_tables.train(data | {"norms": {"flax": 2.0}}, generate.table)


def test_no_records_no_text(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    assert generate.on_the_link(generate.benchmarks) == "No run is recorded yet."
