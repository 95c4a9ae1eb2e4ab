"""Runs quantised calls and compares them with NumPy's results."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle, quantizer

QUANTIZED = tuple(quantizer.BLOCKS)
TILED = ("tiled_128x4", quantizer.TILED)
each_format = pytest.mark.parametrize("name", QUANTIZED)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"dispatch_format": name, "hidden_size": 256} | changes


def run(
    ep: Any,
    mesh: Any,
    inputs: helpers.Inputs,
    g: float | None = None,
    coded: bool = False,
    halves: bool = False,
) -> Any:
    """A dispatch and its dequantised rows, as global arrays.

    With `coded`, NumPy quantises the tokens instead of the dispatch.
    """

    def body(tokens: Any, scales: Any, ids: Any, weights: Any) -> Any:
        options = {"input_scale": None if g is None else jnp.float32(g)}
        options["token_scales"] = scales
        if halves:
            pending = jax_ep.dispatch_async(ep, tokens, ids, weights, **options)
            d = jax_ep.dispatch_wait(pending)
        else:
            d = jax_ep.dispatch(ep, tokens, ids, weights, **options)
        return d, jax_ep.dequantize(d)

    spec = P("ep")
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    tokens, scales = codes_of(ep.config, inputs, g) if coded else (inputs.tokens, None)
    operands = (tokens, scales, inputs.ids, inputs.weights)
    return mapped(*(helpers.put(mesh, part) for part in operands))


def codes_of(
    config: Any, inputs: helpers.Inputs, g: float | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """NumPy's codes and scales of the tokens of each rank."""
    name = config.dispatch_format
    coded = [quantizer.quantize(tokens, name, g or 1.0) for tokens in inputs.tokens]
    return [codes for codes, _ in coded], [scales for _, scales in coded]


def expect(config: Any, inputs: helpers.Inputs, g: float) -> list[oracle.RankOutput]:
    """The oracle's dispatch of NumPy's codes; the added field `scales` has scales."""
    parts = []
    for rows in codes_of(config, inputs, g):
        unsigned = f"uint{8 * rows[0].dtype.itemsize}"
        width = {"hidden_size": rows[0].shape[1]}
        shape = types.SimpleNamespace(**dataclasses.asdict(config) | width)
        out = oracle.dispatch(
            shape, [row.view(unsigned) for row in rows], inputs.ids, inputs.weights
        )
        for rank in out:
            rank.tokens = rank.tokens.view(rows[0].dtype)
        parts.append(out)
    for rank, scales in zip(*parts, strict=True):
        rank.scales = scales.tokens
    return parts[0]


def check(
    mesh: Any, ep: Any, inputs: helpers.Inputs, g: float | None = None, **how: bool
) -> list[oracle.RankOutput]:
    """Checks every output of a dispatch, run with `how`; returns the expected ones."""
    config, ranks = ep.config, ep.ep_size
    name = config.dispatch_format
    wanted = expect(config, inputs, g or 1.0)
    d, values = run(ep, mesh, inputs, g, **how)
    names = (*oracle.FIELDS, "scales")
    fields = {field: helpers.unstack(getattr(d, field), ranks) for field in names}
    values = helpers.unstack(values, ranks)
    ports = helpers.unstack(d.grad_port, ranks)
    tiled = config.scale_layout == "tiled_128x4"
    columns = config.scale_layout == "columns"
    assert (d.scales_offsets is not None) == tiled
    assert (d.input_scale is not None) == (name == "nvfp4")
    offsets = helpers.unstack(d.scales_offsets, ranks) if tiled else {}
    for rank in fields["tokens"]:
        out = wanted[rank]
        end = None if config.zero_tail else out.row_offsets[-1]
        scales = out.scales
        if tiled:
            groups = len(out.group_sizes)
            scales, wanted_offsets = quantizer.tiled(scales, out.row_offsets, groups)
            helpers.assert_bits(offsets[rank], wanted_offsets, "scales_offsets")
        for field in names:
            got, want = fields[field][rank], getattr(out, field)
            if field == "scales" and columns:
                unspecified = slice(end, None if end is None else len(out.tokens))
                got, want = got.copy(), quantizer.in_columns(scales)
                if end is not None:
                    got[:, unspecified] = want[:, unspecified] = 0
            elif field == "scales":
                cut = None if tiled else end
                got, want = got[:cut], scales[:cut]
            elif field in oracle.ROW_FIELDS:
                got, want = got[:end], want[:end]
            helpers.assert_bits(got, want, f"{field} of rank {rank}")
        with np.errstate(over="ignore"):
            back = quantizer.dequantize(out.tokens, out.scales, name, g or 1.0)
            back = back.astype(oracle.DTYPES[config.dtype])
        helpers.assert_bits(values[rank][:end], back[:end], f"values of rank {rank}")
        assert ports[rank].dtype == oracle.DTYPES[config.dtype]
        assert ports[rank].shape == (len(out.tokens), config.hidden_size)
        assert not ports[rank].astype(np.float32).any()
    return wanted
