"""The record of a suite of tests, as record_suite.py writes it."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

import recording

# How a test may end without having passed.
ENDS = ("failure", "error", "skipped")
REPORT_S = 8  # for pytest's report of tests that the time has ended


class Suite:
    """What pytest says of the files of one suite."""

    def __init__(self, transport, arguments, processes=None, ranks_per_node=None):
        self.transport, self.arguments = transport, arguments
        self.processes, self.ranks_per_node = processes, ranks_per_node
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
        # A test that the end of its file's time has interrupted has no name.
        cases = [case for case in suite.iter("testcase") if case.get("classname")]
        self.total += len(cases)
        self.seconds += float(suite.get("time"))
        self.skipped += collections.Counter(
            item.get("message", "") for case in cases for item in case.iter("skipped")
        )
        self.tests += collections.Counter(
            f"{case.get('classname').split('.')[-1]}.py::"
            f"{case.get('name').split('[')[0]}"
            for case in cases
            if not any(case.find(end) is not None for end in ENDS)
        )
        self.failed += [
            f"{case.get('classname')}::{case.get('name')}"
            for case in cases
            if case.find("failure") is not None or case.find("error") is not None
        ]

    def take(self, file, run):
        """Takes in what lockstep_run.run found of a file."""
        with self.lock:
            if not run.complete:
                self.not_run.append(file)
                print(f"{file} did not come to its end\n{run.log}", flush=True)
            for test in run.tests:
                name = test.name.rpartition("/")[2]
                self.total += 1
                self.seconds += test.seconds
                if test.outcome == "skipped":
                    self.skipped[test.message] += 1
                elif test.outcome == "failed":
                    self.failed.append(name.replace(".py::", "::"))
                    print(f"{name} failed: {test.message}", flush=True)
                else:
                    self.tests[name.split("[")[0]] += 1

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
        name = f"suite-{self.transport}-"
        if self.processes:
            record["processes"] = self.processes
            record["ranks_per_node"] = self.ranks_per_node
            name += f"{self.processes}proc-"
        if self.ranks_per_node:
            name += f"{-(-found['count'] // self.ranks_per_node)}nodes-"
        name += f"{recording.short_device(found['kind'])}x{found['count']}"
        recording.write(name, record)
        print(json.dumps(record, indent=1))


def ended(process, left):
    """Exit status of pytest in a session of its own, and whether it was in time."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=left), True
    # So that it still reports what it has found.
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=REPORT_S)
    # What the tests have started as well.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), False
