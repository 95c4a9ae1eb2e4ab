"""Plugins: packages with the CUDA modules, as the extra jax_ep[cuda13] installs them.

Each announces its package with an entry point of group "jax_ep.plugins", named after
the extra. jax_ep loads only a plugin of its own version and commit, because the modules
share the layout of windows and the attributes of calls.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

GROUP = "jax_ep.plugins"


class Plugin(NamedTuple):
    """An installed plugin.

    Attributes:
        extra: the extra of jax_ep that installs it, such as "cuda13".
        package: its Python package.
        name: what pip calls it.
        version: its version.
    """

    extra: str
    package: str
    name: str
    version: str


def installed() -> list[Plugin]:
    """Returns the installed plugins, those for newer CUDA first."""
    found = {
        Plugin(point.name, point.value, *_named(point))
        for point in importlib.metadata.entry_points(group=GROUP)
        if point.dist is not None
    }
    return sorted(found, reverse=True)


def _named(point: Any) -> tuple[str, str]:
    """Returns the name and version of a plugin, also of one without metadata."""
    try:
        name, version = point.dist.name, point.dist.version
    except Exception:  # an unfinished pip leaves files out, which has no one type
        name = version = None
    return name or point.value.replace("_", "-"), version or "unknown"


def reinstall(plugin: Plugin) -> str:
    """Returns what to do about a plugin that does not fit."""
    return (
        f'run pip install --force-reinstall "jax_ep[{plugin.extra}]=={plugin.version}",'
        f" or pip install . plugins/{plugin.extra} in the repository"
    )


def unfit(plugin: Plugin, problem: str) -> str:
    """Returns the sentence on a plugin that is of this version, but does not load."""
    return (
        f"plugin {plugin.name} {problem}, so it is not loaded and GPUs are not served; "
        + reinstall(plugin)
    )


def wanted_extra() -> str:
    """Returns the extra whose plugin fits the installed JAX."""
    found = [n for n in ("13", "12") if importlib.util.find_spec(f"jax_cuda{n}_plugin")]
    return f"cuda{found[0]}" if found else "cuda13"


def choose(found: Sequence[Plugin], version: str) -> tuple[Plugin | None, str | None]:
    """Returns the plugin to load for jax_ep `version`, and what is wrong, or None."""
    fitting = [plugin for plugin in found if plugin.version == version]
    if not fitting:
        if not found:
            return None, None
        other = found[0]
        return None, (
            f"plugin {other.name} must be of version {version} as jax_ep is, got "
            f"{other.version}, so it is not loaded and GPUs are not served; run "
            f'pip install "jax_ep[{other.extra}]=={version}"'
        )
    best = max(fitting, key=lambda plugin: plugin.extra == wanted_extra())
    others = " ".join(plugin.name for plugin in found if plugin != best)
    if not others:
        return best, None
    return best, (
        f"one plugin must be installed, got {len(found)}, of which {best.name} is "
        f"loaded; run pip uninstall {others}"
    )
