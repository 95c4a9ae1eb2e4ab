"""A process of test_multiprocess_windows.py: fake windows on CPU devices.

Arguments: port of the coordinator, number of processes, this process, scenario. The
last process dies or refuses.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn

import jax_ep

# isort: split
import jax
import numpy as np

from jax_ep._native import ffi
from jax_ep._peers import windows
from jax_ep._peers.rendezvous import Rendezvous
from support import fake_windows, helpers
from support.worker_process import bound_life

DEVICES = 2
TIMEOUT_S = 6.0
TRUE_GATHER = Rendezvous.gather
TRUE: list[tuple[Any, str, Any]] = []  # what `start` has replaced by fakes


def start(port: str, processes: int, process: int) -> fake_windows.Native:
    bound_life()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    native = fake_windows.Native(
        process,
        take_invalid_ids=ffi.native.take_invalid_ids,
        take_mixed_calls=ffi.native.take_mixed_calls,
        pool_threads=ffi.native.pool_threads,
        open_group=ffi.native.open_group,
        wait_failures=lambda key: [],
    )
    fakes = (
        (ffi, "native_for", lambda _: native),
        (windows, "platform_of", lambda _: "gpu"),
    )
    for place, name, fake in fakes:
        TRUE.append((place, name, getattr(place, name)))
        setattr(place, name, fake)
    return native


def without_fakes() -> None:
    """Undoes the fakes, so that inits use this process's devices again."""
    for place, name, true in TRUE:
        setattr(place, name, true)


def client() -> Any:
    from jax._src import distributed  # there is no public barrier with a time limit

    return distributed.global_state.client


def barrier(name: str, processes: list[int] | None = None) -> None:
    """Waits for all processes, or for these."""
    client().wait_at_barrier(name, 300_000, processes)


def leave(process: int, living: int) -> NoReturn:
    """Exits without jax.distributed's shutdown, which would wait for dead processes.

    Process 0 exits last, as its exit would end all others.
    """
    client().key_value_set(f"leaves/{process}", "")
    if process == 0:
        for other in range(living):
            client().blocking_key_value_get(f"leaves/{other}", 300_000)
        time.sleep(1)
    os._exit(0)


def choices(native: fake_windows.Native) -> dict:
    """Inits in all processes, of which one may lack something; they close in turn."""
    size, last = jax.device_count(), jax.process_count() - 1
    whole = helpers.make_mesh(size)
    crossed = helpers.make_mesh(size, order=[*range(0, size, 2), *range(1, size, 2)])
    config = helpers.make_config(timeout_s=30.0)
    found: dict = {"transports": [], "marks": [], "refused": []}
    for mesh in (whole, crossed, whole):
        ep = jax_ep.init(mesh, "ep", config)
        found["transports"].append(ep.transport)
        barrier(f"mapped{len(found['marks'])}")
        marks = [native.marks(ordinal) for ordinal in sorted(native.own)]
        found["marks"].append([[rank > 0 for rank in m[:size]] for m in marks])
        found.setdefault("ranks", []).append(ep.my_rank.tolist())
        # One after the other: a process that is still open stores into what it mapped.
        order = list(range(last + 1))
        for process in order if len(found["marks"]) % 2 else reversed(order):
            if process == jax.process_index():
                ep.close()
                assert not native.own
            for memory in native.mapped.values():
                memory[-1] = 1
            barrier(f"closed{len(found['marks'])} {process}")
    if native.process == last:
        native.obstacle = ("GPUs of compute capability 9.0 or newer", "8.0")
    with jax_ep.init(whole, "ep", config) as ep:
        found["transports"].append(ep.transport)
        inputs = helpers.make_inputs(np.random.default_rng(1), config, size)
        helpers.assert_dispatched(
            config, helpers.run_dispatch(ep, whole, inputs), inputs
        )
    found["refused"].append(refusal(whole, config))
    native.obstacle = None
    if native.process == last:
        native.no_map = "CUDA_ERROR_INVALID_DEVICE"
    found["transports"].append(jax_ep.init(whole, "ep", config).transport)
    found["refused"].append(refusal(whole, config))
    native.no_map = None
    found["over hosts"] = over_hosts(native, whole, config)
    found["failed, key"] = key_after_a_failure(whole)
    # A mesh of some of the processes; only these take part.
    first = [d for d in jax.devices() if d.process_index != last]
    if native.process != last:
        mesh = jax.sharding.Mesh(np.array(first), ("ep",))
        fewer = helpers.make_config(num_experts=4 * len(first), timeout_s=30.0)
        found["part"] = jax_ep.init(mesh, "ep", fewer).transport
    if native.process == last:
        config = helpers.make_config(top_k=1, timeout_s=30.0)
    try:
        jax_ep.init(whole, "ep", config)
    except ValueError as error:
        found["differ"] = str(error)
    return found


def key_after_a_failure(mesh) -> list[int | str]:
    """Two inits; the first fails in one process after the others have gone on."""
    config = helpers.make_config(top_k=3, timeout_s=TIMEOUT_S)
    late = jax.process_index() == jax.process_count() - 1
    found = []

    def gather(self, step, value):
        answers = TRUE_GATHER(self, step, value)
        if late and step == "reach" and not found:
            raise RuntimeError("interrupted")
        return answers

    Rendezvous.gather = gather
    for _ in range(2):
        try:
            with jax_ep.init(mesh, "ep", config, transport="p2p") as ep:
                found.append(ep.key)
        except RuntimeError as error:
            found.append(str(error))
    Rendezvous.gather = TRUE_GATHER
    return found


def over_hosts(native: fake_windows.Native, mesh, config) -> list:
    """As if each process had its own host: all in one clique, then all but the last."""
    true_host, own = windows.host, native.process
    windows.host = lambda: [f"boot{own}", f"node{own}"]
    found, before = [], len(native.taken_by)
    native.fabric = "rack.1"
    with jax_ep.init(mesh, "ep", config) as ep:
        found.append(ep.transport)
        found.append(all(by is bytes for _, by in native.taken_by[before:]))
        found.append(len(native.taken_by) - before)
    if own == jax.process_count() - 1:
        native.fabric = "rack.2"
    found.append(jax_ep.init(mesh, "ep", config).transport)
    found.append(refusal(mesh, config))
    windows.host = true_host
    return found


def refusal(mesh, config) -> str:
    try:
        jax_ep.init(mesh, "ep", config, transport="p2p")
    except ValueError as error:
        return str(error)
    return "nothing was raised"


# When processes are killed, one after the other from the last: before an init, at one
# of its steps, or after it.
DEATHS = ("before", "devices", "reach", "windows", "mapped", "after")
SURVIVORS = 2


def dies(native: fake_windows.Native) -> list[dict]:
    """Inits of the living processes; in each, the last of them is killed."""
    found = []
    for turn, when in enumerate(DEATHS):
        living = list(range(jax.process_count() - turn))
        barrier(f"begin {when}", living)
        found.append(one_dies(native, living, when))
    return found


def one_dies(native: fake_windows.Native, living: list[int], when: str) -> dict:
    """The last of the processes is killed before, at a step of, or after its init."""
    dying = native.process == living[-1]
    devices = [d for d in jax.devices() if d.process_index in living]
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    config = helpers.make_config(num_experts=4 * len(devices), timeout_s=TIMEOUT_S)

    def gather(self, step, value):
        if dying and step == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return TRUE_GATHER(self, step, value)

    Rendezvous.gather = gather
    if dying and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        ep = jax_ep.init(mesh, "ep", config, transport="p2p")
        found = {"error": None}
    except RuntimeError as error:
        found = {"error": str(error), "open": len(native.own)}
    found["seconds"] = time.monotonic() - begin
    if when == "after":
        if dying:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        # A dead process's window still exists for processes that map it.
        for memory in native.mapped.values():
            memory[-1] = 1
        ep.close()
        found["open"] = len(native.own)
    return found


if __name__ == "__main__":
    port, processes, process, scenario = sys.argv[1:]
    native = start(port, int(processes), int(process))
    run = {"choices": choices, "dies": dies}[scenario]
    try:
        print("result: " + json.dumps(run(native)), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    leave(int(process), SURVIVORS if scenario == "dies" else int(processes))
