"""init: makes a handle from a mesh and a config, and runs ep_init on every device."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_ep._core import calls, context, errors, threads
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import HandleTransport, Transport
from jax_ep._native import ffi
from jax_ep._peers import answers, windows
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._setup import capacity, runtime
from jax_ep._transport import base as transports
from jax_ep._transport import select

# Epoch of the first call over new windows; None means that of the native module. Tests
# set it near the wrap of 64 bits.
_FIRST_EPOCH: int | None = None

_instances: Counter[str] = Counter()
_lock = threading.Lock()


@calls.explained("init")
def init(
    mesh: Mesh | None,
    axis_name: str | Sequence[str],
    config: EPConfig,
    transport: Transport = "auto",
) -> EPHandle:
    """Prepares expert parallelism over one or more axes of a mesh.

    Runs the `ep_init` primitive once on every device of the mesh. Positions along the
    other axes of the mesh hold independent EP groups. In a job of several processes
    each process of the mesh must call it, with the same arguments in the same order.

    It also works while JAX traces, for example in a module's constructor under
    `nnx.eval_shape` or in a Linen `setup`: it runs immediately and adds nothing to the
    program. Each trace makes a new handle; use `jax_ep.shared_handle` to get the same
    one every time.

    Args:
        mesh: a `jax.sharding.Mesh`, or None for the mesh of `jax.set_mesh`.
        axis_name: the EP axis, or a tuple of axes whose product is the group; ranks
            are numbered in the order given, with the last axis fastest.
        config: sizes and options.
        transport: "p2p" (GPUs that map each other's memory: on one host, in one
            process or several, or on hosts in one NVLink fabric), "shmem" (one process
            per GPU with windows of NVSHMEM, whose puts reach ranks on other nodes),
            "collective" (XLA's all-to-all, on CPU and GPU), or "auto": p2p if this
            build and these devices support it, shmem if groups span hosts, else
            collective.

    Returns:
        An `EPHandle`.

    Raises:
        ValueError, TypeError: an argument is not as described above; the mesh or
            transport does not support the config; or this process was forked after JAX
            was started.
        RuntimeError: a device has no memory for the windows of p2p or shmem; or a
            process of the mesh failed, or did not arrive within `timeout_s`.
    """
    runtime.require_unforked()
    mesh = resolved_mesh(mesh)
    # From here on the rendezvous tells other processes of a failure, so none waits.
    rendezvous = Rendezvous.of(mesh, _time_limit(config))
    try:
        with rendezvous:
            names = checked(mesh, axis_name, config, transport)
            # This runs programs and waits for them, which a trace cannot do.
            run = partial(_open_handle, mesh, names, config, transport, rendezvous)
            return threads.untraced(run) if traced(mesh) else run()
    finally:
        # Again, in case Ctrl-C interrupted the end of the with block.
        rendezvous.close()


def checked(mesh: Mesh, axis_name: Any, config: Any, transport: Any) -> tuple[str, ...]:
    """Returns the axes of the EP group; raises unless all arguments are valid."""
    check_arguments(config, transport)
    names = group_axes(mesh, axis_name, config)
    _check_served(config, _ranks(mesh, names))
    return names


def _time_limit(config: Any) -> float:
    """Returns the time limit; the default if `config` is invalid, to report that."""
    return config.timeout_s if isinstance(config, EPConfig) else EPConfig.timeout_s


def check_arguments(config: Any, transport: Any) -> None:
    """Raises unless the last two arguments of `init` are of their kinds."""
    if not isinstance(config, EPConfig):
        raise errors.invalid(
            "init",
            "config must be a jax_ep.EPConfig",
            type(config).__name__,
            "build one with jax_ep.EPConfig(...)",
            kind=TypeError,
        )
    names = ("auto", *transports.names())
    if not errors.is_one_of(transport, names):
        raise errors.invalid(
            "init",
            f"transport must be one of {names}",
            errors.brief(transport),
            '"auto" chooses the fastest that works here',
        )


def _ranks(mesh: Mesh, names: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[name] for name in names]))


@dataclasses.dataclass(frozen=True)
class Group:
    """A native group that all processes have opened, before ep_init has run on it."""

    mesh: Mesh
    names: tuple[str, ...]
    config: EPConfig
    transport: HandleTransport
    key: int
    buffer_bytes: int

    @property
    def native(self) -> ModuleType:
        """The native module that holds it."""
        return ffi.native_for(windows.platform_of(self.mesh))

    def close(self) -> None:
        """Closes the group, if no handle does."""
        self.native.close_group(self.key)

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Closes the group if what runs inside raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _open_handle(
    mesh: Mesh,
    names: tuple[str, ...],
    config: EPConfig,
    transport: Transport,
    rendezvous: Rendezvous,
) -> EPHandle:
    group = open_group(mesh, names, config, transport, rendezvous)
    with group.closed_on_failure():
        return handle_of(group, rendezvous.conclude)


def open_group(
    mesh: Mesh,
    names: tuple[str, ...],
    config: EPConfig,
    transport: Transport,
    rendezvous: Rendezvous,
    series: str = "",
) -> Group:
    """Agrees on the transport with the mesh's other processes, and opens the group.

    Args:
        mesh: the mesh.
        names: the axes of the EP group.
        config: sizes and options.
        transport: "auto" or a name.
        rendezvous: one that has begun.
        series: groups of equal content are numbered per series, for their keys.
    """
    rendezvous.subject = repr((_content(mesh, names, config), transport, series))
    run = partial(_open, mesh, names, config, rendezvous, series)
    try:
        chosen = select.choose(mesh, names, transport, rendezvous, config)
        try:
            return run(chosen)
        except windows.NotMapped as error:
            chosen = select.instead(transport, error.obstacle, rendezvous)
        return run(chosen)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        # Answers of another version of jax_ep lead to these errors.
        raise rendezvous.unreadable(error) from error


def resolved_mesh(mesh: Any) -> Mesh:
    """Returns `mesh`, or the mesh of `jax.set_mesh` for None; raises if none is set."""
    if mesh is None:
        mesh = context.concrete_mesh()
        if mesh is None:
            raise errors.invalid(
                "init",
                "mesh=None needs a mesh set by jax.set_mesh",
                "none",
                "call jax.set_mesh first or pass the mesh",
            )
    if not isinstance(mesh, Mesh):
        raise errors.invalid(
            "init",
            "mesh must be a jax.sharding.Mesh",
            type(mesh).__name__,
            "make one with jax.make_mesh",
            kind=TypeError,
        )
    _require_attached(mesh)
    return mesh


def _require_attached(mesh: Mesh) -> None:
    """Raises ValueError for devices of a topology description, which do not exist here.

    A handle allocates memory and runs a program on its devices.
    """
    device = mesh.devices.flat[0]
    try:
        attached = jax.devices(device.platform)
    except RuntimeError:  # no such platform in this process
        attached = []
    if device not in attached:
        raise errors.invalid(
            "init",
            "mesh must hold devices that this job has",
            f"{device!r}, as of a topology description",
            "compile where the devices are, or export the program "
            "(docs/sharp_bits.md#exported-programs)",
        )


def group_axes(mesh: Mesh, axis_name: Any, config: EPConfig) -> tuple[str, ...]:
    """Returns the axes of the EP group; raises unless the ranks divide the experts."""
    names = axis_names(resolved_mesh(mesh), axis_name)
    ranks = _ranks(mesh, names)
    errors.require(
        config.num_experts % ranks == 0,
        "init",
        f"num_experts must be a multiple of the group's ranks, {ranks}",
        config.num_experts,
        "pad the experts or change the mesh",
    )
    return names


def axis_names(mesh: Mesh, axis_name: str | Sequence[str]) -> tuple[str, ...]:
    """Returns `axis_name` as a tuple; raises unless it names axes of the mesh."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if (
        not isinstance(names, tuple | list)
        or not names
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) != len(names)
        or set(names) - set(mesh.axis_names)
    ):
        raise errors.invalid(
            "init",
            "axis_name must name distinct axes of the mesh",
            errors.brief(axis_name),
            f"the mesh has {mesh.axis_names}",
        )
    return tuple(names)


def _check_served(config: EPConfig, ranks: int) -> None:
    world = config.allreduce_world_size or ranks
    if ranks % world if config.skip_a2a else world != ranks:
        must = "divide" if config.skip_a2a else "without skip_a2a equal"
        raise errors.invalid(
            "init",
            f"allreduce_world_size must {must} the group's ranks, {ranks}",
            world,
            "leave it out",
        )
    experts = config.num_experts + ranks
    if config.fused_shared_expert and experts > ffi.native.MAX_EXPERTS:
        raise errors.invalid(
            "init",
            "with fused_shared_expert num_experts plus one shared expert per rank must "
            f"be at most {ffi.native.MAX_EXPERTS}",
            experts,
            "compute the shared expert outside of the dispatch",
        )
    rows = config.capacity(ranks)
    top_k = config.top_k + config.fused_shared_expert
    entries = ranks * config.max_tokens_per_rank * top_k
    limit = ffi.native.MAX_INDEX
    if rows > limit or entries > limit:
        raise errors.invalid(
            "init",
            "recv_capacity and ranks * max_tokens_per_rank * top_k must be at most "
            f"{limit}",
            f"{rows} and {entries}",
            "lower max_tokens_per_rank or set recv_capacity",
        )
    for remark in (capacity.worst_case, capacity.shortfall):
        if text := remark(config, ranks):
            warnings.warn(f"jax_ep.init: {text}", UserWarning, stacklevel=5)


def _automatic(mesh: Mesh) -> Mesh:
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def traced(mesh: Mesh) -> bool:
    """Whether this thread is inside a transformation of JAX."""
    try:
        with jax.set_mesh(_automatic(mesh)):
            return False
    except ValueError:  # set_mesh raises inside any transformation
        return True


def _rank_of_devices(mesh: Mesh, names: tuple[str, ...]) -> np.ndarray:
    """Returns each device's rank in its EP group, in the shape of the mesh."""
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


def _new_key(content: str, rendezvous: Rendezvous) -> int:
    """Returns a positive int64 from content and instance, the same in all processes."""
    with _lock:
        instance = _instances[content]
        _instances[content] += 1
    if rendezvous.possible:
        # Counts differ after an init that failed in some processes before this line.
        told = rendezvous.ask("instance", instance, answers.count)
        instance = max(told.values())
        with _lock:
            _instances[content] = max(_instances[content], instance + 1)
    digest = hashlib.sha256(f"{content}#{instance}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _open(
    mesh: Mesh,
    names: tuple[str, ...],
    config: EPConfig,
    rendezvous: Rendezvous,
    series: str,
    transport: HandleTransport,
) -> Group:
    """Opens the native group."""
    native = ffi.native_for(windows.platform_of(mesh))
    # Without an exchange no windows are needed.
    exchange = transports.by_name("collective" if config.skip_a2a else transport)
    content = repr((_content(mesh, names, config), transport)) + series
    key = _new_key(content, rendezvous)
    try:
        buffer_bytes = exchange.open(
            native,
            key,
            select.ep_groups(mesh, names),
            config,
            _FIRST_EPOCH,
            rendezvous,
        )
    except BaseException:
        # Also if open raised, as Ctrl-C may have come just after it opened the group.
        native.close_group(key)
        raise
    return Group(mesh, names, config, transport, key, buffer_bytes)


def handle_of(group: Group, conclude: Callable[[], None] = lambda: None) -> EPHandle:
    """Initialises every device of a group, and calls `conclude` before the last step.

    The group stays open if it fails, and it can be called again.
    """
    mesh, config, native = group.mesh, group.config, group.native
    exchange = transports.by_name("collective" if config.skip_a2a else group.transport)
    local = _local_ranks(mesh, group.names)
    ranks = [rank for _, rank in local]
    dev_ptrs, my_rank = _run_init(mesh, group.key, [device for device, _ in local])
    if my_rank.tolist() != ranks:
        raise RuntimeError(
            "jax_ep.init: devices must have the ranks of their mesh positions, "
            f"{ranks}, got {my_rank.tolist()}; please report this mesh"
        )
    if windows.platform_of(mesh) == "cpu":
        runtime.warn_if_short(native.pool_threads(group.key), len(ranks))
    conclude()
    return EPHandle._opened(
        mesh=mesh,
        axis_names=group.names,
        config=config,
        transport=group.transport,
        ep_size=_ranks(mesh, group.names),
        buffer_bytes=group.buffer_bytes,
        dev_ptrs=dev_ptrs,
        my_rank=my_rank,
        key=group.key,
        _native=native,
        _windowed=exchange.windowed,
    )


def _run_init(
    mesh: Mesh, key: int, local_devices: list[Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Runs ep_init on every device; returns dev_ptrs and my_rank of the local ones."""
    # With automatic axes, so that the kinds of the mesh's axes do not matter.
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
        # jax_transfer_guard="disallow" allows explicit transfers like this one.
        return np.stack(jax.device_get([shards[device] for device in local_devices]))

    words = local(pointers).astype(np.uint64).reshape(len(local_devices), 2, 3, 2)
    dev_ptrs = words[..., 0] | words[..., 1] << np.uint64(32)
    my_rank = local(ranks).reshape(-1)
    for array in (dev_ptrs, my_rank):
        array.setflags(write=False)
    return dev_ptrs, my_rank
