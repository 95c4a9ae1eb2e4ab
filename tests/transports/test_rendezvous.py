"""What processes tell each other in an init, with threads that act as processes."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from jax_ep._peers import rendezvous
from jax_ep._peers.rendezvous import Rendezvous, _dump
from support import fake_windows
from support.errors import check_form, check_state
from support.fake_windows import Actor, act_all

# Well below the 20 s that others would wait, also on slow and busy machines.
SOON_S = 10.0


def test_values_of_all() -> None:
    def act(meeting: Rendezvous) -> Any:
        first = meeting.gather("one", {"from": meeting.own, "none": None})
        second = meeting.gather("two", [meeting.own * 10])
        return first, second

    store = fake_windows.Store()
    processes = [1, 3, 10]
    for _ in range(3):
        actors = act_all(dict.fromkeys(processes, act), store=store)
        for actor in actors.values():
            assert actor.error is None
            assert actor.result == (
                {p: {"from": p, "none": None} for p in processes},
                {p: [p * 10] for p in processes},
            )
        # The invitation, its verdict and the last one stay until the next meeting.
        assert len(store.values) == 3


def test_meetings_of_other_processes_go_their_own_way() -> None:
    store = fake_windows.Store()
    wide = act_all(dict.fromkeys(range(4), lambda m: m.gather("a", 1)), store=store)
    one = act_all(dict.fromkeys((1, 2), lambda m: m.gather("a", 2)), store=store)
    wide |= act_all(dict.fromkeys(range(4), lambda m: m.gather("a", 3)), store=store)
    assert [a.result for a in one.values()] == [{1: 2, 2: 2}] * 2
    assert [a.result for a in wide.values()] == [dict.fromkeys(range(4), 3)] * 4


def test_alone() -> None:
    with Rendezvous([3], 3, 1.0, "") as meeting:
        assert meeting.alone
        assert meeting.possible
        assert meeting.gather("a", {"x": (1, None)}) == {3: {"x": [1, None]}}


def test_no_store_where_jax_distributed_was_not_initialized() -> None:
    with Rendezvous([0, 1], 0, 1.0, "") as meeting:
        assert not meeting.possible


def test_second_init_of_the_same_processes() -> None:
    """It waits for the first init, but not for ever."""
    store = fake_windows.Store()
    first = Actor(lambda m: m.gather("a", 1), [0, 1], 0, 30.0, subject="", store=store)
    while not any("invitation" in key for key in list(store.values)):
        time.sleep(0.01)
    second = Actor(lambda m: m.gather("a", 1), [0, 1], 0, 0.2, subject="", store=store)
    second.join(200)
    with pytest.raises(RuntimeError) as caught:
        raise second.error
    check_state(caught, "init", "timeout_s = 0.2", "one thread")
    assert first.is_alive()
    other = Actor(lambda m: m.gather("a", 2), [0, 1], 1, 30.0, subject="", store=store)
    for actor in (first, other):
        actor.join(200)
        assert actor.result == {0: 1, 1: 2}, actor.error


@pytest.mark.parametrize("steps", [0, 1])
def test_missing_process(steps: int) -> None:
    """A process never comes, or dies in the middle: all others report it in time."""

    def act(meeting: Rendezvous) -> None:
        for step in range(2):
            meeting.gather(f"step{step}", None)

    def die(meeting: Rendezvous) -> None:
        for step in range(steps):
            meeting.gather(f"step{step}", None)
        # Like a killed process, does not leave the meeting.
        meeting._store = None

    acts = {0: act, 2: act} | ({1: die} if steps else {})
    actors = act_all(acts, timeout_s=1.5, processes=[0, 1, 2])
    for process in (0, 2):
        error = actors[process].error
        assert isinstance(error, RuntimeError)
        text = str(error)
        step = "step1" if steps else "arrival"
        assert re.search(rf"'{step}'.* \[1\] of \[0, 1, 2\]", text), text
        assert 1.4 < actors[process].seconds < 1.5 + SOON_S
        check_form(Caught(error), "init", "timeout_s", "1.5")


class Caught:
    """A caught error, as from pytest.raises."""

    def __init__(self, error: Any) -> None:
        self.value = error


def test_meeting_again_after_failures() -> None:
    """Also if some have failed more often, or at another step, than others."""
    store = fake_windows.Store()
    processes = [0, 1, 2]

    def fail(meeting: Rendezvous) -> None:
        meeting.gather("one", 1)
        raise RuntimeError("no")

    def act(meeting: Rendezvous) -> Any:
        return meeting.gather("one", 2), meeting.gather("two", 3)

    for attempt in range(3):
        some = dict.fromkeys(processes[attempt:], act)
        act_all(some, timeout_s=0.1, processes=processes, store=store)
        act_all(dict.fromkeys(processes, fail), store=store)
        again = act_all(dict.fromkeys(processes, act), store=store)
        for actor in again.values():
            assert actor.error is None
            assert actor.result == (
                dict.fromkeys(processes, 2),
                dict.fromkeys(processes, 3),
            )
        assert len(store.values) == 3


@pytest.mark.parametrize("dead", [0, 1])
def test_what_a_dead_process_has_left(dead: int) -> None:
    """Its keys are not taken for those of the restarted process."""
    store = fake_windows.Store()

    def start(process: int, timeout_s: float, value: str) -> Actor:
        def act(meeting: Rendezvous) -> Any:
            return meeting.gather("one", value)

        return Actor(act, [0, 1], process, timeout_s, subject="", store=store)

    killed = start(dead, 0.1, "old")
    killed.join()
    meeting = killed.meeting
    # The keys as the process left them when it was killed while waiting.
    store.values[f"{meeting._root}/invitation"] = _dump(
        {"token": "0", "attempt": 1, "failed": None, "process": None}
    )
    store.values[f"{meeting._root}/0/0/1"] = _dump({"value": {"attempt": 1}})
    early = start(1 - dead, 20.0, "early")
    time.sleep(0.3)
    new = start(dead, 20.0, "new")
    for actor in (early, new):
        actor.join(200)
        assert actor.error is None
        assert actor.result == {dead: "new", 1 - dead: "early"}
        assert actor.seconds < SOON_S


def test_two_threads_of_a_process_meet_in_turn() -> None:
    store = fake_windows.Store()

    def act(meeting: Rendezvous) -> Any:
        return meeting.gather("one", 1), meeting.gather("two", 2)

    actors = [
        Actor(act, [0, 1], process, 20.0, subject="", store=store)
        for process in (0, 1)
        for _ in range(5)
    ]
    for actor in actors:
        actor.join(200)
        assert actor.result == ({0: 1, 1: 1}, {0: 2, 1: 2})


def test_who_gives_up_ends_it_for_all() -> None:
    """The meeting ends at once, long before the time limit."""

    def act(meeting: Rendezvous) -> None:
        meeting.gather("one", None)
        if meeting.own == 1:
            raise RuntimeError("no room on device 5")
        meeting.gather("two", None)

    actors = act_all(dict.fromkeys(range(3), act))
    assert str(actors[1].error) == "no room on device 5"
    for process in (0, 2):
        actor = actors[process]
        assert isinstance(actor.error, RuntimeError)
        # The second to give up also says why, and its message may be the one read.
        assert "process 1" in str(actor.error)
        assert "no room on device 5" in str(actor.error)
        assert actor.seconds < SOON_S


def test_same_error_in_all_stays_what_it_is() -> None:
    """The first process to raise it does not make others report that it failed."""

    def act(meeting: Rendezvous) -> None:
        meeting.gather("one", None)
        raise ValueError("refused")

    for _ in range(20):
        actors = act_all(dict.fromkeys(range(4), act))
        assert {str(actor.error) for actor in actors.values()} == {"refused"}


def test_other_subject() -> None:
    """The error in all is that arguments differ, not that a process is missing."""
    store = fake_windows.Store()
    actors = [
        Actor(lambda m: m.gather("one", 1), [0, 1], p, 20.0, subject=s, store=store)
        for p, s in enumerate(("ep", "dp"))
    ]
    for actor in actors:
        actor.join(200)
        assert isinstance(actor.error, ValueError)
        check_form(Caught(actor.error), "init", "config", "same order")
        assert actor.seconds < SOON_S


def test_store_that_fails() -> None:
    """Errors other than time-outs are passed on unchanged."""
    store = fake_windows.Store()

    def fail(key: str, milliseconds: int) -> None:
        raise fake_windows.jax.errors.JaxRuntimeError("UNAVAILABLE: no coordinator")

    store.blocking_key_value_get_bytes = fail
    actors = act_all({0: lambda m: m.gather("one", 1)}, processes=[0, 1], store=store)
    assert "no coordinator" in str(actors[0].error)


def test_descriptors_end_with_the_meeting() -> None:
    before = fake_windows.descriptors()

    def act(meeting: Rendezvous) -> int:
        addresses = meeting.gather("one", meeting.listen())
        meeting.give(meeting.own, fake_windows.os.memfd_create("test"))
        other = 1 - meeting.own
        meeting.connect(other, addresses[other])
        meeting.gather("two", None)
        descriptor = meeting.take(other, other)
        meeting.gather("three", None)
        return descriptor

    actors = act_all(dict.fromkeys(range(2), act))
    for actor in actors.values():
        assert actor.error is None
        fake_windows.os.close(actor.result)
    assert fake_windows.threads_of_meetings() == 0
    assert fake_windows.descriptors() == before


def test_a_step_succeeds_in_all_or_in_none() -> None:
    """A process that comes just after the others' time limit accepts their verdict."""
    store = fake_windows.Store()

    def act(meeting: Rendezvous) -> Any:
        meeting.gather("one", None)
        if meeting.own == 2:
            time.sleep(1.0)
        return meeting.gather("last", None)

    for late in (0.3, 0.95, 1.0, 3.0):
        actors = act_all(dict.fromkeys(range(3), act), timeout_s=late, store=store)
        outcomes = {actor.error is None for actor in actors.values()}
        assert len(outcomes) == 1, (late, [actor.error for actor in actors.values()])
        assert outcomes == {True} if late > 2 else True
        assert outcomes == {False} if late < 0.5 else True


def test_failure_before_arrival_is_told() -> None:
    """In the first attempt and in later ones; and only to the attempt that failed."""
    store = fake_windows.Store()

    def fail(meeting: Rendezvous) -> None:
        raise ValueError(f"no such axis in process {meeting.own}")

    def act(meeting: Rendezvous) -> Any:
        return meeting.gather("one", meeting.own)

    for failing in (0, 2, 1):
        for _ in range(2):
            acts = {p: fail if p == failing else act for p in range(3)}
            actors = act_all(acts, store=store)
            assert isinstance(actors[failing].error, ValueError)
            for process in {0, 1, 2} - {failing}:
                error = actors[process].error
                assert f"init failed on process {failing}: ValueError: no such" in str(
                    error
                )
                assert actors[process].seconds < SOON_S
        # All fail by themselves, which must not count as a failure of the next attempt.
        act_all(dict.fromkeys(range(3), fail), store=store)
        actors = act_all(dict.fromkeys(range(3), act), store=store)
        for actor in actors.values():
            assert actor.error is None
            assert actor.result == {0: 0, 1: 1, 2: 2}


class Stalled(fake_windows.Store):
    """The store of a coordinator that hangs from `since` on."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.going = key, threading.Event()

    def _stall(self, key: str) -> None:
        if self.key in key:
            self.going.wait(60)

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        self._stall(key)
        super().key_value_set_bytes(key, value, allow_overwrite)

    def key_value_try_get_bytes(self, key):
        self._stall(key)
        return super().key_value_try_get_bytes(key)

    def blocking_key_value_get_bytes(self, key, milliseconds):
        self._stall(key)
        return super().blocking_key_value_get_bytes(key, milliseconds)


@pytest.mark.few(2)
@pytest.mark.parametrize("key", ["invitation", "/0/1", "/0/verdict", "/1/verdict"])
def test_store_that_stands_still(key: str) -> None:
    """Its calls have no deadline, but the time limit still holds."""
    store = Stalled(key)
    actors = act_all(
        dict.fromkeys(range(2), lambda m: m.gather("one", 1)), 1.0, store=store
    )
    for actor in actors.values():
        assert isinstance(actor.error, RuntimeError)
        assert actor.seconds < 1.0 + SOON_S
    assert any("did not answer within" in str(a.error) for a in actors.values())
    store.going.set()
    # They can meet again once it goes on.
    actors = act_all(dict.fromkeys(range(2), lambda m: m.gather("one", 2)), store=store)
    assert [actor.result for actor in actors.values()] == [{0: 2, 1: 2}] * 2


class Stopped(fake_windows.Store):
    """The store of a coordinator that is stopped for a while.

    It stops at the n-th call about the last step, before or after it is carried out.
    """

    def __init__(self, call: int, when: str, seconds: float) -> None:
        super().__init__()
        self.left, self.when, self.seconds = call, when, seconds
        self.begun, self.goes_on = False, threading.Event()
        self.goes_on.set()

    def _run(self, name: str, key: str, *args: Any) -> Any:
        self.goes_on.wait(60)
        last = self.begun or "/2/" in key
        self.begun, self.left = last, self.left - last
        stops = self.left == 0 and last
        if stops and self.when == "before":
            self._stop()
        try:
            return getattr(super(), name)(key, *args)
        finally:
            if stops and self.when == "after":
                self._stop()
            # Answers are not sent while it is stopped, either.
            self.goes_on.wait(60)

    def _stop(self) -> None:
        self.goes_on.clear()
        threading.Timer(self.seconds, self.goes_on.set).start()
        self.goes_on.wait(60)

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        return self._run("key_value_set_bytes", key, value, allow_overwrite)

    def key_value_try_get_bytes(self, key):
        return self._run("key_value_try_get_bytes", key)

    def key_value_dir_get_bytes(self, folder):
        return self._run("key_value_dir_get_bytes", folder)

    def key_value_delete(self, key):
        return self._run("key_value_delete", key)

    def blocking_key_value_get_bytes(self, key, milliseconds):
        return self._run("blocking_key_value_get_bytes", key, milliseconds)


def test_coordinator_that_stops_in_the_last_step(monkeypatch) -> None:
    """Wherever it stops, all succeed or none does; and the time is bounded."""
    timeout_s = 0.5
    jobs = []
    for call in range(1, 13):
        for when in ("before", "after"):
            store = Stopped(call, when, 3 * timeout_s)
            given: dict[str, Any] = {"store": store, "series": str(id(store))}
            actors = [
                Actor(Rendezvous.conclude, [0, 1, 2], process, timeout_s, **given)
                for process in range(3)
            ]
            jobs.append((call, when, actors))
    for call, when, actors in jobs:
        for actor in actors:
            actor.join(60)
        errors = [actor.error for actor in actors]
        assert len({error is None for error in errors}) == 1, (call, when, errors)


def test_coordinator_that_never_goes_on(monkeypatch) -> None:
    """The last step gives up in the end, and says what that may mean."""
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.5)
    store = Stopped(1, "before", 3.0)
    actors = act_all(dict.fromkeys(range(2), Rendezvous.conclude), 0.3, store=store)
    told = [str(actor.error) for actor in actors.values()]
    for actor in actors.values():
        assert actor.seconds < SOON_S
        check_state(Caught(actor.error), "init", "did not answer within", "process 0")
    # One of them may have been in the step before.
    assert any("0.5 s more" in words and "end the job" in words for words in told)


LIES = [
    b"",
    b"[]",
    b"\xff",
    b"{}",
    b'{"values": {}}',
    b'{"values": 3}',
    b'{"value": 1}',
]


@pytest.mark.few(6)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("place", ["0/1", "0/verdict", "1/1", "1/verdict"])
def test_lies_of_a_process(lie: bytes, place: str) -> None:
    """Whatever another process has written, the result is a plain error."""
    store = fake_windows.Store()
    true_set = store.key_value_set_bytes

    def put(key: str, value: bytes, allow_overwrite: bool = False) -> None:
        value = lie if key.endswith(place) else value
        true_set(key, value, allow_overwrite)

    store.key_value_set_bytes = put
    actors = act_all(
        dict.fromkeys(range(2), lambda m: m.gather("one", 1)), 1.0, store=store
    )
    errors = [actor.error for actor in actors.values() if actor.error is not None]
    # A value may be any JSON, which the caller must check.
    assert errors or (place, lie) == ("1/1", b'{"value": 1}')
    for error in errors:
        assert type(error) is RuntimeError
        assert str(error).startswith("jax_ep.init: ")


def test_texts_that_utf8_cannot_say() -> None:
    """A mesh axis or a message may have surrogates, like file names."""
    store = fake_windows.Store()

    def act(meeting: Rendezvous) -> Any:
        return meeting.gather("one", "\udc80")

    def fail(meeting: Rendezvous) -> None:
        meeting.gather("one", None)
        if meeting.own == 1:
            raise ValueError("no file \udc80")
        meeting.gather("two", None)

    odd = {"subject": lambda _: "\udcff", "store": store}
    actors = act_all(dict.fromkeys(range(2), act), **odd)
    assert [actor.result for actor in actors.values()] == [
        dict.fromkeys((0, 1), "\udc80")
    ] * 2
    actors = act_all(dict.fromkeys(range(2), fail), **odd)
    assert "no file" in str(actors[0].error)


class Counted(fake_windows.Store):
    """Counts calls and bytes."""

    calls, moved = 0, 0

    def _count(self, *parts: Any) -> None:
        with self._changed:
            self.calls += 1
            self.moved += sum(len(part) for part in parts)

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        self._count(key, value)
        super().key_value_set_bytes(key, value, allow_overwrite)

    def key_value_dir_get_bytes(self, folder):
        found = super().key_value_dir_get_bytes(folder)
        self._count(folder, *(raw for _, raw in found))
        return found

    def key_value_try_get_bytes(self, key):
        self._count(key)
        found = super().key_value_try_get_bytes(key)
        self._count(found)
        return found

    def key_value_delete(self, key):
        self._count(key)
        super().key_value_delete(key)

    def blocking_key_value_get_bytes(self, key, milliseconds):
        self._count(key)
        found = super().blocking_key_value_get_bytes(key, milliseconds)
        self._count(found)
        return found


def test_traffic_is_linear() -> None:
    """With 64 processes, one 2 s late, calls grow with processes, not with pairs.

    Values reach every process, so a step's bytes are all values, once per process.
    """
    counts = {}
    for size in (8, 64):
        store = Counted()

        def act(meeting: Rendezvous) -> None:
            meeting.gather("one", None)
            if meeting.own == 3:
                time.sleep(2.0)
            meeting.gather("two", None)

        actors = act_all(dict.fromkeys(range(size), act), 60.0, store=store)
        assert [actor.error for actor in actors.values()] == [None] * size
        counts[size] = store.calls, store.moved
    calls, moved = counts[64]
    assert calls < 64 * 30, counts
    assert calls < 1.5 * 8 * counts[8][0], counts
    assert moved < 2_000_000, counts


def test_series_do_not_wait_for_each_other() -> None:
    """Each process is in two at once, which it has begun in its own order."""
    store = fake_windows.Store()
    both = threading.Barrier(4)

    def act(meeting: Rendezvous) -> Any:
        both.wait(10)
        return meeting.gather("one", meeting.own)

    actors = [
        Actor(act, [0, 1], process, 20.0, subject=series, store=store, series=series)
        for process, order in enumerate(["ab", "ba"])
        for series in order
    ]
    for actor in actors:
        actor.join(60)
        assert actor.error is None
        assert actor.result == {0: 0, 1: 1}


@pytest.mark.parametrize("late", [0, 1])
def test_failure_at_a_place_is_told_to_whoever_comes_later(late: int) -> None:
    store = fake_windows.Store()

    def meet(process: int, timeout_s: float, place: str) -> Actor:
        def act(meeting: Rendezvous) -> Any:
            return meeting.gather("one", meeting.own)

        return Actor(
            act, [0, 1], process, timeout_s, store=store, series="s", place=place
        )

    first = meet(1 - late, 0.3, "7")
    first.join(60)
    assert f"[{late}]" in str(first.error)
    second = meet(late, 30.0, "7")
    second.join(60)
    assert f"failed on process {1 - late}" in str(second.error)
    assert second.seconds < SOON_S
    actors = [meet(process, 20.0, "8") for process in (0, 1)]
    for actor in actors:
        actor.join(60)
        assert actor.result == {0: 0, 1: 1}


def test_turns_are_taken_in_one_order() -> None:
    """Turns are in the order of the first process, whichever another began first."""
    store = fake_windows.Store()
    locks = {process: threading.Lock() for process in (0, 1)}
    inside: dict[int, list[str]] = {0: [], 1: []}
    first_is_in = threading.Event()

    def act(meeting: Rendezvous) -> None:
        series = meeting.subject
        if meeting.own == 0 and series == "b":
            first_is_in.wait(10)
        meeting.take_turn(locks[meeting.own])
        first_is_in.set()
        inside[meeting.own].append(series)
        time.sleep(0.2)
        inside[meeting.own].append(series)
        meeting.gather("end", None)

    actors = [
        Actor(act, [0, 1], process, 20.0, subject=series, store=store, series=series)
        for process, order in ((1, "ba"), (0, "ab"))
        for series in order
    ]
    for actor in actors:
        actor.join(60)
        assert actor.error is None
    assert inside == {0: list("aabb"), 1: list("aabb")}
    assert not any(lock.locked() for lock in locks.values())
