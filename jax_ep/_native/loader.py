"""The native modules: `cpu` always, `cuda` where the build had a CUDA compiler.

And `shmem()`, loaded when asked for, where the build had NVSHMEM's headers as well.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING


def _extend_to_installed() -> bool:
    """Lets a process started in the repository find what pip built from it.

    There the sources come before the installed package on sys.path, without the native
    modules beside them.
    """
    import importlib.metadata  # slow, and only needed here

    package = sys.modules["jax_ep"]
    try:
        installed = importlib.metadata.distribution("jax_ep")
    except importlib.metadata.PackageNotFoundError:
        return False
    folder = str(installed.locate_file("jax_ep"))
    if folder in package.__path__ or installed.version != package.__version__:
        return False
    package.__path__.append(folder)
    return True


def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"jax_ep.{name}")
    except ModuleNotFoundError:
        return None


def _load_cpu() -> ModuleType:
    module = _load("_native_cpu")
    if module is None and _extend_to_installed():
        module = _load("_native_cpu")
    if module is None:
        raise ImportError(
            "jax_ep: the native module must be built, got the bare sources; run "
            "pip install . in the repository (again after its version changed)"
        )
    return module


if TYPE_CHECKING:
    from jax_ep import _native_cpu as cpu
else:
    cpu = _load_cpu()
cuda = _load("_native_cuda")


def shmem() -> ModuleType | None:
    """The module of transport shmem, or None where this build has none."""
    return _load("_native_shmem")
