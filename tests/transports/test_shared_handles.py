"""`jax_ep.shared_handle` in processes that call it at any time and in any order."""

from __future__ import annotations

import json
import pathlib

import pytest

from support.launch import launch, tails

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

PROCESSES = 3


@pytest.mark.parametrize("transport", ["collective", "p2p"])
def test_handles_of_processes_meet(transport: str, tmp_path: pathlib.Path) -> None:
    ended = launch(
        "shared_handles_worker.py",
        PROCESSES,
        [transport],
        tmp_path,
        200,
        {"JAX_PLATFORMS": "cpu"},
    )
    # All processes end, and with them the thread of shared handles.
    assert [one.code for one in ended] == [0] * PROCESSES, tails(ended)
    results = [json.loads(one.last) for one in ended]
    for found in results[:-1]:
        assert f"[{PROCESSES - 1}]" in found.pop("alone")
    assert results[1].pop("seconds") < 20
    failure = results[0].pop("failure")
    assert f"failed on process {PROCESSES - 1}" in failure
    assert "no such luck" in failure
    for found in results:
        assert found == results[0]
        assert found["open"] == 0
