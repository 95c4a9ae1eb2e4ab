"""Runs soak.py in several processes at once, which make the same calls.

    python -m benchmarks.soak.processes --processes 4 [--one-gpu] [--ranks-per-node 2]
        [arguments of soak.py]

Each process has a GPU, or with --one-gpu all share the first one, which runs them in
turn; with --platform cpu each has a CPU device. Only one thread per process launches
calls, since those of two threads would reach the devices of several processes in
different orders. Another one compiles and runs programs without calls, unless
--no-compiling is given. Prints what they found together, and writes
processes-soak-<transport>-<p>proc-[<m>nodes-]<device>x<n>-<date>.json to --folder if
that is given.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks.common import processes, recording
from benchmarks.soak import program, soak
from benchmarks.soak import run as soak_run
from jax_ep._cli.bench.process import ep_mesh

CHUNK = 8  # launches between two checks of the clock
START_S = 240  # for handles and compilation
SLACK_S = 60
GROWS = ("checks", *program.STATISTICS)  # what is summed over the processes


def arguments():
    """Makes a parser of the arguments of soak.py and of this command."""
    parser = soak.arguments()
    parser.description = (__doc__ or "").partition("\n")[0]
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--one-gpu", action="store_true", help="for all of them")
    parser.add_argument("--ranks-per-node", type=int, help="forced nodes of shmem")
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="gpu")
    return parser


# ---- A process -----------------------------------------------------------------------


def local(results):
    """Returns this process's part of results, in the order of ranks."""
    import jax

    return jax.tree.map(processes.local, results)


class Together:
    """Calls soak_run.together in steps on which the processes agree."""

    def __init__(self):
        self.client, self.steps = processes.client(), itertools.count()

    def go_on(self, own, own_says):
        """Whether process 0 wants to go on and no process has failed."""
        step = next(self.steps)
        self.client.key_value_set(f"soak/{step}/{own}", json.dumps(own_says))
        said = [
            json.loads(self.client.blocking_key_value_get(f"soak/{step}/{i}", 300_000))
            for i in range(self.count)
        ]
        return said[0] and None not in said

    def __call__(self, launchers, compiler, deadline, launches):
        import jax

        own, self.count = jax.process_index(), jax.process_count()
        (launcher,) = launchers
        while True:
            first = launcher.launches
            most = min(launches, first + CHUNK)
            soak_run.together(launchers, compiler, float("inf"), most)
            says = time.monotonic() < deadline and not launcher.done
            if launcher.error or compiler.error:
                says = None
            go_on = self.go_on(own, says)
            print(f"process {own}: {launcher.launches} launches", flush=True)
            if not go_on or launcher.launches >= launches:
                return


def process(args, port, own):
    """Runs one of the processes, which prints its record as one line."""
    # Ends the process even if it hangs; jax.distributed ignores SIGTERM.
    signal.alarm(5 + int(limit_s(args)))
    processes.join(port, args.processes, own, args.platform)
    record = soak.soaked(ep_mesh(), args, together=Together(), fetch=local)
    print("result: " + json.dumps(record), flush=True)
    if record["error"]:
        os._exit(1)
    processes.leave(own, args.processes)


# ---- All of them ---------------------------------------------------------------------


def merged(args, records):
    """Merges the processes' records into one, with sums of what ranks count."""
    first = records[0]
    errors = [record["error"] for record in records if record["error"]]
    failures = [record["first_failure"] for record in records]
    lost = [one["free_memory_start"] - one["free_memory_end"] for one in records]
    worst = records[lost.index(max(lost))]
    heaps = [(one["heap_end"] or 0) - (one["heap_start"] or 0) for one in records]
    heap = records[heaps.index(max(heaps))]
    counts = sum(
        (collections.Counter(r["failures"]) for r in records),
        start=collections.Counter(),
    )
    if len({record["calls"] for record in records}) > 1 and not errors:
        errors = ["the processes made different numbers of calls"]
    return first | {
        "processes": args.processes,
        "ranks_per_node": args.ranks_per_node,
        "one_gpu": args.one_gpu,
        "command": command(args),
        **{name: sum(record[name] for record in records) for name in GROWS},
        "compilations": sum(record["compilations"] for record in records),
        "failures": dict(counts),
        "first_failure": next(filter(None, failures), None),
        "error": errors[0] if errors else None,
        "free_memory_start": worst["free_memory_start"],
        "free_memory_end": worst["free_memory_end"],
        "heap_start": heap["heap_start"],
        "heap_end": heap["heap_end"],
    }


def command(args):
    """Returns the command that runs the same again."""
    words = f"--processes {args.processes}" + " --one-gpu" * args.one_gpu
    if args.ranks_per_node:
        words += f" --ranks-per-node {args.ranks_per_node}"
    if args.platform == "cpu":
        words += " --platform cpu"
    own = soak.command(args).replace("soak.soak", f"soak.processes {words}")
    return own.replace(" --threads 1", "")


def limit_s(args):
    """Returns the seconds that the processes may take."""
    return START_S + SLACK_S + 60 * (args.minutes or 30)


def run(args, given):
    """Starts the processes and waits for them; returns the exit status."""
    limit = limit_s(args)
    environment = dict(os.environ)
    if args.platform == "gpu":
        environment |= processes.SHARED_GPUS
    if args.one_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        environment |= processes.one_gpu(visible[0])
    port = str(processes.free_port())
    with tempfile.TemporaryDirectory() as folder:
        logs = [pathlib.Path(folder) / f"{own}.log" for own in range(args.processes)]
        started = []
        for own, log in enumerate(logs):
            worker = [sys.executable, "-m", "benchmarks.soak.processes", *given]
            worker += ["--process", port, str(own)]
            with log.open("wb") as output:
                started.append(
                    subprocess.Popen(
                        worker,
                        cwd=recording.ROOT,
                        env=environment,
                        stdout=output,
                        stderr=output,
                    )
                )
        # If SIGTERM stops this command, it still says how far it came and leaves no
        # process behind.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            wait(started, time.monotonic() + limit)
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            for one in started:
                one.send_signal(signal.SIGKILL)
                one.wait()
        texts = [log.read_text(errors="replace") for log in logs]
    found = []
    for own, text in enumerate(texts):
        results = [line for line in text.splitlines() if line.startswith("result: ")]
        if not results:
            print(f"process {own} returned no result:\n{text[-3000:]}")
            continue
        found.append(json.loads(results[-1].removeprefix("result: ")))
    if len(found) < args.processes:
        return 1
    record = merged(args, found)
    name = f"processes-soak-{record['transport']}-{args.processes}proc-"
    if args.ranks_per_node:
        name += f"{-(-args.processes // args.ranks_per_node)}nodes-"
    devices = 1 if args.one_gpu else args.processes
    name += f"{recording.short_device(record['device'])}x{devices}"
    return soak.write(record, name, args.folder)


def wait(started, deadline):
    """Waits until all have ended, one has failed, or time is up."""
    while time.monotonic() < deadline:
        codes = [one.poll() for one in started]
        if None not in codes or any(codes):
            return
        time.sleep(0.2)


def parse(given):
    parser = arguments()
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    args.threads = 1
    soak.settle(args)
    return args


def main(given=None):
    given = sys.argv[1:] if given is None else given
    args = parse(given)
    if args.process is None:
        return run(args, [*given, "--seed", str(args.seed)])
    port, own = args.process
    return process(args, port, int(own))


if __name__ == "__main__":
    sys.exit(main())
