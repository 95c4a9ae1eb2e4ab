"""Checks the matmul kernels on one Hopper GPU, without JAX, and times them.

    python -m benchmarks.limits.grouped_kernels [--cases mid] [--only fp8]

Builds grouped_kernels.cu with the kernels of xla_ffi/cuda/matmul. First every kernel
multiplies groups of awkward sizes, and the results are compared with those of a plain
kernel in float64. Then each takes turns with a batched cuBLAS matmul of the same
product in bfloat16, in bursts of calls at the sizes of benchmarks/layers/grouped.py,
for `--seconds` each on random normal data. `us` is microseconds per call, the median of
the bursts; `of cuBLAS` is the median of a burst's time over that of cuBLAS in the same
round. `clocks` are medians of the GPU's clock and power over the whole run.
cuBLAS is loaded from JAX's wheels or `--cublas PATH`.
`--keep PROGRAM` only builds, for `--binary PROGRAM` on a machine without the toolkit.
Writes benchmarks/results/matmuls-<gpu>x1-<date>.json and prints a table. Exits 1 if a
result is wrong.
"""

import importlib.util
import pathlib
import shutil
import sys

from benchmarks.common import arguments as common
from benchmarks.common import clocks, programs, recording

SOURCE = pathlib.Path(__file__).with_suffix(".cu")
KERNELS = recording.ROOT / "xla_ffi" / "cuda"
SIZES = SOURCE.parent / "grouped" / "cases.cuh"  # has the sizes of CASES
CASES = ("mid", "large-64", "large-256", "many", "decode")
PRODUCTS = 11
# Seconds that one product of one case takes besides its times.
BESIDES = 2


def build(source=SOURCE):
    """Builds a program with the kernels of xla_ffi/cuda/matmul; returns its path."""
    matmul = KERNELS / "matmul"
    sources = [*matmul.glob("*.cu"), *matmul.glob("*.cc"), KERNELS / "memory/driver.cc"]
    words = ("-I", str(source.parent), "--fmad=false", *map(str, sources), "-ldl")
    return programs.build(source, *words, arch="sm_90a")


def cublas():
    """Returns cuBLAS's path in JAX's wheels, or None: then the loader must find it."""
    package = importlib.util.find_spec("nvidia")
    found = [
        path
        for folder in (package and package.submodule_search_locations) or []
        for path in sorted(pathlib.Path(folder).glob("*/lib/libcublas.so.*"))
    ]
    return found[-1] if found else None


def print_table(made):
    columns = ("case", "product", "us", "TFLOP/s", "of cuBLAS")
    print("{:<10} {:<26} {:>8} {:>8} {:>9}".format(*columns))
    for row in made["results"]:
        line = f"{row['case']:<10} {row['product']:<26} {row['us']:>8.0f} "
        line += f"{row['tflops']:>8.0f} {row['ratio']:>9.3f}"
        print(line + "  WRONG" * row["wrong"])
    wrong = [row for row in made["checks"] if row["wrong"]]
    print(f"{len(made['checks'])} checks, {len(wrong)} wrong")
    for row in wrong:
        print("WRONG", *row.values())


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=1.0, help="of each time")
    parser.add_argument("--only", default="", help="part of a product's name")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cublas", type=pathlib.Path, metavar="PATH")
    parser.add_argument("--binary", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--keep", type=pathlib.Path, metavar="PROGRAM")
    return common.parsed(parser, arguments)


def words(args):
    """Returns the program's arguments."""
    made = ["--cases", ",".join(args.cases), "--seconds", str(args.seconds)]
    made += ["--seed", str(args.seed)]
    if args.only:
        made += ["--only", args.only]
    library = args.cublas or cublas()
    return made + (["--cublas", str(library)] if library else [])


def main(arguments=None):
    args = parse(arguments)
    program = args.binary or build()
    if args.keep:
        shutil.move(program, args.keep)
        print(f"built {args.keep}")
        return 0
    limit = 120 + len(args.cases) * PRODUCTS * (2.5 * args.seconds + BESIDES)
    with clocks.sampled() as gpu:
        report = programs.report(program, words(args), limit)
    rows = [*report["checks"], *report["results"]]
    for row in rows:
        for name in {"wrong", "wrote_past"} & row.keys():
            row[name] = bool(row[name])
    told = recording.command("limits.grouped_kernels", arguments)
    made = recording.head("matmuls", command=told) | report
    made["clocks"] = gpu
    recording.write(recording.of("matmuls", made), made, args.results)
    print_table(made)
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
