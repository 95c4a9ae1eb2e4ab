"""Processes that tell others what none would: the errors are ours, in all processes."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest

from jax_ep._native import ffi
from jax_ep._peers import answers, nvshmem
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._setup import init
from support import fake_nvshmem, fake_windows
from support.fake_windows import Actor, act_all, make_groups
from support.fake_windows import all_closed as all_closed

TWO = make_groups([[(0, 0), (1, 0)]])
LIES = [
    None,
    True,
    -1,
    float("inf"),
    10**4290,
    "\udc80",
    [],
    [["a", "b"], 1, None],
    {"0": None},
]
OURS = re.compile(r"jax_ep\.(init|here): .+; .+", re.DOTALL)


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all parts of a value of JSON, itself included."""
    yield path
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[name], (*path, name))


def changed(value: Any, path: tuple, lie: Any) -> Any:
    """`value` with a lie at `path`."""
    if not path:
        return lie
    if isinstance(value, dict):
        return value | {path[0]: changed(value[path[0]], path[1:], lie)}
    return [
        changed(v, path[1:], lie) if i == path[0] else v for i, v in enumerate(value)
    ]


class Liar:
    """Changes what process 1 tells in one step; remembers what it told in others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: dict[str, Any] = {}
        self.lie: tuple[str, tuple, Any] | None = None
        true_gather = Rendezvous.gather

        def gather(meeting: Rendezvous, step: str, value: Any) -> Any:
            if meeting.own == 1:
                value = json.loads(json.dumps(value))
                self.told.setdefault(step, value)
                if self.lie is not None and self.lie[0] == step:
                    value = changed(value, *self.lie[1:])
            return true_gather(meeting, step, value)

        monkeypatch.setattr(Rendezvous, "gather", gather)

    def lies(self, step: str) -> Iterator[None]:
        """Tells every lie in every place of a step, one after the other."""
        for path in leaves(self.told[step]):
            for lie in LIES:
                self.lie = step, path, lie
                yield


def check_ours(error: BaseException | None, lie: Any) -> None:
    if error is not None:
        assert isinstance(error, RuntimeError | ValueError), (lie, error)
        assert OURS.fullmatch(str(error)), (lie, error)
        assert len(str(error)) < 1000, lie


def check(actors: dict[int, Any], liar: Liar) -> None:
    """Nobody has an error but ours; if one fails, all do."""
    errors = [actor.error for actor in actors.values()]
    for error in errors:
        check_ours(error, liar.lie)
    assert len({error is None for error in errors}) == 1, (liar.lie, errors)


def opened(groups: Any, natives: dict[int, Any], transport: Any) -> dict[int, Any]:
    """Opens a group in threads that act as processes, as init does, and closes it."""
    mesh: Any = types.SimpleNamespace(
        devices=groups[0], axis_names=("ep",), shape={"ep": groups.shape[1]}
    )

    def act(meeting: Rendezvous) -> Any:
        fake_windows.here.process = meeting.own
        group = init.open_group(
            mesh, ("ep",), fake_windows.CONFIG, transport, meeting, series="lies"
        )
        try:
            meeting.conclude()
        finally:
            natives[meeting.own].close_group(group.key)

    return act_all(dict.fromkeys(natives, act))


@pytest.fixture
def of_threads(monkeypatch) -> dict[int, Any]:
    """The native modules by process, which init finds by thread."""
    natives: dict[int, Any] = {}
    monkeypatch.setattr(ffi, "native_for", lambda _: natives[fake_windows.here.process])
    return natives


@pytest.mark.few(2)
@pytest.mark.parametrize("step", ["devices", "reach", "instance", "windows", "mapped"])
def test_lies_about_windows(step, of_threads, all_closed, monkeypatch) -> None:
    of_threads |= fake_windows.Job(TWO).natives
    liar = Liar(monkeypatch)
    check(opened(TWO, of_threads, "p2p"), liar)
    for _ in liar.lies(step):
        check(opened(TWO, of_threads, "p2p"), liar)
    assert not any(native.own or native.mapped for native in of_threads.values())


@pytest.mark.few(2)
@pytest.mark.parametrize("step", ["shmem", "hosts", "id", "started", "heap", "reached"])
def test_lies_about_heaps(step, of_threads, monkeypatch) -> None:
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    liar = Liar(monkeypatch)

    def run() -> dict[int, Any]:
        job = fake_nvshmem.Job(TWO)
        of_threads.update(job.natives)
        heaps = types.SimpleNamespace(
            find_obstacle=lambda *a: job.heaps[a[3].own].find_obstacle(*a),
            open_windows=lambda *a: job.heaps[a[5].own].open_windows(*a),
        )
        monkeypatch.setattr(nvshmem, "heap", heaps)
        return opened(TWO, of_threads, "shmem")

    check(run(), liar)
    for _ in liar.lies(step):
        check(run(), liar)


class LyingStore(fake_windows.Store):
    """Changes what is put under one key."""

    def __init__(self, key: str, path: tuple | None, lie: Any) -> None:
        super().__init__()
        self.key, self.path, self.lie, self.told = f"/{key}", path, lie, None

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        if key.endswith(self.key):
            self.told = json.loads(value)
            # Where two processes did not meet in time, the verdict has other parts.
            if self.path in leaves(self.told):
                value = json.dumps(changed(self.told, self.path, self.lie)).encode()
        super().key_value_set_bytes(key, value, allow_overwrite)


@pytest.mark.parametrize("key", ["invitation", "failed/1", "0/1", "0/verdict", "1/1"])
def test_lies_in_the_store(key) -> None:
    """Also before and on arrival."""

    def act(meeting: Rendezvous) -> Any:
        if meeting.own == 1 and key.startswith("failed"):
            raise ValueError("jax_ep.here: something; do it otherwise")
        return meeting.ask("one", meeting.own, answers.count)

    def started(store: LyingStore, timeout_s: float = 0.3) -> list[Actor]:
        # Series do not wait for each other.
        given: dict[str, Any] = {"store": store, "series": str(id(store))}
        return [Actor(act, [0, 1], process, timeout_s, **given) for process in (0, 1)]

    honest = LyingStore(key, None, None)
    for actor in started(honest, timeout_s=30):
        actor.join(60)
    stores = [LyingStore(key, p, lie) for p in leaves(honest.told) for lie in LIES]
    for store, actors in [(store, started(store)) for store in stores]:
        for actor in actors:
            actor.join(60)
            check_ours(actor.error, (store.path, store.lie))
