"""gpu_lock.py: which processes hold a GPU, and when."""

from __future__ import annotations

import fcntl
import pathlib
import subprocess
import sys
import tempfile
import threading

import jax
import pytest

from support import gpus, launch
from support.gpu_lock import SHARE, GpuLock, of_worker, warm_up


def free(path: pathlib.Path) -> bool:
    """Whether another process could take the lock."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def path(tmp_path) -> pathlib.Path:
    return tmp_path / "lock"


@pytest.fixture
def lock(path):
    made = GpuLock(path)
    yield made
    made.close()


def test_holds_but_while_compiling(lock, path) -> None:
    found = []

    @jax.jit
    def traced(x):
        found.append(free(path))
        inner = jax.jit(lambda y: found.append(free(path)) or y * 2)(x)
        found.append(free(path))
        return inner + 1

    assert free(path)
    with lock.hold():
        assert not free(path)
        assert traced(3) == 7
        # Also while one compiles inside the other, and after it.
        assert found == [True] * 3
        assert not free(path)
        with pytest.raises(ZeroDivisionError):
            jax.jit(lambda x: x / (1 // 0))(1)
        assert not free(path)
        assert traced(4) == 9
        assert len(found) == 3
    assert free(path)


def test_warm_up_is_on_all_devices() -> None:
    total = warm_up()
    assert total == jax.device_count()
    assert total.sharding.device_set == set(jax.devices())


def test_one_after_the_other(lock, path) -> None:
    other = GpuLock(path)
    theirs = other.hold()
    waiting = threading.Thread(target=theirs.__enter__, daemon=True)
    with lock.hold():
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
    assert not free(path)
    theirs.__exit__(None, None, None)
    other.close()
    assert free(path)


def test_workers_share_locks(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,11")
    made = of_worker(f"gw{SHARE}")
    same, other = of_worker(f"gw{2 * SHARE - 1}"), of_worker("gw0")
    paths = sorted(tmp_path.glob("*gpus-3,11-*"))
    assert len(paths) == 2
    script = tmp_path / "worker.py"
    script.write_text('print("{}")')
    for _ in range(2):
        with made.hold():
            assert list(map(free, paths)) == [True, False]
            # The lock is kept for these processes.
            assert gpus.run_worker(str(script), timeout=60) == {}
            (ended,) = launch.launch(str(script), 1, [], tmp_path, 60)
            assert ended.code == 0
            assert list(map(free, paths)) == [True, False]
            # Neither this process nor the test that waits for it holds the lock.
            subprocess.run([sys.executable, "-c", ""], check=True)
            assert list(map(free, paths)) == [True, True]
    for one in (made, same, other):
        one.close()
