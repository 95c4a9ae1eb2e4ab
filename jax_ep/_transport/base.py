"""The interface of transports, with the operands and results of their calls.

Transports only know ranks, experts and rows. `_ops/options.py` translates options to
these, and `_ops` adds derivatives.
"""

from __future__ import annotations

import abc
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep._core import pytrees
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import tables
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Rendezvous

# An ordered transport's calls take a token from the call before and return one for the
# next: a single int32 `[1]`. Other transports use (), which adds nothing to programs.
Token = tuple[jax.Array, ...]


class DispatchInputs(NamedTuple):
    """Operands of a dispatch that routes, on one rank.

    Attributes:
        tokens: `[n, H]`; with `token_scales` codes of the config's `dispatch_format`.
        topk_ids: int32 `[n, K]`, ids of the `route_ranks * groups` experts.
        router_weights: float32 `[n, K]`.
        input_scale: float32 `[1]`, or `[0]` for formats without one.
        token_scales: scales of tokens that are quantised already, or None.
    """

    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    input_scale: jax.Array
    token_scales: jax.Array | None = None

    def like(self, ep: EPHandle) -> jax.Array:
        """Returns an array that is shaped as the tokens are before quantisation."""
        if self.token_scales is None:
            return self.tokens
        shape = (self.tokens.shape[0], ep.config.hidden_size)
        return tables.zeros(self.tokens, shape, ep.config.dtype)


# What a dispatch returns: at the expert rank, with `slot_of` and `num_invalid` at the
# source rank. The fields are those of `Dispatched` and `Route` with the same names.
if TYPE_CHECKING:
    Arrived = Any  # made from the native table, which type checkers do not see
else:
    Arrived = tables.Dispatch


class SumInputs(NamedTuple):
    """Operands of a combine at the source rank, which sums what arrives.

    Attributes:
        slot_of: int32 `[n, K]`, as in `Route`; `options.summed` adds it.
        entry_weights: float32 `[n, K]`, factors of rows that were sent one by one; None
            if rows were summed at the expert rank.
        residual: `[n, H]` or None.
        shared_rows: `[N, H]`, starting with the rows of the shared expert, or None.
        shared_part: int32 `[2]`, first and number of the tokens of these rows, or None.
    """

    slot_of: Any = None
    entry_weights: jax.Array | None = None
    residual: jax.Array | None = None
    shared_rows: jax.Array | None = None
    shared_part: jax.Array | None = None


# A `Pending` of a combine has one.
pytrees.serialisable(SumInputs, arrays=SumInputs._fields)


class CombineInputs(NamedTuple):
    """Operands of a combine, by their names in the native tables.

    Attributes:
        expert_out: `[N, H]`.
        router_weights: float32 `[N]`, factors of the rows, or None.
        weight_grads: float32 `[N]`, sent along with the rows, unsummed, or None.
        row_of: int32 `[R, n, K]`, as in `Route`; `options.summed` adds it.
        slot_counts: int32 `[R]`, likewise.
        sums: those at the source rank.
    """

    expert_out: jax.Array
    router_weights: jax.Array | None = None
    weight_grads: jax.Array | None = None
    row_of: Any = None
    slot_counts: Any = None
    sums: SumInputs = SumInputs()

    def of_rows(self) -> dict[str, Any]:
        """Returns those at the expert rank, which sums and sends, by name."""
        return {name: value for name, value in self._asdict().items() if name != "sums"}


class Wire(NamedTuple):
    """How a combine sends rows: attributes of its custom calls.

    Attributes:
        combine_dtype: a dtype, or a quantised format.
        by_entry: whether each row is sent by itself, to be weighted at the source. The
            tables are then those of tokens with one row each.
        gradients: whether rows are gradients; formats then keep smaller values.
    """

    combine_dtype: str
    by_entry: bool
    gradients: bool = False


class Transport(abc.ABC):
    """A way to exchange rows between the ranks of a group.

    One object serves all handles; the state of a handle is in the handle and in its
    native group. Calls are made inside `jax.shard_map`, on the arrays of one rank, and
    are not differentiated. They take `after`, the token of the call before, and return
    the token for the next call.

    Attributes:
        name: name for `jax_ep.init`.
        ordered: whether the calls of a handle must run one after the other.
        windowed: whether groups have windows, in which waits can fail.
    """

    name: ClassVar[str]
    ordered: ClassVar[bool] = False
    windowed: ClassVar[bool] = False

    def obstacle(
        self, mesh: Mesh, groups: np.ndarray, config: EPConfig, rendezvous: Rendezvous
    ) -> Obstacle | None:
        """Returns (what it needs, what was found), or None if it can serve the mesh.

        All processes of the mesh call it together, and must get the same result.

        Args:
            mesh: the mesh.
            groups: the devices of the mesh as `[EP groups, ranks]`.
            config: the config of the handle.
            rendezvous: exchange between the mesh's processes.
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
            NotMapped: ranks turned out not to reach each other's windows.
            RuntimeError: a device of this or another process has no memory for its
                window, or a process failed or did not join.
        """
        raise NotImplementedError

    def pending_rows(self, ep: EPHandle) -> int:
        """Returns the size of dimension 0 of a first half's result on one rank."""
        return 1

    @abc.abstractmethod
    def dispatch(
        self, ep: EPHandle, inputs: DispatchInputs, zero_tail: bool, after: Token
    ) -> tuple[Arrived, Token]:
        """Routes and exchanges tokens.

        `zero_tail` says whether rows past the last group must be zero.
        """

    @abc.abstractmethod
    def dispatch_send(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Any, Token]:
        """Runs the first half of `dispatch`; the result goes to `dispatch_recv`."""

    def begun(self, sent: Any) -> tuple[jax.Array, ...]:
        """Returns what the first half of a dispatch has before its exchange.

        XLA runs work that needs these arrays after that, and so beside the exchange. ()
        if a first half is one call, which XLA starts as early as it can.
        """
        del sent
        return ()

    @abc.abstractmethod
    def dispatch_recv(
        self, ep: EPHandle, sent: Any, like: jax.Array, after: Token
    ) -> tuple[Arrived, Token]:
        """Runs the second half of `dispatch`; `like` is shaped as the tokens."""

    @abc.abstractmethod
    def dispatch_cached(
        self,
        ep: EPHandle,
        route: Route,
        tokens: jax.Array,
        weights: jax.Array | None,
        wire: str,
        zero_tail: bool,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sends tokens `[n, H]` and weights `[n, K]` along a cached route.

        `wire` is the format in which tokens are sent; "bf16" sends them unchanged.

        Returns:
            Rows `[N, H]` and their weights `[N]`, zero for rows without a token. If
            `zero_tail` is false, such rows may hold anything; callers pass false only
            if all of them are past the last group.
        """

    @abc.abstractmethod
    def combine(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, after: Token
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sums rows back to tokens `[n, H]`; weight gradients become `[n, K]`."""

    @abc.abstractmethod
    def combine_send(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, after: Token
    ) -> tuple[Any, Token]:
        """Runs the first half of `combine`; the result goes to `combine_recv`."""

    @abc.abstractmethod
    def combine_recv(
        self,
        ep: EPHandle,
        sent: Any,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        after: Token,
    ) -> tuple[jax.Array, Token]:
        """Runs the second half of `combine`; `like` has the dtype and columns of y."""


def dimensions(ep: EPHandle) -> dict[str, int]:
    """Returns the dimensions of results, as the native tables name them."""
    return {"N": ep.recv_capacity, "G": ep.groups, "R": ep.route_ranks}


_registry: dict[str, Transport] = {}


def register(kind: type[Transport]) -> type[Transport]:
    """Class decorator that registers a transport for `jax_ep.init` by its name."""
    _registry[kind.name] = kind()
    return kind


def by_name(name: str) -> Transport:
    """Returns the transport of that name."""
    return _registry[name]


def names() -> tuple[str, ...]:
    """Returns the names of all transports, in order of registration."""
    return tuple(_registry)
