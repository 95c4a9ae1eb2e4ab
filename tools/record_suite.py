"""Runs the test suite on the devices present and records it in benchmarks/results.

    python -m tools.record_suite [pytest arguments]
    python -m tools.record_suite --gpus 4 2 1 --jobs 24 [pytest arguments]
    python -m tools.record_suite --gpus 1 --one-gpu --transports p2p
    python -m tools.record_suite --processes 4 [--ranks-per-node 2] [--one-gpu]
        --transports shmem [pytest arguments]

The first form runs the suite over the transport of JAX_EP_TEST_TRANSPORT, on the GPUs
of CUDA_VISIBLE_DEVICES. The second runs it over every transport on each number of GPUs,
with one process per test file and --jobs processes side by side, in groups of SHARE
that take turns at the GPUs; it leaves out files that use no device. With --one-gpu it
only runs the files of SHARING, whose tests start processes that share the GPU. The last
form runs each file of SEMANTICS in several processes (lockstep_run.py). They divide the
GPUs among them, or all use the first one with --one-gpu; without GPUs each has a CPU
device.

Each suite writes suite-<transport>-[<p>proc-[<m>nodes-]]<device>x<n>-<date>.json, for
SHARING suite-<transport>-shared-<device>x<n>-<date>.json. It has the devices, JAX and
commit, which tests passed and failed, how many were skipped for which reason, and which
files were not run because --limit-s was over. It is the record behind every claim that
something runs on a GPU. With --resume, all forms but the first run what the newest
record of the same commit, devices and arguments has not run.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.common import processes, recording
from tools import lockstep_run
from tools.suite_files import HOST_ONLY, LONG, P2P_ONLY, SHARING
from tools.suite_record import REPORT_S, Suite, ended, heed_interrupts

TRANSPORTS = ("p2p", "collective")
# A test that takes longer than this prints its threads' stacks.
STUCK_S = 240
# Not enough time to start a file.
FEW_S = 10
ALONE_S = 20  # for the exclusive tests of a file
NOTHING_SELECTED = 5  # pytest's exit status
# Processes in a group, of which one at a time may use the GPUs. With small groups GPUs
# switch between kernels that wait for each other. With one large group they idle, since
# each process waits behind all others after every compilation.
SHARE = 5
# For processes side by side: otherwise the first takes most of a GPU's memory.
SHARING_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def devices():
    # In a process of its own, so that the suite finds the devices free. There are as
    # many CPU devices as tests/conftest.py makes.
    code = (
        "import jax, json; jax.config.update('jax_num_cpu_devices', 8);"
        "d = jax.devices(); print(json.dumps("
        "{'kind': d[0].device_kind, 'count': len(d), 'platform': d[0].platform,"
        " 'jax': jax.__version__}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def pytest_command(report, arguments):
    """Returns a command that writes its report to the file `report`."""
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
    return [*command, "-o", f"faulthandler_timeout={STUCK_S}", *arguments]


def run_suite(arguments):
    """Runs one suite over one transport; returns pytest's exit status."""
    suite = Suite(os.environ.get("JAX_EP_TEST_TRANSPORT", "collective"), arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = pytest_command(report, [str(recording.ROOT / "tests"), *arguments])
        status = subprocess.run(command, check=False, cwd=folder).returncode
        if not report.exists():
            print(f"no report: pytest ended with {status}")
            return status or 1
        suite.add(report)
    suite.write(devices(), resumable=False)
    return status


@dataclasses.dataclass
class Job:
    """A test file, or a part of one, for one suite on some GPUs."""

    suite: Suite
    gpus: list
    file: pathlib.Path
    folder: pathlib.Path
    turns: pathlib.Path  # the folder of the group that it takes turns with
    part: str = "0/1"
    alone: bool = False  # the tests that need GPUs to themselves, or all others

    def arguments(self):
        """Returns the arguments of pytest."""
        marked = "exclusive" if self.alone else "not exclusive"
        return [
            str(self.file),
            "-m",
            marked,
            "--part",
            self.part,
            *(word for word in self.suite.arguments if word != "--one-gpu"),
        ]

    def run(self, deadline):
        """Runs until `deadline`; returns whether no test failed."""
        file = self.file.name if self.part == "0/1" else f"{self.file.name} {self.part}"
        name = f"{self.suite.transport} on {len(self.gpus)}: {file}"
        left = deadline - time.monotonic()
        if left < FEW_S:
            self.suite.not_run.append(file)
            return False
        self.folder.mkdir()
        self.turns.mkdir(exist_ok=True)
        report, log = self.folder / "report.xml", self.folder / "log"
        environment = {
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            "JAX_EP_TEST_TRANSPORT": self.suite.transport,
            "JAX_EP_TEST_GPU_LOCKS": str(self.turns),
        }
        if self.suite.one_gpu:
            environment |= {"JAX_EP_TEST_ONE_GPU": "1"}
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                pytest_command(report, self.arguments()),
                cwd=self.folder,
                env={**SHARING_MEMORY, **os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status, whole = ended(process, left)
        seconds = time.monotonic() - started
        print(f"-- {name}: exit status {status}, {seconds:.0f} s", flush=True)
        if report.exists():
            self.suite.add(report, self.file.name)
        if not (whole and report.exists()):
            self.suite.not_run.append(file)
        good = status in (0, NOTHING_SELECTED)
        if not good:
            print(log.read_text(errors="replace")[-4000:], flush=True)
        return good


def run_all(args, arguments, folder):
    """Runs every transport on every number of GPUs, the largest first."""
    here = devices()
    gpus = processes.visible_gpus(here["count"])
    if max(args.gpus) > len(gpus):
        raise SystemExit(f"{max(args.gpus)} GPUs were asked for, {len(gpus)} are here")
    host_only = {f"test_{name}.py" for name in HOST_ONLY}
    files = [
        file
        for file in lockstep_run.TESTS.glob("*/test_*.py")
        if file.name not in host_only
        and (not args.one_gpu or file.name.startswith(SHARING))
    ]
    # Long files come first, so that none is left alone at the end.
    files.sort(key=lambda file: (file.name not in LONG, -file.stat().st_size))
    suites, jobs, groups = [], [], -(-args.jobs // SHARE)
    for count in sorted(args.gpus, reverse=True):
        for transport in args.transports:
            given = ["--one-gpu"] * args.one_gpu
            suite = Suite(transport, [*given, *arguments])
            suites.append((count, suite))
            if args.resume:
                suite.resume({**here, "count": count})
            # Files that only test p2p run once, not for the other transport again.
            left = suite.left(
                file.name
                for file in files
                if transport == "p2p" or not file.name.startswith(P2P_ONLY)
            )
            for file in (file for file in files if file.name in left):
                parts = LONG.get(file.name, 1)
                for part in range(parts):
                    # Spreads small suites over all GPUs that they can use.
                    first = len(jobs) * count % (len(gpus) // count * count)
                    chosen = gpus[first : first + count]
                    place = folder / str(len(jobs))
                    turns = folder / f"turns{len(jobs) % groups}"
                    part_of = f"{part}/{parts}"
                    jobs.append(Job(suite, chosen, file, place, turns, part_of))
    alone = [
        dataclasses.replace(job, alone=True, folder=folder / f"alone{i}", part="0/1")
        for i, job in enumerate(jobs)
        if job.part.startswith("0/") and "mark.exclusive" in job.file.read_text()
    ]
    end = time.monotonic() + args.limit_s - 2 * REPORT_S
    together = end - ALONE_S * len(alone)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        good = list(pool.map(lambda job: job.run(together), jobs))
    good += [job.run(end) for job in alone]
    good += [suite.write({**here, "count": count}) for count, suite in suites]
    return 0 if all(good) else 1


def run_in_processes(args, arguments, folder):
    """Runs SEMANTICS over each transport, each file in args.processes at once."""
    here, count = devices(), args.processes
    each, environment = "1", {"JAX_PLATFORMS": "cpu"}
    if here["platform"] == "gpu":
        gpus = (
            1 if args.one_gpu else len(processes.visible_gpus(here["count"])) // count
        )
        if not gpus:
            raise SystemExit(f"{count} processes need a GPU each, {here['count']} here")
        each, environment = f"gpu{gpus}", processes.SHARED_GPUS
        if args.one_gpu:
            environment = environment | processes.one_gpu(
                processes.visible_gpus(here["count"])[0], count * args.jobs
            )
    nodes = args.ranks_per_node
    if nodes:
        environment = environment | {"JAX_EP_TEST_RANKS_PER_NODE": str(nodes)}
    here["count"] = 1 if args.one_gpu else count * int(each.removeprefix("gpu"))
    end, good = time.monotonic() + args.limit_s, True
    given = [] if args.files is lockstep_run.SEMANTICS else ["--files", *args.files]
    given += ["--one-gpu"] * args.one_gpu
    for transport in args.transports:
        suite = Suite(transport, [*given, *arguments], count, nodes)
        shared = environment | {"JAX_EP_TEST_TRANSPORT": transport}
        if args.resume:
            suite.resume(here)
        left = suite.left(f"test_{name}.py" for name in args.files)

        def one(name, suite=suite, shared=shared):
            file, started = lockstep_run.file_of(name), time.monotonic()
            place = folder / suite.transport / name
            found = lockstep_run.run(
                [str(file), *arguments], count, each, place, end, shared
            )
            seconds = time.monotonic() - started
            print(f"-- {suite.transport}: {file.name}: {seconds:.0f} s", flush=True)
            suite.take(file.name, found)
            return found.good

        chosen = [name for name in args.files if f"test_{name}.py" in left]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            good = all(list(pool.map(one, chosen))) and good
        good = suite.write(here) and good
    return 0 if good else 1


def parse(arguments):
    """Returns this command's own arguments, and pytest's."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="other arguments go to pytest",
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="how many, for each suite")
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--jobs", type=int, default=4, help="files at a time")
    parser.add_argument("--limit-s", type=float, default=3600, help="for all of it")
    parser.add_argument("--processes", type=int, help="in which tests run together")
    parser.add_argument("--one-gpu", action="store_true", help="for all processes")
    parser.add_argument("--ranks-per-node", type=int, help="forced nodes of shmem")
    parser.add_argument(
        "--files", nargs="+", default=lockstep_run.SEMANTICS, help="with --processes"
    )
    parser.add_argument("--resume", action="store_true", help="run what was not run")
    args, rest = parser.parse_known_args(arguments)
    if (args.resume or args.one_gpu) and not (args.processes or args.gpus):
        parser.error("--resume and --one-gpu must come with --gpus or --processes")
    return args, rest


def main(given=None):
    heed_interrupts()
    args, arguments = parse(given)
    if not (args.processes or args.gpus):
        return run_suite(arguments)
    run = run_in_processes if args.processes else run_all
    with tempfile.TemporaryDirectory() as folder:
        return run(args, arguments, pathlib.Path(folder))


if __name__ == "__main__":
    sys.exit(main())
