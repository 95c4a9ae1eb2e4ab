"""docs/reliability.md: its rows name what exists, and show what is recorded."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "docs"))

import generate
import reliability_table

ROOT = generate.ROOT
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


@pytest.mark.parametrize("row", reliability_table.PROMISES, ids=lambda row: row[0][:40])
def test_commands_name_what_exists(row) -> None:
    _, command, places = row
    for part in command.split("; "):
        program, *words = part.split()
        files = [w for w in (program, *words) if "/" in w]
        assert files or program == "ctest", part
        for file in files:
            assert (ROOT / file).exists(), file
        if program == "ctest":
            cmake = (ROOT / "tests" / "cc" / "CMakeLists.txt").read_text()
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
    assert "CPU: not yet run" in row_of(found, "minutes 15")


def test_a_suite_counts_for_the_files_that_passed_in_it() -> None:
    suite = {
        "devices": {"kind": "made up", "count": 4},
        "date": "2001-02-03",
        "commit": "0123456789abcdef",
        "failed": ["tests.test_x::test_y"],
        "files": {"test_determinism.py": 5, "test_leaks.py": 0},
    }
    found = reliability_table.promises(records(suites=[suite]), generate.table)
    ran = row_of(found, "test_determinism.py")
    assert "4 x made up, 2001-02-03, 0123456789ab, 1 tests of the suite failed" in ran
    assert "not yet run" in row_of(found, "test_leaks.py")
    # An older record says nothing of files, so nothing is taken from it.
    del suite["files"]
    found = reliability_table.promises(records(suites=[suite]), generate.table)
    assert "not yet run" in row_of(found, "test_determinism.py")


def test_soaks_on_cpus_and_gpus_are_apart() -> None:
    found = reliability_table.promises(records(soaks=[SOAK]), generate.table)
    assert "1200 calls in 15 min, 900 checks, 2 failed" in row_of(found, "minutes 15")
    assert "not yet run" in row_of(found, "minutes 10")


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
    # An older record says nothing of the heap.
    assert "22.0 MiB more." in reliability_table.soak_part(soak)
    heap = {
        "heap_start": 50 * MB,
        "heap_end": 50.5 * MB,
        "launches": 1300,
        "compilations": 90,
        "settled": [200, 10],
    }
    text = reliability_table.soak_part(soak | heap)
    assert "22.0 MiB more, of the host's heap allocated and not freed: 0.50" in text
    assert "after 1100 launches and 80 other compilations." in text
