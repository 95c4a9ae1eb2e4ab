"""fp8 experts on Hopper: `Operations` with kernels that multiply quantised operands.

The kernels contract the last dimension of both operands. So fprop needs transposed
weights, while dgrad takes the weights as they are. For "mxfp4" the kernels have another
order (mxfp4.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_ep._core.literals import WeightFormat
from jax_ep._experts import grouped, kernels, mxfp4, quantized
from jax_ep._experts.operations import Inner, Operations, Rows, quantized_rows
from jax_ep._experts.quantized import QuantizedWeights, Which

MANY_ROWS = 128  # per expert, from which weights in "mxfp4" are turned into fp8 codes
_BOTH: tuple[Which, ...] = ("gate_up", "down")


class HopperOperations(Operations):
    """Uses kernels, and the reference for what the kernels do not support.

    The kernels include biases, SwiGLU and the activations of `jax_ep.experts`. Other
    activations are applied after the matmuls in fp8.
    """

    transposes_weights = True

    def quantize_weights(
        self,
        gate_up: kernels.GateUp,
        down: jax.Array,
        name: WeightFormat,
        backward: bool,
    ) -> QuantizedWeights:
        """Overrides `Operations.quantize_weights`; the same pass transposes codes."""
        if name == "mxfp4":
            weights = super().quantize_weights(gate_up, down, name, backward)
            return self.prepare(weights)
        if not _few_bits(*jax.tree.leaves(gate_up), down):
            return super().quantize_weights(gate_up, down, name, backward)
        first, second = _quantize(gate_up), _quantize(down[:, :, None])
        return QuantizedWeights(
            first[0],
            first[1],
            jnp.squeeze(second[0], 2),
            jnp.squeeze(second[1], 2),
            gate_up_transposed=first[2],
            down_transposed=jnp.squeeze(second[2], 1),
        )

    def prepare(self, weights: QuantizedWeights) -> QuantizedWeights:
        """Overrides `Operations.prepare`."""
        find = _tiles if weights.format == "mxfp4" else _transposed
        found = {f"{which}_transposed": find(weights, which) for which in _BOTH}
        return dataclasses.replace(weights, **found)

    def fprop(
        self,
        rows: Rows,
        weights: QuantizedWeights,
        which: Which,
        sizes: jax.Array,
        dtype: Any,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Overrides `Operations.fprop`."""
        bias = None if bias is None else bias.astype(jnp.float32)
        operand = _fp8_rows(rows)
        if operand is not None:
            found = _fp8_matrices(rows, weights, which, sizes)
            if found is not None:
                matrices, scales = found
                matrices = matrices.reshape(matrices.shape[0], -1, matrices.shape[-1])
                given = operand, matrices, _merged(scales)
                return kernels.fp8_fprop(*given, sizes, dtype, bias)
        if weights.format == "mxfp4":
            run = _mxfp4(rows, weights, which, sizes, bias)
            if run is not None:
                out = jnp.bfloat16 if _is_bfloat16(dtype) else jnp.float32
                return run(out).astype(dtype)
        return super().fprop(rows, weights, which, sizes, dtype, bias)

    def dgrad(
        self,
        cotangents: Rows,
        weights: QuantizedWeights,
        which: Which,
        sizes: jax.Array,
        dtype: Any,
    ) -> jax.Array:
        """Overrides `Operations.dgrad`."""
        plain = cotangents.scales is None
        if (
            weights.format == "mxfp4"
            and plain
            and _is_bfloat16(cotangents.values.dtype)
        ):
            matrices = _decoded(weights, which)
            return kernels.HOPPER.dgrad(cotangents.values, matrices, sizes).astype(
                dtype
            )
        operand = _fp8(cotangents, weights)
        if operand is None:
            return super().dgrad(cotangents, weights, which, sizes, dtype)
        matrices = _merged(getattr(weights, which))
        scales = _merged(getattr(weights, f"{which}_scales"))
        return kernels.fp8_dgrad(operand, matrices, scales, sizes, dtype)

    def gate_up(
        self,
        rows: Rows,
        weights: QuantizedWeights,
        sizes: jax.Array,
        inner: Inner,
        keep: bool,
        dtype: Any,
    ) -> tuple[Rows, jax.Array | None]:
        """Overrides `Operations.gate_up`."""
        activation = inner.of_kernels
        operand = _fp8_rows(rows)
        if operand is not None and activation is not None:
            found = _fp8_matrices(rows, weights, "gate_up", sizes)
            if found is not None:
                h, gate_up_rows = kernels.fp8_gate_up(
                    operand, *found, sizes, keep, inner.bias, activation
                )
                return Rows(*h), gate_up_rows
        if weights.format == "mxfp4" and activation is not None and not keep:
            fused = _mxfp4(rows, weights, "gate_up", sizes, inner.bias, activation)
            if fused is not None and rows.scales is None and _is_bfloat16(dtype):
                return Rows(fused(jnp.bfloat16), None), None
            if fused is not None and rows.scales is not None:
                return quantized_rows(fused(jnp.float32)), None
        return super().gate_up(rows, weights, sizes, inner, keep, dtype)

    def apply(
        self,
        rows: Rows,
        weights: QuantizedWeights,
        sizes: jax.Array,
        inner: Inner,
        down_bias: jax.Array | None,
        dtype: Any,
    ) -> jax.Array:
        """Overrides `Operations.apply`."""
        operand = _fp8(rows, weights)
        paired = kernels.is_paired(rows.values.shape[0], sizes.shape[0])
        if operand is None or inner.of_kernels is None or not paired:
            return super().apply(rows, weights, sizes, inner, down_bias, dtype)
        down = None if down_bias is None else down_bias.astype(jnp.float32)
        return kernels.fp8_experts(
            operand,
            _transposed(weights, "gate_up"),
            weights.gate_up_scales,
            _transposed(weights, "down"),
            weights.down_scales,
            sizes,
            dtype,
            kernels.Biases(inner.bias, down),
            inner.of_kernels,
        )

    def down_dgrad(
        self,
        cotangents: Rows,
        weights: QuantizedWeights,
        sizes: jax.Array,
        inner: Inner,
        gate_up_rows: jax.Array,
    ) -> tuple[Rows, jax.Array, tuple[jax.Array, ...]]:
        """Overrides `Operations.down_dgrad`."""
        operand = _fp8(cotangents, weights)
        # `gate_up_rows` already include the biases.
        if operand is None or inner.of_kernels is None:
            return super().down_dgrad(cotangents, weights, sizes, inner, gate_up_rows)
        codes, scales, plain = kernels.fp8_down_dgrad(
            operand,
            weights.down,
            weights.down_scales,
            gate_up_rows,
            sizes,
            inner.of_kernels,
        )
        return Rows(_side_by_side(codes), _side_by_side(scales)), plain, ()

    def wgrad(
        self,
        rows: Rows,
        cotangents: jax.Array,
        sizes: jax.Array,
        dtype: Any,
        side: int | None = None,
    ) -> jax.Array:
        """Overrides `Operations.wgrad`."""
        operand = _fp8_rows(rows)
        if operand is None:
            values = rows.values.astype(jnp.bfloat16)
        else:
            values = kernels.dequantize(operand, sizes, jnp.bfloat16)
        cotangents = cotangents.astype(jnp.bfloat16)
        # The kernel writes either bfloat16 or the float32 sums.
        out = dtype if dtype == jnp.bfloat16 else jnp.float32
        found = kernels.HOPPER.wgrad(values, cotangents, sizes, out, side)
        return found.astype(dtype)

    def for_fp8_wgrad(self, rows: Rows, sizes: jax.Array) -> kernels.TransposedRows:
        """Overrides `Operations.for_fp8_wgrad`."""
        operand = _fp8_rows(rows)
        if operand is None:
            return kernels.transpose(rows.values.astype(jnp.bfloat16), sizes)
        return kernels.transpose(operand, sizes)

    def fp8_wgrad(
        self,
        rows: kernels.TransposedRows,
        cotangents: kernels.TransposedRows,
        sizes: jax.Array,
        dtype: Any,
        side: int | None = None,
    ) -> jax.Array:
        """Overrides `Operations.fp8_wgrad`."""
        del sizes
        out = dtype if dtype == jnp.bfloat16 else jnp.float32
        return kernels.fp8_wgrad(rows, cotangents, out, side).astype(dtype)

    def quantize_cotangents(self, values: jax.Array, sizes: jax.Array) -> Rows:
        """Overrides `Operations.quantize_cotangents`."""
        return Rows(*kernels.quantize_cotangents(values, sizes))

    def bias_grad(self, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
        """Overrides `Operations.bias_grad`."""
        if cotangents.dtype.itemsize != 2:  # the kernels take 16 bits
            return super().bias_grad(cotangents, sizes)
        return grouped.HOPPER.sums(cotangents, sizes)


def _side_by_side(values: jax.Array) -> jax.Array:
    """Merges the last two dimensions of `[N, 2, ...]`."""
    count, sides, columns = values.shape
    return values.reshape(count, sides * columns)


def _few_bits(*matrices: jax.Array) -> bool:
    """Whether kernels read matrices of these dtypes; they do not read float64."""
    return all(matrix.dtype.itemsize <= 4 for matrix in matrices)


def _is_bfloat16(dtype: Any) -> bool:
    """Whether `dtype`, which may be a string or a type, is bfloat16."""
    return jnp.dtype(dtype) == jnp.bfloat16


def _fp8(rows: Rows, weights: QuantizedWeights) -> kernels.Fp8Rows | None:
    """Returns rows as the fp8 kernels take them; None if they do not apply."""
    return _fp8_rows(rows) if weights.format == "fp8_block128" else None


def _fp8_rows(rows: Rows) -> kernels.Fp8Rows | None:
    """Returns quantised rows, with scales as kernels read them; None without any."""
    if rows.scales is None:
        return None
    return kernels.Fp8Rows(rows.values, rows.scales.astype(jnp.float32))


def _fp8_matrices(
    rows: Rows, weights: QuantizedWeights, which: Which, sizes: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Returns transposed codes and scales for the fp8 kernels; None if others serve.

    Matrices in "mxfp4" are turned into codes where each expert has many rows. With
    fewer, the products by the codes of mxfp4 take less than that pass.
    """
    codes, scales = getattr(weights, which), getattr(weights, f"{which}_scales")
    if weights.format == "fp8_block128":
        return _transposed(weights, which), scales
    if rows.values.shape[0] < MANY_ROWS * sizes.shape[0]:
        return None
    # Not before the rows exist, so that only one matrix is in memory as fp8 codes.
    codes, scales, _ = jax.lax.optimization_barrier((codes, scales, rows.values))
    return kernels.fp8_of_mxfp4(codes, scales)


def _tiles(weights: QuantizedWeights, which: Which) -> jax.Array | None:
    """Returns a matrix as the mxfp4 kernels read it; None if they do not."""
    found = getattr(weights, f"{which}_transposed")
    matrix = weights.shapes[which == "down"]
    if found is not None or mxfp4.shape(matrix) is None:
        return found
    given = getattr(weights, which), getattr(weights, f"{which}_scales")
    placed = jax.typeof(given[0]).sharding
    if all(entry is None for entry in placed.spec):
        return mxfp4.tiles(*given)
    # With explicit axes, JAX must be told how a result is sharded. What shards a matrix
    # may cut its tiles, so only experts stay apart.
    apart = NamedSharding(placed.mesh, PartitionSpec(placed.spec[0]))
    by_expert: Any = jax.sharding.auto_axes(mxfp4.tiles, out_sharding=apart)
    return by_expert(*given)


def _mxfp4(
    rows: Rows,
    weights: QuantizedWeights,
    which: Which,
    sizes: jax.Array,
    bias: jax.Array | None,
    activation: kernels.Activation | None = None,
) -> Callable[[Any], jax.Array] | None:
    """Returns a function that multiplies by "mxfp4"; it takes the result's dtype.

    Returns None if the kernels do not support the rows or the sizes.

    Args:
        rows: `[N, A]`.
        weights: weights in "mxfp4".
        which: the matrix.
        sizes: int32 `[L]`.
        bias: float32 `[L, B]`, or with an activation `[L, 2, B]`, or None.
        activation: what follows; the matrix is then gate_up.
    """
    plain = rows.scales is None
    if plain and rows.values.dtype != jnp.bfloat16:
        return None
    tiles = _tiles(weights, which)
    if tiles is None:
        return None
    *_, columns = weights.shapes[which == "down"]
    scales = rows.scales if rows.scales is None else rows.scales.astype(jnp.float32)
    # Once here, since every tile of columns would decode them again. It is exact.
    values = rows.values.astype(jnp.bfloat16)

    def multiply(dtype: Any) -> jax.Array:
        given = values, scales, tiles, sizes
        if activation is not None:
            return kernels.mxfp4_gate_up(*given, columns, dtype, bias, activation)
        if which == "down":
            return kernels.mxfp4_fprop(*given, columns, dtype, bias)
        assert bias is None
        whole = tiles.shape[1] * mxfp4.BLOCK_N
        return mxfp4.side_by_side(kernels.mxfp4_fprop(*given, whole, dtype), columns)

    return multiply


def _decoded(weights: QuantizedWeights, which: Which) -> jax.Array:
    """Returns matrices in "mxfp4" as bfloat16, which is exact, gate and up merged."""
    return _merged(quantized.dequantize(weights, which).astype(jnp.bfloat16))


def _transposed(weights: QuantizedWeights, which: Which) -> jax.Array:
    found = getattr(weights, f"{which}_transposed")
    return quantized.transpose(getattr(weights, which)) if found is None else found


def _merged(matrices: jax.Array) -> jax.Array:
    """Merges gate and up of `[L, A, 2, B]`; `[L, A, B]` stays as it is."""
    return matrices.reshape(*matrices.shape[:2], -1)


def _quantize(matrices: kernels.GateUp) -> tuple[jax.Array, ...]:
    """Runs `kernels.quantize_matrices` on each device's own part.

    Outside of shard_map, XLA cannot partition a custom call and would gather its
    operand. With explicit axes, JAX has no sharding rule for one. There a pair is
    joined first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    # Arrays may be sharded even if no mesh is set.
    unknown = mesh.empty or AxisType.Auto in mesh.axis_types
    placed = jax.typeof(jax.tree.leaves(matrices)[0]).sharding
    explicit = any(entry is not None for entry in placed.spec)
    if isinstance(matrices, tuple):
        if not unknown and not explicit:
            return kernels.quantize_matrices(matrices)
        matrices = jnp.stack(matrices, 2)
        placed = jax.typeof(matrices).sharding
    if explicit:
        outs = _out_shardings(placed.mesh, matrices.shape, placed.spec)
        by_part: Any = jax.sharding.auto_axes(_partitioned, out_sharding=outs)
        return by_part(matrices)
    return (_partitioned if unknown else kernels.quantize_matrices)(matrices)


@custom_partitioning
def _partitioned(matrices: jax.Array) -> Any:
    return kernels.quantize_matrices(matrices)


def _partition(mesh: Any, given: Any, result: Any) -> Any:
    del result
    (matrices,) = given
    outs = _out_shardings(mesh, matrices.shape, matrices.sharding.spec)
    return mesh, kernels.quantize_matrices, outs, outs[:1]


def _out_shardings(mesh: Any, shape: Any, spec: Any) -> tuple[NamedSharding, ...]:
    """Returns the shardings of the codes, the scales and the transposed codes."""
    units = {1: kernels.BLOCK, 3: kernels.BLOCK}
    whole = quantized.without_cuts(mesh, shape, spec, units)
    group, row, side, column = whole
    specs = whole, whole, (group, side, column, row)
    return tuple(NamedSharding(mesh, PartitionSpec(*each)) for each in specs)


def _infer(mesh: Any, given: Any, result: Any) -> Any:
    return _partition(mesh, given, result)[2]


def _rule(mesh: Any, given: Any, results: Any) -> Any:
    """Returns what Shardy may shard: it must not cut the blocks of 128 x 128."""
    del mesh, results
    _, rows, _, columns = given[0].shape
    sizes = {}

    def blocks(count: str, inner: str, size: int) -> str:
        if size == kernels.BLOCK:
            return inner  # Shardy refuses a factor of size 1 beside another one
        sizes[inner] = kernels.BLOCK
        return f"({count} {inner})"

    first, last = blocks("a", "i", rows), blocks("b", "j", columns)
    codes = f"g {first} s {last}"
    rule = f"{codes} -> {codes}, g a s b, g s {last} {first}"
    return rule, {"need_replication_factors": ("i", "j"), **sizes}


_partitioned.def_partition(
    partition=_partition, infer_sharding_from_operands=_infer, sharding_rule=_rule
)
