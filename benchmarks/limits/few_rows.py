"""Times the kernels for few rows of experts beside those for any number of rows.

    python -m benchmarks.limits.few_rows [--rows 1024 2048]

Builds few_rows.cu with the kernels of xla_ffi/cuda/matmul; runs on one Hopper GPU
without JAX. Both products of 64 experts of hidden 7168 and inner 2048 are made for
tokens with 8 distinct experts each, drawn uniformly. Both ways take turns, with the
same draws, for `--seconds` each. Times are microseconds, medians of bursts; `ratio` is
the median of a burst's time over that of the other way in the same round. `different`
counts the elements of the results that are not the same, bit for bit.
xla_ffi/cuda/matmul/grouped_matmul.cc chooses between the two by this table.
`--keep PROGRAM` only builds, for `--binary PROGRAM` on a machine without the toolkit.
Writes benchmarks/results/few-rows-<gpu>x1-<date>.json and prints a table. Exits 1 if
results differ.
"""

import pathlib
import shutil
import sys

from benchmarks.common import arguments as common
from benchmarks.common import clocks, programs, recording
from benchmarks.limits import grouped_kernels

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
ROWS = 8, 16, 64, 256, 1024, 1536, 2048, 4096
TOP_K = 8
BESIDES = 5  # seconds for a number of rows besides its times


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of a step")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--binary", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--keep", type=pathlib.Path, metavar="PROGRAM")
    args = common.parsed(parser, arguments)
    if any(rows < TOP_K or rows % TOP_K for rows in args.rows):
        parser.error(f"--rows must be multiples of {TOP_K}, the experts of a token")
    return args


def print_table(made):
    print("{:<8} {:>6} {:>8} {:>8} {:>7}".format(*made["results"][0]))
    for row in made["results"]:
        line = f"{row['weights']:<8} {row['rows']:>6} {row['any_us']:>8.1f} "
        line += f"{row['few_us']:>8.1f} {row['ratio']:>7.3f}"
        print(line + f"  {row['different']} DIFFERENT" * bool(row["different"]))


def main(arguments=None):
    args = parse(arguments)
    program = args.binary or grouped_kernels.build(SOURCE)
    if args.keep:
        shutil.move(program, args.keep)
        print(f"built {args.keep}")
        return 0
    words = ["--rows", ",".join(map(str, args.rows)), "--seconds", str(args.seconds)]
    limit = 60 + 2 * len(args.rows) * (2.5 * args.seconds + BESIDES)
    with clocks.sampled() as gpu:
        report = programs.report(program, [*words, "--seed", str(args.seed)], limit)
    told = recording.command("limits.few_rows", arguments)
    made = recording.head("few-rows", command=told) | report
    made["clocks"] = gpu
    recording.write(recording.of("few-rows", made), made, args.results)
    print_table(made)
    return int(any(row["different"] for row in made["results"]))


if __name__ == "__main__":
    sys.exit(main())
