"""Which GPUs the processes of a test see, where the test itself sees a part of them."""

from __future__ import annotations

import pathlib

import launch
import pytest
import test_processes_gpu


def environments(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, own: bool
) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of two processes of one GPU; None: that of the test."""
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found: list[str | None] = []

    def started(script, processes, args, folder, timeout_s, shared, own, dying):
        assert "CUDA_VISIBLE_DEVICES" not in shared
        for process in range(processes):
            found.append(own[process]["CUDA_VISIBLE_DEVICES"] if own else None)
        return []

    monkeypatch.setattr(test_processes_gpu, "launch", started)
    test_processes_gpu.start("a.py", 2, 1, pathlib.Path(), own=own)
    return found


@pytest.mark.parametrize(
    ("visible", "shares"),
    [
        (None, ["0", "1"]),
        ("2,3", ["2", "3"]),
        ("GPU-8a,GPU-9b,GPU-c0", ["GPU-8a", "GPU-9b"]),
    ],
)
def test_own_gpus_are_of_those_visible(monkeypatch, visible, shares) -> None:
    assert environments(monkeypatch, visible, own=True) == shares
    # Each then takes all that it sees.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shares[1])
    assert launch.local_ids(1, 1) is None


@pytest.mark.parametrize("visible", [None, "2,3"])
def test_others_gpus_are_left_by_number(monkeypatch, visible) -> None:
    """JAX counts local ids among the visible devices."""
    assert environments(monkeypatch, visible, own=False) == [None, None]
    assert launch.local_ids(1, 1) == [1]


def test_too_few_visible_gpus_are_said(monkeypatch) -> None:
    with pytest.raises(AssertionError, match=r"2 x 1 of \['5'\]"):
        environments(monkeypatch, "5", own=True)
