"""Runs the test suite on the devices present and records it in benchmarks/results.

    python benchmarks/record_suite.py [pytest arguments]
    python benchmarks/record_suite.py --gpus 4 2 1 --jobs 6 [pytest arguments]

The first form runs the suite over the transport of JAX_EP_TEST_TRANSPORT, on the GPUs
of CUDA_VISIBLE_DEVICES. The second runs it over every transport on each number of GPUs,
a file of tests a process, --jobs of them side by side; it leaves out what no device
runs. Each suite leaves a file suite-<transport>-<device>x<n>-<date>.json, which says
which devices, JAX and commit, which tests passed and failed and how many were skipped
for which reason, and which files were not run if --limit-s was over: the record behind
every claim that something runs on a GPU.
"""

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
import threading
import time
import xml.etree.ElementTree as ET

import recording

TRANSPORTS = ("p2p", "collective")
HERE = pathlib.Path(__file__).resolve()
# Files of tests that are the same on every machine.
HOST_ONLY = (
    "benchmark_report",
    "compatibility",
    "demo",
    "formats_errors",
    "generate",
    "import",
    "launch",
    "protocol_model",
    "readme",
    "supply",
)
# Files that choose their transport themselves, none of them collective.
P2P_ONLY = ("test_p2p", "test_processes_gpu", "test_shmem_gpu")
# A test that takes longer than this writes where its threads stand.
STUCK_S = 240
# Less time than it takes to start one.
FEW_S = 10
ALONE_S = 30  # for the exclusive tests of a file
NOTHING_SELECTED = 5  # pytest's exit status
# How a test may end without having passed.
ENDS = ("failure", "error", "skipped")
LONG = (
    "test_p2p.py",
    "test_p2p_formats.py",
    "test_p2p_wires.py",
    "test_p2p_options.py",
    "test_p2p_split.py",
    "test_p2p_order.py",
    "test_dispatch.py",
    "test_combine.py",
    "test_graph_layer.py",
    "test_multiprocess.py",
)


def devices():
    # In a process of its own: the suite is to find the devices free.
    code = (
        "import jax, json; d = jax.devices(); print(json.dumps("
        "{'kind': d[0].device_kind, 'count': len(d), 'platform': d[0].platform,"
        " 'jax': jax.__version__}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


class Suite:
    """What pytest says of the files of one suite."""

    def __init__(self, transport, arguments):
        self.transport, self.arguments = transport, arguments
        self.total, self.seconds = 0, 0.0
        self.skipped, self.failed, self.not_run = collections.Counter(), [], []
        self.tests = collections.Counter()  # that passed, of all parameters together
        self.lock = threading.Lock()

    def add(self, report):
        """Takes a report of pytest's in."""
        suite = ET.parse(report).getroot().find("testsuite")
        with self.lock:
            self._add(suite)

    def _add(self, suite):
        self.total += int(suite.get("tests"))
        self.seconds += float(suite.get("time"))
        self.skipped += collections.Counter(
            item.get("message", "") for item in suite.iter("skipped")
        )
        self.tests += collections.Counter(
            f"{case.get('classname').split('.')[-1]}.py::"
            f"{case.get('name').split('[')[0]}"
            for case in suite.iter("testcase")
            if not any(case.find(end) is not None for end in ENDS)
        )
        self.failed += [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]

    def write(self, found):
        """Writes and prints the record, of a suite on the devices `found`."""
        record = {
            "kind": "test suite",
            "transport": self.transport,
            "devices": found,
            "commit": recording.commit(),
            "date": recording.date(),
            "python": sys.version.split()[0],
            "arguments": self.arguments,
            "passed": self.total - len(self.failed) - sum(self.skipped.values()),
            "failed": self.failed,
            "not_run": self.not_run,
            "skipped": dict(self.skipped),
            "tests": dict(sorted(self.tests.items())),
            "seconds": round(self.seconds, 1),
        }
        name = recording.short_device(found["kind"])
        recording.write(f"suite-{self.transport}-{name}x{found['count']}", record)
        print(json.dumps(record, indent=1))


def pytest_command(report, arguments):
    """A command that leaves its report in the file `report`."""
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
    return [*command, "-o", f"faulthandler_timeout={STUCK_S}", *arguments]


def run_suite(arguments):
    """One suite over one transport; pytest's exit status."""
    suite = Suite(os.environ.get("JAX_EP_TEST_TRANSPORT", "collective"), arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = pytest_command(report, [str(recording.ROOT / "tests"), *arguments])
        status = subprocess.run(command, check=False, cwd=folder).returncode
        if not report.exists():
            print(f"no report: pytest ended with {status}")
            return status or 1
        suite.add(report)
    suite.write(devices())
    return status


@dataclasses.dataclass
class Job:
    """A file of tests, for one suite on some GPUs."""

    suite: Suite
    gpus: list
    file: pathlib.Path
    folder: pathlib.Path
    alone: bool = False  # the tests that need GPUs to themselves, or all others

    def arguments(self):
        """Those of pytest."""
        marked = "exclusive" if self.alone else "not exclusive"
        return [str(self.file), "-m", marked, *self.suite.arguments]

    def run(self, deadline):
        """Runs it until `deadline`; whether no test of it failed."""
        name = f"{self.suite.transport} on {len(self.gpus)}: {self.file.name}"
        left = deadline - time.monotonic()
        if left < FEW_S:
            self.suite.not_run.append(self.file.name)
            return False
        self.folder.mkdir()
        report, log = self.folder / "report.xml", self.folder / "log"
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            "JAX_EP_TEST_TRANSPORT": self.suite.transport,
        }
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                pytest_command(report, self.arguments()),
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                # What the tests have started as well.
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        seconds = time.monotonic() - started
        print(f"-- {name}: exit status {status}, {seconds:.0f} s", flush=True)
        if report.exists():
            self.suite.add(report)
        else:
            self.suite.not_run.append(self.file.name)
        good = status in (0, NOTHING_SELECTED)
        if not good:
            print(log.read_text(errors="replace")[-4000:], flush=True)
        return good


def run_all(args, arguments, folder):
    """Every transport on every number of GPUs, the largest first."""
    here = devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(here["count"])))
    if max(args.gpus) > len(gpus):
        raise SystemExit(f"{max(args.gpus)} GPUs were asked for, {len(gpus)} are here")
    host_only = {f"test_{name}.py" for name in HOST_ONLY}
    files = [
        file
        for file in (recording.ROOT / "tests").glob("test_*.py")
        if file.name not in host_only
    ]
    # The long ones first, so that none is left to the end alone.
    files.sort(key=lambda file: (file.name not in LONG, -file.stat().st_size))
    suites, jobs = [], []
    for count in sorted(args.gpus, reverse=True):
        for transport in args.transports:
            suite = Suite(transport, arguments)
            suites.append((count, suite))
            for file in files:
                # What tests p2p by name needs no second run beside the other transport.
                if transport != "p2p" and file.name.startswith(P2P_ONLY):
                    continue
                # Small suites leave no GPU to the large ones alone.
                first = len(jobs) * count % (len(gpus) // count * count)
                chosen = gpus[first : first + count]
                jobs.append(Job(suite, chosen, file, folder / str(len(jobs))))
    alone = [
        dataclasses.replace(job, alone=True, folder=folder / f"alone{i}")
        for i, job in enumerate(jobs)
        if "mark.exclusive" in job.file.read_text()
    ]
    end = time.monotonic() + args.limit_s
    together = end - ALONE_S * len(alone)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        good = list(pool.map(lambda job: job.run(together), jobs))
    good += [job.run(end) for job in alone]
    for count, suite in suites:
        suite.write({**here, "count": count})
    return 0 if all(good) else 1


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="other arguments go to pytest"
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="how many, for each suite")
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--jobs", type=int, default=4, help="files at a time")
    parser.add_argument("--limit-s", type=float, default=3600, help="for all of it")
    args, arguments = parser.parse_known_args()
    if not args.gpus:
        return run_suite(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return run_all(args, arguments, pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
