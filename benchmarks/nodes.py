"""What forced nodes cost on one host: dispatch and combine over p2p and shmem.

    python benchmarks/nodes.py [--tokens 4096,128] [--hidden 7168]

One process a GPU. p2p, shmem with all ranks on a node, with two ranks a node
(dispatches in bundles, and direct), and with one rank a node: there puts are stores
over NVLink, so this is the cost of staging, of the steps between the halves and of
their launches, and says nothing about a network. Writes
benchmarks/results/nodes-<device>x<n>-<date>.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import time

CALLS, REPEATS = 10, 15  # calls of a program, and its runs
LIMIT_S = 540  # for all processes: one that waits for a dead one is ended
TOP_K, EXPERTS = 8, 256
# Transport, ranks of a node, whether dispatches may be bundled.
WAYS = {
    "p2p": ("p2p", None, True),
    "shmem, one node": ("shmem", None, True),
    "two a node, bundled": ("shmem", 2, True),
    "two a node, direct": ("shmem", 2, False),
    "one a node": ("shmem", 1, False),
}


def programs(mesh, ep, hidden, n, rank_of):
    """Jitted runs of CALLS dispatches, and of CALLS combines, each after the other."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_ep

    spec, rng = P("ep"), np.random.default_rng(rank_of)
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)

    def put(a):
        sharding = NamedSharding(mesh, spec)
        shape = (mesh.size * len(a), *a.shape[1:])
        return jax.make_array_from_process_local_data(sharding, a, shape)

    ids = np.argsort(rng.random((n, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    tokens = put(rng.standard_normal((n, hidden)).astype(jnp.bfloat16))
    ids = put(ids)

    # A handle's calls are chained, so that none is dropped or moved.
    @jax.jit
    @mapped
    def dispatches(tokens, ids):
        return [jax_ep.dispatch(ep, tokens, ids) for _ in range(CALLS)][-1]

    @jax.jit
    @mapped
    def combines(rows, route):
        return [jax_ep.combine(ep, rows, route) for _ in range(CALLS)][-1]

    d = dispatches(tokens, ids)
    rows = jax.block_until_ready(d.tokens)
    return {
        "dispatch": functools.partial(dispatches, tokens, ids),
        "combine": functools.partial(combines, rows, d.route),
    }


def timed(run, meet):
    """Microseconds of a call, the median of runs that begin together."""
    import jax

    found = []
    jax.block_until_ready(run())
    for _ in range(REPEATS):
        meet()
        begin = time.perf_counter()
        jax.block_until_ready(run())
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(found)


def work(port, count, own, hidden, sizes):
    """A process: its medians, as the last line."""
    import jax

    import jax_ep
    from jax_ep import _nodes

    jax.distributed.initialize(f"127.0.0.1:{port}", count, own, local_device_ids=[own])
    from jax._src.distributed import global_state

    client = global_state.client
    assert client is not None
    mesh, rounds = jax.make_mesh((count,), ("ep",)), iter(range(1 << 30))

    def meet():
        client.wait_at_barrier(f"nodes/{next(rounds)}", 60_000)

    bundled, medians = _nodes.bundled, []
    for n in sizes:
        for name, (transport, node, bundles) in WAYS.items():
            _nodes.bundled = bundled if bundles else lambda *args: (0, 0)
            config = jax_ep.EPConfig(
                num_experts=EXPERTS,
                top_k=TOP_K,
                hidden_size=hidden,
                max_tokens_per_rank=n,
                capacity_factor=1.25,
                zero_tail=False,
                ranks_per_node=node,
            )
            with jax_ep.init(mesh, "ep", config, transport=transport) as ep:
                for op, run in programs(mesh, ep, hidden, n, own).items():
                    medians.append([n, name, op, timed(run, meet)])
                ep.check()
                if own == 0:
                    print(*medians[-2], *medians[-1], file=sys.stderr, flush=True)
    kind = jax.local_devices()[0].device_kind
    print(json.dumps({"device": kind, "medians": medians}), flush=True)
    meet()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="4096,128")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--process", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [int(n) for n in args.tokens.split(",")]
    if args.process:
        port, count, own = args.process
        return work(port, count, own, args.hidden, sizes)
    import recording

    count = len(os.listdir("/proc/driver/nvidia/gpus"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--tokens", args.tokens]
    command += ["--hidden", str(args.hidden), "--process", str(port), str(count)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}
    started = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, env=environment)
        for i in range(count)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        outputs = [
            each.communicate(timeout=end - time.monotonic())[0] for each in started
        ]
    finally:
        for each in started:
            each.kill()
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    rows = [
        {
            "tokens": n,
            "way": way,
            "op": op,
            "us": max(r["medians"][i][3] for r in results),
        }
        for i, (n, way, op, _) in enumerate(results[0]["medians"])
    ]
    record = {
        "date": recording.date(),
        "commit": recording.commit(),
        "device": results[0]["device"],
        "gpus": count,
        "hidden": args.hidden,
        "rows": rows,
    }
    for row in rows:
        print(f"{row['tokens']:6} {row['op']:9} {row['way']:20} {row['us']:9.1f} us")
    recording.write(f"nodes-{recording.short_device(record['device'])}x{count}", record)
    return None


if __name__ == "__main__":
    sys.exit(main())
