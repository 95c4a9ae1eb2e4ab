"""Measures what each option costs or saves against plain calls.

    python -m benchmarks.calls.options_cost [--tokens 1 128 4096] [--budget 300]

On all GPUs of this process, in one run, it times dispatch and combine of T tokens per
rank: plain; with `reduce="source"` and "none"; with `fused_shared_expert`; with
`skip_a2a` and the psum after it; with `residual=`, and with an addition instead; and in
halves. Then it times the first halves alone with several `num_sms`.

Times are microseconds per call, measured as in p2p.py: a program of many calls, each
waiting for the one before; the median of the repeats. Results are compared bit for bit
with the collective transport's. Wrong ones are marked, and the command then exits 1.

Writes benchmarks/results/options-<gpu>x<n>-<date>.json and prints tables last.
"""

import sys

from benchmarks.calls import options_report as report
from benchmarks.common import arguments as common
from benchmarks.common import recording
from jax_ep._cli.bench.measure import GRAPHS

WORKER = "benchmarks.calls.options_worker"
TINY = (
    *("--transport", "collective", "--tokens", "6", "--num-sms", "8"),
    *common.TINY_CALLS,
)


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128, 1])
    parser.add_argument(
        "--options",
        nargs="+",
        choices=tuple(report.NAMES),
        default=list(report.NAMES),
        help="besides the plain calls",
    )
    parser.add_argument(
        "--num-sms", type=int, nargs="*", default=[16, 24, 32], help="of first halves"
    )
    parser.add_argument("--transport", default="p2p")
    common.add_calls(parser, repeats=7, milliseconds=60, budget=300)
    common.add_place(parser)
    return common.parsed(parser, arguments, TINY)


def specification(args):
    """Returns what the worker measures."""
    names = ("transport", "tokens", "options", "num_sms")
    return common.specification(args, **{name: getattr(args, name) for name in names})


def main(arguments=None):
    args = parse(arguments)
    spec = specification(args)
    names = ("transport", "hidden", "top_k", "experts")
    facts = {name: spec[name] for name in names} | {"flags": GRAPHS}
    run = recording.run("options", "calls.options_cost", args, arguments, **facts)
    record = run.record
    if problem := run.work("options", GRAPHS, spec, module=WORKER):
        record["problems"].append(problem)
    recording.write(recording.of("options", record), record, args.results)
    report.print_tables(record)
    return int(report.unfit(record))


if __name__ == "__main__":
    sys.exit(main())
