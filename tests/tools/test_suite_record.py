"""Records of suites on GPUs: outcomes of test files, also if time runs out."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import time

import pytest

from benchmarks.common import recording
from tools import record_suite, suite_record

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
    """Outcomes so far count, and the file is recorded as not run to its end."""
    (tmp_path / "test_it.py").write_text(FILE.format(seconds=seconds, reason=REASON))
    report = tmp_path / "report.xml"
    suite_record.heed_interrupts()
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
    found = suite.files[""]
    assert dict(found.tests) == passed
    assert found.failed == ["test_it::test_wrong"]
    assert dict(found.skipped) == {REASON: 1}


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (FILE.format(seconds=0, reason=REASON), "test_it::test_wrong"),
        ("import nothing_of_that_name", "test_it"),
    ],
    ids=["runs", "cannot be imported"],
)
def test_a_job_says_what_its_file_has(text, failed, tmp_path, monkeypatch) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", str(file)]
    monkeypatch.setattr(
        record_suite, "pytest_command", lambda xml, _: [*command, f"--junitxml={xml}"]
    )
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # which may want xdist
    suite = suite_record.Suite("p2p", [])
    job = record_suite.Job(suite, [], file, tmp_path / "0", tmp_path / "turns")
    assert not job.run(time.monotonic() + 60)
    found = {name: found.failed for name, found in suite.files.items()}
    assert found == {file.name: [failed]}
    assert not suite.not_run
    assert not job.run(time.monotonic())
    assert suite.not_run == [file.name]


@pytest.mark.parametrize("shared", [False, True])
def test_processes_that_share_a_gpu(shared: bool, tmp_path, monkeypatch) -> None:
    """The environment tells the tests, and the record has its own name."""
    said = tmp_path / "said"
    code = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text("
        "' '.join(sys.argv[2:]) + ' ' + os.environ.get('JAX_EP_TEST_ONE_GPU', 'no'))"
    )
    monkeypatch.setattr(
        record_suite,
        "pytest_command",
        lambda _, arguments: [sys.executable, "-c", code, str(said), *arguments],
    )
    write = functools.partial(recording.write, folder=tmp_path)
    monkeypatch.setattr(recording, "write", write)
    suite = suite_record.Suite("p2p", ["--one-gpu"] * shared + ["-x"])
    folders = tmp_path / "0", tmp_path / "turns"
    job = record_suite.Job(suite, [], pathlib.Path("test_it.py"), *folders)
    job.run(time.monotonic() + 60)
    assert said.read_text() == "test_it.py -m not exclusive --part 0/1 -x " + (
        "1" if shared else "no"
    )
    suite.write({"kind": "NVIDIA Made Up", "count": 1, "jax": "9.8.7"})
    (record,) = tmp_path.glob("suite-*.json")
    name = "suite-p2p-shared-made-upx1-" if shared else "suite-p2p-made-upx1-"
    assert record.name.startswith(name)


def test_files_without_tests(tmp_path) -> None:
    """Counts a file that cannot be imported as failed, but none that skips itself."""
    suite, report = suite_record.Suite("p2p", []), tmp_path / "report.xml"
    for end in ("error", "error", "skipped"):
        case = f'<testcase classname="" name="tests.test_it"><{end}/></testcase>'
        report.write_text(f'<a><testsuite time="1">{case}</testsuite></a>')
        suite.add(report, "test_it.py")
    found = suite.files["test_it.py"]
    assert (found.failed, found.skipped) == (["tests.test_it"], {})
