"""docs/reliability.md: its rows name existing tests, and show what is recorded."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from functools import partial

import generate
import pytest
import reliability_table

from benchmarks.common import recording
from tools import lockstep_run, record_suite

ROOT = generate.ROOT
ROWS = reliability_table.PROMISES
MB = 2**20
SOAK = {
    "device": "cpu",
    "count": 4,
    "date": "2001-02-03",
    "commit": "0123456789abcdef",
    "seed": 7,
    "calls": 1200,
    "seconds": 900.4,
    "checks": 900,
    "failures": {"combine": 2},
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_commands_name_what_exists(row) -> None:
    _, command, places = row
    for part in command.split("; "):
        program, *words = part.split()
        files = [w for w in (program, *words) if "/" in w]
        if words[:1] == ["-m"] and words[1] != "pytest":
            files.append(words[1].replace(".", "/") + ".py")
        assert files or program == "ctest", part
        for file in files:
            assert (ROOT / file).exists(), file
        if program == "ctest":
            cmake = "".join(
                (ROOT / "tests" / folder / "CMakeLists.txt").read_text()
                for folder in ("cc", "emulator")
            )
            assert re.search(rf"\((\w*{words[-1]}\w*)", cmake), part
        if program == ".ci/run":
            text = (ROOT / ".ci" / "run").read_text()
            assert all(f"step_{step}()" in text for step in words)
    if "gpu" in places:
        assert reliability_table._files(command)


def records(*, suites=(), soaks=()):
    return lambda prefix: {"suite": list(suites), "soak": list(soaks)}.get(prefix, [])


def row_of(found: str, word: str) -> str:
    (line,) = (line for line in found.splitlines() if word in line)
    return line


def test_rows_without_a_run_say_so() -> None:
    found = reliability_table.promises(records(), generate.table)
    assert "GPUs: not yet run" in row_of(found, "test_p2p_faults.py -k")
    assert "CPU: not yet run" in row_of(found, "soak --minutes 15")


def test_a_suite_on_cpus_is_none_on_gpus() -> None:
    suite = {
        "devices": {"kind": "cpu", "count": 8, "platform": "cpu"},
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "failed": [],
        "tests": {"test_determinism.py::test_same_bytes": 3},
    }
    found = reliability_table.promises(records(suites=[suite]), generate.table)
    row = row_of(found, "test_determinism.py")
    assert "GPUs: not yet run" in row
    assert "8 x cpu, 2001-02-03, 0123456789ab: 3 passed, 0 failed" in row
    assert "no record" in row_of(found, "test_concurrency.py")


def test_a_suite_counts_for_the_tests_that_ran_in_it() -> None:
    suite = {
        "devices": {"kind": "made up", "count": 4},
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "failed": [
            "tests.test_determinism::test_same_bytes[fp8]",
            "test_p2p_order::test_handles_interleaved",
        ],
        "tests": {
            "test_determinism.py::test_same_bytes": 3,
            "test_determinism.py::test_same_bytes_a_thousand_times": 1,
            "test_leaks.py::test_memory_is_flat": 2,
            "test_p2p_faults.py::test_late_rank": 2,
            "test_handle.py::test_persistent_cache": 1,
        },
        "not_run": ["test_leaks.py 1/2"],
    }
    found = reliability_table.promises(records(suites=[suite]), generate.table)
    ran = row_of(found, "test_determinism.py")
    assert "4 x made up, 2001-02-03, 0123456789ab: 4 passed, 1 failed" in ran
    # Tests that failed have run.
    assert ": 0 passed, 1 failed" in row_of(found, "test_p2p_order.py")
    # Only a part of the file ran within the time limit.
    assert "not yet run" in row_of(found, "test_leaks.py")
    # Only other tests of the file have run.
    assert "not yet run" in row_of(found, "test_p2p_faults.py -k memory")
    assert ": 2 passed, 0 failed" in row_of(found, "test_p2p_faults.py`")
    # Only one of two files has run.
    assert "not yet run" in row_of(found, "test_handle_life.py")
    assert ": 1 passed" in row_of(found, "-k persistent_cache")
    # An older record does not list tests, so it is not used.
    del suite["tests"]
    found = reliability_table.promises(records(suites=[suite]), generate.table)
    assert "not yet run" in row_of(found, "-k persistent_cache")


def test_the_newest_suite_on_the_most_gpus_is_shown() -> None:
    def suite(transport: str, count: int, day: int, passed: int) -> dict:
        return {
            "transport": transport,
            "devices": {"kind": "made up", "count": count},
            "date": f"2001-02-0{day}",
            "commit": "0123456789abcdef",
            "failed": ["test_determinism::test_same_bytes"],
            "tests": {"test_determinism.py::test_same_bytes": passed},
        }

    suites = [
        suite("p2p", 2, 1, 9),
        suite("p2p", 2, 2, 7),
        suite("collective", 4, 3, 8),
        suite("p2p", 1, 4, 9),
    ]
    found = reliability_table.promises(records(suites=suites), generate.table)
    row = row_of(found, "test_determinism.py")
    assert "2 x made up, 2001-02-02, 0123456789ab: 7 passed, 1 failed" in row


def functions_of(file) -> list[str]:
    (path,) = (ROOT / "tests").glob(f"*/{file}")
    text = path.read_text()
    return re.findall(r"^def (test_\w+)", text, re.MULTILINE)


def write_suite(monkeypatch, tmp_path, date: str, count: int, ends: str) -> None:
    """Writes a record as record_suite.py does, from a pytest report per named file."""
    monkeypatch.setattr(recording, "date", lambda: date)
    suite = record_suite.Suite("p2p", [])
    gpu = [command for _, command, places in ROWS if "gpu" in places]
    for file in {file for command in gpu for file in reliability_table._files(command)}:
        cases = "".join(
            f'<testcase classname="tests.{file[:-3]}" name="{name}[a-b.c]">{ends}'
            "</testcase>"
            for name in functions_of(file)
        )
        report = tmp_path / "report.xml"
        report.write_text(
            f'<testsuites><testsuite tests="{len(functions_of(file))}" time="1.5">'
            f"{cases}</testsuite></testsuites>"
        )
        suite.add(report)
    suite.write({"kind": "NVIDIA Made Up", "count": count, "jax": "9.8.7"})


def write_sanitized(monkeypatch) -> None:
    """Writes the record that sanitize.sh makes of two runs."""
    script = (ROOT / "tools" / "sanitize.sh").read_text()
    code = re.search(r"<<'END'\n(.*?)\nEND\n", script, re.DOTALL)[1]
    lines = ["memcheck-one: clean; 0 errors; 3 passed", "racecheck: OUT OF TIME; no"]
    monkeypatch.setattr(sys, "argv", ["-", "0,1", *lines])
    smi = types.SimpleNamespace(stdout="NVIDIA Made Up\nNVIDIA Made Up\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: smi)
    exec(code, {})


def test_records_of_gpus_fill_all_rows(monkeypatch, tmp_path) -> None:
    """The generator fills the table from files as the recorders write them."""
    monkeypatch.setattr(recording, "write", partial(recording.write, folder=tmp_path))
    monkeypatch.setattr(generate, "RESULTS", tmp_path)
    monkeypatch.setenv("JAX_EP_COMMIT", "0123456789abcdef")
    for count, ends in ((4, ""), (2, ""), (1, "<skipped/>")):
        write_suite(monkeypatch, tmp_path, "2001-02-03", count, ends)
    found = reliability_table.promises(generate.records, generate.table)
    rows = [command for _, command, places in ROWS if "gpu" in places]
    for command in rows:
        row = row_of(found, f"| `{'`; `'.join(command.split('; '))}` |")
        assert re.search(r"4 x NVIDIA Made Up, .*: [1-9]\d* passed, 0 failed", row), row
    # Three soaks, fuzzing, sanitizers, several processes.
    assert found.count("not yet run") == 7
    names = {"a/test_x.py::test_y[3]": "passed", "a/test_x.py::test_z": "failed"}
    run = lockstep_run.Run([lockstep_run.Test(*pair) for pair in names.items()])
    for processes, node in ((4, None), (4, 2)):
        suite = record_suite.Suite("shmem", [], processes, node)
        suite.take("test_x.py", run)
        suite.write({"kind": "NVIDIA Made Up", "count": 4, "jax": "9.8.7"})
    assert (tmp_path / "suite-shmem-4proc-2nodes-made-upx4-2001-02-03.json").exists()
    found = reliability_table.promises(generate.records, generate.table)
    row = row_of(found, "record_suite --processes 4")
    for name in ("`shmem`, 4 processes", "`shmem`, 4 processes, 2 ranks per node"):
        assert (
            f"{name} on 4 x NVIDIA Made Up, 2001-02-03, 0123456789ab: 1 passed" in row
        )
    assert row.count("1 failed, 1 file did not finish") == 2
    # They are separate from suites of one process.
    assert "4 x NVIDIA Made Up" in row_of(found, "test_p2p_faults.py -k memory")
    recording.write(
        "soak-made-upx4", SOAK | {"device": "NVIDIA Made Up", "failures": {}}
    )
    write_sanitized(monkeypatch)
    found = reliability_table.promises(generate.records, generate.table)
    assert "1200 calls in 15 min, 900 checks, 0 failed" in row_of(
        found, "soak --minutes 10"
    )
    assert "2 x NVIDIA Made Up, 2001-02-03, 0123456789ab: 1 of 2 runs clean" in row_of(
        found, "sanitize.sh"
    )
    assert "CPU: not yet run" in row_of(found, "soak --minutes 15")
    found = reliability_table.figures(generate.records, generate.table)
    for row in ("faults injected, p2p", "bad inputs, GPUs"):
        assert re.search(r": \d{2,} passed, 0 failed", row_of(found, row))
    for row in ("faults injected, init", "bad inputs, CPUs"):
        assert "no record" in row_of(found, row)
    assert "1200 calls" in row_of(found, "soaked, GPUs")


@pytest.mark.parametrize(
    "command", [reliability_table.FAULTS, reliability_table.FAULTS_ON_CPUS]
)
def test_faults_are_tests_in_which_something_fails(command) -> None:
    chosen, left = set(), set()
    for file in reliability_table._files(command):
        counts = {f"{file}::{name}": 1 for name in functions_of(file)}
        for name, one in counts.items():
            found = reliability_table._named(command, {name: one})[file]
            (chosen if found else left).add(name)
    assert len(chosen) > 5
    assert not any(
        re.search("semantics|bits|memory|content|alone", name) for name in chosen
    )
    assert any(re.search("bits|alone|memory", name) for name in left)


def test_soaks_on_cpus_and_gpus_are_apart() -> None:
    found = reliability_table.promises(records(soaks=[SOAK]), generate.table)
    assert "1200 calls in 15 min, 900 checks, 2 failed" in row_of(
        found, "soak --minutes 15"
    )
    assert "not yet run" in row_of(found, "soak --minutes 10")


def test_a_soak_that_ended_with_an_error_says_so() -> None:
    ended = SOAK | {"error": "a device has less"}
    found = reliability_table.promises(records(soaks=[ended]), generate.table)
    assert "2 failed; an error: a device has less |" in row_of(found, "--minutes 15")


def test_soaks_in_processes_have_a_row_of_their_own() -> None:
    soak = SOAK | {
        "device": "NVIDIA Made Up",
        "failures": {},
        "transport": "shmem",
        "processes": 4,
        "ranks_per_node": 2,
        "one_gpu": True,
    }
    direct = soak | {"transport": "p2p", "ranks_per_node": None, "one_gpu": False}
    on_cpus = soak | {"device": "cpu"}
    found = reliability_table.promises(
        lambda prefix: [soak, direct, on_cpus] * (prefix == "processes-soak"),
        generate.table,
    )
    row = row_of(found, "soak.processes")
    name = (
        "`shmem`, 4 processes sharing the GPU, 2 ranks per node on 1 x NVIDIA Made Up"
    )
    assert f"{name}, " in row
    assert "`p2p`, 4 processes on 4 x NVIDIA Made Up, " in row
    assert row.count("1200 calls in 15 min, 900 checks, 0 failed") == 2
    assert "not yet run" in row_of(found, "soak --minutes 10")


def test_a_soak_tells_a_leak_from_gaps() -> None:
    soak = SOAK | {
        "transport": "collective",
        "jax": "9.8.7",
        "rows": 11,
        "dropped": 5,
        "error": None,
        "free_memory_start": -100 * MB,
        "free_memory_end": -122 * MB,
    }
    # An older record does not have the heap's size.
    assert "the process had 22.0 MiB more memory." in reliability_table.soak_part(soak)
    heap = {
        "heap_start": 50 * MB,
        "heap_end": 50.5 * MB,
        "launches": 1300,
        "compilations": 90,
        "settled": [200, 10],
    }
    text = reliability_table.soak_part(soak | heap)
    assert "22.0 MiB more memory, and 0.50 MiB more of the host's heap were" in text
    assert "after 1100 launches and 80 other compilations." in text
