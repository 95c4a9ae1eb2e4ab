"""Records of suites on GPUs that ran out of time: the rest runs into one record."""

from __future__ import annotations

import argparse
import functools
import json
import pathlib

import pytest
import suite_table

from benchmarks.common import processes, recording
from tools import lockstep_run, record_suite, suite_record

# Records count skips by their reasons.
REASON = "of this record"
DEVICES = {"kind": "NVIDIA Made Up", "count": 2, "platform": "gpu", "jax": "9.8.7"}
NAME = "suite-p2p-made-upx2"
ENDS = {"passed": "", "skipped": f'<skipped message="{REASON}"/>', "failed": "<error/>"}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder of records: all of one commit, each begun on a later day."""
    dates = (f"2001-02-{day:02}" for day in range(1, 29))
    monkeypatch.setattr(recording, "date", lambda: next(dates))
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    monkeypatch.setattr(
        recording, "write", functools.partial(recording.write, folder=tmp_path)
    )
    monkeypatch.setenv("JAX_EP_COMMIT", "0123456789abcdef")
    return tmp_path


def add(suite, folder, file: str, **tests: str) -> None:
    """Adds a pytest report of a part of a file that took 10.1 s."""
    module = file.removesuffix(".py")
    cases = "".join(
        f'<testcase classname="tests.{module}" name="{name}">{ENDS[end]}</testcase>'
        for name, end in tests.items()
    )
    report = folder / "report.xml"
    report.write_text(f'<a><testsuite time="10.1">{cases}</testsuite></a>')
    suite.add(report, file)


def first_run(folder, *arguments: str) -> None:
    """Records one complete file, two that were cut off and one that did not begin."""
    suite = suite_record.Suite("p2p", list(arguments))
    add(suite, folder, "test_whole.py", a="passed", b="skipped", c="failed")
    add(suite, folder, "test_cut.py", a="passed", b="skipped", c="failed")
    add(suite, folder, "test_cut.py", d="passed", e="skipped")
    # A name that begins like another's.
    add(suite, folder, "test_cut_too.py", a="passed", b="skipped", c="failed")
    suite.not_run = ["test_cut.py 0/2", "test_late.py", "test_cut_too.py"]
    assert not suite.write(DEVICES)


def resumed(*arguments: str):
    suite = suite_record.Suite("p2p", list(arguments))
    suite.resume(DEVICES)
    return suite


FILES = ["test_whole.py", "test_cut.py", "test_cut_too.py", "test_late.py"]


def test_runs_resumed_make_one_record(results, tmp_path) -> None:
    """The record is as from one run: nothing is there twice, and nothing is lost."""
    first_run(tmp_path)
    (path,) = tmp_path.glob("*.json")
    before = json.loads(path.read_text())
    assert before["seconds"] == pytest.approx(40.4)
    # Time ran out before any of it ran again.
    suite = resumed()
    assert suite.left(FILES) == set(FILES[1:])
    suite.not_run += before["not_run"]
    suite.write(DEVICES)
    assert json.loads(path.read_text()) == before
    # One file is complete, one is not, and one does not begin.
    suite = resumed()
    assert suite.left(FILES) == set(FILES[1:])
    add(suite, tmp_path, "test_cut.py", a="passed", b="skipped", c="passed")
    add(suite, tmp_path, "test_cut.py", d="passed", e="skipped", f="failed")
    add(suite, tmp_path, "test_late.py", a="passed")
    suite.not_run += ["test_late.py", "test_cut_too.py"]
    assert not suite.write(DEVICES)
    found = json.loads(path.read_text())
    assert sorted(found["failed"]) == [
        "tests.test_cut::f",
        "tests.test_cut_too::c",
        "tests.test_whole::c",
    ]
    assert found["passed"] == sum(found["tests"].values()) == 6
    assert found["tests"]["test_cut.py::c"] == 1
    assert found["skipped"] == {REASON: 4}
    assert found["cut_off"].keys() == {"test_late.py", "test_cut_too.py"}
    assert found["seconds"] == pytest.approx(50.5)
    suite = resumed()
    assert suite.left(FILES) == set(FILES[2:])
    add(suite, tmp_path, "test_cut_too.py", a="passed", b="skipped", c="passed")
    add(suite, tmp_path, "test_late.py", a="passed", b="passed")
    suite.write(DEVICES)
    found = json.loads(path.read_text())
    whole = suite_record.Suite("p2p", [])
    add(whole, tmp_path, "test_whole.py", a="passed", b="skipped", c="failed")
    add(whole, tmp_path, "test_cut.py", a="passed", b="skipped", c="passed")
    add(whole, tmp_path, "test_cut.py", d="passed", e="skipped", f="failed")
    add(whole, tmp_path, "test_cut_too.py", a="passed", b="skipped", c="passed")
    add(whole, tmp_path, "test_late.py", a="passed", b="passed")
    whole.write(DEVICES)
    at_once = json.loads((tmp_path / f"{NAME}-2001-02-02.json").read_text())
    assert found["seconds"] == pytest.approx(at_once.pop("seconds"))
    assert found.pop("seconds") == pytest.approx(50.5)
    assert (found.pop("date"), at_once.pop("date")) == ("2001-02-01", "2001-02-02")
    assert found == at_once
    assert found["not_run"] == []
    assert found["cut_off"] == {}
    assert resumed().left(FILES) == set()


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "another"},
        {"arguments": ["-k", "b"]},
        {"transport": "shmem"},
        {"devices": DEVICES | {"jax": "9.8.8"}},
        {"devices": DEVICES | {"kind": "Made up"}},
        {"python": "2.7"},
        {"xla_flags": "--xla_gpu_autotune_level=0"},
    ],
    ids=str,
)
def test_other_runs_are_not_resumed(results, tmp_path, changes) -> None:
    first_run(tmp_path)
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    suite = resumed()
    assert suite.left(FILES) == set(FILES)
    assert suite.earlier == {}


def test_the_newest_run_that_tells_is_resumed(results, tmp_path) -> None:
    for arguments in ([], [], ["-k", "a"], []):
        first_run(tmp_path, *arguments)
    path = tmp_path / f"{NAME}-2001-02-04.json"
    record = json.loads(path.read_text())
    # Like the record of a run of all files at once.
    del record["cut_off"]
    path.write_text(json.dumps(record))
    assert resumed().resumed["date"] == "2001-02-02"
    assert resumed("-k", "a").resumed["date"] == "2001-02-03"


def test_suites_on_gpus_run_what_was_not_run(results, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(record_suite, "devices", lambda: DEVICES)
    monkeypatch.setattr(processes, "visible_gpus", lambda count: ["0", "1"])
    late, ran = {("p2p", "test_mesh.py"), ("p2p", "test_p2p.py")}, []

    def run(job, deadline):
        key = job.suite.transport, job.file.name
        ran.append(key)
        if key in late:
            job.suite.not_run.append(job.file.name)
        else:
            add(job.suite, job.folder.parent, job.file.name, a="passed")
        return key not in late

    monkeypatch.setattr(record_suite.Job, "run", run)
    args = argparse.Namespace(
        gpus=[2],
        one_gpu=False,
        transports=["p2p", "collective"],
        jobs=1,
        limit_s=60,
        resume=True,
    )
    assert record_suite.run_all(args, [], tmp_path) == 1
    assert ("collective", "test_mesh.py") in ran
    assert ("collective", "test_p2p.py") not in ran
    assert ("p2p", "test_process_faults.py") in ran
    assert ("collective", "test_process_faults.py") not in ran
    ran.clear()
    found = set(late)
    late.clear()
    assert record_suite.run_all(args, [], tmp_path) == 0
    assert set(ran) == found
    ran.clear()
    assert record_suite.run_all(args, [], tmp_path) == 0
    assert ran == []
    names = {path.name for path in tmp_path.glob("*.json")}
    # Each has the day on which it was begun.
    collective = f"{NAME.replace('p2p', 'collective')}-2001-02-02.json"
    assert names == {f"{NAME}-2001-02-01.json", collective}
    found = json.loads((tmp_path / f"{NAME}-2001-02-01.json").read_text())
    assert found["not_run"] == []
    assert {"test_mesh.py::a", "test_p2p.py::a"} < found["tests"].keys()
    args.one_gpu, args.resume = True, False
    assert record_suite.run_all(args, [], tmp_path) == 0
    assert {file for _, file in ran} == {
        "test_process_faults.py",
        "test_processes_gpu.py",
        "test_shmem_gpu.py",
    }


def test_processes_run_what_was_not_run(results, tmp_path, monkeypatch) -> None:
    """The rest of a run of the same files runs; with other files all of them run."""
    monkeypatch.setattr(record_suite, "devices", lambda: DEVICES | {"platform": "cpu"})
    late, ran = {"test_split.py", "test_vjp.py"}, []

    def run(arguments, count, each, place, end, shared):
        file = pathlib.Path(arguments[0]).name
        ran.append(file)
        if file in late:
            return lockstep_run.Run()
        test = lockstep_run.Test(f"tests/{file}::a", "passed", seconds=1)
        return lockstep_run.Run([test], complete=True)

    monkeypatch.setattr(lockstep_run, "run", run)
    args = argparse.Namespace(
        processes=2,
        one_gpu=False,
        ranks_per_node=None,
        transports=["p2p"],
        files=["mesh", "split", "vjp"],
        jobs=1,
        limit_s=60,
        resume=True,
    )
    assert record_suite.run_in_processes(args, [], tmp_path) == 1
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["not_run"] == ["test_split.py", "test_vjp.py"]
    late.clear()
    ran.clear()
    assert record_suite.run_in_processes(args, [], tmp_path) == 0
    assert ran == ["test_split.py", "test_vjp.py"]
    assert json.loads(path.read_text())["passed"] == 3
    args.files = ["mesh", "split", "vjp", "dispatch"]
    assert record_suite.run_in_processes(args, [], tmp_path) == 0
    assert len(ran) == 2 + 4


def test_processes_that_share_a_gpu(results, tmp_path, monkeypatch) -> None:
    """All processes use the first GPU, and the record says so."""
    here = DEVICES | {"count": 2}
    monkeypatch.setattr(record_suite, "devices", lambda: dict(here))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")

    def run(arguments, count, each, folder, deadline, environment):
        assert (count, each) == (4, "gpu1")
        assert environment["CUDA_VISIBLE_DEVICES"] == "5"
        assert environment["JAX_EP_TEST_ONE_GPU"] == "1"
        test = lockstep_run.Test("tests/api/test_mesh.py::a", "passed", seconds=1)
        return lockstep_run.Run([test], complete=True)

    monkeypatch.setattr(lockstep_run, "run", run)
    args = argparse.Namespace(
        processes=4,
        one_gpu=True,
        ranks_per_node=2,
        transports=["shmem"],
        files=["mesh"],
        jobs=1,
        limit_s=60,
        resume=False,
    )
    assert record_suite.run_in_processes(args, [], tmp_path) == 0
    (path,) = tmp_path.glob("suite-shmem-4proc-2nodes-*x1-*.json")
    record = json.loads(path.read_text())
    assert record["devices"]["count"] == 1
    assert "--one-gpu" in record["arguments"]
    words = "`shmem`, 4 processes sharing the GPU, 2 ranks per node, only mesh"
    assert suite_table.name(record) == words
