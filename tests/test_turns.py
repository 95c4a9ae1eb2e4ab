"""Who holds a GPU, and who does not: turns.py."""

from __future__ import annotations

import fcntl
import pathlib
import subprocess
import sys
import threading

import jax
import pytest
from turns import Turns, of_environment, warm_up


def free(path: pathlib.Path) -> bool:
    """Whether somebody else could take the lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def paths(tmp_path) -> list[pathlib.Path]:
    return [tmp_path / "gpu1", tmp_path / "gpu0"]


@pytest.fixture
def turns(paths):
    made = Turns(paths)
    yield made
    made.close()


def seen(paths: list[pathlib.Path]) -> list[bool]:
    return [free(path) for path in paths]


def test_holds_all_but_while_compiling(turns, paths) -> None:
    found = []

    @jax.jit
    def traced(x):
        found.append(seen(paths))
        inner = jax.jit(lambda y: found.append(seen(paths)) or y * 2)(x)
        found.append(seen(paths))
        return inner + 1

    assert seen(paths) == [True, True]
    run = turns.run()
    next(run)
    assert seen(paths) == [False, False]
    assert traced(3) == 7
    # While one compiles inside the other as well, and after it.
    assert found == [[True, True]] * 3
    assert seen(paths) == [False, False]
    with pytest.raises(ZeroDivisionError):
        jax.jit(lambda x: x / (1 // 0))(1)
    assert seen(paths) == [False, False]
    assert traced(4) == 9
    assert len(found) == 3
    run.close()
    assert seen(paths) == [True, True]


def test_warm_up_takes_no_turn(turns, paths) -> None:
    warm_up()
    assert seen(paths) == [True, True]


def test_one_after_the_other(turns, paths) -> None:
    other = Turns(paths)
    run, theirs = turns.run(), other.run()
    next(run)
    waiting = threading.Thread(target=lambda: next(theirs), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    run.close()
    waiting.join(60)
    assert not waiting.is_alive()
    assert seen(paths) == [False, False]
    theirs.close()
    other.close()
    assert seen(paths) == [True, True]


def test_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("JAX_EP_TEST_TURNS", raising=False)
    assert of_environment() is None
    monkeypatch.setenv("JAX_EP_TEST_TURNS", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,11")
    made = of_environment()
    assert made is not None
    # For nobody that is started from here.
    assert of_environment() is None
    paths = [tmp_path / "gpu3", tmp_path / "gpu11"]
    for _ in range(2):
        run = made.run()
        next(run)
        assert seen(paths) == [False, False]
        # Neither that one nor the test that waits for it.
        assert subprocess.run([sys.executable, "-c", ""], check=False).returncode == 0
        assert seen(paths) == [True, True]
        run.close()
    made.close()
