"""Transport "p2p": one custom call per op, whose kernel stores into peers' windows.

Results equal those of "collective", bit for bit. The first half of a call returns its
place in the windows, which the second half takes.
"""

from __future__ import annotations

from types import ModuleType

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep import formats
from jax_ep._core import errors
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import ffi, tables
from jax_ep._native.call_site import site
from jax_ep._peers import windows
from jax_ep._peers.fabric import Obstacle
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._transport.base import (
    Arrived,
    CombineInputs,
    DispatchInputs,
    SumInputs,
    Token,
    Transport,
    Wire,
    dimensions,
    register,
)

STREAM_SINCE = (0, 11, 1)  # first JAX with custom calls on XLA's collective stream

# The results of a first half, all int32. The first one begins with the pending call,
# the last one is the token for the handle's next call. With `overlap="stream"` a single
# array `[1, M]` holds all of them one after the other.
First = tuple[jax.Array, ...]
# What the first half of a dispatch returns: its results, and the tokens if not encoded.
Sent = tuple[First, jax.Array | None]


@register
class P2P(Transport):
    """Kernels that store into the memory of the other ranks' GPUs."""

    name = "p2p"
    ordered = True
    windowed = True

    def obstacle(
        self, mesh: Mesh, groups: np.ndarray, config: EPConfig, rendezvous: Rendezvous
    ) -> Obstacle | None:
        """Checks for peer access between all GPUs, and for rows that fit kernels."""
        return (
            row_obstacle(config)
            or gpu_obstacle(mesh, groups)
            or windows.find_obstacle(native_of(mesh), groups, rendezvous)
        )

    def open(
        self,
        native: ModuleType,
        key: int,
        groups: np.ndarray,
        config: EPConfig,
        first_epoch: int | None,
        rendezvous: Rendezvous,
    ) -> int:
        """Opens the windows of all ranks."""
        return windows.open_windows(
            native, key, groups, config, first_epoch, rendezvous
        )

    def dispatch(
        self, ep: EPHandle, inputs: DispatchInputs, zero_tail: bool, after: Token
    ) -> tuple[Arrived, Token]:
        """Routes and exchanges tokens in one call."""
        arrived = tables.call(
            "ep_dispatch",
            inputs.like(ep),
            dimensions(ep),
            {**inputs._asdict(), "after": _one(after)},
            {
                "key": ep.key,
                "site": site(),
                "zero_tail": zero_tail,
                "format": ep.config.dispatch_format,
            },
            ep.config,
        )
        return arrived, (arrived.num_dropped,)

    def dispatch_send(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Sent, Token]:
        """Routes and sends."""
        config = ep.config
        first = tuple(
            tables.call(
                "ep_dispatch_send_on_stream" if _on_stream(ep) else "ep_dispatch_send",
                inputs.like(ep),
                {},
                {**inputs._asdict(), "after": _one(after)},
                {
                    "key": ep.key,
                    "site": site(),
                    "ranks": ep.route_ranks,
                    "local_experts": ep.groups,
                    "format": config.dispatch_format,
                },
                config,
            )
        )
        # The second half copies this rank's own rows from `tokens`, unless encoded.
        encoded = formats.is_quantized(config.dispatch_format)
        return (first, None if encoded else inputs.tokens), (first[-1],)

    def dispatch_recv(
        self, ep: EPHandle, sent: Sent, like: jax.Array, after: Token
    ) -> tuple[Arrived, Token]:
        """Waits for rows and places them."""
        config = ep.config
        first, own = sent
        top_k = config.top_k + config.fused_shared_expert
        sizes = dimensions(ep) | {"n": like.shape[0], "K": top_k}
        _, slot_of, num_invalid = (
            tables.unpack("ep_dispatch_send", first[0], sizes)
            if _on_stream(ep)
            else first
        )
        placed = tables.call(
            "ep_dispatch_recv",
            like,
            sizes,
            {"pending": first[0], "tokens": own, "after": _one(after)},
            {"key": ep.key, "format": config.dispatch_format},
            config,
        )
        arrived = tables.pick(Arrived, placed, slot_of=slot_of, num_invalid=num_invalid)
        return arrived, (placed.num_dropped,)

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
        """Sends along a cached route in one call."""
        sent = tables.call(
            "ep_dispatch_cached",
            tokens,
            {},
            {
                "tokens": tokens,
                "router_weights": weights,
                "slot_of": route.slot_of,
                "row_of": route.row_of,
                "row_slot": route.row_slot,
                "after": _one(after),
            },
            {"key": ep.key, "site": site(), "zero_tail": zero_tail, "format": wire},
        )
        return (sent.rows, sent.router_weights), (sent.done,)

    def combine(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, after: Token
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sums at the expert ranks, sends, and sums at the source, in one call."""
        if inputs.weight_grads is None:
            wire = _alone(ep, inputs.row_of, wire)
        combined = tables.call(
            "ep_combine",
            inputs.expert_out,
            {},
            {**inputs.of_rows(), **inputs.sums._asdict(), "after": _one(after)},
            {"key": ep.key, "site": site(), **wire._asdict()},
            ep.config,
        )
        return (combined.output, combined.weight_grads), (combined.done,)

    def combine_send(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, after: Token
    ) -> tuple[First, Token]:
        """Sums and sends."""
        wire = _alone(ep, inputs.row_of, wire)
        first = tuple(
            tables.call(
                "ep_combine_send_on_stream" if _on_stream(ep) else "ep_combine_send",
                inputs.expert_out,
                {},
                {**inputs.of_rows(), "after": _one(after)},
                {"key": ep.key, "site": site(), **wire._asdict()},
                ep.config,
            )
        )
        return first, (first[-1],)

    def combine_recv(
        self,
        ep: EPHandle,
        sent: First,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        after: Token,
    ) -> tuple[jax.Array, Token]:
        """Waits for the sums of the expert ranks and adds them."""
        wire = _alone(ep, sums.slot_of, wire)
        placed = tables.call(
            "ep_combine_recv",
            like,
            {},
            {"pending": sent[0], **sums._asdict(), "after": _one(after)},
            {"key": ep.key, "ranks": ep.route_ranks, **wire._asdict()},
            ep.config,
        )
        return placed.output, (placed.done,)


def native_of(mesh: Mesh) -> ModuleType:
    """Returns the native module of the mesh's devices."""
    return ffi.native_for(windows.platform_of(mesh))


NO_GPUS: Obstacle = "GPUs", "CPU devices"


def gpu_obstacle(mesh: Mesh, groups: np.ndarray) -> Obstacle | None:
    """Returns an obstacle if there are no GPUs, or too many in a group."""
    if windows.platform_of(mesh) == "cpu":
        return NO_GPUS
    ranks, most = groups.shape[1], native_of(mesh).MAX_WINDOW_RANKS
    return (f"at most {most} ranks in a group", str(ranks)) if ranks > most else None


def row_obstacle(config: EPConfig) -> Obstacle | None:
    """Returns an obstacle if rows are too wide for a multiprocessor's shared memory."""
    wires = (config.dispatch_format, config.grad_format, config.combine_format)
    quantized = any(name and formats.is_quantized(name) for name in wires)
    limits = ffi.native.MAX_ENCODED_HIDDEN, ffi.native.MAX_WINDOW_HIDDEN
    most = limits[0] if quantized else limits[1]
    if config.skip_a2a or config.hidden_size <= most:
        return None
    wire = "quantised formats" if quantized else "these dtypes"
    return f"hidden_size of at most {most} with {wire}", str(config.hidden_size)


def _alone(ep: EPHandle, table: jax.Array, wire: Wire) -> Wire:
    """Sends rows by entry if `table`, of `options.entry_route`, has one per token."""
    alone = ep.config.reduce == "none" and table.shape[-1] == 1
    return wire._replace(by_entry=True) if alone else wire


def _one(after: Token) -> jax.Array:
    (token,) = after
    return token


def _on_stream(ep: EPHandle) -> bool:
    """Whether first halves run on XLA's stream for collectives.

    Those first halves have targets of their own, which are not captured, because in a
    CUDA graph nothing would overlap with them.
    """
    if ep.config.overlap != "stream":
        return False
    if jax.__version_info__ < STREAM_SINCE:
        raise errors.invalid(
            "EPConfig",
            f'overlap="stream" must have jax 0.11.1 or newer on {ep.transport}',
            jax.__version__,
            "leave overlap out or update jax",
        )
    return True
