"""Experts whose rows and weights are quantised: those of a dispatch, or made here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import formats
from jax_ep._core import batching, calls, errors, operands, traces
from jax_ep._core.arrays import as_array, cast_remedy
from jax_ep._core.literals import WEIGHT_FORMATS, WGRADS, Format, WeightFormat, Wgrad
from jax_ep._core.types import Dispatched
from jax_ep._experts import fp8 as _fp8
from jax_ep._experts import operations as _operations
from jax_ep._experts import orders, select
from jax_ep._experts import quantized as _quantized
from jax_ep._experts.activations import Activation
from jax_ep._experts.interface import Case, Experts
from jax_ep._experts.kernels import GateUp
from jax_ep._experts.operations import Operations
from jax_ep._experts.quantized import QuantizedWeights
from jax_ep._ops.dequantize import dequantize, scales_by_row
from jax_ep._ops.expert_of_row import require_dispatched, require_one_rank

# Formats of rows that are multiplied as codes. Weights in "mxfp4" take the others, too,
# which are decoded.
_CODED = ("fp8_block128", "fp8_block128_e8m0")
_ROW_FORMATS = ("bf16", *_CODED)


class Fp8(Experts):
    """Applies experts to rows and weights in 8 bits, with gradients for training.

    docs/fp8.md says what is rounded where. In short: rows are e4m3 codes with a scale
    per 128 elements; those of a quantised dispatch are used as they came. Weights are
    codes with a scale per 128 x 128 elements. Products are summed in float32, the
    activation's float32 result is quantised per 128 elements of F, and the results of
    down are rounded once. Cotangents are quantised likewise. Gradients of the weights
    are not quantised, and are taken as if the weights had not been, either. With
    `wgrad="fp8"` they are sums of products of codes, whose scales are powers of two per
    128 rows and 128 columns. Only first derivatives are defined. Weights in "mxfp4"
    alone are frozen: gradients reach rows, biases and what `activation` closes over,
    from cotangents that are not quantised.
    """

    takes_dispatched = True
    takes_pair = True
    takes_ungated = False
    splits_by_group = True
    casts_weights = True
    quantizes: WeightFormat | None = "fp8_block128"
    name = "fp8"

    def reads_tail(self, case: Case) -> bool:
        del case
        return False

    def multiple_of(self, weights: WeightFormat | None, rows: Format) -> int:
        plain = weights == "mxfp4" and rows not in _CODED
        return _quantized.multiple_of("mxfp4" if plain else "fp8_block128")

    @calls.explained(
        "experts.fp8",
        "pass the Dispatched itself, which has rows and sizes; with rows and "
        "group_sizes, as in apply_experts, call jax_ep.experts.auto",
    )
    def __call__(
        self,
        d: Dispatched,
        gate_up: GateUp | QuantizedWeights,
        down: jax.Array | None,
        *,
        quantized: QuantizedWeights | None = None,
        gate_bias: jax.Array | None = None,
        up_bias: jax.Array | None = None,
        down_bias: jax.Array | None = None,
        activation: Activation | None = None,
        wgrad: Wgrad = "bf16",
    ) -> jax.Array:
        """Applies the experts.

        Args:
            d: the `Dispatched` of one rank, of format "fp8_block128",
                "fp8_block128_e8m0" or "bf16", whose rows are quantised here unless
                weights are in "mxfp4". Those take any format: rows of others are
                decoded, "mxfp8" exactly, to bfloat16.
            gate_up: `[L, H, 2, F]`, gate first, or a pair of gate and up `[L, H, F]`;
                or a `QuantizedWeights` in place of both matrices, which then get no
                gradients.
            down: `[L, F, H]`; None if `gate_up` is a `QuantizedWeights`.
            quantized: codes of gate_up and down that were made before, so that this
                call does not quantise them. The products use the codes, and gate_up and
                down get the gradients.
            gate_bias: `[L, F]`, or None.
            up_bias: `[L, F]`, or None.
            down_bias: `[L, H]`, or None.
            activation: a function of (gate, up) `[N, F]` in float32; None means
                `silu(gate) * up`.
            wgrad: what is multiplied for the gradients of gate_up and down: "bf16", or
                "fp8" for codes of rows and cotangents, which is faster.

        Returns:
            `[N, H]` in the dtype of the dispatched tokens; rows past the last group are
            unspecified.

        Raises:
            TypeError, ValueError: while tracing, if an argument is not as described
                above, or H or F is not a multiple of 128 (32 for weights in "mxfp4"
                with rows that are not in "fp8_block128"); in the backward pass, if `d`
                lacks its `grad_port`.
        """
        require_dispatched("experts.fp8", d)
        if not errors.is_one_of(wgrad, WGRADS):
            raise errors.invalid(
                "experts.fp8",
                f"wgrad must be one of {list(WGRADS)}",
                errors.brief(wgrad),
                "docs/fp8.md says what each does",
                operand="wgrad",
            )
        require_one_rank("experts.fp8", d, "call it inside jax.shard_map")
        given = gate_up if isinstance(gate_up, QuantizedWeights) else quantized
        four_bits = isinstance(given, QuantizedWeights) and given.format == "mxfp4"
        if d.format not in _ROW_FORMATS and not four_bits:
            raise errors.invalid(
                "experts.fp8",
                f"d must have one of the formats {list(_ROW_FORMATS)}, or weights be "
                'in "mxfp4"',
                repr(d.format),
                "set dispatch_format of the config to one of them, or leave experts "
                "out",
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
            masters = _checked_masters("experts.fp8", gate_up, down)
            weights = quantized
        codes = None if weights is None else _checked_codes("experts.fp8", weights)
        shapes = codes
        if masters is not None:
            shapes = _shape_of_both(masters[0]), masters[1].shape
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
                f"gate_up must have the {groups} groups of d and the width of its "
                f"rows, {d.tokens.shape[1]}",
                shape,
                "pass the weights of this rank's experts",
                operand="gate_up",
            )
        name = None if weights is None else weights.format
        multiple = self.multiple_of(name, d.format)
        _require_multiple("experts.fp8", hidden, inner, multiple)
        if weights is None:
            assert masters is not None
            weights = quantize_weights(*masters, backward=True)
        with jax.named_scope("jax_ep.fp8"):
            if d.format in _CODED:
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
                port = d.tokens if d.format == "bf16" else d.grad_port
                values = jax.lax.stop_gradient(dequantize(d))
                rows = _operations.Rows(values, None)
                if name != "mxfp4":
                    rows = _operations.quantized_rows(values)
            static = _fp8.Static(
                d.rows_dtype,
                None,
                None,
                port is not None,
                jax.tree.map(lambda matrix: matrix.dtype, masters),
                select.operations(),
                wgrad,
            )
            biases = _fp8.Biases(gate_bias, up_bias, down_bias)
            return _fp8.apply(
                static, port, masters, biases, activation, rows, weights, d.group_sizes
            )


def quantize_weights(
    gate_up: GateUp,
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
        gate_up: `[L, H, 2, F]`, gate first, of a floating dtype of 16 bits or more; or
            a pair of gate and up `[L, H, F]`.
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
    given = _checked_masters(function, gate_up, down)
    _, inner, hidden = given[1].shape
    _require_multiple(function, hidden, inner, _quantized.multiple_of(format))

    run = _quantizing(type(select.operations()), format, backward)
    if not traces.is_tracing():
        # In one program, which keeps no intermediate array as large as the weights.
        run = jax.jit(run)
    return run(*given)


@functools.cache
def _quantizing(
    compute: type[Operations], name: WeightFormat, backward: bool
) -> Callable[[GateUp, jax.Array], QuantizedWeights]:
    """Returns the same function for equal arguments, so that it compiles once."""

    def run(gate_up: GateUp, down: jax.Array) -> QuantizedWeights:
        return compute().quantize_weights(gate_up, down, name, backward)

    def quantize(gate_up: GateUp, down: jax.Array) -> QuantizedWeights:
        with jax.named_scope("jax_ep.quantize_weights"):
            given = jax.lax.stop_gradient((gate_up, down))
            return batching.in_turn(run)(*given)

    return quantize


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


_MASTERS = orders.MATRICES._replace(
    dtype=operands.WIDE_FLOATS,
    cast="pass the masters, or all codes as one QuantizedWeights",
)


_PAIR = orders.PAIR._replace(dtype=operands.WIDE_FLOATS, cast=_MASTERS.cast)


def _checked_masters(
    function: str, gate_up: Any, down: Any
) -> tuple[GateUp, jax.Array]:
    if orders.is_pair(gate_up):
        given = {"gate": gate_up[0], "up": gate_up[1], "down": down}
        arrays = operands.checked(function, (_PAIR,), given)
        return (arrays["gate"], arrays["up"]), arrays["down"]
    given = {"gate_up": gate_up, "down": down}
    arrays = operands.checked(function, (_MASTERS,), given)
    return arrays["gate_up"], arrays["down"]


def _shape_of_both(gate_up: GateUp) -> tuple[int, ...]:
    """Returns the shape `[L, H, 2, F]` of gate and up together."""
    if not isinstance(gate_up, tuple):
        return gate_up.shape
    groups, hidden, inner = gate_up[0].shape
    return groups, hidden, 2, inner


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
    transposed = _quantized.transposed_layout(weights.format, *shapes)
    for name in _quantized.TRANSPOSED:
        if getattr(weights, name) is not None:
            # None exist for sizes that the kernels do not support: fail on any.
            wanted[name] = transposed.get(name, (jnp.uint8, ()))
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
