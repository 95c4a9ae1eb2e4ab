"""Handles that everything of equal sizes shares: layers, and functions that trace."""

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
    """One open handle for equal arguments, made by `jax_ep.init` at the first call.

    Layers of `jax_ep.flax` take theirs from here. It may be called while JAX traces, as
    often as one likes: a function that is traced again gets the handle that it had.
    Handles stay open until they are closed, by their `close` (the next call makes a new
    one) or by `jax_ep.close_shared_handles`. A process that loads a compiled executable
    calls this first, with the arguments of the process that compiled it.

    Args:
        mesh: as in `jax_ep.init`, like what follows.
        axis_name: the EP axis, or a tuple of axes.
        config: sizes and options.
        transport: "auto", "p2p", "shmem" or "collective".

    Returns:
        An `EPHandle`.

    Raises:
        ValueError, TypeError, RuntimeError: as `jax_ep.init`.
    """
    mesh = init.resolved_mesh(mesh)
    key = (mesh, init.axis_names(mesh, axis_name), config, transport)
    with _lock:
        found = _handles.get(key) if isinstance(config, EPConfig) else None
        # A forked child has the parent's: init says what is wrong.
        if found is None or found.closed or found.forked:
            for other in [k for k, ep in _handles.items() if ep.closed]:
                del _handles[other]
            found = init.init(mesh, axis_name, config, transport)
            _handles[key] = found
    return found


def close_shared_handles() -> None:
    """Closes every handle of `jax_ep.shared_handle`, those of layers among them.

    Compiled functions that hold one are dead afterwards; `jax.clear_caches()` has JAX
    trace them again. Layers take a new handle when they are made.
    """
    with _lock:
        handles = list(_handles.values())
        _handles.clear()
    for ep in handles:
        ep.close()
