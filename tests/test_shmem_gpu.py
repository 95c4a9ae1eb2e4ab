"""Transport shmem on GPUs of one host, one process each: answers, bits, faults."""

from __future__ import annotations

import json
import pathlib

import pytest
import test_processes_gpu
from launch import tails

from jax_ep import _shmem

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.fixture(autouse=True)
def shmem(monkeypatch):
    """Processes that `start` starts run this transport."""
    _, lacking = _shmem.Heap().load()
    if lacking is not None:
        pytest.skip(f"must have {lacking[0]}, found {lacking[1]}")
    monkeypatch.setitem(
        test_processes_gpu.ENVIRONMENT, "JAX_EP_TEST_TRANSPORT", "shmem"
    )


def test_semantics(tmp_path: pathlib.Path) -> None:
    """The oracle's results."""
    count = test_processes_gpu.gpu_count()
    ended = test_processes_gpu.start("multiprocess_worker.py", count, 1, tmp_path)
    assert [one.code for one in ended] == [0] * count, tails(ended)
    assert all("right" in one.log.splitlines() for one in ended), tails(ended)


def test_bits_of_p2p(tmp_path: pathlib.Path, monkeypatch) -> None:
    """The same bits whoever has mapped the windows, over blocks used again."""
    count, found = test_processes_gpu.gpu_count(), []
    for transport in ("shmem", "p2p"):
        monkeypatch.setitem(
            test_processes_gpu.ENVIRONMENT, "JAX_EP_TEST_TRANSPORT", transport
        )
        folder = tmp_path / transport
        folder.mkdir()
        ended = test_processes_gpu.start(
            "processes_worker.py", count, 1, folder, "bits"
        )
        assert not any(one.code for one in ended), tails(ended)
        digests: dict[str, str] = {}
        for one in ended:
            digests |= json.loads(one.last)
        assert sorted(digests) == [str(position) for position in range(count)]
        found.append(digests)
    assert found[0] == found[1]


def test_process_that_raises(tmp_path: pathlib.Path) -> None:
    """The others get the error in time, and a new init works."""
    test_processes_gpu.check_process_that_raises(tmp_path, own=False)
