"""Which transport serves a mesh, and why no faster one does."""

from __future__ import annotations

import functools
import logging

import numpy as np
from jax.sharding import Mesh

from jax_ep._core.config import EPConfig
from jax_ep._core.literals import HandleTransport, Transport
from jax_ep._peers import nvshmem, topology
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._transport import by_name
from jax_ep._transport.p2p import NO_GPUS

_log = logging.getLogger("jax_ep")


def choose(
    mesh: Mesh,
    names: tuple[str, ...],
    requested: Transport,
    rendezvous: Rendezvous,
    config: EPConfig,
) -> HandleTransport:
    """The transport that `init` uses where `requested` was asked for.

    The same in all processes of the mesh, which call it together.

    Raises:
        ValueError: `requested` cannot be; says what is missing.
        RuntimeError: a process did not come.
    """
    groups = ep_groups(mesh, names)
    wanted = "p2p" if requested == "auto" else requested
    found = by_name(wanted).obstacle(mesh, groups, config, rendezvous)
    if found is None:
        return wanted
    # What exchanges nothing needs no NVSHMEM to be looked for, let alone started.
    far = requested == "auto" and not config.skip_a2a
    if far and _puts_reach(mesh, groups, config, rendezvous):
        return "shmem"
    return instead(requested, found, rendezvous)


def _puts_reach(
    mesh: Mesh, groups: np.ndarray, config: EPConfig, rendezvous: Rendezvous
) -> bool:
    """Whether groups span nodes, and shmem serves them; the same in all processes."""
    shmem = by_name("shmem")
    if rendezvous.alone or shmem.obstacle(mesh, groups, config, rendezvous) is not None:
        return False
    return topology.several(topology.of_groups(groups, config, nvshmem.heap.hosts))


def instead(
    requested: Transport, found: Obstacle, rendezvous: Rendezvous
) -> HandleTransport:
    """What `init` uses where there is an obstacle.

    Raises:
        ValueError: nothing else was asked for.
    """
    must, got = found
    if requested == "auto":
        # CPU devices have no faster transport to miss.
        if found != NO_GPUS:
            # What one machine lacks stays so. Between processes it may be another time.
            say = _warn_once if rendezvous.alone else _log.warning
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
