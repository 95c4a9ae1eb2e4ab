"""The second call of a program compiles nothing, and nothing else compiles again.

In a process without Flax, whose own imports would hide the effect of jax_ep's.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

import jax_ep
from support import HAS_GPUS, WORKERS
from support.launch import run_to_end


def test_second_calls_compile_nothing() -> None:
    """Neither jax_ep's calls nor a function that was jitted before."""
    package = str(pathlib.Path(jax_ep.__file__).parent.parent)
    found = filter(None, (package, os.environ.get("PYTHONPATH")))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    if not HAS_GPUS:
        env["JAX_PLATFORMS"] = "cpu"
    worker = str(WORKERS / "compiles_once_worker.py")
    done = run_to_end(
        [sys.executable, worker],
        # The backend starts before jax_ep is imported.
        env={**env, "PYTHONSAFEPATH": "1", "NPROC": "32"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8, found
    for name, (first, second) in found.items():
        assert first, f"{name} compiled nothing at first: what counts is broken"
        assert not second, f"the second call of {name} compiled {second}"
