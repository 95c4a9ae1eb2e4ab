"""A process of nodes.py: makes handles and programs, and times them when told to.

    python -m benchmarks.calls.nodes_process SPECIFICATION

Commands arrive as lines of JSON; answers are lines that begin with "answer ". All
processes of a job get the same commands. A run begins at a given time on the host's
clock, which all processes share, so that none waits for another to start.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import processes
from jax_ep._cli.bench import loops, transports
from jax_ep._cli.bench.process import ep_mesh
from jax_ep._peers import topology

TIMEOUT_S = 60.0
# Guesses that programs are sized by: microseconds per token, and for an empty call.
_TOKEN_US = 0.15
_EMPTY_US = {"p2p": 10, "shmem": 25, "collective": 120}


class Process:
    """What is open in this process: a case with its reference, and one way."""

    def __init__(self, spec):
        self.spec, self.mesh = spec, ep_mesh()
        self.bundled = topology.bundled
        self.reference = self.transport = None
        self.programs = {}

    def case(self, tokens):
        """Makes a case and the collective transport's results for it."""
        made = transports.make_case(self.mesh, self.spec, tokens, "uniform", False)
        self.reference = transports.Transport(made, "collective")
        self.reference.call_all()
        dropped = sum(int(jnp.sum(d.num_dropped)) for d in self.reference.dispatched)
        return {"dropped": dropped, "ranks": self.mesh.size, **made.facts}

    def open(self, transport, node, bundles):
        """Opens a way, compares it with the reference and compiles its programs."""
        topology.bundled = self.bundled if bundles else lambda *args: (0, 0)
        case = self.reference.case
        # NVSHMEM may take half of this time to start.
        config = dataclasses.replace(
            case.config, ranks_per_node=node, timeout_s=TIMEOUT_S
        )
        case = dataclasses.replace(case, config=config)
        self.transport = transports.Transport(case, transport)
        self.transport.call_all()
        tokens = case.facts["tokens"]
        guess = _EMPTY_US[transport] + tokens * _TOKEN_US
        sizes = loops.sizes(self.spec, transports.unrolled(tokens), guess)
        self.programs, self.wanted = {}, {}
        for op in case.wires:
            # One by one: all processes must compile the programs in the same order.
            operation = self.transport.operation(op)
            compiling = loops.compiling(self.mesh, operation, *sizes)
            self.programs[op] = compiling()
            sums = [processes.local(each) for each in self.reference.last(op)]
            self.wanted[op] = loops.expected_checksum(self.programs[op], sums)
            jax.block_until_ready(self.programs[op].run())
        return {
            "differences": self.transport.differences(self.reference),
            "calls": {op: program.calls for op, program in self.programs.items()},
        }

    def time(self, op, at):
        """Returns the seconds from `at` to a program's end, and whether it was right.

        `late` in the answer says that `at` had passed before the program could start.
        """
        late = time.monotonic() - at
        while time.monotonic() < at:
            pass
        checksum = jax.block_until_ready(self.programs[op].run())
        seconds = time.monotonic() - at
        right = bool(np.array_equal(processes.local(checksum), self.wanted[op]))
        return {"seconds": seconds, "right": right, "late": late > 0}

    def close(self):
        """Compares the way's results once more and closes it."""
        for op in self.programs:
            self.transport.run(op)
        differences = self.transport.differences(self.reference)
        self.transport.ep.check()
        self.transport.ep.close()
        self.transport, self.programs = None, {}
        return {"differences": differences}

    def forget(self):
        """Closes the case."""
        self.reference.ep.close()
        self.reference = None


def main():
    spec = json.loads(sys.argv[1])
    job = (spec[name] for name in ("port", "processes", "process", "platform"))
    processes.join(*job, spec["devices"])
    process = Process(spec)
    device = jax.local_devices()[0].device_kind
    print("answer", json.dumps({"device": device, "jax": jax.__version__}), flush=True)
    try:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            answer = getattr(process, name)(*arguments)
            print("answer", json.dumps(answer), flush=True)
    except BaseException as error:
        traceback.print_exc()
        print("answer", json.dumps({"error": repr(error)}), flush=True)
    # Ends at once: jax.distributed would wait for the others.
    os._exit(0)


if __name__ == "__main__":
    main()
