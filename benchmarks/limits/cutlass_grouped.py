"""Times CUTLASS's grouped matmuls beside a batched cuBLAS matmul on one Hopper GPU.

    python -m benchmarks.limits.cutlass_grouped [--quick] [--cases mid decode]

Builds cutlass_grouped.cu with the headers of `pip install nvidia-cutlass==4.2.0.0` and
runs it, to see what a library would bring to expert matmuls. The sizes are those of
benchmarks/layers/grouped.py: rows times the experts' matrices as layers have them, and
the gradients of rows. The sizes of groups are random, and only the device knows them;
the small kernel that turns them into shapes and pointers is timed, too.
`batched` is cuBLAS with equally many rows per group. All ways are in bfloat16, except
`fp8`: e4m3 with a scale for 1 x 128 of rows and 128 x 128 of weights, and bfloat16 out.
All ways take turns in bursts of calls, on random normal data, for `--seconds` each.
`us` is microseconds per call, the median of the bursts; `ratio` is the median of a
burst's time over that of cuBLAS in the same round; `order` is the faster of two orders
of tiles. Samples of every result are compared with a plain kernel's.
Compiling takes about three minutes: `--keep PROGRAM` only builds, for `--binary
PROGRAM` on a machine without the toolkit. There cuBLAS is loaded from JAX's wheels or
`--cublas PATH`.
Writes benchmarks/results/cutlass-<gpu>x1-<date>.json and prints a table. Exits 1 if a
result is wrong.
"""

import importlib.util
import pathlib
import shutil
import sys

from benchmarks.common import arguments as common
from benchmarks.common import programs, recording
from jax_ep._cli.bench import record

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
SIZES = SOURCE.parent / "grouped" / "cases.cuh"  # has the sizes of CASES
CASES = ("mid", "large-64", "large-256", "many", "decode")
QUICK = ("mid", "decode")
QUICK_SECONDS = 0.2
# Without NDEBUG a check in CUTLASS calls a function between products, which then wait
# for each other: ptxas warns with C7510.
FLAGS = ("--expt-relaxed-constexpr", "-DNDEBUG", "-Xcompiler=-fno-strict-aliasing")
ARCH = "sm_90a"
HEADER = pathlib.Path("cutlass", "cutlass.h")
# How many ways an operation has, and the seconds that each takes besides its time.
WAYS, BESIDES = 7, 1


def found_in(package):
    """Returns the folders of an installed package."""
    found = importlib.util.find_spec(package)
    return [
        pathlib.Path(each)
        for each in (found and found.submodule_search_locations) or []
    ]


def headers(folder):
    """Returns CUTLASS's folders of headers; `folder` has its sources, or is None."""
    sources = (
        [folder] if folder else [s / "source" for s in found_in("cutlass_library")]
    )
    for each in sources:
        if (each / "include" / HEADER).is_file():
            return [each / "include", each / "tools" / "util" / "include"]
    where = (
        f"{folder} has no include/{HEADER}" if folder else "there is no CUTLASS here"
    )
    raise SystemExit(
        f"cutlass_grouped.py: {where}; run pip install nvidia-cutlass==4.2.0.0, or "
        "pass --cutlass FOLDER, a checkout of it"
    )


def cublas():
    """Returns cuBLAS's path in JAX's wheels, or None: then the loader must find it."""
    found = [
        path
        for folder in found_in("nvidia")
        for path in sorted(folder.glob("*/lib/libcublas.so.*"))
    ]
    return found[-1] if found else None


def build(folder):
    flags = [word for each in headers(folder) for word in ("-isystem", str(each))]
    own = ("-I", str(SOURCE.parent))
    return programs.build(SOURCE, *FLAGS, *own, *flags, arch=ARCH)[0]


def sums(rows):
    """Yields sums over all matrices, by case, operation and way.

    These are microseconds, teraflops, the time over cuBLAS's, and whether any is wrong.
    """
    found = {}
    for row in rows:
        found.setdefault((row["case"], row["op"], row["way"]), []).append(row)
    for (case, op, way), each in found.items():
        us = sum(row["us"] for row in each)
        yardstick = sum(row["us"] for row in found[case, op, "batched"])
        operations = sum(row["us"] * row["tflops"] for row in each)
        wrong = any(row["wrong"] for row in each)
        yield case, op, way, us, operations / us, us / yardstick, wrong


def print_table(made):
    columns = ("case", "op", "way", "us", "TFLOP/s", "of cuBLAS")
    print("{:<10} {:<8} {:<36} {:>7} {:>8} {:>9}".format(*columns))
    for case, op, way, us, tflops, ratio, wrong in sums(made["results"]):
        line = f"{case:<10} {op:<8} {way:<36} {us:>7.0f} {tflops:>8.0f} {ratio:>9.3f}"
        print(line + "  WRONG" * wrong)


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--seconds", type=float, help="of each time; 1")
    parser.add_argument("--quick", action="store_true", help="mid and decode, 0.2 s")
    parser.add_argument("--no-fp8", action="store_true")
    parser.add_argument("--seed", type=int, help="of group sizes and operands")
    folder = {"type": pathlib.Path, "metavar": "FOLDER"}
    parser.add_argument("--cutlass", **folder, help="sources of CUTLASS 4.2")
    parser.add_argument("--cublas", type=pathlib.Path, metavar="PATH")
    parser.add_argument("--binary", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--keep", type=pathlib.Path, metavar="PROGRAM")
    args = common.parsed(parser, arguments)
    args.cases = args.cases or (QUICK if args.quick else CASES)
    if args.seconds is None:
        args.seconds = QUICK_SECONDS if args.quick else 1.0
    return args


def words(args):
    """Returns the program's arguments."""
    made = ["--cases", ",".join(args.cases), "--seconds", str(args.seconds)]
    made += ["--seed", str(args.seed), *["--no-fp8"] * args.no_fp8]
    library = args.cublas or cublas()
    return made + (["--cublas", str(library)] if library else [])


def main(arguments=None):
    args = parse(arguments)
    program = args.binary or build(args.cutlass)
    if args.keep:
        shutil.move(program, args.keep)
        print(f"built {args.keep}")
        return 0
    limit = 60 + len(args.cases) * 4 * WAYS * (1.5 * args.seconds + BESIDES)
    report = programs.report(program, words(args), limit)
    for row in report["results"]:
        row["wrong"] = bool(row["wrong"])
    told = recording.command("limits.cutlass_grouped", arguments)
    made = recording.head("CUTLASS", driver=record.driver(), command=told) | report
    recording.write(recording.of("cutlass", made), made, args.results)
    print_table(made)
    return int(any(row["wrong"] for row in made["results"]))


if __name__ == "__main__":
    sys.exit(main())
