"""Transport "collective": pack -> all_to_all -> unpack, per rank, inside shard_map.

XLA pairs up exchanges of different programs if processes run different ones. So pack
starts each region with a tag of the handle and the call. An unpack that finds different
tags returns NaN, -1 and 0, and makes `EPHandle.check` raise. All of this happens in the
native handlers.
"""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import formats
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import ffi, tables
from jax_ep._native.call_site import site
from jax_ep._peers import windows
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

_WORD_BYTES = 4  # regions are exchanged as uint32

# The result of the first half of a dispatch: arrived regions, slot_of, num_invalid.
Sent = tuple[jax.Array, jax.Array, jax.Array]


@register
class Collective(Transport):
    """Exchanges with XLA's collectives, on any devices; its calls need no order."""

    name = "collective"

    def open(
        self,
        native: ModuleType,
        key: int,
        groups: np.ndarray,
        config: EPConfig,
        first_epoch: int | None,
        rendezvous: Rendezvous,
    ) -> int:
        """Opens a group without windows."""
        own = rendezvous.own
        ranks = [
            (windows.ordinal(device), rank)
            for group in groups
            for rank, device in enumerate(group)
            if device.process_index == own
        ]
        native.open_group(key, [o for o, _ in ranks], [rank for _, rank in ranks])
        return 0

    def exchange(self, ep: EPHandle, send: jax.Array) -> jax.Array:
        """Sends row r of `send` to rank r; row r of the result comes from rank r."""
        if ep.route_ranks == 1:
            return send
        return jax.lax.all_to_all(send, ep.axis_names, 0, 0, tiled=True)

    def pending_rows(self, ep: EPHandle) -> int:
        """Returns the number of regions, one per source rank."""
        return ep.route_ranks

    def dispatch(
        self, ep: EPHandle, inputs: DispatchInputs, zero_tail: bool, after: Token
    ) -> tuple[Arrived, Token]:
        """Packs, exchanges, unpacks; clears the tail if the config says so."""
        send, slot_of, num_invalid = self.dispatch_pack(ep, inputs, in_halves=False)
        sent = (self.exchange(ep, send), slot_of, num_invalid)
        return self.dispatch_recv(ep, sent, inputs.like(ep), after)

    def dispatch_send(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Sent, Token]:
        """Packs and exchanges."""
        send, slot_of, num_invalid = self.dispatch_pack(ep, inputs, in_halves=True)
        return (self.exchange(ep, send), slot_of, num_invalid), after

    def begun(self, sent: Sent) -> tuple[jax.Array, ...]:
        """Returns what pack makes besides the regions."""
        return sent[1:]

    def dispatch_pack(
        self, ep: EPHandle, inputs: DispatchInputs, in_halves: bool
    ) -> Sent:
        """Runs `dispatch_send` up to its exchange; the first result is to be sent."""
        config = ep.config
        n, top_k = inputs.topk_ids.shape
        like = inputs.like(ep)
        region_bytes = ffi.native.dispatch_region_bytes(
            config.dispatch_format,
            like.shape[1],
            config.element_bytes,
            n,
            top_k,
            ep.groups,
        )
        packed = tables.call(
            "ep_dispatch_pack",
            like,
            _with_regions(ep, region_bytes),
            inputs._asdict(),
            {
                "key": ep.key,
                "site": site(),
                "in_halves": in_halves,
                "num_experts": ep.route_ranks * ep.groups,
                "format": config.dispatch_format,
            },
            config,
        )
        return packed.send, packed.slot_of, packed.num_invalid

    def dispatch_recv(
        self, ep: EPHandle, sent: Sent, like: jax.Array, after: Token
    ) -> tuple[Arrived, Token]:
        """Unpacks."""
        recv, slot_of, num_invalid = sent
        unpacked = tables.call(
            "ep_dispatch_unpack",
            like,
            dimensions(ep),
            {"recv": recv, "slot_of": slot_of, "num_invalid": num_invalid},
            {"key": ep.key, "format": ep.config.dispatch_format},
            ep.config,
        )
        return tables.pick(Arrived, unpacked), after

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
        """Packs, exchanges, unpacks; clears all rows without a token."""
        n, hidden = tokens.shape
        num_weights = 0 if weights is None else route.slot_of.shape[1]
        region_bytes = ffi.native.dispatch_cached_region_bytes(
            wire, hidden, ep.config.element_bytes, n, num_weights
        )
        send = tables.call(
            "ep_dispatch_cached_pack",
            tokens,
            _with_regions(ep, region_bytes),
            {"tokens": tokens, "router_weights": weights, "slot_of": route.slot_of},
            {"key": ep.key, "site": site(), "format": wire},
        ).send
        unpacked = tables.call(
            "ep_dispatch_cached_unpack",
            tokens,
            {},
            {
                "recv": self.exchange(ep, send),
                "row_of": route.row_of,
                "row_slot": route.row_slot,
            },
            {"key": ep.key, "format": wire, "with_weights": weights is not None},
        )
        return (unpacked.rows, unpacked.router_weights), after

    def combine(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, after: Token
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Packs, exchanges, unpacks."""
        send = self.combine_pack(ep, inputs, wire, in_halves=False)
        recv, like = self.exchange(ep, send), inputs.expert_out
        with_grads = inputs.weight_grads is not None
        return _combine_unpack(ep, recv, inputs.sums, like, wire, with_grads), after

    def combine_send(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, after: Token
    ) -> tuple[jax.Array, Token]:
        """Packs and exchanges."""
        send = self.combine_pack(ep, inputs, wire, in_halves=True)
        return self.exchange(ep, send), after

    def combine_pack(
        self, ep: EPHandle, inputs: CombineInputs, wire: Wire, in_halves: bool
    ) -> jax.Array:
        """Runs `combine_send` up to its exchange; the result is to be sent."""
        expert_out, sent_as = inputs.expert_out, wire.combine_dtype
        n, top_k = inputs.row_of.shape[1:]
        quantized = sent_as in formats.names()
        region_bytes = ffi.native.combine_region_bytes(
            sent_as if quantized else "bf16",
            expert_out.shape[1],
            ep.config.element_bytes if quantized else jnp.dtype(sent_as).itemsize,
            n,
            0 if inputs.weight_grads is None else top_k,
        )
        return tables.call(
            "ep_combine_pack",
            expert_out,
            _with_regions(ep, region_bytes),
            inputs.of_rows(),
            {"key": ep.key, "site": site(), "in_halves": in_halves, **wire._asdict()},
            ep.config,
        ).send

    def combine_recv(
        self,
        ep: EPHandle,
        sent: jax.Array,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        after: Token,
    ) -> tuple[jax.Array, Token]:
        """Unpacks."""
        return _combine_unpack(ep, sent, sums, like, wire, False)[0], after


def _with_regions(ep: EPHandle, region_bytes: int) -> dict[str, int]:
    return dimensions(ep) | {"W": region_bytes // _WORD_BYTES}


def _combine_unpack(
    ep: EPHandle,
    recv: jax.Array,
    sums: SumInputs,
    like: jax.Array,
    wire: Wire,
    with_weight_grads: bool,
) -> tuple[jax.Array, jax.Array | None]:
    unpacked = tables.call(
        "ep_combine_unpack",
        like,
        {},
        {"recv": recv, **sums._asdict()},
        {"key": ep.key, "with_weight_grads": with_weight_grads, **wire._asdict()},
        ep.config,
    )
    return unpacked.output, unpacked.weight_grads
