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
        "ep_fp8_wgrad",
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
        "ep_fp8_of_mxfp4",
        "ep_quantize_cotangents",
        "ep_dequantize_rows",
        "ep_transpose_rows",
        "ep_transpose_codes",
    }
)


class Fp8Rows(NamedTuple):
    """e4m3 codes `[N, A]` and float32 scales `[N, A / 128]`."""

    codes: jax.Array
    scales: jax.Array


class TransposedRows(NamedTuple):
    """Rows `[N, A]` as `fp8_wgrad` takes them.

    Each group begins at a multiple of 128, and zeros follow its last row.

    Attributes:
        codes: e4m3 `[A, P]`.
        scales: float32 `[P / 128, A / 128]`, powers of two.
        padded_sizes: int32 `[L]`, multiples of 128.
    """

    codes: jax.Array
    scales: jax.Array
    padded_sizes: jax.Array


def _call(
    target: str, operands: Mapping[str, jax.Array | None], attributes: Mapping[str, Any]
) -> Any:
    """Calls a target whose results are like its first operand."""
    like: Any = next(iter(operands.values()))
    return tables.call(target, like, {}, operands, attributes)


def built() -> bool:
    """Whether an installed CUDA module has these kernels."""
    return ffi.gpu_target_names() >= _TARGETS


class Activation(NamedTuple):
    """What kernels do with gate and up; the fields are attributes of their calls.

    Attributes:
        activation: "swiglu", "swiglu_clamped", "geglu" or "relu_squared".
        alpha: of "swiglu_clamped".
        limit: of "swiglu_clamped".
    """

    activation: str = "swiglu"
    alpha: float = 1.0
    limit: float = 0.0


SWIGLU = Activation()

# gate_up `[L, H, 2, F]`, or gate and up `[L, H, F]` each, which are not copied.
GateUp = jax.Array | tuple[jax.Array, jax.Array]


def _sides(gate_up: GateUp) -> tuple[jax.Array, jax.Array | None]:
    """Returns the matrices that come first, and those of up if they are apart."""
    if isinstance(gate_up, tuple):
        return jnp.expand_dims(gate_up[0], 2), gate_up[1]
    return gate_up, None


class Kernels(NamedTuple):
    """The matmuls of one kind of GPU.

    Attributes:
        prefix: what the names of their targets begin with.
        shared: the attributes of all their calls.
        sums: whether those of `fprop` and `dgrad` can be float32 for narrower operands.
    """

    prefix: str
    shared: tuple[tuple[str, Any], ...] = ()
    sums: bool = False

    def fprop(
        self,
        rows: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        bias: jax.Array | None = None,
        dtype: Any = None,
    ) -> jax.Array:
        """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`.

        Args:
            rows: bfloat16 or float16, or float32 where the kernels take it.
            matrices: of the same dtype.
            sizes: int32 `[L]`.
            bias: float32 `[L, B]`, which is added to the float32 sums, or None.
            dtype: of the result: None for that of rows, or float32 if they have `sums`.
        """
        operands = {"rows": rows, "matrices": matrices, "group_sizes": sizes}
        return self._call(
            "fprop", operands | {"bias": bias}, self._out(rows, dtype)
        ).out

    def dgrad(
        self,
        cotangents: jax.Array,
        matrices: jax.Array,
        sizes: jax.Array,
        dtype: Any = None,
        up: jax.Array | None = None,
    ) -> jax.Array:
        """Multiplies `[N, A]` by the transposed `[L, B, A]` to `[N, B]`.

        With `up`, `[L, B, A]` like `matrices`, cotangents are `[N, 2, A]`: the result
        is the sum of those of gate by `matrices` and those of up by `up`.
        """
        if up is None:
            cotangents = jnp.expand_dims(cotangents, 1)
        operands = {"cotangents": cotangents, "matrices": matrices, "up": up}
        operands["group_sizes"] = sizes
        return self._call("dgrad", operands, self._out(cotangents, dtype)).out

    def gate_up(
        self,
        rows: jax.Array,
        matrices: GateUp,
        sizes: jax.Array,
        keep: bool,
        bias: jax.Array | None = None,
        activation: Activation = SWIGLU,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Multiplies `[N, A]` by gate and up and applies the activation.

        Args:
            rows: as in `fprop`.
            matrices: gate first, of the same dtype.
            sizes: int32 `[L]`.
            keep: whether to return gate and up as well.
            bias: float32 `[L, 2, B]`, which is added to the float32 sums, or None.
            activation: what makes h of gate and up.

        Returns:
            h, `[N, B]`, and gate and up with their bias `[N, 2, B]` or None, in the
            dtype of rows, each rounded once from the float32 sums.
        """
        first, up = _sides(matrices)
        operands = {"rows": rows, "matrices": first, "up": up, "group_sizes": sizes}
        operands["bias"] = bias
        found = self._call("gate_up", operands, {"keep": keep, **activation._asdict()})
        return found.h, found.gate_up_rows

    def down_dgrad(
        self,
        cotangents: jax.Array,
        matrices: jax.Array,
        gate_up_rows: jax.Array,
        sizes: jax.Array,
        activation: Activation = SWIGLU,
    ) -> jax.Array:
        """Computes the backward pass of down and the activation.

        Args:
            cotangents: of down's rows, `[N, A]`.
            matrices: down, `[L, B, A]`.
            gate_up_rows: gate and up, `[N, 2, B]`; the result reuses their memory.
            sizes: int32 `[L]`.
            activation: what made h of gate and up.

        Returns:
            The cotangents of gate and up, `[N, 2, B]`.
        """
        operands = {
            "cotangents": cotangents,
            "matrices": matrices,
            "gate_up_rows": gate_up_rows,
            "group_sizes": sizes,
        }
        found = self._call("down_dgrad", operands, activation._asdict())
        return found.to_gate_up_rows

    def wgrad(
        self,
        rows: jax.Array,
        cotangents: jax.Array,
        sizes: jax.Array,
        dtype: Any,
        side: int | None = None,
    ) -> jax.Array:
        """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`.

        With a `side`, cotangents are `[N, 2, B]`, and those of that side are taken.
        """
        if side is None:
            cotangents, side = jnp.expand_dims(cotangents, 1), -1
        operands = {"rows": rows, "cotangents": cotangents, "group_sizes": sizes}
        attributes = {"out_dtype": jnp.dtype(dtype).name, "side": side}
        return self._call("wgrad", operands, attributes).out

    def _out(self, like: jax.Array, dtype: Any) -> dict[str, Any]:
        if not self.sums:
            return {}
        return {"out_dtype": jnp.dtype(like.dtype if dtype is None else dtype).name}

    def _call(self, name: str, operands: Any, attributes: Mapping[str, Any]) -> Any:
        given = {**attributes, **dict(self.shared)}
        return _call(f"{self.prefix}{name}", operands, given)


HOPPER = Kernels("ep_")


def portable(exact: bool) -> Kernels:
    """Returns those for GPUs of compute capability 8.0 and newer.

    Args:
        exact: whether float32 is multiplied as such, not rounded to TF32.
    """
    return Kernels("ep_portable_", (("exact", exact),), sums=True)


def fp8_fprop(
    rows: Fp8Rows,
    matrices: jax.Array,
    scales: jax.Array,
    sizes: jax.Array,
    dtype: Any,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`Kernels.fprop` in fp8.

    Args:
        rows: `[N, A]`.
        matrices: transposed codes, `[L, B, A]`.
        scales: `[L, A / 128, B / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.
        bias: float32 `[L, B]`, or None.

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
            "bias": bias,
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
    """`Kernels.dgrad` in fp8.

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
    rows: Fp8Rows,
    matrices: jax.Array,
    scales: jax.Array,
    sizes: jax.Array,
    keep: bool,
    bias: jax.Array | None = None,
    activation: Activation = SWIGLU,
) -> tuple[Fp8Rows, jax.Array | None]:
    """`Kernels.gate_up` in fp8; the float32 result is quantised as rows are.

    Args:
        rows: `[N, A]`.
        matrices: transposed codes, `[L, 2, B, A]`.
        scales: `[L, A / 128, 2, B / 128]`.
        sizes: int32 `[L]`.
        keep: whether to return gate and up as well.
        bias: float32 `[L, 2, B]`, or None.
        activation: what makes h of gate and up.

    Returns:
        h `[N, B]`; gate and up with their bias in bfloat16 `[N, 2, B]`, or None.
    """
    found = _call(
        "ep_fp8_gate_up",
        {
            "rows": rows.codes,
            "row_scales": rows.scales,
            "matrices": matrices,
            "matrix_scales": scales,
            "group_sizes": sizes,
            "bias": bias,
        },
        {"keep": keep, "out_dtype": "bfloat16", **activation._asdict()},
    )
    return Fp8Rows(found.h, found.h_scales), found.gate_up_rows


def fp8_down_dgrad(
    cotangents: Fp8Rows,
    matrices: jax.Array,
    scales: jax.Array,
    gate_up_rows: jax.Array,
    sizes: jax.Array,
    activation: Activation = SWIGLU,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Kernels.down_dgrad` in fp8.

    Args:
        cotangents: `[N, A]`.
        matrices: codes of down, `[L, B, A]`.
        scales: `[L, B / 128, A / 128]`.
        gate_up_rows: bfloat16 `[N, 2, B]`; the last result reuses its memory.
        sizes: int32 `[L]`.
        activation: what made h of gate and up.

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
        {"out_dtype": "bfloat16", **activation._asdict()},
    )
    return found.codes, found.scales, found.to_gate_up_rows


def fp8_wgrad(
    rows: TransposedRows,
    cotangents: TransposedRows,
    dtype: Any,
    side: int | None = None,
) -> jax.Array:
    """`Kernels.wgrad` in fp8: `[N, A]` by `[N, B]` to `[L, A, B]` of `dtype`.

    With a `side`, cotangents are `[N, 2 * B]`, and those of that side are taken.
    """
    sides = 1 if side is None else 2
    found = _call(
        "ep_fp8_wgrad",
        {
            "rows": rows.codes,
            "row_scales": rows.scales,
            "cotangents": _split(cotangents.codes, 0, sides),
            "cotangent_scales": _split(cotangents.scales, 1, sides),
            "padded_sizes": rows.padded_sizes,
        },
        {"out_dtype": jnp.dtype(dtype).name, "side": -1 if side is None else side},
    )
    return found.out


def _split(values: jax.Array, axis: int, parts: int) -> jax.Array:
    """Splits an axis in two, of which the first has `parts` elements."""
    shape = values.shape
    return values.reshape(*shape[:axis], parts, -1, *shape[axis + 1 :])


def is_paired(rows: int, groups: int) -> bool:
    """Whether both matmuls of experts, with N `rows`, should be one call.

    Then the second kernel begins before the first one ends, which shows if both are
    short. But XLA cannot place the result where the rows were, as it does between two
    calls. With few rows that memory is little beside the weights.
    """
    return rows <= _MOST_PAIRED * groups


class Biases(NamedTuple):
    """Float32 `[L, 2, F]` and `[L, H]`; each may be None."""

    gate_up: jax.Array | None = None
    down: jax.Array | None = None


NO_BIASES = Biases()


def experts(
    rows: jax.Array,
    gate_up: GateUp,
    down: jax.Array,
    sizes: jax.Array,
    biases: Biases = NO_BIASES,
    activation: Activation = SWIGLU,
) -> jax.Array:
    """Applies `gate_up` and then `fprop`, whose kernel begins before the other ends.

    Args:
        rows: `[N, H]`, bfloat16 or float16.
        gate_up: of the same dtype.
        down: `[L, F, H]`, likewise.
        sizes: int32 `[L]`.
        biases: see there.
        activation: what makes h of gate and up.

    Returns:
        `[N, H]`, in the dtype of rows.
    """
    first, up = _sides(gate_up)
    operands = {"rows": rows, "gate_up": first, "up": up, "down": down}
    operands |= {"group_sizes": sizes, **_named(biases)}
    return _call("ep_experts", operands, activation._asdict()).out


def _named(biases: Biases) -> dict[str, jax.Array | None]:
    return {"gate_up_bias": biases.gate_up, "down_bias": biases.down}


def fp8_experts(
    rows: Fp8Rows,
    gate_up: jax.Array,
    gate_up_scales: jax.Array,
    down: jax.Array,
    down_scales: jax.Array,
    sizes: jax.Array,
    dtype: Any,
    biases: Biases = NO_BIASES,
    activation: Activation = SWIGLU,
) -> jax.Array:
    """`experts` in fp8; the float32 result of the activation is quantised as rows are.

    Args:
        rows: `[N, H]`.
        gate_up: transposed codes, `[L, 2, F, H]`.
        gate_up_scales: `[L, H / 128, 2, F / 128]`.
        down: transposed codes, `[L, H, F]`.
        down_scales: `[L, F / 128, H / 128]`.
        sizes: int32 `[L]`.
        dtype: of the result.
        biases: see there.
        activation: what makes h of gate and up.

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
            **_named(biases),
        },
        {"out_dtype": jnp.dtype(dtype).name, **activation._asdict()},
    )
    return found.out


def mxfp4_fprop(
    rows: jax.Array,
    scales: jax.Array | None,
    tiles: jax.Array,
    sizes: jax.Array,
    columns: int,
    dtype: Any,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`Kernels.fprop` by matrices in mxfp4, which are read once for few rows.

    Args:
        rows: bfloat16 `[N, A]`.
        scales: None, or float32 `[N, A / 128]` by which rows are multiplied.
        tiles: what `mxfp4.tiles` returned.
        sizes: int32 `[L]`.
        columns: B.
        dtype: of the result, bfloat16 or float32.
        bias: float32 `[L, B]`, or None.

    Returns:
        `[N, B]`, rounded once from the float32 sums.
    """
    bias = None if bias is None else jnp.expand_dims(bias, 1)
    dims, operands, attributes = _mxfp4(rows, scales, tiles, sizes, columns, dtype)
    operands |= {"bias": bias}
    attributes |= SWIGLU._asdict()
    return tables.call("ep_mxfp4_fprop", rows, dims, operands, attributes).out


def mxfp4_gate_up(
    rows: jax.Array,
    scales: jax.Array | None,
    tiles: jax.Array,
    sizes: jax.Array,
    columns: int,
    dtype: Any,
    bias: jax.Array | None = None,
    activation: Activation = SWIGLU,
) -> jax.Array:
    """`mxfp4_fprop` with tiles that hold gate and up, followed by the activation.

    The bias is `[L, 2, B]`.
    """
    dims, operands, attributes = _mxfp4(rows, scales, tiles, sizes, columns, dtype)
    operands |= {"bias": bias}
    attributes |= activation._asdict()
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


def quantize_matrices(matrices: GateUp) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises `[L, A, Z, B]`, or a pair of `[L, A, B]`, per 128 x 128 of A and B.

    Returns:
        Codes in the same order; scales `[L, A / 128, Z, B / 128]`; the transposed
        codes, `[L, Z, B, A]`.
    """
    first, up = _sides(matrices)
    dims = {"X": first.shape[1] // BLOCK, "Y": first.shape[3] // BLOCK}
    found = tables.call(
        "ep_quantize_matrices",
        first,
        dims | {"C": first.shape[2] if up is None else 2},
        {"matrices": first, "up": up},
        {"transposed": True},
    )
    assert found.transposed is not None
    return found.codes, found.scales, found.transposed


def fp8_of_mxfp4(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns matrices in "mxfp4" into "fp8_block128", transposed.

    It is exact for all elements whose scales are within 14 octaves of the largest one
    among the 128 x 128 elements that then share one; smaller elements are rounded to
    2 ** -15 of that. The result depends on the weights alone.

    Args:
        codes: uint8 `[L, A / 2, 2, B]` or `[L, A / 2, B]`, A and B multiples of 128.
        scales: float8_e8m0fnu `[L, A / 32, 2, B]` or `[L, A / 32, B]`.

    Returns:
        e4m3 `[L, 2, B, A]` or `[L, B, A]`, and float32 `[L, A / 128, 2, B / 128]` or
        `[L, A / 128, B / 128]`.
    """
    if codes.ndim == 3:
        made, shared = fp8_of_mxfp4(codes[:, :, None], scales[:, :, None])
        return made.squeeze(1), shared.squeeze(2)
    rows = 2 * codes.shape[1]
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    found = tables.call(
        "ep_fp8_of_mxfp4",
        codes,
        {"A": rows, "X": rows // BLOCK, "Y": codes.shape[3] // BLOCK},
        {"codes": codes, "code_scales": byte},
        {},
    )
    return found.transposed, found.scales


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


def padded_rows(count: int, groups: int) -> int:
    """Returns P of `TransposedRows`: what `count` rows may take in so many groups."""
    filled = min(count, groups)
    return -(-(count + filled * (BLOCK - 1)) // BLOCK) * BLOCK


def transpose(rows: jax.Array | Fp8Rows, sizes: jax.Array) -> TransposedRows:
    """Quantises rows `[N, A]` per 128 x 128 and transposes them, for `fp8_wgrad`.

    The rule is that of "fp8_block128_e8m0", with the largest element of 128 rows of a
    group and 128 columns.

    Args:
        rows: bfloat16, or codes, which stay exact if their scales are powers of two,
            but for those below 2 ** -13 of the largest one.
        sizes: int32 `[L]`.
    """
    operands: dict[str, Any] = {"rows": rows}
    target = "ep_transpose_rows"
    if isinstance(rows, Fp8Rows):
        operands = {"rows": rows.codes, "row_scales": rows.scales}
        target = "ep_transpose_codes"
    like = operands["rows"]
    count, columns = like.shape
    padded = padded_rows(count, sizes.shape[0])
    dims = {"P": padded, "S": padded // BLOCK, "X": columns // BLOCK}
    found = tables.call(target, like, dims, operands | {"group_sizes": sizes}, {})
    return TransposedRows(found.codes, found.scales, found.padded_sizes)
