"""The grouped matmuls of `_native_cuda`, for Hopper and portable, as custom calls.

The N rows form L groups of `sizes`, each of which has its own matrix. Sums are float32.
Rows past the groups may hold anything: they change no other result, and their own
results are uninitialised memory. The functions have no derivative or batching rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._native import ffi, tables

BLOCK = 128  # rows and columns of a matrix in fp8 that share a scale
ALIGNED = 8  # what A and B must be multiples of for 16-bit rows: 16 bytes
_MOST_PAIRED = 128  # rows of N per group
_TARGETS = frozenset(
    {
        "ep_fprop",
        "ep_dgrad",
        "ep_gate_up",
        "ep_down_dgrad",
        "ep_wgrad",
        "ep_fp8_fprop",
        "ep_fp8_dgrad",
        "ep_fp8_gate_up",
        "ep_fp8_down_dgrad",
        "ep_portable_fprop",
        "ep_portable_dgrad",
        "ep_portable_gate_up",
        "ep_portable_down_dgrad",
        "ep_portable_wgrad",
        "ep_experts",
        "ep_fp8_experts",
        "ep_mxfp4_fprop",
        "ep_mxfp4_gate_up",
        "ep_quantize_matrices",
        "ep_quantize_cotangents",
        "ep_dequantize_rows",
    }
)


class Fp8Rows(NamedTuple):
    """e4m3 codes `[N, A]` and float32 scales `[N, A / 128]`."""

    codes: jax.Array
    scales: jax.Array


def _call(
    target: str, operands: Mapping[str, jax.Array | None], attributes: Mapping[str, Any]
) -> Any:
    """Calls a target whose results are like its first operand."""
    like: Any = next(iter(operands.values()))
    return tables.call(target, like, {}, operands, attributes)


def built() -> bool:
    """Whether an installed CUDA module has these kernels."""
    return ffi.gpu_target_names() >= _TARGETS


def fprop(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`."""
    found = _call(
        "ep_fprop",
        {"rows": rows, "matrices": matrices, "group_sizes": sizes},
        {},
    )
    return found.out


def dgrad(cotangents: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies `[N, A]` by the transposed `[L, B, A]` to `[N, B]`."""
    found = _call(
        "ep_dgrad",
        {"cotangents": cotangents, "matrices": matrices, "group_sizes": sizes},
        {},
    )
    return found.out


def gate_up(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, keep: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Multiplies `[N, A]` by `[L, A, 2, B]`, gate first, and applies SwiGLU.

    Args:
        rows: bfloat16 or float16.
        matrices: of the same dtype.
        sizes: int32 `[L]`.
        keep: whether to return gate and up as well.

    Returns:
        `silu(gate) * up`, `[N, B]`, and gate and up `[N, 2, B]` or None, in the dtype
        of rows, each rounded once from the float32 sums.
    """
    found = _call(
        "ep_gate_up",
        {"rows": rows, "matrices": matrices, "group_sizes": sizes},
        {"keep": keep},
    )
    return found.h, found.gate_up_rows


def down_dgrad(
    cotangents: jax.Array,
    matrices: jax.Array,
    gate_up_rows: jax.Array,
    sizes: jax.Array,
) -> jax.Array:
    """Computes the backward pass of down and SwiGLU.

    Args:
        cotangents: of down's rows, `[N, A]`.
        matrices: down, `[L, B, A]`.
        gate_up_rows: gate and up, `[N, 2, B]`; the result reuses their memory.
        sizes: int32 `[L]`.

    Returns:
        The cotangents of gate and up, `[N, 2, B]`.
    """
    found = _call(
        "ep_down_dgrad",
        {
            "cotangents": cotangents,
            "matrices": matrices,
            "gate_up_rows": gate_up_rows,
            "group_sizes": sizes,
        },
        {},
    )
    return found.to_gate_up_rows


def wgrad(
    rows: jax.Array, cotangents: jax.Array, sizes: jax.Array, dtype: Any
) -> jax.Array:
    """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`."""
    found = _call(
        "ep_wgrad",
        {"rows": rows, "cotangents": cotangents, "group_sizes": sizes},
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def portable_fprop(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, exact: bool, dtype: Any
) -> jax.Array:
    """`fprop` on GPUs of compute capability 8.0 and newer.

    Args:
        rows: bfloat16, float16 or float32.
        matrices: of the same dtype.
        sizes: int32 `[L]`.
        exact: whether float32 is multiplied as such, not rounded to TF32.
        dtype: of the result: that of the rows, or float32.
    """
    found = _call(
        "ep_portable_fprop",
        {"rows": rows, "matrices": matrices, "group_sizes": sizes},
        {"exact": exact, "out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def portable_dgrad(
    cotangents: jax.Array,
    matrices: jax.Array,
    sizes: jax.Array,
    exact: bool,
    dtype: Any,
) -> jax.Array:
    """`dgrad`, with arguments as of `portable_fprop`."""
    found = _call(
        "ep_portable_dgrad",
        {"cotangents": cotangents, "matrices": matrices, "group_sizes": sizes},
        {"exact": exact, "out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def portable_gate_up(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, keep: bool, exact: bool
) -> tuple[jax.Array, jax.Array | None]:
    """`gate_up`, with `exact` as of `portable_fprop`."""
    found = _call(
        "ep_portable_gate_up",
        {"rows": rows, "matrices": matrices, "group_sizes": sizes},
        {"exact": exact, "keep": keep},
    )
    return found.h, found.gate_up_rows


def portable_down_dgrad(
    cotangents: jax.Array,
    matrices: jax.Array,
    gate_up_rows: jax.Array,
    sizes: jax.Array,
    exact: bool,
) -> jax.Array:
    """`down_dgrad`, with `exact` as of `portable_fprop`."""
    found = _call(
        "ep_portable_down_dgrad",
        {
            "cotangents": cotangents,
            "matrices": matrices,
            "gate_up_rows": gate_up_rows,
            "group_sizes": sizes,
        },
        {"exact": exact},
    )
    return found.to_gate_up_rows


def portable_wgrad(
    rows: jax.Array, cotangents: jax.Array, sizes: jax.Array, exact: bool, dtype: Any
) -> jax.Array:
    """`wgrad`, with `exact` and `dtype` as of `portable_fprop`."""
    found = _call(
        "ep_portable_wgrad",
        {"rows": rows, "cotangents": cotangents, "group_sizes": sizes},
        {"exact": exact, "out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def fp8_fprop(
    rows: Fp8Rows, matrices: jax.Array, scales: jax.Array, sizes: jax.Array, dtype: Any
) -> jax.Array:
    """`fprop` in fp8.

    Args:
        rows: `[N, A]`.
        matrices: transposed codes, `[L, B, A]`.
        scales: `[L, A / 128, B / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.

    Returns:
        `[N, B]`.
    """
    found = _call(
        "ep_fp8_fprop",
        {
            "rows": rows.codes,
            "row_scales": rows.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "group_sizes": sizes,
        },
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def fp8_dgrad(
    cotangents: Fp8Rows,
    matrices: jax.Array,
    scales: jax.Array,
    sizes: jax.Array,
    dtype: Any,
) -> jax.Array:
    """`dgrad` in fp8.

    Args:
        cotangents: `[N, A]`.
        matrices: codes, `[L, B, A]`.
        scales: `[L, B / 128, A / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.

    Returns:
        `[N, B]`.
    """
    found = _call(
        "ep_fp8_dgrad",
        {
            "cotangents": cotangents.codes,
            "cotangent_scales": cotangents.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "group_sizes": sizes,
        },
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def fp8_gate_up(
    rows: Fp8Rows, matrices: jax.Array, scales: jax.Array, sizes: jax.Array, keep: bool
) -> tuple[Fp8Rows, jax.Array | None]:
    """`gate_up` in fp8; SwiGLU's float32 result is quantised as rows are.

    Args:
        rows: `[N, A]`.
        matrices: transposed codes, `[L, 2, B, A]`.
        scales: `[L, A / 128, 2, B / 128]`.
        sizes: int32 `[L]`.
        keep: whether to return gate and up as well.

    Returns:
        h `[N, B]`; gate and up in bfloat16 `[N, 2, B]`, or None.
    """
    found = _call(
        "ep_fp8_gate_up",
        {
            "rows": rows.codes,
            "row_scales": rows.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "group_sizes": sizes,
        },
        {"keep": keep, "out_dtype": "bfloat16"},
    )
    return Fp8Rows(found.h, found.h_scales), found.gate_up_rows


def fp8_down_dgrad(
    cotangents: Fp8Rows,
    matrices: jax.Array,
    scales: jax.Array,
    gate_up_rows: jax.Array,
    sizes: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`down_dgrad` in fp8.

    Args:
        cotangents: `[N, A]`.
        matrices: codes of down, `[L, B, A]`.
        scales: `[L, B / 128, A / 128]`.
        gate_up_rows: bfloat16 `[N, 2, B]`; the last result reuses its memory.
        sizes: int32 `[L]`.

    Returns:
        The cotangents of gate and up: quantised from float32 as cotangents are, codes
        `[N, 2, B]` and scales `[N, 2, B / 128]`; and in bfloat16 `[N, 2, B]`.
    """
    found = _call(
        "ep_fp8_down_dgrad",
        {
            "cotangents": cotangents.codes,
            "cotangent_scales": cotangents.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "gate_up_rows": gate_up_rows,
            "group_sizes": sizes,
        },
        {"out_dtype": "bfloat16"},
    )
    return found.codes, found.scales, found.to_gate_up_rows


def is_paired(rows: int, groups: int) -> bool:
    """Whether both matmuls of experts, with N `rows`, should be one call.

    Then the second kernel begins before the first one ends, which shows if both are
    short. But XLA cannot place the result where the rows were, as it does between two
    calls. With few rows that memory is little beside the weights.
    """
    return rows <= _MOST_PAIRED * groups


def experts(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Applies `gate_up` and then `fprop`, whose kernel begins before the other ends.

    Args:
        rows: `[N, H]`, bfloat16 or float16.
        gate_up: `[L, H, 2, F]`, of the same dtype.
        down: `[L, F, H]`, likewise.
        sizes: int32 `[L]`.

    Returns:
        `[N, H]`, in the dtype of rows.
    """
    found = _call(
        "ep_experts",
        {"rows": rows, "gate_up": gate_up, "down": down, "group_sizes": sizes},
        {},
    )
    return found.out


def fp8_experts(
    rows: Fp8Rows,
    gate_up: jax.Array,
    gate_up_scales: jax.Array,
    down: jax.Array,
    down_scales: jax.Array,
    sizes: jax.Array,
    dtype: Any,
) -> jax.Array:
    """`experts` in fp8; SwiGLU's float32 result is quantised as rows are.

    Args:
        rows: `[N, H]`.
        gate_up: transposed codes, `[L, 2, F, H]`.
        gate_up_scales: `[L, H / 128, 2, F / 128]`.
        down: transposed codes, `[L, H, F]`.
        down_scales: `[L, F / 128, H / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.

    Returns:
        `[N, H]`.
    """
    found = _call(
        "ep_fp8_experts",
        {
            "rows": rows.codes,
            "row_scales": rows.scales,
            "gate_up": gate_up,
            "gate_up_scales": gate_up_scales,
            "down": down,
            "down_scales": down_scales,
            "group_sizes": sizes,
        },
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def mxfp4_fprop(
    rows: jax.Array,
    scales: jax.Array | None,
    tiles: jax.Array,
    sizes: jax.Array,
    columns: int,
    dtype: Any,
) -> jax.Array:
    """`fprop` by matrices in mxfp4, which are read once for few rows.

    Args:
        rows: bfloat16 `[N, A]`.
        scales: None, or float32 `[N, A / 128]` by which rows are multiplied.
        tiles: what `mxfp4.tiles` returned.
        sizes: int32 `[L]`.
        columns: B.
        dtype: of the result, bfloat16 or float32.

    Returns:
        `[N, B]`, rounded once from the float32 sums.
    """
    dims, operands, attributes = _mxfp4(rows, scales, tiles, sizes, columns, dtype)
    return tables.call("ep_mxfp4_fprop", rows, dims, operands, attributes).out


def mxfp4_gate_up(
    rows: jax.Array,
    scales: jax.Array | None,
    tiles: jax.Array,
    sizes: jax.Array,
    columns: int,
    dtype: Any,
) -> jax.Array:
    """`mxfp4_fprop` with tiles that hold gate and up, followed by SwiGLU."""
    dims, operands, attributes = _mxfp4(rows, scales, tiles, sizes, columns, dtype)
    return tables.call("ep_mxfp4_gate_up", rows, dims, operands, attributes).out


def _mxfp4(
    rows: jax.Array,
    scales: jax.Array | None,
    tiles: jax.Array,
    sizes: jax.Array,
    columns: int,
    dtype: Any,
) -> Any:
    return (
        # X is needed even without scales: [0, X] then stands for them.
        {"B": columns, "X": rows.shape[1] // BLOCK},
        {"rows": rows, "row_scales": scales, "tiles": tiles, "group_sizes": sizes},
        {"out_dtype": jnp.dtype(dtype).name},
    )


def quantize_matrices(
    matrices: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises `[L, A, Z, B]` per 128 x 128 of A and B.

    Returns:
        Codes in the same order; scales `[L, A / 128, Z, B / 128]`; the transposed
        codes, `[L, Z, B, A]`.
    """
    found = tables.call(
        "ep_quantize_matrices",
        matrices,
        {"X": matrices.shape[1] // BLOCK, "Y": matrices.shape[3] // BLOCK},
        {"matrices": matrices},
        {"transposed": True},
    )
    assert found.transposed is not None
    return found.codes, found.scales, found.transposed


def quantize_cotangents(values: jax.Array, sizes: jax.Array) -> Fp8Rows:
    """Quantises `[N, A]` per 128 of A, with a scale of max(amax, 2^-80) / 448."""
    found = tables.call(
        "ep_quantize_cotangents",
        values,
        {"X": values.shape[1] // BLOCK},
        {"values": values, "group_sizes": sizes},
        {},
    )
    return Fp8Rows(found.codes, found.scales)


def dequantize(rows: Fp8Rows, sizes: jax.Array, dtype: Any) -> jax.Array:
    """Returns what rows `[N, A]` stand for, rounded once to `dtype`."""
    found = _call(
        "ep_dequantize_rows",
        {"codes": rows.codes, "scales": rows.scales, "group_sizes": sizes},
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out
