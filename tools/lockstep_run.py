"""Runs tests in several processes at once.

    python -m tools.lockstep_run --processes 4 [--one-gpu] [--ranks-per-node 2]
        [--transport shmem] [--files NAME ...] [pytest arguments]

The processes divide the GPUs among them, or all use the first one with --one-gpu;
without GPUs each has a CPU device. Each file of SEMANTICS, or of --files, runs in all
of them together. Exits 1 if a test failed or --limit-s was over.

In each process pytest has the plugin tests/support/multiprocess_plugin.py. If the
processes part or one dies, the test that they were running has failed, and they are
started again after it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from benchmarks.common import processes, recording

TESTS = recording.ROOT / "tests"
# The tests of what calls mean, the longest first. Other tests start processes or depend
# on this one.
SEMANTICS = (
    "options_grads",
    "options",
    "split",
    "autodiff",
    "quantized_grads",
    "quantized",
    "sharded",
    "vjp",
    "mesh",
    "remat",
    "quantized_experts",
    "combine",
    "dispatch",
    "stats",
    "grad_format",
    "bad_values",
)
# From the end of one process until the others are killed.
GRACE_S = 1.0
# Not enough time to start the processes.
FEW_S = 15.0
TAIL = 6000  # characters of a log that are kept


def file_of(name):
    """Returns the file `test_<name>.py`, in whichever folder it is."""
    (file,) = TESTS.glob(f"*/test_{name}.py")
    return file


@dataclasses.dataclass
class Test:
    """How a test ended: "passed", "skipped" or "failed", and why."""

    name: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Run:
    """The tests that ran, in order, and whether those were all."""

    tests: list[Test] = dataclasses.field(default_factory=list)
    complete: bool = False
    log: str = ""  # the ends of the processes' logs, if one ended badly

    @property
    def good(self):
        """Whether all tests ran and none failed."""
        return self.complete and all(test.outcome != "failed" for test in self.tests)


def run(arguments, count, devices, folder, deadline, environment=None):
    """Runs pytest with `arguments` in `count` processes until `deadline`.

    Args:
      arguments: arguments of pytest.
      count: the number of processes.
      devices: those of each process: "2" is two CPU devices, "gpu1" one GPU.
      folder: where logs go; it is made here.
      deadline: a time of time.monotonic().
      environment: what is added to this process's environment.
    """
    folder.mkdir(parents=True)
    found, first = Run(), 0
    while deadline - time.monotonic() > FEW_S:
        part = folder / str(first)
        part.mkdir()
        left = deadline - time.monotonic()
        codes = _start_and_wait(
            arguments, count, devices, part, left, first, environment
        )
        logs = [_lines(part / f"{process}.jsonl") for process in range(count)]
        ran, last = _merged(logs)
        found.tests += ran
        if all(any("done" in line for line in log) for log in logs):
            found.complete = True
            break
        found.log = "\n".join(
            f"process {process} ended with {code}: "
            + (part / f"{process}.log").read_text(errors="replace")[-TAIL:]
            for process, code in enumerate(codes)
        )
        if last is None:
            break  # they cannot start
        if time.monotonic() < deadline:
            words = " ".join(
                line["apart"] for log in logs for line in log if "apart" in line
            )
            ended = f"the processes parted or one ended in it. {words}\n{found.log}"
            found.tests.append(Test(last["name"], "failed", ended))
        first = last["begins"] + 1
    return found


def _start_and_wait(arguments, count, devices, folder, left, first, environment):
    """Returns how each process ended; None if it was killed."""
    port = processes.free_port()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(recording.ROOT / "pyproject.toml"),
    ]
    command += ["-p", "support.multiprocess_plugin", "-p", "no:xdist"]
    command += ["-p", "no:cacheprovider"]
    command += ["-m", "not multiprocess and not exclusive", *arguments]
    shared = os.environ | {
        # Makes the order of sets of strings the same in all processes.
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(
            [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTEST_ADDOPTS": "",
        "JAX_EP_TEST_FOLDER": str(folder),
        "JAX_EP_TEST_FIRST": str(first),
        "JAX_EP_TEST_LIMIT_S": str(left),
    }
    shared |= environment or {}
    started, ended = [], []
    try:
        for process in range(count):
            own = {"JAX_EP_TEST_PROCESSES": f"{port},{count},{process},{devices}"}
            with (folder / f"{process}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=shared | own,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        end = time.monotonic() + left
        while any(process.poll() is None for process in started):
            codes = [process.poll() for process in started]
            # pytest's 1 means that a test failed. After any other status, or a signal,
            # the other processes cannot go on.
            if any(code not in (None, 0, 1) for code in codes):
                end = min(end, time.monotonic() + GRACE_S)
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in started:
            ended.append(process.poll())
            if ended[-1] is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return ended


def _lines(path):
    """Parses what a process has written; its last line may be cut short."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _merged(logs):
    """Returns the tests that ended in all processes, and the one that did not."""
    ends = [{line["ends"]: line for line in log if "ends" in line} for log in logs]
    begins = {line["begins"]: line for log in logs for line in log if "begins" in line}
    tests, open_test = [], None
    for number, begun in sorted(begins.items()):
        found = [end[number] for end in ends if number in end]
        if len(found) < len(logs):
            open_test = begun
            break
        failed = [line for line in found if line["outcome"] == "failed"]
        # Processes in which the test did not fail only know that others differ.
        chosen = max(failed or found, key=lambda line: len(line["message"]))
        seconds = max(line["seconds"] for line in found)
        tests.append(Test(begun["name"], chosen["outcome"], chosen["message"], seconds))
    return tests, open_test


def visible_gpus():
    """Returns the names of the GPUs, which a process of its own leaves free again."""
    code = "import jax; print(sum(d.platform == 'gpu' for d in jax.devices()))"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    count = int(told.stdout.split()[-1])
    return processes.visible_gpus(count) if count else []


def run_files(args, arguments, folder):
    """Runs each file in `args.processes` at once; returns whether all were good."""
    each, environment = "1", {"JAX_PLATFORMS": "cpu"}
    gpus = visible_gpus()
    if gpus:
        count = 1 if args.one_gpu else len(gpus) // args.processes
        if not count:
            raise SystemExit(f"{args.processes} processes need a GPU each")
        each, environment = f"gpu{count}", processes.SHARED_GPUS
        if args.one_gpu:
            shared = args.processes * args.jobs
            environment = environment | processes.one_gpu(gpus[0], shared)
    environment = environment | {"JAX_EP_TEST_TRANSPORT": args.transport}
    if args.ranks_per_node:
        environment |= {"JAX_EP_TEST_RANKS_PER_NODE": str(args.ranks_per_node)}
    end = time.monotonic() + args.limit_s

    def one(name):
        words = [str(file_of(name)), *arguments]
        place = folder / name
        found = run(words, args.processes, each, place, end, environment)
        for test in found.tests:
            if test.outcome == "failed":
                print(f"{test.name} failed: {test.message}", flush=True)
        if not found.complete:
            print(f"{name} did not come to its end\n{found.log}", flush=True)
        return found

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        every = list(pool.map(one, args.files))
    counts = collections.Counter(test.outcome for each in every for test in each.tests)
    ended = sum(each.complete for each in every)
    print(
        f"{args.transport} in {args.processes} processes on {each}: "
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} "
        f"skipped; {ended} of {len(every)} files came to their end"
    )
    return all(each.good for each in every)


def parse(given):
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="other arguments go to pytest",
    )
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--one-gpu", action="store_true", help="for all processes")
    parser.add_argument("--ranks-per-node", type=int, help="forced nodes of shmem")
    parser.add_argument("--transport", default="p2p")
    parser.add_argument("--files", nargs="+", default=SEMANTICS)
    parser.add_argument("--jobs", type=int, default=4, help="files at a time")
    parser.add_argument("--limit-s", type=float, default=3600, help="for all of it")
    return parser.parse_known_args(given)


def main(given=None):
    args, arguments = parse(given)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if run_files(args, arguments, pathlib.Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
