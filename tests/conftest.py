"""Set-up of the whole suite: 8 CPU devices where there is no GPU, and skips.

jax_ep is imported before anything starts a JAX backend, so that it gets enough threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from support import HAS_GPUS

# On CPUs these tests spend their time compiling in XLA, whose older emitters take two
# thirds of the time. jax 0.12 and newer have only the newer ones and ignore this.
if not HAS_GPUS:
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )

import jax_ep

# isort: split
import jax
import numpy as np
import pytest

from support import gpu_lock, helpers
from support.parts import pytest_addoption as pytest_addoption
from support.parts import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)

GPU_LOCK = pytest.StashKey[gpu_lock.GpuLock]()

# Changes only the CPU platform, so that a machine with GPUs still uses those.
# Processes that multiprocess_plugin.py has started have fewer devices each.
if not helpers.IN_PROCESSES:
    jax.config.update("jax_num_cpu_devices", 8)
# Gradients are compared with a dense formula: TF32 would hide errors behind noise.
jax.config.update("jax_default_matmul_precision", "highest")


# What a bare `pytest` runs. With paths, -m or -k the caller chooses.
LESS = "not slow and not thorough"
MOST_PROCESSES = 4  # each needs up to 2 GB


def is_bare(config: pytest.Config) -> bool:
    chosen = config.option.markexpr or config.option.keyword
    return config.args_source == config.ArgsSource.TESTPATHS and not chosen


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs a bare `pytest` in several processes (pytest-xdist); `-n 0` keeps to one."""
    option = config.option
    # pytest-xdist's workers call this, too.
    if hasattr(config, "workerinput") or not is_bare(config) or HAS_GPUS:
        return
    if getattr(option, "numprocesses", 0) is not None or option.usepdb:
        return
    if option.collectonly or option.capture == "no":
        return
    option.numprocesses = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    option.dist = "loadfile"


def pytest_configure(config: pytest.Config) -> None:
    if is_bare(config):
        config.option.markexpr = LESS
    if HAS_GPUS and hasattr(config, "workerinput"):  # a worker of pytest-xdist
        config.stash[GPU_LOCK] = gpu_lock.of_worker(config.workerinput["workerid"])


def pytest_terminal_summary(
    terminalreporter: Any, exitstatus: int, config: pytest.Config
) -> None:
    if config.option.markexpr == LESS:
        terminalreporter.section("left out")
        terminalreporter.line(
            "tests marked slow or thorough, which take as long again: long runs, more "
            "combinations of what has run, benchmarks in a tiny form\n"
            'pytest -m "slow or thorough" runs them, pytest tests runs everything'
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    if GPU_LOCK in session.config.stash and session.items:
        gpu_lock.warm_up()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Holds the lock for a whole test, with the fixtures that it starts or ends."""
    lock = item.config.stash.get(GPU_LOCK, None)
    if lock is None:
        return (yield)
    with lock.hold():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, this machine has none")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Restores the environment, which commands change that a test runs in-process."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def quick_compiles():
    """For modules that mostly compile and whose results are compared within rounding.

    Programs of whole layers compile in half the time, but run slower.
    """
    if jax.default_backend() != "cpu":
        yield
        return
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name.upper(), "1")  # for processes
        yield
    jax.config.update(name, before)


@pytest.fixture(scope="module")
def ep(mesh):
    """A handle of the module's own: other tests leave invalid ids for check() to find.

    `mesh` is the module's own fixture.
    """
    config = helpers.make_config()
    with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as handle:
        yield handle


@pytest.fixture
def others_go_on(mesh, ep):
    """Checks after the test that the handle still gives right answers."""
    yield
    inputs = helpers.make_inputs(np.random.default_rng(1), ep.config, mesh.size)
    d = helpers.run_dispatch(ep, mesh, inputs)
    helpers.assert_dispatched(ep.config, d, inputs)
    assert ep.check() is None
