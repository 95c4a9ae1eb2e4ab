"""Arguments that benchmarks have in common."""

import argparse
import pathlib
import secrets
import sys
import tempfile

from benchmarks.common import recording
from jax_ep._cli.bench import measure

# A part of what --tiny stands for.
TINY_CALLS = (
    *("--hidden", "128", "--experts", "8", "--top-k", "2", "--devices", "2"),
    *("--repeats", "1", "--milliseconds", "0.001", "--unrolled", "2"),
)


def parser(doc):
    """Makes a parser with `--results`, described by the docstring's first line."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    return made


def add_tiny(parser):
    """Adds `--tiny`, which `parsed` handles."""
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="try every kind of case on a CPU, in this process: the times mean nothing",
    )


def add_place(parser):
    """Adds where to measure."""
    parser.add_argument("--devices", type=int, help="how many, default: all")
    add_tiny(parser)


def add_sizes(parser):
    """Adds the sizes of calls."""
    parser.add_argument("--hidden", type=int, default=measure.Plan.hidden)
    parser.add_argument("--experts", type=int, default=measure.Plan.experts)
    parser.add_argument("--top-k", type=int, default=measure.Plan.top_k)
    parser.add_argument("--seed", type=int, help="of routing and tokens")


def add_times(parser, repeats, milliseconds, budget):
    """Adds how long to measure."""
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--milliseconds", type=float, default=milliseconds, help="per program or repeat"
    )
    parser.add_argument("--budget", type=float, default=budget, help="seconds in all")


def add_calls(parser, repeats, milliseconds, budget):
    """Adds all that measurements of calls in programs have in common."""
    add_sizes(parser)
    add_times(parser, repeats, milliseconds, budget)
    parser.add_argument("--unrolled", type=int, default=0, help="calls in a loop body")


def add_merge(parser):
    """Adds `--merge`, the records that merging.py joins."""
    parser.add_argument(
        "--merge", type=pathlib.Path, nargs="+", default=[], help="records to join"
    )


def parsed(parser, arguments, tiny=()):
    """Parses arguments, of which --tiny stands for `tiny`, and draws a missing seed."""
    given = sys.argv[1:] if arguments is None else arguments
    if "--tiny" in given:
        # Kept apart from the records that the docs' tables are made from.
        folder = pathlib.Path(tempfile.gettempdir(), "jax_ep_tiny")
        given = [*tiny, "--results", str(folder), *given]
    args = parser.parse_args(given)
    if args.seed is None:
        args.seed = secrets.randbits(31)
    return args


def specification(args, **changes):
    """Returns a worker's specification for bfloat16 calls, and where it runs."""
    return measure.specification(args, **changes, **place(args))


def place(args):
    """Says where a worker runs: on how many devices, and whether in this process."""
    return {"devices": args.devices, "here": args.tiny}
