"""Starts worker processes with a specification, and writes their rows as they come."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_ep._cli import text as _text

NO_TIME = "no time left"
_GRACE_S = 60  # how long after the deadline a case that began before it may end

Emit = Callable[[dict[str, Any]], None]


def start(
    flags: str,
    spec: dict[str, Any],
    module: str = "jax_ep._cli.bench.worker",
    folder: pathlib.Path | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """Runs a worker module, whose `main` gets the specification and an output path.

    XLA reads its flags once, when a process starts to use it, so each worker has its
    own process. If the specification says "here", it runs in this process, which has
    its flags already.

    Args:
        flags: XLA's flags, added to those of the environment.
        spec: the specification. The process is ended a little after its "deadline".
        module: the worker.
        folder: where the process starts; None if `module` is one of jax_ep.

    Returns:
        The rows that the worker wrote, and what went wrong, or "".
    """
    with tempfile.TemporaryDirectory() as made:
        output = pathlib.Path(made) / "rows.jsonl"
        if spec["here"]:
            problem = _run_here(spec, module, output)
        else:
            problem = _run_apart(flags, spec, module, folder, output)
        lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines], problem


def _run_here(spec: dict[str, Any], module: str, output: pathlib.Path) -> str:
    try:
        importlib.import_module(module).main([json.dumps(spec), str(output)])
    except Exception as error:  # must not end the other workers
        traceback.print_exc()
        return f"worker raised {error_text(error)}"
    return ""


def _run_apart(
    flags: str,
    spec: dict[str, Any],
    module: str,
    folder: pathlib.Path | None,
    output: pathlib.Path,
) -> str:
    environment = dict(os.environ)
    # Multicast over NVLink can take the GPUs of a shared host out of service.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flags}".strip()
    limit = max(0, spec["deadline"] - time.time()) + _GRACE_S
    # -P: a jax.py in the current folder must not be imported.
    safe = ["-P"] if folder is None else []
    command = [sys.executable, *safe, "-m", module, json.dumps(spec), str(output)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"worker killed after {limit:.0f} s"
    return f"worker ended with {done.returncode}" if done.returncode else ""


def understood(flags: str) -> bool:
    """Whether XLA knows all of these flags; unknown ones end a process."""
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-c", "import jax; jax.devices()"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode == 0


def error_text(error: BaseException) -> str:
    """Returns an exception's name and message, cut to a length that fits a record."""
    return f"{type(error).__name__}: {error}"[:500]


def given(arguments: Sequence[str] | None) -> tuple[dict[str, Any], str]:
    """Returns a worker's specification and output path; None: the command line's."""
    specification, output = sys.argv[1:] if arguments is None else arguments
    return json.loads(specification), output


def late(spec: dict[str, Any]) -> bool:
    """Whether a worker's time is over."""
    return time.time() > spec["deadline"]


def ep_mesh(count: int | None = None) -> Mesh:
    """Returns a mesh of all devices, or the first `count`, with one axis."""
    devices = np.array(jax.devices()[: count or None])
    return Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))


def _say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def reporting(
    path: str,
    line: Callable[[dict[str, Any]], str],
    mesh: Mesh,
    say: Callable[[str], None] = _say,
) -> Iterator[Emit]:
    """Yields a function that writes a row to `path` at once and prints its `line`.

    Rows for which `line` returns "" are written but not printed. The first row names
    the devices. The rows in the file survive if the process hangs.
    """
    begin = time.perf_counter()
    kind, count = mesh.devices.flat[0].device_kind, mesh.size
    with pathlib.Path(path).open("a") as output:

        def write(row: dict[str, Any]) -> None:
            output.write(json.dumps(row) + "\n")
            output.flush()

        def emit(row: dict[str, Any]) -> None:
            write(row)
            if text := line(row):
                passed = f"  {time.perf_counter() - begin:5.1f} s  "
                say("\n".join(_text.fit(passed + text, len(passed))))

        write({"device": kind, "count": count, "jax": jax.__version__})
        yield emit
