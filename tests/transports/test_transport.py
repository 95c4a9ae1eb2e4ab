"""Which transport init chooses and why, in one process; needs no GPU.

test_windows.py has meshes of several processes.
"""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest

from jax_ep._native import ffi
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._setup import init
from jax_ep._transport import p2p, select
from support import helpers
from support.errors import check_form, raises
from support.fake_windows import Device

ALONE = Rendezvous([0], 0, 1.0)

LACKS = ("peer access between all devices of an EP group", "none from device 0 to 1")


class Native:
    """A CUDA module whose devices lack `obstacle`; records calls."""

    MAX_WINDOW_RANKS = 32
    ELSEWHERE = -1

    def __init__(self, obstacle: tuple[str, str] | None = None) -> None:
        self.obstacle = obstacle
        self.asked: list[Any] = []

    def p2p_obstacle(self, groups: Any) -> tuple[str, str] | None:
        self.asked.append(groups)
        return self.obstacle


def make_mesh(sizes: dict[str, int], processes: int = 1, platform: str = "gpu") -> Any:
    """A mesh of fake devices, enough to choose a transport."""
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
    monkeypatch.setattr(ffi, "native_cuda", module)
    monkeypatch.setattr(jax, "process_index", lambda client=None: 0)
    return module


def choose(
    mesh: Any, requested: str, names: tuple[str, ...] = ("ep",), config: Any = None
) -> str:
    with Rendezvous.of(mesh, 1.0) as meeting:
        return select.choose(
            mesh, names, requested, meeting, config or helpers.make_config()
        )


@pytest.mark.parametrize("requested", ["auto", "p2p"])
def test_served(native, requested: str) -> None:
    assert choose(make_mesh({"dp": 2, "ep": 4}), requested) == "p2p"
    assert native.asked == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_collective_asks_nothing(native) -> None:
    assert choose(make_mesh({"ep": 4}), "collective") == "collective"
    assert not native.asked


def test_what_exchanges_nothing_starts_no_nvshmem(native, monkeypatch) -> None:
    """Otherwise "auto" would ask for it, as the first choice shows."""
    asked = []
    monkeypatch.setattr(select, "_puts_reach", lambda *args: asked.append(args))
    native.obstacle = LACKS
    assert choose(make_mesh({"ep": 4}), "auto") == "collective"
    assert len(asked) == 1
    config = helpers.make_config(skip_a2a=True)
    assert choose(make_mesh({"ep": 4}), "auto", config=config) == "collective"
    native.obstacle = None
    for requested in ("auto", "p2p"):
        assert choose(make_mesh({"ep": 4}), requested, config=config) == "p2p"
    assert len(asked) == 1


def assert_refused(mesh: Any, *words: str) -> None:
    """ "auto" falls back silently, and "p2p" says what is missing."""
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


def test_auto_says_once_what_it_goes_without(native, caplog) -> None:
    select._warn_once.cache_clear()
    choose(make_mesh({"ep": 4}, platform="cpu"), "auto")
    assert not caplog.records
    native.obstacle = LACKS
    for _ in range(2):
        assert choose(make_mesh({"ep": 4}), "auto") == "collective"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert all(part in record.getMessage() for part in ("collective", *LACKS))


def test_several_processes_without_jax_distributed(native, caplog) -> None:
    """Processes cannot agree: each finds that out by itself and warns every time.

    Another time they may be able to, and programs must not be surprised.
    """
    mesh = make_mesh({"ep": 4}, processes=2)
    assert_refused(mesh, "jax.distributed.initialize")
    assert not native.asked
    caplog.clear()
    for _ in range(2):
        assert choose(mesh, "auto") == "collective"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2


def test_mesh_of_other_processes(native, monkeypatch) -> None:
    monkeypatch.setattr(jax, "process_index", lambda client=None: 2)
    with raises() as caught:
        choose(make_mesh({"ep": 4}, processes=2), "auto")
    check_form(caught, "init", "mesh", "[0, 1]", "this process, 2")


def test_too_many_ranks(native) -> None:
    assert_refused(make_mesh({"ep": 64}), "32", "64")
    assert choose(make_mesh({"ep": 32}), "p2p") == "p2p"


@pytest.mark.parametrize("axis", [("dp",), ("ep",), ("dp", "ep"), ("ep", "dp")])
def test_groups_are_by_rank(axis) -> None:
    mesh = helpers.make_mesh({"dp": 2, "ep": 2}, order=[2, 0, 3, 1])
    groups = select.ep_groups(mesh, axis)
    ranks = dict(
        zip(mesh.devices.flat, init._rank_of_devices(mesh, axis).flat, strict=True)
    )
    assert {device for group in groups for device in group} == set(ranks)
    for group in groups:
        assert [ranks[device] for device in group] == list(range(len(group)))


@pytest.mark.parametrize(
    ("fields", "served"),
    [
        ({"hidden_size": 1 << 17, "dispatch_format": "nvfp4"}, True),
        ({"hidden_size": (1 << 17) + 128, "dispatch_format": "nvfp4"}, False),
        ({"hidden_size": (1 << 17) + 128, "grad_format": "fp8_block128"}, False),
        ({"hidden_size": (1 << 17) + 128, "combine_format": "fp8_block128"}, False),
        ({"hidden_size": 1 << 22}, True),
        ({"hidden_size": (1 << 22) + 128}, False),
        ({"hidden_size": (1 << 22) + 128, "skip_a2a": True}, True),
    ],
)
def test_rows_that_no_multiprocessor_holds(fields, served) -> None:
    found = p2p.row_obstacle(helpers.make_config(**fields))
    assert (found is None) == served
    if found is not None:
        assert found[0].startswith("hidden_size of at most")
        with pytest.raises(ValueError, match=r'"p2p" must have hidden_size .*got \d+'):
            select.instead("p2p", found, ALONE)
        assert select.instead("auto", found, ALONE) == "collective"
