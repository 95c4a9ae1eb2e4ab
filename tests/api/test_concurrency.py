"""Many at once: independent calls, runs in flight, threads. Each in its own process.

A hang then fails one test after its time-out and does not stop the run.
"""

from __future__ import annotations

import subprocess

import pytest

from support.launch import command, environment

TIMEOUT_S = 500


@pytest.mark.slow
@pytest.mark.parametrize("what", ["independent", "in_flight", "threads", "layers"])
def test_right_and_no_hang(what: str) -> None:
    try:
        done = subprocess.run(
            command("concurrency_worker.py", what),
            # On GPUs: the session's own process may hold most of their memory.
            env=environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"")[-4000:]
        pytest.fail(f"{what} did not end within {TIMEOUT_S} s: {tail!r}")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "right"
