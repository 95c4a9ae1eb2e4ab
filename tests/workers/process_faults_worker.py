"""A process of test_process_faults.py: the last one is late, differs or closes.

Arguments: port of the coordinator, number of processes, this process, devices of each
as in multiprocess_worker.py, ranks per node or 0 for those of the host. The last line
has the outcome of each scenario. Each scenario spoils a new handle.
"""

from __future__ import annotations

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
import numpy as np
from jax.sharding import Mesh

from support import compare_transports, faults, helpers
from workers import multiprocess_worker
from workers.processes_worker import together
from workers.windows_worker import leave

TIMEOUT_S = 3.0
# The time between a late rank's call and the end of the others' time limit; processes
# may share a GPU.
MARGIN_S = 1.0
INSIDE_S = 0.5  # after which the others' calls wait
FIELDS = {"max_tokens_per_rank": 64, "hidden_size": 64}
N = 64

Call = Callable[[], Any]


class Job:
    """A handle that works throughout, and whether this process is the faulty one."""

    def __init__(self, mesh: Mesh, node: int) -> None:
        self.mesh, self.node = mesh, node
        self.last = jax.process_index() == jax.process_count() - 1
        # Its first calls take the extra time that a process's first calls need.
        self.beside = Scene(self, timeout_s=60.0)

    def init(self, **changes: Any) -> Any:
        fields = FIELDS | {"timeout_s": TIMEOUT_S} | changes
        if self.node:
            fields["ranks_per_node"] = self.node
        config = helpers.make_config(**fields)
        return jax_ep.init(self.mesh, "ep", config, transport=helpers.TRANSPORT)


class Scene:
    """A handle, operands and a dispatch that was right."""

    def __init__(self, job: Job, **changes: Any) -> None:
        self.job, self.ep = job, job.init(**changes)
        made = helpers.make_inputs(
            np.random.default_rng(1),
            self.ep.config,
            job.mesh.size,
            n=N,
            fill=helpers.normal,
        )
        self.inputs = made
        self.args = [helpers.put(job.mesh, part) for part in vars(made).values()]
        self.dispatch = self.compiled(faults.dispatch, *self.args)
        together(job.mesh)
        self.first = self.right()

    def compiled(self, body: Callable[..., Any], *args: Any) -> Call:
        program = compare_transports.mapped(
            self.job.mesh, functools.partial(body, self.ep)
        )
        return functools.partial(program.lower(*args).compile(), *args)

    def right(self) -> Any:
        found = jax.block_until_ready(self.dispatch())
        self.ep.check()
        helpers.assert_dispatched(self.ep.config, found, self.inputs)
        return found

    def other(self, kind: str) -> Call:
        """A compiled call that is not `dispatch`."""
        d = self.first
        if kind == "tokens":
            short = [helpers.put(self.job.mesh, [p[:33] for p in part])
                     for part in vars(self.inputs).values()]  # fmt: skip
            return self.compiled(faults.dispatch, *short)
        if kind == "kind":
            x, _, w = self.args
            return self.compiled(faults.cached, d.route, x, w)
        assert kind == "combine", kind
        return self.compiled(faults.combine, d.route, d.tokens, d.router_weights)

    def attempt(self, *calls: Call) -> dict[str, Any]:
        """Makes the calls; reports the error, when it came, and the results."""
        begin, results, error = time.monotonic(), [], ""
        try:
            for call in calls:
                results.append(call())
            jax.block_until_ready(results)
            self.ep.check()
        except jax.errors.JaxRuntimeError as found:
            error = str(found)
        seconds = time.monotonic() - begin
        return {"error": error, "seconds": seconds, "nothing": nothing(results)}

    def ends(self) -> None:
        """Other handles work: the one that the job keeps, and a new one like this."""
        together(self.job.mesh)
        beside = self.job.beside
        beside.right()
        self.ep.close()
        Scene(self.job).ep.close()


def nothing(results: list[Any]) -> list[Any]:
    """For each call that was not refused, whether all of its results are empty."""
    found = []
    for result in results:
        try:
            own = jax.tree.map(lambda a: a.addressable_data(0), result)
            found.append(faults.is_nothing(jax.block_until_ready(own)))
        except jax.errors.JaxRuntimeError:
            continue  # refused, since the host knew that the first one had failed
    return found


def late_under(job: Job) -> dict[str, Any]:
    """The last process calls within the others' time limit: results are right."""
    scene = Scene(job)
    together(job.mesh)
    if job.last:
        time.sleep(TIMEOUT_S - MARGIN_S)
    scene.right()
    scene.ends()
    return {"right": True}


def late_over(job: Job) -> dict[str, Any]:
    """The last process calls after the others have given up."""
    scene = Scene(job)
    together(job.mesh)
    if job.last:
        time.sleep(TIMEOUT_S + MARGIN_S)
    found = scene.attempt(scene.dispatch)
    scene.ends()
    return found


def order(job: Job) -> dict[str, Any]:
    """The last process combines and then dispatches; the others do the reverse."""
    scene = Scene(job)
    calls = [scene.dispatch, scene.other("combine")]
    together(job.mesh)
    found = scene.attempt(*(reversed(calls) if job.last else calls))
    scene.ends()
    return found


def differs(kind: str, job: Job) -> dict[str, Any]:
    """The last process makes another call."""
    scene = Scene(job)
    other = scene.other(kind)
    together(job.mesh)
    found = scene.attempt(other if job.last else scene.dispatch)
    scene.ends()
    return found


def handles(job: Job) -> dict[str, Any]:
    """The last process calls a handle of another config."""
    scene, second = Scene(job), Scene(job, top_k=2)
    together(job.mesh)
    mine = second if job.last else scene
    found = mine.attempt(mine.dispatch)
    together(job.mesh)
    second.ep.close()
    scene.ends()
    return found


def configs(job: Job) -> dict[str, Any]:
    """The last process calls `init` with another config."""
    try:
        job.init(top_k=2 if job.last else 3).close()
        error = "nothing was raised"
    except ValueError as found:
        error = str(found)
    job.beside.right()
    Scene(job).ep.close()
    return {"error": error}


def closing(job: Job) -> dict[str, Any]:
    """The last process closes instead of calling, the first while its call waits."""
    scene = Scene(job)
    together(job.mesh)
    found: dict[str, Any] = {"error": ""}
    begin = time.monotonic()
    if job.last or jax.process_index() == 0:
        results = [] if job.last else [scene.dispatch()]
        time.sleep(INSIDE_S)
        scene.ep.close()
        found["closed_s"] = time.monotonic() - begin
        found["nothing"] = nothing(results)
        found["closed"] = scene.attempt(scene.dispatch)["error"]
    else:
        found |= scene.attempt(scene.dispatch)
    scene.ends()
    return found


SCENARIOS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "late_under": late_under,
    "late_over": late_over,
    "order": order,
    "tokens": functools.partial(differs, "tokens"),
    "kind": functools.partial(differs, "kind"),
    "handles": handles,
    "configs": configs,
    "closing": closing,
}


if __name__ == "__main__":
    port, processes, process, devices, node = sys.argv[1:]
    multiprocess_worker.start(port, int(processes), int(process), devices)
    try:
        job = Job(helpers.make_mesh(jax.device_count()), int(node))
        found = {}
        for name, scenario in SCENARIOS.items():
            found[name] = scenario(job)
            print(name, found[name], flush=True)
        job.beside.ep.close()
        print("result: " + json.dumps(found), flush=True)
    except BaseException:
        traceback.print_exc()
        # Exits at once: jax.distributed would wait for the others, which wait for this.
        os._exit(1)
    leave(int(process), int(processes))
