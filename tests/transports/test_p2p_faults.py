"""Transport p2p: missing and late ranks, differing calls, memory. All in processes.

A rank that waits for ever, a poisoned handle or lost memory then ends with its process.
"""

from __future__ import annotations

import re

import pytest

from support import compare_transports, faults, gpus

pytestmark = pytest.mark.gpu

SLACK_S = 5.0
MB = 2**20


def run(scenario: str, ranks: int = 2) -> dict:
    compare_transports.p2p_mesh(ranks)
    env = {
        "JAX_EP_TEST_TRANSPORT": "p2p",
        # Faults need two ranks; only their GPUs are opened.
        "JAX_EP_TEST_RANKS": str(ranks),
        # XLA allocates its pool at once, so that later changes are not XLA's.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
    }
    return gpus.run_worker("p2p_worker.py", scenario, timeout=180, **env)


def check_dead(found: dict) -> None:
    """Results were empty, all calls raised errors, and everything else worked."""
    assert found["nothing"]
    assert all(what is True for what in found["nothing"]), found["nothing"]
    assert found["other_goes_on"] == [True, None]
    assert found["recovers"]
    assert len(found["complaints"]) == 6


def check_missed(found: dict, kind: str, number: int) -> None:
    """Rank 0 gave up waiting for rank 1 in this call, in time."""
    check_dead(found)
    waited = found["seconds_waited"] - faults.TIMEOUT_S
    assert -0.1 < waited < SLACK_S
    for message in found["complaints"]:
        assert re.search(r"rank 0\b.*rank 1\b", message), message
        assert re.search(rf"\b{kind}\b", message), message
        assert re.search(r"\b(route|send|place)\b", message), message
        assert re.search(rf"\bcall epoch {number}\b", message), message


@pytest.mark.parametrize("call", ["dispatch", "combine", "cached"])
def test_missing_rank(call: str) -> None:
    """All waiting calls end together; the error names both ranks and the call."""
    found = run(f"missing_{call}")
    # The handle had dispatched twice and had not combined.
    combine = call == "combine"
    check_missed(found, "combine" if combine else "dispatch", 1 if combine else 3)


@pytest.mark.parametrize("when", ["late", "late_under"])
def test_late_rank(when: str) -> None:
    assert run(when)["right"]


def test_rank_that_is_too_late() -> None:
    check_missed(run("late_over"), "dispatch", 3)


def test_rank_that_raises_before_its_call() -> None:
    found = run("raises")
    assert "raised before the call" in found["raised"]
    check_missed(found, "dispatch", 3)


def test_ranks_in_another_order() -> None:
    found = run("swapped")
    check_dead(found)
    assert found["seconds_waited"] < faults.TIMEOUT_S + SLACK_S
    for message in found["complaints"]:
        assert re.search(r"rank [01]\b.*rank [01]\b.*timed out", message), message


def test_ranks_call_handles_of_other_configs() -> None:
    found = run("handles")
    check_missed(found, "dispatch", 3)
    assert found["second_nothing"] is True
    assert found["second_recovers"]
    for message in found["second"]:
        assert re.search(r"rank 1\b.*rank 0\b.*timed out", message), message


def test_closing_while_a_rank_is_inside() -> None:
    """close() takes no longer than the waits in progress."""
    found = run("closing")
    assert found["closed_s"] < faults.TIMEOUT_S + SLACK_S
    assert found["nothing"] is True
    assert re.search("open|closed", found["error"]), found["error"]
    assert found["other_goes_on"] == [True, None]
    assert found["recovers"]


@pytest.mark.parametrize("how", ["tokens", "few_tokens", "kind", "line"])
def test_ranks_make_different_calls(how: str) -> None:
    """A different n, or a dispatch against one along a route: an error, never data."""
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
    for field in ("max_tokens_per_rank", "hidden_size", "reduce", "pending_calls"):
        assert field in found["message"]
    assert found["lost"] < 64 * MB
    assert found["right_afterwards"]


@pytest.mark.exclusive
def test_memory_of_windows_is_what_handles_say() -> None:
    """Equal up to the granularity of the driver's allocations."""
    found = run("sizes")["found"]
    assert len({said for said, _ in found}) == len(found)
    for said, taken in found:
        assert abs(taken - said) <= 2 * MB, found


@pytest.mark.exclusive
def test_memory_of_windows_comes_and_goes() -> None:
    found = run("flat")
    assert found["opened"] == 33
    # The driver counts the windows, and they are as large as the handle says.
    assert found["held"] > 0.9 * found["buffer_bytes"] > 64 * MB
    assert found["held"] < 1.1 * found["buffer_bytes"] + 64 * MB
    # Losing one window would be more than this.
    assert found["lost"] < 64 * MB
