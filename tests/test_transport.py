"""Which transport init chooses and why; needs no GPU."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from errors import check_form, raises

from jax_ep import _ffi, _init, _transports

LACKS = ("peer access between all devices of an EP group", "none from device 0 to 1")


@dataclasses.dataclass(frozen=True)
class Device:
    """What choosing asks of a device."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    client: Any = None

    @property
    def local_hardware_id(self) -> int:
        return self.id % 8


class Native:
    """A CUDA module whose devices lack `obstacle`; notes what it is asked."""

    MAX_WINDOW_RANKS = 32

    def __init__(self, obstacle: tuple[str, str] | None = None) -> None:
        self.obstacle = obstacle
        self.asked: list[Any] = []

    def p2p_obstacle(self, groups: Any) -> tuple[str, str] | None:
        self.asked.append(groups)
        return self.obstacle


def make_mesh(sizes: dict[str, int], processes: int = 1, platform: str = "gpu") -> Any:
    """A mesh of devices that only choosing looks at."""
    count = int(np.prod(list(sizes.values())))
    devices = [Device(i, i * processes // count, platform) for i in range(count)]
    return types.SimpleNamespace(
        devices=np.array(devices).reshape(tuple(sizes.values())),
        axis_names=tuple(sizes),
        shape=sizes,
    )


@pytest.fixture
def native(monkeypatch):
    """The CUDA module of the fixture's test, in process 0."""
    module = Native()
    monkeypatch.setattr(_ffi, "native_cuda", module)
    monkeypatch.setattr(jax, "process_index", lambda client=None: 0)
    return module


def choose(mesh: Any, requested: str, names: tuple[str, ...] = ("ep",)) -> str:
    return _transports.choose(mesh, names, requested)


@pytest.mark.parametrize("requested", ["auto", "p2p"])
def test_served(native, requested: str) -> None:
    assert choose(make_mesh({"dp": 2, "ep": 4}), requested) == "p2p"
    assert native.asked == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_collective_asks_nothing(native) -> None:
    assert choose(make_mesh({"ep": 4}), "collective") == "collective"
    assert not native.asked


def assert_refused(mesh: Any, *words: str) -> None:
    """Auto falls back without a word, p2p says what is missing."""
    assert choose(mesh, "auto") == "collective"
    with raises() as caught:
        choose(mesh, "p2p")
    check_form(caught, "init", "p2p", "collective", *words)


def test_devices_lack_something(native) -> None:
    native.obstacle = LACKS
    assert_refused(make_mesh({"ep": 4}), *LACKS)


def test_cpu_devices(native) -> None:
    assert_refused(make_mesh({"ep": 4}, platform="cpu"), "GPUs", "CPU")
    assert not native.asked


def test_group_over_processes(native) -> None:
    assert_refused(make_mesh({"ep": 4}, processes=2), "process", "[0, 1]")
    assert not native.asked


def test_too_many_ranks(native) -> None:
    assert_refused(make_mesh({"ep": 64}), "32", "64")
    assert choose(make_mesh({"ep": 32}), "p2p") == "p2p"


def test_processes_agree(native, monkeypatch) -> None:
    """A process asks for its own groups, and takes p2p only where all do."""
    mesh = make_mesh({"dp": 2, "ep": 4}, processes=2)
    votes = []

    def agreed(mesh: Any, served: bool, others: bool) -> bool:
        votes.append(served)
        return served and others

    for others, expected in ((True, "p2p"), (False, "collective")):
        monkeypatch.setattr(
            _transports, "_agreed", functools.partial(agreed, others=others)
        )
        assert choose(mesh, "auto") == expected
    assert_refused(mesh, "every process")
    native.obstacle = LACKS
    assert_refused(mesh, *LACKS)
    assert votes == [True] * 4 + [False] * 2
    assert {str(groups) for groups in native.asked} == {"[[0, 1, 2, 3]]"}


@pytest.mark.parametrize("axis", [("dp",), ("ep",), ("dp", "ep"), ("ep", "dp")])
def test_groups_are_by_rank(axis) -> None:
    mesh = helpers.make_mesh({"dp": 2, "ep": 2}, order=[2, 0, 3, 1])
    groups = _transports.ep_groups(mesh, axis)
    ranks = dict(
        zip(mesh.devices.flat, _init._rank_of_devices(mesh, axis).flat, strict=True)
    )
    assert {device for group in groups for device in group} == set(ranks)
    for group in groups:
        assert [ranks[device] for device in group] == list(range(len(group)))
