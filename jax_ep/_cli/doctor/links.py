"""Links between GPUs, and versions, as the driver and its tools report them.

No function here raises: an answer that is not available is None or "unknown".
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import pathlib
import re
import subprocess
from typing import Any

from jax_ep._native import ffi
from jax_ep._peers import windows

UNKNOWN = "unknown"
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_DRIVER_FILE = pathlib.Path("/proc/driver/nvidia/version")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def _smi(*arguments: str) -> str:
    """Returns the output of nvidia-smi, empty if it fails."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(  # noqa: S603  # all arguments are constants
            command, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return _ESCAPES.sub("", done.stdout) if done.returncode == 0 else ""


def links(devices: list[Any]) -> list[list[str]] | None:
    """Returns the link of each pair of devices as nvidia-smi names it; None on CPUs.

    "NV18" means 18 NVLinks; "PIX", "PXB", "PHB", "NODE" and "SYS" mean PCIe, from near
    to far.
    """
    if devices[0].platform == "cpu":
        return None
    places = _places()
    at = [places.get(_uuid(device)) for device in devices]
    table = _topology()

    def kind(a: int, b: int) -> str:
        return "X" if a == b else table.get((at[a], at[b]), UNKNOWN)

    count = range(len(devices))
    return [[kind(a, b) for b in count] for a in count]


def _uuid(device: Any) -> str:
    if ffi.native_cuda is None:
        return ""
    try:
        return ffi.native_cuda.device_uuid(windows.ordinal(device))
    except RuntimeError:
        return ""


def _places() -> dict[str, int]:
    """Returns nvidia-smi's number of each GPU by UUID, in hexadecimal digits only.

    nvidia-smi numbers all GPUs of the machine; a process may see only some of them, and
    in another order.
    """
    found = {}
    listed = _smi("--query-gpu=index,uuid", "--format=csv,noheader")
    for index, uuid in re.findall(r"^(\d+), GPU-([0-9a-f-]+)$", listed, re.MULTILINE):
        found[uuid.replace("-", "")] = int(index)
    return found


def _topology() -> dict[Any, str]:
    """Returns the kind of link by pair of nvidia-smi's numbers."""
    lines = _smi("topo", "-m").splitlines()
    if not lines:
        return {}
    columns = [int(number) for number in re.findall(r"\bGPU(\d+)\b", lines[0])]
    found: dict[Any, str] = {}
    for line in lines[1:]:
        name, *cells = line.split() or [""]
        row = re.fullmatch(r"GPU(\d+)", name)
        if row and len(cells) >= len(columns):
            pairs = zip(columns, cells, strict=False)
            found |= {(int(row[1]), column): kind for column, kind in pairs}
    return found


def driver() -> str | None:
    """Returns the version of NVIDIA's driver."""
    listed = _smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    if listed:
        return listed[0]
    try:
        told = _DRIVER_FILE.read_text()
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)", told, re.MULTILINE)
    return found[1] if found else None


def toolkit() -> str | None:
    """Returns the version of the CUDA toolkit that the CUDA module was built with."""
    version = getattr(ffi.native_cuda, "CUDA_VERSION", None)
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def nccl() -> str | None:
    """Returns the version of the NCCL that JAX finds."""
    for name in _NCCL_PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    major, rest = divmod(number.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"
