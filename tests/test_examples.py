"""The examples run in a short form and find what they promise."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import jax_ep

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(name, *arguments):
    environment = dict(os.environ)
    package = pathlib.Path(jax_ep.__file__).parent.parent
    # This process may hold most of the GPUs' memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    environment["PYTHONPATH"] = os.pathsep.join([str(package), *sys.path])
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("layer", ["flax", "sharded"])
def test_training_follows_the_dense_model(layer):
    for name in ("flax", "optax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    done = run("train.py", "--quick", "--layer", layer)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +\S+$", done.stdout, re.M)
    ours, dense = (np.array([float(row[i]) for row in rows]) for i in (1, 2))
    assert len(rows) == 12
    np.testing.assert_allclose(ours, dense, atol=2e-3)
    assert ours[-1] < ours[0] - 1
    assert "the same curve" in done.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["nvfp4", "fp8_block128"])
def test_decoding(name):
    done = run("decode.py", "--format", name, "--steps", "4", "--tokens", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"us a step", done.stdout)) == 2
    (error,) = re.findall(r"differ by ([\d.]+)%", done.stdout)
    assert 0 < float(error) < 50
