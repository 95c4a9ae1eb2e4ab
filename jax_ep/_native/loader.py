"""The native modules: `cpu` always, `cuda` and `shmem()` if they are installed.

`cuda` and `shmem()` come from this package if its build had a CUDA compiler (and the
headers of NVSHMEM), else from a plugin. `plugin` is the plugin that was loaded, or
None. `plugin_problem` says what is wrong with the installed plugins, or is None.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from jax_ep._native import plugins


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


def _load(name: str, package: str = "jax_ep") -> ModuleType | None:
    try:
        return importlib.import_module(f"{package}.{name}")
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


def _load_cuda() -> tuple[ModuleType | None, plugins.Plugin | None, str | None]:
    """Returns `cuda`, `plugin` and `plugin_problem`."""
    own = _load("_native_cuda")
    if own is not None:
        return own, None, None
    version = sys.modules["jax_ep"].__version__
    plugin, problem = plugins.choose(plugins.installed(), version)
    if plugin is None:
        return None, None, problem
    try:
        module = importlib.import_module(f"{plugin.package}._native_cuda")
        return module, plugin, problem
    except ImportError as error:
        return None, None, f"plugin {plugin.name} does not load: {error}"


cuda, plugin, plugin_problem = _load_cuda()
if plugin_problem is not None:
    warnings.warn(f"jax_ep: {plugin_problem}", RuntimeWarning, stacklevel=2)


def shmem() -> ModuleType | None:
    """The module of transport shmem, or None if this installation has none."""
    return _load("_native_shmem", plugin.package if plugin else "jax_ep")
