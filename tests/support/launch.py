"""Starts processes for tests: one, or those of a jax.distributed job on this host."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

import pytest

from benchmarks.common.processes import free_port
from support import TESTS, WORKERS, gpu_lock
from support.worker_process import LIMIT, visible


def command(worker: str, *args: str) -> list[str]:
    """The command that runs a file of workers/, or another file by its full path."""
    return [sys.executable, str(WORKERS / worker), *args]


def environment(**given: str) -> dict[str, str]:
    """This process's environment and `given`; workers can import `support` in it."""
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **given}


def run_to_end(
    command: Sequence[str],
    *,
    timeout: float = 600,
    env: Mapping[str, str] | None = None,
    cwd: pathlib.Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command; the test fails only if it takes more than `timeout` s."""
    try:
        return subprocess.run(
            command,
            env=env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        tail = (error.stderr or b"")[-4000:]
        pytest.fail(f"{command} did not end within {timeout} s: {tail!r}")


def shares(processes: int, devices: int) -> list[dict[str, str]]:
    """An environment for each process, in which it sees only its own `devices` GPUs."""
    gpus = visible() or [str(gpu) for gpu in range(processes * devices)]
    assert len(gpus) >= processes * devices, f"{processes} x {devices} of {gpus}"
    parts = [gpus[i * devices : (i + 1) * devices] for i in range(processes)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


@dataclasses.dataclass
class Ended:
    """A process's exit code (None if it was still running) and what it printed."""

    code: int | None
    log: str

    @property
    def last(self) -> str:
        """The last line that a worker marked as its result with "result: "."""
        found = [line for line in self.log.splitlines() if line.startswith("result: ")]
        return found[-1].removeprefix("result: ") if found else ""


def launch(
    script: str,
    processes: int,
    args: Sequence[str],
    folder: pathlib.Path,
    timeout_s: float,
    shared: Mapping[str, str] | None = None,
    per_process: Sequence[Mapping[str, str]] | None = None,
    dying: Collection[int] = (),
) -> list[Ended]:
    """Runs `script port processes process *args` in each; all have ended afterwards.

    Waits until all have ended, one that is not in `dying` has failed, or time is up.
    Workers call `bound_life`, so that they end even if the tests are killed.
    """
    port, started, shared = str(free_port()), [], shared or {}
    here = environment(**{LIMIT: str(timeout_s)})
    for process in range(processes):
        own = per_process[process] if per_process else {}
        with (folder / f"{process}.log").open("wb") as log, gpu_lock.for_processes():
            started.append(
                subprocess.Popen(
                    command(script, port, str(processes), str(process), *args),
                    env=here | shared | own,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + timeout_s
    try:
        while True:
            codes = [process.poll() for process in started]
            failed = any(c for i, c in enumerate(codes) if i not in dying)
            # The others would wait for the failed process until XLA gives up.
            if None not in codes or failed or time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = [(folder / f"{i}.log").read_text(errors="replace") for i in range(processes)]
    return [Ended(code, log) for code, log in zip(codes, logs, strict=True)]


def tails(ended: Sequence[Ended]) -> str:
    """The ends of all logs, for messages of failed asserts."""
    return "\n".join(
        f"--- process {i}, exit code {one.code}:\n{one.log[-3000:]}"
        for i, one in enumerate(ended)
    )
