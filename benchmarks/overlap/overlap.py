"""Measures how much of an exchange hides beside other work, and what graphs save.

    python -m benchmarks.overlap.overlap [--budget 540]
    python -m benchmarks.overlap.overlap --beside matmul --arrangements stream_halves

On all GPUs of this process it times dispatch and combine of T tokens alone, other work
alone, and both in one program, where neither depends on the other. The other work:

* "matmul": bfloat16 8192 x 8192 x 8192; "matmul_fitted": with so many rows that it
  takes 1.2 times as long as the exchange;
* "hopper" and, on request, "ragged_dot": the first grouped matmul of the experts, on
  rows as dispatch groups them, by jax_ep's kernels for Hopper and, with fewer columns,
  by `jax.lax.ragged_dot`, which XLA may do as one dense matmul per expert;
* "attention": causal, on one sequence of T tokens;
* "elementwise": reads and writes 1 GB.

"two_batches" is a case of its own: two micro-batches go through dispatch, experts and
combine, one after the other, and with each one's exchange under the other's experts.

The arrangements: "whole" calls, and "halves" with the work between them, both on the
one stream that XLA has by default; "stream_halves": halves of a handle with
`overlap="stream"`, the first on XLA's stream of collectives, with several `num_sms`,
with XLA's default flags and with its latency-hiding scheduler; "copy_halves": halves of
a handle with `overlap="copy"`, with that scheduler and with XLA's copies on copy
engines. For these, packing, copies and placing are also timed alone.

A time is in microseconds per call: that of a program of many calls tied by data
(jax_ep/_cli/bench/loops.py), the median of the repeats. Exposed is the time of both
less that of the work alone; hidden is the share of the whole call's own time that is
not exposed. Results are compared bit for bit with the collective transport's. Wrong
ones are marked, and the command then exits 1.

Then calls of few tokens are timed with XLA's CUDA graphs and without, each in a process
of its own.

Writes benchmarks/results/overlap-<gpu>x<n>-<date>.json and prints tables last. --merge
adds the rows of earlier records that this run did not measure, so that several runs
make one record: `--beside --graph-tokens --merge A.json B.json` only joins.
"""

import functools
import json
import sys

from benchmarks.common import arguments as common
from benchmarks.common import merging, recording
from benchmarks.overlap import report
from jax_ep._cli.bench.measure import GRAPHS as GRAPHS_ON

# The last one runs only on request, since it may take all of the time.
BESIDE = (
    *("matmul", "matmul_fitted", "hopper", "elementwise", "attention"),
    *("two_batches", "ragged_dot"),
)
ARRANGEMENTS = tuple(report.COLUMNS)
COPIES = "--xla_gpu_use_memcpy_local_p2p=true"
SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=true"
# XLA's flags, by whether they make it capture calls in CUDA graphs.
GRAPHS = {True: GRAPHS_ON, False: "--xla_gpu_enable_command_buffer="}
WORKER = "benchmarks.overlap.worker"
GRAPHS_WORKER = "jax_ep._cli.bench.worker"
TINY = (
    *("--transport", "collective", "--tokens", "8", "--inner", "128"),
    *("--ragged-inner", "64", "--matmul", "64", "--megabytes", "1"),
    *("--beside", *BESIDE, "--num-sms", "8", "--graph-tokens", "1", *common.TINY_CALLS),
)
OF_A_CASE = (
    *("device", "count", "jax", "transport", "tokens", "hidden", "top_k", "experts"),
)
_GRAPHS_SHARE = 0.25  # of the time


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    common.add_calls(parser, repeats=5, milliseconds=60, budget=540)
    common.add_place(parser)
    parser.add_argument("--inner", type=int, default=2048, help="of the experts")
    parser.add_argument("--ragged-inner", type=int, default=128, help="of ragged_dot")
    parser.add_argument("--matmul", type=int, default=8192, help="its size")
    parser.add_argument("--megabytes", type=int, default=1000, help="of elementwise")
    parser.add_argument("--transport", default="p2p")
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=BESIDE[:-1])
    parser.add_argument(
        "--arrangements", nargs="+", choices=ARRANGEMENTS, default=ARRANGEMENTS
    )
    parser.add_argument(
        "--num-sms", type=int, nargs="*", default=[32], help="besides the default"
    )
    parser.add_argument(
        "--graph-tokens", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32]
    )
    common.add_merge(parser)
    return common.parsed(parser, arguments, TINY)


def overlap_workers(args):
    """Yields (XLA flags, specification) of each worker, the surest first."""
    names = ("transport", "tokens", "beside", "matmul", "inner", "ragged_inner")
    names += ("megabytes",)
    spec = common.specification(args, **{name: getattr(args, name) for name in names})
    if not args.beside:
        return
    ways = [("sm", "")]
    if args.tiny or args.transport == "p2p":
        ways += [("copy", f"{COPIES} {SCHEDULER}")]
    if args.tiny or args.transport in ("p2p", "shmem"):
        # With --tiny all runs in this process, where flags change nothing.
        ways += [("stream", flags) for flags in ("", SCHEDULER)[args.tiny :]]
    for overlap, flags in ways:
        chosen = [
            name for name in args.arrangements if report.OVERLAPS[name] == overlap
        ]
        counts = args.num_sms if overlap == "stream" else []
        changes = {"overlap": overlap, "num_sms": counts, "arrangements": chosen}
        if chosen:
            yield flags, {**spec, "flags": flags, **changes}


def _key(row):
    names = ("op", "beside", "arrangement", "num_sms", "flags", "overlap", "graphs")
    return tuple(row.get(name) for name in (*names, "tokens"))


def _joined(before, after):
    """Joins rows; later ones replace the same ones, unless only those have a time."""
    rows = {}
    for row in [*before, *after]:
        old = rows.setdefault(_key(row), row)
        # A wrong row always stays.
        if not old.get("wrong") and ("us" in row or "us" not in old):
            rows[_key(row)] = row
    return list(rows.values())


def merged(before, after):
    """Joins the records of two runs of the same case on the same devices.

    Work of the earlier one that is not among `BESIDE` is left out.
    """
    for name in OF_A_CASE:
        merging.require_same("overlap.py", name, before[name], after[name])
    known = [row for row in before["results"] if row["beside"] in (None, *BESIDE)]
    before = before | {"results": known}
    rows = {name: _joined(before[name], after[name]) for name in ("results", "graphs")}
    return merging.joined(before, after, **rows)


def graph_spec(args):
    return common.specification(
        args,
        transports=[args.transport],
        tokens=args.graph_tokens,
        routings=["uniform"],
        num_sms=[None],
        defaults_at=0,
        ragged=(),
    )


def main(arguments=None):
    args = parse(arguments)
    names = ("transport", "tokens", "hidden", "top_k", "experts")
    facts = {name: getattr(args, name) for name in names} | {"graphs": []}
    run = recording.run("overlap", "overlap.overlap", args, arguments, **facts)
    record = run.record
    earlier = [json.loads(path.read_text()) for path in args.merge]

    def work(flags, spec, until, module, **facts):
        if problem := run.work(f"flags {flags!r}", flags, spec, until, module, **facts):
            record["problems"].append({"flags": flags, "problem": problem})

    workers = list(overlap_workers(args))
    share = 1 - _GRAPHS_SHARE if args.graph_tokens else 1
    # Each worker gets time in proportion to what it has to measure.
    weights = [1 + len(s["arrangements"]) * (1 + len(s["num_sms"])) for _, s in workers]
    for index, (flags, spec) in enumerate(workers):
        until = share * sum(weights[: index + 1]) / sum(weights)
        work(flags, spec, until, WORKER)
    if args.graph_tokens:
        for index, (graphs, flags) in enumerate(GRAPHS.items()):
            until = share + _GRAPHS_SHARE * (index + 1) / len(GRAPHS)
            facts = {"key": "graphs", "graphs": graphs}
            work(flags, graph_spec(args), until, GRAPHS_WORKER, **facts)
    record["seconds"] = run.seconds
    empty = record["count"] == 0
    if earlier and empty:
        # There is nothing to join: this run does not even know its devices.
        earlier[-1]["problems"] += record["problems"]
    else:
        record["runs"] = merging.runs(record)
        earlier.append(record)
    record = functools.reduce(merged, earlier)
    recording.write(recording.of("overlap", record), record, args.results)
    report.print_table(record)
    asked = bool(workers or args.graph_tokens)
    return int((asked and empty) or report.unfit(record))


if __name__ == "__main__":
    sys.exit(main())
