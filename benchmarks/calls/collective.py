"""Times dispatch and combine on the devices present, against the exchange inside them.

    python -m benchmarks.calls.collective [--tokens 128 1024 4096] [--devices N]

Back-to-back calls of one compiled program over fresh random routing, median of repeats,
host clock around the whole run: what a step of a training job pays. `all_to_all` is the
exchange alone on a buffer of the same size, so the rest is pack, unpack and launches.
Writes benchmarks/results/collective-<device>x<n>-<date>.json and prints a table.
"""

import argparse
import math
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.calls import p2p
from benchmarks.common import recording
from jax_ep._cli.bench import process

EXPERTS, TOP_K, HIDDEN = 256, 8, 7168
TINY = (
    *("--tokens", "6", "--hidden", "128", "--experts", "8", "--top-k", "2"),
    *("--calls", "2", "--devices", "2"),
)


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


def measure(mesh, tokens, args, rng):
    ranks, calls = mesh.size, args.calls
    experts, top_k, hidden = args.experts, args.top_k, args.hidden
    rows = math.ceil(1.25 * tokens * top_k / 128) * 128
    config = jax_ep.EPConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        max_tokens_per_rank=tokens,
        recv_capacity=rows,
        zero_tail=False,
    )
    sharding = NamedSharding(mesh, P("ep"))
    n = ranks * tokens
    scores = rng.random((n, experts), dtype=np.float32)
    ids = np.argpartition(scores, top_k, axis=1)[:, :top_k].astype(np.int32)
    x = jax.device_put(
        jax.random.normal(jax.random.key(tokens), (n, hidden), jnp.bfloat16), sharding
    )
    topk_ids = jax.device_put(ids, sharding)
    weights = jax.device_put(rng.random((n, top_k), dtype=np.float32), sharding)

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
            np.zeros((ranks * ranks, tokens * hidden // 2), np.uint32), sharding
        )
        destinations = ids // (experts // ranks)
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
            "remote_bytes_per_rank": remote * hidden * 2 // ranks,
            "num_dropped": int(np.asarray(d.num_dropped).sum()),
        }


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    parser.add_argument("--top-k", type=int, default=TOP_K)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--seed", type=int, help="of routing and tokens")
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    p2p.add_place(parser)
    return p2p.parsed(parser, arguments, TINY)


def main(arguments=None):
    args = parse(arguments)
    mesh = process.ep_mesh(args.devices)
    rng = np.random.default_rng(args.seed)
    record = {
        "kind": "collective transport",
        "device": mesh.devices.flat[0].device_kind,
        "count": mesh.size,
        "jax": jax.__version__,
        "commit": recording.commit(),
        "date": recording.date(),
        "seed": args.seed,
        "hidden": args.hidden,
        "top_k": args.top_k,
        "experts": args.experts,
        "results": [measure(mesh, t, args, rng) for t in args.tokens],
    }
    name = recording.short_device(record["device"])
    recording.write(f"collective-{name}x{mesh.size}", record, args.results)
    for row in record["results"]:
        print(
            f"T {row['tokens']:5d}  dispatch {row['dispatch_us']:9.1f} us  combine "
            f"{row['combine_us']:9.1f} us  all_to_all {row['all_to_all_us']:9.1f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
