"""How tests start: processes' GPUs, parts of files, the job file of examples/."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from benchmarks.common import processes as ports
from support import ROOT, gpu_processes, worker_process
from support.launch import run_to_end


def test_port_is_free_and_not_one_of_the_kernel(monkeypatch) -> None:
    given = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    assert ports.PORTS[1] <= int(given.split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        port = taken.getsockname()[1]
        assert ports.PORTS[0] <= port < ports.PORTS[1]
        monkeypatch.setattr(ports, "PORTS", (port, port + 20))
        assert all(port < ports.free_port() < port + 20 for _ in range(200))


def test_a_process_is_run_to_its_end(tmp_path) -> None:
    program = "import os, sys, time; print(os.getcwd()); time.sleep({}); sys.exit(3)"
    command = [sys.executable, "-c", program.format(0)]
    done = run_to_end(command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, f"{tmp_path}\n")
    command[-1] = program.format(60)
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0\.5 s"):
        run_to_end(command, timeout=0.5)


def environments(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, own: bool
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of two processes of one GPU; None if it is the test's."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found: list[str | None] = []

    def started(script, processes, args, folder, timeout_s, shared, own, dying):
        assert "CUDA_VISIBLE_DEVICES" not in shared
        for process in range(processes):
            found.append(own[process]["CUDA_VISIBLE_DEVICES"] if own else None)
        return []

    monkeypatch.setattr(gpu_processes, "launch", started)
    gpu_processes.start("a.py", 2, 1, pathlib.Path(), own=own)
    return found


@pytest.mark.parametrize(
    ("visible", "shares"),
    [
        (None, ["0", "1"]),
        ("2,3", ["2", "3"]),
        ("GPU-8a,GPU-9b,GPU-c0", ["GPU-8a", "GPU-9b"]),
    ],
)
def test_own_gpus_are_of_those_visible(monkeypatch, visible, shares) -> None:
    assert environments(monkeypatch, visible, own=True) == shares
    # Each process then takes all GPUs that it sees.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shares[1])
    assert worker_process.local_ids(1, 1) is None


@pytest.mark.parametrize("visible", [None, "2,3"])
def test_others_gpus_are_left_by_number(monkeypatch, visible) -> None:
    """JAX counts local ids among the visible devices."""
    assert environments(monkeypatch, visible, own=False) == [None, None]
    assert worker_process.local_ids(1, 1) == [1]


def test_too_few_visible_gpus_are_said(monkeypatch) -> None:
    with pytest.raises(AssertionError, match=r"2 x 1 of \['5'\]"):
        environments(monkeypatch, "5", own=True)


def test_job_of_one_process_per_host(tmp_path) -> None:
    """What examples/per_host.sbatch has srun do."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$XLA_PYTHON_CLIENT_MEM_FRACTION" "$@"\n')
    srun.chmod(0o755)
    job = ROOT / "examples" / "per_host.sbatch"
    done = subprocess.run(
        ["bash", str(job), "train.py", "--steps=3"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    fraction, *words = done.stdout.split()
    assert float(fraction) < 1
    assert words[-3:] == ["python", "train.py", "--steps=3"]
    assert all(word.startswith("--") for word in words[:-3])
