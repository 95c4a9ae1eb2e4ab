"""Transport "collective": pack -> all_to_all -> unpack, per rank, inside shard_map.

XLA pairs up exchanges of different programs if processes run different ones. So pack
starts each region with a tag of the handle and the call. An unpack that finds different
tags returns NaN, -1 and 0, and makes `EPHandle.check` raise. All of this happens in the
native handlers.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import formats
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import ffi
from jax_ep._native.call_site import site
from jax_ep._peers import windows
from jax_ep._peers.rendezvous import Rendezvous
from jax_ep._transport.base import (
    Arrived,
    CombineInputs,
    DispatchInputs,
    Received,
    SumInputs,
    Token,
    Transport,
    Wire,
    register,
)
from jax_ep._transport.results import received, struct, zeros

_WORD_BYTES = 4  # regions are exchanged as uint32

# The result of the first half of a dispatch: arrived regions, slot_of, num_invalid.
Sent = tuple[jax.Array, jax.Array, jax.Array]


@register
class Collective(Transport):
    """Exchanges by XLA's collectives, on any devices; its calls need no order."""

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

    def held_rows(self, ep: EPHandle) -> int:
        """Returns the number of regions, one per source rank."""
        return ep.route_ranks

    def dispatch(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Arrived, Token]:
        """Packs, exchanges, unpacks."""
        send, slot_of, num_invalid = self.dispatch_pack(ep, inputs, in_halves=False)
        sent = (self.exchange(ep, send), slot_of, num_invalid)
        return self.dispatch_receive(ep, sent, inputs.tokens, after)

    def dispatch_send(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Sent, Token]:
        """Packs and exchanges."""
        send, slot_of, num_invalid = self.dispatch_pack(ep, inputs, in_halves=True)
        return (self.exchange(ep, send), slot_of, num_invalid), after

    def dispatch_pack(
        self, ep: EPHandle, inputs: DispatchInputs, in_halves: bool
    ) -> Sent:
        """Runs `dispatch_send` up to its exchange; the first result is to be sent."""
        config, ranks = ep.config, ep.route_ranks
        tokens = inputs.tokens
        n, top_k = inputs.topk_ids.shape
        region_bytes = ffi.native.dispatch_region_bytes(
            config.dispatch_format,
            tokens.shape[1],
            config.element_bytes,
            n,
            top_k,
            ep.groups,
        )

        def int32(*shape: int) -> Any:
            return struct(tokens, shape, jnp.int32)

        send, slot_of, _, num_invalid = ffi.call(
            "ep_pack",
            (
                struct(tokens, (ranks, region_bytes // _WORD_BYTES), jnp.uint32),
                int32(n, top_k),
                int32(n, top_k),
                int32(1),
            ),
            *inputs,
            key=ep.key,
            site=site(),
            in_halves=in_halves,
            num_experts=ranks * ep.groups,
            format=config.dispatch_format,
        )
        return send, slot_of, num_invalid

    def dispatch_receive(
        self, ep: EPHandle, sent: Sent, like: jax.Array, after: Token
    ) -> tuple[Arrived, Token]:
        """Unpacks."""
        config = ep.config
        recv, slot_of, num_invalid = sent
        types = received(ep, like)
        *arrived, _, slot_of, num_invalid = ffi.call(
            "ep_unpack",
            (
                *types,
                struct(like, (ep.route_ranks, ep.groups), jnp.int32),
                struct(like, slot_of.shape, jnp.int32),
                struct(like, num_invalid.shape, jnp.int32),
            ),
            recv,
            slot_of,
            num_invalid,
            # Passed through in place, so that the handler can clear them, too, if the
            # tags differ.
            input_output_aliases={1: len(types) + 1, 2: len(types) + 2},
            key=ep.key,
            expert_alignment=config.expert_alignment,
            zero_tail=config.zero_tail,
            format=config.dispatch_format,
            scale_layout=config.scale_layout,
        )
        return Arrived(Received(*arrived), slot_of, num_invalid), after

    def dispatch_cached(
        self,
        ep: EPHandle,
        route: Route,
        tokens: jax.Array,
        weights: jax.Array | None,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Packs, exchanges, unpacks."""
        wire = ep.config.grad_wire_format
        n, hidden = tokens.shape
        rows, top_k = ep.recv_capacity, route.slot_of.shape[1]
        num_weights = 0 if weights is None else top_k
        if weights is None:
            weights = zeros(tokens, (n, 0), jnp.float32)
        region_bytes = ffi.native.cached_region_bytes(
            wire, hidden, ep.config.element_bytes, n, num_weights
        )
        (send,) = ffi.call(
            "ep_pack_cached",
            (
                struct(
                    tokens, (ep.route_ranks, region_bytes // _WORD_BYTES), jnp.uint32
                ),
            ),
            tokens,
            weights,
            route.slot_of,
            key=ep.key,
            site=site(),
            format=wire,
        )
        out, row_weights = ffi.call(
            "ep_unpack_cached",
            (
                struct(tokens, (rows, hidden), tokens.dtype),
                struct(tokens, (rows if num_weights else 0,), jnp.float32),
            ),
            self.exchange(ep, send),
            route.row_of,
            route.row_slot,
            key=ep.key,
            format=wire,
        )
        return (out, row_weights if num_weights else None), after

    def combine(
        self,
        ep: EPHandle,
        rows: CombineInputs,
        sums: SumInputs,
        wire: Wire,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Packs, exchanges, unpacks."""
        send = self.combine_pack(ep, rows, wire, in_halves=False)
        recv = self.exchange(ep, send)
        weighted = rows.weight_grads is not None
        return (
            self._combine_unpack(ep, recv, sums, rows.expert_out, wire, weighted),
            after,
        )

    def combine_send(
        self, ep: EPHandle, rows: CombineInputs, wire: Wire, after: Token
    ) -> tuple[jax.Array, Token]:
        """Packs and exchanges."""
        send = self.combine_pack(ep, rows, wire, in_halves=True)
        return self.exchange(ep, send), after

    def combine_pack(
        self, ep: EPHandle, rows: CombineInputs, wire: Wire, in_halves: bool
    ) -> jax.Array:
        """Runs `combine_send` up to its exchange; the result is to be sent."""
        expert_out = rows.expert_out
        n, top_k = rows.row_of.shape[1:]
        none = zeros(expert_out, (0,), jnp.float32)
        quantized = wire.format in formats.names()
        region_bytes = ffi.native.combine_region_bytes(
            wire.format if quantized else "bf16",
            expert_out.shape[1],
            ep.config.element_bytes if quantized else jnp.dtype(wire.format).itemsize,
            n,
            0 if rows.weight_grads is None else top_k,
        )
        (send,) = ffi.call(
            "ep_combine_pack",
            (
                struct(
                    expert_out,
                    (ep.route_ranks, region_bytes // _WORD_BYTES),
                    jnp.uint32,
                ),
            ),
            expert_out,
            none if rows.row_weights is None else rows.row_weights,
            none if rows.weight_grads is None else rows.weight_grads,
            rows.row_of,
            rows.slot_counts,
            key=ep.key,
            site=site(),
            in_halves=in_halves,
            weighted=rows.row_weights is not None,
            with_weight_grads=rows.weight_grads is not None,
            combine_dtype=wire.format,
        )
        return send

    def combine_receive(
        self,
        ep: EPHandle,
        sent: jax.Array,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        after: Token,
    ) -> tuple[jax.Array, Token]:
        """Unpacks."""
        return self._combine_unpack(ep, sent, sums, like, wire, False)[0], after

    def _combine_unpack(
        self,
        ep: EPHandle,
        recv: jax.Array,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        with_weight_grads: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        hidden = like.shape[1]
        n, top_k = sums.slot_of.shape
        num_weights = top_k if with_weight_grads else 0
        no_rows = zeros(like, (0, hidden), like.dtype)
        shared = sums.shared_rows is not None
        out, grads = ffi.call(
            "ep_combine_unpack",
            (
                struct(like, (n, hidden), like.dtype),
                struct(like, (n, num_weights), jnp.float32),
            ),
            recv,
            sums.slot_of,
            no_rows if sums.residual is None else sums.residual,
            zeros(like, (0, top_k), jnp.float32)
            if sums.entry_weights is None
            else sums.entry_weights,
            no_rows if sums.shared_rows is None else sums.shared_rows,
            zeros(like, (0,), jnp.int32)
            if sums.shared_part is None
            else sums.shared_part,
            key=ep.key,
            with_residual=sums.residual is not None,
            by_entry=wire.by_entry,
            with_entry_weights=sums.entry_weights is not None,
            with_shared=shared,
            combine_dtype=wire.format,
        )
        return out, grads if num_weights else None
