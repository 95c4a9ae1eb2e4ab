"""Several processes, of which the last one is late, differs, is missing or closes.

Over p2p, over shmem on one node, and over shmem between forced nodes. With
JAX_EP_TEST_ONE_GPU=1, four processes share a single GPU.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import tempfile
from typing import Any

import pytest

from support import gpu_processes
from support.launch import Ended, tails
from workers.process_faults_worker import SCENARIOS, TIMEOUT_S
from workers.processes_worker import named

SLACK_S = 5.0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    # Ranks per node; 0: those of the host.
    pytest.mark.parametrize(
        "transport", ["p2p:0", "shmem:0", "shmem:2", "shmem:1"], scope="module"
    ),
]


@functools.cache
def job(name: str, node: str, count: int) -> list[Ended]:
    """Runs a job of all scenarios, one after the other."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
    ):
        patch.setitem(gpu_processes.ENVIRONMENT, "JAX_EP_TEST_TRANSPORT", name)
        return gpu_processes.start(
            "process_faults_worker.py",
            count,
            1,
            pathlib.Path(folder),
            node,
            timeout_s=240,
        )


def outcomes(transport: str) -> list[dict[str, Any]]:
    """What every process of the job reported, by scenario."""
    name, node = transport.split(":")
    count = gpu_processes.rank_count()
    if name == "shmem":
        gpu_processes.require(int(node))
    ended = job(name, node, count)
    assert [one.code for one in ended] == [0] * count, tails(ended)
    return [json.loads(one.last) for one in ended]


def heard(transport: str, scenario: str) -> list[dict[str, Any]]:
    """The reports of all processes on a call that must fail in all of them, in time."""
    found = [one[scenario] for one in outcomes(transport)]
    for one in found:
        assert re.search(r"\brank \d+\b.*\brank \d+\b", one["error"]), found
        assert one["seconds"] < TIMEOUT_S + SLACK_S, found
        assert all(what is True for what in one["nothing"]), found
    # Not all processes can have refused the call.
    assert any(one["nothing"] for one in found), found
    return found


def last_is_awaited(found: list[dict[str, Any]]) -> bool:
    """Whether a process names the last rank; others may name that process instead."""
    last = len(found) - 1
    return any(named(one["error"])[1:] == [last] for one in found[:last])


def test_covers_every_scenario(transport: str) -> None:
    assert all(set(one) == set(SCENARIOS) for one in outcomes(transport))


def test_late_within_the_limit(transport: str) -> None:
    assert all(one["late_under"] == {"right": True} for one in outcomes(transport))


def test_late_beyond_the_limit(transport: str) -> None:
    found = heard(transport, "late_over")
    assert all("timed out" in one["error"] for one in found), found
    assert all(one["seconds"] > TIMEOUT_S - 0.1 for one in found[:-1]), found
    assert last_is_awaited(found), found


def test_another_order(transport: str) -> None:
    heard(transport, "order")


@pytest.mark.parametrize("kind", ["tokens", "kind"])
def test_another_call(kind: str, transport: str) -> None:
    """A different n, or a dispatch against one along a route."""
    found = heard(transport, kind)
    assert any("differ" in one["error"] for one in found), found


def test_handle_of_another_config(transport: str) -> None:
    found = heard(transport, "handles")
    assert all("timed out" in one["error"] for one in found), found
    assert last_is_awaited(found), found


def test_init_with_another_config(transport: str) -> None:
    for one in outcomes(transport):
        assert "config" in one["configs"]["error"], one["configs"]


def test_closing_while_others_are_inside(transport: str) -> None:
    """The last process closes before its call, the first one while its call waits."""
    found = [one["closing"] for one in outcomes(transport)]
    for one in (found[0], found[-1]):
        assert one["closed_s"] < TIMEOUT_S + SLACK_S, found
        assert "must be open" in one["closed"], found
    assert found[0]["nothing"] == [True], found
    for one in found[1:-1]:
        assert "timed out" in one["error"], found
        assert one["seconds"] < TIMEOUT_S + SLACK_S, found
        assert one["nothing"] == [True], found
