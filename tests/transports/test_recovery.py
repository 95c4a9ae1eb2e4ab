"""What JAX does to the others when a process dies, as docs/cluster.md says."""

from __future__ import annotations

import pathlib

import pytest

from support.launch import launch, tails

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROCESSES = 3


@pytest.mark.parametrize("recoverable", [True, False])
def test_processes_beside_one_that_is_killed(
    recoverable: bool, tmp_path: pathlib.Path
) -> None:
    *others, killed = launch(
        "recovery_worker.py",
        PROCESSES,
        [str(int(recoverable))],
        tmp_path,
        120,
        {"JAX_PLATFORMS": "cpu"},
        # Without the setting JAX ends all of them.
        dying=[PROCESSES - 1] if recoverable else range(PROCESSES),
    )
    assert killed.code == -9, tails([*others, killed])
    assert all("open" in one.log.splitlines() for one in others), tails(others)
    if recoverable:
        assert [one.code for one in others] == [0, 0], tails(others)
        assert [one.last for one in others] == ["right"] * 2, tails(others)
    else:
        assert all(one.code not in (0, None) for one in others), tails(others)
        assert not any(one.last for one in others), tails(others)
