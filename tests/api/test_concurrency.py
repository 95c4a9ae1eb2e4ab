"""Many calls at once: independent ones, runs in flight, threads. All in processes.

A hang then fails one test after its time-out and does not stop the run.
"""

from __future__ import annotations

import pytest

from support.launch import command, environment, run_to_end

TIMEOUT_S = 500


@pytest.mark.slow
@pytest.mark.parametrize("what", ["independent", "in_flight", "threads", "layers"])
def test_right_and_no_hang(what: str) -> None:
    done = run_to_end(
        command("concurrency_worker.py", what),
        # On GPUs the session's own process may hold most of their memory.
        env=environment(XLA_PYTHON_CLIENT_PREALLOCATE="false"),
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "right"
