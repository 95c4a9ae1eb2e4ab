"""EPHandle: what `jax_ep.init` returns, and what calls ask of it."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep._core.config import EPConfig
from jax_ep._core.literals import HandleTransport
from jax_ep._native.loader import cpu

# Open and closed ones by key, while somebody holds them.
_handles: weakref.WeakValueDictionary[int, EPHandle] = weakref.WeakValueDictionary()


def find(key: int) -> EPHandle | None:
    """The handle of that key, if it is still held."""
    return _handles.get(key)


def _close_group(native: ModuleType, key: int, process: int) -> None:
    # A forked child has neither the threads nor the devices that closing waits for.
    if os.getpid() == process:
        native.close_group(key)


# By the numbers of CallOp in xla_ffi/protocol/region_tag.h.
_OPS = {1: "dispatch", 2: "cached dispatch (combine's backward)", 3: "combine"}


class InvalidIdError(ValueError):
    """An id outside [-1, num_experts) reached a dispatch; see `EPHandle.check`."""


@dataclasses.dataclass(init=False, eq=False, repr=False)
class EPHandle:
    """One expert-parallel layer on a mesh: what `jax_ep.init` returns.

    Hashable, static and fixed: jitted functions close over it. Handles never share
    state, not even those of equal content; there are no copies.

    Attributes:
        mesh: the mesh it was made for.
        axis_names: the axes whose product is the EP group.
        config: the `EPConfig`.
        transport: "p2p", "shmem" or "collective".
        ep_size: R, ranks of one EP group.
        local_experts: L, experts of a rank.
        groups: G, groups of the grouped matmul on a rank.
        route_ranks: ranks that a rank's tokens are routed to; 1 with `skip_a2a`.
        recv_capacity: N, output rows of a rank.
        buffer_bytes: device memory that the transport holds, bytes per device.
        dev_ptrs: uint64 `[local devices, 2, 3]`, addresses of (send, recv, recv_count)
            of the buffer groups dispatch and combine; 0 where the transport has none.
        my_rank: int32 `[local devices]`, rank in its EP group.
        key: of its content and instance; baked into compiled programs.
    """

    mesh: Mesh
    axis_names: tuple[str, ...]
    config: EPConfig
    transport: HandleTransport
    ep_size: int
    buffer_bytes: int
    dev_ptrs: np.ndarray
    my_rank: np.ndarray
    key: int
    local_experts: int
    groups: int
    route_ranks: int
    recv_capacity: int
    _native: ModuleType
    _windowed: bool  # whether its waits can fail

    def __init__(self, *_: Any, **__: Any) -> None:
        """Refuses: a second handle of a key would close the first one's group."""
        raise TypeError(
            "jax_ep.EPHandle: a handle must come from jax_ep.init, got a call of its "
            "class or dataclasses.replace; call jax_ep.init with another config"
        )

    @classmethod
    def _opened(cls, **fields: Any) -> EPHandle:
        """Of a group that was opened; `fields` are all but the derived ones."""
        self = object.__new__(cls)
        vars(self).update(fields)
        self._begin()
        return self

    def _begin(self) -> None:
        """Derives sizes and ties the group's life to the handle's."""
        config, ep_size = self.config, self.ep_size
        vars(self).update(
            local_experts=config.num_experts // ep_size,
            groups=config.num_experts // ep_size + config.fused_shared_expert,
            route_ranks=1 if config.skip_a2a else ep_size,
            recv_capacity=config.capacity(ep_size),
        )
        self._closed = False
        _handles[self.key] = self
        # Of jax_ep.sharded and of layers. While they are here JAX keeps their traces,
        # which refer to the handle: it is then collected only once it is closed.
        self._programs: dict[Any, Callable[..., Any]] = {}
        # Collected handles leave no group behind; collective programs run without one.
        self._process = os.getpid()
        self._release = weakref.finalize(
            self, _close_group, self._native, self.key, self._process
        )
        # The end of the process frees all it holds, without waiting for its devices.
        self._release.atexit = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses: programs that were compiled hold what the attributes said."""
        if not name.startswith("_"):
            raise AttributeError(
                f"jax_ep.EPHandle: a handle must stay as init made it, got {name} = "
                f"{value!r}; call jax_ep.init with another config"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> NoReturn:
        """Refuses, likewise."""
        raise AttributeError(
            f"jax_ep.EPHandle: a handle must stay as init made it, got del {name}; "
            "close it where it is not needed"
        )

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is the copy of a forked child, which can only be dropped."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Releases what `init` allocated; closing twice is allowed.

        A trace after this is a ValueError. Functions compiled before still run on the
        collective transport, whose programs carry all they need, and raise
        `jax.errors.JaxRuntimeError` on p2p and shmem, where this waits for calls in
        flight: up to three times `timeout_s`, after which their windows are left to the
        process.
        In a forked child it releases nothing: what the parent holds is the parent's.

        A handle that is dropped is closed when it is collected, but one that
        `jax_ep.sharded` or a layer of `jax_ep.flax` was called with only by this.
        """
        self._closed = True
        self._programs.clear()
        self._release()

    def check(self) -> None:
        """Raises what finished calls of this process's ranks have reported.

        First wait for the results of the calls in question: a call still in flight
        reports later. Each device keeps its first report of a kind until a check raises
        it, which forgets all of that kind.

        Raises:
            ValueError: the handle is closed, or its process was forked.
            InvalidIdError: an id outside [-1, num_experts) reached a dispatch; names
                rank, token, k and value of the first on the lowest rank.
            jax.errors.JaxRuntimeError: a wait of p2p or shmem failed; names the rank
                that waited, the one it waited for, the phase and the call. It stays so
                until the handle is closed. Or, on "collective" and in halves with
                `overlap="copy"`, processes met in different calls, of other handles or
                on other lines of the program; names the rank, the other rank and both
                calls. Their results are NaN, -1 and 0; the handle stays usable.
        """
        if self._closed:
            raise ValueError(
                "jax_ep.check: ep must be open, got a closed handle; check before close"
            )
        if self.forked:
            raise ValueError(
                "jax_ep.check: ep must be of this process, got the copy of a forked "
                "child; check in the process that called jax_ep.init"
            )
        if self._windowed:
            for _, failure in self._native.wait_failures(self.key):
                raise jax.errors.JaxRuntimeError(f"jax_ep.check: {failure}")
        self._raise_mixed_calls()
        found = sorted(self._native.take_invalid_ids(self.key))
        if found:
            rank, ordinal, token, k, value = found[0]
            value = self._original_id(value)
            others = len(found) - 1
            raise InvalidIdError(
                "jax_ep.dispatch: ids must be in [-1, num_experts) = [-1, "
                f"{self.config.num_experts}), got {value} at rank {rank}, token "
                f"{token}, k {k} (device {ordinal}; {others} more devices of this "
                "process report some); they counted as -1: check the router"
            )

    def _original_id(self, value: int) -> int:
        """The invalid id that `routed` of `_ops/options.py` turned into `value`.

        Of the ids just below 2^31 those that it left alone are taken for it.
        """
        most = cpu.MAX_INDEX - self.route_ranks
        shifted = self.config.num_experts <= value <= most
        return (
            value - self.route_ranks
            if self.config.fused_shared_expert and shifted
            else value
        )

    def _raise_mixed_calls(self) -> None:
        """Raises what collective calls have reported that met other calls."""
        found = sorted(self._native.take_mixed_calls(self.key))
        if not found:
            return
        rank, ordinal, source, here, there, same = found[0]
        if there not in _OPS:
            other = "an exchange that is not of jax_ep"
        elif same:
            other = f"another call of this handle, a {_OPS[there]}"
        else:
            other = f"a {_OPS[there]} of another handle"
        raise jax.errors.JaxRuntimeError(
            f"jax_ep.check: rank {rank} (device {ordinal}; {len(found) - 1} more "
            "devices of this process report some) was in a "
            f"{_OPS.get(here, 'call')} of this handle (key {self.key:#x}) while rank "
            f"{source} was in {other}; the results are NaN, -1 and 0. Make the same "
            "calls in the same order on every process"
        )

    def __enter__(self) -> EPHandle:
        """Returns itself.

        Raises:
            ValueError: the handle is closed.
        """
        if self._closed:
            raise ValueError(
                "jax_ep.EPHandle: a handle must be open to be entered, got a closed "
                "one; call jax_ep.init again"
            )
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

    def __copy__(self) -> Self:
        """Itself: there is one of each handle, as of a mesh."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself, so that what holds a handle, a layer say, can be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuses: a handle belongs to the devices of one process."""
        raise TypeError(
            "jax_ep.EPHandle cannot be pickled, as it belongs to the devices of one "
            "process; pickle ep.config and call jax_ep.init with it again"
        )

    def __repr__(self) -> str:
        """Key, transport and shape of the handle."""
        state = "closed" if self._closed else "open"
        return (
            f"EPHandle({state}, key={self.key:#x}, transport={self.transport!r}, "
            f"axis_names={self.axis_names}, ep_size={self.ep_size}, {self.config})"
        )
