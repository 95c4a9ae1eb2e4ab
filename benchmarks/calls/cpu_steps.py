"""Times the CPU steps of the collective transport on one core against memcpy.

    python -m benchmarks.calls.cpu_steps [--tokens 128 1024 4096] [--core N]

The steps are those of rank 0 in a group of 4: hidden 7168 in bfloat16, top-8 of 256
experts drawn uniformly, `recv_capacity` 1.25 * T * K rounded up to 128,
`zero_tail=False`. `pack` and `combine_unpack` run at the source, `unpack` and
`combine_pack` at the destination of four sources. All memory has been written before.
Times are CPU time of the thread, in microseconds. A step's bytes are the payload rows
that it must read from memory, each counted once however many copies it feeds, plus the
rows that it writes. Indices and weights are not counted; `pack` in a quantised format
reads bfloat16 and writes codes and scales. `ratio` is the speed of the step relative to
one contiguous memcpy that reads and writes as many bytes, run right after it: the
median over all repeats, with the extremes beside it. The last column compares the step
with a loop of memcpy over exactly its copies, one row at a time.
Writes benchmarks/results/cpu-<date>.json and prints a table.

Needs cmake, g++ and, in this Python, nanobind and jaxlib (pip install nanobind jaxlib).
"""

import json
import os
import pathlib
import platform
import re
import secrets
import subprocess
import sys

from benchmarks.common import arguments as common
from benchmarks.common import recording

BUILD = recording.ROOT / "build" / "bench"


def build():
    """Configures and builds the program; returns its path and the compiler's name."""
    environment = dict(os.environ)
    scripts = str(pathlib.Path(sys.executable).parent)
    environment["PATH"] = scripts + os.pathsep + environment.get("PATH", "")
    options = [
        "-DJAX_EP_BENCHMARKS=ON",
        "-DJAX_EP_CUDA=OFF",
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    commands = [
        ["cmake", "-S", str(recording.ROOT / "xla_ffi"), "-B", str(BUILD), *options],
        ["cmake", "--build", str(BUILD), "--target", "cpu_steps"],
    ]
    for command in commands:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"cpu_steps.py: the build failed\n{done.stdout}")
    cache = (BUILD / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.MULTILINE).group(1)
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    )
    return BUILD / "cpu_steps", version.stdout.splitlines()[0]


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def print_table(results):
    print(
        f"{'T':>6}{'step':>18}{'rows read':>11}{'written':>9}{'us':>9}{'GB/s':>7}"
        f"{'memcpy us':>11}   ratio (least to most)   to memcpy row by row"
    )
    for r in results:
        spread = f"({r['ratio_low']:.2f} to {r['ratio_high']:.2f})"
        by_row = r.get("ratio_to_memcpy_rows")
        by_row = "" if by_row is None else f"{by_row:.2f}"
        print(
            f"{r['tokens']:>6}{r['step']:>18}{r['rows_read']:>11}{r['rows_written']:>9}"
            f"{r['step_us']:>9.0f}{r['gb_per_s']:>7.1f}{r['memcpy_us']:>11.0f}"
            f"   {r['ratio']:5.2f} {spread:<18}{by_row:>19}"
        )


def main(arguments=None):
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--draws", type=int, default=5, help="of the routing")
    parser.add_argument("--repeats", type=int, default=7, help="of each draw")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args(arguments)
    program, compiler = build()
    seed = secrets.randbits(32)
    numbers = [seed, args.draws, args.repeats, *args.tokens]
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {args.core})
    try:
        run = subprocess.run(
            [str(program), *map(str, numbers)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    finally:
        os.sched_setaffinity(0, cores)
    record = recording.head(
        "cpu steps on one core",
        machine=processor(),
        compiler=compiler,
        seed=seed,
        draws=args.draws,
        repeats=args.repeats,
        zero_tail=False,
        capacity_factor=1.25,
    )
    record |= json.loads(run.stdout)
    print_table(record["results"])
    recording.write("cpu", record, args.results)


if __name__ == "__main__":
    main()
