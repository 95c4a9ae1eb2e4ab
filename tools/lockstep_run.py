"""Runs tests in several processes at once, for record_suite.py.

In each process pytest has the plugin tests/support/multiprocess_plugin.py. If the
processes part or one dies, the test that they were running has failed, and they are
started again after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
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
