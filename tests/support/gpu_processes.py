"""Jobs of processes on the GPUs of this host."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from benchmarks.common import processes as jobs
from jax_ep._native import loader
from jax_ep._peers import nvshmem
from support import compare_transports, gpus, helpers
from support.launch import Ended, launch, shares, tails
from support.worker_process import visible
from workers.processes_worker import TIMEOUT_S as CALL_TIMEOUT_S
from workers.processes_worker import named

TIMEOUT_S = 100
SLACK_S = 5.0
# The test's own process holds part of the same GPUs' memory.
ENVIRONMENT = {
    "JAX_EP_TEST_TRANSPORT": "p2p",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
}


def start(
    script: str,
    processes: int,
    devices: int,
    folder: pathlib.Path,
    *args: str,
    own: bool = False,
    dying: tuple[int, ...] = (),
    timeout_s: float = TIMEOUT_S,
) -> list[Ended]:
    """With `own`, each process sees only its own GPUs, as under many schedulers."""
    environment, each = ENVIRONMENT, None
    if shares_one():
        environment = ENVIRONMENT | jobs.one_gpu((visible() or ["0"])[0])
    elif own:
        each = shares(processes, devices)
    return launch(
        script,
        processes,
        [f"gpu{devices}", *args],
        folder,
        timeout_s,
        environment,
        each,
        dying,
    )


def shares_one() -> bool:
    """Whether all ranks share one GPU."""
    return helpers.some_ranks(2) == 1 and gpus.ONE_GPU in os.environ


def rank_count() -> int:
    """How many ranks a job with one process per rank has."""
    if shares_one():
        return 4
    count = helpers.some_ranks(4)
    if count < 2:
        pytest.skip(f"needs 2 GPUs, or {gpus.ONE_GPU}=1, so that processes share one")
    compare_transports.p2p_mesh(count)
    return count


def check_process_that_is_killed(folder: pathlib.Path) -> None:
    count = rank_count()
    dead = count - 1
    ended = start("processes_worker.py", count, 1, folder, "kill", dying=(dead,))
    assert [one.code for one in ended] == [0] * dead + [-9], tails(ended)
    errors = []
    for one in ended[:dead]:
        found = json.loads(one.last)
        for failure in (found, found["idle"]):
            assert "timed out" in failure["error"], failure
            assert failure["seconds"] < CALL_TIMEOUT_S + SLACK_S
            errors.append(named(failure["error"]))
    # The others may have waited for ranks that waited for the dead one.
    assert any(awaited == dead for _, awaited in errors), errors


def check_process_that_raises(folder: pathlib.Path, own: bool) -> None:
    count = rank_count()
    ended = start("processes_worker.py", count, 1, folder, "fails", own=own)
    assert [one.code for one in ended] == [0] * count, tails(ended)
    *others, last = (json.loads(one.last) for one in ended)
    assert last == {"raised": "before the call"}
    errors = []
    for found in others:
        failure = found["failure"]
        assert "timed out" in failure["error"], failure
        assert failure["seconds"] < CALL_TIMEOUT_S + SLACK_S
        errors.append(named(failure["error"]))
    assert any(awaited == count - 1 for _, awaited in errors), errors


def require(ranks_per_node: int = 0) -> None:
    """Skips where shmem, an extra, or its kernels between forced nodes cannot run.

    Either GPUs or NVIDIA's libraries are missing, or the libraries were missing when
    this was built. A suite's record counts each reason, and .ci/run compiles and links
    the kernels.
    """
    _, lacking = nvshmem.Heap().load()
    if lacking is not None:
        pytest.skip(f"must have {lacking[0]}, found {lacking[1]}")
    if not ranks_per_node:
        return
    count = rank_count()
    if count <= ranks_per_node:
        pytest.skip(f"needs more ranks than a node's {ranks_per_node}, {count} found")
    native = loader.shmem()
    if native is None or not native.HAS_KERNELS:
        pytest.skip("built without NVSHMEM's device library")
