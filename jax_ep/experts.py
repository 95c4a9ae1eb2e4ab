"""SwiGLU experts on rows grouped by expert, for `experts=` of `jax_ep.moe_ffn`.

Pass one of them to a layer::

    moe = jax_ep.flax.MoE(..., experts=jax_ep.experts.Padded(largest=512))

Each takes (rows `[N, H]`, gate_up `[L, H, 2, F]`, down `[L, F, H]`, group_sizes `[L]`)
and returns `[N, H]` in the dtype of the rows. Rows past the last group are ignored, and
their results are unspecified. Optional keywords are `gate_bias` and `up_bias` `[L, F]`,
`down_bias` `[L, H]`, and `activation`, a function of (gate, up) `[N, F]` that replaces
`silu(gate) * up`. `auto` is the default. Which one is fastest depends on sizes, GPU and
versions; `benchmarks/layers/layer.py` times them.

`fp8` is different: it takes the whole `Dispatched`, and multiplies the codes of rows by
codes of the weights, which `quantize_weights` makes (docs/fp8.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep import formats
from jax_ep._core import batching, calls, checks, errors, threads
from jax_ep._core.arrays import as_array, cast_remedy
from jax_ep._core.literals import WEIGHT_FORMATS, WeightFormat
from jax_ep._core.types import Dispatched
from jax_ep._experts import (
    activations,
    biases,
    grouped,
    orders,
    select,
    swiglu,
)
from jax_ep._experts import fp8 as _fp8
from jax_ep._experts import operations as _operations
from jax_ep._experts import quantized as _quantized
from jax_ep._experts.activations import Activation as Activation
from jax_ep._experts.quantized import QuantizedWeights as QuantizedWeights
from jax_ep._ops.dequantize import scales_by_row
from jax_ep._ops.expert_of_row import (
    group_of_row,
    require_dispatched,
    require_one_rank,
)

Experts = TypeVar("Experts", bound=Callable[..., Any])

_HOPPER_ITEMSIZE = 2

# What the arguments of `fp8` are, for who calls the other experts like it.
_OF_ROWS = (
    "pass d.tokens, or jax_ep.dequantize(d), and d.group_sizes; only "
    "jax_ep.experts.fp8 takes a whole d"
)


def takes_dispatched(experts: Experts) -> Experts:
    """Decorator for experts that take a whole `Dispatched` instead of its rows.

    Such experts see the codes and scales of a quantised dispatch as they arrived::

        @jax_ep.experts.takes_dispatched
        def experts(d, gate_up, down):  # and this module's optional keywords
            ...

    Args:
        experts: a function of (d, gate_up, down) that returns `[N, H]` in the config's
            dtype, or a class of such functions.

    Returns:
        `experts`, marked.
    """
    marked: Any = experts
    marked.takes_dispatched = True
    return experts


class _Options(NamedTuple):
    """The optional keywords of experts, and their effect on rows."""

    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    activation: Activation | None = None

    def inner(
        self,
        both: jax.Array,
        group_sizes: jax.Array,
        real: jax.Array,
        how: grouped.How,
    ) -> jax.Array:
        """Returns the left operand of `down`, from gate and up side by side.

        Args:
            both: `[N, 2 * F]`.
            group_sizes: int32 `[L]`.
            real: bool `[N]`, False for rows that hold no token.
            how: what sums the gradients of biases.
        """
        if self.gate_bias is not None or self.up_bias is not None:
            shape = group_sizes.shape[0], both.shape[1] // 2
            bias = _joined_biases(self.gate_bias, self.up_bias, shape)
            both = biases.add(both, bias, group_sizes, how)
        gate, up = jnp.split(both, 2, axis=-1)
        if self.activation is None:
            return jax.nn.silu(gate) * up
        return activations.apply(self.activation, gate, up, real)

    def outer(
        self, rows: jax.Array, group_sizes: jax.Array, how: grouped.How
    ) -> jax.Array:
        """Returns the result of the experts, from the product with `down`."""
        if self.down_bias is None:
            return rows
        return biases.add(rows, jnp.asarray(self.down_bias), group_sizes, how)


def _joined_biases(
    gate: jax.Array | None, up: jax.Array | None, shape: tuple[int, int]
) -> jax.Array:
    """Joins biases `[L, F]`, zeros for a missing one, so that one pass sums gradients.

    The result is float32 at least: the gradients are rounded once, to each one's dtype.
    """
    sides = [
        jnp.zeros(shape, jnp.float32) if side is None else jnp.asarray(side)
        for side in (gate, up)
    ]
    wide = jnp.result_type(*sides, jnp.float32)
    return jnp.concatenate([side.astype(wide) for side in sides], 1)


def add_bias(rows: jax.Array, bias: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Adds each expert's bias to its rows, for matmuls of your own.

    The result is that of `rows + bias[expert_of_row]`. The gradient of the bias is
    summed in float32, in the same order in every run. JAX's own derivative of that
    indexing sums it in the dtype of the rows: in bfloat16, the sums of many rows may
    then be far too small.

    Args:
        rows: `[N, F]`, grouped by expert. Rows past the last group may hold anything,
            even NaN, and so may their cotangents.
        bias: `[L, F]`, which is added in the dtype of the rows.
        group_sizes: int32 `[L]`, rows of each group.

    Returns:
        `[N, F]` in the dtype of the rows. Rows past the last group are unspecified.

    Raises:
        ValueError, TypeError: while tracing, if shapes or dtypes are not as described.
    """
    rows, bias, group_sizes = map(jnp.asarray, (rows, bias, group_sizes))
    for name, array in (("rows", rows), ("bias", bias)):
        if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize == 1:
            raise errors.invalid(
                "experts.add_bias",
                f"{name} must be bfloat16, float16, float32 or float64",
                array.dtype,
                "cast it to the dtype of the tokens",
                operand=name,
                kind=TypeError,
            )
    checks.require_dtype("experts.add_bias", "group_sizes", group_sizes, "int32")
    wanted = (*group_sizes.shape, *rows.shape[1:])
    errors.require(
        rows.ndim == 2 and group_sizes.ndim == 1 and bias.shape == wanted,
        "experts.add_bias",
        "rows, bias and group_sizes must be [N, F], [L, F] and [L]",
        f"{rows.shape}, {bias.shape} and {group_sizes.shape}",
        "pass the rows and the biases of this rank's experts",
    )
    columns = rows.shape[1]
    few_bits = rows.dtype.itemsize == _HOPPER_ITEMSIZE
    hopper = few_bits and hopper_obstacle(columns, columns) is None
    how = grouped.Hopper() if hopper else grouped.everywhere()
    return biases.add(rows, bias, group_sizes, how)


@calls.explained("experts.auto", _OF_ROWS)
def auto(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: Activation | None = None,
    device: Any = None,
) -> jax.Array:
    """Applies experts with `ragged_dot`, or with `hopper` if ragged_dot is dense.

    Args:
        rows: `[N, H]`.
        gate_up: `[L, H, 2, F]`, gate first.
        down: `[L, F, H]`.
        group_sizes: int32 `[L]`, rows of each group.
        gate_bias: `[L, F]`, or None.
        up_bias: `[L, F]`, or None.
        down_bias: `[L, H]`, or None.
        activation: a function of (gate, up); None means `silu(gate) * up`.
        device: the `jax.Device` to run on; None means this process's first.

    Returns:
        `[N, H]` in the dtype of the rows.

    Raises:
        ValueError, TypeError: while tracing, if shapes are not as described above, or
            if the rows do not have a floating dtype of 16 bits or more, for example
            because they are the codes of a quantised dispatch.
    """
    _require_operands("auto", rows, gate_up, down, group_sizes)
    given = (rows, gate_up, down, group_sizes)
    options = _Options(gate_bias, up_bias, down_bias, activation)
    if auto_is_hopper(rows.dtype, rows.shape[1], down.shape[1], device):
        return _by_hopper(*given, options)
    return _by_products(*given, options, grouped.everywhere(device=device))


def auto_is_hopper(
    dtype: DTypeLike, hidden_size: int, intermediate_size: int, device: Any = None
) -> bool:
    """Whether `auto` uses the kernels of `hopper`.

    Args:
        dtype: dtype of the rows.
        hidden_size: H.
        intermediate_size: F per rank.
        device: the `jax.Device` to run on; None means this process's first.
    """
    dtype = jnp.dtype(dtype)
    if dtype.itemsize != _HOPPER_ITEMSIZE:
        return False
    obstacle = hopper_obstacle(hidden_size, intermediate_size, device)
    return obstacle is None and _dense(dtype.name, device)


def _dense(dtype: str, device: Any) -> bool:
    try:
        return ragged_dot_is_dense(dtype, device)
    except Exception:  # XLA failed on the small program; the layer's may compile
        return False


@calls.explained("experts.ragged_dot", _OF_ROWS)
def ragged_dot(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Applies experts with `jax.lax.ragged_dot`, on any device and for any sizes.

    If XLA has no grouped matmul for the device, it multiplies every row by the matrices
    of all local experts, which is L times the arithmetic. `ragged_dot_is_dense` says
    whether it does so.

    Args:
        rows: `[N, H]`.
        gate_up: `[L, H, 2, F]`, gate first.
        down: `[L, F, H]`.
        group_sizes: int32 `[L]`, rows of each group.
        gate_bias: `[L, F]`, or None.
        up_bias: `[L, F]`, or None.
        down_bias: `[L, H]`, or None.
        activation: a function of (gate, up); None means `silu(gate) * up`.

    Returns:
        `[N, H]` in the dtype of the rows.

    Raises:
        ValueError, TypeError: as in `auto`.
    """
    _require_operands("ragged_dot", rows, gate_up, down, group_sizes)
    options = _Options(gate_bias, up_bias, down_bias, activation)
    given = (rows, gate_up, down, group_sizes)
    return _by_products(*given, options, grouped.everywhere())


def _by_products(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    options: _Options,
    how: grouped.How,
) -> jax.Array:
    """Applies experts as two products of one implementation."""
    gate_up, down = _wide(rows, gate_up, down)
    both = grouped.matmul(rows, gate_up, group_sizes, how)
    real = _operations.real_rows(group_sizes, rows.shape[0])
    inner = options.inner(both, group_sizes, real, how)
    out = grouped.matmul(inner, down, group_sizes, how)
    return options.outer(out, group_sizes, how)


def ragged_dot_is_dense(dtype: DTypeLike = "bfloat16", device: Any = None) -> bool:
    """Whether XLA computes `jax.lax.ragged_dot` as a dense matmul over all experts.

    It compiles a small forward program once; other shapes may behave differently.

    Args:
        dtype: dtype of rows and matrices.
        device: the `jax.Device` to compile for; None means this process's first.
    """
    return _ragged_dot_is_dense(jnp.dtype(dtype), device)


# Cached here, because functools.cache hides a public function's types from checkers.
@functools.cache
def _ragged_dot_is_dense(dtype: jnp.dtype, device: Any) -> bool:
    text = threads.untraced(functools.partial(_ragged_dot_text, dtype, device))
    # With a grouped kernel the operation stays, inside a fusion; the dense form
    # replaces it.
    return " ragged-dot(" not in text


def _ragged_dot_text(dtype: jnp.dtype, device: Any) -> str:
    groups, size = 4, 256
    shapes = [(512, size), (groups, size, size)]
    where = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=where)
    rows, matrices = (struct(shape, dtype) for shape in shapes)
    lowered = jax.jit(jax.lax.ragged_dot).lower(
        rows, matrices, struct((groups,), jnp.int32)
    )
    return lowered.compile().as_text() or ""


@calls.explained("experts.hopper", _OF_ROWS)
def hopper(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    *,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Applies experts with grouped matmuls for Hopper GPUs.

    Without `activation` and without biases of gate and up, SwiGLU and its derivative
    are part of the matmuls. Derivatives of any order work.

    Args:
        rows: `[N, H]`, bfloat16 or float16.
        gate_up: `[L, H, 2, F]`, gate first.
        down: `[L, F, H]`.
        group_sizes: int32 `[L]`, rows of each group.
        gate_bias: `[L, F]`, or None.
        up_bias: `[L, F]`, or None.
        down_bias: `[L, H]`, or None.
        activation: a function of (gate, up); None means `silu(gate) * up`.

    Returns:
        `[N, H]` in the dtype of the rows.

    Raises:
        ValueError: while tracing, if the rows do not have a 16-bit dtype, or if
            `hopper_obstacle` returns an obstacle.
        ValueError, TypeError: as in `auto`.
    """
    _require_operands("hopper", rows, gate_up, down, group_sizes, "bfloat16 or float16")
    if rows.dtype.itemsize != _HOPPER_ITEMSIZE:
        raise ValueError(
            "jax_ep.experts.hopper: rows must be bfloat16 or float16, got "
            f"{rows.dtype}; use jax_ep.experts.Padded or leave experts out"
        )
    obstacle = hopper_obstacle(rows.shape[1], down.shape[1])
    if obstacle is not None:
        raise ValueError(
            f"jax_ep.experts.hopper: must have {obstacle}; use "
            "jax_ep.experts.Padded or leave experts out"
        )
    options = _Options(gate_bias, up_bias, down_bias, activation)
    return _by_hopper(rows, gate_up, down, group_sizes, options)


def _by_hopper(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    options: _Options,
) -> jax.Array:
    how = grouped.Hopper()
    if (options.activation, options.gate_bias, options.up_bias) == (None, None, None):
        out = swiglu.apply(rows, gate_up, down, group_sizes)
        return options.outer(out, group_sizes, how)
    return _by_products(rows, gate_up, down, group_sizes, options, how)


def hopper_obstacle(
    hidden_size: int, intermediate_size: int, device: Any = None
) -> str | None:
    """Returns "<what hopper needs>, got <what there is>", or None if it can run.

    Args:
        hidden_size: H.
        intermediate_size: F per rank.
        device: the `jax.Device` to run on; None means this process's first.
    """
    return select.obstacle(hidden_size, intermediate_size, device)


# Older names of these functions.
mosaic = hopper
mosaic_obstacle = hopper_obstacle


@dataclasses.dataclass(frozen=True)
class Padded:
    """Pads every group to `largest` rows and applies experts with batched matmuls.

    Arithmetic and memory are those of `L * largest` rows, whatever the routing. Rows of
    a group beyond `largest` are dropped: their results are zeros without gradients.
    Compare `largest` with `aux.expert_counts.max()`; with a fused shared expert, group
    0 has all n tokens of the rank.

    Attributes:
        largest: the most rows that a group may have; multiples of 128 suit GPUs.

    Raises:
        ValueError: `largest` is not a positive int.
    """

    largest: int

    def __post_init__(self) -> None:
        """Checks `largest`."""
        if type(self.largest) is not int or self.largest < 1:
            raise ValueError(
                "jax_ep.experts.Padded: largest must be a positive int, got "
                f"{errors.brief(self.largest)}; start with 1.25 * T * K * R / E, "
                "rounded up"
            )

    @calls.explained("experts.Padded", _OF_ROWS)
    def __call__(
        self,
        rows: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        group_sizes: jax.Array,
        *,
        gate_bias: jax.Array | None = None,
        up_bias: jax.Array | None = None,
        down_bias: jax.Array | None = None,
        activation: Activation | None = None,
    ) -> jax.Array:
        """Applies the experts.

        Args:
            rows: `[N, H]`.
            gate_up: `[L, H, 2, F]`, gate first.
            down: `[L, F, H]`.
            group_sizes: int32 `[L]`, rows of each group.
            gate_bias: `[L, F]`, or None.
            up_bias: `[L, F]`, or None.
            down_bias: `[L, H]`, or None.
            activation: a function of (gate, up); None means `silu(gate) * up`.

        Returns:
            `[N, H]` in the dtype of the rows.

        Raises:
            ValueError, TypeError: as in `auto`.
        """
        _require_operands("Padded", rows, gate_up, down, group_sizes)
        groups, hidden = gate_up.shape[:2]
        gate_up, down = _wide(rows, gate_up, down)
        row, filled, at, kept = _places(group_sizes, rows.shape[0], self.largest)
        padded = _gather(rows, row, at, kept)
        padded = jnp.where(filled[:, None], padded, 0)
        padded = padded.reshape(groups, self.largest, hidden)
        options = _Options(gate_bias, up_bias, down_bias, activation)
        even = jnp.full(groups, self.largest, jnp.int32)
        how = grouped.everywhere()
        both = jnp.einsum("lnh,lhf->lnf", padded, gate_up)
        inner = options.inner(both.reshape(-1, both.shape[-1]), even, filled, how)
        # Places without a row hold what an activation made of another expert's row.
        inner = jnp.where(filled[:, None], inner, 0)
        inner = inner.reshape(groups, self.largest, -1)
        out = jnp.einsum("lnf,lfh->lnh", inner, down).reshape(-1, hidden)
        out = options.outer(out, even, how)
        return jnp.where(kept[:, None], _gather(out, at, row, filled), 0)


_FP8_FORMATS = ("bf16", "fp8_block128", "fp8_block128_e8m0")


@takes_dispatched
@calls.explained(
    "experts.fp8",
    "pass the Dispatched itself, which has rows and sizes; with rows and group_sizes, "
    "as in apply_experts, call jax_ep.experts.auto",
)
def fp8(
    d: Dispatched,
    gate_up: jax.Array | QuantizedWeights,
    down: jax.Array | None,
    *,
    quantized: QuantizedWeights | None = None,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Applies experts to rows and weights in 8 bits, with gradients for training.

    docs/fp8.md says what is rounded where. In short: rows are e4m3 codes with a scale
    per 128 elements; those of a quantised dispatch are used as they came. Weights are
    codes with a scale per 128 x 128 elements. Products are summed in float32, the
    activation's float32 result is quantised per 128 elements of F, and the results of
    down are rounded once. Cotangents are quantised likewise. Gradients of the weights
    are not quantised, and are taken as if the weights had not been, either. Only first
    derivatives are defined. Weights in "mxfp4" alone are frozen: gradients reach rows,
    biases and what `activation` closes over, from cotangents that are not quantised.

    Args:
        d: the `Dispatched` of one rank, of format "fp8_block128", "fp8_block128_e8m0"
            or "bf16", whose rows are quantised here unless weights are in "mxfp4".
        gate_up: `[L, H, 2, F]`, gate first; or a `QuantizedWeights` in place of both
            matrices, which then get no gradients.
        down: `[L, F, H]`; None if `gate_up` is a `QuantizedWeights`.
        quantized: codes of gate_up and down that were made before, so that this call
            does not quantise them. The products use the codes, and gate_up and down get
            the gradients.
        gate_bias: `[L, F]`, or None.
        up_bias: `[L, F]`, or None.
        down_bias: `[L, H]`, or None.
        activation: a function of (gate, up) `[N, F]` in float32; None means
            `silu(gate) * up`.

    Returns:
        `[N, H]` in the dtype of the dispatched tokens; rows past the last group are
        unspecified.

    Raises:
        TypeError, ValueError: while tracing, if an argument is not as described above,
            or H or F is not a multiple of 128 (32 for weights in "mxfp4" with rows in
            "bf16"); in the backward pass, if `d` lacks its `grad_port`.
    """
    require_dispatched("experts.fp8", d)
    require_one_rank("experts.fp8", d, "call it inside jax.shard_map")
    if d.format not in _FP8_FORMATS:
        raise errors.invalid(
            "experts.fp8",
            f"d must have one of the formats {list(_FP8_FORMATS)}",
            repr(d.format),
            "set dispatch_format of the config to one of them, or leave experts out",
            operand="d",
        )
    if isinstance(gate_up, QuantizedWeights):
        if quantized is not None or down is not None:
            raise errors.invalid(
                "experts.fp8",
                "down and quantized must be None if gate_up is a QuantizedWeights",
                "others",
                "leave them out, or pass the masters as gate_up and down",
                operand="gate_up",
            )
        weights, masters = gate_up, None
    else:
        masters = _checked_matrices("experts.fp8", gate_up, down)
        weights = quantized
    codes = None if weights is None else _checked_codes("experts.fp8", weights)
    shapes = codes
    if masters is not None:
        shapes = masters[0].shape, masters[1].shape
        if codes not in (None, shapes):
            raise errors.invalid(
                "experts.fp8",
                "quantized must hold the codes of gate_up and down",
                f"codes of {codes} for {shapes}",
                "quantise these matrices with jax_ep.experts.quantize_weights",
                operand="quantized",
            )
    assert shapes is not None
    shape = shapes[0]
    hidden, inner = shape[1], shape[3]
    groups = d.group_sizes.shape[0]
    columns = formats.columns(d.format, hidden)
    if shape[0] != groups or d.tokens.shape[1] != columns:
        raise errors.invalid(
            "experts.fp8",
            f"gate_up must have the {groups} groups of d and the width of its rows, "
            f"{d.tokens.shape[1]}",
            shape,
            "pass the weights of this rank's experts",
            operand="gate_up",
        )
    four_bits = weights is not None and weights.format == "mxfp4"
    plain = four_bits and d.format == "bf16"
    multiple = _quantized.multiple_of("mxfp4" if plain else "fp8_block128")
    _require_multiple("experts.fp8", hidden, inner, multiple)
    if weights is None:
        assert masters is not None
        weights = quantize_weights(*masters, backward=True)
    with jax.named_scope("jax_ep.fp8"):
        if d.format != "bf16":
            if d.scales is None:
                raise errors.invalid(
                    "experts.fp8",
                    f"d must have the scales of its format {d.format!r}",
                    "none",
                    "keep `scales` and `format` as the dispatch returned them",
                    operand="d",
                )
            rows = _operations.Rows(d.tokens, scales_by_row(d))
            port = d.grad_port
        else:
            port = d.tokens
            values = jax.lax.stop_gradient(port)
            rows = _operations.Rows(values, None)
            if not plain:
                rows = _operations.quantized_rows(values)
        static = _fp8.Static(
            d.rows_dtype,
            None,
            port is not None,
            None if masters is None else (masters[0].dtype, masters[1].dtype),
            select.operations(),
        )
        biases = _fp8.Biases(gate_bias, up_bias, down_bias)
        return _fp8.apply(
            static, port, masters, biases, activation, rows, weights, d.group_sizes
        )


def quantize_weights(
    gate_up: jax.Array,
    down: jax.Array,
    format: WeightFormat = "fp8_block128",
    backward: bool = False,
) -> QuantizedWeights:
    """Returns experts' weights as codes and scales, for `fp8` and `moe_ffn`.

    In training, quantise once per step and use the codes in every microbatch and every
    rematerialised layer; for inference, quantise once and for all. The function runs
    inside and outside `jax.shard_map`, on sharded arrays and under `jit`. It has no
    derivative: to train the masters, pass them beside the codes. If weights are sharded
    over a data axis (FSDP), quantise the shards, then gather the codes. A shard must be
    a multiple of 128 rows (32 for "mxfp4").

    Args:
        gate_up: `[L, H, 2, F]`, gate first, of a floating dtype of 16 bits or more.
        down: `[L, F, H]`.
        format: "fp8_block128", e4m3 with a float32 scale per 128 x 128 elements of each
            matrix; or "mxfp4", e2m1 with a power of two as the scale of 32 elements
            along the contracted dimension, for inference and for training what is
            around frozen experts. docs/formats.md has the rules.
        backward: whether gradients will be taken with these codes. If so, the result
            also holds what kernels need for that beyond the codes, if anything.

    Returns:
        The codes and scales.

    Raises:
        TypeError, ValueError: an argument is not as described above, or H or F is not a
            multiple of 128 (32 for "mxfp4").
    """
    function = "experts.quantize_weights"
    if not errors.is_one_of(format, WEIGHT_FORMATS):
        raise errors.invalid(
            function,
            f"format must be one of {list(WEIGHT_FORMATS)}",
            errors.brief(format),
            "docs/fp8.md describes them",
            operand="format",
        )
    given = _checked_matrices(function, gate_up, down)
    _, hidden, _, inner = given[0].shape
    _require_multiple(function, hidden, inner, _quantized.multiple_of(format))

    def run(gate_up: jax.Array, down: jax.Array) -> QuantizedWeights:
        compute = select.operations()
        return compute.quantize_weights(gate_up, down, format, backward)

    with jax.named_scope("jax_ep.quantize_weights"):
        return batching.in_turn(run)(*map(jax.lax.stop_gradient, given))


def prepare(weights: QuantizedWeights) -> QuantizedWeights:
    """Adds to the codes of a checkpoint what this process's GPU kernels read.

    The results of `quantize_weights` have it already, except for float64 weights. Codes
    without it work as well, but then every call makes it again, in a pass over all
    codes, so prepare them once.
    Only Hopper GPUs need anything added. `QuantizedWeights.canonical` is the inverse.

    Args:
        weights: the weights of one rank's L experts.

    Returns:
        The same weights.

    Raises:
        TypeError, ValueError: `weights` is not a `QuantizedWeights` of one layer.
    """
    _checked_codes("experts.prepare", weights)

    def run(weights: QuantizedWeights) -> QuantizedWeights:
        return select.operations().prepare(weights)

    with jax.named_scope("jax_ep.prepare"):
        return batching.in_turn(run)(weights)


def _checked_matrices(
    function: str, gate_up: Any, down: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns both as arrays; raises unless they are [L, H, 2, F] and [L, F, H]."""
    first = as_array(function, "gate_up", gate_up)
    second = as_array(function, "down", down)
    for name, matrix in (("gate_up", first), ("down", second)):
        dtype = matrix.dtype
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise errors.invalid(
                function,
                f"{name} must have a floating dtype of 16 bits or more",
                dtype,
                "pass the masters, or all codes as one QuantizedWeights",
                operand=name,
                kind=TypeError,
            )
    shape = first.shape
    if (
        len(shape) != 4
        or shape[2] != 2
        or second.shape != (shape[0], shape[3], shape[1])
    ):
        raise errors.invalid(
            function,
            "gate_up and down must be [L, H, 2, F] and [L, F, H]",
            f"{shape} and {second.shape}",
            orders.remedy(shape, second.shape)
            or "stack gate and up along a dimension of their own, gate first",
            operand="gate_up",
        )
    return first, second


def _checked_codes(function: str, weights: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of gate_up and down; raises unless the codes make up both."""
    errors.require_type(
        function,
        "quantized",
        weights,
        QuantizedWeights,
        "a QuantizedWeights",
        "make it with jax_ep.experts.quantize_weights",
    )
    shapes = weights.shapes
    if [len(shape) for shape in shapes] != [4, 3] or shapes[0][2] != 2:
        raise errors.invalid(
            function,
            "a QuantizedWeights must hold codes of [L, H, 2, F] and [L, F, H]",
            f"those of {shapes[0]} and {shapes[1]}",
            "pass one layer of a stack, as a scan over it does",
            operand="quantized",
        )
    wanted = _quantized.layout(weights.format, *shapes)
    turned = _quantized.turned_layout(weights.format, *shapes)
    for name in _quantized.TURNED:
        if getattr(weights, name) is not None:
            # None exist for sizes that the kernels do not support: fail on any.
            wanted[name] = turned.get(name, (jnp.uint8, ()))
    for name, (dtype, shape) in wanted.items():
        array = as_array(function, name, getattr(weights, name))
        if array.dtype != dtype or array.shape != shape:
            raise errors.invalid(
                function,
                f"{name} of a QuantizedWeights in {weights.format!r} must be "
                f"{jnp.dtype(dtype)} {shape}",
                f"{array.dtype} {array.shape}",
                (array.shape == shape and cast_remedy(name, array.dtype, dtype))
                or "pass arrays of one jax_ep.experts.quantize_weights, all sharded "
                "alike",
                operand=name,
            )
    return shapes


def _require_multiple(function: str, hidden: int, inner: int, multiple: int) -> None:
    if hidden % multiple or inner % multiple or not hidden or not inner:
        raise errors.invalid(
            function,
            f"H and F (per shard) must be positive multiples of {multiple}",
            f"H = {hidden} and F = {inner}",
            "pad the weights with zeros, split them over fewer ranks, or use "
            "jax_ep.experts.auto",
        )


def _require_operands(
    function: str,
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    group_sizes: jax.Array,
    kinds: str = "bfloat16, float16 or float32",
) -> None:
    function = f"experts.{function}"
    if isinstance(rows, Dispatched):
        raise errors.invalid(
            function,
            "rows must be an array",
            "a whole Dispatched",
            _OF_ROWS,
            operand="rows",
            kind=TypeError,
        )
    if isinstance(gate_up, QuantizedWeights):
        raise errors.invalid(
            function,
            "gate_up must be an array",
            "a QuantizedWeights",
            "pass experts=jax_ep.experts.fp8, which multiplies codes",
            operand="gate_up",
            kind=TypeError,
        )
    for name, value in (
        ("rows", rows),
        ("gate_up", gate_up),
        ("down", down),
        ("group_sizes", group_sizes),
    ):
        as_array(function, name, value)
    dtype = rows.dtype
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
        codes = checks.is_codes(dtype)
        raise errors.invalid(
            function,
            f"rows must be {kinds}",
            dtype,
            checks.CODES_REMEDY if codes else "cast them to the dtype of the tokens",
            operand="rows",
            kind=TypeError,
        )
    checks.require_dtype(function, "group_sizes", group_sizes, "int32")
    errors.require(
        rows.ndim == 2 and group_sizes.ndim == 1,
        function,
        "rows and group_sizes must be [N, H] and [L]",
        f"{rows.shape} and {group_sizes.shape}",
        "pass those of the dispatch",
    )
    groups, hidden, inner = group_sizes.shape[0], rows.shape[1], down.shape[1:2]
    wanted = (groups, hidden, 2, *inner), (groups, *inner, hidden)
    errors.require(
        (gate_up.shape, down.shape) == wanted,
        function,
        f"gate_up and down must be [L, H, 2, F] and [L, F, H] with L = {groups}, the "
        f"length of group_sizes, and H = {hidden}",
        f"{gate_up.shape} and {down.shape}",
        orders.remedy(gate_up.shape, down.shape, hidden)
        or "pass the matrices of this rank's experts in this order, gate first",
    )


def _wide(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the matrices in the dtype of rows, with gate and up side by side."""
    gate_up = gate_up.astype(rows.dtype)
    return gate_up.reshape(*gate_up.shape[:2], -1), down.astype(rows.dtype)


def _places(group_sizes: jax.Array, count: int, largest: int) -> tuple[jax.Array, ...]:
    """Maps padded places to rows and back.

    Returns:
        For each padded place its row, and whether it has one; for each row its padded
        place, and whether it has one.
    """
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    place = jnp.arange(largest, dtype=jnp.int32)
    row = jnp.minimum(starts[:, None] + place[None, :], count - 1)
    filled = place[None, :] < group_sizes[:, None]
    index = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(group_of_row(ends, count), group_sizes.size - 1)
    within = index - starts[group]
    at = group * largest + jnp.clip(within, 0, largest - 1)
    kept = (within < largest) & (index < ends[-1])
    return row.reshape(-1), filled.reshape(-1), at, kept


@jax.custom_vjp
def _gather(x: jax.Array, at: jax.Array, back: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns `x[at]`, with a derivative that is a gather, too.

    Row i of x occurs in the result at `back[i]` alone if `kept[i]`, and else nowhere,
    so no scatter of rows is needed, which would be slow on GPUs.
    """
    del back, kept
    return x[at]


def _gather_forward(x: Any, at: Any, back: Any, kept: Any) -> Any:
    return x[at], (back, kept)


def _gather_backward(saved: Any, cotangent: Any) -> Any:
    back, kept = saved
    return jnp.where(kept[:, None], cotangent[back], 0), None, None, None


_gather.defvjp(_gather_forward, _gather_backward)
