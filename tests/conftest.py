"""Set-up of the whole suite: 8 CPU devices where there is no GPU, and skips.

jax_ep comes before anything starts a JAX backend, because its import raises NPROC.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

# On CPUs these tests' time is XLA's, which compiles them in two thirds of it by its
# older emitters. From jax 0.12 on it has the newer ones alone, and ignores this.
if not pathlib.Path("/proc/driver/nvidia/gpus").exists():
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    )

import jax_ep

# isort: split
import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# Last: of the root `benchmarks` and `tools`, but no jax_ep without compiled modules.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "docs"))

import helpers
import turns

TURNS = turns.of_environment()

# Changes only the CPU platform, so that a machine with GPUs still uses those.
# lockstep.py has started processes of fewer devices each.
if not helpers.IN_PROCESSES:
    jax.config.update("jax_num_cpu_devices", 8)
# Gradients are compared with a dense formula: TF32 would hide errors behind noise.
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="I/N: every N-th test, from number I on")


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    if part := config.getoption("--part"):
        first, parts = map(int, part.split("/"))
        kept = items[first::parts]
        config.hook.pytest_deselected(
            items=[item for item in items if item not in kept]
        )
        items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    if TURNS is not None and session.items:
        turns.warm_up()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[Any]:
    """All of a test, with the fixtures that it is the first or the last to need."""
    if TURNS is None:
        return (yield)
    with TURNS.run():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, this machine has none")


@pytest.fixture(scope="module")
def quick_compiles():
    """For modules whose time is XLA's and whose results are compared within rounding.

    Programs of whole layers compile in half the time; what runs is slower.
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
    """Of one module alone: other tests leave invalid ids for their handles' check.

    `mesh` is the module's own fixture.
    """
    config = helpers.make_config()
    with jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT) as handle:
        yield handle


@pytest.fixture
def others_go_on(mesh, ep):
    """After every error a handle still gives right answers in this process."""
    yield
    inputs = helpers.make_inputs(np.random.default_rng(1), ep.config, mesh.size)
    d = helpers.run_dispatch(ep, mesh, inputs)
    helpers.assert_dispatched(ep.config, d, inputs)
    assert ep.check() is None
