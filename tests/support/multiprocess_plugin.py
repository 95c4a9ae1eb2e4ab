"""A plugin of pytest that runs tests in all processes of a jax.distributed job at once.

tools/lockstep_run.py starts `pytest -p support.multiprocess_plugin` in each process,
with JAX_EP_TEST_PROCESSES. An array of several processes reads as a whole, each test
begins in all processes together, and its outcome must be the same in all.
A process writes its outcomes as lines of JSON in JAX_EP_TEST_FOLDER.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import pathlib
import sys
import warnings
from collections.abc import Collection, Generator
from typing import Any, NoReturn

import jax_ep

# isort: split
import hypothesis
import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl  # only tests read arrays of other processes

from workers import multiprocess_worker
from workers.windows_worker import client, leave

BARRIER_MS = 300_000
# gRPC's messages are limited in size.
CHUNK = 1 << 20
APART = 3  # exit status of a process that has lost the others
_true_value: Any = ArrayImpl._value


class Apart(RuntimeError):
    """The processes are no longer at the same step."""


class Together:
    """Exchanges values between processes, step by step, via jax.distributed's store."""

    def __init__(self, own: int, count: int) -> None:
        self.own, self.count, self.client = own, count, client()
        self.last: dict[Any, str] = {}  # this process's latest key, by processes
        self.begin("begin")

    def begin(self, place: str) -> None:
        """Counts steps from here, so that a test cannot read another test's values."""
        self.place = place
        self.steps: dict[Any, Any] = collections.defaultdict(itertools.count)

    def exchange(
        self, value: bytes, processes: Collection[int] | None = None
    ) -> list[bytes]:
        """The values that these processes, by default all, give at the same step."""
        who = tuple(sorted(processes or range(self.count)))
        folder = f"steps/{self.place}/{'-'.join(map(str, who))}"
        folder += f"/{next(self.steps[who])}"
        parts = [value[i : i + CHUNK] for i in range(0, len(value), CHUNK)]
        self._put(f"{folder}/{self.own}", str(len(parts)).encode())
        for i, part in enumerate(parts):
            self._put(f"{folder}/{self.own}/{i}", part)
        found = []
        for process in who:
            parts = int(self._get(f"{folder}/{process}"))
            values = [self._get(f"{folder}/{process}/{i}") for i in range(parts)]
            found.append(b"".join(values))
        # All processes at this step have read the previous one, so its key can go.
        if who in self.last:
            self.client.key_value_delete(self.last[who])
        self.last[who] = f"{folder}/{self.own}"
        return found

    def _put(self, key: str, value: bytes) -> None:
        self.client.key_value_set_bytes(key, value)

    def _get(self, key: str) -> bytes:
        try:
            return self.client.blocking_key_value_get_bytes(key, BARRIER_MS)
        except jax.errors.JaxRuntimeError as error:
            raise Apart(f"no {key} of another process: {error}") from error


def whole(together: Together, array: Any) -> np.ndarray:
    """A whole array, bit for bit, while a gather by XLA may change the bits of NaNs."""
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    data = [np.ascontiguousarray(shard.data) for shard in own]
    bounds = [
        [s.indices(size)[:2] for s, size in zip(shard.index, array.shape, strict=True)]
        for shard in own
    ]
    head = json.dumps([array.shape, str(array.dtype), bounds]).encode()
    message = len(head).to_bytes(8) + head + b"".join(part.tobytes() for part in data)
    result, filled = np.zeros(array.shape, array.dtype), 0
    holders = {device.process_index for device in array.sharding.device_set}
    for found in together.exchange(message, holders):
        at = 8 + int.from_bytes(found[:8])
        shape, dtype, places = json.loads(found[8:at])
        if (tuple(shape), dtype) != (array.shape, str(array.dtype)):
            raise Apart(f"{array.dtype}{array.shape} here, {dtype}{shape} elsewhere")
        for place in places:
            part = result[tuple(slice(*bound) for bound in place)]
            part[...] = np.frombuffer(found, array.dtype, part.size, at).reshape(
                part.shape
            )
            at, filled = at + part.nbytes, filled + part.size
        assert at == len(found)
    assert filled == result.size, f"{filled} of {result.size} elements came"
    result.flags.writeable = False
    return result


def read_whole(together: Together) -> None:
    """Makes np.asarray return the whole of an array that spans several processes."""

    def value(array: Any) -> np.ndarray:
        array._check_if_deleted()
        if array.is_fully_addressable or array.is_fully_replicated:
            return _true_value.fget(array)
        if array._npy_value is None:
            array._npy_value = whole(together, array)
        return array._npy_value

    ArrayImpl._value = property(value)


class Plugin:
    """Keeps the processes' tests together and writes down their outcomes."""

    def __init__(self, together: Together, folder: pathlib.Path, first: int) -> None:
        self.together, self.first = together, first
        self.log = (folder / f"{together.own}.jsonl").open("a", buffering=1)
        self.number: dict[str, int] = {}
        self.outcome, self.message, self.seconds = "passed", "", 0.0

    def write(self, **found: Any) -> None:
        print(json.dumps(found), file=self.log, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Goes on after the test at which an earlier run ended."""
        self.number = {item.nodeid: i for i, item in enumerate(items)}
        assert len(self.number) == len(items)
        self.write(tests=len(items))
        del items[: self.first]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed or (report.skipped and self.outcome == "passed"):
            self.outcome = report.outcome
            self.message = str(report.longrepr)
            if report.skipped and isinstance(report.longrepr, tuple):
                self.message = str(report.longrepr[2]).removeprefix("Skipped: ")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        place = f"{self.number[item.nodeid]}"
        self.outcome, self.message, self.seconds = "passed", "", 0.0
        self.write(begins=self.number[item.nodeid], name=item.nodeid)
        self.together.begin(f"{place}/before")
        self.agree(item.nodeid)
        self.together.begin(place)
        result = yield
        self.together.begin(f"{place}/after")
        outcomes = self.agree(item.nodeid, self.outcome)
        if len(set(outcomes)) != 1:
            words = ", ".join(f"{word} in {i}" for i, word in enumerate(outcomes))
            self.message = f"not the same in all processes: {words}\n{self.message}"
            self.outcome = "failed"
            item.session.testsfailed += 1
        self.write(
            ends=self.number[item.nodeid],
            outcome=self.outcome,
            message=self.message,
            seconds=self.seconds,
        )
        return result

    def agree(self, name: str, word: str = "") -> list[str]:
        """The processes' words if all are at the test `name`; else this process ends.

        A process that has lost the others can neither read their values nor make calls
        with them.
        """
        try:
            found = self.together.exchange(json.dumps([name, word]).encode())
            names, words = zip(*map(json.loads, found), strict=True)
            if set(names) != {name}:
                raise Apart(f"at {name}, others at {names}")
        except Apart as error:
            self.write(apart=str(error))
            sys.stdout.flush()
            os.write(2, f"\nmultiprocess_plugin: {error}\n{self.message}\n".encode())
            os._exit(APART)
        return list(words)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> NoReturn:
        """Process 0 leaves last, and no process waits for another's shutdown."""
        self.write(done=True)
        sys.stdout.flush()
        sys.stderr.flush()
        leave(self.together.own, self.together.count)


def pytest_configure(config: pytest.Config) -> None:
    """Joins the job, before anything starts a backend."""
    port, count, own, devices = os.environ["JAX_EP_TEST_PROCESSES"].split(",")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        multiprocess_worker.start(port, int(count), int(own), devices)
    together = Together(int(own), int(count))
    read_whole(together)
    # All processes draw the same examples, and none retries a failure, as another
    # process may not have failed.
    hypothesis.settings.register_profile(
        "multiprocess",
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        deadline=None,
    )
    hypothesis.settings.load_profile("multiprocess")
    folder = pathlib.Path(os.environ["JAX_EP_TEST_FOLDER"])
    first = int(os.environ.get("JAX_EP_TEST_FIRST", "0"))
    config.pluginmanager.register(Plugin(together, folder, first), "multiprocess_tests")


assert jax_ep  # imported first, as it sets up JAX's CPU pool
