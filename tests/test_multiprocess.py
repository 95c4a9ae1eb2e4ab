"""The collective transport over jax.distributed CPU processes of this host."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

WORKER = pathlib.Path(__file__).with_name("multiprocess_worker.py")
TIMEOUT_S = 150


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait(started: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes (None: still running) once all ended, one failed or time is up."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        codes = [process.poll() for process in started]
        # The others would wait for a failed one until XLA gives up on it.
        if None not in codes or any(codes):
            break
        time.sleep(0.1)
    return codes


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])
def test_same_semantics(processes: int, devices: int, tmp_path: pathlib.Path) -> None:
    port = str(free_port())
    started = []
    for process in range(processes):
        log = (tmp_path / f"{process}.log").open("wb")
        numbers = port, str(processes), str(process), str(devices)
        started.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), *numbers],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
        log.close()
    try:
        codes = wait(started)
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = [(tmp_path / f"{i}.log").read_text() for i in range(processes)]
    tails = "\n".join(f"--- process {i}:\n{log[-3000:]}" for i, log in enumerate(logs))
    assert codes == [0] * processes, (
        f"exit codes {codes} (None: was still running)\n{tails}"
    )
    assert all(log.splitlines()[-1] == "right" for log in logs), tails
