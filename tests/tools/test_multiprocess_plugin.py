"""Tests that run in several processes at once: the plugin and what starts it."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tools import lockstep_run

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

# Tests that behave differently than in one process; test_dies needs a restart.
ODD = """
import os
from support import helpers
import jax
import numpy as np
import pytest

own = jax.process_index()


def test_nans_keep_their_bits():
    mesh = helpers.make_mesh(2)
    bits = np.array([[0x7F800001, 0xFFC00005], [3, 0x80000000]], np.uint32)
    rows = list(bits[:, None].view(np.float32))
    array = helpers.put(mesh, rows)
    assert not array.is_fully_addressable
    helpers.assert_bits(np.asarray(array), np.concatenate(rows))
    both = helpers.unstack(array, 2)
    assert sorted(both) == [0, 1]


def test_differs():
    assert own == 0, "not in the second"


def test_skipped():
    helpers.make_mesh(1)


def test_dies():
    if own == 1:
        os._exit(7)


def test_after():
    assert own in (0, 1)
"""


def test_processes_stay_together(tmp_path: pathlib.Path) -> None:
    """Runs a file of the real suite, too; the rest runs after a process has died."""
    odd = tmp_path / "test_odd.py"
    odd.write_text(ODD)
    mesh = lockstep_run.file_of("mesh")
    tests = [str(odd), f"{mesh}::test_one_axis"]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_EP_TEST_TRANSPORT": "collective"}
    found = lockstep_run.run(
        tests, 2, "1", tmp_path / "logs", time.monotonic() + 600, environment
    )
    assert found.complete, found.log
    outcomes = {test.name.rpartition("::")[2]: test.outcome for test in found.tests}
    assert outcomes == {
        "test_nans_keep_their_bits": "passed",
        "test_differs": "failed",
        "test_skipped": "skipped",
        "test_dies": "failed",
        "test_after": "passed",
        "test_one_axis[AxisType.Auto]": "passed",
        "test_one_axis[AxisType.Explicit]": "passed",
    }, found.log
    said = {test.name.rpartition("::")[2]: test.message for test in found.tests}
    assert "passed in 0, failed in 1" in said["test_differs"]
    assert "not in the second" in said["test_differs"]
    assert "of 1 devices, all 2" in said["test_skipped"]
    assert "parted or one ended" in said["test_dies"]
    assert re.search(r"process \d ended with 7: ", said["test_dies"])


def test_no_process_is_left_behind(tmp_path: pathlib.Path, monkeypatch) -> None:
    """If the second process cannot start, the first, which waits for it, is ended."""
    true_start, started = subprocess.Popen, []

    def start(command, **options):
        if started:
            raise OSError("no more processes")
        sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
        started.append(true_start(sleeps, **options))
        return started[0]

    monkeypatch.setattr(lockstep_run.subprocess, "Popen", start)
    with pytest.raises(OSError, match="no more processes"):
        lockstep_run.run([], 2, "1", tmp_path / "logs", time.monotonic() + 600)
    assert started[0].returncode == -signal.SIGKILL


def test_semantics_are_files() -> None:
    for name in lockstep_run.SEMANTICS:
        assert lockstep_run.file_of(name).exists()


@pytest.mark.parametrize("failed", [False, True])
def test_every_file_runs(failed: bool, monkeypatch, capsys) -> None:
    ran = []

    def run(arguments, count, devices, folder, deadline, environment):
        ran.append((pathlib.Path(arguments[0]).name, *arguments[1:]))
        assert (count, devices) == (2, "1")
        assert environment["JAX_EP_TEST_TRANSPORT"] == "collective"
        end = "failed" if failed and "mesh" in arguments[0] else "passed"
        tests = [lockstep_run.Test("a", end, "why"), lockstep_run.Test("b", "skipped")]
        return lockstep_run.Run(tests, complete=True)

    monkeypatch.setattr(lockstep_run, "run", run)
    monkeypatch.setattr(lockstep_run, "visible_gpus", list)
    words = "--processes 2 --transport collective --jobs 1 --files mesh vjp -k a"
    assert lockstep_run.main(words.split()) == int(failed)
    assert ran == [("test_mesh.py", "-k", "a"), ("test_vjp.py", "-k", "a")]
    said = capsys.readouterr().out
    assert ("a failed: why" in said) == failed
    assert f"{2 - failed} passed, {int(failed)} failed, 2 skipped; 2 of 2" in said
