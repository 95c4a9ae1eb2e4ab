"""Every benchmark runs in its tiny form, without a wrong result, and writes a record.

On CPUs over collective, or over JAX_EP_TEST_TRANSPORT. Programs that need nvcc run with
a fake one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from benchmarks.calls import (
    cpu_steps,
    format_errors,
    host_time,
    nodes,
    options_cost,
    p2p,
    window_kernels,
)
from benchmarks.common import recording
from benchmarks.layers import decode, grouped, layer, routers
from benchmarks.layers import options as layer_options
from benchmarks.limits import few_rows, grouped_kernels
from benchmarks.overlap import overlap
from benchmarks.soak import processes as soak_processes
from benchmarks.soak import program as soak_program
from benchmarks.soak import soak
from support import helpers
from support.tiny import RANKS, written
from tools import fuzz, lockstep_run

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_compiles")]

ROOT = recording.ROOT
OVER = ("--transport", helpers.TRANSPORT)
DEVICES = ("--devices", str(RANKS))
FORMATS = ("--formats", "bf16", "nvfp4", "--combine-format", "fp8_block128")
# What --tiny needs besides, by benchmark.
TINY = {
    "p2p": (p2p, *DEVICES),
    "formats": (p2p, *DEVICES, "--transports", "collective", *FORMATS),
    "codes": (p2p, *DEVICES, "--transports", "collective", "--codes", "nvfp4"),
    "host_time": (host_time, *DEVICES, "--processes", "1"),
    "options_cost": (options_cost, *DEVICES, *OVER),
    "layer": (layer, *DEVICES, *OVER),
    "overlap": (overlap, *DEVICES, *OVER, "--arrangements", "halves"),
    "decode": (decode, *DEVICES, "--rows", "16"),
    "routers": (routers,),
    "grouped": (grouped,),
    "layer_options": (layer_options,),
}


def is_whole(record):
    """Whether a record says who measured what, when and where, and has good rows."""
    facts = ("kind", "commit", "date", "device", "count", "command", "jax", "libraries")
    assert all(record.get(name) is not None for name in facts), record
    assert record["command"].startswith("python -m benchmarks.")
    assert not record.get("problems")
    rows = record["results"]
    assert rows
    for row in rows:
        assert not row.get("wrong"), row
    return True


@pytest.mark.parametrize("name", TINY)
def test_tiny(name, tmp_path):
    module, *words = TINY[name]
    assert module.main(["--tiny", "--results", str(tmp_path), *words]) == 0
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert is_whole(record)
    # A row a line, so that a record can be read and compared.
    assert len(path.read_text().splitlines()) <= len(record) + 200


@pytest.mark.exclusive
def test_soak(tmp_path):
    """Runs every option once; test_soak.py has the layers without options."""
    calls = len(soak.OPTIONS) * soak.STEPS * soak_program.CALLS_A_LAYER
    words = f"--calls {calls} --devices {RANKS} --transport {helpers.TRANSPORT} "
    words += f"--sizes --option-sizes 8 --threads 1 --folder {tmp_path}"
    assert soak.run(soak.parse(words.split())) == 0
    record = written(tmp_path)
    assert record["launches"] == len(soak.OPTIONS) == len(record["options"])
    assert record["checks"] > record["calls"] == calls


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["nodes", "soak"])
def test_in_processes(what, tmp_path):
    if what == "soak":
        words = "--processes 2 --platform cpu --transport collective --options halves"
        words += f" --calls 16 --sizes --option-sizes 8 --folder {tmp_path}"
        assert soak_processes.main(words.split()) == 0
        assert written(tmp_path)["calls"] == 16
        return
    words = "--platform cpu --ranks 2 --tokens 8 --hidden 64 --experts 8 --top-k 2"
    words += " --repeats 2 --milliseconds 1 --unrolled 4 --budget 120 --seed 7"
    ways = [n for n, (_, name, *_) in nodes.WAYS.items() if name == "collective"]
    words = [*words.split(), "--ways", *ways, "--results", str(tmp_path)]
    assert nodes.main(words) == 0
    rows = written(tmp_path)["rows"]
    assert len(rows) == 2 * len(ways)
    assert all(row["us"] > 0 and row["differences"] == {} for row in rows)


def test_format_errors(capsys):
    format_errors.main()
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert found
    assert all(0 < float(error) <= 0.2 for error in found.values())


# ---- Programs that are compiled where they run ---------------------------------------
# A fake compiler makes programs that print a report.


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


def kernels_report(**changes):
    check = {"shape": "tiny", "product": "down", "element": "bf16"}
    check |= {"difference": 0.001, "wrote_past": 0, "wrong": 0}
    row = {"case": "mid", "product": "fp8 down", "us": 175.2, "cublas_us": 300.0}
    row |= {"ratio": 0.584, "tflops": 784.0, "wrong": 0} | changes
    return {"device": "NVIDIA H200", "count": 1, "checks": [check], "results": [row]}


def rows_report(**changes):
    row = {"weights": "fp8", "rows": 16, "any_us": 176.1, "few_us": 173.8}
    row |= {"ratio": 0.987, "different": 0} | changes
    return {"device": "NVIDIA H200", "count": 1, "results": [row]}


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("module", "report", "field"),
    [(grouped_kernels, kernels_report, "wrong"), (few_rows, rows_report, "different")],
    ids=["grouped_kernels", "few_rows"],
)
def test_matmuls(module, report, field, wrong, compiler, tmp_path, capsys):
    compiler(
        "nvcc", json.dumps(report(**{field: wrong})), f'echo "$given" >{tmp_path}/given'
    )
    results = tmp_path / "results"
    assert module.main(["--results", str(results)]) == wrong
    given = (tmp_path / "given").read_text().split()
    assert {str(module.SOURCE), "-gencode=arch=compute_90a,code=sm_90a"} <= set(given)
    assert written(results)["results"][0][field] == wrong
    assert (field.upper() in capsys.readouterr().out) == bool(wrong)


def test_grouped_kernels_have_the_sizes_of_grouped():
    """The C++ programs have the sizes of grouped that are in bfloat16 and aligned."""
    text = grouped_kernels.SIZES.read_text()
    found = dict(re.findall(r'\{"([\w-]+)", ([\d, ]+)\}', text))
    assert tuple(found) == grouped_kernels.CASES
    for name in grouped_kernels.CASES:
        case = grouped.CASES[name]
        assert case.dtype == "bfloat16"
        assert tuple(map(int, found[name].split(","))) == case[:4]


def test_window_kernels(compiler, tmp_path):
    lines = ["4 x NVIDIA H200, seed 7", "checked T 1, sms 0: right"]
    lines += [
        "call T sms us GB/s floor us",
        "cached dispatch 1024 24 139.2 287.3 113.0",
    ]
    compiler("nvcc", "\n".join([*lines, ""]))
    words = ["--record", "--results", str(tmp_path / "results"), "--tokens", "1024"]
    assert window_kernels.main(words) == 0
    record = written(tmp_path / "results")
    assert (record["count"], record["device"], record["seed"]) == (4, "NVIDIA H200", 7)
    (row,) = record["results"]
    assert (row["call"], row["us"]) == ("cached dispatch", 139.2)


def test_cpu_steps(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_steps, "BUILD", tmp_path / "build")
    (newest,) = recording.RESULTS.glob("cpu-*.json")
    report = json.loads(newest.read_text())
    del report["compiler"]
    compiler("cmake", json.dumps(report), *FOLDER)
    cores = os.sched_getaffinity(0)
    cpu_steps.main(["--results", str(tmp_path / "results")])
    assert os.sched_getaffinity(0) == cores
    assert written(tmp_path / "results")["compiler"] == "made up 1.0"


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
    *(module for module, *_ in TINY.values()),
    *(cpu_steps, few_rows, format_errors, fuzz, grouped_kernels, lockstep_run, nodes),
    *(soak, soak_processes, window_kernels),
}
# Run by those above.
WORKERS = {
    *("layers.worker", "overlap.worker", "calls.nodes_process"),
    *("calls.options_worker", "calls.host_time_worker"),
}
# Tested by .ci/run or in their own files.
ELSEWHERE = {"tools.build_wheels", "tools.release_notes"}


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
