"""init and the handle it returns: which device is which rank, for how long."""

from __future__ import annotations

import hashlib
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_ep import _ffi, _runtime
from jax_ep._config import EPConfig

TRANSPORTS = ("auto", "p2p", "shmem", "collective")
_LARGE_BYTES = 10**9

_instances: Counter[str] = Counter()
_lock = threading.Lock()


class InvalidIdError(ValueError):
    """An id outside [-1, num_experts) reached a dispatch; see `EPHandle.check`."""


class EPHandle:
    """One expert-parallel layer on a mesh: what `jax_ep.init` returns.

    Hashable and static: jitted functions close over it. Handles never share state,
    not even those of equal content.

    Attributes:
        mesh: the mesh it was made for.
        axis_names: the axes whose product is the EP group.
        config: the `EPConfig`.
        transport: "p2p", "shmem" or "collective".
        ep_size: R, ranks of one EP group.
        local_experts: L, experts of a rank.
        recv_capacity: N, output rows of a rank.
        buffer_bytes: device memory that the transport holds, bytes per device.
        dev_ptrs: uint64 `[local devices, 2, 3]`, addresses of (send, recv, recv_count)
            of the buffer groups dispatch and combine; 0 where the transport has none.
        my_rank: int32 `[local devices]`, rank in its EP group.
        key: of its content and instance; baked into compiled programs.
    """

    def __init__(
        self, mesh: Mesh, axis_names: tuple[str, ...], config: EPConfig, transport: str
    ) -> None:
        """Use `jax_ep.init`."""
        self.mesh = mesh
        self.axis_names = axis_names
        self.config = config
        self.transport = transport
        self.ep_size = int(np.prod([mesh.shape[name] for name in axis_names]))
        self.local_experts = config.num_experts // self.ep_size
        self.recv_capacity = config.capacity(self.ep_size)
        self.buffer_bytes = 0
        self.key = _new_key(mesh, axis_names, config, transport)
        self._closed = False
        self._native = _ffi.native_for(mesh.devices.flat[0].platform)
        local = _local_ranks(mesh, axis_names)
        ordinals = [_ordinal(device) for device, _ in local]
        self._native.open_group(self.key, ordinals, [rank for _, rank in local])
        # Collected handles leave no group behind; collective programs run without one.
        self._release = weakref.finalize(self, self._native.close_group, self.key)
        try:
            self.dev_ptrs, self.my_rank = _run_init(self, [d for d, _ in local])
            expected = np.array([rank for _, rank in local], np.int32)
            if not np.array_equal(self.my_rank, expected):
                raise RuntimeError(
                    "jax_ep.init: every device must find the rank that the mesh gives "
                    f"it, got {self.my_rank} for {expected}; please report this mesh"
                )
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def close(self) -> None:
        """Releases what `init` allocated; closing twice is allowed.

        A trace after this is a ValueError. Functions compiled before still run on the
        collective transport, whose programs carry all they need.
        """
        self._closed = True
        self._release()

    def check(self) -> None:
        """Raises what finished calls of this process's ranks have reported.

        First wait for the results of the calls in question: a call still in flight
        reports later. A reported id is forgotten once raised.

        Raises:
            InvalidIdError: an id outside [-1, num_experts) reached a dispatch; names
                rank, token, k and value of the first on the lowest rank.
        """
        if self._closed:
            raise ValueError(
                "jax_ep.check: ep must be open, got a closed handle; check before close"
            )
        found = sorted(self._native.take_invalid_ids(self.key))
        if found:
            rank, token, k, value = found[0]
            raise InvalidIdError(
                "jax_ep.dispatch: ids must be in [-1, num_experts) = [-1, "
                f"{self.config.num_experts}), got {value} at rank {rank}, token "
                f"{token}, k {k}; it counted as -1: check the router"
            )

    def __enter__(self) -> EPHandle:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the handle."""
        self.close()

    def __hash__(self) -> int:
        """Hash of the key, which no two handles of a process share."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Whether `other` is the same handle."""
        return self is other

    def __reduce__(self) -> NoReturn:
        """Refuses: a handle belongs to the devices of one process."""
        raise TypeError(
            "jax_ep.EPHandle: a handle must not be pickled or copied, got an attempt; "
            "pickle ep.config and call jax_ep.init"
        )

    def __repr__(self) -> str:
        """Key, transport and shape of the handle."""
        state = "closed" if self._closed else "open"
        return (
            f"EPHandle({state}, key={self.key:#x}, transport={self.transport!r}, "
            f"axis_names={self.axis_names}, ep_size={self.ep_size}, {self.config})"
        )


def init(
    mesh: Mesh | None,
    axis_name: str | Sequence[str],
    config: EPConfig,
    transport: str = "auto",
) -> EPHandle:
    """Prepares expert parallelism over one or more axes of a mesh.

    Runs the `ep_init` primitive once on every device of the mesh. Axes that are not
    named hold independent EP groups, one per position. In a job of several processes
    every process calls it, in the same order.

    Args:
        mesh: a `jax.sharding.Mesh`, or None for the one of `jax.set_mesh`.
        axis_name: the EP axis, or a tuple of axes whose product is the group; ranks
            count in the order given, the last axis fastest.
        config: sizes and options.
        transport: "collective" (XLA's all-to-all, on CPU and GPU), or "auto" for the
            fastest one that this build and these devices have.

    Returns:
        An `EPHandle`.

    Raises:
        ValueError, TypeError: an argument does not hold what is said above; a config
            that this mesh or transport cannot serve.

    Source: SPEC section 2; the system documents' ep_init.
    """
    mesh = _mesh(mesh)
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not names or len(set(names)) != len(names) or set(names) - set(mesh.axis_names):
        raise ValueError(
            "jax_ep.init: axis_name must name distinct axes of the mesh, got "
            f"{axis_name!r}; the mesh has {mesh.axis_names}"
        )
    if not isinstance(config, EPConfig):
        raise TypeError(
            "jax_ep.init: config must be a jax_ep.EPConfig, got "
            f"{type(config).__name__}; build one with jax_ep.EPConfig(...)"
        )
    if transport not in TRANSPORTS:
        raise ValueError(
            f"jax_ep.init: transport must be one of {TRANSPORTS}, got {transport!r}; "
            '"auto" takes the fastest that works here'
        )
    ranks = int(np.prod([mesh.shape[name] for name in names]))
    _check_served(config, ranks, transport)
    handle = EPHandle(mesh, names, config, "collective")
    if mesh.devices.flat[0].platform == "cpu":
        _runtime.warn_if_short(
            handle._native.pool_threads(handle.key), len(mesh.local_devices)
        )
    return handle


def _mesh(mesh: Mesh | None) -> Mesh:
    if mesh is None:
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
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


def _check_served(config: EPConfig, ranks: int, transport: str) -> None:
    if config.num_experts % ranks:
        raise ValueError(
            "jax_ep.init: num_experts must be a multiple of the group's ranks, got "
            f"{config.num_experts} and {ranks}; pad the experts or change the mesh"
        )
    if transport in ("p2p", "shmem"):
        raise ValueError(
            f"jax_ep.init: transport must be one that this version has, got "
            f'{transport!r}; use "collective" or "auto"'
        )
    for field, served in (
        ("combine_format", None),
        ("grad_format", None),
        ("reduce", "rank"),
        ("scale_layout", "rows"),
        ("fused_shared_expert", False),
        ("skip_a2a", False),
    ):
        if getattr(config, field) != served:
            raise ValueError(
                f"jax_ep.init: {field} must be {served!r} in this version, got "
                f"{getattr(config, field)!r}; leave the field at its default"
            )
    rows = config.capacity(ranks)
    entries = ranks * config.max_tokens_per_rank * config.top_k
    limit = _ffi.native.MAX_INDEX
    if rows > limit or entries > limit:
        raise ValueError(
            "jax_ep.init: recv_capacity and ranks * max_tokens_per_rank * top_k must "
            f"be at most {limit}, got {rows} and {entries}; lower max_tokens_per_rank "
            "or set recv_capacity"
        )
    row_bytes = config.hidden_size * config.element_bytes
    worst_case = config.recv_capacity is None and config.capacity_factor is None
    if worst_case and rows * row_bytes > _LARGE_BYTES:
        warnings.warn(
            f"jax_ep.init: dispatch returns {rows} rows of {row_bytes} bytes, "
            f"{rows * row_bytes / 1e9:.2f} GB a call, to hold the worst case; set "
            "recv_capacity or capacity_factor to bound it",
            UserWarning,
            stacklevel=3,
        )


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


def _ordinal(device: Any) -> int:
    """What XLA tells a handler as the ordinal of its device."""
    # A CPU client counts over all processes, a GPU client the devices it sees.
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _new_key(
    mesh: Mesh, names: tuple[str, ...], config: EPConfig, transport: str
) -> int:
    """A positive int64 from content and instance: the same in every process."""
    content = repr(
        (
            [device.id for device in mesh.devices.flat],
            mesh.axis_names,
            mesh.devices.shape,
            names,
            transport,
            config,
        )
    )
    with _lock:
        instance = _instances[content]
        _instances[content] += 1
    digest = hashlib.sha256(f"{content}#{instance}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _run_init(ep: EPHandle, local_devices: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Binds ep_init on every device; returns dev_ptrs and my_rank of the local ones."""
    mesh = ep.mesh
    spec = PartitionSpec(mesh.axis_names)

    def body() -> Any:
        return tuple(
            _ffi.call(
                "ep_init",
                (
                    jax.ShapeDtypeStruct((2, 3, 2), jnp.uint32),
                    jax.ShapeDtypeStruct((1,), jnp.int32),
                ),
                has_side_effect=True,
                key=ep.key,
            )
        )

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(), out_specs=(spec, spec), check_vma=False
    )
    pointers, ranks = jax.jit(mapped)()

    def local(array: jax.Array) -> np.ndarray:
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        return np.stack([np.asarray(shards[device]) for device in local_devices])

    words = local(pointers).astype(np.uint64).reshape(len(local_devices), 2, 3, 2)
    dev_ptrs = words[..., 0] | words[..., 1] << np.uint64(32)
    return dev_ptrs, local(ranks).reshape(-1)
