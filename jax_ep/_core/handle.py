"""EPHandle, which `jax_ep.init` returns and every call takes."""

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

from jax_ep._core import errors, traces
from jax_ep._core.config import EPConfig
from jax_ep._core.literals import HandleTransport
from jax_ep._native.loader import cpu

# All handles that are still referenced, open or closed, by key.
_handles: weakref.WeakValueDictionary[int, EPHandle] = weakref.WeakValueDictionary()


def find(key: int) -> EPHandle | None:
    """Returns the handle with that key, or None if it has been collected."""
    return _handles.get(key)


def _close_group(native: ModuleType, key: int, process: int) -> None:
    # Closing waits for threads and devices, which a forked child does not have.
    if os.getpid() == process:
        native.close_group(key)


# Keys are the values of CallOp in xla_ffi/protocol/region_tag.h.
_OPS = {1: "dispatch", 2: "cached dispatch (combine's backward)", 3: "combine"}


class InvalidIdError(ValueError):
    """An id outside [-1, num_experts) reached a dispatch; see `EPHandle.check`."""


@dataclasses.dataclass(init=False, eq=False, repr=False)
class EPHandle:
    """One expert-parallel layer on a mesh, made by `jax_ep.init`.

    Hashable, static and immutable, so jitted functions can close over it. Handles never
    share state, even if their content is equal; copying returns the handle itself.

    Attributes:
        mesh: the mesh it was made for.
        axis_names: the axes whose product is the EP group.
        config: the `EPConfig`.
        transport: "p2p", "shmem" or "collective".
        ep_size: R, ranks of one EP group.
        local_experts: L, experts per rank.
        groups: G, groups of the grouped matmul on each rank.
        route_ranks: number of ranks that tokens are routed to: R, or 1 with `skip_a2a`.
        recv_capacity: N, output rows per rank.
        buffer_bytes: device memory that the transport holds, in bytes per device.
        dev_ptrs: uint64 `[local devices, 2, 3]`, addresses of (send, recv, recv_count)
            in the buffer groups of dispatch and combine; 0 if the transport has none.
        my_rank: int32 `[local devices]`, each device's rank in its EP group.
        key: identifies content and instance; compiled programs contain it.
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
    _windowed: bool  # whether calls wait in windows, so that a wait can fail

    def __init__(self, *_: Any, **__: Any) -> None:
        """Raises, because two handles with one key would close each other's group."""
        raise errors.unusable(
            "EPHandle",
            "a handle cannot be made by its class or by dataclasses.replace",
            "call jax_ep.init with the config that you want",
            kind=TypeError,
        )

    @classmethod
    def _opened(cls, **fields: Any) -> EPHandle:
        """Makes the handle of an open group; `fields` are all but the derived ones."""
        self = object.__new__(cls)
        vars(self).update(fields)
        self._begin()
        return self

    def _begin(self) -> None:
        """Derives sizes, and closes the group when the handle is collected."""
        config, ep_size = self.config, self.ep_size
        vars(self).update(
            local_experts=config.num_experts // ep_size,
            groups=config.num_experts // ep_size + config.fused_shared_expert,
            route_ranks=1 if config.skip_a2a else ep_size,
            recv_capacity=config.capacity(ep_size),
        )
        self._closed = False
        _handles[self.key] = self
        # Jitted functions of jax_ep.sharded and of layers. JAX keeps their traces,
        # which refer to the handle, so a handle with programs is collected only after
        # it is closed.
        self._programs: dict[Any, Callable[..., Any]] = {}
        # Programs of the collective transport need no group, so they outlive it.
        self._process = os.getpid()
        self._release = weakref.finalize(
            self, _close_group, self._native, self.key, self._process
        )
        # At exit the system frees everything, without waiting for devices.
        self._release.atexit = False

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises for public attributes, whose values compiled programs contain."""
        if not name.startswith("_"):
            raise errors.invalid(
                "EPHandle",
                "attributes of a handle must stay as init set them",
                f"{name} = {errors.brief(value)}",
                "call jax_ep.init with another config",
                kind=AttributeError,
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> NoReturn:
        """Raises, as `__setattr__` does."""
        raise errors.invalid(
            "EPHandle",
            "attributes of a handle must stay as init set them",
            f"del {name}",
            "call ep.close() to release the handle",
            kind=AttributeError,
        )

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a forked child, where it cannot be used."""
        return os.getpid() != self._process

    def close(self) -> None:
        """Releases what `init` allocated; closing twice is allowed.

        Tracing with a closed handle raises ValueError. Functions compiled before still
        run on the collective transport, whose programs carry all they need; on p2p and
        shmem they raise `jax.errors.JaxRuntimeError`. There, closing first waits for
        calls in flight, up to three times `timeout_s`; the windows of calls that take
        longer stay allocated until the process ends. In a forked child it releases
        nothing, because the parent still uses everything.

        A handle that is no longer referenced closes itself, except after a call of
        `jax_ep.sharded` or of a `jax_ep.flax` layer: then only this method closes it.
        """
        self._closed = True
        self._programs.clear()
        self._release()

    def check(self) -> None:
        """Raises errors that finished calls on this process's ranks have reported.

        Wait for the results of the calls in question first, because a call in flight
        reports later. Each device keeps its first report of each kind until a check
        raises it; that check clears all reports of that kind.

        Raises:
            ValueError: the handle is closed, this is a forked child, or JAX is tracing
                a program, whose calls have not run.
            InvalidIdError: an id outside [-1, num_experts) reached a dispatch. The
                message names the rank, token, k and value of the first such id on the
                lowest rank.
            jax.errors.JaxRuntimeError: a wait of p2p or shmem failed. The message names
                the waiting rank, the awaited rank, the phase and the call; every check
                raises it again until the handle is closed. Or, on "collective" and with
                `overlap="copy"`, ranks exchanged data in different calls, of different
                handles or on different lines of the program. The message names both
                ranks and calls; their results are NaN, -1 and 0, and the handle stays
                usable.
        """
        if self._closed:
            raise errors.unusable(
                "check", "this handle is closed", "call ep.check() before ep.close()"
            )
        if self.forked:
            raise errors.unusable(
                "check",
                "this handle belongs to the parent of this forked process",
                "check in the process that called jax_ep.init",
            )
        if traces.is_staging():
            raise errors.unusable(
                "check",
                "JAX is tracing a program here, and its calls have not run",
                "call ep.check() outside jax.jit, after jax.block_until_ready on the "
                "program's results",
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
            raise errors.invalid(
                "dispatch",
                f"ids must be in [-1, num_experts) = [-1, {self.config.num_experts})",
                f"{value} at rank {rank}, token {token}, k {k} (device {ordinal}; "
                f"{others} more devices of this process report invalid ids)",
                "they were treated as -1; check the router",
                kind=InvalidIdError,
            )

    def _original_id(self, value: int) -> int:
        """Undoes the shift by which `routed` of `_ops/options.py` made `value`.

        Values just below 2^31 are ambiguous, and are taken for ids that `routed` left
        alone.
        """
        most = cpu.MAX_INDEX - self.route_ranks
        shifted = self.config.num_experts <= value <= most
        return (
            value - self.route_ranks
            if self.config.fused_shared_expert and shifted
            else value
        )

    def _raise_mixed_calls(self) -> None:
        """Raises if a collective call exchanged data with a different call."""
        found = sorted(self._native.take_mixed_calls(self.key))
        if not found:
            return
        rank, ordinal, source, here, there, same = found[0]
        if there not in _OPS:
            other = "an exchange outside jax_ep"
        elif same:
            other = f"another call of this handle, a {_OPS[there]}"
        else:
            other = f"a {_OPS[there]} of another handle"
        raise jax.errors.JaxRuntimeError(
            f"jax_ep.check: rank {rank} (device {ordinal}; {len(found) - 1} more "
            "devices of this process report the like) was in a "
            f"{_OPS.get(here, 'call')} of this handle (key {self.key:#x}) while rank "
            f"{source} was in {other}, so the results are NaN, -1 and 0; make the same "
            "calls in the same order on every process"
        )

    def __enter__(self) -> EPHandle:
        """Returns itself.

        Raises:
            ValueError: the handle is closed.
        """
        if self._closed:
            raise errors.unusable(
                "EPHandle", "this handle is closed", "call jax_ep.init again"
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
        """Returns the handle itself, which has no copies."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns the handle itself, so that a layer that holds it can be copied."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises, because a handle belongs to the devices of one process."""
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
