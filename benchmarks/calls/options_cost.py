"""Measures what each option costs or saves against plain calls.

    python -m benchmarks.calls.options_cost [--tokens 1 128 4096] [--budget 300]

On all GPUs of this process, in one run: dispatch and combine of T tokens plainly; with
`reduce="source"` and "none", with `fused_shared_expert`, with `skip_a2a` and the psum
behind it, with `residual=` and with an addition instead, and in halves; then the first
halves alone with several `num_sms`. Programs and times are as in p2p.py: many calls,
each waiting for the one before, median of the repeats. Each call's results are compared
with the collective transport's bit for bit; wrong ones are marked, and the command then
exits 1.

Writes benchmarks/results/options-<gpu>x<n>-<date>.json and prints tables last.
"""

import argparse
import sys
import time

from benchmarks.calls import options_report, p2p
from benchmarks.common import recording
from benchmarks.limits import gpu_limits

WORKER = "options_worker.py"
TINY = (
    *("--transport", "collective", "--tokens", "6", "--num-sms", "8"),
    *p2p.TINY_CALLS,
)


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128, 1])
    parser.add_argument(
        "--options",
        nargs="+",
        choices=tuple(options_report.NAMES),
        default=tuple(options_report.NAMES),
        help="besides the plain calls",
    )
    parser.add_argument(
        "--num-sms", type=int, nargs="*", default=[16, 24, 32], help="of first halves"
    )
    parser.add_argument("--transport", default="p2p")
    p2p.add_common(parser, repeats=7, milliseconds=60, budget=300)
    p2p.add_place(parser)
    return p2p.parsed(parser, arguments, TINY)


def specification(args):
    """What the worker measures."""
    return p2p.plain_spec(args) | {
        "transport": args.transport,
        "tokens": args.tokens,
        "options": list(args.options),
        "num_sms": args.num_sms,
        **p2p.place(args),
    }


def main(arguments=None):
    args = parse(arguments)
    start = time.time()
    print(f"seed {args.seed}")
    spec = specification(args)
    record = {
        "kind": "options",
        "device": "unknown",
        "count": 0,
        "driver": gpu_limits.driver(),
        "commit": recording.commit(),
        "date": recording.date(),
        "command": p2p.command("options_cost.py", arguments or sys.argv[1:]),
        "flags": p2p.GRAPHS,
        "results": [],
        "problems": [],
    }
    record |= {
        name: spec[name] for name in ("seed", "transport", "hidden", "top_k", "experts")
    }
    deadline = {"deadline": start + args.budget}
    rows, problem = p2p.run_worker(p2p.GRAPHS, spec | deadline, WORKER)
    p2p.take(record, rows)
    if problem:
        record["problems"].append(problem)
    record["seconds"] = round(time.time() - start, 1)
    name = f"options-{recording.short_device(record['device'])}x{record['count']}"
    recording.write(name, record, args.results)
    options_report.print_tables(record)
    return int(options_report.unfit(record))


if __name__ == "__main__":
    sys.exit(main())
