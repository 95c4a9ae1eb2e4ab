"""Processes of a jax.distributed job on this host."""

import contextlib
import os
import random
import socket
import time

PORTS = (15_000, 30_000)  # below those that Linux gives out by itself
ONE_GPU = "JAX_EP_TEST_ONE_GPU"
# Of processes that share GPUs with others.
SHARED_GPUS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
}


def visible_gpus(count):
    """Names of this process's GPUs in CUDA_VISIBLE_DEVICES, of which JAX sees `count`.

    `count` says it where that is not set.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else list(map(str, range(count)))


def one_gpu(name, processes=4):
    """Environment of `processes` that all have that GPU, which runs them in turns.

    Nothing can be measured so, but ranks of several processes do to each other what
    they do with a GPU each, except over the links.
    """
    return {
        "CUDA_VISIBLE_DEVICES": name,
        ONE_GPU: "1",
        # Contexts and windows of all processes have the rest.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{min(0.05, 0.6 / processes):.3f}",
    }


def free_port() -> int:
    """A TCP port that the kernel gives to no other process before it is used."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def join(port, processes, process, platform, devices=1):
    """Joins the job, before the backend starts.

    Args:
      port: of the coordinator.
      processes: how many; one alone needs no job.
      process: which of them this is.
      platform: "cpu" or "gpu".
      devices: of each process.
    """
    import jax

    mine = None
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    if processes == 1:
        return
    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if visible == [""] or len(visible) > devices:
            mine = list(range(process * devices, (process + 1) * devices))
    if ONE_GPU in os.environ:
        _share_one(process)
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        processes,
        process,
        local_device_ids=mine,
        cluster_detection_method="deactivate",
    )


def _share_one(process):
    """Lets processes share a GPU, which takes turns between them.

    `init` refuses that, since ranks would wait for each other's turns. It knows GPUs by
    their UUIDs and goes on where the driver tells none. NCCL refuses it for the ranks
    of one host.
    """
    from jax_ep._native import ffi

    ffi.native_cuda.device_uuid = lambda ordinal: ""
    os.environ["NCCL_HOSTID"] = f"process {process}"


def client():
    """The job's key-value store."""
    from jax._src import distributed  # no public one has waits that end

    return distributed.global_state.client


def leave(process, count):
    """Ends this process; process 0 ends last, since its end is that of all.

    The shutdown of jax.distributed would wait for processes that have died.
    """
    client().key_value_set(f"leaves/{process}", "")
    if process == 0:
        for other in range(count):
            client().blocking_key_value_get(f"leaves/{other}", 300_000)
        time.sleep(1)
    os._exit(0)


def local(array):
    """What this process holds of an array, in the order of ranks."""
    import numpy as np

    shards = sorted(array.addressable_shards, key=lambda each: each.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
