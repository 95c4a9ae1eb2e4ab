"""Set-up of the whole suite: 8 CPU devices where there is no GPU, and skips.

jax_ep comes before anything starts a JAX backend, because its import raises NPROC.
"""

from __future__ import annotations

import pathlib
import sys

import jax_ep  # noqa: F401  (imported for its effect on NPROC)

# isort: split
import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

# Changes only the CPU platform, so that a machine with GPUs still uses those.
jax.config.update("jax_num_cpu_devices", 8)
# Gradients are compared with a dense formula: TF32 would hide errors behind noise.
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, this machine has none")
