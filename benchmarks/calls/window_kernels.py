"""Checks and times the fused window calls on all GPUs of this host, without JAX.

    python -m benchmarks.calls.window_kernels [--keep PROGRAM] [--record] [option]...

Builds window_kernels.cu with the kernels of xla_ffi/cuda and runs it. All other options
go to the program, among them
    --tokens 128,4096  --sms 0,24,132  --kinds dbc  --capacity worst  --no-check
    --format nvfp4  --tiled  --quantized  --halves  --alignment 128
The built program's own `--help` lists them all. It compares results with the host's and
prints microseconds per call: those of the slowest rank in a CUDA graph of many calls,
the median of 7 launches.
`--keep` leaves the program at a path, for a profiler or for more runs, and does not run
it. `--record` also writes the times to
benchmarks/results/kernels-<gpu>x<n>-<date>.json, if nothing was wrong.
`--nvcc=-lineinfo` passes another flag to the compiler.
Exits with the program's status: 1 for a wrong result, 2 for a failed wait, 3 if it
cannot run.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks.common import recording
from jax_ep._cli.bench import cuda

KERNELS = (
    "window/dispatch",
    "window/dispatch_cached",
    "window/combine",
    "low_latency/dispatch",
    "low_latency/combine",
    "window/dispatch_halves",
    "window/combine_send",
    "window/combine_recv",
)
FLAGS = ("-O3", "-std=c++20", "-arch=sm_90", "--fmad=false", "--Werror=all-warnings")
# The host computes the same sums as the GPUs, and must round as often.
HOST_FLAGS = "-Xcompiler=-Wall,-Wextra,-ffp-contract=off,-pthread"
HEAD = re.compile(r"(\d+) x (.+), seed (\d+)")
LINE = re.compile(
    r"(dispatch|cached dispatch|combine) +(\d+) +(\d+)" + r" +([\d.]+)" * 3
)


def build(program, flags, folder):
    nvcc = cuda.find_nvcc()
    sources = [recording.ROOT / "xla_ffi" / "cuda" / f"{name}.cu" for name in KERNELS]
    sources.append(pathlib.Path(__file__).with_suffix(".cu"))
    objects = [folder / f"{i}-{s.stem}.o" for i, s in enumerate(sources)]
    include = str(recording.ROOT / "xla_ffi")
    common = [nvcc, *FLAGS, HOST_FLAGS, *flags]
    # Side by side, since each takes a while to compile.
    compilers = [
        subprocess.Popen([*common, "-I", include, "-c", str(source), "-o", str(made)])
        for source, made in zip(sources, objects, strict=True)
    ]
    # All of them have to end before their folder is deleted.
    statuses = [compiler.wait() for compiler in compilers]
    if any(statuses):
        sys.exit("window_kernels.py: the build failed, see above")
    subprocess.run([*common, *map(str, objects), "-o", str(program)], check=True)


def record_of(lines, options):
    """Makes a record of what the program printed."""
    head = next(match for line in lines if (match := HEAD.fullmatch(line)))
    rows = [match.groups() for line in lines if (match := LINE.fullmatch(line))]
    return recording.head(
        "window kernels",
        count=int(head[1]),
        device=head[2],
        seed=int(head[3]),
        command=recording.command("calls.window_kernels", options),
        checked=[line for line in lines if line.startswith("checked")],
        results=[
            {
                "call": call,
                "tokens": int(tokens),
                "sms": int(sms),
                "us": float(us),
                "gb_s": float(gb_s),
                "floor_us": float(floor_us),
            }
            for call, tokens, sms, us, gb_s, floor_us in rows
        ],
    )


def run(program, options, records, folder=recording.RESULTS):
    """Runs the program, showing its lines as they come; returns its exit status."""
    command = [str(program), *options]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if records and process.returncode == 0:
        made = record_of(lines, options)
        recording.write(recording.of("kernels", made), made, folder)
    return process.returncode


def parse(arguments):
    """Returns this command's own arguments, and those for the program."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--keep", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    parser.add_argument("--nvcc", action="append", default=[], metavar="FLAG")
    return parser.parse_known_args(arguments)


def main(given=None):
    arguments, options = parse(given)
    with tempfile.TemporaryDirectory() as folder:
        program = arguments.keep or pathlib.Path(folder, "window_kernels")
        build(program, arguments.nvcc, pathlib.Path(folder))
        if arguments.keep:
            print(f"built {program}")
            return 0
        return run(program, options, arguments.record, arguments.results)


if __name__ == "__main__":
    sys.exit(main())
