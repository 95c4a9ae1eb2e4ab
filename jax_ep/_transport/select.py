"""Chooses the transport for a mesh, and reports why it is not a faster one."""

from __future__ import annotations

import functools
import logging

import numpy as np
from jax.sharding import Mesh

from jax_ep._core import errors
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
    """Returns the transport that `init` uses for `requested`.

    All processes of the mesh call it together and get the same result.

    Raises:
        ValueError: the requested transport cannot serve the mesh; the message says
            what is missing.
        RuntimeError: a process failed or did not join.
    """
    groups = ep_groups(mesh, names)
    wanted = "p2p" if requested == "auto" else requested
    found = by_name(wanted).obstacle(mesh, groups, config, rendezvous)
    if found is None:
        return wanted
    # With skip_a2a nothing is exchanged, so do not load or start NVSHMEM.
    may_put = requested == "auto" and not config.skip_a2a
    if may_put and _puts_reach(mesh, groups, config, rendezvous):
        return "shmem"
    return instead(requested, found, rendezvous)


def _puts_reach(
    mesh: Mesh, groups: np.ndarray, config: EPConfig, rendezvous: Rendezvous
) -> bool:
    """Whether groups span nodes and shmem serves them; the same in all processes."""
    shmem = by_name("shmem")
    if rendezvous.alone or shmem.obstacle(mesh, groups, config, rendezvous) is not None:
        return False
    return topology.several(topology.of_groups(groups, config, nvshmem.heap.hosts))


def instead(
    requested: Transport, found: Obstacle, rendezvous: Rendezvous
) -> HandleTransport:
    """Returns the transport to use if there is an obstacle to the first choice.

    Raises:
        ValueError: the user requested exactly the transport with the obstacle.
    """
    must, got = found
    if requested == "auto":
        # No message for CPU devices, which have no faster transport anyway.
        if found != NO_GPUS:
            # A job of one process always finds the same reason, so it logs once. With
            # several processes the reason may be another one next time.
            say = _warn_once if rendezvous.alone else _log.warning
            say(
                'jax_ep.init: "auto" chose transport "collective", because "p2p" must '
                f"have {must}, got {got}; jax-ep doctor says more"
            )
        return "collective"
    raise errors.invalid(
        "init",
        f'transport="{requested}" must have {must}',
        got,
        'use transport="collective" or "auto"',
    )


@functools.cache
def _warn_once(message: str) -> None:
    """Logs each message once per process."""
    _log.warning(message)


def ep_groups(mesh: Mesh, names: tuple[str, ...]) -> np.ndarray:
    """Returns the mesh's devices as `[EP groups, ranks]`."""
    own = [mesh.axis_names.index(name) for name in names]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in own]
    ranks = int(np.prod([mesh.shape[name] for name in names]))
    return mesh.devices.transpose(others + own).reshape(-1, ranks)
