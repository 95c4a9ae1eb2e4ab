"""A jax.distributed process of test_recovery.py, in which the last process is killed.

Arguments: port of the coordinator, number of processes, this process, "1" for JAX's
recoverable setting. The others wait until the heartbeat times out and then init again.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax_ep

# isort: split
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from support import helpers
from support.worker_process import bound_life

HEARTBEAT_S = 5
# In experiments, a missed heartbeat was detected within twice this time.
LATER_S = 3 * HEARTBEAT_S


def handle(devices) -> jax_ep.EPHandle:
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    return jax_ep.init(mesh, "ep", helpers.make_config(), transport="collective")


def main(port: str, processes: int, process: int, recoverable: bool) -> None:
    bound_life()
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_recoverability", recoverable)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        cluster_detection_method="deactivate",
    )
    ep = handle(jax.devices())
    print("open", flush=True)
    if process == processes - 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LATER_S)
    ep.close()
    living = handle(jax.devices()[:-1])
    config = living.config
    inputs = helpers.make_inputs(np.random.default_rng(0), config, processes - 1)
    d = helpers.run_dispatch(living, living.mesh, inputs)
    helpers.assert_dispatched(config, d, inputs)
    print("result: right", flush=True)
    # The coordinator, process 0, leaves last.
    time.sleep(0 if process else 3)
    os._exit(0)


if __name__ == "__main__":
    port, processes, process, recoverable = sys.argv[1:]
    main(port, int(processes), int(process), recoverable == "1")
