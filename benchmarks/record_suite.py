"""Runs the test suite on the devices present and records it in benchmarks/results.

    python benchmarks/record_suite.py [pytest arguments]

The file says which devices, JAX and commit, and how many tests passed, failed and were
skipped for which reason: the record behind every claim that something runs on a GPU.
"""

import collections
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET

import recording


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


def main():
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
        command += [str(recording.ROOT / "tests"), *sys.argv[1:]]
        status = subprocess.run(command, check=False, cwd=folder).returncode
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
        "devices": found,
        "commit": recording.commit(),
        "date": recording.date(),
        "python": sys.version.split()[0],
        "arguments": sys.argv[1:],
        "passed": total - len(failed) - sum(skipped.values()),
        "failed": failed,
        "skipped": dict(skipped),
        "seconds": round(float(suite.get("time")), 1),
    }
    name = recording.short_device(found["kind"])
    recording.write(f"suite-{name}x{found['count']}", record)
    print(json.dumps(record, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
