"""What a bare `pytest` leaves out and prints, and in how many processes it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import HAS_GPUS, ROOT, parts
from support.launch import run_to_end

FILE = "tests/tools/test_benchmark_layer.py"  # all of it is thorough
CASES = "tests/tools/test_record_concurrent.py"  # a test of four cases, two of one


BARE = ["-o", f"testpaths={FILE}"]


def pytest_run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    return run_to_end(
        [sys.executable, "-m", "pytest", "-q", *options, *words], cwd=ROOT, env=env
    )


@pytest.mark.parametrize(
    ("words", "left_out", "processes"),
    [
        (BARE, True, not HAS_GPUS),
        pytest.param([*BARE, "-n", "0"], True, False, marks=pytest.mark.thorough),
        pytest.param(
            [FILE, "--collect-only"], False, False, marks=pytest.mark.thorough
        ),
    ],
)
def test_a_bare_run_leaves_out_the_thorough(words, left_out, processes) -> None:
    done = pytest_run(*words)
    assert done.returncode == (5 if left_out else 0), done.stdout + done.stderr
    assert ("= left out =" in done.stdout) == left_out
    assert ("test_ours_is_the_dense_formula" in done.stdout) != left_out
    assert ("bringing up nodes" in done.stdout) == processes


@pytest.mark.parametrize(
    ("most", "kept"), [(1, "a"), (2, "ag"), (3, "adg"), (7, "abcdefg"), (9, "abcdefg")]
)
def test_spreads_cases(most: int, kept: str) -> None:
    assert parts.spread("abcdefg", most) == list(kept)


def test_cases_of_each_test() -> None:
    done = pytest_run(CASES, "--collect-only", "--cases", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert [line.rpartition("::")[2] for line in found] == [
        "test_records_both[right]",
        "test_records_both[no end]",
        "test_chained_calls_must_be_right",
        "test_without_gpus",
    ]
    assert "4/6 tests collected (2 deselected)" in done.stdout
