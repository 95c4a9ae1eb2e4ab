"""Times dispatch and combine on the devices present, against the exchange inside them.

    python benchmarks/collective.py [--tokens 128 1024 4096] [--devices N]

Back-to-back calls of one compiled program over fresh random routing, median of repeats,
host clock around the whole run: what a step of a training job pays. `all_to_all` is the
exchange alone on a buffer of the same size, so the rest is pack, unpack and launches.
Writes benchmarks/results/collective-<device>x<n>-<date>.json and prints a table.
"""

import argparse
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import recording
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

EXPERTS, TOP_K, HIDDEN = 256, 8, 7168


def median_us(run, calls, repeats=7):
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = [run() for _ in range(calls)]
        jax.block_until_ready(outputs[-1])
        del outputs
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def measure(mesh, tokens, calls, rng):
    ranks = mesh.size
    rows = math.ceil(1.25 * tokens * TOP_K / 128) * 128
    config = jax_ep.EPConfig(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=tokens,
        recv_capacity=rows,
        zero_tail=False,
    )
    sharding = NamedSharding(mesh, P("ep"))
    n = ranks * tokens
    scores = rng.random((n, EXPERTS), dtype=np.float32)
    ids = np.argpartition(scores, TOP_K, axis=1)[:, :TOP_K].astype(np.int32)
    x = jax.device_put(
        jax.random.normal(jax.random.key(tokens), (n, HIDDEN), jnp.bfloat16), sharding
    )
    topk_ids = jax.device_put(ids, sharding)
    weights = jax.device_put(rng.random((n, TOP_K), dtype=np.float32), sharding)

    def mapped(function):
        return jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        )

    with jax_ep.init(mesh, "ep", config) as ep:
        dispatch = mapped(lambda *a: jax_ep.dispatch(ep, *a))
        combine = mapped(lambda *a: jax_ep.combine(ep, *a))
        d = dispatch(x, topk_ids, weights)
        exchange = mapped(
            lambda a: jax.lax.all_to_all(a, "ep", 0, 0, tiled=True) if ranks > 1 else a
        )
        words = jax.device_put(
            np.zeros((ranks * ranks, tokens * HIDDEN // 2), np.uint32), sharding
        )
        destinations = ids // (EXPERTS // ranks)
        source = np.repeat(np.arange(ranks), tokens)
        remote = sum(
            len(set(row.tolist()) - {int(rank)})
            for row, rank in zip(destinations, source, strict=True)
        )
        return {
            "tokens": tokens,
            "dispatch_us": median_us(lambda: dispatch(x, topk_ids, weights), calls),
            "combine_us": median_us(
                lambda: combine(d.tokens, d.route, d.router_weights), calls
            ),
            "all_to_all_us": median_us(lambda: exchange(words), calls),
            "remote_bytes_per_rank": remote * HIDDEN * 2 // ranks,
            "num_dropped": int(np.asarray(d.num_dropped).sum()),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--calls", type=int, default=20)
    args = parser.parse_args()
    devices = jax.devices()[: args.devices or None]
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng()
    record = {
        "kind": "collective transport",
        "device": devices[0].device_kind,
        "count": len(devices),
        "jax": jax.__version__,
        "commit": recording.commit(),
        "date": recording.date(),
        "hidden": HIDDEN,
        "top_k": TOP_K,
        "experts": EXPERTS,
        "results": [measure(mesh, t, args.calls, rng) for t in args.tokens],
    }
    name = recording.short_device(record["device"])
    recording.write(f"collective-{name}x{len(devices)}", record)
    for row in record["results"]:
        print(
            f"T {row['tokens']:5d}  dispatch {row['dispatch_us']:9.1f} us  combine "
            f"{row['combine_us']:9.1f} us  all_to_all {row['all_to_all_us']:9.1f} us"
        )


if __name__ == "__main__":
    main()
