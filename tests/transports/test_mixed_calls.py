"""Processes in different collective calls: all ranks get an error and empty results.

XLA pairs up whatever exchanges its processes run, so each call would get the other's
data. tests/cc/mixed_calls_test.cc tests only the steps.
"""

from __future__ import annotations

import os
import pathlib

import jax
import numpy as np
import pytest

import jax_ep
from support import gpus, helpers
from support.launch import launch, tails

TIMEOUT_S = 90


def run_processes(
    processes: int, args: list[str], folder: pathlib.Path, **environment: str
) -> None:
    """Starts the workers and asserts that all succeed."""
    ended = launch(
        "mixed_calls_worker.py", processes, args, folder, TIMEOUT_S, environment
    )
    assert [one.code for one in ended] == [0] * processes, tails(ended)
    assert all("right" in one.log.splitlines() for one in ended), tails(ended)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "devices"), [(3, 1), (2, 2)], ids=["3 of 1", "2 of 2"]
)
def test_all_are_told(processes: int, devices: int, tmp_path: pathlib.Path) -> None:
    run_processes(
        processes, [str(devices), "collective"], tmp_path, JAX_PLATFORMS="cpu"
    )


def test_reports_are_raised_one_kind_at_a_time(monkeypatch) -> None:
    """An exchange that is not jax_ep's has no name; bad ids wait for the next check."""
    mesh = helpers.make_mesh(1)
    config = helpers.make_config()
    with jax_ep.init(mesh, "ep", config, transport="collective") as ep:
        inputs = helpers.make_inputs(np.random.default_rng(1), config, 1)
        inputs.ids[0][2, 1] = 99
        helpers.run_dispatch(ep, mesh, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(
                ep._native, "take_mixed_calls", lambda key: [(3, 0, 1, 3, 0, False)]
            )
            words = (
                r"rank 3 .* in a combine .* rank 1 was in an exchange outside jax_ep"
            )
            with pytest.raises(jax.errors.JaxRuntimeError, match=words):
                ep.check()
        with pytest.raises(jax_ep.InvalidIdError, match="99"):
            ep.check()
        assert ep.check() is None


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.parametrize("transport", ["collective", "p2p"])
def test_all_are_told_on_gpus(transport: str, tmp_path: pathlib.Path) -> None:
    """On p2p for halves with `overlap="copy"`, which exchange through XLA as well."""
    processes = helpers.some_ranks(4)
    if processes == 1 and gpus.ONE_GPU in os.environ:
        processes = 4
    if processes < 2:
        pytest.skip(f"needs 2 GPUs, or {gpus.ONE_GPU}=1, so that processes share one")
    # The test's own process holds the same GPUs.
    run_processes(
        processes,
        ["gpu1", transport],
        tmp_path,
        JAX_EP_TEST_TRANSPORT=transport,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
