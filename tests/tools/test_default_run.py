"""What a bare `pytest` leaves out and says, and in how many processes it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import HAS_GPUS, ROOT

FILE = "tests/tools/test_benchmark_layer.py"  # all of it is thorough


BARE = ["-o", f"testpaths={FILE}"]


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
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == (5 if left_out else 0), done.stdout + done.stderr
    assert ("= left out =" in done.stdout) == left_out
    assert ("test_ours_is_the_dense_formula" in done.stdout) != left_out
    assert ("bringing up nodes" in done.stdout) == processes
