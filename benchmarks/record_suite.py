"""Runs the test suite on the devices present and records it in benchmarks/results.

    python benchmarks/record_suite.py [pytest arguments]
    python benchmarks/record_suite.py --gpus 4 2 1 --soak 20000 [pytest arguments]

The first form runs the suite over the transport of JAX_EP_TEST_TRANSPORT, on the GPUs
of CUDA_VISIBLE_DEVICES. The second runs it over every transport on each number of GPUs,
side by side where they suffice (or, with --shared, all at once on the same GPUs), then
benchmarks/soak.py on the most; it leaves out what no device runs. Each run leaves a
file suite-<transport>-<device>x<n>-<date>.json, which says which devices, JAX and
commit, and how many tests passed, failed and were skipped for which reason: the record
behind every claim that something runs on a GPU.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET

import recording

TRANSPORTS = ("p2p", "collective")
HERE = pathlib.Path(__file__).resolve()
# Files of tests that are the same on every machine.
HOST_ONLY = (
    "benchmark_report",
    "demo",
    "formats_errors",
    "generate",
    "import",
    "protocol_model",
    "readme",
)
# A test that takes longer than this writes where its threads stand.
STUCK_S = 240


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


def run_suite(arguments):
    """One suite over one transport; pytest's exit status."""
    transport = os.environ.get("JAX_EP_TEST_TRANSPORT", "collective")
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
        command += ["-o", f"faulthandler_timeout={STUCK_S}"]
        command += [str(recording.ROOT / "tests"), *arguments]
        status = subprocess.run(command, check=False, cwd=folder).returncode
        if not report.exists():
            print(f"no report: pytest ended with {status}")
            return status or 1
        suite = ET.parse(report).getroot().find("testsuite")
        skipped = collections.Counter(
            item.get("message", "") for item in suite.iter("skipped")
        )
        failed = [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    found = devices()
    total = int(suite.get("tests"))
    record = {
        "kind": "test suite",
        "transport": transport,
        "devices": found,
        "commit": recording.commit(),
        "date": recording.date(),
        "python": sys.version.split()[0],
        "arguments": arguments,
        "passed": total - len(failed) - sum(skipped.values()),
        "failed": failed,
        "skipped": dict(skipped),
        "seconds": round(float(suite.get("time")), 1),
    }
    name = recording.short_device(found["kind"])
    recording.write(f"suite-{transport}-{name}x{found['count']}", record)
    print(json.dumps(record, indent=1))
    return status


@dataclasses.dataclass
class Job:
    """A command on some GPUs, its output in a file of its own."""

    name: str
    command: list
    gpus: list
    log: pathlib.Path
    environment: dict = dataclasses.field(default_factory=dict)

    def start(self):
        """Starts it; `process` is its handle."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment, **visible},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started = time.monotonic()
        return self

    def report(self):
        """Prints the end of its output; whether it went well."""
        seconds = time.monotonic() - self.started
        status = self.process.returncode
        print(f"== {self.name}: exit status {status}, {seconds:.0f} s", flush=True)
        text = self.log.read_text(errors="replace")
        print(text[-1500 if status == 0 else -6000 :], flush=True)
        return status == 0


def run_all(args, arguments, folder):
    """Every transport on every number of GPUs, the largest first, then the soak."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    free = visible.split(",") if visible else list(map(str, range(devices()["count"])))
    most = max(args.gpus)
    if most > len(free):
        raise SystemExit(f"{most} GPUs were asked for, {len(free)} are here")
    waiting = []
    ignored = [f"--ignore-glob=*/test_{name}.py" for name in HOST_ONLY]
    for count in sorted(args.gpus, reverse=True):
        for transport in args.transports:
            # What tests p2p by name needs no second run beside the other transport.
            other = ["--ignore-glob=*/test_p2p*"] if transport != "p2p" else []
            words = [*ignored, *other, *arguments]
            waiting.append((count, transport, [sys.executable, str(HERE), *words]))
    if args.soak:
        soak = str(HERE.with_name("soak.py"))
        waiting.append(
            (most, "soak", [sys.executable, soak, "--calls", str(args.soak)])
        )
    running, good = [], True
    everything = list(free)
    while waiting or running:
        while waiting and (args.shared or waiting[0][0] <= len(free)):
            count, transport, command = waiting.pop(0)
            gpus = everything[-count:] if args.shared else free[:count]
            free = [gpu for gpu in free if gpu not in gpus]
            name = f"{transport} on {count}"
            environment = {"JAX_EP_TEST_TRANSPORT": transport}
            job = Job(name, command, gpus, folder / f"{name}.log", environment)
            print(f"-- {name}: GPUs {gpus}", flush=True)
            running.append(job.start())
        time.sleep(0.5)
        for job in list(running):
            if args.limit_s and time.monotonic() - job.started > args.limit_s:
                # Its pytest as well, and what that has started.
                os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()
            if job.process.poll() is not None:
                running.remove(job)
                free += [] if args.shared else job.gpus
                good &= job.report()
    return 0 if good else 1


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="other arguments go to pytest"
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="how many, for each run")
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--soak", type=int, default=0, help="calls of soak.py")
    parser.add_argument("--shared", action="store_true", help="all runs at once")
    parser.add_argument("--limit-s", type=float, help="kill a run that takes longer")
    args, arguments = parser.parse_known_args()
    if not args.gpus:
        return run_suite(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return run_all(args, arguments, pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
