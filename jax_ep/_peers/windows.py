"""Which GPUs can have windows for each other, and opening them. Used by init.

In one process and in several: then the processes of a mesh agree on each step, because
their programs must be the same.
"""

from __future__ import annotations

import errno
import os
import pathlib
import socket
from collections.abc import Iterable
from types import ModuleType
from typing import Any, TypedDict

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._core.config import EPConfig
from jax_ep._peers import fabric as _fabric
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Meeting


class NotMapped(Exception):
    """Windows that were opened are out of reach of another process's GPUs.

    Raised in every process of the mesh, with nothing left open.
    """

    def __init__(self, obstacle: Obstacle) -> None:
        """Of what stands in the way."""
        super().__init__(*obstacle)
        self.obstacle = obstacle


def platform_of(mesh: Mesh) -> str:
    """Of its devices."""
    return mesh.devices.flat[0].platform


def ordinal(device: Any) -> int:
    """What XLA tells a handler as the ordinal of its device."""
    # A CPU client counts over all processes, a GPU client the devices it sees.
    return device.id if device.platform == "cpu" else device.local_hardware_id


def local_groups(groups: np.ndarray, process: int) -> list[np.ndarray]:
    """The EP groups that have ranks in that process."""
    return [g for g in groups if any(d.process_index == process for d in g)]


def ordinals(group: Iterable[Any], process: int, elsewhere: int) -> list[int]:
    """Ordinals by rank, `elsewhere` for devices of other processes."""
    return [ordinal(d) if d.process_index == process else elsewhere for d in group]


def find_obstacle(
    native: ModuleType, groups: np.ndarray, meeting: Meeting
) -> Obstacle | None:
    """(what p2p must have, what was found) in whatever process; the same in all.

    `groups` are the mesh's devices as `[EP groups, ranks]`.
    """
    own = local_groups(groups, meeting.own)
    here = [ordinals(group, meeting.own, native.ELSEWHERE) for group in own]
    if meeting.alone:
        return native.p2p_obstacle(here)
    if not meeting.possible:
        return "jax.distributed.initialize() in a mesh of several processes", "none"
    crosses = any(len(_processes(group)) > 1 for group in groups)
    devices = [d for group in own for d in group if d.process_index == meeting.own]
    ordinal_of = {device.id: ordinal(device) for device in devices}
    cards = meeting.gather(
        "devices",
        {
            "obstacle": native.p2p_obstacle(here),
            "host": host(),
            "uuids": {i: native.device_uuid(own) for i, own in ordinal_of.items()},
            "address": meeting.listen() if crosses else None,
            "fabric": _fabric.card(native, ordinal_of) if crosses else None,
        },
    )
    found = first({p: card["obstacle"] for p, card in cards.items()})
    if found is None:
        found = _misplaced(groups, cards, crosses)
    if found is not None or not crosses:
        return found
    reached = _reach(native, own, meeting, cards)
    return first(meeting.gather("reach", reached))


def _processes(group: Iterable[Any]) -> list[int]:
    return sorted({device.process_index for device in group})


def _others(own: list[np.ndarray], meeting: Meeting) -> list[int]:
    """The other processes that this one shares EP groups with."""
    found = {process for group in own for process in _processes(group)}
    return sorted(found - {meeting.own})


def host() -> list[str]:
    """What processes of one host, and of no other, have in common; and its name."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname()
    try:
        return [boot.read_text().strip(), name]
    except OSError:
        return [name, name]


def first(obstacles: dict[int, Any]) -> Obstacle | None:
    """The lowest process's, with its number."""
    for process, found in sorted(obstacles.items()):
        if found is not None:
            must, got = found
            return must, f"{got} (process {process})"
    return None


def _misplaced(
    groups: np.ndarray, cards: dict[int, Any], crosses: bool
) -> Obstacle | None:
    for group in groups:
        found = _fabric.find_obstacle(group, cards) if crosses else None
        if found is not None:
            return found
        uuids = [cards[d.process_index]["uuids"][str(d.id)] for d in group]
        for uuid in uuids:
            if uuid and uuids.count(uuid) > 1:
                return "a GPU of its own for each rank", f"GPU {uuid} more than once"
    return None


def _reach(
    native: ModuleType, own: list[np.ndarray], meeting: Meeting, cards: dict[int, Any]
) -> Obstacle | None:
    """What keeps this process's devices from those of others; connects to them."""
    for group in own:
        others = [device for device in group if device.process_index != meeting.own]
        found = native.peer_obstacle(
            ordinals(group, meeting.own, native.ELSEWHERE),
            [cards[d.process_index]["uuids"][str(d.id)] for d in others],
        )
        if found is not None:
            return found
    for process in _others(own, meeting):
        if not _fabric.by_descriptors(cards, meeting.own, process):
            continue
        try:
            meeting.connect(process, cards[process]["address"])
        except OSError as error:
            # It may have ended, of which its socket is only a consequence.
            meeting.raise_if_failed()
            got = f"{error.strerror or error} from process {meeting.own} to {process}"
            return _why_apart(error), got
    return None


def _why_apart(error: OSError) -> str:
    """What two processes of a host must have that did not connect."""
    if isinstance(error, TimeoutError):
        return "processes that answer each other within timeout_s"
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
        return "room for one more open file in each process (ulimit -n)"
    if isinstance(error, PermissionError):
        return "processes of one user, in one user namespace on a host"
    return (
        "processes of one user that reach each other's abstract Unix sockets, "
        "so one network namespace and one user namespace on a host"
    )


class WindowConfig(TypedDict):
    """What decides the size of a window: the fields of C++'s WindowConfig."""

    format: str
    hidden: int
    element_bytes: int
    wire_element_bytes: int
    tokens: int
    dispatch_tokens: int
    combine_tokens: int
    top_k: int
    ranks: int
    local_experts: int
    pending_calls: int


def window_config(config: EPConfig, ranks: int) -> WindowConfig:
    """What sizes the windows of a group of `ranks`."""
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    shared = config.fused_shared_expert
    # Rows that cross one by one are tokens of their own; of "none" their gradients too.
    return WindowConfig(
        format=config.dispatch_format,
        hidden=config.hidden_size,
        element_bytes=config.element_bytes,
        wire_element_bytes=jnp.dtype(config.wire_dtype).itemsize,
        tokens=tokens,
        dispatch_tokens=tokens * top_k if config.reduce == "none" else tokens,
        combine_tokens=tokens if config.reduce == "rank" else tokens * top_k,
        top_k=top_k + shared,
        ranks=ranks,
        local_experts=config.num_experts // ranks + shared,
        # Calls that XLA exchanges need no windows.
        pending_calls=0 if config.overlap == "copy" else config.most_pending,
    )


def open_windows(
    native: ModuleType,
    key: int,
    groups: np.ndarray,
    config: EPConfig,
    first_epoch: int | None,
    meeting: Meeting,
) -> int:
    """Opens the group `key` with the windows of all ranks; returns a window's bytes.

    Raises:
        NotMapped: GPUs of different processes do not reach each other after all.
        RuntimeError: no room, here or in another process, or one that did not come.
    """
    own = local_groups(groups, meeting.own)
    others = _others(own, meeting)
    size = native.open_windows(
        key,
        [ordinals(group, meeting.own, native.ELSEWHERE) for group in own],
        window_config(config, groups.shape[1]),
        timeout_s=config.timeout_s,
        num_sms=config.num_sms or 0,
        first_epoch=native.FIRST_EPOCH if first_epoch is None else first_epoch,
        # Only where somebody takes them: else memory is what it is without fabrics.
        by_fabric=not all(meeting.connected(process) for process in others),
    )
    if meeting.alone:
        return size
    try:
        _share(native, key, own, meeting)
    except BaseException:
        native.close_group(key)
        raise
    return size


def _share(
    native: ModuleType, key: int, own: list[np.ndarray], meeting: Meeting
) -> None:
    """Gives the windows of this process to the EP groups' others and maps theirs."""
    given, obstacle = {}, None
    for group in own:
        if _processes(group) == [meeting.own]:
            continue
        for device in group:
            if device.process_index != meeting.own:
                continue
            try:
                found = native.export_window(key, ordinal(device))
            except RuntimeError as error:
                obstacle = "GPUs whose memory processes can share", str(error)
                continue
            descriptor, size, fabric = found
            given[device.id] = size, fabric and fabric.hex()
            meeting.give(device.id, descriptor)
    # They have their first contents, so whoever maps one may store into it at once.
    answers = meeting.gather("windows", {"windows": given, "obstacle": obstacle})
    _raisefirst({p: answer["obstacle"] for p, answer in answers.items()})
    obstacle = None
    for index, group in enumerate(own):
        for rank, device in enumerate(group):
            process = device.process_index
            if process == meeting.own:
                continue
            size, fabric = answers[process]["windows"][str(device.id)]
            descriptor = None
            if meeting.connected(process):
                descriptor = meeting.take(process, device.id)
            handle = bytes.fromhex(fabric) if descriptor is None else descriptor
            try:
                native.import_window(key, index, rank, handle, size)
            except RuntimeError as error:
                place = f"rank {rank} in process {process}"
                obstacle = "GPUs that map each other's memory", f"{error} ({place})"
            finally:
                if descriptor is not None:
                    os.close(descriptor)
    _raisefirst(meeting.gather("mapped", obstacle))


def _raisefirst(obstacles: dict[int, Any]) -> None:
    found = first(obstacles)
    if found is not None:
        raise NotMapped(found)
