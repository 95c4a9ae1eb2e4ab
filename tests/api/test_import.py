"""What `import jax_ep` does to a process: threads, environment, time."""

from __future__ import annotations

import inspect
import os
import pathlib
import sys
import typing

import pytest

import jax_ep
from jax_ep._setup import runtime
from support.launch import run_to_end

# Imports the package that this process uses, whatever is in the current folder.
SAME = {
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": str(pathlib.Path(jax_ep.__file__).parent.parent),
}


def python(program: str, **env: str) -> str:
    """Standard output of `program` in a process of its own, on the CPU."""
    base = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    base |= SAME
    done = run_to_end(
        [sys.executable, "-c", program], env={**base, "JAX_PLATFORMS": "cpu", **env}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_hints_of_the_public_functions_resolve() -> None:
    """Run-time type checkers can read them."""
    public = (jax_ep.checkpoints, jax_ep.formats, jax_ep.sharded, jax_ep.stats)
    for module in (jax_ep, *public):
        for value in vars(module).values():
            if inspect.isfunction(value) and value.__module__.startswith("jax_ep"):
                hints = typing.get_type_hints(value)
                assert hints.get("ep", jax_ep.EPHandle) is jax_ep.EPHandle


THREADS = """
import os, subprocess, sys
before = dict(os.environ)
import {order}
assert os.environ == before
{devices}
jax.devices()
child = "import os; print(os.environ.get('NPROC'))"
told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
assert dict(os.environ) == before
assert told.stdout.strip() == before.get("NPROC", "None")
from jax_ep._setup import runtime
runtime.warn_if_short = lambda pool_threads, devices: print(pool_threads)
mesh = jax.make_mesh((jax.device_count(),), ("ep",))
config = jax_ep.EPConfig(num_experts=16, top_k=1, hidden_size=8, max_tokens_per_rank=1)
jax_ep.init(mesh, "ep", config).close()
"""
MANY = 'jax.config.update("jax_num_cpu_devices", 8)'


def threads(devices: str = MANY, order: str = "jax_ep, jax", **env: str) -> int:
    """How many CPU threads XLA's backend starts; the environment must not change."""
    return int(python(THREADS.format(order=order, devices=devices), **env))


@pytest.mark.parametrize("order", ["jax_ep, jax", "jax, jax_ep"])
def test_room_for_8_devices(order: str) -> None:
    """On any machine, whichever of jax and jax_ep is imported first."""
    assert threads(order=order) >= 32
    flags = "--xla_force_host_platform_device_count=16"
    assert threads("", order, XLA_FLAGS=flags) >= 64


def test_one_device_needs_no_room() -> None:
    assert threads("") <= max(2, os.cpu_count() or 1)


def test_keeps_a_larger_nproc() -> None:
    assert threads(NPROC="200") == 200  # XLA takes up to 256
    assert threads(NPROC="3") >= 32
    # Python takes these for digits, but not for a usable number.
    assert threads(NPROC="\u00b2") >= 32
    assert threads(NPROC="1" * 5000) >= 32


LATE = """
import warnings, jax
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()
import jax_ep
mesh = jax.make_mesh((8,), ("ep",))
config = jax_ep.EPConfig(num_experts=8, top_k=1, hidden_size=8, max_tokens_per_rank=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jax_ep.init(mesh, "ep", config)
    jax_ep.init(mesh, "ep", config)
print([str(w.message) for w in caught])
"""


@pytest.mark.skipif((os.cpu_count() or 1) > 8, reason="the pool is large by itself")
def test_warns_when_too_late() -> None:
    """If the backend already has its threads, init warns that runs can hang."""
    assert python(LATE).count("NPROC=") == 1  # for two inits
    early = LATE.replace("jax.devices()\nimport jax_ep", "import jax_ep")
    assert early != LATE
    assert python(early).strip() == "[]"


def test_warns_each_time_where_warnings_are_errors(monkeypatch) -> None:
    """A raised warning does not count as given: init failed and is called again."""
    monkeypatch.setattr(runtime, "_warned", False)
    for _ in range(2):
        with pytest.raises(RuntimeWarning, match="CPU pool must have at least 16"):
            runtime.warn_if_short(8, 8)
    runtime.warn_if_short(16, 8)
    with pytest.warns(RuntimeWarning, match="NPROC=32"):
        runtime.warn_if_short(8, 8)
    runtime.warn_if_short(8, 8)


def test_import_time(tmp_path: pathlib.Path) -> None:
    """About a tenth of jax's own time, some 50 ms, once both have bytecode.

    Compares CPU times, the best of several runs, as a slow machine changes both alike.
    A busy one adds a fifth to the ratio.
    """
    program = (
        "import sys\nfrom time import process_time as now\n"
        "start = now()\nimport jax\n"
        # Bytecode of all that jax_ep imports, even if its own folder has none: the
        # first run compiles it.
        f"sys.pycache_prefix, sys.dont_write_bytecode = {str(tmp_path)!r}, False\n"
        "middle = now()\nimport jax_ep\n"
        "print(now() - middle, middle - start)"
    )
    times: list[tuple[float, ...]] = []

    def ratio() -> float:
        own, of_jax = (min(each) for each in zip(*times, strict=True))
        return own / of_jax

    while not times or (ratio() >= 0.12 and len(times) < 10):
        times.append(tuple(map(float, python(program).split())))
    assert ratio() < 0.12, times
