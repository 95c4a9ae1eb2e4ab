"""A process of test_shmem_gpu.py: calls of transport shmem over forced nodes.

Arguments: port of the coordinator, number of processes, this process, devices of each
as in multiprocess_worker.py, scenario, ranks per node and, to not bundle dispatches,
"direct". The last line is its result.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax_ep

# isort: split
import jax
from jax.sharding import Mesh

from jax_ep._peers import topology
from jax_ep._setup import init
from support import compare_transports, helpers, options, p2p_calls
from workers import multiprocess_worker
from workers.windows_worker import barrier, leave

TIMEOUT_S = 4.0
CODED = {
    "hidden_size": 1024,
    "dispatch_format": "mxfp8",
    "scale_layout": "tiled_128x4",
    "combine_format": "fp8_block128",
    "grad_format": "fp8_block128",
}
# Configs and the calls' tokens. Short calls alternate between two regions.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "short": ({"hidden_size": 64, "max_tokens_per_rank": 64}, (0, 1, 9, 64)),
    "long": (
        {
            "hidden_size": 2048,
            "num_experts": 64,
            "top_k": 8,
            "max_tokens_per_rank": 1500,
        },
        (1500, 513),
    ),
    "cut": (
        {"hidden_size": 64, "max_tokens_per_rank": 600, "recv_capacity": 700},
        (600, 3),
    ),
    "coded": ({"max_tokens_per_rank": 600} | CODED, (600, 17)),
}


class Pair:
    """Two handles of one config, one of which has its ranks on several nodes."""

    def __init__(self, mesh: Mesh, node: int, changes: dict[str, Any]) -> None:
        changes = helpers.HALVES | changes
        config = helpers.make_config(**changes, ranks_per_node=node)
        self.mesh = mesh
        self.internode = jax_ep.init(mesh, "ep", config, transport="shmem")
        self.plain = jax_ep.init(mesh, "ep", config, transport="collective")
        self.programs: dict[Any, list[Any]] = {}

    def compare(self, body: Callable[..., Any], sets: Any, times: int = 3) -> None:
        """Compares each set several times, without waiting between calls."""
        if body not in self.programs:
            self.programs[body] = [
                compare_transports.mapped(self.mesh, functools.partial(body, ep))
                for ep in (self.internode, self.plain)
            ]
        internode, plain = self.programs[body]
        wanted = [plain(o) for o in sets]
        found = [internode(o) for _ in range(times) for o in sets]
        for i, result in enumerate(found):
            actual, other = (
                r["exact"] if isinstance(r, dict) else r
                for r in (result, wanted[i % len(wanted)])
            )
            compare_transports.assert_same(actual, other, f"{body} {i}")
        self.internode.check()

    def close(self) -> None:
        self.internode.close()
        self.plain.close()


def calls(mesh: Mesh, node: int) -> str:
    """Whole calls with both backward passes, and calls in halves."""
    for name, (changes, counts) in CASES.items():
        pair = Pair(mesh, node, changes)
        for routing in ("random", ("none", "full", "duplicates", "one:3")):
            sets = [
                compare_transports.make_operands(mesh, pair.plain, n, n, routing)
                for n in counts
            ]
            pair.compare(compare_transports.everything, sets)
            pair.compare(p2p_calls.halves, sets)
        pair.close()
        print(name, "is right", flush=True)
    return "right"


def modes(mesh: Mesh, node: int) -> str:
    """Every option, whole and in halves."""
    for name, changes in options.MODES.items():
        if changes.get("skip_a2a"):
            continue
        sizes = {"max_tokens_per_rank": 600, "hidden_size": 64}
        pair = Pair(mesh, node, sizes | changes)
        sets = [
            compare_transports.make_operands(mesh, pair.plain, n, n) for n in (7, 600)
        ]
        for how in (options.WHOLE, options.SPLIT):
            pair.compare(lambda ep, o, how=how: p2p_calls.results(ep, how, o), sets)
        pair.close()
        print(name, "is right", flush=True)
    return "right"


def dropped(ep: Any, o: Any) -> Any:
    """A dispatch in halves that is never waited for, then some that are."""
    pending = jax_ep.dispatch_async(ep, o.dy, o.ids, o.weights)
    dy, _ = jax.lax.optimization_barrier((o.dy, pending.held))
    return p2p_calls.halves(ep, dataclasses.replace(o, dy=dy))


def pendings(mesh: Mesh, node: int) -> str:
    """Several calls in flight, and some never waited for; also where epochs wrap."""
    for first in (None, 2**64 - 3):
        init._FIRST_EPOCH = first
        for tokens in (64, 600):
            changes = {"max_tokens_per_rank": tokens, "hidden_size": 64, "top_k": 4}
            pair = Pair(mesh, node, changes)
            sets = [
                compare_transports.make_operands(mesh, pair.plain, i, tokens)
                for i in range(3)
            ]
            pair.compare(p2p_calls.pipelined, sets, 10)
            pair.compare(dropped, sets, 5)
            pair.compare(p2p_calls.pipelined, sets)
            pair.close()
            print(first, tokens, "is right", flush=True)
    return "right"


def silent(mesh: Mesh, node: int) -> dict[str, Any]:
    """The last process makes no second call; the others' second call ends in time."""
    changes = {"max_tokens_per_rank": 64, "hidden_size": 64}
    patient = Pair(mesh, node, changes)
    changes |= helpers.HALVES
    ep = jax_ep.init(
        mesh,
        "ep",
        helpers.make_config(**changes, ranks_per_node=node, timeout_s=TIMEOUT_S),
        transport="shmem",
    )
    o = compare_transports.make_operands(mesh, patient.plain, 1, 64)
    patient.compare(p2p_calls.whole, [o])
    run = compare_transports.mapped(mesh, functools.partial(p2p_calls.whole, ep))
    program = run.lower(o).compile()
    barrier("compiled")
    jax.block_until_ready(program(o))
    result: dict[str, Any] = {"error": "", "seconds": 0.0}
    barrier("called")
    if jax.process_index() != jax.process_count() - 1:
        begin = time.monotonic()
        try:
            jax.block_until_ready(program(o))
            ep.check()
        except jax.errors.JaxRuntimeError as error:
            result = {"error": str(error), "seconds": time.monotonic() - begin}
    barrier("failed")
    # The other handle of these ranks still works.
    patient.compare(p2p_calls.whole, [o])
    ep.close()
    patient.close()
    again = Pair(mesh, node, changes)
    again.compare(p2p_calls.whole, [o])
    again.close()
    return result


if __name__ == "__main__":
    port, processes, process, devices, scenario, node, *how = sys.argv[1:]
    if how == ["direct"]:
        topology.bundled = lambda *args: (0, 0)
    multiprocess_worker.start(port, int(processes), int(process), devices)
    run = {"calls": calls, "modes": modes, "pendings": pendings, "silent": silent}
    try:
        found = run[scenario](helpers.make_mesh(jax.device_count()), int(node))
        print("result: " + json.dumps(found), flush=True)
    except BaseException:
        traceback.print_exc()
        # Exits at once: jax.distributed would wait for the others, which wait for this.
        os._exit(1)
    leave(int(process), int(processes))
