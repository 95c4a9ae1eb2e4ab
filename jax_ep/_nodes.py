"""Which ranks share a node: for transport shmem, which puts to the others."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from jax_ep import _windows
from jax_ep._config import EPConfig
from jax_ep._meeting import Meeting
from jax_ep._windows import Obstacle

# What processes of one host, and of no other, have in common; by process.
Hosts = dict[int, str]


def find_hosts(
    native: ModuleType, groups: np.ndarray, meeting: Meeting
) -> tuple[Hosts, Obstacle | None]:
    """Where the processes are, and (what GPUs must have, what was found)."""
    own = _windows.local_groups(groups, meeting.own)
    here = [_windows.ordinals(group, meeting.own, native.ELSEWHERE) for group in own]
    card = {
        "obstacle": native.p2p_obstacle(here),
        "host": _windows.host()[0],
        "uuids": [
            native.device_uuid(_windows.ordinal(device))
            for device in groups.flat
            if device.process_index == meeting.own
        ],
    }
    cards = meeting.gather("hosts", card)
    hosts = {process: card["host"] for process, card in cards.items()}
    found = _windows.first({p: card["obstacle"] for p, card in cards.items()})
    return hosts, found or _shared_gpu(cards)


def _shared_gpu(cards: dict[int, Any]) -> Obstacle | None:
    seen = set()
    for card in cards.values():
        for uuid in filter(None, card["uuids"]):
            if (card["host"], uuid) in seen:
                return "a GPU of its own for each rank", f"GPU {uuid} more than once"
            seen.add((card["host"], uuid))
    return None


def of_ranks(group: np.ndarray, config: EPConfig, hosts: Hosts) -> list[int | str]:
    """Names of the ranks' nodes: as the config forces them, or else their hosts."""
    if config.ranks_per_node is not None:
        return [rank // config.ranks_per_node for rank in range(len(group))]
    return [hosts[device.process_index] for device in group]


def several(groups: np.ndarray, config: EPConfig, hosts: Hosts) -> bool:
    """Whether some group has ranks on more than one node; the same everywhere."""
    return any(len(set(of_ranks(group, config, hosts))) > 1 for group in groups)


def bundled(groups: np.ndarray, config: EPConfig, hosts: Hosts) -> tuple[int, int]:
    """How many nodes groups have, and ranks a node, where dispatches are bundled.

    A token then crosses to a node once for all of its ranks there. That saves bytes
    where it can go to several ranks of a node. Else (0, 0).
    """
    shapes = set()
    for group in groups:
        names = of_ranks(group, config, hosts)
        sizes = {names.count(name) for name in names}
        shapes |= {(len(names) // size, size) for size in sizes}
    (first, *others) = sorted(shapes)
    nodes, size = first
    if others or nodes < 2 or size < 2 or config.top_k < 2:
        return 0, 0
    return first
