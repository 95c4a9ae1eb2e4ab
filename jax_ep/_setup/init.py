"""init: from a mesh and a config to a handle, running ep_init on every device."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_ep._core import context, threads
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import HandleTransport, Transport
from jax_ep._native import ffi
from jax_ep._peers import windows
from jax_ep._peers.rendezvous import Meeting
from jax_ep._setup import capacity, runtime
from jax_ep._transport import base as transports
from jax_ep._transport import select

# Of the first call over new windows, or the native module's; tests start near the wrap
# of 64 bits.
_FIRST_EPOCH: int | None = None

_instances: Counter[str] = Counter()
_lock = threading.Lock()


def init(
    mesh: Mesh | None,
    axis_name: str | Sequence[str],
    config: EPConfig,
    transport: Transport = "auto",
) -> EPHandle:
    """Prepares expert parallelism over one or more axes of a mesh.

    Runs the `ep_init` primitive once on every device of the mesh. Axes that are not
    named hold independent EP groups, one per position. In a job of several processes
    each process of the mesh calls it, with the same arguments and in the same order.

    It also works while JAX traces, in a module's constructor under `nnx.eval_shape` or
    a Linen `setup`: it runs at once and is no part of the program. Each trace makes a
    handle of its own, so a function that is traced again holds another one;
    `jax_ep.shared_handle` gives one for all.

    Args:
        mesh: a `jax.sharding.Mesh`, or None for the one of `jax.set_mesh`.
        axis_name: the EP axis, or a tuple of axes whose product is the group; ranks
            count in the order given, the last axis fastest.
        config: sizes and options.
        transport: "p2p" (GPUs of one host, in one process or several, or of hosts in
            one NVLink fabric, that reach each other's memory), "shmem" (the same with
            one process per GPU, over windows of NVSHMEM, whose puts reach ranks on
            other nodes), "collective" (XLA's all-to-all, on CPU and GPU), or "auto"
            for p2p where this build and these devices have it, shmem where groups span
            hosts, else collective.

    Returns:
        An `EPHandle`.

    Raises:
        ValueError, TypeError: an argument does not hold what is said above; a config
            that this mesh or transport cannot serve; a forked child of a process that
            has called it.
        RuntimeError: a device has no room for the windows of p2p or shmem; a process of
            the mesh did not come within `timeout_s`, or failed.
    """
    runtime.require_unforked()
    mesh = resolved_mesh(mesh)
    # What fails from here on would have the mesh's other processes wait.
    meeting = Meeting.of(mesh, _time_limit(config))
    try:
        with meeting:
            _check_arguments(config, transport)
            names = group_axes(mesh, axis_name, config)
            _check_served(config, _ranks(mesh, names))
            run = partial(_meet, mesh, names, config, transport, meeting)
            # It waits for what it runs on the devices, which no trace can.
            return threads.untraced(run) if _traced(mesh) else run()
    finally:
        # Also where Ctrl-C has come as the block ended.
        meeting.close()


def _time_limit(config: Any) -> float:
    """Of what is to be no config, too: the others hear of that."""
    return config.timeout_s if isinstance(config, EPConfig) else EPConfig.timeout_s


def _check_arguments(config: Any, transport: Any) -> None:
    if not isinstance(config, EPConfig):
        raise TypeError(
            "jax_ep.init: config must be a jax_ep.EPConfig, got "
            f"{type(config).__name__}; build one with jax_ep.EPConfig(...)"
        )
    names = ("auto", *transports.names())
    if transport not in names:
        raise ValueError(
            f"jax_ep.init: transport must be one of {names}, got {transport!r}; "
            '"auto" takes the fastest that works here'
        )


def _ranks(mesh: Mesh, names: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[name] for name in names]))


def _meet(
    mesh: Mesh,
    names: tuple[str, ...],
    config: EPConfig,
    transport: Transport,
    meeting: Meeting,
) -> EPHandle:
    """Settles the transport with the mesh's other processes, and opens the handle."""
    meeting.subject = repr((_content(mesh, names, config), transport))
    try:
        chosen = select.choose(mesh, names, transport, meeting, config)
        try:
            return _open(mesh, names, config, chosen, meeting)
        except windows.NotMapped as error:
            chosen = select.instead(transport, error.obstacle, meeting)
        return _open(mesh, names, config, chosen, meeting)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        # Answers are taken for what this version sends.
        raise meeting.unreadable(error) from error


def resolved_mesh(mesh: Any) -> Mesh:
    """`mesh`, or for None the one of `jax.set_mesh`; raises where there is neither."""
    if mesh is None:
        mesh = context.concrete_mesh()
        if mesh is None:
            raise ValueError(
                "jax_ep.init: mesh=None must find a mesh, got none set; call "
                "jax.set_mesh first or pass the mesh"
            )
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "jax_ep.init: mesh must be a jax.sharding.Mesh of devices, got "
            f"{type(mesh).__name__}; make one with jax.make_mesh"
        )
    return mesh


def group_axes(mesh: Mesh, axis_name: Any, config: EPConfig) -> tuple[str, ...]:
    """The axes of the EP group, which divide the experts; raises if they do not."""
    names = axis_names(resolved_mesh(mesh), axis_name)
    ranks = _ranks(mesh, names)
    if config.num_experts % ranks:
        raise ValueError(
            "jax_ep.init: num_experts must be a multiple of the group's ranks, got "
            f"{config.num_experts} and {ranks}; pad the experts or change the mesh"
        )
    return names


def axis_names(mesh: Mesh, axis_name: str | Sequence[str]) -> tuple[str, ...]:
    """`axis_name` as a tuple of axes of the mesh; raises if it is none."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(names, tuple | list)
        or not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) != len(names)
        or set(names) - set(mesh.axis_names)
    ):
        raise ValueError(
            "jax_ep.init: axis_name must name distinct axes of the mesh, got "
            f"{axis_name!r}; the mesh has {mesh.axis_names}"
        )
    return tuple(names)


def _check_served(config: EPConfig, ranks: int) -> None:
    if config.allreduce_world_size not in (None, ranks):
        raise ValueError(
            "jax_ep.init: allreduce_world_size must be the ranks of the group, "
            f"{ranks}, got {config.allreduce_world_size}; leave it None"
        )
    experts = config.num_experts + ranks
    if config.fused_shared_expert and experts > ffi.native.MAX_EXPERTS:
        raise ValueError(
            "jax_ep.init: num_experts and a shared expert a rank must be at most "
            f"{ffi.native.MAX_EXPERTS} with fused_shared_expert, got {experts}; run "
            "the shared expert beside the dispatch"
        )
    rows = config.capacity(ranks)
    top_k = config.top_k + config.fused_shared_expert
    entries = ranks * config.max_tokens_per_rank * top_k
    limit = ffi.native.MAX_INDEX
    if rows > limit or entries > limit:
        raise ValueError(
            "jax_ep.init: recv_capacity and ranks * max_tokens_per_rank * top_k must "
            f"be at most {limit}, got {rows} and {entries}; lower max_tokens_per_rank "
            "or set recv_capacity"
        )
    for remark in (capacity.worst_case, capacity.shortfall):
        if text := remark(config, ranks):
            warnings.warn(f"jax_ep.init: {text}", UserWarning, stacklevel=3)


def _automatic(mesh: Mesh) -> Mesh:
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _traced(mesh: Mesh) -> bool:
    """Whether this thread is inside of a transformation."""
    try:
        with jax.set_mesh(_automatic(mesh)):
            return False
    except ValueError:  # what it refuses is any of them
        return True


def _rank_of_devices(mesh: Mesh, names: tuple[str, ...]) -> np.ndarray:
    """Rank of each device of the mesh in its EP group, in the mesh's shape."""
    sizes = [mesh.shape[name] for name in names]
    axes = [mesh.axis_names.index(name) for name in names]
    positions = np.indices(mesh.devices.shape)
    return np.asarray(np.ravel_multi_index([positions[axis] for axis in axes], sizes))


def _local_ranks(mesh: Mesh, names: tuple[str, ...]) -> list[tuple[Any, int]]:
    ranks = _rank_of_devices(mesh, names)
    process = jax.process_index(mesh.devices.flat[0].client)
    return [
        (device, int(rank))
        for device, rank in zip(mesh.devices.flat, ranks.flat, strict=True)
        if device.process_index == process
    ]


def _content(mesh: Mesh, names: tuple[str, ...], config: EPConfig) -> tuple[Any, ...]:
    ids = [device.id for device in mesh.devices.flat]
    version = ffi.native.WIRE_VERSION
    return version, ids, mesh.axis_names, mesh.devices.shape, names, config


def _new_key(content: str, meeting: Meeting) -> int:
    """A positive int64 from content and instance: the same in all who meet."""
    with _lock:
        instance = _instances[content]
        _instances[content] += 1
    if meeting.possible:
        # An init may have failed in one process before it counted there.
        instance = max(map(int, meeting.gather("instance", instance).values()))
        with _lock:
            _instances[content] = max(_instances[content], instance + 1)
    digest = hashlib.sha256(f"{content}#{instance}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _open(
    mesh: Mesh,
    names: tuple[str, ...],
    config: EPConfig,
    transport: HandleTransport,
    meeting: Meeting,
) -> EPHandle:
    """Registers the group and initialises every device of the mesh."""
    platform = windows.platform_of(mesh)
    native = ffi.native_for(platform)
    # Where nothing is exchanged there are no windows.
    exchange = transports.by_name("collective" if config.skip_a2a else transport)
    content = repr((_content(mesh, names, config), transport))
    key = _new_key(content, meeting)
    local = _local_ranks(mesh, names)
    devices = [device for device, _ in local]
    ranks = [rank for _, rank in local]
    try:
        buffer_bytes = exchange.open(
            native,
            key,
            select.ep_groups(mesh, names),
            config,
            _FIRST_EPOCH,
            meeting,
        )
        dev_ptrs, my_rank = _run_init(mesh, key, devices)
        if my_rank.tolist() != ranks:
            raise RuntimeError(
                "jax_ep.init: every device must find the rank that the mesh gives it, "
                f"got {my_rank.tolist()} for {ranks}; please report this mesh"
            )
        if platform == "cpu":
            runtime.warn_if_short(native.pool_threads(key), len(devices))
        meeting.conclude()
        return EPHandle._opened(
            mesh=mesh,
            axis_names=names,
            config=config,
            transport=transport,
            ep_size=_ranks(mesh, names),
            buffer_bytes=buffer_bytes,
            dev_ptrs=dev_ptrs,
            my_rank=my_rank,
            key=key,
            _native=native,
            _windowed=exchange.windowed,
        )
    except BaseException:
        # Also of a group that was not opened: Ctrl-C may come just after it was.
        native.close_group(key)
        raise


def _run_init(
    mesh: Mesh, key: int, local_devices: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Binds ep_init on every device; returns dev_ptrs and my_rank of the local ones."""
    # Whatever the mesh's axes are: nothing here is sharded by hand.
    mesh = _automatic(mesh)
    spec = PartitionSpec(mesh.axis_names)

    def body() -> Any:
        return tuple(
            ffi.call(
                "ep_init",
                (
                    jax.ShapeDtypeStruct((2, 3, 2), jnp.uint32),
                    jax.ShapeDtypeStruct((1,), jnp.int32),
                ),
                has_side_effect=True,
                key=key,
            )
        )

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(), out_specs=(spec, spec), check_vma=False
    )
    with jax.set_mesh(mesh):
        pointers, ranks = jax.jit(mapped)()
        jax.block_until_ready(ranks)

    def local(array: jax.Array) -> np.ndarray:
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        # Explicitly, which jax_transfer_guard="disallow" allows.
        return np.stack(jax.device_get([shards[device] for device in local_devices]))

    words = local(pointers).astype(np.uint64).reshape(len(local_devices), 2, 3, 2)
    dev_ptrs = words[..., 0] | words[..., 1] << np.uint64(32)
    my_rank = local(ranks).reshape(-1)
    for array in (dev_ptrs, my_rank):
        array.setflags(write=False)
    return dev_ptrs, my_rank
