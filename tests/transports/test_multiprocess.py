"""The collective transport over jax.distributed processes of this host."""

from __future__ import annotations

import pathlib

import jax
import pytest

from support.launch import launch, tails

TIMEOUT_S = 150


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "devices", "few"),
    [(2, 2, []), (4, 1, ["few"]), (8, 1, ["few"])],
    ids=["2 of 2", "4 of 1", "8 of 1"],
)
def test_same_semantics(
    processes: int, devices: int, few: list[str], tmp_path: pathlib.Path
) -> None:
    run_processes(processes, [str(devices), *few], tmp_path, JAX_PLATFORMS="cpu")


@pytest.mark.gpu
@pytest.mark.multiprocess
def test_one_process_per_gpu(tmp_path: pathlib.Path) -> None:
    processes = min(4, jax.device_count()) // 2 * 2
    if processes == 0:
        pytest.skip("needs 2 GPUs")
    # The test's own process holds the same GPUs.
    run_processes(processes, ["gpu1"], tmp_path, XLA_PYTHON_CLIENT_PREALLOCATE="false")


def run_processes(
    processes: int, args: list[str], folder: pathlib.Path, **environment: str
) -> None:
    """Starts the workers with `args` and asserts that all succeed."""
    environment["JAX_EP_TEST_TRANSPORT"] = "collective"
    ended = launch(
        "multiprocess_worker.py",
        processes,
        args,
        folder,
        TIMEOUT_S,
        environment,
    )
    assert [one.code for one in ended] == [0] * processes, tails(ended)
    # XLA may log its shutdown after the worker's last line.
    assert all("right" in one.log.splitlines() for one in ended), tails(ended)
