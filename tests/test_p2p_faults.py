"""Transport p2p: missing and late ranks, calls that differ, memory. All in processes.

A rank that waits for ever, a poisoned handle or lost memory then ends with its process.
"""

from __future__ import annotations

import re

import faults
import gpus
import pytest
import twins

pytestmark = pytest.mark.gpu

SLACK_S = 5.0
MB = 2**20


def run(scenario: str, ranks: int = 2) -> dict:
    twins.p2p_mesh(ranks)
    env = {
        "JAX_EP_TEST_TRANSPORT": "p2p",
        # Faults are of two ranks; only these GPUs are opened.
        "JAX_EP_TEST_RANKS": str(ranks),
        # XLA's pool is taken at once, so that what changes is not XLA's.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
    }
    return gpus.run_worker("p2p_worker.py", scenario, timeout=180, **env)


def check_dead(found: dict) -> None:
    """Nothing came out, everybody was told, and all else went on."""
    assert found["nothing"]
    assert all(what is True for what in found["nothing"]), found["nothing"]
    assert found["other_goes_on"] == [True, None]
    assert found["recovers"]
    assert len(found["complaints"]) == 6


@pytest.mark.parametrize("call", ["dispatch", "combine", "cached"])
def test_missing_rank(call: str) -> None:
    """All waiting calls end together; the error names who waited for whom in what."""
    found = run(f"missing_{call}")
    check_dead(found)
    waited = found["seconds_waited"] - faults.TIMEOUT_S
    assert -0.1 < waited < SLACK_S
    kind = "combine" if call == "combine" else "dispatch"
    # The handle had dispatched twice, and combined never.
    number = 1 if call == "combine" else 3
    for message in found["complaints"]:
        assert re.search(r"rank 0\b.*rank 1\b", message), message
        assert re.search(rf"\b{kind}\b", message), message
        assert re.search(r"\b(route|send|place)\b", message), message
        assert re.search(rf"\bcall epoch {number}\b", message), message


def test_late_rank() -> None:
    assert run("late")["right"]


@pytest.mark.parametrize("how", ["tokens", "few_tokens", "kind", "line"])
def test_ranks_make_different_calls(how: str) -> None:
    """Other n, or a dispatch against one along a known route: an error, never data."""
    found = run(f"differs_{how}")
    check_dead(found)
    for message in found["complaints"]:
        assert re.search(r"rank [01]\b.*rank [01]\b", message), message
        assert "differ" in message, message


@pytest.mark.exclusive
def test_window_that_no_gpu_can_hold() -> None:
    found = run("giant")
    numbers = [int(n) for n in re.findall(r"\d{6,}", found["message"])]
    assert any(n >= found["needed"] for n in numbers), found["message"]
    for field in ("max_tokens_per_rank", "hidden_size"):
        assert field in found["message"]
    assert found["lost"] < 64 * MB
    assert found["right_afterwards"]


@pytest.mark.exclusive
def test_memory_of_windows_comes_and_goes() -> None:
    found = run("flat")
    assert found["opened"] == 33
    # The windows lie where the driver counts, and are as large as the handle says.
    assert found["held"] > 0.9 * found["buffer_bytes"] > 64 * MB
    assert found["held"] < 1.1 * found["buffer_bytes"] + 64 * MB
    # One window lost would be more than this.
    assert found["lost"] < 64 * MB
