"""How benchmarks start programs and processes."""

from __future__ import annotations

import pathlib

import pytest

from jax_ep._cli.bench import cuda, measure, process, record

UNKNOWN = "--xla_of_no_version=true"


def test_programs_are_found_in_the_current_folder(tmp_path, monkeypatch) -> None:
    """A program's path may be relative to the current folder, not only on PATH."""
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "{\\"given\\": \\"$1\\"}"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert cuda.run(pathlib.Path("program"), ["x"], 10) == {"given": "x"}
    with pytest.raises(RuntimeError, match=r"^missing: No such file"):
        cuda.run(pathlib.Path("missing"), [], 10)


@pytest.mark.slow
def test_flags_that_xla_knows() -> None:
    assert process.understood(measure.RAGGED[1][0])
    assert not process.understood(UNKNOWN)


@pytest.mark.parametrize("flags", [UNKNOWN, "--xla_known=true"])
def test_unknown_flags_are_no_problem(flags, monkeypatch, capsys) -> None:
    """An experiment with flags that this XLA lacks is left out; others must run."""
    died = "worker ended with -6"
    monkeypatch.setattr(process, "start", lambda *_: ([], died))
    monkeypatch.setattr(process, "understood", lambda each: each != UNKNOWN)
    run = record.Run("p2p", "command", 0, 10)
    problem = run.work("a worker", flags, {})
    assert problem == ("" if flags == UNKNOWN else died)
    assert ("does not know" in capsys.readouterr().out) == (flags == UNKNOWN)
