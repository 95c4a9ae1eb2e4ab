"""Checks and times the fused window calls on all GPUs of this host, without JAX.

    python benchmarks/window_kernels.py [--keep PROGRAM] [--nvcc FLAG]... [option]...

Builds benchmarks/window_kernels.cu with the kernels of xla_ffi/cuda and runs it with
all other options, among them
    --tokens 128,4096  --sms 0,24,132  --kinds dbc  --capacity worst  --no-check
    --format nvfp4  --tiled  --quantized  --alignment 128
A built program's own `--help` has them all. `--keep` leaves the program at a path, for
a profiler or for more runs, and does not run it. `--nvcc=-lineinfo` gives the compiler
a further flag.
Status: the program's, 1 for a wrong result, 2 for a wait that failed.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

import gpu_limits
import recording

KERNELS = ("window_dispatch", "window_cached_dispatch", "window_combine")
FLAGS = ("-O3", "-std=c++20", "-arch=sm_90", "--fmad=false", "--Werror=all-warnings")
# The host adds up what the GPUs do, and rounds as often.
HOST_FLAGS = "-Xcompiler=-Wall,-Wextra,-ffp-contract=off,-pthread"


def build(program, flags, folder):
    nvcc = gpu_limits.find_nvcc()
    sources = [recording.ROOT / "xla_ffi" / "cuda" / f"{name}.cu" for name in KERNELS]
    sources.append(recording.ROOT / "benchmarks" / "window_kernels.cu")
    objects = [folder / f"{source.stem}.o" for source in sources]
    include = str(recording.ROOT / "xla_ffi")
    common = [nvcc, *FLAGS, HOST_FLAGS, *flags]
    # Side by side: the kernels take a while each.
    compilers = [
        subprocess.Popen([*common, "-I", include, "-c", str(source), "-o", str(made)])
        for source, made in zip(sources, objects, strict=True)
    ]
    # All of them have to end before their folder goes.
    statuses = [compiler.wait() for compiler in compilers]
    if any(statuses):
        sys.exit("benchmarks/window_kernels.py: the build failed, see above")
    subprocess.run([*common, *map(str, objects), "-o", str(program)], check=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--keep", type=pathlib.Path, metavar="PROGRAM")
    parser.add_argument("--nvcc", action="append", default=[], metavar="FLAG")
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        program = arguments.keep or pathlib.Path(folder, "window_kernels")
        build(program, arguments.nvcc, pathlib.Path(folder))
        if arguments.keep:
            print(f"built {program}")
            return 0
        return subprocess.run([str(program), *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
