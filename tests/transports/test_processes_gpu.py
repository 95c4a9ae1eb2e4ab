"""Transport p2p over the processes of a host: answers, bits, closing, deaths.

Each test starts processes that end by themselves or are killed after TIMEOUT_S. With
JAX_EP_TEST_ONE_GPU=1, four of them share a single GPU.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from support.gpu_processes import (
    SLACK_S,
    check_process_that_is_killed,
    check_process_that_raises,
    rank_count,
    shares_one,
    start,
)
from support.launch import tails
from workers.processes_worker import TIMEOUT_S as CALL_TIMEOUT_S
from workers.processes_worker import named

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

MB = 2**20


@pytest.mark.parametrize("how", ["own", "all", "pairs"])
def test_semantics(how: str, tmp_path: pathlib.Path) -> None:
    """The oracle's results: a GPU per process, alone or among others, or two GPUs."""
    devices = 2 if how == "pairs" else 1
    processes = rank_count() // devices
    if processes < 2 or (shares_one() and how != "own"):
        pytest.skip("needs 4 GPUs" if how == "pairs" else "needs 2 GPUs")
    ended = start(
        "multiprocess_worker.py", processes, devices, tmp_path, own=how == "own"
    )
    assert [one.code for one in ended] == [0] * processes, tails(ended)
    assert all("right" in one.log.splitlines() for one in ended), tails(ended)


def test_bits_of_one_process(tmp_path: pathlib.Path) -> None:
    """Results do not depend on how GPUs are divided among processes."""
    count, found = rank_count(), {}
    if shares_one():
        pytest.skip("needs 2 GPUs")
    for devices in sorted({1, count // 2, count}):
        folder = tmp_path / str(devices)
        folder.mkdir()
        ended = start("processes_worker.py", count // devices, devices, folder, "bits")
        assert not any(one.code for one in ended), tails(ended)
        digests: dict[str, str] = {}
        for one in ended:
            digests |= json.loads(one.last)
        assert sorted(digests) == [str(position) for position in range(count)]
        found[devices] = digests
    assert all(digests == found[count] for digests in found.values())


@pytest.mark.exclusive
def test_closing_in_any_order(tmp_path: pathlib.Path) -> None:
    """Open processes get an error in time; none faults, and no memory is lost."""
    count = rank_count()
    ended = start("processes_worker.py", count, 1, tmp_path, "close", own=True)
    assert [one.code for one in ended] == [0] * count, tails(ended)
    failures = 0
    for process, one in enumerate(ended):
        found = json.loads(one.last)
        for failure in found["failures"]:
            assert "timed out" in failure["error"], failure
            waiting, awaited = named(failure["error"])
            assert waiting != awaited
            assert failure["seconds"] < CALL_TIMEOUT_S + SLACK_S
        failures += len(found["failures"])
        # The first and the last process are each the first to close once.
        assert len(found["closed"]) == (process in (0, count - 1)), found
        assert all("must be open" in closed["error"] for closed in found["closed"])
        # Lost windows would be larger; programs and lasting cells are small.
        assert all(lost < 64 * MB for lost in found["lost"]), found["lost"]
    assert failures == 2 * (count - 1)


def test_process_that_is_killed(tmp_path: pathlib.Path) -> None:
    """The others' calls end with an error in time, and they can go on without it."""
    check_process_that_is_killed(tmp_path)


def test_process_that_raises(tmp_path: pathlib.Path) -> None:
    """It closes as it ends; the others' calls end, and all can go on together."""
    check_process_that_raises(tmp_path, own=True)
