"""The native modules: `cpu` always, `cuda` and `shmem()` if they are installed.

`cuda` and `shmem()` come from this package if its build had a CUDA compiler (and the
headers of NVSHMEM), else from a plugin. `plugin` is the plugin that was loaded, or
None. `plugin_problem` says what is wrong with the installed plugins or with a CUDA
module of this package, or is None; `shmem_problem()` says so of `shmem()`. A module for
GPUs that does not load must not keep `import jax_ep` from working on CPUs.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from jax_ep._native import fingerprint, plugins

# For a module of this package that does not fit it.
_REBUILD = (
    "run pip install . in the repository again, or pip install --force-reinstall "
    f"jax_ep=={sys.modules['jax_ep'].__version__}"
)


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
    mismatch = fingerprint.mismatch(module)
    if mismatch is not None:
        raise ImportError(f"jax_ep: the native module {mismatch}; {_REBUILD}")
    return module


if TYPE_CHECKING:
    from jax_ep import _native_cpu as cpu
else:
    cpu = _load_cpu()


def _load_cuda() -> tuple[ModuleType | None, plugins.Plugin | None, str | None]:
    """Returns `cuda`, `plugin` and `plugin_problem`."""
    own, problem = _of_gpus("_native_cuda", "jax_ep")
    if problem is not None:
        unserved = "so it is not loaded and GPUs are not served"
        return None, None, f"the CUDA module {problem}, {unserved}; {_REBUILD}"
    if own is not None:
        return own, None, None
    version = sys.modules["jax_ep"].__version__
    plugin, problem = plugins.choose(plugins.installed(), version)
    if plugin is None:
        return None, None, problem
    module, wrong = _of_gpus("_native_cuda", plugin.package)
    if module is not None:
        return module, plugin, problem
    return None, None, plugins.unfit(plugin, wrong or "has no module _native_cuda")


def _of_gpus(name: str, package: str) -> tuple[ModuleType | None, str | None]:
    """Returns a module, or None and what is wrong with it, None if it is not there."""
    full = f"{package}.{name}"
    try:
        module = importlib.import_module(full)
        mismatch = fingerprint.mismatch(module)
        if mismatch is not None:
            return None, mismatch
        if name == "_native_cuda":
            module.targets()
        return module, None
    except Exception as error:  # whatever a foreign module raises
        missing = isinstance(error, ModuleNotFoundError) and error.name in (
            full,
            package,
        )
        if missing:
            return None, None
        return None, f"does not load ({type(error).__name__}: {error})"


cuda, plugin, plugin_problem = _load_cuda()
if plugin_problem is not None:
    warnings.warn(f"jax_ep: {plugin_problem}", RuntimeWarning, stacklevel=2)


def shmem() -> ModuleType | None:
    """The module of transport shmem, or None if this installation has none."""
    return _shmem()[0]


def shmem_problem() -> str | None:
    """What is wrong with the installed module of transport shmem, or None."""
    problem = _shmem()[1]
    if problem is None:
        return None
    remedy = _REBUILD if plugin is None else plugins.reinstall(plugin)
    return f"_native_shmem {problem}; {remedy}"


@functools.cache
def _shmem() -> tuple[ModuleType | None, str | None]:
    return _of_gpus("_native_shmem", plugin.package if plugin else "jax_ep")
