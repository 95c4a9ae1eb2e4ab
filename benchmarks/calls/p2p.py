"""Times transport p2p beside the link's peak, transport collective and JAX's own path.

    python -m benchmarks.calls.p2p [--quick] [--num-sms 16 24 32] [--only p2p]
    python -m benchmarks.calls.p2p --format mxfp8 --combine-format fp8_block128
    python -m benchmarks.calls.p2p --formats bf16 fp8_block128 mxfp8 mxfp4 nvfp4
    python -m benchmarks.calls.p2p --formats bf16 fp8_block128 --codes fp8_block128 \
        --tokens 128 4096

On all GPUs of this process, in one run, it measures the peak of peer writes (a copy
kernel on every GPU at once), then dispatch and combine over each transport, then the
same by sorting and `jax.lax.ragged_all_to_all` (jax_ep/_cli/bench/ragged.py), with
XLA's default flags and with others (RAGGED of jax_ep/_cli/bench/measure.py). Routing
is drawn from a printed seed: a program takes 4 draws in turn. Tokens are random.
`recv_capacity` is 1.25 * T * K rounded up to 128, or what skewed routing needs, and
`zero_tail=False`; one more row has the defaults.

With several `--formats`, dispatch is measured in each of them, one after the other on
each case, so that their times can be compared. Combine is measured with the first of
them and, given a `--combine-format`, also in that format, with the second. `--codes`
names formats whose dispatch is measured once more with tokens that are quantised
already (`token_scales`); the quantisation itself is not timed. JAX's own path has no
formats.

A time is in microseconds per call: the host's clock over a whole program of many calls
on all GPUs, divided by its calls; nothing is subtracted; the median of the repeats.
GB/s count the bytes of the rank that sends or receives most: a row for each (token,
other rank). Results are compared bit for bit with the collective transport's (ragged's
sums within a tolerance). Wrong ones are marked, and the command then exits 1.

Writes benchmarks/results/p2p-<gpu>x<n>-<date>.json. If the format is not bf16, the name
begins with the format. A record of several formats is formats-<gpu>x<n>-<date>.json,
with `--codes` codes-<gpu>x<n>-<date>.json. With one format it draws a picture beside
the record if matplotlib is installed, and prints a table last. `jax-ep bench` times the
same calls for users; this program adds what the docs' tables need.
"""

import sys

from benchmarks.common import arguments as common
from benchmarks.common import recording
from jax_ep import formats
from jax_ep._cli.bench import draw, measure, report

# The arguments that --tiny stands for: every kind of case that runs on CPUs.
TINY = (
    *("--transports", "collective", "ragged", "--routing", "uniform", "zipf"),
    *("--tokens", "8", "--num-sms", "8", *common.TINY_CALLS),
)


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="p2p, few T, uniform")
    parser.add_argument("--tokens", type=int, nargs="+", help="T, in this order")
    parser.add_argument("--ragged-tokens", type=int, nargs="+", help="T of ragged")
    parser.add_argument("--routing", nargs="+", choices=("uniform", "zipf"))
    parser.add_argument(
        "--transports",
        "--only",
        nargs="+",
        choices=measure.TRANSPORTS,
        help="default all",
    )
    parser.add_argument(
        "--num-sms", type=int, nargs="+", default=[], help="besides the default"
    )
    common.add_calls(parser, repeats=7, milliseconds=100, budget=300)
    common.add_place(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--formats", "--format", nargs="+", default=["bf16"], help="dispatch_format"
    )
    parser.add_argument(
        "--codes",
        nargs="+",
        default=[],
        metavar="FORMAT",
        help="formats that are also measured with tokens that are quantised already",
    )
    parser.add_argument("--combine-format", help="default None")
    args = common.parsed(parser, arguments, TINY)
    chosen = plan(args)
    if "ragged" in chosen.transports and not chosen.plain:
        parser.error("ragged has no formats: leave it, or --formats and the like, out")
    if plain := [name for name in args.codes if not quantised(name)]:
        parser.error(f"--codes must be of quantised formats, got {plain}")
    return args


def quantised(name):
    """Whether this is a quantised format."""
    return name in formats.names() and formats.is_quantized(name)


def plan(args):
    """Returns what to measure."""
    given = dict(vars(args))
    del given["results"]
    return measure.Plan(here=given.pop("tiny"), **given)


def main(arguments=None):
    args = parse(arguments)
    chosen = plan(args)
    command = recording.command("calls.p2p", arguments)
    record = measure.measure(chosen, command, recording.ROOT)
    path = save(args, record)
    if draw.available() and not chosen.several:
        draw.save(record, path.with_suffix(".svg"))
    report.print_table(record)
    return 1 if report.failures(record) else 0


def save(args, record):
    # Records of bfloat16, which the README's table shows, have no format in the name.
    names, kind = [args.combine_format, *args.formats], "p2p"
    if plan(args).several:
        names, kind = [], "codes" if args.codes else "formats"
    if args.quick:
        kind = f"quick-{kind}"
    for name in names:
        if name not in (None, "bf16"):
            kind = f"{name}-{kind}"
    return recording.write(recording.of(kind, record), record, args.results)


if __name__ == "__main__":
    sys.exit(main())
