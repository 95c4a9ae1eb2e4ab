"""Inits of transport p2p over jax.distributed processes, with imagined windows.

Agreement, hand-over and deaths are real; only CUDA's part is not.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from launch import launch, tails
from windows_worker import DEVICES, TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROCESSES = 3
SIZE = PROCESSES * DEVICES
CPU = {"JAX_PLATFORMS": "cpu"}


def test_choices_of_all_processes(tmp_path: pathlib.Path) -> None:
    ended = launch("windows_worker.py", PROCESSES, ["choices"], tmp_path, 120, CPU)
    assert [one.code for one in ended] == [0] * PROCESSES, tails(ended)
    results = [json.loads(one.last) for one in ended]
    for process, found in enumerate(results):
        assert found["transports"] == ["p2p"] * 3 + ["collective"] * 2
        straight = [DEVICES * process, DEVICES * process + 1]
        crossed = [process, process + PROCESSES]
        assert found["ranks"] == [straight, crossed, straight]
        # Of each window: its own rank and those of other processes have marked it.
        for marks, ranks in zip(found["marks"], found["ranks"], strict=True):
            for rank, window in zip(ranks, marks, strict=True):
                assert window == [r == rank or r not in ranks for r in range(SIZE)]
        differ = found["differ"]
        assert "must be the same in every process" in differ
        if process != PROCESSES - 1:
            assert found["part"] == "p2p"
    for words in zip(*(found["refused"] for found in results), strict=True):
        # The same text in all.
        assert len(set(words)) == 1
        assert f"(process {PROCESSES - 1})" in words[0]
    first, second = results[0]["refused"]
    assert "compute capability 9.0" in first
    assert "INVALID_DEVICE" in second


@pytest.mark.parametrize("when", ["before", "windows", "mapped", "after"])
def test_process_that_is_killed(when: str, tmp_path: pathlib.Path) -> None:
    """The others' init ends in time and names it; later ones are none of init's."""
    dead = PROCESSES - 1
    args = ["dies", when]
    ended = launch(
        "windows_worker.py", PROCESSES, args, tmp_path, 60, CPU, dying=[dead]
    )
    codes = [one.code for one in ended]
    assert codes == [0] * dead + [-9], tails(ended)
    for one in ended[:dead]:
        found = json.loads(one.last)
        assert found["open"] == 0
        if when == "after":
            assert found["error"] is None
            continue
        named = rf"process {dead}\b|nothing from \[{dead}\]"
        assert re.search(named, found["error"]), found["error"]
        assert found["seconds"] < TIMEOUT_S + 5
