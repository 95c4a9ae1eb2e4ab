"""The grouped matmuls of `_native_cuda` for Hopper, as custom calls.

The N rows form L groups of `sizes`, each of which has its own matrix. Sums are float32.
Rows past the groups may hold anything: they change no other result, and their own
results are uninitialised memory. The functions have no derivative or batching rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._native import ffi, tables

BLOCK = 128  # rows and columns of a matrix of codes that share a scale
ALIGNED = 8  # what A and B must be multiples of for 16-bit rows: 16 bytes
_MOST_PAIRED = 128  # rows of N per group
_TARGETS = frozenset(
    {
        "ep_rows",
        "ep_rows_transposed",
        "ep_gate_up",
        "ep_down_back",
        "ep_outer",
        "ep_code_rows",
        "ep_code_gate_up",
        "ep_code_down_back",
        "ep_experts",
        "ep_code_experts",
        "ep_four_bit_rows",
        "ep_four_bit_gate_up",
        "ep_quantize_matrices",
        "ep_quantize_cotangents",
        "ep_dequantize_rows",
    }
)


class Codes(NamedTuple):
    """e4m3 codes `[N, A]` and float32 scales `[N, A / 128]`."""

    values: jax.Array
    scales: jax.Array


def built() -> bool:
    """Whether an installed CUDA module has these kernels."""
    return ffi.gpu_target_names() >= _TARGETS


def rows(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array, transposed: bool = False
) -> jax.Array:
    """Multiplies `[N, A]` by `[L, A, B]` (`transposed`: `[L, B, A]`) to `[N, B]`."""
    # Untyped: tables.call has a type per target name, and this calls either of two.
    call: Any = tables.call
    target = "ep_rows_transposed" if transposed else "ep_rows"
    operands = {"rows": rows, "matrices": matrices, "group_sizes": sizes}
    return call(target, rows, {}, operands, {}).out


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
    found = tables.call(
        "ep_gate_up",
        rows,
        {},
        {"rows": rows, "matrices": matrices, "group_sizes": sizes},
        {"keep": keep},
    )
    return found.h, found.both


def down_back(
    cotangents: jax.Array, matrices: jax.Array, both: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Computes the backward pass of down and SwiGLU.

    Args:
        cotangents: of down's rows, `[N, A]`.
        matrices: down, `[L, B, A]`.
        both: gate and up, `[N, 2, B]`; the result reuses their memory.
        sizes: int32 `[L]`.

    Returns:
        The cotangents of gate and up, `[N, 2, B]`.
    """
    found = tables.call(
        "ep_down_back",
        cotangents,
        {},
        {
            "cotangents": cotangents,
            "matrices": matrices,
            "both": both,
            "group_sizes": sizes,
        },
        {},
    )
    return found.to_both


def outer(left: jax.Array, right: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`."""
    found = tables.call(
        "ep_outer",
        left,
        {},
        {"left": left, "right": right, "group_sizes": sizes},
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def code_rows(
    rows: Codes,
    matrices: jax.Array,
    scales: jax.Array,
    sizes: jax.Array,
    dtype: Any,
    turned: bool,
) -> jax.Array:
    """Multiplies rows of codes by codes of matrices `[L, B, A]`, to `[N, B]`.

    Args:
        rows: `[N, A]`.
        matrices: codes.
        scales: the scales of the weights, which are not turned: with `turned` codes
            `[L, A / 128, B / 128]`, else `[L, B / 128, A / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.
        turned: whether the codes were turned.
    """
    found = tables.call(
        "ep_code_rows",
        rows.values,
        {},
        {
            "rows": rows.values,
            "row_scales": rows.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "group_sizes": sizes,
        },
        {"turned": turned, "out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def code_gate_up(
    rows: Codes, matrices: jax.Array, scales: jax.Array, sizes: jax.Array, keep: bool
) -> tuple[Codes, jax.Array | None]:
    """`gate_up` of codes; SwiGLU's float32 result is quantised as rows are.

    Args:
        rows: `[N, A]`.
        matrices: turned codes, `[L, 2, B, A]`.
        scales: `[L, A / 128, 2, B / 128]`.
        sizes: int32 `[L]`.
        keep: whether to return gate and up as well.

    Returns:
        h `[N, B]`; gate and up in bfloat16 `[N, 2, B]`, or None.
    """
    found = tables.call(
        "ep_code_gate_up",
        rows.values,
        {},
        {
            "rows": rows.values,
            "row_scales": rows.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "group_sizes": sizes,
        },
        {"keep": keep, "out_dtype": "bfloat16"},
    )
    return Codes(found.h, found.h_scales), found.both


def code_down_back(
    cotangents: Codes,
    matrices: jax.Array,
    scales: jax.Array,
    both: jax.Array,
    sizes: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`down_back` of codes.

    Args:
        cotangents: `[N, A]`.
        matrices: codes of down, not turned, `[L, B, A]`.
        scales: `[L, B / 128, A / 128]`.
        both: bfloat16 `[N, 2, B]`; the last result reuses its memory.
        sizes: int32 `[L]`.

    Returns:
        The cotangents of gate and up: quantised from float32 as cotangents are, codes
        `[N, 2, B]` and scales `[N, 2, B / 128]`; and in bfloat16 `[N, 2, B]`.
    """
    found = tables.call(
        "ep_code_down_back",
        cotangents.values,
        {},
        {
            "cotangents": cotangents.values,
            "cotangent_scales": cotangents.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "both": both,
            "group_sizes": sizes,
        },
        {"out_dtype": "bfloat16"},
    )
    return found.codes, found.code_scales, found.to_both


def is_paired(rows: int, groups: int) -> bool:
    """Whether both products of experts, with N `rows`, should be one call.

    Then the second kernel begins before the first one ends, which shows if both are
    short. But XLA cannot place the result where the rows were, as it does between two
    calls. With few rows that memory is little beside the weights.
    """
    return rows <= _MOST_PAIRED * groups


def experts(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Applies `gate_up` and then `rows`, whose kernel begins before the other ends.

    Args:
        rows: `[N, H]`, bfloat16 or float16.
        gate_up: `[L, H, 2, F]`, of the same dtype.
        down: `[L, F, H]`, likewise.
        sizes: int32 `[L]`.

    Returns:
        `[N, H]`, in the dtype of rows.
    """
    found = tables.call(
        "ep_experts",
        rows,
        {},
        {"rows": rows, "gate_up": gate_up, "down": down, "group_sizes": sizes},
        {},
    )
    return found.out


def code_experts(
    rows: Codes,
    gate_up: jax.Array,
    gate_up_scales: jax.Array,
    down: jax.Array,
    down_scales: jax.Array,
    sizes: jax.Array,
    dtype: Any,
) -> jax.Array:
    """`experts` of codes; SwiGLU's float32 result is quantised as rows are.

    Args:
        rows: `[N, H]`.
        gate_up: turned codes, `[L, 2, F, H]`.
        gate_up_scales: `[L, H / 128, 2, F / 128]`.
        down: turned codes, `[L, H, F]`.
        down_scales: `[L, F / 128, H / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.

    Returns:
        `[N, H]`.
    """
    found = tables.call(
        "ep_code_experts",
        rows.values,
        {},
        {
            "rows": rows.values,
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


def four_bits(
    rows: jax.Array,
    scales: jax.Array | None,
    tiles: jax.Array,
    sizes: jax.Array,
    columns: int,
    dtype: Any,
    gate_up: bool,
) -> jax.Array:
    """Multiplies rows by matrices of four bits, which are read once for few rows.

    Args:
        rows: bfloat16 `[N, A]`.
        scales: None, or float32 `[N, A / 128]` by which rows are multiplied.
        tiles: what `four_bits.tiles` returned.
        sizes: int32 `[L]`.
        columns: B.
        dtype: of the result, bfloat16 or float32.
        gate_up: whether the tiles hold gate and up, and SwiGLU is applied.

    Returns:
        `[N, B]`, rounded once from the float32 sums.
    """
    # Untyped: tables.call has a type per target name, and this calls either of two.
    call: Any = tables.call
    found = call(
        "ep_four_bit_gate_up" if gate_up else "ep_four_bit_rows",
        rows,
        # X is needed even without scales: [0, X] then stands for them.
        {"B": columns, "X": rows.shape[1] // BLOCK},
        {"rows": rows, "row_scales": scales, "tiles": tiles, "group_sizes": sizes},
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out


def quantize_matrices(
    matrices: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises `[L, A, Z, B]` per 128 x 128 of A and B.

    Returns:
        Codes in the same order; scales `[L, A / 128, Z, B / 128]`; the codes turned,
        `[L, Z, B, A]`.
    """
    found = tables.call(
        "ep_quantize_matrices",
        matrices,
        {"X": matrices.shape[1] // BLOCK, "Y": matrices.shape[3] // BLOCK},
        {"matrices": matrices},
        {"turned": True},
    )
    assert found.turned is not None
    return found.codes, found.scales, found.turned


def quantize_cotangents(values: jax.Array, sizes: jax.Array) -> Codes:
    """Quantises `[N, A]` per 128 of A, with a scale of max(amax, 2^-80) / 448."""
    found = tables.call(
        "ep_quantize_cotangents",
        values,
        {"X": values.shape[1] // BLOCK},
        {"values": values, "group_sizes": sizes},
        {},
    )
    return Codes(found.codes, found.scales)


def dequantize(rows: Codes, sizes: jax.Array, dtype: Any) -> jax.Array:
    """Returns what `[N, A]` codes stand for, rounded once to `dtype`."""
    found = tables.call(
        "ep_dequantize_rows",
        rows.values,
        {},
        {"codes": rows.values, "scales": rows.scales, "group_sizes": sizes},
        {"out_dtype": jnp.dtype(dtype).name},
    )
    return found.out
