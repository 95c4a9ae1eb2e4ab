"""gpu_lock.py: which processes hold a GPU, and when."""

from __future__ import annotations

import fcntl
import os
import pathlib
import subprocess
import sys
import threading

import jax
import pytest

from support import TESTS, gpus, launch
from support.gpu_lock import GpuLock, of_environment, warm_up


def free(path: pathlib.Path) -> bool:
    """Whether another process could take the lock."""
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
def lock(paths):
    made = GpuLock(paths)
    yield made
    made.close()


def seen(paths: list[pathlib.Path]) -> list[bool]:
    return [free(path) for path in paths]


def test_holds_all_but_while_compiling(lock, paths) -> None:
    found = []

    @jax.jit
    def traced(x):
        found.append(seen(paths))
        inner = jax.jit(lambda y: found.append(seen(paths)) or y * 2)(x)
        found.append(seen(paths))
        return inner + 1

    assert seen(paths) == [True, True]
    with lock.hold():
        assert seen(paths) == [False, False]
        assert traced(3) == 7
        # Also while one compiles inside the other, and after it.
        assert found == [[True, True]] * 3
        assert seen(paths) == [False, False]
        with pytest.raises(ZeroDivisionError):
            jax.jit(lambda x: x / (1 // 0))(1)
        assert seen(paths) == [False, False]
        assert traced(4) == 9
        assert len(found) == 3
    assert seen(paths) == [True, True]


def test_warm_up_is_on_all_devices() -> None:
    total = warm_up()
    assert total == jax.device_count()
    assert total.sharding.device_set == set(jax.devices())


INNER = """
import fcntl, os, pathlib
from support import gpu_lock
PATHS = [pathlib.Path(FOLDER, f"gpu{i}") for i in range(2)]

def taken():
    found = []
    for path in PATHS:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(path.name)
    return found

before, warm_up = [taken()], gpu_lock.warm_up
gpu_lock.warm_up = lambda: (warm_up(), before.append(taken()))

def test_inner():
    # While collecting, and once the GPUs are started.
    assert before == [[], []]
    assert taken() == ["gpu0", "gpu1"]
"""


def test_a_test_has_the_lock(tmp_path) -> None:
    """A pytest process takes the lock for its tests if the environment says so."""
    (tmp_path / "test_inner.py").write_text(f"FOLDER = {str(tmp_path)!r}\n{INNER}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "test_inner.py"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "PYTEST_ADDOPTS": "-p no:cacheprovider",
        "JAX_EP_TEST_GPU_LOCKS": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "JAX_PLATFORMS": "cpu",
    }
    run = launch.run_to_end(
        command, cwd=tmp_path, env={**os.environ, **environment}, timeout=120
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr


def test_one_after_the_other(lock, paths) -> None:
    other = GpuLock(paths)
    theirs = other.hold()
    waiting = threading.Thread(target=theirs.__enter__, daemon=True)
    with lock.hold():
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
    assert seen(paths) == [False, False]
    theirs.__exit__(None, None, None)
    other.close()
    assert seen(paths) == [True, True]


def test_environment(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("JAX_EP_TEST_GPU_LOCKS", raising=False)
    assert of_environment() is None
    monkeypatch.setenv("JAX_EP_TEST_GPU_LOCKS", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,11")
    made = of_environment()
    assert made is not None
    # Not for processes that are started from here.
    assert of_environment() is None
    paths = [tmp_path / "gpu3", tmp_path / "gpu11"]
    script = tmp_path / "worker.py"
    script.write_text('print("{}")')
    for _ in range(2):
        with made.hold():
            # The locks are kept for these processes.
            assert gpus.run_worker(str(script), timeout=60) == {}
            (ended,) = launch.launch(str(script), 1, [], tmp_path, 60)
            assert ended.code == 0
            assert seen(paths) == [False, False]
            # Neither this process nor the test that waits for it holds the locks.
            subprocess.run([sys.executable, "-c", ""], check=True)
            assert seen(paths) == [True, True]
    made.close()
