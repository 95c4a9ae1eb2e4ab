"""Records what happens to independent calls of one p2p handle if XLA may overlap them.

    python -m tools.record_concurrent [--limit-s 60]

Runs tests/workers/graph_worker.py on the GPUs present with XLA's scheduling mode
CONCURRENT for CUDA graphs, which runs side by side what nothing orders: once as it is,
with jax_ep chaining the calls of a program (docs/sharp_bits.md, "Calls of one p2p
handle"), and once "unchained". Writes
benchmarks/results/concurrent-<gpu>x<n>-<date>.json. Exits 1 if the chained calls were
not right. The outcome of the others is only recorded.
"""

import argparse
import json
import os
import subprocess
import sys

from benchmarks.common import recording
from tools import record_suite

FLAGS = (
    "--xla_gpu_graph_min_graph_size=1"
    " --xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
)
WORKER = recording.ROOT / "tests" / "workers" / "graph_worker.py"


def outcome(limit_s, mode):
    """Runs the worker; returns its outcome "right", "wrong", "failed" or "no end"."""
    path = [str(recording.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | record_suite.SHARING_MEMORY
    env |= {"XLA_FLAGS": FLAGS, "JAX_EP_TEST_TRANSPORT": "p2p"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    try:
        done = subprocess.run(
            [sys.executable, str(WORKER), mode],
            env=env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "no end", "limit_s": limit_s}
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [str(done.returncode)]
        return {"outcome": "failed", "error": last[0]}
    told = json.loads(done.stdout.splitlines()[-1])
    return {"outcome": "wrong" if told["wrong"] else "right"} | told


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=60.0, help="of each run")
    args = parser.parse_args(arguments)
    found = record_suite.devices()
    if found["platform"] != "gpu":
        raise SystemExit("record_concurrent: needs GPUs, whose graphs XLA schedules")
    made = recording.head(
        "concurrent",
        device=found["kind"],
        count=found["count"],
        jax=found["jax"],
        flags=FLAGS,
        chained=outcome(args.limit_s, "open"),
        unchained=outcome(args.limit_s, "unchained"),
    )
    recording.write(recording.of("concurrent", made), made)
    for name in ("chained", "unchained"):
        print(name, made[name])
    return int(made["chained"]["outcome"] != "right")


if __name__ == "__main__":
    sys.exit(main())
