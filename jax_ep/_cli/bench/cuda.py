"""Compiles CUDA programs where they run, and measures the peak of writes to peers."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from jax_ep._cli.bench import record

FLAGS = ("-O3", "-std=c++20", "--Werror=all-warnings")


def find_nvcc() -> str:
    """Returns the nvcc of CUDA_HOME, of PATH, or where toolkits are installed."""
    home = os.environ.get("CUDA_HOME")
    candidates = [str(pathlib.Path(home, "bin", "nvcc"))] if home else []
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise RuntimeError("no nvcc in CUDA_HOME or PATH")


def build(
    nvcc: str, source: pathlib.Path, *flags: str, arch: str = "sm_90"
) -> tuple[pathlib.Path, str]:
    """Compiles a program; returns its path and nvcc's version."""
    made = pathlib.Path(tempfile.mkdtemp(prefix="jax_ep_")) / source.stem
    # Not -arch, which would also make PTX, without the features of this GPU.
    target = f"-gencode=arch=compute_{arch[3:]},code={arch}"
    command = [nvcc, *FLAGS, target, "-Xcompiler=-Wall,-Wextra", *flags]
    done = subprocess.run(
        [*command, "-o", str(made), str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{source.name}: the build failed\n{done.stdout}")
    version = subprocess.run(
        [nvcc, "--version"], capture_output=True, text=True, check=True
    )
    return made, version.stdout.strip().splitlines()[-1]


def run(
    program: pathlib.Path, arguments: Sequence[str], limit: float
) -> dict[str, Any]:
    """Returns the report that a program prints; if it fails, the error has it."""
    # The program bounds its measurements itself, but not a hung GPU.
    try:
        done = subprocess.run(
            [str(program.resolve()), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{program.name}: no answer in {limit:.0f} s") from error
    except OSError as error:
        raise RuntimeError(f"{program}: {error.strerror}") from error
    if done.returncode != 0:
        raise RuntimeError(f"{done.stdout}\n{program.name}: failed, see above")
    return json.loads(done.stdout)


def copy_peak(report: dict[str, Any]) -> float | None:
    """Returns the GB/s of the fastest copy kernel among a report's writes to peers."""
    rows = report.get("peer_write", [])
    copies = [row["gb_s"] for row in rows if row["pattern"].endswith("copy")]
    return max(copies, default=None)


def peer_write_peak() -> tuple[float | None, dict[str, Any]]:
    """Measures how fast each GPU can write to the others while all do.

    Returns:
        GB/s, None for a single GPU; and the report, empty without GPUs.
    """
    if record.driver() == "unknown":
        return None, {}
    source = pathlib.Path(__file__).with_name("peer_writes.cu")
    report = run(build(find_nvcc(), source)[0], [], 60)
    return copy_peak(report), report
