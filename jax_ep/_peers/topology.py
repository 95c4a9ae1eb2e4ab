"""Which ranks share a node: for transport shmem, which puts to the others."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from jax_ep._core.config import EPConfig
from jax_ep._native import ffi
from jax_ep._peers import windows
from jax_ep._peers.rendezvous import Meeting
from jax_ep._peers.windows import Obstacle

# What processes of one host, and of no other, have in common; by process.
Hosts = dict[int, str]
# Names of nodes by EP group and rank.
Nodes = list[list[int | str]]


def find_hosts(
    native: ModuleType, groups: np.ndarray, meeting: Meeting
) -> tuple[Hosts, Obstacle | None]:
    """Where the processes are, and (what GPUs must have, what was found)."""
    own = windows.local_groups(groups, meeting.own)
    here = [windows.ordinals(group, meeting.own, native.ELSEWHERE) for group in own]
    card = {
        "obstacle": native.p2p_obstacle(here),
        "host": windows.host()[0],
        "uuids": [
            native.device_uuid(windows.ordinal(device))
            for device in groups.flat
            if device.process_index == meeting.own
        ],
    }
    cards = meeting.gather("hosts", card)
    hosts = {process: card["host"] for process, card in cards.items()}
    found = windows.first({p: card["obstacle"] for p, card in cards.items()})
    return hosts, found or _shared_gpu(cards)


def _shared_gpu(cards: dict[int, Any]) -> Obstacle | None:
    seen = set()
    for card in cards.values():
        for uuid in filter(None, card["uuids"]):
            if (card["host"], uuid) in seen:
                return "a GPU of its own for each rank", f"GPU {uuid} more than once"
            seen.add((card["host"], uuid))
    return None


def forced(ranks: int, ranks_per_node: int) -> list[int]:
    """The node of each rank where nodes have so many, one after the other."""
    return [rank // ranks_per_node for rank in range(ranks)]


def of_ranks(group: np.ndarray, config: EPConfig, hosts: Hosts) -> list[int | str]:
    """Names of the ranks' nodes: as the config forces them, or else their hosts."""
    if config.ranks_per_node is not None:
        return [*forced(len(group), config.ranks_per_node)]
    return [hosts[device.process_index] for device in group]


def of_groups(groups: Iterable[np.ndarray], config: EPConfig, hosts: Hosts) -> Nodes:
    """As `of_ranks`, of each group."""
    return [of_ranks(group, config, hosts) for group in groups]


def several(nodes: Nodes) -> bool:
    """Whether some group has ranks on more than one node; the same everywhere."""
    return any(len(set(names)) > 1 for names in nodes)


def bundled(nodes: Nodes, config: EPConfig) -> tuple[int, int]:
    """How many nodes groups have, and ranks a node, where dispatches are bundled.

    A token then crosses to a node once for all of its ranks there. That saves bytes
    where it can go to several ranks of a node. Else (0, 0).
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
    """What a rank has of the heap, with what reaches ranks on other nodes."""
    sizes = windows.window_config(config, len(nodes[0]))
    return ffi.native.window_bytes(sizes, several(nodes), bundled(nodes, config))
