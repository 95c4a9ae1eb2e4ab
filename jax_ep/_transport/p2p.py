"""Transport "p2p": one custom call per op, whose kernel stores into peers' windows.

Results equal those of "collective", bit for bit. The first half of a call returns its
place in the windows, which the second half takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep import formats
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Route
from jax_ep._native import ffi
from jax_ep._native.call_site import site
from jax_ep._peers import windows
from jax_ep._peers.fabric import Obstacle
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

PENDING_INTS = 4  # size of PendingCall in xla_ffi/protocol/pending.h
STREAM_SINCE = (0, 11, 1)  # JAX that runs custom calls on XLA's stream for collectives

# A token and its codes are in shared memory while it is encoded, which limits H: with
# 2048 experts and top-32, 238,592 elements of nvfp4 fit. Other rows move in pieces.
_MOST_HIDDEN_QUANTIZED, _MOST_HIDDEN = 1 << 17, 1 << 22

# The results of a first half, all int32. The first one begins with the pending call,
# the last one is the token for the handle's next call. With `overlap="stream"` a single
# array `[1, M]` holds all of them one after the other.
First = tuple[jax.Array, ...]
# The first half of a dispatch returns its results, and the tokens if not encoded.
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
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Arrived, Token]:
        """Routes and exchanges tokens in one call."""
        tokens = inputs.tokens
        *arrived, slot_of, num_invalid = ffi.call(
            "ep_dispatch",
            (
                *received(ep, tokens),
                struct(tokens, inputs.topk_ids.shape, jnp.int32),
                struct(tokens, (1,), jnp.int32),
            ),
            *inputs,
            *after,
            key=ep.key,
            site=site(),
            expert_alignment=ep.config.expert_alignment,
            zero_tail=ep.config.zero_tail,
            format=ep.config.dispatch_format,
            scale_layout=ep.config.scale_layout,
        )
        received_ = Received(*arrived)
        return Arrived(received_, slot_of, num_invalid), (received_.num_dropped,)

    def dispatch_send(
        self, ep: EPHandle, inputs: DispatchInputs, after: Token
    ) -> tuple[Sent, Token]:
        """Routes and sends."""
        tokens = inputs.tokens
        first = _first_half(
            ep,
            "ep_dispatch_send",
            _dispatch_tables(ep, tokens),
            *inputs,
            *after,
            ranks=ep.route_ranks,
            local_experts=ep.groups,
            format=ep.config.dispatch_format,
        )
        # The second half copies this rank's own rows from tokens, unless encoded.
        encoded = formats.is_quantized(ep.config.dispatch_format)
        return (first, None if encoded else tokens), (first[-1],)

    def dispatch_receive(
        self, ep: EPHandle, sent: Sent, like: jax.Array, after: Token
    ) -> tuple[Arrived, Token]:
        """Waits for rows and places them."""
        first, own = sent
        _, slot_of, num_invalid = _results_of(first, _dispatch_tables(ep, like))
        arrived = ffi.call(
            "ep_dispatch_place",
            received(ep, like),
            first[0],
            # Made here, because an empty array from another program has no buffer.
            zeros(like, (0, like.shape[1]), like.dtype) if own is None else own,
            *after,
            key=ep.key,
            expert_alignment=ep.config.expert_alignment,
            zero_tail=ep.config.zero_tail,
            format=ep.config.dispatch_format,
            scale_layout=ep.config.scale_layout,
        )
        received_ = Received(*arrived)
        return Arrived(received_, slot_of, num_invalid), (received_.num_dropped,)

    def dispatch_cached(
        self,
        ep: EPHandle,
        route: Route,
        tokens: jax.Array,
        weights: jax.Array | None,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sends by a cached route in one call."""
        n, hidden = tokens.shape
        rows = ep.recv_capacity
        weighted = weights is not None
        out, row_weights, done = ffi.call(
            "ep_dispatch_cached",
            (
                struct(tokens, (rows, hidden), tokens.dtype),
                struct(tokens, (rows if weighted else 0,), jnp.float32),
                struct(tokens, (1,), jnp.int32),
            ),
            tokens,
            zeros(tokens, (n, 0), jnp.float32) if weights is None else weights,
            route.slot_of,
            route.row_of,
            route.row_slot,
            *after,
            key=ep.key,
            site=site(),
            format=ep.config.grad_wire_format,
        )
        return (out, row_weights if weighted else None), (done,)

    def combine(
        self,
        ep: EPHandle,
        rows: CombineInputs,
        sums: SumInputs,
        wire: Wire,
        after: Token,
    ) -> tuple[tuple[jax.Array, jax.Array | None], Token]:
        """Sums at the expert ranks, sends, and sums at the source, in one call."""
        expert_out = rows.expert_out
        n, top_k = sums.slot_of.shape
        none = zeros(expert_out, (0,), jnp.float32)
        with_grads = rows.weight_grads is not None
        given, options = _summed(sums, expert_out)
        out, grads, done = ffi.call(
            "ep_combine",
            (
                struct(expert_out, (n, expert_out.shape[1]), expert_out.dtype),
                struct(expert_out, (n, top_k if with_grads else 0), jnp.float32),
                struct(expert_out, (1,), jnp.int32),
            ),
            expert_out,
            none if rows.row_weights is None else rows.row_weights,
            none if rows.weight_grads is None else rows.weight_grads,
            rows.row_of,
            rows.slot_counts,
            *given,
            *after,
            key=ep.key,
            site=site(),
            weighted=rows.row_weights is not None,
            with_weight_grads=with_grads,
            by_entry=wire.by_entry or (not with_grads and _alone(ep, rows.row_of)),
            combine_dtype=wire.format,
            **options,
        )
        return (out, grads if with_grads else None), (done,)

    def combine_send(
        self, ep: EPHandle, rows: CombineInputs, wire: Wire, after: Token
    ) -> tuple[First, Token]:
        """Sums and sends."""
        expert_out = rows.expert_out
        none = zeros(expert_out, (0,), jnp.float32)
        first = _first_half(
            ep,
            "ep_combine_send",
            (_pending_call(expert_out), struct(expert_out, (1,), jnp.int32)),
            expert_out,
            none if rows.row_weights is None else rows.row_weights,
            rows.row_of,
            rows.slot_counts,
            *after,
            weighted=rows.row_weights is not None,
            by_entry=wire.by_entry or _alone(ep, rows.row_of),
            combine_dtype=wire.format,
        )
        return first, (first[-1],)

    def combine_receive(
        self,
        ep: EPHandle,
        sent: First,
        sums: SumInputs,
        like: jax.Array,
        wire: Wire,
        after: Token,
    ) -> tuple[jax.Array, Token]:
        """Waits for the sums of the expert ranks and adds them."""
        given, options = _summed(sums, like)
        out, done = ffi.call(
            "ep_combine_place",
            (
                struct(like, (sums.slot_of.shape[0], like.shape[1]), like.dtype),
                struct(like, (1,), jnp.int32),
            ),
            sent[0],
            *given,
            *after,
            key=ep.key,
            ranks=ep.route_ranks,
            by_entry=wire.by_entry or _alone(ep, sums.slot_of),
            combine_dtype=wire.format,
            **options,
        )
        return out, (done,)


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
    most = _MOST_HIDDEN_QUANTIZED if quantized else _MOST_HIDDEN
    if config.skip_a2a or config.hidden_size <= most:
        return None
    wire = "quantised formats" if quantized else "these dtypes"
    return f"hidden_size of at most {most} with {wire}", str(config.hidden_size)


def _alone(ep: EPHandle, table: jax.Array) -> bool:
    """Whether `table` comes from `options.entry_route`, with one row per token."""
    return ep.config.reduce == "none" and table.shape[-1] == 1


def _summed(
    sums: SumInputs, like: jax.Array
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Returns operands and attributes for the last sum of a combine."""
    no_rows = zeros(like, (0, like.shape[1]), like.dtype)
    no_weights = zeros(like, (0, sums.slot_of.shape[1]), jnp.float32)
    no_part = zeros(like, (0,), jnp.int32)
    operands = (
        sums.slot_of,
        no_rows if sums.residual is None else sums.residual,
        no_weights if sums.entry_weights is None else sums.entry_weights,
        no_rows if sums.shared_rows is None else sums.shared_rows,
        no_part if sums.shared_part is None else sums.shared_part,
    )
    return operands, {
        "with_residual": sums.residual is not None,
        "with_entry_weights": sums.entry_weights is not None,
        "with_shared": sums.shared_rows is not None,
    }


def _pending_call(like: jax.Array) -> Any:
    """Returns the type of a pending call, the first result of a first half."""
    return struct(like, (1, PENDING_INTS), jnp.int32)


def _dispatch_tables(ep: EPHandle, tokens: jax.Array) -> tuple[Any, ...]:
    """Returns the result types of a first half: pending, slot_of and num_invalid."""
    top_k = ep.config.top_k + ep.config.fused_shared_expert
    return (
        _pending_call(tokens),
        struct(tokens, (tokens.shape[0], top_k), jnp.int32),
        struct(tokens, (1,), jnp.int32),
    )


def _first_half(
    ep: EPHandle,
    target: str,
    results: Sequence[Any],
    *operands: jax.Array,
    **attributes: Any,
) -> First:
    """Launches the first half of a call, with `overlap="stream"` on another stream."""
    attributes |= {"key": ep.key, "site": site()}
    if ep.config.overlap != "stream":
        return tuple(ffi.call(target, results, *operands, **attributes))
    if jax.__version_info__ < STREAM_SINCE:
        raise ValueError(
            f'jax_ep.EPConfig: overlap="stream" must have jax 0.11.1 or newer on '
            f"{ep.transport}, got {jax.__version__}; leave overlap out or update jax"
        )
    # In a CUDA graph nothing would overlap with it, so this target is not captured.
    target += "_aside"
    whole = struct(operands[0], (1, _ends(results)[-1]), jnp.int32)
    return (ffi.call_aside(target, whole, *operands, **attributes),)


def _results_of(first: First, results: Sequence[Any]) -> list[jax.Array]:
    """Returns the separate results of a first half."""
    if len(first) == len(results):
        return list(first)
    parts = jnp.split(first[0], _ends(results)[:-1], axis=1)
    return [
        part.reshape(result.shape) for part, result in zip(parts, results, strict=True)
    ]


def _ends(results: Sequence[Any]) -> list[int]:
    return list(itertools.accumulate(math.prod(result.shape) for result in results))
