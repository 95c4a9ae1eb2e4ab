"""Measures transports, or JAX's ragged_all_to_all, in a process of its own for p2p.py.

    python benchmarks/p2p_worker.py SPECIFICATION OUTPUT

XLA reads its flags once, when a process starts to use it. The specification is JSON of
p2p.py. A line of JSON goes to OUTPUT for the devices and for each row once it is
measured, so that rows outlive a process that hangs.
"""

import gc
import json
import sys
import time

import jax
import numpy as np
import p2p_ragged
import p2p_report
import p2p_transports
from jax.sharding import AxisType, Mesh

from jax_ep._demo.progress import Progress


def _cases(spec):
    for tokens in spec["tokens"]:
        for routing in spec["routings"]:
            yield tokens, routing, False
    if spec["defaults_at"]:
        yield spec["defaults_at"], "uniform", True


def main():
    spec = json.loads(sys.argv[1])
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    start = time.perf_counter()
    cases = list(_cases(spec))
    title = "ragged_all_to_all, case" if spec["ragged"] else "jax_ep, case"
    with open(sys.argv[2], "a") as output, Progress(title, len(cases)) as progress:

        def emit(row):
            output.write(json.dumps(row) + "\n")
            output.flush()
            if "device" not in row:
                seconds = time.perf_counter() - start
                progress.say(f"  {seconds:5.1f} s  {p2p_report.line(row)}")

        emit(
            {
                "device": devices[0].device_kind,
                "count": len(devices),
                "jax": jax.__version__,
            }
        )
        for tokens, routing, defaults in cases:
            if time.time() > spec["deadline"]:
                facts = {"tokens": tokens, "routing": routing, "zero_tail": defaults}
                name = "ragged" if spec["ragged"] else "jax_ep"
                emit({**facts, "transport": name, "error": "no time left"})
                continue
            module = p2p_ragged if spec["ragged"] else p2p_transports
            module.measure_case(spec, mesh, emit, tokens, routing, defaults)
            progress.update(f"T {tokens}")
            gc.collect()


if __name__ == "__main__":
    main()
