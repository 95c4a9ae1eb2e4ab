"""Collects the record of a test suite, for record_suite.py."""

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

from benchmarks.common import recording

# How a test may end without having passed.
ENDS = ("failure", "error", "skipped")
REPORT_S = 8  # for pytest to report after its time is up


@dataclasses.dataclass
class Found:
    """How tests have ended."""

    # How many passed, by file and name, with all parameters together.
    tests: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    # How many were skipped, by reason.
    skipped: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )
    failed: list = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __add__(self, other):
        return Found(
            self.tests + other.tests,
            self.skipped + other.skipped,
            self.failed + other.failed,
            self.seconds + other.seconds,
        )


class Suite:
    """What pytest reports about the files of one suite."""

    def __init__(self, transport, arguments, processes=None, ranks_per_node=None):
        self.transport, self.arguments = transport, arguments
        self.processes, self.ranks_per_node = processes, ranks_per_node
        self.files = collections.defaultdict(Found)  # of this run, by file
        self.not_run = []
        self.resumed = None  # the record that this run goes on with
        self.earlier = {}  # what that record has, by file
        self.lock = threading.Lock()

    @property
    def one_gpu(self):
        """Whether processes that tests start share a GPU."""
        return "--one-gpu" in self.arguments

    def add(self, report, file=""):
        """Adds a report of pytest, of one file or of all of them."""
        suite = ET.parse(report).getroot().find("testsuite")
        with self.lock:
            self._add(suite, self.files[file])

    def _add(self, suite, found):
        # A case without a class is a test that was interrupted when its file's time was
        # up, or a file that cannot be imported or skips itself.
        cases = [case for case in suite.iter("testcase") if case.get("classname")]
        files = [
            case.get("name")
            for case in suite.iter("testcase")
            if not case.get("classname") and case.find("error") is not None
        ]
        found.seconds += float(suite.get("time"))
        found.skipped += collections.Counter(
            item.get("message", "") for case in cases for item in case.iter("skipped")
        )
        found.tests += collections.Counter(
            f"{case.get('classname').split('.')[-1]}.py::"
            f"{case.get('name').split('[')[0]}"
            for case in cases
            if not any(case.find(end) is not None for end in ENDS)
        )
        found.failed += [
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]
        # Each part of a file reports it.
        found.failed += [file for file in files if file not in found.failed]

    def take(self, file, run):
        """Adds what lockstep_run.run found for a file."""
        with self.lock:
            if not run.complete:
                self.not_run.append(file)
                print(f"{file} did not come to its end\n{run.log}", flush=True)
            if not run.tests:
                return
            found = self.files[file]
            for test in run.tests:
                name = test.name.rpartition("/")[2]
                found.seconds += test.seconds
                if test.outcome == "skipped":
                    found.skipped[test.message] += 1
                elif test.outcome == "failed":
                    found.failed.append(name.replace(".py::", "::"))
                    print(f"{name} failed: {test.message}", flush=True)
                else:
                    found.tests[name.split("[")[0]] += 1

    def resume(self, devices):
        """Goes on with the newest record of this suite, if there is one.

        What it has for a file that did not finish counts until that file has begun
        again.
        """
        ours = self._facts(devices)
        # Their names end with dates, so the newest comes first.
        for path in sorted(
            recording.RESULTS.glob(f"{self._name(devices)}-*.json"), reverse=True
        ):
            record = json.loads(path.read_text())
            # Records without it do not tell which files they lack, or what was skipped
            # where.
            if "cut_off" in record and all(
                record.get(name) == value for name, value in ours.items()
            ):
                print(f"resumes {path.name}")
                self.resumed, self.earlier = record, _by_file(record)
                return
        print(f"no {self._name(devices)} to resume: all of it is run")

    def left(self, names):
        """Returns those of the files `names` that still have to be run."""
        if self.resumed is None:
            return set(names)
        return set(names) & set(map(_file, self.resumed["not_run"]))

    def _facts(self, devices):
        """Returns what must be the same in two runs that make one record."""
        facts = {
            "kind": "test suite",
            "transport": self.transport,
            "devices": devices,
            "commit": recording.commit(),
            "python": sys.version.split()[0],
            "arguments": self.arguments,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }
        if self.processes:
            facts["processes"] = self.processes
            facts["ranks_per_node"] = self.ranks_per_node
        return facts

    def _name(self, devices):
        name = f"suite-{self.transport}-"
        if self.one_gpu and not self.processes:
            name += "shared-"
        if self.processes:
            name += f"{self.processes}proc-"
        if self.ranks_per_node:
            # Processes may share a device, or have several devices.
            ranks = max(devices["count"], self.processes or 0)
            name += f"{-(-ranks // self.ranks_per_node)}nodes-"
        return name + f"{recording.short_device(devices['kind'])}x{devices['count']}"

    def write(self, devices, resumable=True):
        """Writes and prints the record; returns whether all tests ran and none failed.

        `resumable` says that files were run one by one, so the record can tell which
        ones were not.
        """
        files = self.earlier | self.files
        found = sum(files.values(), Found())
        record = {
            **self._facts(devices),
            # A resumed record keeps its name, and so the date on which it was begun.
            "date": self.resumed["date"] if self.resumed else recording.date(),
            "passed": found.tests.total(),
            "failed": found.failed,
            "not_run": self.not_run,
            "skipped": dict(found.skipped),
            "tests": dict(sorted(found.tests.items())),
            "seconds": round(found.seconds, 1),
        }
        if resumable:
            # What --resume subtracts again from the counts above.
            record["cut_off"] = {
                file: {
                    "skipped": dict(files[file].skipped),
                    "seconds": round(files[file].seconds, 1),
                }
                for file in sorted(files.keys() & set(map(_file, self.not_run)))
            }
        recording.write(self._name(devices), record)
        print(json.dumps(record, indent=1))
        return not (record["failed"] or record["not_run"])


def _file(part):
    """Returns the file of an entry of `not_run`, which may name a part of one."""
    return part.split()[0]


def _by_file(record):
    """Splits a record into each file that was cut off, and all others together."""
    found = collections.defaultdict(Found)
    rest = found[""]
    rest.skipped += record["skipped"]
    rest.seconds = record["seconds"]
    for file, part in record["cut_off"].items():
        found[file] = Found(
            skipped=collections.Counter(part["skipped"]), seconds=part["seconds"]
        )
        rest.skipped -= found[file].skipped
        rest.seconds -= part["seconds"]
    for test, count in record["tests"].items():
        file = test.partition("::")[0]
        found[file if file in record["cut_off"] else ""].tests[test] = count
    for test in record["failed"]:
        file = f"{test.partition('::')[0].split('.')[-1]}.py"
        found[file if file in record["cut_off"] else ""].failed.append(test)
    return dict(found)


def heed_interrupts():
    """Makes processes that this one starts heed SIGINT, which `ended` sends.

    What a shell starts in the background ignores SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ended(process, left):
    """Waits for pytest in a session of its own; returns its status, and if in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=left), True
    # An interrupt, so that pytest still reports what it has found.
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REPORT_S)
    # Also kills what the tests have started.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), False
