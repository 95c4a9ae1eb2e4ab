"""Every benchmark runs each kind of its cases in a tiny form, and shows its record.

On CPUs over collective, or over JAX_EP_TEST_TRANSPORT. Recorders and their workers are
unchanged except for sizes and XLA's flags, since all run in this process. The kinds are
those that the benchmarks list. Each test says what is left to GPUs. What needs a new
JAX is in test_tiny_newest.py.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import call_tables
import generate
import layer_tables
import performance_tables
import pytest

import jax_ep
from benchmarks.calls import (
    collective,
    cpu_steps,
    draw,
    format_errors,
    host_time,
    nodes,
    options_cost,
    options_report,
    p2p,
    window_kernels,
)
from benchmarks.common import recording
from benchmarks.layers import cases as layer_cases
from benchmarks.layers import decode, grouped, layer, routers
from benchmarks.layers import report as layer_report
from benchmarks.limits import (
    few_rows,
    grouped_kernels,
)
from benchmarks.overlap import overlap
from benchmarks.overlap import report as overlap_report
from benchmarks.soak import processes as soak_processes
from benchmarks.soak import program as soak_program
from benchmarks.soak import soak
from jax_ep._cli.bench import measure
from jax_ep._cli.bench import report as p2p_report
from jax_ep._cli.bench import routings as p2p_cases
from support import helpers
from support.tiny import ON_CPU, RANKS, TRACE, rows_by, tiny, unmeasured, written
from tools import fuzz, lockstep_run

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_compiles")]

ROOT = recording.ROOT


def over(*names):
    """The transports to test, each once."""
    return dict.fromkeys((helpers.TRANSPORT, *names))


# ---- Recorders with workers ----------------------------------------------------------


def test_layer(tmp_path):
    """Left to GPUs: `hopper`, which test_hopper_experts.py lowers for them."""
    layers = ["--layers", *over("collective"), "dense", "ragged"]
    record = tiny(layer, tmp_path, *layers, "--transport", helpers.TRANSPORT)
    assert record["problems"] == []
    assert layer_report.untimed(record) == []
    rows = [row for row in record["results"] if row["pass"] in layer_cases.PASSES]
    rows = [row for row in rows if row["layer"] != "experts"]
    assert not any("error" in row or row["wrong"] for row in record["results"])
    ours, names = [*over("collective")], ("layer", "format", "flags")
    kinds = {(name, each, "") for name in ours for each in layer.FORMATS}
    coded = layer_report.fp8_experts(helpers.TRANSPORT)
    kinds |= {(layer_report.fp8_experts(name), "fp8_block128", "") for name in ours}
    kinds |= {("dense", "bf16", "")}
    kinds |= {("ragged", "bf16", label) for _, label in measure.RAGGED[0][1]}
    for made in (layer_report.counted, layer_report.default_experts):
        kinds.add((made(helpers.TRANSPORT), "bf16", ""))
    roomy = layer_report.default_capacity
    kinds |= {
        (roomy(helpers.TRANSPORT), "bf16", ""),
        (roomy(coded), "fp8_block128", ""),
    }
    found = rows_by(rows, *names, "pass")
    assert found.keys() == {(*k, each) for k in kinds for each in layer_cases.PASSES}
    assert all(row["tokens_with_drops"] == 0 for row in rows if row["layer"] != "dense")
    ways = {row["matmul"] for row in record["results"] if row["layer"] == "experts"}
    assert ways >= {name for name in layer.MATMULS if name != "hopper"}
    others = [row for row in record["results"] if row["pass"] not in layer_cases.PASSES]
    steps = itertools.product(
        ["step"], (helpers.TRANSPORT, coded), layer_cases.MICROBATCHES
    )
    found = rows_by(others, "pass", "layer", "microbatches")
    assert found.keys() == {*steps, ("quantize", coded, None)}
    assert all(row["gb_s"] > 0 for row in others if row["pass"] == "quantize")
    shown = list(layer_report.steps(record))
    assert len(shown) == len(layer_cases.MICROBATCHES)
    assert all(float(cell) > 0 for each in shown for cell in each[3:])
    assert set(layer_report.FP8_COLUMNS) <= set(layer_report.table(record)[0])
    assert all("%" in each[-1] for each in layer_report.stats_cost(record))
    assert len(list(layer_report.stats_cost(record))) == len(layer_cases.PASSES)
    assert len(list(layer_report.capacity_cost(record))) == 2 * len(layer_cases.PASSES)
    layer_tables.all_layers(record, generate.table)
    layer_tables.layers_in_short(record, generate.table)


def test_p2p(tmp_path, capsys):
    """Left to GPUs: several `num_sms`, the peak of writes; CUDA graphs."""
    asked = ["--transports", *over("collective"), "ragged"]
    record = tiny(p2p, tmp_path, *asked)
    assert p2p_report.failures(record) == record["problems"] == []
    rows = record["results"]
    assert not any("error" in row for row in rows)
    names = ("transport", "routing", "zero_tail", "flags", "op")
    kinds = {
        (transport, *case, None)
        for transport in over("collective")
        for case in [*((r, False) for r in p2p_cases.ROUTINGS), ("uniform", True)]
    }
    ragged = (label for _, label in measure.RAGGED[0][1])
    kinds |= {("ragged", "uniform", False, label) for label in ragged}
    default = [row for row in rows if row["num_sms"] is None]
    found = rows_by(default, *names)
    assert found.keys() == {(*k, op) for k in kinds for op in ("dispatch", "combine")}
    assert len(capsys.readouterr().out.splitlines()) > len(rows)
    if draw.draw.available():
        (path,) = tmp_path.glob("*.json")
        draw.main([str(path), str(tmp_path / "picture.svg")])
        assert (tmp_path / "picture.svg").read_text().count("ragged_all_to_all") > 0


def test_p2p_in_every_format(tmp_path, capsys):
    names = jax_ep.formats.names()
    asked = ["--formats", *names, "--combine-format", "fp8_block128"]
    asked += ["--codes", "fp8_block128", "nvfp4"]
    asked += ["--transports", *over("collective"), "--routing", "uniform"]
    record = tiny(p2p, tmp_path, *asked)
    assert record["kind"] == "codes"
    assert p2p_report.failures(record) == []
    rows = [row for row in record["results"] if row["num_sms"] is None]
    keys = rows_by(rows, "transport", "op", "format")
    wanted = [*(("dispatch", name) for name in names)]
    coded = ("fp8_block128, codes", "nvfp4, codes")
    wanted += [("dispatch", name) for name in coded]
    wanted += [("combine", "bf16"), ("combine", "fp8_block128")]
    assert keys.keys() == {(name, *k) for name in over("collective") for k in wanted}
    # CPUs have no p2p, which the report shows.
    shown = [row | {"transport": "p2p"} for row in rows if row["num_sms"] is None]
    capsys.readouterr()
    p2p_report.print_formats(shown)
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*names, *coded))
    # Exactly as many bytes as in a dispatch that quantises.
    for each in coded:
        sent, same = (
            keys[helpers.TRANSPORT, "dispatch", name]["bytes"]
            for name in (each, each.removesuffix(", codes"))
        )
        assert sent == same


def test_overlap_beside_everything(tmp_path):
    """Left to GPUs: `hopper`, which test_hopper_experts.py lowers; their traces."""
    asked = ["--arrangements", "halves", "--beside", *overlap.BESIDE, *TRACE]
    asked += ["--transport", helpers.TRANSPORT]
    record = tiny(overlap, tmp_path, *asked)
    seen = {row["beside"] for row in record["results"]} - {None}
    assert seen == set(overlap.BESIDE)
    assert unmeasured(record) == ({"hopper"} if ON_CPU else set())
    beside = [row for row in record["results"] if row.get("exposed_us") is not None]
    for row in beside:
        assert row["exposed_us"] == row["us"] - row["beside_us"]
        assert row["hidden"] == 1 - row["exposed_us"] / row["alone_us"]
    assert [row["graphs"] for row in record["graphs"]] == [True] * 2 + [False] * 2
    assert len(list(overlap_report.graphs(record))) == 2
    performance_tables.overlap(record, generate.table)


def test_options(tmp_path, capsys):
    record = tiny(options_cost, tmp_path, "--transport", helpers.TRANSPORT)
    assert options_report.failures(record) == options_report.missing(record) == []
    wanted = {
        (name, op, sms)
        for name in (options_report.PLAIN, *options_report.NAMES)
        for op in ("dispatch", "combine")
        for sms in ((None, 8) if name == options_report.FIRST_HALF else (None,))
        if options_report.measured(op, name)
    }
    found = rows_by(record["results"], "option", "op", "num_sms")
    assert found.keys() == wanted
    assert all(row["us"] > 0 for row in record["results"])
    performance_tables.options(record, generate.table)
    performance_tables.halves(record, generate.table)


def host_rows(record):
    assert record["problems"] == []
    rows = rows_by(record["results"], *host_time.KEYS)
    ops = ("dispatch", "combine")
    transports, tokens = record["transports"], record["tokens"]
    assert rows.keys() == set(itertools.product(transports, ops, tokens))
    return rows.values()


def test_host_time(tmp_path, capsys):
    """Left to GPUs: p2p beside collective, and times that end before results do."""
    asked = ["--transports", *over("collective"), "--processes", "2"]
    record = tiny(host_time, tmp_path, *asked)
    assert record["old_commit"] is None
    for row in host_rows(record):
        assert 0 < row["this_us_least"] <= row["this_us"]
        assert row["this_launched_us"] <= row["this_done_us"]
        assert (row["this_processes"], row["wrong"]) == (2, False)
        assert not any("ratio" in name or name.startswith("old") for name in row)
    assert len(capsys.readouterr().out.splitlines()) > len(record["results"])


def test_host_time_of_other_results(tmp_path, monkeypatch, capsys):
    """Both builds are this one, but one of them has a different result once."""
    given = host_time.worker.measured
    seen = []

    def measured(case, op, spec):
        seen.append(op)
        row = given(case, op, spec)
        return row | {"checksum": row["checksum"] + (seen == ["dispatch"])}

    monkeypatch.setattr(host_time.worker, "measured", measured)
    words = ["--tiny", "--results", str(tmp_path), "--devices", str(RANKS)]
    words += ["--processes", "1", "--transports", helpers.TRANSPORT]
    words += ["--old", str(ROOT), "--old-commit", "abc"]
    # The native modules of an installed jax_ep are elsewhere.
    monkeypatch.setattr(host_time, "foreign", lambda head, folder: [])
    assert host_time.main(words) == 1
    record = written(tmp_path)
    assert record["old_commit"] == "abc"
    assert {row["op"]: row["wrong"] for row in host_rows(record)} == {
        "dispatch": True,
        "combine": False,
    }
    assert capsys.readouterr().out.count("RESULTS DIFFER") == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_host_time_beside_an_older_build(tmp_path, capfd):
    """In processes. The older build is this build in another folder."""
    if any("ScikitBuild" in type(finder).__name__ for finder in sys.meta_path):
        pytest.skip("an editable install comes before any folder on the path")
    old = tmp_path / "old"
    old.mkdir()
    for folder in jax_ep.__path__:
        for path in pathlib.Path(folder).iterdir():
            (old / "jax_ep").mkdir(exist_ok=True)
            link = old / "jax_ep" / path.name
            if not link.exists():
                link.symlink_to(path)
    words = ["--platform", "cpu", "--processes", "1", "--old-commit", "abc"]
    words += [*host_time.TINY, "--results", str(tmp_path / "results")]
    assert host_time.main([*words, "--old", str(old)]) == 0
    record = written(tmp_path / "results")
    assert (record["device"], record["count"]) == ("cpu", 2)
    for row in host_rows(record):
        assert row["ratio"] == row["this_us"] / row["old_us"]
        assert row["ratio_least"] == row["this_us_least"] / row["old_us_least"]
        assert row["wrong"] is False
    # A folder without a build imports another one, or none.
    empty = tmp_path / "empty"
    empty.mkdir()
    host_time.main([*words, "--old", str(empty)])
    record = written(tmp_path / "results")
    (problem,) = record["problems"]
    assert problem.startswith("old: ")
    assert all("old_us" not in row for row in record["results"])
    assert "MISSING: old: " in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.multiprocess
def test_nodes(tmp_path):
    """In one process and in several. Left to GPUs: the ways of p2p and shmem."""
    words = "--platform cpu --ranks 2 --tokens 8 --hidden 64 --experts 8 --top-k 2"
    words += " --repeats 2 --milliseconds 1 --unrolled 4 --budget 120 --seed 7"
    ways = [name for name, (_, transport, *_) in nodes.WAYS.items() if transport == CPU]
    words = [*words.split(), "--ways", *ways, "--results", str(tmp_path)]
    assert nodes.main(words) == 0
    record = written(tmp_path)
    assert (record["device"], record["count"], record["seed"]) == ("cpu", 2, 7)
    rows = rows_by(record["rows"], "way", "op")
    assert rows.keys() == {(way, op) for way in ways for op in ("dispatch", "combine")}
    for row in rows.values():
        assert 0 < row["us_least"] <= row["us"] <= row["us_most"]
        assert row["differences"] == {}
        assert row["calls"] % 4 == 0
    assert rows[CPU, "dispatch"]["to_one_process"] > 0
    rows[CPU, "combine"]["differences"] = {"y": 3}
    rows[CPU, "dispatch"]["to_one_process"] = 1.0234
    lines = performance_tables.nodes(record, generate.table).splitlines()
    assert "seed 7" in lines[0]
    combine, dispatch = (line for line in lines if f"| {CPU} |" in line)
    assert combine.endswith(" | no |")
    assert dispatch.endswith("| 1.023 | yes |")


CPU = "collective"  # the transport that CPUs have


# ---- Recorders of one process --------------------------------------------------------


def test_collective(tmp_path):
    record = tiny(collective, tmp_path)
    (row,) = record["results"]
    assert row["num_dropped"] == 0
    assert min(value for name, value in row.items() if name.endswith("_us")) > 0
    assert (row["remote_bytes_per_rank"] > 0) == (RANKS > 1)
    call_tables.collective(record, generate.table)


@pytest.mark.exclusive
def test_soak(tmp_path):
    """Runs every option once; test_soak.py has the layers without options."""
    calls = len(soak.OPTIONS) * soak.STEPS * soak_program.CALLS_A_LAYER
    words = f"--calls {calls} --devices {RANKS} --transport {helpers.TRANSPORT} "
    words += f"--sizes --option-sizes 8 --threads 1 --folder {tmp_path}"
    assert soak.run(soak.parse(words.split())) == 0
    record = written(tmp_path)
    assert (record["failures"], record["error"]) == ({}, None)
    assert record["launches"] == len(soak.OPTIONS) == len(record["options"])
    assert record["calls"] == calls
    assert record["checks"] > calls
    assert "--sizes --option-sizes 8" in record["command"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_soak_in_processes(tmp_path):
    words = "--processes 2 --platform cpu --transport collective --options halves"
    words += f" --calls 16 --sizes --option-sizes 8 --folder {tmp_path}"
    assert soak_processes.main(words.split()) == 0
    record = written(tmp_path)
    assert (record["processes"], record["count"], record["calls"]) == (2, 2, 16)
    assert (record["failures"], record["error"]) == ({}, None)
    assert min(record["rows"], record["checks"]) > 0


def test_format_errors(capsys):
    format_errors.main()
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert list(found) == [n for n in jax_ep.formats.names() if n != "bf16"]
    assert all(0 < float(error) <= 0.2 for error in found.values())


# ---- Programs that are compiled where they run ---------------------------------------
# A fake compiler makes programs that print what a record has. Left to GPUs, and to the
# steps cpp and cuda of .ci/run, which compile and run what they can: the real programs.


def newest(prefix):
    """The newest committed record of this name."""
    return json.loads(sorted(generate.RESULTS.glob(f"{prefix}-*.json"))[-1].read_text())


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A function that makes the compiler's programs print a text."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(name, text, *more):
        (tmp_path / "text").write_text(text)
        path = folder / name
        path.write_text(COMPILER.format(text=tmp_path / "text", more="\n".join(more)))
        path.chmod(0o755)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    # The folder of sys.executable comes before PATH.
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return make


COMPILER = """#!/bin/bash
[ "$1" != --version ] || {{ echo "made up 1.0"; exit; }}
given=$*
while [ $# -gt 0 ]; do
  case $1 in -o | -B | --build) made=$2 ;; esac
  shift
done
program() {{ printf '#!/bin/bash\\ncat %q\\n' "{text}" >"$1" && chmod +x "$1"; }}
{more}
[ -d "$made" ] || program "$made"
"""
# What the fake cmake does: makes a folder with programs.
FOLDER = (
    'mkdir -p "$made"',
    f'for name in cpu_steps {" ".join(fuzz.TARGETS)}; do program "$made/$name"; done',
    'echo "CMAKE_CXX_COMPILER:FILEPATH=$0" >"$made/CMakeCache.txt"',
)
MADE_UP = {"driver", "nvcc", "commit", "date", "command", "machine", "compiler"}


def same(found, record):
    """The record is the same, except for who measured it and when."""
    for name in record.keys() - MADE_UP:
        assert found[name] == record[name], name
    return found.keys() >= record.keys()


def test_grouped_kernels_have_the_sizes_of_grouped():
    """The C++ programs have the same sizes as grouped."""
    text = grouped_kernels.SIZES.read_text()
    found = dict(re.findall(r'\{"([\w-]+)", ([\d, ]+)\}', text))
    assert tuple(found) == grouped_kernels.CASES
    for name, case in grouped.CASES.items():
        assert tuple(map(int, found[name].split(","))) == tuple(case)


def kernels_report(wrong=0, **changes):
    check = {"shape": "tiny", "product": "down", "element": "bf16"}
    check |= {"difference": 0.001, "wrote_past": 0, "wrong": wrong}
    row = {"case": "mid", "product": "fp8 down", "us": 175.2, "cublas_us": 300.0}
    row |= {"ratio": 0.584, "tflops": 784.0, "wrong": 0} | changes
    return {"device": "NVIDIA H200", "count": 1, "checks": [check], "results": [row]}


def test_grouped_kernels(compiler, tmp_path, capsys):
    report = kernels_report()
    compiler("nvcc", json.dumps(report), f'echo "$given" >{tmp_path}/given')
    results = tmp_path / "results"
    words = ["--cases", "mid", "--only", "fp8", "--results", str(results)]
    assert grouped_kernels.main(words) == 0
    given = (tmp_path / "given").read_text()
    assert "-gencode=arch=compute_90a,code=sm_90a" in given.split()
    assert "cuda/matmul/codes.cu" in given
    assert same(written(results), report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["mid", "fp8", "down", "175", "784", "0.584"]
    assert lines[-1] == "1 checks, 0 wrong"


@pytest.mark.parametrize("wrong", [{"wrong": 1}, {"wrong": 0, "us": 1.0}])
def test_grouped_kernels_wrong(compiler, tmp_path, capsys, wrong):
    report = kernels_report(**wrong)
    report["results"][0]["wrong"] = int(not wrong["wrong"])
    compiler("nvcc", json.dumps(report))
    assert grouped_kernels.main(["--results", str(tmp_path / "results")]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("different", [0, 3])
def test_few_rows(compiler, tmp_path, capsys, different):
    row = {"weights": "fp8", "rows": 16, "any_us": 176.1, "few_us": 173.8}
    row |= {"ratio": 0.987, "different": different}
    report = {"device": "NVIDIA H200", "count": 1, "results": [row]}
    compiler("nvcc", json.dumps(report), f'echo "$given" >{tmp_path}/given')
    results = tmp_path / "results"
    words = ["--rows", "16", "--results", str(results)]
    assert few_rows.main(words) == int(different > 0)
    given = (tmp_path / "given").read_text().split()
    assert str(few_rows.SOURCE) in given
    assert {"few_rows.cu", "codes.cu"} <= {pathlib.Path(word).name for word in given}
    assert same(written(results), report)
    line = capsys.readouterr().out.splitlines()[-1].split()
    marked = [str(different), "DIFFERENT"] if different else []
    assert line == ["fp8", "16", "176.1", "173.8", "0.987", *marked]


def test_window_kernels(compiler, tmp_path):
    record = newest("kernels")
    head = f"{record['count']} x {record['device']}, seed {record['seed']}"
    rows = [" ".join(map(str, row.values())) for row in record["results"]]
    compiler("nvcc", "\n".join([head, *record["checked"], *rows, ""]))
    results = tmp_path / "results"
    words = ["--record", "--results", str(results), "--tokens", "1,8"]
    assert window_kernels.main(words) == 0
    found = written(results)
    assert same(found, record)
    assert found["command"].endswith("--tokens 1,8")
    performance_tables.sms(found, generate.table)


def test_cpu_steps(compiler, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_steps, "BUILD", tmp_path / "build")
    record = newest("cpu")
    program = {
        name: record[name] for name in record if name not in {"seed", "draws", *MADE_UP}
    }
    compiler("cmake", json.dumps(program), *FOLDER)
    cores = os.sched_getaffinity(0)
    results = tmp_path / "results"
    cpu_steps.main(["--results", str(results)])
    assert os.sched_getaffinity(0) == cores
    found = written(results)
    assert found["results"] == record["results"]
    assert found["compiler"] == "made up 1.0"
    assert len(capsys.readouterr().out.splitlines()) > len(record["results"])
    call_tables.cpu(found, generate.table)


def test_fuzz(compiler, tmp_path, capsys):
    told = {"executions": 31, "edges": 5, "seconds": 2.0, "cpu_seconds": 1.5}
    compiler("cmake", json.dumps(told), *FOLDER)
    words = ["--minutes", "0.1", "--build", str(tmp_path / "build"), "--seed", "5"]
    assert fuzz.main(words) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"seed 5: {31 * len(fuzz.TARGETS)} executions in 0 min" in last
    assert last.endswith("by tests/cc/fuzz/driver.cc, 0 targets failed")


# ---- All of them ---------------------------------------------------------------------

HERE = {
    *(collective, cpu_steps, decode, draw, few_rows, format_errors),
    *(
        fuzz,
        grouped,
        grouped_kernels,
        host_time,
        layer,
        nodes,
    ),
    *(options_cost, overlap, p2p, lockstep_run, routers, soak, soak_processes),
    window_kernels,
}
# Run by those above.
WORKERS = {
    *("layers.worker", "overlap.worker", "calls.nodes_process"),
    *("calls.options_worker", "calls.host_time_worker"),
}
# Tested by .ci/run or in their own files.
ELSEWHERE = {
    *("tools.build_wheels", "tools.release_notes"),
}


def test_no_benchmark_is_left_out():
    """A new benchmark must be tested here, too."""
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("benchmarks", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    workers = {f"benchmarks.{name}" for name in WORKERS}
    assert found == workers | ELSEWHERE | {module.__name__ for module in HERE}


PYTHON = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >>{said}
"""


@pytest.mark.parametrize("gpus", [1, 4])
def test_what_records_on_gpus_is_understood(gpus, tmp_path, monkeypatch):
    """The programs accept all commands of record_gpu.sh, except sanitize.sh's."""
    folder, said = tmp_path / "bin", tmp_path / "said"
    folder.mkdir()
    names = "\n".join(["echo NVIDIA Made Up"] * gpus)
    scripts = {"nvidia-smi": names, "python": PYTHON.format(said=said)}
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    script = ROOT / "tools" / "record_gpu.sh"
    steps = re.search(r"Steps: (.*?)\.", script.read_text().replace("\n#", ""))[1]
    steps = [step for step in steps.split() if step != "sanitize"]
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", "python")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    subprocess.run([str(script), *steps], check=True, stdout=subprocess.DEVNULL)
    commands = [shlex.split(line) for line in said.read_text().splitlines()]
    assert len(commands) >= len(steps)
    for option, name, *words in commands:
        assert option == "-m"
        if name == "pytest":
            continue
        (module,) = (m for m in HERE if m.__name__ == name)
        module.parse(words)
