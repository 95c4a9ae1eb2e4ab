"""tools/fuzz.py: what it records with either engine."""

from __future__ import annotations

import pathlib

import pytest

from tools import fuzz

# Prints what libFuzzer prints, and writes its finds to the same places.
LIBFUZZER = """#!/bin/bash
for word in "$@"; do [[ $word == -* ]] || folders+=("$word"); done
if [[ " $* " == *" -merge=1 "* ]]; then
  cp "${folders[1]}"/* "${folders[2]}"/* "${folders[0]}"
  exit 0
fi
echo "#2 INITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 30Mb" >&2
echo found >"${folders[0]}/0123"
echo "#900 DONE cov: 74 ft: 99 corp: 9/9b lim: 4 exec/s: 450 rss: 31Mb" >&2
echo "stat::number_of_executed_units: 900" >&2
exit STATUS
"""
OWN = """#!/bin/bash
echo "a line before"
echo '{"executions": 31, "edges": 5}'
"""


def target(folder: pathlib.Path, text: str) -> pathlib.Path:
    made = folder / "some_fuzz"
    made.write_text(text)
    made.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def corpus(monkeypatch, tmp_path):
    given = tmp_path / "corpus"
    (given / "some_fuzz").mkdir(parents=True)
    (given / "some_fuzz" / "given").write_text("x")
    monkeypatch.setattr(fuzz, "CORPUS", given)
    return given


def test_libfuzzer(tmp_path, corpus) -> None:
    folder = target(tmp_path, LIBFUZZER.replace("STATUS", "0"))
    found = fuzz.fuzz(folder, "some_fuzz", 3, 7, "libFuzzer")
    assert found.pop("seconds") >= found.pop("cpu_seconds") >= 0
    assert found == {
        "target": "some_fuzz",
        "failed": False,
        "executions": 900,
        "edges": 74,
        "inputs_given": 1,
        "inputs_found": 1,
        "merged": 2,
    }
    # The repository's corpus has not changed.
    assert [path.name for path in (corpus / "some_fuzz").iterdir()] == ["given"]


def test_libfuzzer_that_found_a_fault(tmp_path, capfd) -> None:
    folder = target(tmp_path, LIBFUZZER.replace("STATUS", "77"))
    found = fuzz.fuzz(folder, "some_fuzz", 3, 7, "libFuzzer")
    assert found["failed"] is True
    assert "merged" not in found
    assert "cov: 74" in capfd.readouterr().out


def test_own_driver(tmp_path) -> None:
    found = fuzz.fuzz(target(tmp_path, OWN), "some_fuzz", 3, 7, "driver.cc")
    assert found == {
        "target": "some_fuzz",
        "failed": False,
        "executions": 31,
        "edges": 5,
    }


@pytest.mark.parametrize(
    ("says", "name"), [("Debian clang version 19", "libFuzzer"), ("g++ 12", "driver")]
)
def test_engine_is_the_compilers(tmp_path, says, name) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/bash\necho '{says}'\n")
    compiler.chmod(0o755)
    cache = f"CMAKE_CXX_COMPILER:FILEPATH={compiler}\n"
    (tmp_path / "CMakeCache.txt").write_text(cache)
    assert name in fuzz.engine(tmp_path)
