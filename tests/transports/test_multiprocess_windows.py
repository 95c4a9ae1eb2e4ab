"""Inits of transport p2p over jax.distributed processes, with fake windows.

Agreement, passing descriptors and deaths are real; only CUDA's part is fake.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from support.launch import launch, tails
from workers.windows_worker import DEATHS, DEVICES, SURVIVORS, TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROCESSES = 3
SIZE = PROCESSES * DEVICES
CPU = {"JAX_PLATFORMS": "cpu"}


def test_choices_of_all_processes(tmp_path: pathlib.Path) -> None:
    ended = launch("windows_worker.py", PROCESSES, ["choices"], tmp_path, 400, CPU)
    assert [one.code for one in ended] == [0] * PROCESSES, tails(ended)
    results = [json.loads(one.last) for one in ended]
    for process, found in enumerate(results):
        assert found["transports"] == ["p2p"] * 3 + ["collective"] * 2
        straight = [DEVICES * process, DEVICES * process + 1]
        crossed = [process, process + PROCESSES]
        assert found["ranks"] == [straight, crossed, straight]
        # Each window is marked by its own rank and by ranks of other processes.
        for marks, ranks in zip(found["marks"], found["ranks"], strict=True):
            for rank, window in zip(ranks, marks, strict=True):
                assert window == [r == rank or r not in ranks for r in range(SIZE)]
        *chosen, refused = found["over hosts"]
        assert chosen == ["p2p", True, SIZE - DEVICES, "collective"]
        assert "in one clique of an NVLink fabric" in refused
        assert "ranks [4, 5] in rack.2" in refused
        differ = found["differ"]
        assert "must be the same in every process" in differ
        if process != PROCESSES - 1:
            assert found["part"] == "p2p"
    failed, keys = zip(*(found["failed, key"] for found in results), strict=True)
    assert all("interrupted" in words for words in failed)
    assert len(set(keys)) == 1
    assert type(keys[0]) is int
    for words in zip(*(found["refused"] for found in results), strict=True):
        # All processes have the same text.
        assert len(set(words)) == 1
        assert f"(process {PROCESSES - 1})" in words[0]
    first, second = results[0]["refused"]
    assert "compute capability 9.0" in first
    assert "INVALID_DEVICE" in second


def test_processes_that_are_killed(tmp_path: pathlib.Path) -> None:
    """One dies at each step: the others' init ends in time and names it; they go on."""
    count = SURVIVORS + len(DEATHS)
    killed = range(SURVIVORS, count)
    ended = launch(
        "windows_worker.py", count, ["dies"], tmp_path, 400, CPU, dying=killed
    )
    codes = [one.code for one in ended]
    assert codes == [0] * SURVIVORS + [-9] * len(DEATHS), tails(ended)
    for one in ended[:SURVIVORS]:
        rounds = json.loads(one.last)
        for dead, when, found in zip(reversed(killed), DEATHS, rounds, strict=True):
            assert found["open"] == 0, when
            if when == "after":
                assert found["error"] is None
                continue
            named = rf"process {dead}\b|nothing from processes \[{dead}\]"
            assert re.search(named, found["error"]), (when, found["error"])
            assert found["seconds"] < TIMEOUT_S + 30, when
