"""Transport shmem on GPUs of one host, a process each: answers, bits, faults, nodes.

Between forced nodes ranks use NVSHMEM's puts, which between GPUs of a host are stores
over NVLink: this does not test networks. With JAX_EP_TEST_ONE_GPU=1, four processes
share a single GPU.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from support import gpu_processes
from support.gpu_processes import require
from support.launch import tails
from workers.nodes_worker import TIMEOUT_S as CALL_TIMEOUT_S
from workers.processes_worker import named

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.fixture(autouse=True)
def shmem(monkeypatch):
    """Makes processes that `start` starts use this transport."""
    require()
    monkeypatch.setitem(gpu_processes.ENVIRONMENT, "JAX_EP_TEST_TRANSPORT", "shmem")


def test_semantics(tmp_path: pathlib.Path) -> None:
    """The oracle's results."""
    count = gpu_processes.rank_count()
    ended = gpu_processes.start("multiprocess_worker.py", count, 1, tmp_path)
    assert [one.code for one in ended] == [0] * count, tails(ended)
    assert all("right" in one.log.splitlines() for one in ended), tails(ended)


def test_bits_of_p2p(tmp_path: pathlib.Path, monkeypatch) -> None:
    """Windows of either transport give the same bits, also in reused blocks."""
    count, found = gpu_processes.rank_count(), []
    for transport in ("shmem", "p2p"):
        monkeypatch.setitem(
            gpu_processes.ENVIRONMENT, "JAX_EP_TEST_TRANSPORT", transport
        )
        folder = tmp_path / transport
        folder.mkdir()
        ended = gpu_processes.start("processes_worker.py", count, 1, folder, "bits")
        assert not any(one.code for one in ended), tails(ended)
        digests: dict[str, str] = {}
        for one in ended:
            digests |= json.loads(one.last)
        assert sorted(digests) == [str(position) for position in range(count)]
        found.append(digests)
    assert found[0] == found[1]


def test_process_that_raises(tmp_path: pathlib.Path) -> None:
    """The others get the error in time, and a new init works."""
    gpu_processes.check_process_that_raises(tmp_path, own=False)


def test_process_that_is_killed(tmp_path: pathlib.Path) -> None:
    """The others get the error in time, and go on over p2p."""
    gpu_processes.check_process_that_is_killed(tmp_path)


def nodes(scenario: str, node: str, folder: pathlib.Path) -> list[Any]:
    """The results of nodes_worker.py, by process; `node` are its last arguments."""
    require(int(node.split()[0]))
    count = gpu_processes.rank_count()
    ended = gpu_processes.start(
        "nodes_worker.py", count, 1, folder, scenario, *node.split(), timeout_s=300
    )
    assert [one.code for one in ended] == [0] * count, tails(ended)
    return [json.loads(one.last) for one in ended]


# Two ranks per node, with bundled dispatches or not; one; nodes of unequal sizes.
@pytest.mark.parametrize("node", ["2", "2 direct", "1", "3"])
def test_nodes_are_as_collective(node: str, tmp_path: pathlib.Path) -> None:
    assert set(nodes("calls", node, tmp_path)) == {"right"}


@pytest.mark.parametrize("node", ["2", "2 direct", "1"])
@pytest.mark.parametrize("scenario", ["modes", "pendings"])
def test_options_over_nodes(scenario: str, node: str, tmp_path: pathlib.Path) -> None:
    assert set(nodes(scenario, node, tmp_path)) == {"right"}


@pytest.mark.parametrize("node", ["2", "2 direct", "1"])
def test_rank_of_another_node_that_is_silent(node: str, tmp_path: pathlib.Path) -> None:
    """All others name it in time, on its node and elsewhere; another handle works."""
    *others, silent = nodes("silent", node, tmp_path)
    assert not silent["error"]
    awaited = set()
    for found in others:
        assert "timed out" in found["error"], found
        assert found["seconds"] < CALL_TIMEOUT_S + gpu_processes.SLACK_S
        awaited.add(named(found["error"])[1])
    # The others may have waited for ranks that waited for it.
    assert len(others) in awaited, others
