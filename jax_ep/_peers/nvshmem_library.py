"""Where NVSHMEM's library may be. Used by nvshmem.py."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Iterator

LIBRARY = "libnvshmem_host.so.3"
PACKAGE = "nvidia-nvshmem-cu13"


def candidates() -> Iterator[str]:
    """Where the library may be: NVSHMEM_HOME, PyPI's wheel, the loader's own places."""
    home = os.environ.get("NVSHMEM_HOME")
    if home:
        yield str(pathlib.Path(home) / "lib" / LIBRARY)
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield str(pathlib.Path(folder) / "lib" / LIBRARY)
    yield LIBRARY
