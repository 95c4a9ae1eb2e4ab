"""Applies a layer's experts to the rows that arrived at a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import experts as _experts
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched, ExpertsFunction
from jax_ep._experts import interface, quantized
from jax_ep._experts.interface import Experts
from jax_ep._experts.kernels import GateUp
from jax_ep._layers import moe_checks
from jax_ep._ops.dequantize import dequantize, scales_by_row


class _Weights(NamedTuple):
    """The weights of some experts; `codes` are of the matrices, or in their place."""

    gate_up: GateUp | None
    down: jax.Array | None
    codes: quantized.QuantizedWeights | None
    biases: dict[str, jax.Array]


def implementation(given: ExpertsFunction | None, holds_codes: bool) -> Experts:
    """Returns a layer's experts, or the default ones.

    Args:
        given: `experts=` of the layer.
        holds_codes: whether the layer has codes of weights.
    """
    if given is None:
        given = _experts.fp8 if holds_codes else _experts.auto
    return interface.of(given)


def apply(
    ep: EPHandle,
    d: Dispatched,
    params: Mapping[str, Any],
    count: int,
    tp_axis: str | None,
    experts: Experts,
    activation: _experts.Activation | None,
) -> jax.Array:
    """Applies the experts, and a fused shared one; returns `[N, H]`.

    Args:
        ep: the handle of the layer.
        d: the rows.
        params: the parameters of `jax_ep.moe_ffn`.
        count: n, the tokens of this rank.
        tp_axis: as in `jax_ep.moe_ffn`.
        experts: of the layer.
        activation: as in `jax_ep.moe_ffn`.
    """
    run = experts.on(ep.mesh.local_devices[0])
    takes_dispatched = experts.takes_dispatched
    given: Any = d if takes_dispatched else dequantize(d)
    routed = _routed(params, tp_axis)
    # Rows or a Dispatched, the sizes of its groups, and their weights.
    parts: list[tuple[Any, jax.Array, _Weights]]
    if not ep.config.fused_shared_expert:
        parts = [(given, d.group_sizes, routed)]
    elif experts.splits_by_group:
        # In one call, the weights of all experts would have to be copied.
        both = _shared(params, routed), routed
        split = _split(d, count, ep.config.expert_alignment)
        parts = [
            (
                _part(d, rows, groups) if takes_dispatched else given[rows],
                d.group_sizes[groups],
                own,
            )
            for (rows, groups), own in zip(split, both, strict=True)
            if rows.start < rows.stop
        ]
    else:
        dtype = None if takes_dispatched else d.rows_dtype
        weights = _in_front(_shared(params, routed), routed, dtype)
        parts = [(given, d.group_sizes, weights)]
    outs = []
    for part, sizes, weights in parts:
        gate_up, down, options = _arguments(weights, activation)
        moe_checks.require_keywords(experts, options)
        rest = () if takes_dispatched else (sizes,)
        out = run(part, gate_up, down, *rest, **options)
        rows = (part.tokens if takes_dispatched else part).shape[0]
        moe_checks.require_rows(out, (rows, ep.config.hidden_size), experts)
        outs.append(out)
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs)


def _routed(params: Mapping[str, Any], tp_axis: str | None) -> _Weights:
    """Returns the weights of this rank's routed experts."""
    names = ("gate_bias", "up_bias", "down_bias")
    biases = {name: params[name] for name in names if name in params}
    if tp_axis and "down_bias" in biases:
        # On one rank only, because the results are summed over tp_axis.
        first = jax.lax.axis_index(tp_axis) == 0
        biases["down_bias"] = jnp.where(first, biases["down_bias"], 0)
    gate_up, down = params.get("gate_up"), params.get("down")
    return _Weights(gate_up, down, params.get("experts"), biases)


def _shared(params: Mapping[str, Any], routed: _Weights) -> _Weights:
    """Returns the weights of a fused shared expert, in the form of the routed ones."""
    gate_up, down = (params[f"shared_{name}"][None] for name in ("gate_up", "down"))
    zeros = {name: jnp.zeros_like(bias[:1]) for name, bias in routed.biases.items()}
    if routed.codes is None:
        return _Weights(gate_up, down, None, zeros)
    codes = _experts.quantize_weights(gate_up, down, format=routed.codes.format)
    # Its weights may be trained where codes alone stand for those of the others.
    return _Weights(gate_up, down, codes, zeros)


def _arguments(
    weights: _Weights, activation: _experts.Activation | None
) -> tuple[Any, jax.Array | None, dict[str, Any]]:
    """Returns gate_up, down and keywords, as an experts function takes them."""
    options: dict[str, Any] = dict(weights.biases)
    if activation is not None:
        options["activation"] = activation
    if weights.gate_up is None:
        return weights.codes, None, options
    if weights.codes is not None:
        options["quantized"] = weights.codes
    return weights.gate_up, weights.down, options


def _in_front(shared: _Weights, routed: _Weights, dtype: Any) -> _Weights:
    """Puts a shared expert's weights in front of the routed ones, as group 0.

    Args:
        shared: of one expert.
        routed: of the others.
        dtype: of the result's matrices and biases; None leaves them unrounded.
    """

    def join(first: jax.Array, rest: jax.Array) -> jax.Array:
        wanted = jnp.result_type(first, rest) if dtype is None else dtype
        return jnp.concatenate([first.astype(wanted), rest.astype(wanted)])

    if routed.gate_up is None:
        shared = shared._replace(gate_up=None, down=None)
    plain = shared._replace(codes=None), routed._replace(codes=None)
    both: _Weights = jax.tree.map(join, *plain)
    if shared.codes is None or routed.codes is None:
        return both
    return both._replace(codes=quantized.concatenate(shared.codes, routed.codes))


def _split(
    d: Dispatched, count: int, alignment: int
) -> tuple[tuple[slice, slice], ...]:
    """Returns the rows and groups of a fused shared expert, and those of the others.

    Group 0 has a row for each of the `count` tokens, masked or not, and rows that pad
    it. With less room than that, it has all rows.
    """
    most = d.tokens.shape[0]
    end = min(most, -(-count // alignment) * alignment)
    groups = d.group_sizes.shape[0]
    return (slice(0, end), slice(0, 1)), (slice(end, most), slice(1, groups))


def _part(d: Dispatched, rows: slice, groups: slice) -> Dispatched:
    """Returns some groups of a dispatch, which lie in `rows`, with scales by row."""
    offsets = d.row_offsets[groups.start : groups.stop + 1]
    return dataclasses.replace(
        d,
        tokens=d.tokens[rows],
        scales=None if d.scales is None else scales_by_row(d)[rows],
        row_offsets=offsets - offsets[0],
        group_sizes=d.group_sizes[groups],
        expert_counts=d.expert_counts[groups],
        expert_ids=d.expert_ids[groups],
        src_info=d.src_info[rows],
        router_weights=d.router_weights[rows],
        grad_port=None if d.grad_port is None else d.grad_port[rows],
        scales_offsets=None,
        scale_layout="rows",
    )
