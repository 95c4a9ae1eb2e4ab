"""What processes tell each other in an init, with threads that stand for processes."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import imagined
import pytest
from errors import check_form

from jax_ep._meeting import Meeting

# Well below the 20 s that others would wait, on machines that are slow and busy too.
SOON_S = 10.0


class Actor(threading.Thread):
    """Runs `act(meeting)` as one process; keeps what it returned or raised."""

    def __init__(self, act: Callable[[Meeting], Any], *args: Any, **named: Any) -> None:
        super().__init__()
        self.meeting = Meeting(*args, **named)
        self.act, self.result, self.error = act, None, None
        self.start()

    def run(self) -> None:
        start = time.monotonic()
        try:
            with self.meeting as meeting:
                self.result = self.act(meeting)
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - start


def act_all(
    acts: dict[int, Callable[[Meeting], Any]],
    timeout_s: float = 20.0,
    processes: list[int] | None = None,
    subject: Callable[[int], str] = str,
    store: Any = None,
) -> dict[int, Actor]:
    """Of those processes that come."""
    store = store or imagined.Store()
    processes = processes or sorted(acts)
    actors = {
        process: Actor(
            act, processes, process, timeout_s, subject=subject(0), store=store
        )
        for process, act in acts.items()
    }
    for actor in actors.values():
        actor.join(200)
    return actors


def test_values_of_all() -> None:
    def act(meeting: Meeting) -> Any:
        first = meeting.gather("one", {"from": meeting.own, "none": None})
        second = meeting.gather("two", [meeting.own * 10])
        return first, second

    store = imagined.Store()
    processes = [1, 3, 10]
    for _ in range(3):
        actors = act_all(dict.fromkeys(processes, act), store=store)
        for actor in actors.values():
            assert actor.error is None
            assert actor.result == (
                {p: {"from": p, "none": None} for p in processes},
                {p: [p * 10] for p in processes},
            )
        # The last step's are there until the next meeting.
        assert len(store.values) == len(processes)


def test_meetings_of_other_processes_go_their_own_way() -> None:
    store = imagined.Store()
    wide = act_all(dict.fromkeys(range(4), lambda m: m.gather("a", 1)), store=store)
    one = act_all(dict.fromkeys((1, 2), lambda m: m.gather("a", 2)), store=store)
    wide |= act_all(dict.fromkeys(range(4), lambda m: m.gather("a", 3)), store=store)
    assert [a.result for a in one.values()] == [{1: 2, 2: 2}] * 2
    assert [a.result for a in wide.values()] == [dict.fromkeys(range(4), 3)] * 4


def test_alone() -> None:
    with Meeting([3], 3, 1.0, "") as meeting:
        assert meeting.alone
        assert meeting.possible
        assert meeting.gather("a", {"x": (1, None)}) == {3: {"x": [1, None]}}


def test_no_store_where_jax_distributed_was_not_initialized() -> None:
    with Meeting([0, 1], 0, 1.0, "") as meeting:
        assert not meeting.possible


def test_second_init_of_the_same_processes() -> None:
    """It waits for the first one, but not for ever."""
    store = imagined.Store()
    first = Actor(lambda m: m.gather("a", 1), [0, 1], 0, 30.0, subject="", store=store)
    while not any("card" in key for key in list(store.values)):
        time.sleep(0.01)
    second = Actor(lambda m: m.gather("a", 1), [0, 1], 0, 0.2, subject="", store=store)
    second.join(200)
    with pytest.raises(RuntimeError) as caught:
        raise second.error
    check_form(caught, "init", "timeout_s = 0.2", "one thread")
    assert first.is_alive()
    other = Actor(lambda m: m.gather("a", 2), [0, 1], 1, 30.0, subject="", store=store)
    for actor in (first, other):
        actor.join(200)
        assert actor.result == {0: 1, 1: 2}, actor.error


@pytest.mark.parametrize("steps", [0, 1])
def test_missing_process(steps: int) -> None:
    """It never comes, or dies in the middle: all others say so, and in time."""

    def act(meeting: Meeting) -> None:
        for step in range(2):
            meeting.gather(f"step{step}", None)

    def die(meeting: Meeting) -> None:
        for step in range(steps):
            meeting.gather(f"step{step}", None)
        # As a killed process: without leaving the meeting.
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
    """As pytest.raises has it."""

    def __init__(self, error: Any) -> None:
        self.value = error


def test_meeting_again_after_failures() -> None:
    """Also where some have failed more often, or at another step, than others."""
    store = imagined.Store()
    processes = [0, 1, 2]

    def fail(meeting: Meeting) -> None:
        meeting.gather("one", 1)
        raise RuntimeError("no")

    def act(meeting: Meeting) -> Any:
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


def test_card_of_a_dead_process() -> None:
    """What a killed process has left is not taken for the one that is started anew."""
    store = imagined.Store()

    def start(process: int, timeout_s: float, act: Callable[[Meeting], Any]) -> Actor:
        return Actor(act, [0, 1], process, timeout_s, subject="", store=store)

    killed = start(1, 0.1, lambda meeting: meeting.gather("one", "old"))
    killed.join()
    # A card that nobody took away.
    store.values["jax_ep/" + killed.meeting._series[0] + "/card/1"] = b'["0", ""]'
    early = start(0, 20.0, lambda meeting: meeting.gather("one", 0))
    time.sleep(0.3)
    new = start(1, 20.0, lambda meeting: meeting.gather("one", "new"))
    for actor in (early, new):
        actor.join(200)
        assert actor.result == {0: 0, 1: "new"}


def test_two_threads_of_a_process_meet_in_turn() -> None:
    store = imagined.Store()

    def act(meeting: Meeting) -> Any:
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
    """At once, long before the time limit."""

    def act(meeting: Meeting) -> None:
        meeting.gather("one", None)
        if meeting.own == 1:
            raise RuntimeError("no room on device 5")
        meeting.gather("two", None)

    actors = act_all(dict.fromkeys(range(3), act))
    assert str(actors[1].error) == "no room on device 5"
    for process in (0, 2):
        actor = actors[process]
        assert isinstance(actor.error, RuntimeError)
        # The second to give up says why as well, and may be the one that is read.
        assert "process 1" in str(actor.error)
        assert "no room on device 5" in str(actor.error)
        assert actor.seconds < SOON_S


def test_same_error_in_all_stays_what_it_is() -> None:
    """One that is quicker to raise it does not make others say that it failed."""

    def act(meeting: Meeting) -> None:
        meeting.gather("one", None)
        raise ValueError("refused")

    for _ in range(20):
        actors = act_all(dict.fromkeys(range(4), act))
        assert {str(actor.error) for actor in actors.values()} == {"refused"}


def test_other_subject() -> None:
    """All of them hear that arguments differ, not that somebody is missing."""
    store = imagined.Store()
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
    """Other errors than of time are what they are."""
    store = imagined.Store()

    def fail(key: str, milliseconds: int) -> None:
        raise imagined.jax.errors.JaxRuntimeError("UNAVAILABLE: no coordinator")

    store.blocking_key_value_get_bytes = fail
    actors = act_all({0: lambda m: m.gather("one", 1)}, processes=[0, 1], store=store)
    assert "no coordinator" in str(actors[0].error)


def test_descriptors_end_with_the_meeting() -> None:
    before = imagined.descriptors()

    def act(meeting: Meeting) -> int:
        addresses = meeting.gather("one", meeting.listen())
        meeting.give(meeting.own, imagined.os.memfd_create("test"))
        other = 1 - meeting.own
        meeting.connect(other, addresses[other])
        meeting.gather("two", None)
        descriptor = meeting.take(other, other)
        meeting.gather("three", None)
        return descriptor

    actors = act_all(dict.fromkeys(range(2), act))
    for actor in actors.values():
        assert actor.error is None
        imagined.os.close(actor.result)
    assert imagined.threads_of_meetings() == 0
    assert imagined.descriptors() == before
