"""Times dispatch and combine over transport collective, and the all-to-all in them.

    python -m benchmarks.calls.collective [--tokens 128 1024 4096] [--devices N]

A time is in microseconds per call: the host's clock around back-to-back calls of one
compiled program with random routing, divided by their number; the median of 7 repeats.
This is what a step of a training job pays. `all_to_all` is the exchange alone on a
buffer of the same size; the rest is packing, unpacking and launches.
Writes benchmarks/results/collective-<device>x<n>-<date>.json and prints a table.
"""

import statistics
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import arguments as common
from benchmarks.common import recording, timing
from jax_ep._cli.bench import checks, process, routings, transports
from jax_ep._cli.bench import measure as measure_calls

REPEATS = 7
TINY = (
    *("--tokens", "6", "--hidden", "128", "--experts", "8", "--top-k", "2"),
    *("--calls", "2", "--devices", "2"),
)


def median_us(run, calls):
    jax.block_until_ready(run(0))
    times = [timing.seconds(run, calls, calls) for _ in range(REPEATS)]
    return statistics.median(times) * 1e6


def measure(mesh, tokens, args):
    ranks, hidden = mesh.size, args.hidden
    case = transports.make_case(
        mesh, measure_calls.specification(args), tokens, "uniform", defaults=False
    )
    transport = transports.reference(case)
    words = jax.device_put(
        np.zeros((ranks * ranks, tokens * hidden // 2), np.uint32),
        NamedSharding(mesh, P("ep")),
    )
    exchange = checks.mapped(
        mesh,
        lambda a: jax.lax.all_to_all(a, "ep", 0, 0, tiled=True) if ranks > 1 else a,
    )
    ids = np.asarray(case.ids[0])
    sent = routings.messages(ids, ranks, args.experts).sum()
    times = {
        f"{op}_us": median_us(
            lambda _, op=op: transport.calls[op](*transport.inputs(op, 0)), args.calls
        )
        for op in transports.OPS
    }
    dropped = transport.dispatched[0].num_dropped
    transport.ep.close()
    return {
        "tokens": tokens,
        **times,
        "all_to_all_us": median_us(lambda _: exchange(words), args.calls),
        "remote_bytes_per_rank": int(sent) * hidden * 2 // ranks,
        "num_dropped": int(np.asarray(dropped).sum()),
    }


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    common.add_sizes(parser)
    parser.add_argument("--calls", type=int, default=20)
    common.add_place(parser)
    return common.parsed(parser, arguments, TINY)


def main(arguments=None):
    args = parse(arguments)
    mesh = process.ep_mesh(args.devices)
    record = recording.head(
        "collective transport",
        device=mesh.devices.flat[0].device_kind,
        count=mesh.size,
        jax=jax.__version__,
        seed=args.seed,
        hidden=args.hidden,
        top_k=args.top_k,
        experts=args.experts,
        results=[measure(mesh, tokens, args) for tokens in args.tokens],
    )
    recording.write(recording.of("collective", record), record, args.results)
    for row in record["results"]:
        print(
            f"T {row['tokens']:5d}  dispatch {row['dispatch_us']:9.1f} us  combine "
            f"{row['combine_us']:9.1f} us  all_to_all {row['all_to_all_us']:9.1f} us"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
