"""Transport p2p over the processes of a host: answers, bits, closing, deaths.

Each test starts processes that end by themselves or are killed after TIMEOUT_S. With
JAX_EP_TEST_ONE_GPU=1, where there is one GPU, four of them share it.
"""

from __future__ import annotations

import json
import os
import pathlib

import gpus
import helpers
import pytest
import twins
from launch import Ended, launch, shares, tails, visible
from processes_worker import TIMEOUT_S as CALL_TIMEOUT_S
from processes_worker import named

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

TIMEOUT_S = 100
SLACK_S = 5.0
MB = 2**20
# The test's own process holds a part of the same GPUs.
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
    """`own`: each process sees its GPUs alone, as under many schedulers."""
    environment, each = ENVIRONMENT, None
    if shares_one():
        environment = ENVIRONMENT | processes.one_gpu((visible() or ["0"])[0])
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
    """Whether all ranks have the same GPU."""
    return helpers.some_ranks(2) == 1 and gpus.ONE_GPU in os.environ


def rank_count() -> int:
    """Of a job with a process for each rank."""
    if shares_one():
        return 4
    count = helpers.some_ranks(4)
    if count < 2:
        pytest.skip(f"needs 2 GPUs, or {gpus.ONE_GPU}=1, so that processes share one")
    twins.p2p_mesh(count)
    return count


@pytest.mark.parametrize("how", ["own", "all", "pairs"])
def test_semantics(how: str, tmp_path: pathlib.Path) -> None:
    """The oracle's results: a GPU a process, alone or among others; two a process."""
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
    """Results do not depend on how the GPUs are shared out among processes."""
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
    """Who is still open gets an error in time; nobody faults, no memory is lost."""
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
        # Of windows; programs and lasting cells are small.
        assert all(lost < 64 * MB for lost in found["lost"]), found["lost"]
    assert failures == 2 * (count - 1)


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
    # Others may have waited for ranks that waited for the dead one.
    assert any(awaited == dead for _, awaited in errors), errors


def test_process_that_is_killed(tmp_path: pathlib.Path) -> None:
    """The others' calls end with an error in time, and they can go on without it."""
    check_process_that_is_killed(tmp_path)


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


def test_process_that_raises(tmp_path: pathlib.Path) -> None:
    """It closes on its way out; the others' calls end, and all go on together."""
    check_process_that_raises(tmp_path, own=True)
