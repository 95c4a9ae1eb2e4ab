"""One process of test_leaks.py: many cycles; the last line is JSON.

PYTHONPATH=tests python tests/workers/leaks_worker.py WHAT [CYCLES]

WHAT is calls, programs, groups or handles.
"""

from __future__ import annotations

import json
import sys

from support import gpus, helpers  # first: it makes benchmarks/ importable

# isort: split
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.soak import memory as host_memory
from jax_ep._core import handle as _handle
from jax_ep._setup import init

jax.config.update("jax_num_cpu_devices", 2)
CYCLES = {
    "calls": 3000,
    # On GPUs, losing a granule of 2 MB per cycle would show.
    "programs": 60,
    # With p2p, groups open windows.
    "groups": 20000 if helpers.TRANSPORT == "collective" else 1000,
    # Each compiles its ep_init, which takes long, above all for GPUs. What a cycle
    # keeps hardly depends on their number.
    "handles": 300 if helpers.TRANSPORT == "collective" else 150,
}


def free_of(mesh) -> int:
    """Free memory of all GPUs of the mesh."""
    devices = [d for d in mesh.devices.flat if d.platform == "gpu"]
    return sum(gpus.free_bytes(d.local_hardware_id) for d in devices)


def main(what: str, cycles: int | None = None) -> dict:
    cycles = cycles or CYCLES[what]
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.init(mesh)
    inputs = helpers.make_inputs(np.random.default_rng(0), ep.config, mesh.size)
    operands = [helpers.put(mesh, part) for part in vars(inputs).values()]
    run = helpers.dispatch_fn(ep, mesh, P("ep"))

    def handle():
        helpers.init(mesh).close()

    def call():
        jax.block_until_ready(run(*operands))

    def program():
        new = helpers.dispatch_fn.__wrapped__(ep, mesh, P("ep"))
        jax.block_until_ready(new(*operands))

    if what == "groups":
        # All of a handle except its ep_init program, of which JAX keeps something.
        made = ep.dev_ptrs, ep.my_rank
        init._run_init = lambda *args: made
    cycle = {"calls": call, "programs": program}.get(what, handle)
    for _ in range(cycles // 5):
        cycle()
    samples, free = [], free_of(mesh)
    for index in range(cycles):
        cycle()
        if index % (cycles // 10) == cycles // 10 - 1:
            samples.append(host_memory.in_use() or host_memory.resident())
    return {
        "cycles": cycles,
        # Without the first tenth, as allocators keep memory that they once had.
        "bytes_a_cycle": (samples[-1] - samples[0]) / (cycles * 0.9),
        "samples": samples,
        "device_lost": free - free_of(mesh),
        "handles_left": len(_handle._handles),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
