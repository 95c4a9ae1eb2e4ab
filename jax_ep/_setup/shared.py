"""Handles that layers and traced functions with equal arguments share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Transport
from jax_ep._setup import init

_handles: dict[Any, EPHandle] = {}
_lock = threading.Lock()


def shared_handle(
    mesh: Mesh | None,
    axis_name: str | Sequence[str],
    config: EPConfig,
    transport: Transport = "auto",
) -> EPHandle:
    """Returns one open handle per set of arguments; the first call runs `jax_ep.init`.

    Layers of `jax_ep.flax` get their handles here. It can be called while JAX traces:
    a function that is traced again gets the same handle. A handle stays open until its
    `close` (the next call makes a new one) or `jax_ep.close_shared_handles` closes it.
    A process that loads a compiled executable must first call this, with the arguments
    of the process that compiled it.

    Args:
        mesh: a `jax.sharding.Mesh`, or None for the mesh of `jax.set_mesh`.
        axis_name: the EP axis, or a tuple of axes whose product is the group.
        config: sizes and options.
        transport: "auto", "p2p", "shmem" or "collective".

    Returns:
        An `EPHandle`.

    Raises:
        ValueError, TypeError, RuntimeError: for the reasons of `jax_ep.init`.
    """
    mesh = init.resolved_mesh(mesh)
    key = (mesh, init.axis_names(mesh, axis_name), config, transport)
    with _lock:
        found = _handles.get(key) if isinstance(config, EPConfig) else None
        # In a forked child, a handle of the parent; init raises there.
        if found is None or found.closed or found.forked:
            for other in [k for k, ep in _handles.items() if ep.closed]:
                del _handles[other]
            found = init.init(mesh, axis_name, config, transport)
            _handles[key] = found
    return found


def close_shared_handles() -> None:
    """Closes every handle of `jax_ep.shared_handle`, including those of layers.

    Compiled functions that use one can no longer be called; after
    `jax.clear_caches()` JAX traces them again. Layers made later get new handles.
    """
    with _lock:
        handles = list(_handles.values())
        _handles.clear()
    for ep in handles:
        ep.close()
