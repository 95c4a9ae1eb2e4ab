"""Finds what the host cannot do while a kernel runs, and which launches that holds up.

    python benchmarks/launch_waits.py

Builds benchmarks/launch_waits.cu for this GPU and runs it. A kernel waits on GPU 0 as
one of p2p waits for a peer. Meanwhile a thread loads a module, frees memory and so on,
and others launch small kernels, on GPU 0 and, where there are two, on GPU 1, with peer
access as JAX enables it. The kernel is let go after `hold_ms` of the record: what took
that long waited for it. Takes about 15 s.
Writes benchmarks/results/waits-<gpu>x<n>-<date>.json and prints a table.
"""

import argparse
import itertools
import pathlib

import gpu_limits
import recording


def cells(record):
    """A row for each thing done: the times of it and of launches, on each GPU.

    A time in milliseconds, or "waits" where it is that of the kernel.
    """

    def cell(ms):
        return "waits" if ms > 0.8 * record["hold_ms"] else f"{ms:.1f}"

    found = {}
    for row in record["rows"]:
        beside = [cell(launch["ms"]) for launch in row["launches"]]
        found.setdefault(row["what"], []).extend([cell(row["ms"]), *beside])
    return [(what, *times) for what, times in found.items()]


def header(record):
    gpus = range(record["count"])
    beside = [f"launches on GPU {gpu}" for gpu in gpus]
    columns = [(f"ms, done on GPU {gpu}", *beside) for gpu in gpus]
    return ("while a kernel runs on GPU 0", *itertools.chain(*columns))


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    return parser.parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    nvcc = gpu_limits.find_nvcc()
    program, version = gpu_limits.build(nvcc, "launch_waits.cu")
    cubin, _ = gpu_limits.build(nvcc, "launch_waits.cu", "-cubin")
    report = gpu_limits.run(program, [str(cubin)], 120)
    record = {
        "kind": "what waits for a running kernel",
        "driver": gpu_limits.driver(),
        "nvcc": version,
        "commit": recording.commit(),
        "date": recording.date(),
        **report,
    }
    name = recording.short_device(record["device"])
    recording.write(f"waits-{name}x{record['count']}", record, args.results)
    print(" | ".join(header(record)))
    for row in cells(record):
        print(" | ".join(row))


if __name__ == "__main__":
    main()
