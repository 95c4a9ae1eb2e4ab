"""NVLink between hosts: which groups have it, who maps by its handles. Used by init.

Processes of one host pass file descriptors; between hosts windows are mapped by fabric
handles, which need no connection but one and the same fabric.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

# Handles also between processes of one host, to try them where there is no other.
FORCE = "JAX_EP_FORCE_FABRIC"

# "must have <this>, got <that>"
Obstacle = tuple[str, str]


def card(native: ModuleType, ordinals: dict[int, int]) -> dict[str, Any]:
    """What a process tells the others of its devices; ordinals are by their ids."""
    forced = os.environ.get(FORCE, "0") not in ("", "0")
    fabrics = {number: native.device_fabric(own) for number, own in ordinals.items()}
    # Trying handles takes memory for a moment, so only where they may be used.
    handles = {
        number: bool(fabrics[number] or forced) and native.shares_by_fabric(own)
        for number, own in ordinals.items()
    }
    return {"forced": forced, "fabrics": fabrics, "handles": handles}


def by_descriptors(cards: dict[int, Any], one: int, other: int) -> bool:
    """Whether two processes pass windows so, else by fabric handles; both agree."""
    if any(card["fabric"]["forced"] for card in cards.values()):
        return False
    return cards[one]["host"][0] == cards[other]["host"][0]


def find_obstacle(group: Iterable[Any], cards: dict[int, Any]) -> Obstacle | None:
    """What keeps the ranks of an EP group from handles, where they need them."""
    devices = list(group)
    processes = sorted({device.process_index for device in devices})
    hosts = {tuple(cards[process]["host"]) for process in processes}
    apart = len({boot for boot, _ in hosts}) > 1

    def of_rank(what: str) -> list[Any]:
        told = [cards[device.process_index]["fabric"][what] for device in devices]
        return [t[str(d.id)] for t, d in zip(told, devices, strict=True)]

    if apart:
        fabrics = of_rank("fabrics")
        if not all(fabrics) or len(set(fabrics)) > 1:
            names = sorted({name for _, name in hosts})
            of_ranks = _by_fabric(fabrics)
            return (
                "the GPUs of each EP group on one host, or in one clique of an NVLink "
                "fabric over hosts (docs/cluster.md; nvidia-smi -q shows it)",
                f"a group on hosts {names} (processes {processes}), {of_ranks}",
            )
    all_here = all(
        by_descriptors(cards, one, other) for one in processes for other in processes
    )
    handles = of_rank("handles")
    if len(processes) == 1 or all_here or all(handles):
        return None
    first = handles.index(False)
    why = "" if apart else f" where {FORCE} is set"
    return (
        f"GPUs that make fabric handles{why}, so nvidia-imex running and a channel in "
        "/dev/nvidia-caps-imex-channels of each process (docs/cluster.md)",
        f"none of rank {first} (process {devices[first].process_index})",
    )


def _by_fabric(fabrics: list[str]) -> str:
    """Which ranks are where."""
    words = []
    for fabric in sorted(set(fabrics)):
        ranks = [rank for rank, found in enumerate(fabrics) if found == fabric]
        where = f"in {fabric}" if fabric else "in no fabric"
        words.append(f"ranks {ranks} {where}")
    return ", ".join(words)
