"""NVLink between hosts: decides which processes map windows by fabric handles.

Processes of one host pass file descriptors. Between hosts, windows are mapped by fabric
handles, which need no connection between processes, but require GPUs in one fabric.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

# Environment variable: use fabric handles even on one host, to test them there.
FORCE = "JAX_EP_FORCE_FABRIC"

# (<this>, <that>) of a message "must have <this>, got <that>".
Obstacle = tuple[str, str]


def peer_info(native: ModuleType, ordinals: dict[int, int]) -> dict[str, Any]:
    """Returns what a process tells others about its devices.

    Args:
        native: the module of the devices' platform.
        ordinals: ordinal of each device of this process, by the device's id.
    """
    forced = os.environ.get(FORCE, "0") not in ("", "0")
    fabrics = {number: native.device_fabric(own) for number, own in ordinals.items()}
    # The test allocates memory for a moment, so it runs only if handles may be used.
    handles = {
        number: bool(fabrics[number] or forced) and native.shares_by_fabric(own)
        for number, own in ordinals.items()
    }
    return {"forced": forced, "fabrics": fabrics, "handles": handles}


def by_descriptors(infos: dict[int, Any], one: int, other: int) -> bool:
    """Whether two processes pass windows by descriptors rather than fabric handles.

    Both processes get the same result.
    """
    if any(info["fabric"]["forced"] for info in infos.values()):
        return False
    return infos[one]["host"][0] == infos[other]["host"][0]


def find_obstacle(group: Iterable[Any], infos: dict[int, Any]) -> Obstacle | None:
    """Returns why an EP group cannot use the fabric handles that it needs, or None."""
    devices = list(group)
    processes = sorted({device.process_index for device in devices})
    hosts = {tuple(infos[process]["host"]) for process in processes}
    apart = len({boot for boot, _ in hosts}) > 1

    def of_rank(what: str) -> list[Any]:
        told = [infos[device.process_index]["fabric"][what] for device in devices]
        return [t[str(d.id)] for t, d in zip(told, devices, strict=True)]

    if apart:
        fabrics = of_rank("fabrics")
        if not all(fabrics) or len(set(fabrics)) > 1:
            names = sorted({name for _, name in hosts})
            of_ranks = _by_fabric(fabrics)
            return (
                "the GPUs of each EP group on one host, or in one clique of an NVLink "
                "fabric across hosts (docs/cluster.md; nvidia-smi -q shows it)",
                f"a group on hosts {names} (processes {processes}), {of_ranks}",
            )
    all_here = all(
        by_descriptors(infos, one, other) for one in processes for other in processes
    )
    handles = of_rank("handles")
    if len(processes) == 1 or all_here or all(handles):
        return None
    first = handles.index(False)
    why = "" if apart else f", as {FORCE} is set"
    return (
        "GPUs that can export fabric handles, which takes a running nvidia-imex and a "
        "channel in /dev/nvidia-caps-imex-channels for each process "
        f"(docs/cluster.md){why}",
        f"no handle from rank {first} (process {devices[first].process_index})",
    )


def _by_fabric(fabrics: list[str]) -> str:
    """Lists the ranks in each fabric, for a message."""
    words = []
    for fabric in sorted(set(fabrics)):
        ranks = [rank for rank, found in enumerate(fabrics) if found == fabric]
        where = f"in {fabric}" if fabric else "in no fabric"
        words.append(f"ranks {ranks} {where}")
    return ", ".join(words)
