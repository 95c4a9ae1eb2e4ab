"""A process of test_processes_gpu.py: one scenario of transport p2p over processes.

Arguments: port of the coordinator, number of processes, this process, devices of each
as in multiprocess_worker.py, scenario. The last line is its result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import signal
import sys
import time
import traceback

import jax_ep

# isort: split
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from support import compare_transports, gpus, helpers
from workers import multiprocess_worker
from workers.windows_worker import barrier, leave

TIMEOUT_S = 4.0
INSIDE_S = 0.5  # after which the others' calls wait
LONG = {"max_tokens_per_rank": 1024, "hidden_size": 256, "top_k": 8, "num_experts": 64}
# Windows of more than 64 MB, though calls are short.
WIDE = {"max_tokens_per_rank": 8192, "hidden_size": 1024, "recv_capacity": 1024}
# Configs and the calls' tokens.
BITS = (
    ({}, (8, 3)),
    (LONG, (1024, 7)),
    (LONG | {"recv_capacity": 777, "expert_alignment": 8}, (513,)),
    ({"dispatch_format": "fp8_block128", "hidden_size": 256}, (8, 1)),
    ({"combine_format": "fp8_block128", "hidden_size": 256}, (5,)),
)


def positions(mesh: Mesh) -> dict[jax.Device, int]:
    return {device: place for place, device in enumerate(mesh.devices.flat)}


def bits(mesh: Mesh) -> dict[str, str]:
    """Digests of all results of all calls, for each position of this process."""
    digests = {str(positions(mesh)[d]): hashlib.sha256() for d in mesh.local_devices}
    for changes, counts in BITS:
        config = helpers.make_config(**changes)
        with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as ep:
            run = compare_transports.mapped(
                mesh, functools.partial(compare_transports.everything, ep)
            )
            for n in counts:
                found = run(compare_transports.make_operands(mesh, ep, n, n))["exact"]
                for name, leaf in jax.tree.leaves_with_path(found):
                    for shard in leaf.addressable_shards:
                        digest = digests[str(positions(mesh)[shard.device])]
                        digest.update(jax.tree_util.keystr(name).encode())
                        digest.update(np.asarray(shard.data).tobytes())
            ep.check()
    return {position: digest.hexdigest() for position, digest in digests.items()}


class Calls:
    """A handle with a short time limit, and calls that are known to be right."""

    def __init__(
        self, mesh: Mesh, seed: int, transport: str = helpers.TRANSPORT
    ) -> None:
        self.mesh = mesh
        config = helpers.make_config(timeout_s=TIMEOUT_S, **WIDE)
        # Has time for what is slow in a first call.
        patient = helpers.make_config(timeout_s=60.0, **WIDE)
        self.inputs = helpers.make_inputs(
            np.random.default_rng(seed), config, mesh.size, n=64, fill=helpers.normal
        )
        self.args = [helpers.put(mesh, part) for part in vars(self.inputs).values()]
        with jax_ep.init(mesh, "ep", patient, transport=transport) as ep:
            self.right(ep)
        self.ep = jax_ep.init(mesh, "ep", config, transport=transport)
        self.run = self.compiled(self.ep)

    def compiled(self, ep):
        program = compare_transports.mapped(
            self.mesh, functools.partial(jax_ep.dispatch, ep)
        )
        return program.lower(*self.args).compile()

    def right(self, ep, run=None):
        run = run or self.compiled(ep)
        together(self.mesh)
        found = jax.block_until_ready(run(*self.args))
        ep.check()
        helpers.assert_dispatched(ep.config, found, self.inputs)


_rounds: dict[tuple[int, ...], int] = {}


def together(mesh: Mesh) -> None:
    """A barrier of the mesh's processes."""
    processes = tuple(sorted({d.process_index for d in mesh.devices.flat}))
    _rounds[processes] = _rounds.get(processes, 0) + 1
    barrier(f"together {processes} {_rounds[processes]}", list(processes))


def failure(calls: Calls) -> dict:
    """Makes one more call, which should fail; returns its error and when it came."""
    begin = time.monotonic()
    try:
        jax.block_until_ready(calls.run(*calls.args))
        calls.ep.check()
        error = "nothing was raised"
    except jax.errors.JaxRuntimeError as found:
        error = str(found)
    return {"error": error, "seconds": time.monotonic() - begin}


def close(mesh: Mesh) -> dict:
    """Processes close one after the other, while the others still call and store."""
    own, last = jax.process_index(), jax.process_count()
    (device,) = mesh.local_devices
    beside = Calls(mesh, 7)
    found: dict = {"failures": [], "closed": [], "lost": []}
    for turn, order in enumerate((range(last), reversed(range(last)))):
        before = gpus.free_bytes(device.local_hardware_id)
        calls = Calls(mesh, turn)
        calls.right(calls.ep, calls.run)
        first, *others = order
        together(mesh)
        if own == first:
            calls.ep.close()
        together(mesh)
        # The windows of the first still exist for the others, which wait in vain.
        found["failures" if own != first else "closed"].append(failure(calls))
        together(mesh)
        for process in others:
            if own == process:
                calls.ep.close()
            together(mesh)
        beside.right(beside.ep, beside.run)
        found["lost"].append(before - gpus.free_bytes(device.local_hardware_id))
    beside.ep.close()
    return found


def kill(mesh: Mesh) -> dict:
    """The last process is killed while its own and the others' calls are in flight."""
    own, dead = jax.process_index(), jax.process_count() - 1
    calls, beside = Calls(mesh, 1), Calls(mesh, 2)
    calls.right(calls.ep, calls.run)
    beside.right(beside.ep, beside.run)
    together(mesh)
    if own == dead:
        for _ in range(50):
            calls.run(*calls.args)
        os.kill(os.getpid(), signal.SIGKILL)
    begin, error, returned = time.monotonic(), "", None
    while not error and time.monotonic() - begin < 60:
        try:
            returned = [calls.run(*calls.args) for _ in range(100)]
            jax.block_until_ready(returned)
            calls.ep.check()
        except jax.errors.JaxRuntimeError as found:
            error = str(found)
    result = {"error": error, "seconds": time.monotonic() - begin}
    # A handle that was idle when its peer died fails the same way.
    result["idle"] = failure(beside)
    calls.ep.close()
    beside.ep.close()
    left = [d for d in mesh.devices.flat if d.process_index != dead]
    smaller = Mesh(np.array(left), ("ep",), axis_types=(AxisType.Auto,))
    if 24 % len(left) == 0:
        # With p2p, as NVSHMEM serves no smaller mesh.
        again = Calls(smaller, 3, "p2p")
        again.right(again.ep, again.run)
        again.ep.close()
    return result


def fails(mesh: Mesh) -> dict:
    """The last process raises before its call and closes; the others wait in theirs."""
    last = jax.process_index() == jax.process_count() - 1
    calls, beside = Calls(mesh, 1), Calls(mesh, 2)
    calls.right(calls.ep, calls.run)
    together(mesh)
    found: dict = {}
    if last:
        try:
            with calls.ep:
                time.sleep(INSIDE_S)
                raise ArithmeticError("before the call")
        except ArithmeticError as error:
            found["raised"] = str(error)
    else:
        found["failure"] = failure(calls)
    together(mesh)
    beside.right(beside.ep, beside.run)
    calls.ep.close()
    # All processes, with the one that raised.
    again = Calls(mesh, 3)
    again.right(again.ep, again.run)
    again.ep.close()
    beside.ep.close()
    return found


def named(error: str) -> list[int]:
    """The [waiting, awaited] ranks that a time-out's text names."""
    found = re.search(r"rank (\d+) waited for rank (\d+)", error)
    return [int(rank) for rank in found.groups()] if found else []


if __name__ == "__main__":
    port, processes, process, devices, scenario = sys.argv[1:]
    multiprocess_worker.start(port, int(processes), int(process), devices)
    run = {"bits": bits, "close": close, "kill": kill, "fails": fails}[scenario]
    try:
        found = run(helpers.make_mesh(jax.device_count()))
        print("result: " + json.dumps(found), flush=True)
    except BaseException:
        traceback.print_exc()
        # Exits at once: jax.distributed would wait for the others, which wait for this.
        os._exit(1)
    leave(int(process), int(processes) - (scenario == "kill"))
