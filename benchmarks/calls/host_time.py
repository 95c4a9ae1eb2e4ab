"""Measures how long a call keeps the host busy, in this commit and an older build.

    python -m benchmarks.calls.host_time --old FOLDER --old-commit HASH [--budget 300]

FOLDER holds an older jax_ep, as `pip install --target FOLDER` leaves it (for GPUs, with
its plugin beside it). Without `--old`, only this commit is measured.
A jitted program makes `--calls` dispatches, or combines, of T tokens per rank, and
nothing else that takes time. On GPUs its time runs from its launch until the host is
free again, without CUDA graphs, whose replays need no host. On CPUs, where the host
does the work, it runs until the results are there. Times are in microseconds per call;
nothing is subtracted.
The builds take turns, each time in a new process that runs each program `--repeats`
times. `least` is the shortest run of all, `median` the median of the processes'
medians, and ratios are this commit's time over the older one's. Results are compared.
Writes benchmarks/results/host-<device>x<n>-<date>.json and prints a table. Exits 1 if
results differ or nothing was measured.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax

import jax_ep
from benchmarks.calls import host_time_worker as worker
from benchmarks.common import arguments as common
from benchmarks.common import recording
from jax_ep._cli.bench import record
from jax_ep._cli.bench.report import number, print_aligned

THIS, OLD = "this", "old"
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
KEYS = ("transport", "op", "tokens")
TINY = (
    *("--tokens", "2", "--calls", "2", "--repeats", "2", "--hidden", "16"),
    *("--experts", "8", "--top-k", "2", "--devices", "2"),
)


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--old", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--old-commit", metavar="HASH", help="what FOLDER was made of")
    parser.add_argument("--platform", choices=("cpu", "gpu"), help="default: found out")
    parser.add_argument("--transports", nargs="+", choices=("p2p", "collective"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--calls", type=int, default=32, help="in a program")
    parser.add_argument("--repeats", type=int, default=100, help="in a process")
    parser.add_argument("--processes", type=int, default=4, help="of each build")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--budget", type=float, default=300, help="seconds in all")
    parser.add_argument("--seed", type=int, help="of routing and tokens")
    common.add_place(parser)
    args = common.parsed(parser, arguments, TINY)
    if (args.old is None) != (args.old_commit is None):
        parser.error("--old and --old-commit go together")
    if args.platform is None:
        no_gpu = record.driver() == "unknown"
        found = jax.default_backend() if args.tiny else "cpu" if no_gpu else "gpu"
        args.platform = found
    if args.transports is None:
        both = ["p2p", "collective"]
        args.transports = both if args.platform == "gpu" else both[1:]
    return args


def specification(args):
    """Returns what the workers measure."""
    names = ("transports", "tokens", "calls", "repeats", "hidden", "experts")
    names += ("top_k", "seed", "platform")
    on_cpu = args.platform == "cpu"
    # Tied: XLA's CPU executor would otherwise run calls side by side, in less time.
    facts = {"tied": on_cpu, "devices": args.devices, "here": args.tiny}
    return {name: getattr(args, name) for name in names} | facts


def apart(spec, folder, output, limit):
    """Runs a worker with the build in `folder`; returns what went wrong, or ""."""
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        "XLA_FLAGS": f"{flags} {NO_GRAPHS}".strip(),
    }
    # -P: the files beside the worker must not be importable.
    command = [sys.executable, "-P", worker.__file__, json.dumps(spec), output]
    try:
        done = subprocess.run(command, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return f"worker killed after {limit:.0f} s"
    return f"worker ended with {done.returncode}" if done.returncode else ""


def measure(spec, folder, limit):
    """Returns a worker's facts about itself, its rows, and what went wrong, or ""."""
    with tempfile.TemporaryDirectory() as made:
        output = pathlib.Path(made, "rows.jsonl")
        if spec["here"]:
            worker.main([json.dumps(spec), str(output)])
            problem = ""
        else:
            problem = apart(spec, folder, str(output), limit)
        lines = output.read_text().splitlines() if output.exists() else []
    head, *rows = [json.loads(line) for line in lines] or [{}]
    return head, rows, problem


def foreign(head, folder):
    """Returns the files that a worker has loaded from outside `folder`."""
    return [
        each
        for each in head.get("files", [])
        if not each.startswith(f"{folder}{os.sep}")
    ]


def joined(found, key):
    """Makes one row of what the processes of each build have measured."""
    row = dict(zip(KEYS, key, strict=True))
    checksums = set()
    for build, processes in found.items():
        rows = [each[key] for each in processes if key in each]
        for kind in ("launched", "done"):
            medians = [each[f"{kind}_us"] for each in rows]
            least = [each[f"{kind}_us_least"] for each in rows]
            if rows:
                row[f"{build}_{kind}_us"] = statistics.median(medians)
                row[f"{build}_{kind}_us_least"] = min(least)
        row[f"{build}_processes"] = len(rows)
        checksums |= {each["checksum"] for each in rows}
    row["wrong"] = len(checksums) > 1
    return row


def with_ratios(row, kind):
    """Adds the times of `kind`, and this commit's over the older build's, to a row."""
    for name in ("us", "us_least"):
        here, old = (row.get(f"{build}_{kind}_{name}") for build in (THIS, OLD))
        row |= {f"{build}_{name}": t for build, t in ((THIS, here), (OLD, old)) if t}
        if here and old:
            row[name.replace("us", "ratio")] = here / old
    return row


def gather(args, builds, made):
    """Measures the builds in turns, every second time in the other order."""
    spec, start, longest = specification(args), time.monotonic(), 0.0
    found = {build: [] for build in builds}
    for turn in range(args.processes):
        left = args.budget - (time.monotonic() - start)
        if turn and left < longest:
            break
        began = time.monotonic()
        for build, folder in list(builds.items())[:: -1 if turn % 2 else 1]:
            limit = max(60.0, args.budget - (time.monotonic() - start))
            head, rows, problem = measure(spec, folder, limit)
            if build == OLD and (others := foreign(head, folder)):
                problem = f"--old {folder}, but loaded were {others}"
                rows = []
            if problem:
                made["problems"].append(f"{build}: {problem}")
            made |= {name: head[name] for name in head if name != "files"}
            found[build].append({tuple(r[k] for k in KEYS): r for r in rows})
            passed = time.monotonic() - start
            print(f"{build}, process {turn + 1}, after {passed:.0f} s", flush=True)
        longest = max(longest, time.monotonic() - began)
    keys = dict.fromkeys(key for each in found.values() for p in each for key in p)
    kind = "done" if args.platform == "cpu" else "launched"
    made["results"] = [with_ratios(joined(found, key), kind) for key in keys]
    made["seconds"] = round(time.monotonic() - start, 1)


def print_table(made):
    """Prints microseconds per call."""
    head = ("transport", "", "T", "this, least", "old", "", "median", "old", "")
    lines = []
    for row in made["results"]:
        cells = []
        for name in ("us_least", "us"):
            times = [row.get(f"{build}_{name}") for build in (THIS, OLD)]
            ratio = row.get(name.replace("us", "ratio"))
            cells += [number(us, 2) if us else "" for us in times]
            cells.append(f"x {ratio:.3f}" if ratio else "")
        wrong = "  RESULTS DIFFER" * row["wrong"]
        lines.append((row["transport"], row["op"], row["tokens"], *cells[:-1]))
        lines[-1] += (cells[-1] + wrong,)
    print_aligned(head, lines)
    for problem in made["problems"]:
        print(f"MISSING: {problem}")


def main(arguments=None):
    args = parse(arguments)
    builds = {THIS: pathlib.Path(jax_ep.__file__).parents[1]}
    if args.old is not None:
        builds[OLD] = args.old.absolute()
    told = recording.command("calls.host_time", arguments)
    facts = specification(args)
    made = recording.head("host time", device="unknown", count=0)
    made |= {"old_commit": args.old_commit, "command": told}
    made |= {name: facts[name] for name in facts if name not in ("here", "devices")}
    made["problems"] = []
    gather(args, builds, made)
    recording.write(recording.of("host", made), made, args.results)
    print_table(made)
    rows = made["results"]
    return int(not rows or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
