"""benchmarks/soak/processes.py: what the processes agree on, and their one record."""

from __future__ import annotations

import json
import sys
import threading
import types

import pytest

from benchmarks.common import processes as job_processes
from benchmarks.soak import processes as soak_processes
from benchmarks.soak import run as soak_run
from benchmarks.soak import soak

RECORD = {
    "calls": 80,
    "checks": 100,
    "rows": 7,
    "dropped": 5,
    "invalid": 3,
    "compilations": 2,
    "failures": {},
    "first_failure": None,
    "error": None,
    "free_memory_start": 1000,
    "free_memory_end": 1000,
    "heap_start": None,
    "heap_end": None,
}


def parsed(*words: str):
    args = soak_processes.arguments().parse_args(
        ["--processes", "2", "--seed", "5", *words]
    )
    args.threads = 1
    soak.settle(args)
    return args


class Store:
    """The store of jax.distributed, for threads."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            found = self.changed.wait_for(lambda: key in self.values, 60)
            assert found, key
            return self.values[key]


class FakeLauncher:
    def __init__(self, wanted: int, fails_at: int | None = None) -> None:
        self.launches, self.wanted, self.fails_at = 0, wanted, fails_at
        self.error: str | None = None

    @property
    def done(self) -> bool:
        return self.launches >= self.wanted


def soak_in_two(monkeypatch, launchers, deadlines, launches=10**9) -> None:
    """Runs `Together` in two processes, each of which is a thread."""
    here, store = threading.local(), Store()
    fake = types.SimpleNamespace(
        process_index=lambda: here.own, process_count=lambda: len(launchers)
    )
    monkeypatch.setitem(sys.modules, "jax", fake)
    monkeypatch.setattr(job_processes, "client", lambda: store)

    def together(those, compiler, deadline, most):
        (one,) = those
        assert deadline == float("inf")
        one.launches = min(most, one.wanted)
        if one.fails_at is not None and one.launches >= one.fails_at:
            one.error = "failed"

    monkeypatch.setattr(soak_run, "together", together)
    compiler = types.SimpleNamespace(error=None)

    def run(own: int) -> None:
        here.own = own
        soak_processes.Together()([launchers[own]], compiler, deadlines[own], launches)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(launchers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_processes_stop_together(monkeypatch) -> None:
    """All stop when process 0 does, at the same launch, whatever their clocks say."""
    ends = float("inf"), 0.0
    launchers = [FakeLauncher(100), FakeLauncher(100)]
    soak_in_two(monkeypatch, launchers, ends)
    assert [one.launches for one in launchers] == [100, 100]
    launchers = [FakeLauncher(1000), FakeLauncher(1000)]
    soak_in_two(monkeypatch, launchers, ends[::-1])
    assert [one.launches for one in launchers] == [soak_processes.CHUNK] * 2
    launchers = [FakeLauncher(1000), FakeLauncher(1000)]
    soak_in_two(monkeypatch, launchers, [float("inf")] * 2, launches=50)
    assert [one.launches for one in launchers] == [50, 50]


def test_one_that_fails_stops_all(monkeypatch) -> None:
    launchers = [
        FakeLauncher(1000),
        FakeLauncher(1000, fails_at=soak_processes.CHUNK + 1),
    ]
    soak_in_two(monkeypatch, launchers, [float("inf")] * 2)
    assert [one.launches for one in launchers] == [2 * soak_processes.CHUNK] * 2


def test_record_of_all() -> None:
    other = RECORD | {
        "failures": {"combine": 2},
        "first_failure": {"rank": 1},
        "free_memory_end": 400,
        "heap_start": 10,
        "heap_end": 15,
    }
    args = parsed("--one-gpu", "--ranks-per-node", "1", "--calls", "80")
    record = soak_processes.merged(args, [RECORD, other])
    assert (record["calls"], record["checks"], record["rows"]) == (80, 200, 14)
    assert record["failures"] == {"combine": 2}
    assert record["first_failure"] == {"rank": 1}
    assert record["free_memory_start"] - record["free_memory_end"] == 600
    assert (record["heap_start"], record["heap_end"]) == (10, 15)
    assert record["error"] is None
    assert record["command"] == (
        "python -m benchmarks.soak.processes --processes 2 --one-gpu "
        "--ranks-per-node 1 --calls 80 --seed 5"
    )
    json.dumps(record)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"error": "lost"}, "lost"), ({"calls": 40}, "different numbers of calls")],
)
def test_what_one_says_of_itself_counts(change, words) -> None:
    record = soak_processes.merged(parsed(), [RECORD, RECORD | change])
    assert words in record["error"]


def test_shmem_takes_what_exchanges_something() -> None:
    served = soak.defaults("shmem")
    assert set(soak.OPTIONS) - set(served) == {"local", "local_none"}
    assert soak.defaults("p2p") == list(soak.OPTIONS)
