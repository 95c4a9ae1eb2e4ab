"""Runs tests in several processes at once. For record_suite.py.

In each pytest has the plugin tests/support/multiprocess_plugin.py.

If the processes part or one dies, the test that they were at has failed, and they are
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
# The suite of what calls mean, the longest first; other tests start processes or look
# at this one.
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
# Between the end of one process by itself and that of the others by force.
GRACE_S = 1.0
# Less time than it takes to start the processes.
FEW_S = 15.0
TAIL = 6000  # characters of a log


def file_of(name):
    """The file of tests `test_<name>.py`, in whichever folder it is."""
    (file,) = TESTS.glob(f"*/test_{name}.py")
    return file


@dataclasses.dataclass
class Test:
    """What a test came to: "passed", "skipped" or "failed", and why."""

    name: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Run:
    """The tests that ran, in their order, and whether those were all."""

    tests: list[Test] = dataclasses.field(default_factory=list)
    complete: bool = False
    log: str = ""  # of the process that ended badly, if one did

    @property
    def good(self):
        """Whether all tests ran and none failed."""
        return self.complete and all(test.outcome != "failed" for test in self.tests)


def run(arguments, count, devices, folder, deadline, environment=None):
    """Runs pytest with `arguments` in `count` processes until `deadline`.

    Args:
      arguments: of pytest.
      count: processes.
      devices: of each process: "2" of the CPU, "gpu1" GPUs.
      folder: for logs, made here.
      deadline: of time.monotonic().
      environment: what is added to that of this process.
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
            break  # they do not start
        if time.monotonic() < deadline:
            words = " ".join(
                line["apart"] for log in logs for line in log if "apart" in line
            )
            ended = f"the processes parted or one ended in it. {words}\n{found.log}"
            found.tests.append(Test(last["name"], "failed", ended))
        first = last["begins"] + 1
    return found


def _start_and_wait(arguments, count, devices, folder, left, first, environment):
    """Returns how each process ended; None: it was ended by force."""
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
        # The order of sets of strings is the same in all.
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
            # pytest's 1 is a test that failed; its others, and signals, are no end that
            # the others can go on from.
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
    """What a process has written; its last line may be cut short."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _merged(logs):
    """Tests that came to an end in all processes, and the one that did not, if any."""
    ends = [{line["ends"]: line for line in log if "ends" in line} for log in logs]
    begins = {line["begins"]: line for log in logs for line in log if "begins" in line}
    tests, open_test = [], None
    for number, begun in sorted(begins.items()):
        found = [end[number] for end in ends if number in end]
        if len(found) < len(logs):
            open_test = begun
            break
        failed = [line for line in found if line["outcome"] == "failed"]
        # Those in which it did not fail know only that others differ.
        chosen = max(failed or found, key=lambda line: len(line["message"]))
        seconds = max(line["seconds"] for line in found)
        tests.append(Test(begun["name"], chosen["outcome"], chosen["message"], seconds))
    return tests, open_test
