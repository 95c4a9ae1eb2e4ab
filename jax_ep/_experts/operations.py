"""The operations of fp8 experts, which a device's kernels can replace.

`Operations` is plain JAX that runs everywhere: it dequantises operands to float32 and
multiplies these. A subclass overrides its methods with kernels. The operations have no
derivative or batching rule; `fp8` adds both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core.literals import Dtype, Format, WeightFormat
from jax_ep._experts import (
    activations,
    biases,
    devices,
    grouped,
    kernels,
    quantized,
)
from jax_ep._experts.quantized import QuantizedWeights, Which

_ROW_FORMAT: Format = "fp8_block128"
_WIDE = jnp.dtype("float32")


class Rows(NamedTuple):
    """Rows as codes, or as plain values.

    Attributes:
        values: `[N, A]`, float8_e4m3fn, or without scales any float dtype.
        scales: `[N, A / 128]`, float32 or float8_e8m0fnu, or None.
    """

    values: jax.Array
    scales: jax.Array | None

    def to(self, dtype: Dtype) -> jax.Array:
        """Returns what the rows stand for, rounded once to `dtype`."""
        if self.scales is None:
            return self.values.astype(dtype)
        e8m0 = self.scales.dtype == quantized.E8M0
        name: Format = "fp8_block128_e8m0" if e8m0 else _ROW_FORMAT
        return formats.dequantize(self.values, self.scales, name, dtype=dtype)


def quantized_rows(values: jax.Array) -> Rows:
    """Returns rows as `jax_ep.formats.quantize` does, in "fp8_block128"."""
    return Rows(*formats.quantize(values, _ROW_FORMAT))


class Inner(NamedTuple):
    """The computation between gate/up and down: biases and the activation.

    Attributes:
        gate_bias: `[L, F]`, or None.
        up_bias: `[L, F]`, or None.
        consts: arrays that `activation` takes besides gate and up.
        activation: `run` of an `activations.Closed`; None means `silu(gate) * up`.
        of_kernels: how kernels compute it; None if they do not.
    """

    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    consts: tuple[jax.Array, ...]
    activation: Callable[..., jax.Array] | None
    of_kernels: kernels.Activation | None

    @property
    def bias(self) -> jax.Array | None:
        """Both biases as kernels take them, float32 `[L, 2, F]`; None without any."""
        return biases.of_kernels(self.gate_bias, self.up_bias)

    def __call__(self, gate: jax.Array, up: jax.Array, sizes: jax.Array) -> jax.Array:
        """Returns the activation of gate and up, which already include their biases."""
        if self.activation is None:
            return jax.nn.silu(gate) * up
        has_token = rows_in_groups(sizes, gate.shape[0])
        return activations.value(self.activation, gate, up, self.consts, has_token)

    def gradients(
        self, gate: jax.Array, up: jax.Array, sizes: jax.Array, to_h: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """Returns the cotangents of gate, up and consts, from that of the result."""
        if self.activation is None:
            _, back = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
            return *back(to_h), ()
        has_token = rows_in_groups(sizes, gate.shape[0])
        run = self.activation
        return activations.gradients(run, gate, up, self.consts, has_token, to_h)


class Operations:
    """The reference implementation; instances of one class are equal, and hashable.

    The N rows form L groups of `sizes`. Rows past the groups, and their results, may
    hold anything, even NaN, but change no other result. Products are summed in float32.
    """

    # Whether `quantize_weights` adds transposed codes.
    transposes_weights = False

    def __eq__(self, other: object) -> bool:
        """Whether programs traced with either are the same."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        """Hashes the class."""
        return hash(type(self))

    def quantize_weights(
        self,
        gate_up: kernels.GateUp,
        down: jax.Array,
        name: WeightFormat,
        backward: bool,
    ) -> QuantizedWeights:
        """Quantises `[L, H, 2, F]`, or a pair, and `[L, F, H]` to format `name`.

        `backward` says whether `dgrad` will be called. Blocks of 128 x 128 have the
        same codes when they are transposed, so the reference ignores it.
        """
        del backward
        if isinstance(gate_up, tuple):
            gate_up = jnp.stack(gate_up, 2)
        return quantized.quantize(gate_up, down, name)

    def prepare(self, weights: QuantizedWeights) -> QuantizedWeights:
        """Adds to canonical weights what `quantize_weights` would add for kernels."""
        return weights

    def fprop(
        self,
        rows: Rows,
        weights: QuantizedWeights,
        which: Which,
        sizes: jax.Array,
        dtype: Any,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Multiplies each row by the matrix of its group, and rounds once to `dtype`.

        Per group, gate_up is a matrix `[H, 2 * F]`, gate first, and down is `[F, H]`.

        Args:
            rows: `[N, A]`.
            weights: what `quantize_weights` made, or codes from a checkpoint.
            which: the matrix.
            sizes: int32 `[L]`.
            dtype: of the result.
            bias: `[L, B]`, which is added to the sums, or None.

        Returns:
            `[N, B]`.
        """
        matrix = _matrices(weights, which)
        sums = _exact().fprop(rows.to("float32"), matrix, sizes, _WIDE)
        return with_bias(sums, bias, sizes).astype(dtype)

    def dgrad(
        self,
        cotangents: Rows,
        weights: QuantizedWeights,
        which: Which,
        sizes: jax.Array,
        dtype: Any,
    ) -> jax.Array:
        """Multiplies cotangents `[N, B]` by transposed matrices, else as `fprop`."""
        matrix = _matrices(weights, which)
        return (
            _exact().dgrad(cotangents.to("float32"), matrix, sizes, _WIDE).astype(dtype)
        )

    def gate_up(
        self,
        rows: Rows,
        weights: QuantizedWeights,
        sizes: jax.Array,
        inner: Inner,
        keep: bool,
        dtype: Any,
    ) -> tuple[Rows, jax.Array | None]:
        """Applies gate, up and the activation.

        The float32 result of the activation is quantised exactly as
        `jax_ep.formats.quantize` does, bit for bit. If the rows have no scales, it is
        rounded to `dtype` instead.

        Args:
            rows: `[N, H]`.
            weights: as in `fprop`.
            sizes: int32 `[L]`.
            inner: biases and activation.
            keep: whether the backward pass needs gate and up.
            dtype: dtype of the tokens.

        Returns:
            The rows of down `[N, F]`; gate and up with their biases in bfloat16,
            `[N, 2, F]`, or None.
        """
        sums = self.fprop(rows, weights, "gate_up", sizes, jnp.float32)
        gate, up = jnp.split(sums, 2, axis=1)
        gate = with_bias(gate, inner.gate_bias, sizes)
        up = with_bias(up, inner.up_bias, sizes)
        h = inner(gate, up, sizes)
        kept = jnp.stack([gate, up], 1).astype(jnp.bfloat16) if keep else None
        if rows.scales is None:
            return Rows(h.astype(dtype), None), kept
        return quantized_rows(h), kept

    def apply(
        self,
        rows: Rows,
        weights: QuantizedWeights,
        sizes: jax.Array,
        inner: Inner,
        down_bias: jax.Array | None,
        dtype: Any,
    ) -> jax.Array:
        """Applies `gate_up` and multiplies by down, with nothing kept for a derivative.

        Args:
            rows: `[N, H]`.
            weights: as in `fprop`.
            sizes: int32 `[L]`.
            inner: biases and activation.
            down_bias: `[L, H]`, or None.
            dtype: dtype of the tokens and of the result.

        Returns:
            `[N, H]`.
        """
        h, _ = self.gate_up(rows, weights, sizes, inner, False, dtype)
        return self.fprop(h, weights, "down", sizes, dtype, down_bias)

    def down_dgrad(
        self,
        cotangents: Rows,
        weights: QuantizedWeights,
        sizes: jax.Array,
        inner: Inner,
        gate_up_rows: jax.Array,
    ) -> tuple[Rows, jax.Array, tuple[jax.Array, ...]]:
        """Computes the backward pass of down and the activation.

        Args:
            cotangents: `[N, H]`, of down's rows, from `quantize_cotangents`, or plain.
            weights: as in `fprop`.
            sizes: int32 `[L]`.
            inner: biases and activation; `gate_up_rows` already include the biases.
            gate_up_rows: gate and up, as `gate_up` kept them.

        Returns:
            The cotangents of gate and up side by side, `[N, 2 * F]`, quantised from
            float32, or plain as `cotangents` are; the same in bfloat16, not quantised,
            `[N, 2, F]`; the cotangents of `inner.consts`.
        """
        to_h = self.dgrad(cotangents, weights, "down", sizes, jnp.float32)
        wide = gate_up_rows.astype(jnp.float32)
        to_gate, to_up, to_consts = inner.gradients(wide[:, 0], wide[:, 1], sizes, to_h)
        joined = jnp.concatenate([to_gate, to_up], 1)
        plain = joined.astype(jnp.bfloat16).reshape(gate_up_rows.shape)
        if cotangents.scales is None:
            return Rows(joined.astype(cotangents.values.dtype), None), plain, to_consts
        return self.quantize_cotangents(joined, sizes), plain, to_consts

    def wgrad(
        self,
        rows: Rows,
        cotangents: jax.Array,
        sizes: jax.Array,
        dtype: Any,
        side: int | None = None,
    ) -> jax.Array:
        """Sums outer products over each group, rounded once to `dtype`.

        Args:
            rows: `[N, A]`, which are dequantised to bfloat16.
            cotangents: `[N, B]`, rounded to bfloat16; with a `side` `[N, 2, B]`.
            sizes: int32 `[L]`.
            dtype: of the result.
            side: which side of the cotangents is multiplied.

        Returns:
            `[L, A, B]`.
        """
        cotangents = cotangents if side is None else cotangents[:, side]
        has_token = rows_in_groups(sizes, cotangents.shape[0])[:, None]
        values = jnp.where(has_token, rows.to("bfloat16").astype(jnp.float32), 0)
        cotangents = cotangents.astype(jnp.bfloat16).astype(jnp.float32)
        cotangents = jnp.where(has_token, cotangents, 0)
        return _exact().wgrad(values, cotangents, sizes, dtype)

    def for_fp8_wgrad(self, rows: Rows, sizes: jax.Array) -> Any:
        """Returns rows or cotangents `[N, A]` as `fp8_wgrad` takes them.

        They are quantised per 128 rows of a group and 128 columns, by the rule of
        "fp8_block128_e8m0".
        """
        dtype = "bfloat16" if rows.scales is None else "float32"
        return quantized.rounded_by_blocks(rows.to(dtype), sizes)

    def fp8_wgrad(
        self,
        rows: Any,
        cotangents: Any,
        sizes: jax.Array,
        dtype: Any,
        side: int | None = None,
    ) -> jax.Array:
        """`wgrad` of what `for_fp8_wgrad` returned; with a `side` of `[N, 2 * B]`."""
        if side is not None:
            cotangents = jnp.split(cotangents, 2, axis=1)[side]
        return self.wgrad(Rows(rows, None), cotangents, sizes, dtype)

    def quantize_cotangents(self, values: jax.Array, sizes: jax.Array) -> Rows:
        """Quantises `[N, A]` per 128 of A, with a scale of max(amax, 2^-80) / 448."""
        del sizes
        return Rows(*quantized.quantize_cotangents(values))

    def bias_grad(self, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
        """Sums the cotangents `[N, F]` of each group's rows, to float32 `[L, F]`."""
        return _exact().sums(cotangents, sizes)


def rows_in_groups(sizes: jax.Array, count: int) -> jax.Array:
    """Returns bool `[count]`: whether each row belongs to a group."""
    return jnp.arange(count, dtype=jnp.int32) < jnp.sum(sizes)


def with_bias(rows: jax.Array, bias: jax.Array | None, sizes: jax.Array) -> jax.Array:
    """Adds each group's bias to its rows, in float32; it has no derivative."""
    if bias is None:
        return rows
    own = biases.spread(bias.astype(jnp.float32), sizes, rows.shape[0])
    return rows.astype(jnp.float32) + own


def _matrices(weights: QuantizedWeights, which: Which) -> jax.Array:
    """Returns float32 `[L, A, B]`, with gate's columns before up's."""
    matrices = quantized.dequantize(weights, which)
    return matrices.reshape(*matrices.shape[:2], -1)


def _exact() -> grouped.Products:
    """Returns products of float32 as such, by kernels where they run."""
    device = jax.local_devices()[0]
    if device.platform == "gpu" and devices.portable_obstacle(device) is None:
        return grouped.portable(True)
    return grouped.everywhere(jax.lax.Precision.HIGHEST)
