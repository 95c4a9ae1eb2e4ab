"""What a transport does for a handle, and what its calls take and return.

The interface of collective, p2p and shmem. Its calls know ranks, experts and rows
alone: what options make of them is for `_ops/options.py`, derivatives for `_ops`.
"""

from __future__ import annotations

import abc
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Rendezvous

# What a call of an ordered transport comes after and leaves for the next one: one
# int32 `[1]`. () elsewhere, so that programs of other transports hold nothing of it.
Token = tuple[jax.Array, ...]


class DispatchInputs(NamedTuple):
    """A rank's operands of a dispatch that routes.

    Attributes:
        tokens: `[n, H]`.
        topk_ids: int32 `[n, K]`, ids of `route_ranks * groups` experts.
        router_weights: float32 `[n, K]`.
        input_scale: float32 `[1]`, or `[0]` for formats without one.
    """

    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    input_scale: jax.Array


class Received(NamedTuple):
    """What a dispatch makes of arrivals, in the order of its handlers' results.

    Names are those of `Dispatched` and `Route`.
    """

    tokens: Any
    scales: Any
    row_offsets: Any
    group_sizes: Any
    expert_counts: Any
    expert_ids: Any
    scales_offsets: Any
    src_info: Any
    router_weights: Any
    num_dropped: Any
    row_of: Any
    row_slot: Any
    slot_counts: Any


class Arrived(NamedTuple):
    """What a dispatch returns: arrivals, and the tables of their source.

    Attributes:
        received: at the expert rank.
        slot_of: int32 `[n, K]`, as in `Route`.
        num_invalid: int32 `[1]`, as in `Dispatched`.
    """

    received: Received
    slot_of: jax.Array
    num_invalid: jax.Array


class CombineInputs(NamedTuple):
    """The operands of a combine at the expert rank, which sums and sends.

    Attributes:
        expert_out: `[N, H]`.
        row_weights: float32 `[N]` that scale the rows, or None.
        weight_grads: float32 `[N]` that travel beside the rows, unsummed, or None.
        row_of: int32 `[R, n, K]`, as in `Route`.
        slot_counts: int32 `[R]`, as in `Route`.
    """

    expert_out: jax.Array
    row_weights: jax.Array | None
    weight_grads: jax.Array | None
    row_of: jax.Array
    slot_counts: jax.Array


class SumInputs(NamedTuple):
    """The operands of a combine at the source, which sums what arrives.

    Attributes:
        slot_of: int32 `[n, K]`, as in `Route`.
        entry_weights: float32 `[n, K]`: every row has travelled by itself and is scaled
            here. None where rows were summed at the expert rank.
        residual: `[n, H]` or None.
        shared_rows: `[N, H]`, whose first rows are the shared expert's, or None.
        shared_part: int32 `[2]`, first token and number of those, or None.
    """

    slot_of: jax.Array
    entry_weights: jax.Array | None
    residual: jax.Array | None
    shared_rows: jax.Array | None
    shared_part: jax.Array | None


class Wire(NamedTuple):
    """How the rows of a combine travel.

    Attributes:
        format: a dtype, or a quantised format.
        by_entry: each row by itself, to be weighted at the source; tables are then
            those of tokens of one row each.
    """

    format: str
    by_entry: bool


class Transport(abc.ABC):
    """A way to exchange rows between the ranks of a group.

    One object serves all handles: what belongs to one is in the handle and in its
    native group. Calls are made inside `jax.shard_map`, on a rank's arrays, and are not
    differentiated. `after` is what they come after, and they return it for the next.

    Attributes:
        name: the one that `jax_ep.init` takes.
        ordered: whether the calls of a handle must come one after the other.
        windowed: whether its groups have windows, whose waits can fail.
    """

    name: ClassVar[str]
    ordered: ClassVar[bool] = False
    windowed: ClassVar[bool] = False

    def obstacle(
        self, mesh: Mesh, groups: np.ndarray, config: EPConfig, rendezvous: Rendezvous
    ) -> Obstacle | None:
        """(what it must have, what was found), or None where it can serve the mesh.

        The same in all processes of the mesh, which ask it together.

        Args:
            mesh: the mesh.
            groups: its devices as `[EP groups, ranks]`.
            config: of the handle.
            rendezvous: of the mesh's processes.
        """
        return None

    def open(
        self,
        native: ModuleType,
        key: int,
        groups: np.ndarray,
        config: EPConfig,
        first_epoch: int | None,
        rendezvous: Rendezvous,
    ) -> int:
        """Opens the native group `key`; returns the bytes of its windows per device.

        Raises:
            NotMapped: after all the ranks do not reach each other's windows.
            RuntimeError: no room for windows, here or in another process, or one that
                did not come.
        """
        raise NotImplementedError

    def held_rows(self, ep: EPHandle) -> int:
        """Dimension 0 of what the first half of a call leaves on a rank."""
        return 1

    @abc.abstractmethod
    def dispatch(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Arrived, Token]:
        """Routes and exchanges tokens."""

    @abc.abstractmethod
    def dispatch_send(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Any, Token]:
        """The first half of `dispatch`: what its second half takes."""

    @abc.abstractmethod
    def dispatch_receive(
        self, ep: EPHandle, sent: Any, like: jax.Array, after: Token
    ) -> tuple[Arrived, Token]:
        """The second half of `dispatch`; `like` has the tokens' shape and dtype."""

    @abc.abstractmethod
    def dispatch_cached(
        self,
        ep: EPHandle,
        route: Route,
        tokens: jax.Array,
        weights: jax.Array | None,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sends tokens `[n, H]` and weights `[n, K]` along `route`.

        Returns:
            Rows `[N, H]` and their weights `[N]`, zero where no token reaches. On the
            wire tokens are in the config's `grad_format`.
        """

    @abc.abstractmethod
    def combine(
        self,
        ep: EPHandle,
        rows: CombineInputs,
        sums: SumInputs,
        wire: Wire,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sums rows back to tokens `[n, H]`; weight gradients become `[n, K]`."""

    @abc.abstractmethod
    def combine_send(
        self, ep: EPHandle, rows: CombineInputs, wire: Wire, after: Token
    ) -> tuple[Any, Token]:
        """The first half of `combine`: what its second half takes."""

    @abc.abstractmethod
    def combine_receive(
        self,
        ep: EPHandle,
        sent: Any,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        after: Token,
    ) -> tuple[jax.Array, Token]:
        """The second half of `combine`; `like` has the result's dtype and columns."""


_registry: dict[str, Transport] = {}


def register(kind: type[Transport]) -> type[Transport]:
    """Class decorator: makes `kind` one that `jax_ep.init` takes by its name."""
    _registry[kind.name] = kind()
    return kind


def by_name(name: str) -> Transport:
    """The transport of that name."""
    return _registry[name]


def names() -> tuple[str, ...]:
    """Of all transports, as they were registered."""
    return tuple(_registry)
