"""Processes of a jax.distributed job on this host."""

import contextlib
import os
import random
import socket
import time

PORTS = (15_000, 30_000)  # below those that Linux gives out by itself
ONE_GPU = "JAX_EP_TEST_ONE_GPU"
# Environment of processes that share GPUs with others.
SHARED_GPUS = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": ".05",
}


def visible_gpus(count):
    """Returns the names of this process's GPUs, for CUDA_VISIBLE_DEVICES.

    If that is not set, they are the numbers of the `count` GPUs that JAX sees.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else list(map(str, range(count)))


def one_gpu(name, processes=4):
    """Returns the environment of `processes` that share a GPU, which runs them in turn.

    This is no way to measure anything. But ranks of several processes interact as they
    would with a GPU each, except over the links.
    """
    return {
        "CUDA_VISIBLE_DEVICES": name,
        ONE_GPU: "1",
        # The rest is for the contexts and windows of all processes.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{min(0.05, 0.6 / processes):.3f}",
    }


def free_port() -> int:
    """Returns a free TCP port, which the kernel gives to no process by itself."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def join(port, processes, process, platform, devices=1):
    """Joins the job. Must be called before the backend starts.

    Args:
      port: the coordinator's port.
      processes: how many processes there are; one alone needs no job.
      process: which of them this is.
      platform: "cpu" or "gpu".
      devices: how many devices each process has.
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
    """Lets processes share a GPU, which runs them in turn.

    `init` refuses that, since ranks would wait for each other's turns. It knows GPUs by
    their UUIDs, and goes on if the driver reports none. NCCL refuses it for ranks of
    one host, so every process gets a host of its own.
    """
    from jax_ep._native import ffi

    ffi.native_cuda.device_uuid = lambda ordinal: ""
    os.environ["NCCL_HOSTID"] = f"process {process}"


def client():
    """Returns the client of the job's key-value store."""
    from jax._src import distributed  # no public one has waits with a timeout

    return distributed.global_state.client


def leave(process, count):
    """Ends this process. Process 0 ends last, since its end would end all others.

    The shutdown of jax.distributed would wait for processes that have died.
    """
    client().key_value_set(f"leaves/{process}", "")
    if process == 0:
        for other in range(count):
            client().blocking_key_value_get(f"leaves/{other}", 300_000)
        time.sleep(1)
    os._exit(0)


def local(array):
    """Returns this process's part of an array, in the order of ranks."""
    import numpy as np

    shards = sorted(array.addressable_shards, key=lambda each: each.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])
