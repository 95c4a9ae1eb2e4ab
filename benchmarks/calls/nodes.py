"""Times calls in several processes and forced nodes on one host against one process.

    python -m benchmarks.calls.nodes [--tokens 4096 128] [--hidden 7168] [--ways ...]

It measures dispatch and combine over p2p, in one process with all GPUs and with one
process per GPU, and over shmem with all ranks on one node, with two ranks per node
(dispatches bundled, and direct) and with one rank per node. Puts are stores over NVLink
here, so this is the cost of staging, of the steps between the halves and of their
launches; it says nothing about a network. The single process and the process per GPU
both exist all the time and run in turn, so that what changes on the host changes for
both.

A time is in microseconds per call: the host's clock over a whole program of many calls,
from a start that all processes know in advance to the end of the last one, divided by
its calls; median, least and most of the repeats. A program takes 4 draws of the routing
in turn, from a printed seed. Results of each way are compared bit for bit with the
collective transport's before and after the timing, and so are checksums of the timed
programs. Wrong ones are marked, and the command then exits 1.
Writes benchmarks/results/nodes-<device>x<n>-<date>.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

from benchmarks.common import arguments as common
from benchmarks.common import processes, recording
from jax_ep._cli.bench import loops
from jax_ep._cli.bench.measure import GRAPHS, specification

AHEAD_S = 0.05  # from sending a command to the start time that it names
ONE = "one process"
MOST_OVER_ONE = 1.03  # the most that a process per GPU may take, over one process
# (in one process?, transport, ranks per node, whether dispatches may be bundled)
WAYS = {
    f"p2p, {ONE}": (True, "p2p", None, True),
    "p2p": (False, "p2p", None, True),
    "shmem, one node": (False, "shmem", None, True),
    "shmem, two a node, bundled": (False, "shmem", 2, True),
    "shmem, two a node, direct": (False, "shmem", 2, False),
    "shmem, one a node": (False, "shmem", 1, False),
    f"collective, {ONE}": (True, "collective", None, True),
    "collective": (False, "collective", None, True),
}


class Job:
    """A set of processes that all get the same commands."""

    def __init__(self, count, each, spec, environment, end):
        port = processes.free_port()
        spec = spec | {"port": port, "processes": count, "devices": each}
        command = [sys.executable, "-m", "benchmarks.calls.nodes_process"]
        self.started = [
            subprocess.Popen(
                [*command, json.dumps(spec | {"process": process})],
                cwd=recording.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for process in range(count)
        ]
        # At `end` all processes are killed, so no wait for an answer lasts longer.
        self.timer = threading.Timer(max(0, end - time.monotonic()), self.kill)
        self.timer.daemon = True
        self.timer.start()

    def tell(self, name, *arguments):
        """Sends a command to all processes; `answers` reads their answers."""
        line = json.dumps([name, arguments]) + "\n"
        for process in self.started:
            process.stdin.write(line)
            process.stdin.flush()

    def answers(self):
        """Reads one answer from each process."""
        found = []
        for process in self.started:
            for line in process.stdout:
                if line.startswith("answer "):
                    found.append(json.loads(line.removeprefix("answer ")))
                    break
                print(line, end="", file=sys.stderr)
            else:
                raise RuntimeError("nodes.py: a process ended without an answer")
        errors = [answer["error"] for answer in found if answer and "error" in answer]
        if errors:
            raise RuntimeError(f"nodes.py: {errors[0]}")
        return found

    def ask(self, name, *arguments):
        """Sends a command and returns the answers."""
        self.tell(name, *arguments)
        return self.answers()

    def kill(self):
        """Kills all processes."""
        for process in self.started:
            with contextlib.suppress(OSError):
                process.kill()

    def close(self):
        """Kills all processes and waits for their end."""
        self.timer.cancel()
        self.kill()
        for process in self.started:
            process.wait()
            process.stdin.close()
            process.stdout.close()


def timed(job, op, calls):
    """Returns microseconds per call of one run, and whether its results were right."""
    for _ in range(10):
        found = job.ask("time", op, time.monotonic() + AHEAD_S)
        if not any(answer["late"] for answer in found):
            break
    us = max(answer["seconds"] for answer in found) / calls * 1e6
    return us, all(answer["right"] for answer in found)


def measure(jobs, ways, repeats):
    """Measures `ways`, at most one per job, in turn; returns their rows."""
    opened, rows, times = {}, {}, {}
    for way in ways:
        one, *how = WAYS[way]
        opened[way] = jobs[one].ask("open", *how)
    for op in ("dispatch", "combine"):
        for _ in range(repeats):
            for way in ways:
                calls = opened[way][0]["calls"][op]
                us, right = timed(jobs[WAYS[way][0]], op, calls)
                times.setdefault((way, op), []).append((us, right, calls))
    for way in ways:
        again = jobs[WAYS[way][0]].ask("close")
        differences = {}
        for answer in [*opened[way], *again]:
            differences |= answer["differences"]
        for op in ("dispatch", "combine"):
            found = times[way, op]
            us = [each for each, _, _ in found]
            if not all(right for _, right, _ in found):
                differences[f"checksum of the timed {op}"] = 1
            rows[way, op] = {
                "way": way,
                "op": op,
                **loops.spread("us", us),
                "calls": found[0][2],
                "differences": differences,
            }
    return rows


def turns(chosen):
    """Groups ways to measure together: a transport in both kinds of job."""
    rest = list(chosen)
    while rest:
        way = rest.pop(0)
        other = way.removesuffix(f", {ONE}")
        yield (way, other) if other != way and other in rest else (way,)
        if other != way and other in rest:
            rest.remove(other)


def run(args, record):
    """Fills the record's rows."""
    spec = specification(args, platform=args.platform)
    environment = os.environ | {
        # Each GPU has two contexts, and windows beside them.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3",
        "NCCL_NVLS_ENABLE": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS}".strip(),
    }
    if args.platform == "gpu":
        # Both kinds of processes see as many GPUs as there are ranks.
        names = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = names.split(",") if names else map(str, range(args.ranks))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(list(names)[: args.ranks])
    end = time.monotonic() + args.budget
    jobs = {}
    try:
        if any(WAYS[way][0] for way in args.ways):
            jobs[True] = Job(1, args.ranks, spec, environment, end)
        if not all(WAYS[way][0] for way in args.ways):
            jobs[False] = Job(args.ranks, 1, spec, environment, end)
        for job in jobs.values():
            record |= job.answers()[0]
        for tokens in args.tokens:
            for job in jobs.values():
                job.tell("case", tokens)
            for job in jobs.values():
                facts = job.answers()[0]
                assert facts["dropped"] == 0, f"{facts['dropped']} rows do not fit"
                assert facts["ranks"] == args.ranks, facts
            for ways in turns(args.ways):
                rows = measure(jobs, ways, args.repeats)
                for row in rows.values():
                    base = rows.get((f"{row['way']}, {ONE}", row["op"]))
                    ratio = row["us"] / base["us"] if base else None
                    row |= {"tokens": tokens, "to_one_process": ratio}
                    record["rows"].append(row)
                    print(line(row), flush=True)
            for job in jobs.values():
                job.ask("forget")
    finally:
        for job in jobs.values():
            job.close()


def line(row):
    """A row as text."""
    text = f"{row['tokens']:6} {row['op']:9} {row['way']:28} {row['us']:9.1f} us"
    text += f" ({row['us_least']:.1f} to {row['us_most']:.1f})"
    if row["to_one_process"]:
        text += f", {row['to_one_process']:.3f} of {ONE}"
    return text + (f"  WRONG: {row['differences']}" if row["differences"] else "")


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128])
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all of GPUs")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    common.add_calls(parser, repeats=9, milliseconds=150, budget=540)
    args = common.parsed(parser, arguments)
    if args.ranks is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            visible.split(",") if visible else os.listdir("/proc/driver/nvidia/gpus")
        )
        args.ranks = len(names)
    if args.ranks < 2:
        parser.error(f"nodes.py: --ranks must be at least 2, got {args.ranks}")
    # In the order of WAYS, on which `turns` relies to find those that belong together.
    nodes = {way: WAYS[way][2] for way in WAYS if way in (args.ways or WAYS)}
    # Forced nodes must be smaller than the group.
    args.ways = [
        way
        for way, node in nodes.items()
        if (node or 0) < args.ranks and (args.ways or not way.startswith("collective"))
    ]
    if not args.ways:
        parser.error(
            "nodes.py: --ways must have one whose nodes are not all ranks, got "
            f"{', '.join(nodes)} of {args.ranks} ranks"
        )
    return args


def slower(rows):
    """Lists the calls that take too long with a process per GPU."""
    return [
        f"{row['op']} of {row['tokens']} tokens takes {row['to_one_process']:.3f} of "
        f"{ONE}'s time, at most {MOST_OVER_ONE} is right"
        for row in rows
        if row.get("way") == "p2p" and (row["to_one_process"] or 0) > MOST_OVER_ONE
    ]


def main(arguments=None):
    args = parse(arguments)
    print(f"seed {args.seed}")
    record = recording.head(
        "nodes",
        command=recording.command("calls.nodes", arguments),
        seed=args.seed,
        count=args.ranks,
        hidden=args.hidden,
        device="unknown",
        rows=[],
        problems=[],
    )
    try:
        run(args, record)
    except (OSError, RuntimeError) as error:
        # Keeps what was measured until then.
        record["problems"].append(str(error))
        print(f"MISSING: {error}")
    record["problems"] += slower(record["rows"])
    recording.write(recording.of("nodes", record), record, args.results)
    wrong = any(row["differences"] for row in record["rows"])
    return 1 if wrong or record["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
