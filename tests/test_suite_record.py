"""Records of suites on GPUs: what is known of a file of tests that time has ended."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

import suite_record

# Records count skips by their reasons.
REASON = "of this record"
FILE = """
import pathlib, time
import pytest

@pytest.mark.parametrize("i", range(2))
def test_right(i):
    pass

def test_wrong():
    assert False

def test_skipped():
    pytest.skip("{reason}")

def test_waits():
    pathlib.Path("waiting").touch()
    time.sleep({seconds})
    pathlib.Path("went on").touch()

def test_last():
    pass
"""


@pytest.mark.parametrize(("seconds", "left"), [(600, 0.2), (0, 60)])
def test_time_ends_a_file(seconds: float, left: float, tmp_path) -> None:
    """What was found before counts, and the file as one not run to its end."""
    (tmp_path / "test_it.py").write_text(FILE.format(seconds=seconds, reason=REASON))
    report = tmp_path / "report.xml"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", f"--junitxml={report}"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "waiting").exists() and process.poll() is None:
            time.sleep(0.01)
        _, whole = suite_record.ended(process, left)
    finally:
        process.kill()
    assert process.returncode is not None
    assert whole == (tmp_path / "went on").exists() == (seconds == 0)
    suite = suite_record.Suite("p2p", [])
    suite.add(report)
    passed = {"test_it.py::test_right": 2}
    if whole:
        passed |= {"test_it.py::test_waits": 1, "test_it.py::test_last": 1}
    assert dict(suite.tests) == passed
    assert suite.failed == ["test_it::test_wrong"]
    assert dict(suite.skipped) == {REASON: 1}
    assert suite.total == 2 + sum(passed.values())
