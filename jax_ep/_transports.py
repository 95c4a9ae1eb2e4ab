"""Which transport serves a mesh, and why not p2p. Used by init."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep import _ffi
from jax_ep._config import EPConfig

TRANSPORTS = ("auto", "p2p", "shmem", "collective")


def choose(mesh: Mesh, names: tuple[str, ...], requested: str) -> str:
    """The transport that `init` uses where `requested` was asked for.

    Raises:
        ValueError: "p2p" was asked for and cannot be; says what is missing.
    """
    if requested == "collective":
        return "collective"
    obstacle = _obstacle(mesh, names)
    if obstacle is None:
        return "p2p"
    if requested == "p2p":
        must, got = obstacle
        raise ValueError(
            f'jax_ep.init: transport="p2p" must have {must}, got {got}; use '
            'transport="collective" or "auto"'
        )
    return "collective"


def ep_groups(mesh: Mesh, names: tuple[str, ...]) -> np.ndarray:
    """The mesh's devices as `[EP groups, ranks]`."""
    own = [mesh.axis_names.index(name) for name in names]
    others = [axis for axis in range(mesh.devices.ndim) if axis not in own]
    ranks = int(np.prod([mesh.shape[name] for name in names]))
    return mesh.devices.transpose(others + own).reshape(-1, ranks)


def ordinal(device: Any) -> int:
    """What XLA tells a handler as the ordinal of its device."""
    # A CPU client counts over all processes, a GPU client the devices it sees.
    return device.id if device.platform == "cpu" else device.local_hardware_id


def local_ordinals(groups: np.ndarray) -> list[list[int]]:
    """Ordinals by rank of the EP groups of this process."""
    process = jax.process_index(groups.flat[0].client)
    return [
        [ordinal(device) for device in group]
        for group in groups
        if group[0].process_index == process
    ]


def window_config(config: EPConfig, ranks: int) -> Any:
    """What sizes the windows of a group of `ranks`, for the CUDA module."""
    assert _ffi.native_cuda is not None
    tokens, top_k = config.max_tokens_per_rank, config.top_k
    shared = config.fused_shared_expert
    # Rows that cross one by one are tokens of their own; of "none" their gradients too.
    return _ffi.native_cuda.WindowConfig(
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
        pending_calls=config.pending_calls,
    )


def _obstacle(mesh: Mesh, names: tuple[str, ...]) -> tuple[str, str] | None:
    """(what p2p must have, what was found), or None."""
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return "GPUs", "CPU devices"
    native = _ffi.native_for(platform)
    groups = ep_groups(mesh, names)
    ranks = groups.shape[1]
    for group in groups:
        processes = sorted({device.process_index for device in group})
        if len(processes) > 1:
            return (
                "each EP group's devices in one process",
                f"a group over processes {processes}",
            )
    if ranks > native.MAX_WINDOW_RANKS:
        return f"at most {native.MAX_WINDOW_RANKS} ranks in a group", str(ranks)
    found = native.p2p_obstacle(local_ordinals(groups))
    if not _agreed(mesh, found is None) and found is None:
        return "every process of the mesh serve it", "a refusal of another process"
    return found


def _agreed(mesh: Mesh, served: bool) -> bool:
    """Whether every process of the mesh says `served`; each of them calls this.

    Their programs must be the same, so they cannot differ in transport.
    """
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return served
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=axis_types)
    spread = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    votes = jax.make_array_from_callback(
        (mesh.size,), spread, lambda _: np.array([served])
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return bool(jax.jit(jnp.all, out_shardings=everywhere)(votes))
