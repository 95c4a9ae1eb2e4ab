"""Finds what the host cannot do while a kernel runs, and which launches that holds up.

    python -m benchmarks.limits.launch_waits

Builds launch_waits.cu for this GPU and runs it. A kernel waits on GPU 0 as one of p2p
waits for a peer. Meanwhile a thread loads a module, frees memory and so on, and others
launch small kernels on GPU 0 and, if there are two, on GPU 1, with peer access enabled
as JAX does it. Times are milliseconds on the host. The kernel is let go after `hold_ms`
of the record: what took that long waited for it. With two GPUs the record also says
what waits for a thread that loads a module on GPU 0, and what waits on GPU 0 while one
of its streams waits for a kernel of GPU 1. Takes about 15 s, on two GPUs 40 s.
Writes benchmarks/results/waits-<gpu>x<n>-<date>.json and prints a table.
"""

import itertools
import pathlib

from benchmarks.common import arguments as common
from benchmarks.common import programs

SOURCE = pathlib.Path(__file__).with_suffix(".cu")


def cells(record):
    """Returns a row for each thing done: its time and those of launches, on each GPU.

    A cell has milliseconds, or "waits" if it took as long as the kernel.
    """
    found = {}
    for row in record["rows"]:
        beside = [cell(record, launch["ms"]) for launch in row["launches"]]
        found.setdefault(row["what"], []).extend([cell(record, row["ms"]), *beside])
    return [(what, *times) for what, times in found.items()]


def cell(record, ms):
    return "waits" if ms > 0.8 * record["hold_ms"] else f"{ms:.1f}"


def other_tables(record):
    """Returns the tables of two GPUs, each a pair like (`header`, `cells`)."""
    if "between" not in record:
        return []
    between = "while a thread loads a module on GPU 0, where a kernel runs"
    behind = "while a stream of GPU 0 waits for a kernel of GPU 1"
    return [
        (
            (between, "ms", "launches on GPU 1"),
            times(record, "between", "ms", "launches_ms"),
        ),
        (
            (behind, "ms, done on GPU 0", "launches on GPU 0", "launches on GPU 1"),
            times(record, "behind", "ms", "launches_0_ms", "launches_1_ms"),
        ),
    ]


def times(record, part, *names):
    return [
        (row["what"], *(cell(record, row[name]) for name in names))
        for row in record[part]
    ]


def header(record):
    gpus = range(record["count"])
    beside = [f"launches on GPU {gpu}" for gpu in gpus]
    columns = [(f"ms, done on GPU {gpu}", *beside) for gpu in gpus]
    return ("while a kernel runs on GPU 0", *itertools.chain(*columns))


def parse(arguments):
    return common.parser(__doc__).parse_args(arguments)


def main(arguments=None):
    args = parse(arguments)
    # The module that the program loads while the kernel waits.
    cubin, _ = programs.build(SOURCE, "-cubin")
    record = programs.measure(
        "what waits for a running kernel",
        "waits",
        SOURCE,
        [str(cubin)],
        120,
        args.results,
    )
    for head, rows in [(header(record), cells(record)), *other_tables(record)]:
        for row in [head, *rows]:
            print(" | ".join(row))


if __name__ == "__main__":
    main()
