"""What a bare `pytest` leaves out and prints, and in how many processes it runs."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from support import HAS_GPUS, ROOT
from support.launch import run_to_end

FILE = "tests/tools/test_benchmark_wrong.py"  # all of it is thorough


BARE = ["-o", f"testpaths={FILE}"]

# They start pytest again, and what they test changes rarely.
pytestmark = pytest.mark.thorough


def pytest_run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    options = ["-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    return run_to_end(
        [sys.executable, "-m", "pytest", "-q", *options, *words], cwd=ROOT, env=env
    )


@pytest.mark.parametrize(
    ("words", "left_out", "processes"),
    [
        (BARE, True, not HAS_GPUS),
        pytest.param([*BARE, "-n", "0"], True, False, marks=pytest.mark.thorough),
        pytest.param(
            [FILE, "--collect-only"], False, False, marks=pytest.mark.thorough
        ),
    ],
)
def test_a_bare_run_leaves_out_the_thorough(words, left_out, processes) -> None:
    done = pytest_run(*words)
    assert done.returncode == (5 if left_out else 0), done.stdout + done.stderr
    assert ("= left out =" in done.stdout) == left_out
    assert ("test_errors_of_layers" in done.stdout) != left_out
    assert ("bringing up nodes" in done.stdout) == processes


def collected(folder: pathlib.Path, *words: str) -> list[tuple[str, int]]:
    """Returns the names and numbers of the cases that pytest would run in `folder`."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = thorough\n  few")
    command = [sys.executable, "-m", "pytest", "-p", "support.parts", "--collect-only"]
    paths = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": ""}
    done = run_to_end([*command, "-q", *words], cwd=folder, env=paths)
    assert done.returncode == 0, done.stdout
    return [
        (name, int(number))
        for name, number in re.findall(r"::(\w+)\[(\d+)\]", done.stdout)
    ]


MANY = """
@pytest.mark.parametrize("case", range(3))
def test_{}(case):
    pass
"""


def test_a_percentage_of_functions_is_drawn(tmp_path) -> None:
    """A function is drawn with all its cases, by the seed, or named by --always."""
    text = "\n".join(MANY.format(i) for i in range(40))
    (tmp_path / "test_it.py").write_text(f"import pytest\n{text}")
    run = functools.partial(collected, tmp_path, "--percent")
    drawn = {seed: run("30", "--draw", seed) for seed in ("a", "b")}
    assert run("30", "--draw", "a") == drawn["a"] != drawn["b"]
    for cases in drawn.values():
        names = [name for name, _ in cases]
        assert {names.count(name) for name in names} == {3}
        assert 4 <= len(set(names)) <= 20
    missing = min({f"test_{i}" for i in range(40)} - {name for name, _ in drawn["a"]})
    named = run("30", "--draw", "a", "--always", missing)
    assert {*named} == {*drawn["a"], *((missing, case) for case in range(3))}
    assert len(run("100")) == 120


CASES = """
import pytest

cases = [i if i < 4 else pytest.param(i, marks=pytest.mark.thorough) for i in range(20)]
@pytest.mark.parametrize("case", cases)
def test_one(case):
    pass

test_other = test_one
"""


def test_cases_are_of_what_is_selected(tmp_path) -> None:
    """-m leaves cases out before they are counted; a seed draws the same every time."""
    (tmp_path / "test_it.py").write_text(CASES)
    run = functools.partial(collected, tmp_path, "--cases")
    few = run("2", "-m", "not thorough")
    assert [name for name, _ in few] == ["test_one"] * 2 + ["test_other"] * 2
    assert max(i for _, i in few) < 4
    drawn = [run("8", "--draw", seed, "-m", "thorough") for seed in ("a", "b")]
    assert drawn[0] != drawn[1]
    assert run("8", "--draw", "a", "-m", "thorough") == drawn[0]
    for cases in drawn:
        one, other = (
            {i for name, i in cases if name == of} for of in ("test_one", "test_other")
        )
        assert len(one) == len(other) == 8
        assert one != other
        assert min(one | other) >= 4


FEW = """
import pytest

cases = [pytest.param(i, marks=pytest.mark.thorough) if i < 2 else i for i in range(9)]
@pytest.mark.few(3)
@pytest.mark.parametrize("case", cases)
def test_few(case):
    pass
"""


def test_all_but_few_cases_are_thorough(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(FEW)
    kept = collected(tmp_path, "-m", "not thorough")
    assert len(kept) == 3
    assert min(i for _, i in kept) >= 2
    others = collected(tmp_path, "-m", "thorough")
    assert sorted(kept + others) == [("test_few", i) for i in range(9)]
    assert collected(tmp_path, "-m", "not thorough") == kept
