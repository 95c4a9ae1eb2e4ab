"""Finds out which GPUs can map each other's windows, and opens the windows.

The processes of a mesh agree on the outcome of each step, because all must choose the
same transport.
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
from jax_ep._peers import answers
from jax_ep._peers import fabric as _fabric
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Rendezvous

# Errors of a process or a system that has no room for one more file.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

# What processes tell each other, step by step.
_INFO = answers.record(
    obstacle=answers.obstacle,
    host=answers.tuple_of(answers.text, answers.text),
    uuids=answers.by_name(answers.text),
    address=answers.optional(answers.hexadecimal),
    fabric=answers.optional(
        answers.record(
            forced=answers.flag,
            fabrics=answers.by_name(answers.text),
            handles=answers.by_name(answers.flag),
        )
    ),
)
_REACHED = answers.tuple_of(answers.obstacle, answers.flag)
_WINDOWS = answers.record(
    obstacle=answers.obstacle,
    windows=answers.by_name(
        answers.tuple_of(answers.count, answers.optional(answers.hexadecimal))
    ),
)


class NotMapped(Exception):
    """A process could not map an open window of another process.

    Raised in every process of the mesh, after all windows were closed.
    """

    def __init__(self, obstacle: Obstacle) -> None:
        """Keeps the obstacle."""
        super().__init__(*obstacle)
        self.obstacle = obstacle


def platform_of(mesh: Mesh) -> str:
    """Returns the platform of the mesh's devices."""
    return mesh.devices.flat[0].platform


def ordinal(device: Any) -> int:
    """Returns the device ordinal that XLA passes to a handler."""
    # CPU ordinals count over all processes, GPU ordinals over the visible devices.
    return device.id if device.platform == "cpu" else device.local_hardware_id


def local_groups(groups: np.ndarray, process: int) -> list[np.ndarray]:
    """Returns the EP groups that have ranks in that process."""
    return [g for g in groups if any(d.process_index == process for d in g)]


def ordinals(group: Iterable[Any], process: int, elsewhere: int) -> list[int]:
    """Returns ordinals by rank, with `elsewhere` for devices of other processes."""
    return [ordinal(d) if d.process_index == process else elsewhere for d in group]


def find_obstacle(
    native: ModuleType, groups: np.ndarray, rendezvous: Rendezvous
) -> Obstacle | None:
    """Returns an obstacle to p2p in any process, or None; the same in all processes.

    Args:
        native: the module of the mesh's platform.
        groups: devices `[EP groups, ranks]`.
        rendezvous: exchange with the mesh's other processes.
    """
    own = local_groups(groups, rendezvous.own)
    here = [ordinals(group, rendezvous.own, native.ELSEWHERE) for group in own]
    if rendezvous.alone:
        return native.p2p_obstacle(here)
    if not rendezvous.possible:
        return "jax.distributed.initialize() in a mesh of several processes", "none"
    crosses = any(len(_processes(group)) > 1 for group in groups)
    devices = [d for group in own for d in group if d.process_index == rendezvous.own]
    ordinal_of = {device.id: ordinal(device) for device in devices}
    info: dict[str, Any] = {
        "obstacle": native.p2p_obstacle(here),
        "host": ["", ""],
        "uuids": {i: native.device_uuid(own) for i, own in ordinal_of.items()},
        "address": None,
        "fabric": _fabric.peer_info(native, ordinal_of) if crosses else None,
    }
    try:
        info["host"] = host()
        info["address"] = rendezvous.listen() if crosses else None
    except OSError as error:
        info["obstacle"] = info["obstacle"] or no_server(error)
    infos = rendezvous.ask("devices", info, _INFO)
    found = first({p: info["obstacle"] for p, info in infos.items()})
    if found is None:
        found = _misplaced(groups, infos, crosses)
    if found is not None or not crosses:
        return found
    reached = _reach(native, own, rendezvous, infos)
    return first_cause(rendezvous.ask("reach", reached, _REACHED))


def _processes(group: Iterable[Any]) -> list[int]:
    return sorted({device.process_index for device in group})


def _others(own: list[np.ndarray], rendezvous: Rendezvous) -> list[int]:
    """Returns the other processes that this one shares EP groups with."""
    found = {process for group in own for process in _processes(group)}
    return sorted(found - {rendezvous.own})


def host() -> list[str]:
    """Returns an identifier of this host, for processes to compare, and its name.

    Raises:
        OSError: the process cannot open one more file. To go by the name then would
            put it on another host than the others.
    """
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname()
    try:
        return [boot.read_text().strip(), name]
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        return [name, name]


def first(obstacles: dict[int, Any]) -> Obstacle | None:
    """Returns the obstacle of the lowest process that has one, with its number."""
    for process, found in sorted(obstacles.items()):
        if found is not None:
            must, got = found
            return must, f"{got} (process {process})"
    return None


# What keeps a process from another one: an obstacle or None, and whether it is only
# that the other one did not answer in time. Then something else may be the cause.
Reached = tuple[Obstacle | None, bool]


def first_cause(reached: dict[int, Any]) -> Obstacle | None:
    """Returns the first obstacle; that a process did not answer counts least."""
    causes = {process: found for process, (found, late) in reached.items() if not late}
    return first(causes) or first({p: found for p, (found, _) in reached.items()})


def _misplaced(
    groups: np.ndarray, infos: dict[int, Any], crosses: bool
) -> Obstacle | None:
    for group in groups:
        found = _fabric.find_obstacle(group, infos) if crosses else None
        if found is not None:
            return found
        uuids = [infos[d.process_index]["uuids"][str(d.id)] for d in group]
        for uuid in uuids:
            if uuid and uuids.count(uuid) > 1:
                return "a GPU of its own for each rank", f"GPU {uuid} more than once"
    return None


def _reach(
    native: ModuleType,
    own: list[np.ndarray],
    rendezvous: Rendezvous,
    infos: dict[int, Any],
) -> Reached:
    """Connects to the processes of the groups; returns an obstacle if it cannot."""
    for group in own:
        others = [device for device in group if device.process_index != rendezvous.own]
        found = native.peer_obstacle(
            ordinals(group, rendezvous.own, native.ELSEWHERE),
            [infos[d.process_index]["uuids"][str(d.id)] for d in others],
        )
        if found is not None:
            return found, False
    for process in _others(own, rendezvous):
        if not _fabric.by_descriptors(infos, rendezvous.own, process):
            continue
        try:
            rendezvous.connect(process, infos[process]["address"])
        except OSError as error:
            return _apart(error, rendezvous, process)
    return None, False


def _apart(error: OSError, rendezvous: Rendezvous, process: int) -> Reached:
    """Returns the obstacle of an error that came of talking to another process."""
    from jax_ep._peers.descriptors import Full  # imported only where it is used

    # If the process failed, its closed socket is only a consequence.
    rendezvous.raise_if_failed()
    got = error.strerror or str(error)
    if isinstance(error, Full):
        got = f"none in process {process}"
    elif error.errno not in _NO_ROOM:
        got += f" from process {rendezvous.own} to {process}"
    return (_why_apart(error), got), isinstance(error, TimeoutError)


_ROOM = "room for one more open file in each process (ulimit -n)"


def _why_apart(error: OSError) -> str:
    """Returns the requirement that kept two processes of a host from connecting."""
    if isinstance(error, TimeoutError):
        return "processes that answer each other within timeout_s / 2"
    if error.errno in _NO_ROOM:
        return _ROOM
    if isinstance(error, PermissionError):
        return "processes of one user, in one user namespace on a host"
    return (
        "processes of one user that reach each other's abstract Unix sockets, "
        "so one network namespace and one user namespace on a host"
    )


def no_server(error: OSError) -> Obstacle:
    """Returns the obstacle of an error in this process, from `host` or a server."""
    if error.errno in _NO_ROOM:
        return _ROOM, error.strerror or str(error)
    must = "abstract Unix sockets, which the system lets each process open and serve"
    return must, error.strerror or str(error)


class WindowConfig(TypedDict):
    """The sizes that determine a window; the fields are those of C++'s WindowConfig."""

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
    """Returns the sizes for the windows of a group of `ranks` ranks."""
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    shared = config.fused_shared_expert
    # Unless expert ranks sum them ("rank"), combine sends K rows per token. With "none"
    # the backward pass also dispatches K rows per token.
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
        # With "copy" XLA exchanges the data of pending calls, which need no windows.
        pending_calls=0 if config.overlap == "copy" else config.most_pending,
    )


def open_windows(
    native: ModuleType,
    key: int,
    groups: np.ndarray,
    config: EPConfig,
    first_epoch: int | None,
    rendezvous: Rendezvous,
) -> int:
    """Opens the group `key` with the windows of all ranks; returns bytes per window.

    Raises:
        NotMapped: GPUs of different processes cannot map each other's windows.
        RuntimeError: a device of this or another process is out of memory, or a process
            failed or did not arrive.
    """
    own = local_groups(groups, rendezvous.own)
    others = _others(own, rendezvous)
    size = native.open_windows(
        key,
        [ordinals(group, rendezvous.own, native.ELSEWHERE) for group in own],
        window_config(config, groups.shape[1]),
        timeout_s=config.timeout_s,
        num_sms=config.num_sms or 0,
        first_epoch=native.FIRST_EPOCH if first_epoch is None else first_epoch,
        # Only if a process needs it, since it changes how memory is allocated.
        by_fabric=not all(rendezvous.connected(process) for process in others),
    )
    if rendezvous.alone:
        return size
    try:
        _share(native, key, own, rendezvous)
    except BaseException:
        native.close_group(key)
        raise
    return size


def _share(
    native: ModuleType, key: int, own: list[np.ndarray], rendezvous: Rendezvous
) -> None:
    """Hands this process's windows to the others of its EP groups, and maps theirs."""
    given, obstacle = {}, None
    for group in own:
        if _processes(group) == [rendezvous.own]:
            continue
        for device in group:
            if device.process_index != rendezvous.own:
                continue
            try:
                found = native.export_window(key, ordinal(device))
            except RuntimeError as error:
                obstacle = "GPUs whose memory processes can share", str(error)
                continue
            descriptor, size, fabric = found
            given[device.id] = size, fabric and fabric.hex()
            rendezvous.give(device.id, descriptor)
    # The windows are initialised, so a process that maps one may store at once.
    told = {"windows": given, "obstacle": obstacle}
    shared = rendezvous.ask("windows", told, _WINDOWS)
    _raise(first({p: answer["obstacle"] for p, answer in shared.items()}))
    mapped = _map(native, key, own, rendezvous, shared)
    _raise(first_cause(rendezvous.ask("mapped", mapped, _REACHED)))


def _map(
    native: ModuleType,
    key: int,
    own: list[np.ndarray],
    rendezvous: Rendezvous,
    shared: dict[int, Any],
) -> Reached:
    """Maps the windows of other processes; returns an obstacle if it cannot."""
    for index, group in enumerate(own):
        for rank, device in enumerate(group):
            process = device.process_index
            if process == rendezvous.own:
                continue
            size, fabric = shared[process]["windows"][str(device.id)]
            descriptor = None
            if rendezvous.connected(process):
                try:
                    descriptor = rendezvous.take(process, device.id)
                except OSError as error:
                    return _apart(error, rendezvous, process)
            handle = bytes.fromhex(fabric) if descriptor is None else descriptor
            try:
                native.import_window(key, index, rank, handle, size)
            except RuntimeError as error:
                got = f"{error} (rank {rank} in process {process})"
                return ("GPUs that map each other's memory", got), False
            finally:
                if descriptor is not None:
                    os.close(descriptor)
    return None, False


def _raise(found: Obstacle | None) -> None:
    if found is not None:
        raise NotMapped(found)
