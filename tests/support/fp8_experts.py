"""fp8 experts in NumPy, written from the contract's section 9; knows nothing of jax_ep.

Operands are dequantised and multiplied in float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

import jax_ep
from support import quantizer
from support.quantizer import E4M3, F32, NAN_BITS

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOOR = 2.0**-80


def block_codes(blocks: np.ndarray, axes: tuple[int, ...], floor: float):
    """e4m3 codes of float32 blocks, and scales over `axes`, which keep size 1."""
    bad = ~np.isfinite(blocks).all(axis=axes, keepdims=True)
    blocks = np.where(bad, 0, blocks).astype(F32)
    amax = np.abs(blocks).max(axis=axes, keepdims=True)
    scales = np.maximum(amax, F32(floor)) / F32(448)
    codes = quantizer.codes_of(blocks / scales, E4M3, 448)
    codes[np.broadcast_to(bad, codes.shape)] = 0x7F
    scales.view(np.uint32)[bad] = NAN_BITS
    return codes.view(E4M3), scales


def matrix_codes(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of one matrix [A, B], and scales [A / 128, B / 128]."""
    rows, columns = matrix.shape
    blocks = matrix.astype(F32).reshape(rows // 128, 128, columns // 128, 128)
    codes, scales = block_codes(blocks, (1, 3), 1e-4)
    return codes.reshape(matrix.shape), scales[:, 0, :, 0]


def matrix_values(matrix: np.ndarray, name: str) -> np.ndarray:
    """One matrix [A, B], quantised and dequantised."""
    if name == "mxfp4":  # along the contracted dimension, A
        made = quantizer.quantize(np.ascontiguousarray(matrix.T), name)
        return quantizer.dequantize(*made, name).T.astype(np.float64)
    codes, scales = matrix_codes(matrix)
    wide = scales.astype(np.float64).repeat(128, 0).repeat(128, 1)
    return codes.astype(np.float64) * wide


def cotangent_values(values: np.ndarray) -> np.ndarray:
    """Cotangents, quantised per 128 of the last dimension and dequantised."""
    blocks = values.astype(F32).reshape(len(values), -1, 128)
    codes, scales = block_codes(blocks, (2,), FLOOR)
    return (codes.astype(np.float64) * scales).reshape(values.shape)


def row_values(values: np.ndarray, name: str) -> np.ndarray:
    """Rows, quantised in a format and dequantised, in float64."""
    made = quantizer.quantize(values.astype(F32), name)
    return quantizer.dequantize(*made, name).astype(np.float64)


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(BF16).astype(np.float64)


@dataclasses.dataclass
class Activation:
    """A function of gate and up, and its derivatives, for any arrays."""

    of: Any
    to_gate: Any
    to_up: Any


def sigmoid(x: Any) -> Any:
    """Does not overflow, however large x is."""
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


SWIGLU = Activation(
    of=lambda g, u: g * sigmoid(g) * u,
    to_gate=lambda g, u: u * sigmoid(g) * (1 + g * (1 - sigmoid(g))),
    to_up=lambda g, u: g * sigmoid(g),
)


@dataclasses.dataclass
class Result:
    """Results for all rows of groups, and gradients for the cotangent `dy`."""

    y: np.ndarray
    h: np.ndarray
    rows: np.ndarray | None = None
    gate_up: np.ndarray | None = None
    down: np.ndarray | None = None
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None


def block_values(rows: np.ndarray) -> np.ndarray:
    """A group's rows as e4m3 with a power of two per 128 rows and 128 columns."""
    found = np.empty(rows.shape)
    for row in range(0, len(rows), 128):
        for column in range(0, rows.shape[1], 128):
            at = slice(row, row + 128), slice(column, column + 128)
            mantissa, power = np.frexp(np.abs(rows[at]).max() / 448)
            scale = np.ldexp(1.0, power - int(mantissa == 0.5))
            found[at] = (rows[at] / scale).astype(E4M3).astype(np.float64) * scale
    return found


def experts(
    rows: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    sizes: Any,
    *,
    row_format: str | None = "fp8_block128",
    weight_format: str = "fp8_block128",
    dy: np.ndarray | None = None,
    biases: Any = (None, None, None),
    activation: Activation = SWIGLU,
    wgrad: str = "bf16",
) -> Result:
    """All steps by group; row_format None keeps rows unquantised and h in bfloat16.

    Cotangents meet weights in "mxfp4" in bfloat16.
    """
    factor = bf16 if wgrad == "bf16" else block_values
    cotangents = bf16 if weight_format == "mxfp4" else cotangent_values
    count, (groups, hidden, _, inner) = sum(sizes), gate_up.shape
    out = Result(np.zeros((count, hidden)), np.zeros((count, inner)))
    if dy is not None:
        out.rows = np.zeros((count, hidden))
        out.gate_up = np.zeros(gate_up.shape)
        out.down = np.zeros(down.shape)
        out.gate_bias = np.zeros((groups, inner))
        out.up_bias = np.zeros((groups, inner))
        out.down_bias = np.zeros((groups, hidden))
    x = rows[:count]
    x = row_values(x, row_format) if row_format else x.astype(np.float64)
    start = 0
    for g, size in enumerate(sizes):
        at = slice(start, start + size)
        start += size
        if not size:
            continue
        left = matrix_values(gate_up[g, :, 0], weight_format)
        right = matrix_values(gate_up[g, :, 1], weight_format)
        last = matrix_values(down[g], weight_format)
        b_gate, b_up, b_down = (0 if b is None else b[g] for b in biases)
        gate, up = x[at] @ left + b_gate, x[at] @ right + b_up
        out.h[at] = activation.of(gate, up)
        h = row_values(out.h[at], "fp8_block128") if row_format else bf16(out.h[at])
        out.y[at] = h @ last + b_down
        if dy is None:
            continue
        dh = cotangents(dy[at]) @ last.T
        gate, up = bf16(gate), bf16(up)
        to_gate = dh * activation.to_gate(gate, up)
        to_up = dh * activation.to_up(gate, up)
        out.rows[at] = cotangents(to_gate) @ left.T + cotangents(to_up) @ right.T
        out.gate_up[g, :, 0] = factor(x[at]).T @ factor(bf16(to_gate))
        out.gate_up[g, :, 1] = factor(x[at]).T @ factor(bf16(to_up))
        out.down[g] = factor(h).T @ factor(bf16(dy[at]))
        out.gate_bias[g], out.up_bias[g] = to_gate.sum(0), to_up.sum(0)
        out.down_bias[g] = dy[at].sum(0)
    return out


def distance(got: Any, want: Any) -> float:
    """The norm of the difference, divided by that of `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all()
    assert np.any(want)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def cosine(got: Any, want: Any) -> float:
    got, want = (np.asarray(each, np.float64).ravel() for each in (got, want))
    return float(got @ want / np.linalg.norm(got) / np.linalg.norm(want))


def operands(sizes: Any, hidden: int, inner: int, count: int, seed: int = 0):
    """Rows [count, H] whose tail is NaN, gate_up, down; float32."""
    rng = np.random.default_rng(seed)
    groups = len(sizes)
    rows = rng.standard_normal((count, hidden)).astype(F32)
    gate_up = rng.standard_normal((groups, hidden, 2, inner)) / hidden**0.5
    down = rng.standard_normal((groups, inner, hidden)) / inner**0.5
    rows[sum(sizes) :] = np.nan
    return rows, gate_up.astype(F32), down.astype(F32)


def dispatched(rows: Any, sizes: Any, name: str = "bf16", dtype: str = "float32"):
    """A Dispatched of these rows, as if they had been dispatched; without a route.

    Rows of a quantised format are encoded in NumPy.
    """
    sizes = np.asarray(sizes, np.int32)
    count, groups = len(rows), len(sizes)
    scales = port = None
    if name != "bf16":
        port = np.zeros(np.shape(rows), dtype)
        rows, scales = quantizer.quantize(rows, name)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    # Experts read neither the route nor the weights, so None can stand for any type.
    none: Any = None
    return jax_ep.Dispatched(
        tokens=rows if scales is not None else np.asarray(rows).astype(dtype),
        scales=scales,
        row_offsets=offsets,
        group_sizes=sizes,
        expert_counts=sizes,
        expert_ids=np.arange(groups, dtype=np.int32),
        src_info=np.zeros((count, 3), np.int32),
        router_weights=np.ones(count, F32),
        num_dropped=np.zeros(1, np.int32),
        num_invalid=np.zeros(1, np.int32),
        route=none,
        grad_port=port,
        format=name,
        rows_dtype=dtype,
    )
