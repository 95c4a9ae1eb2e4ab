"""A process of test_shared_handles.py: requests shared handles in its own order.

Arguments: port of the coordinator, number of processes, this process, the transport:
"collective", or "p2p" with fake windows.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

import jax_ep

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._peers.request_log import RequestLog
from jax_ep._setup import init, shared
from support import helpers
from workers import windows_worker

SHORT_S, LONG_S = 2.0, 60.0


class Steps:
    """The steps of this process, and the keys that it got."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.mesh = helpers.make_mesh(jax.device_count())
        self.process, self.last = jax.process_index(), jax.process_count() - 1
        self.found: dict[str, Any] = {}

    def shared(self, tokens: int, timeout_s: float = LONG_S) -> Any:
        config = helpers.make_config(max_tokens_per_rank=tokens, timeout_s=timeout_s)
        return jax_ep.shared_handle(self.mesh, "ep", config, self.transport)

    def barrier(self, name: str) -> None:
        windows_worker.barrier(name)

    def settle(self) -> None:
        """Waits for the thread to know of a failure that another process reports."""
        end = time.monotonic() + LONG_S
        while not all(future.done() for future in [*shared._groups.values()]):
            assert time.monotonic() < end
            time.sleep(0.01)

    def refusal(self, tokens: int, timeout_s: float = LONG_S) -> str:
        try:
            self.shared(tokens, timeout_s)
        except (RuntimeError, OSError) as error:
            return str(error)
        return "none"

    def before_all_have_come(self) -> None:
        """The last process has not requested a handle: the others wait and time out."""
        if self.process != self.last:
            self.found["alone"] = self.refusal(8, SHORT_S)
        self.barrier("alone")
        self.found["then"] = self.shared(8, LONG_S).key

    def orders(self) -> None:
        sizes = np.roll([1, 2, 3], self.process).tolist()
        keys = {tokens: self.shared(tokens).key for tokens in sizes}
        self.found["orders"] = [keys[tokens] for tokens in (1, 2, 3)]
        assert all(self.shared(tokens).key == keys[tokens] for tokens in sizes)

    def one_alone(self) -> None:
        """One process's trace requests a handle while the others wait at a barrier."""
        if self.process == 1:

            def traced(x: Any) -> Any:
                return x * (self.shared(4).recv_capacity > 0)

            start = time.monotonic()
            jax.eval_shape(traced, jnp.zeros(3))
            self.found["seconds"] = time.monotonic() - start
        self.barrier("one alone")
        self.found["one alone"] = self.shared(4).key

    def threads_at_once(self) -> None:
        keys: list[int] = []
        threads = [
            threading.Thread(target=lambda: keys.append(self.shared(5).key))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (self.found["threads"],) = set(keys)

    def failure_of_one(self) -> None:
        """The process that asks hears of another's failure; the next call succeeds."""
        true = init.open_group
        if self.process == self.last:

            def failing(*args: Any) -> Any:
                raise OSError("no such luck")

            init.open_group = failing
        self.barrier("about to fail")
        if self.process == 0:
            self.found["failure"] = self.refusal(6)
        self.barrier("failed")
        self.settle()
        init.open_group = true
        self.barrier("mended")
        self.found["after failure"] = self.shared(6).key

    def failure_of_all(self) -> None:
        """A failure is the answer to every call that waits for it, in all processes."""
        true = init.open_group

        def failing(*args: Any) -> Any:
            init.open_group = true
            time.sleep(5.0)  # until all have asked, also on a busy machine
            raise OSError("no such luck")

        if self.process == self.last:
            init.open_group = failing
        self.barrier("about to fail together")
        if self.process:
            time.sleep(1.2)  # its thread has read the request of process 0
        assert "no such luck" in self.refusal(9)
        self.barrier("failed together")
        self.found["after failure of all"] = self.shared(9).key

    def failure_alone(self) -> None:
        """A process that fails when the group is open gets it with its next call."""
        true = init._run_init

        def failing(*args: Any) -> Any:
            raise RuntimeError("no room for ep_init")

        if self.process == self.last:
            init._run_init = failing
            assert self.refusal(10) == "no room for ep_init"
            init._run_init = true
        self.found["after failure alone"] = self.shared(10).key

    def lost_by_one(self) -> None:
        """A process without the group that the others have is told so at once."""
        ep = self.shared(11)
        self.barrier("all have it")
        if self.process == 1:
            groups = {f.result().key: which for which, f in shared._groups.items()}
            which = groups[ep.key]
            ep.close()
            for key in [key for key, found in shared._handles.items() if found is ep]:
                del shared._handles[key]
            shared._finished.remove(which)
            del shared._groups[which]
            shared._failures[which] += 1
            start = time.monotonic()
            assert "call jax_ep.close_shared_handles()" in self.refusal(11)
            assert time.monotonic() - start < LONG_S / 2
        self.barrier("one has lost it")
        jax_ep.close_shared_handles()
        self.found["after a loss"] = self.shared(11).key

    def garbage(self) -> None:
        """Requests that cannot be read, as of another version, are left out."""
        if self.process == 0:
            log = RequestLog(windows_worker.client())
            request = {"processes": [0, 1, 2], "config": {"timeout_s": "soon"}}
            for entry in ({}, {"request": 3}, {"request": request, "which": [None]}):
                log.append(entry)
        self.found["after garbage"] = self.shared(12).key

    def closing(self) -> None:
        """Closes handles, also one of a single process, while some of them are late."""
        if self.process == 0:
            self.shared(7)
        before = self.shared(1).key
        found = []
        for turn in range(3):
            if self.process == turn % (self.last + 1):
                time.sleep(0.3)
            jax_ep.close_shared_handles()
            found += [self.shared(tokens).key for tokens in (7, 1)]
            ep = self.shared(1)
            ep.close()
            found.append(self.shared(1).key)
        assert len({before, *found}) == 10
        self.found["closing"] = found

    def results(self) -> None:
        config = helpers.make_config(timeout_s=LONG_S)
        ep = jax_ep.shared_handle(self.mesh, "ep", config, self.transport)
        inputs = helpers.make_inputs(np.random.default_rng(1), config, self.mesh.size)
        helpers.assert_dispatched(
            config, helpers.run_dispatch(ep, self.mesh, inputs), inputs
        )


def main() -> None:
    port, processes, process, transport = sys.argv[1:]
    native = windows_worker.start(port, int(processes), int(process))
    steps = Steps(transport)
    if transport == "collective":
        windows_worker.without_fakes()
    steps.before_all_have_come()
    steps.orders()
    steps.one_alone()
    steps.threads_at_once()
    steps.failure_of_one()
    steps.failure_of_all()
    steps.failure_alone()
    steps.lost_by_one()
    steps.garbage()
    steps.closing()
    if transport == "collective":
        steps.results()
    jax_ep.close_shared_handles()
    steps.found["open"] = len(native.own) + len(native.mapped)
    print("result: " + json.dumps(steps.found), flush=True)
    steps.barrier("end")


if __name__ == "__main__":
    main()
