"""Finds which ranks share a node; transport shmem reaches the others by puts."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from jax_ep._core.config import EPConfig
from jax_ep._native import ffi
from jax_ep._peers import answers, windows
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._peers.windows import Obstacle

# By process: an identifier of its host.
Hosts = dict[int, str]
# By EP group and rank: an identifier of the node.
Nodes = list[list[int | str]]

_INFO = answers.record(
    obstacle=answers.obstacle,
    host=answers.text,
    uuids=answers.several(answers.text),
)


def find_hosts(
    native: ModuleType, groups: np.ndarray, rendezvous: Rendezvous
) -> tuple[Hosts, Obstacle | None]:
    """Returns the host of each process, and an obstacle if there is one."""
    own = windows.local_groups(groups, rendezvous.own)
    here = [windows.ordinals(group, rendezvous.own, native.ELSEWHERE) for group in own]
    name, obstacle = "", native.p2p_obstacle(here)
    try:
        name = windows.host()[0]
    except OSError as error:
        obstacle = obstacle or windows.no_server(error)
    info = {
        "obstacle": obstacle,
        "host": name,
        "uuids": [
            native.device_uuid(windows.ordinal(device))
            for device in groups.flat
            if device.process_index == rendezvous.own
        ],
    }
    infos = rendezvous.ask("hosts", info, _INFO)
    hosts = {process: info["host"] for process, info in infos.items()}
    found = windows.first({p: info["obstacle"] for p, info in infos.items()})
    return hosts, found or _shared_gpu(infos)


def _shared_gpu(infos: dict[int, Any]) -> Obstacle | None:
    seen = set()
    for info in infos.values():
        for uuid in filter(None, info["uuids"]):
            if (info["host"], uuid) in seen:
                return "a GPU of its own for each rank", f"GPU {uuid} more than once"
            seen.add((info["host"], uuid))
    return None


def forced(ranks: int, ranks_per_node: int) -> list[int]:
    """Returns the node of each rank if every `ranks_per_node` ranks share one."""
    return [rank // ranks_per_node for rank in range(ranks)]


def of_ranks(group: np.ndarray, config: EPConfig, hosts: Hosts) -> list[int | str]:
    """Returns the node of each rank: the one that the config forces, or its host."""
    if config.ranks_per_node is not None:
        return [*forced(len(group), config.ranks_per_node)]
    return [hosts[device.process_index] for device in group]


def of_groups(groups: Iterable[np.ndarray], config: EPConfig, hosts: Hosts) -> Nodes:
    """Returns `of_ranks` for each group."""
    return [of_ranks(group, config, hosts) for group in groups]


def several(nodes: Nodes) -> bool:
    """Whether any group has ranks on several nodes; the same in all processes."""
    return any(len(set(names)) > 1 for names in nodes)


def bundled(nodes: Nodes, config: EPConfig) -> tuple[int, int]:
    """Returns (nodes per group, ranks per node) if dispatches are bundled, or (0, 0).

    If they are, a token is sent to a node once for all of its ranks there. That saves
    bytes if a token can go to several ranks of one node.
    """
    shapes = set()
    for names in nodes:
        sizes = {names.count(name) for name in names}
        shapes |= {(len(names) // size, size) for size in sizes}
    (first, *others) = sorted(shapes)
    count, size = first
    if others or count < 2 or size < 2 or config.top_k < 2:
        return 0, 0
    return first


def window_bytes(config: EPConfig, nodes: Nodes) -> int:
    """Returns the heap bytes per rank, including buffers for ranks on other nodes."""
    sizes = windows.window_config(config, len(nodes[0]))
    return ffi.native.window_bytes(sizes, several(nodes), bundled(nodes, config))
