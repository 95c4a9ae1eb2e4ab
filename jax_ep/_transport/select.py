"""Which transport serves a mesh, and why not p2p or shmem. Used by init."""

from __future__ import annotations

import functools
import logging

import numpy as np
from jax.sharding import Mesh

from jax_ep import formats
from jax_ep._core.config import EPConfig
from jax_ep._core.literals import HandleTransport, Transport
from jax_ep._native import ffi
from jax_ep._peers import nvshmem, topology, windows
from jax_ep._peers.rendezvous import Meeting
from jax_ep._peers.windows import Obstacle

# A token and its codes lie in shared memory while they are encoded: with 2048 experts
# and top-32 nvfp4 has room for 238,592 elements. Others pass in pieces.
_MOST_HIDDEN_QUANTIZED, _MOST_HIDDEN = 1 << 17, 1 << 22

_NO_GPUS: Obstacle = "GPUs", "CPU devices"

_log = logging.getLogger("jax_ep")


def choose(
    mesh: Mesh,
    names: tuple[str, ...],
    requested: Transport,
    meeting: Meeting,
    config: EPConfig,
) -> HandleTransport:
    """The transport that `init` uses where `requested` was asked for.

    The same in all processes of the mesh, which call it together.

    Raises:
        ValueError: "p2p" or "shmem" was asked for and cannot be; says what is missing.
        RuntimeError: a process did not come.
    """
    if requested == "collective":
        return "collective"
    if requested == "shmem" and config.skip_a2a:
        raise ValueError(
            'jax_ep.init: transport="shmem" must have skip_a2a=False, as nothing is '
            'exchanged with it, got True; use transport="auto", "p2p" or "collective"'
        )
    row = _row_obstacle(config)
    if row is not None:
        return instead_of_windows(requested, row, meeting)
    shmem = config if requested == "shmem" else None
    found = obstacle(mesh, names, meeting, shmem)
    if found is None:
        return "shmem" if shmem else "p2p"
    # What exchanges nothing needs no NVSHMEM to be looked for, let alone started.
    far = requested == "auto" and not config.skip_a2a
    if far and _puts_reach(mesh, names, meeting, config):
        return "shmem"
    return instead_of_windows(requested, found, meeting)


def _row_obstacle(config: EPConfig) -> Obstacle | None:
    """Whether a multiprocessor's shared memory has room for what a call keeps there."""
    wires = (config.dispatch_format, config.grad_format, config.combine_format)
    quantized = any(name and formats.is_quantized(name) for name in wires)
    most = _MOST_HIDDEN_QUANTIZED if quantized else _MOST_HIDDEN
    if config.skip_a2a or config.hidden_size <= most:
        return None
    wire = "quantised formats" if quantized else "these dtypes"
    return f"hidden_size of at most {most} with {wire}", str(config.hidden_size)


def _puts_reach(
    mesh: Mesh, names: tuple[str, ...], meeting: Meeting, config: EPConfig
) -> bool:
    """Whether groups span nodes, and shmem serves them; the same in all processes."""
    if meeting.alone or obstacle(mesh, names, meeting, config) is not None:
        return False
    groups = ep_groups(mesh, names)
    return topology.several(topology.of_groups(groups, config, nvshmem.heap.hosts))


def instead_of_windows(
    requested: Transport, found: Obstacle, meeting: Meeting
) -> HandleTransport:
    """What `init` uses then.

    Raises:
        ValueError: nothing else was asked for.
    """
    must, got = found
    if requested == "auto":
        # CPU devices have no faster transport to miss.
        if found != _NO_GPUS:
            # What one machine lacks stays so. Between processes it may be another time.
            say = _warn_once if meeting.alone else _log.warning
            say(
                'jax_ep.init: "auto" takes transport "collective", because "p2p" must '
                f"have {must}, got {got}; jax-ep doctor says more"
            )
        return "collective"
    raise ValueError(
        f'jax_ep.init: transport="{requested}" must have {must}, got {got}; use '
        'transport="collective" or "auto"'
    )


@functools.cache
def _warn_once(message: str) -> None:
    """Once a process for each reason."""
    _log.warning(message)


def ep_groups(mesh: Mesh, names: tuple[str, ...]) -> np.ndarray:
    """The mesh's devices as `[EP groups, ranks]`."""
    own = [mesh.axis_names.index(name) for name in names]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in own]
    ranks = int(np.prod([mesh.shape[name] for name in names]))
    return mesh.devices.transpose(others + own).reshape(-1, ranks)


def obstacle(
    mesh: Mesh,
    names: tuple[str, ...],
    meeting: Meeting,
    shmem: EPConfig | None = None,
) -> Obstacle | None:
    """(what p2p must have, what was found), or None; the same in all processes.

    With a config, what shmem must have for it.
    """
    platform = platform_of(mesh)
    if platform == "cpu":
        return _NO_GPUS
    native = ffi.native_for(platform)
    groups = ep_groups(mesh, names)
    ranks = groups.shape[1]
    if ranks > native.MAX_WINDOW_RANKS:
        return f"at most {native.MAX_WINDOW_RANKS} ranks in a group", str(ranks)
    if shmem is not None:
        return nvshmem.heap.find_obstacle(native, groups, shmem, meeting)
    return windows.find_obstacle(native, groups, meeting)


def platform_of(mesh: Mesh) -> str:
    """Of its devices."""
    return mesh.devices.flat[0].platform
