"""The command jax-ep, where nobody takes what it writes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from test_bench_command import record as bench_record
from test_bench_command import write

import jax_ep
from jax_ep import _cli, _cli_doctor, _doctor


@pytest.mark.parametrize("place", ["run", "flush"])
def test_a_reader_that_leaves_is_no_error(place, monkeypatch):
    """As `jax-ep doctor | head -1`, whenever the pipe breaks."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1 if place == "run" else -1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(_doctor, "examine", lambda *_: {"problems": []})
        monkeypatch.setattr(_cli_doctor, "report", lambda _: ["line"])
        assert _cli.main(["doctor"]) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("place", ["run", "flush", "help"])
def test_a_full_disk_is_one_line(place, monkeypatch, capsys):
    with open("/dev/full", "w", buffering=1 if place == "run" else -1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(_doctor, "examine", lambda *_: {"problems": []})
        monkeypatch.setattr(_cli_doctor, "report", lambda _: ["line"])
        assert _cli.main(["doctor", "--help"] if place == "help" else ["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jax-ep: standard output must be what can be written, got: ")
    assert "No space left on device" in line


def test_an_error_that_is_not_of_the_output_is_not_taken_for_one(monkeypatch):
    def broken(*_):
        raise OSError("of the program")

    monkeypatch.setattr(_doctor, "examine", broken)
    with pytest.raises(OSError, match="of the program"):
        _cli.main(["doctor"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirected", "code", "lines"),
    [("> /dev/full", 1, 1), (">&-", 0, 0), ("| true", 0, 0)],
)
def test_a_shell_sees_no_traceback(redirected, code, lines, unbuffered, tmp_path):
    """Whatever becomes of the output, at Python's end too."""
    package = pathlib.Path(jax_ep.__file__).parent.parent
    path = os.pathsep.join([str(package), *sys.path])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": unbuffered}
    record = write(tmp_path / "a.json", bench_record(dispatch=100))
    done = subprocess.run(
        f"{sys.executable} -m jax_ep bench --compare {record} {record} {redirected}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert len(done.stderr.splitlines()) == lines, done.stderr
