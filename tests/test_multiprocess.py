"""The collective transport over jax.distributed processes of this host."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
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
    run_processes(processes, devices, tmp_path, JAX_PLATFORMS="cpu")


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_one_process_per_gpu(tmp_path: pathlib.Path) -> None:
    processes = min(4, jax.device_count()) // 2 * 2
    if processes == 0:
        pytest.skip("needs 2 GPUs")
    # The test's own process holds the same GPUs.
    run_processes(processes, 0, tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")


def run_processes(
    processes: int, devices: int, folder: pathlib.Path, **environment: str
) -> None:
    """Starts the workers and asserts that each ends well; 0 devices: a GPU each."""
    port = str(free_port())
    environment["JAX_EP_TEST_TRANSPORT"] = "collective"
    started = []
    for process in range(processes):
        log = (folder / f"{process}.log").open("wb")
        numbers = port, str(processes), str(process), str(devices)
        started.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), *numbers],
                env={**os.environ, **environment},
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
    logs = [(folder / f"{i}.log").read_text() for i in range(processes)]
    tails = "\n".join(f"--- process {i}:\n{log[-3000:]}" for i, log in enumerate(logs))
    assert codes == [0] * processes, (
        f"exit codes {codes} (None: was still running)\n{tails}"
    )
    # XLA may log its shutdown after the worker's last line.
    assert all("right" in log.splitlines() for log in logs), tails
