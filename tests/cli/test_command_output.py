"""The output of the command jax-ep: its layout, and output that nobody reads."""

from __future__ import annotations

import copy
import os
import pathlib
import signal
import subprocess
import sys

import pytest

import jax_ep
from jax_ep._cli import main
from jax_ep._cli import text as _cli_text
from jax_ep._cli.doctor import command as _cli_doctor
from jax_ep._cli.doctor import findings
from support.commands import record as bench_record
from support.commands import write


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("command", ["", "demo", "doctor", "bench"])
def test_help_fits_the_terminal(command, columns, monkeypatch, capsys):
    def shown(width):
        monkeypatch.setenv("COLUMNS", str(width))
        with pytest.raises(SystemExit) as left:
            main.main([*command.split(), "--help"])
        assert left.value.code == 0
        return capsys.readouterr().out

    said = shown(columns)
    assert max(map(len, said.splitlines())) <= columns
    # Nothing is lost, and examples have backslashes where shell lines continue.
    _, told = said.split("options:")
    _, expected = shown(100).split("options:")
    assert told.replace("\\\n", "").split() == expected.split()


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_doctor_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(findings, "self_test", lambda *_: "passed")
    assert main.main(["doctor", "--ranks", "32", "--ranks-per-node", "4"]) == 0
    said = capsys.readouterr().out
    # Names, paths and commands stay whole, however long they are on this machine.
    wide = [line for line in said.splitlines() if len(line) > columns]
    words = [line.replace("pip install ", "pip-install-") for line in wide]
    assert all(len(line[_cli_text.LABEL :].split()) == 1 for line in words), wide
    assert "window of shmem over nodes of 4 ranks" in " ".join(said.split())


def test_commands_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    command = "pip install nvidia-nvshmem-cu13"
    lines = _cli_text.entry("shmem", f"no headers of NVSHMEM ({command} before it)")
    wide = [line for line in lines if len(line) > 40]
    assert [line.strip() for line in wide] == [f"({command}"]


@pytest.mark.parametrize("columns", [40, 80])
def test_tables_of_many_devices_come_in_parts(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    heads = [str(i) for i in range(16)]
    cells = [[f"NV{a * 16 + b}" for b in range(16)] for a in range(16)]
    lines = _cli_text.matrix("link", heads, cells)
    assert max(map(len, lines)) <= columns
    found = {}
    for line in lines:
        name, *row = line.split()
        if name == "link":
            shown = row
        found |= {(name, head): cell for head, cell in zip(shown, row, strict=True)}
    assert all(found[a, b] == cells[int(a)][int(b)] for a in heads for b in heads)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_comparisons_fit_the_terminal(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    before = bench_record(dispatch=100, combine=50)
    for row in before["results"]:
        row |= {"num_sms": 24, "format": "fp8_block128"}
    after = copy.deepcopy(before)
    after["results"][0]["us"] = 200
    paths = [write(tmp_path / f"{i}.json", r) for i, r in enumerate([before, after])]
    assert main.main(["bench", "--compare", *paths]) == 1
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    assert "+100.0%" in said
    assert "SLOWER" in said


def test_an_error_is_laid_out_on_a_terminal_alone(monkeypatch, capsys):
    """Elsewhere an error stays one line, since logs are searched by line."""
    monkeypatch.setenv("COLUMNS", "40")
    text = "jax-ep: " + "word " * 30
    _cli_text.complain(text)
    assert capsys.readouterr().err == text + "\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _cli_text.complain(text)
    said = capsys.readouterr().err
    assert max(map(len, said.splitlines())) <= 40
    assert said.split() == text.split()


@pytest.mark.parametrize("command", ["demo", "doctor", "bench"])
def test_unknown_arguments_are_of_the_subcommand(command, capsys):
    with pytest.raises(SystemExit) as left:
        main.main([command, "--bogus"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: jax-ep {command} ")
    assert f"jax-ep {command}: error: unrecognized arguments: --bogus" in said


def test_misspelt_and_shortened_options_are_named(capsys):
    """`--step 5` would train, and mean something else once there is a --step-size."""
    for given, near in (("--step", "--steps"), ("--quik", "--quick")):
        with pytest.raises(SystemExit) as left:
            main.main(["demo", given])
        assert left.value.code == 2
        said = capsys.readouterr().err
        words = f"unrecognized arguments: {given}; did you mean {near}?"
        assert words in said


def test_without_arguments_the_help_is_shown(capsys):
    with pytest.raises(SystemExit) as left:
        main.main([])
    said = capsys.readouterr()
    assert (left.value.code, said.err) == (0, "")
    assert said.out.startswith("usage: jax-ep ")
    assert "doctor" in said.out


@pytest.mark.parametrize("place", ["run", "flush"])
def test_a_reader_that_leaves_is_no_error(place, monkeypatch):
    """As in `jax-ep doctor | head -1`, whenever the pipe breaks."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1 if place == "run" else -1) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        monkeypatch.setattr(findings, "examine", lambda *_: {"problems": []})
        monkeypatch.setattr(_cli_doctor, "report", lambda _: ["line"])
        assert main.main(["doctor"]) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("place", ["run", "flush", "help"])
def test_a_full_disk_is_one_line(place, monkeypatch, capsys):
    with open("/dev/full", "w", buffering=1 if place == "run" else -1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(findings, "examine", lambda *_: {"problems": []})
        monkeypatch.setattr(_cli_doctor, "report", lambda _: ["line"])
        assert main.main(["doctor", "--help"] if place == "help" else ["doctor"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jax-ep: standard output cannot be written: ")
    assert "No space left on device" in line


def test_an_error_that_is_not_of_the_output_is_not_taken_for_one(monkeypatch):
    def broken(*_):
        raise OSError("of the program")

    monkeypatch.setattr(findings, "examine", broken)
    with pytest.raises(OSError, match="of the program"):
        main.main(["doctor"])


@pytest.mark.few(3)
@pytest.mark.multiprocess
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirected", "code", "lines"),
    [("> /dev/full", 1, 1), (">&-", 0, 0), ("| true", 0, 0)],
)
def test_a_shell_sees_no_traceback(redirected, code, lines, unbuffered, tmp_path):
    """Whatever happens to the output, also when Python exits."""
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
