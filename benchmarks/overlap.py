"""Measures how much of an exchange hides beside other work, and what graphs save.

    python benchmarks/overlap.py [--budget 540]
    python benchmarks/overlap.py --beside matmul --arrangements stream_halves

On all GPUs of this process: dispatch and combine of T tokens alone, other work alone,
and both in one program, calls that do not depend on each other. The other work:

* "matmul": bfloat16 8192 x 8192 x 8192; "matmul_fitted": of as many rows as take 1.2
  times as long as the exchange;
* "grouped": the first grouped matmul of the experts, of rows as dispatch groups them
  (by Mosaic on Hopper, else `jax.lax.ragged_dot`);
* "elementwise": reads and writes 1 GB.

The arrangements: "whole" calls and "halves" with the work between them, both on the
one stream that XLA has by default; "stream_whole" and "stream_halves": the call, or its
first half, under `compute_on("gpu_stream:collective")`, with several `num_sms`, with
XLA's default flags and with its latency-hiding scheduler; "copy_halves": halves of a
handle with `overlap="copy"`, that scheduler and XLA's copies by copy engines.

A time is that of a program of many calls tied by data (p2p_programs.py), median of the
repeats. Exposed is the time of both less that of the work alone; hidden is the share of
the whole call's own time that is not exposed. Results are compared with the collective
transport's bit for bit; wrong ones are marked, and the command then exits 1.

Then the time of a call of few tokens with XLA's CUDA graphs and without, each in a
process of its own.

Writes benchmarks/results/overlap-<gpu>x<n>-<date>.json and prints tables last.
"""

import argparse
import pathlib
import secrets
import sys
import time

import gpu_limits
import overlap_report
import p2p
import recording

BESIDE = ("matmul", "matmul_fitted", "grouped", "elementwise")
ARRANGEMENTS = tuple(overlap_report.COLUMNS)
COPIES = "--xla_gpu_use_memcpy_local_p2p=true"
SCHEDULER = "--xla_gpu_enable_latency_hiding_scheduler=true"
# Whether calls are captured, and the flags for it.
GRAPHS = {True: p2p.GRAPHS, False: "--xla_gpu_enable_command_buffer="}
WORKER = "overlap_worker.py"
_GRAPHS_SHARE = 0.25  # of the time


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="a rank")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=p2p.EXPERTS)
    parser.add_argument("--top-k", type=int, default=p2p.TOP_K)
    parser.add_argument("--inner", type=int, default=2048, help="of the experts")
    parser.add_argument("--matmul", type=int, default=8192, help="its size")
    parser.add_argument("--megabytes", type=int, default=1000, help="of elementwise")
    parser.add_argument("--transport", default="p2p")
    parser.add_argument("--beside", nargs="*", choices=BESIDE, default=BESIDE)
    parser.add_argument(
        "--arrangements", nargs="+", choices=ARRANGEMENTS, default=ARRANGEMENTS
    )
    parser.add_argument(
        "--num-sms", type=int, nargs="*", default=[16, 32], help="besides the default"
    )
    parser.add_argument(
        "--graph-tokens", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=60, help="of a program")
    parser.add_argument("--seed", type=int, help="of routing and tokens")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    args = parser.parse_args(arguments)
    if args.seed is None:
        args.seed = secrets.randbits(31)
    return args


def common(args):
    """What the specification of every worker has."""
    return {
        "hidden": args.hidden,
        "dtype": "bfloat16",
        "format": "bf16",
        "combine_format": None,
        "experts": args.experts,
        "top_k": args.top_k,
        "seed": args.seed,
        "repeats": args.repeats,
        "milliseconds": args.milliseconds,
        "peak_gb_s": None,
    }


def overlap_workers(args):
    """(XLA flags, specification), the surest first."""
    spec = common(args) | {
        "transport": args.transport,
        "tokens": args.tokens,
        "beside": args.beside,
        "matmul": args.matmul,
        "inner": args.inner,
        "megabytes": args.megabytes,
        "num_sms": args.num_sms,
        "overlap": "sm",
    }
    if not args.beside:
        return
    ours = args.transport == "p2p"
    copies = [name for name in args.arrangements if name.startswith("copy")]
    kernels = [name for name in args.arrangements if name not in copies]
    streams = [name for name in kernels if name.startswith("stream")]
    if kernels:
        yield "", {**spec, "flags": "", "arrangements": kernels}
    if copies and ours:
        flags = f"{COPIES} {SCHEDULER}"
        changes = {"overlap": "copy", "num_sms": [], "arrangements": copies}
        yield flags, {**spec, "flags": flags, **changes}
    if streams and ours:
        yield SCHEDULER, {**spec, "flags": SCHEDULER, "arrangements": streams}


def graph_spec(args):
    return common(args) | {
        "transports": [args.transport],
        "tokens": args.graph_tokens,
        "routings": ["uniform"],
        "num_sms": [None],
        "unrolled": 0,
        "defaults_at": 0,
        "ragged": (),
    }


def main(arguments=None):
    args = parse(arguments)
    start = time.time()
    print(f"seed {args.seed}")
    record = {
        "kind": "overlap",
        "device": "unknown",
        "count": 0,
        "driver": gpu_limits.driver(),
        "commit": recording.commit(),
        "date": recording.date(),
        "seed": args.seed,
        "command": p2p.command("overlap.py", arguments or sys.argv[1:]),
        "transport": args.transport,
        "tokens": args.tokens,
        "hidden": args.hidden,
        "top_k": args.top_k,
        "experts": args.experts,
        "results": [],
        "graphs": [],
        "problems": [],
    }

    def run(flags, spec, script, key, **facts):
        rows, problem = p2p.run_worker(flags, spec, script)
        for row in rows:
            if "device" in row:
                record.update(row)
            else:
                record[key].append({**row, **facts})
        if problem:
            record["problems"].append({"flags": flags, "problem": problem})

    workers = list(overlap_workers(args))
    share = 1 - _GRAPHS_SHARE if args.graph_tokens else 1
    # By what each has to measure.
    weights = [1 + len(s["arrangements"]) * (1 + len(s["num_sms"])) for _, s in workers]
    for index, (flags, spec) in enumerate(workers):
        print(f"flags {flags!r}, {time.time() - start:.0f} s", flush=True)
        until = share * sum(weights[: index + 1]) / sum(weights)
        spec["deadline"] = start + until * args.budget
        run(flags, spec, WORKER, "results")
    if args.graph_tokens:
        for index, (graphs, flags) in enumerate(GRAPHS.items()):
            print(f"flags {flags!r}, {time.time() - start:.0f} s", flush=True)
            until = share + _GRAPHS_SHARE * (index + 1) / len(GRAPHS)
            spec = graph_spec(args) | {"deadline": start + until * args.budget}
            run(flags, spec, "p2p_worker.py", "graphs", graphs=graphs)
    record["seconds"] = round(time.time() - start, 1)
    name = f"overlap-{recording.short_device(record['device'])}x{record['count']}"
    recording.write(name, record, args.results)
    overlap_report.print_table(record)
    return 1 if overlap_report.failures(record) else 0


if __name__ == "__main__":
    sys.exit(main())
