"""Experts in fp8 and mxfp4, and their derivative: used by `jax_ep.experts.fp8`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._core import batching, errors
from jax_ep._core.literals import Dtype, Wgrad
from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import activations, kernels
from jax_ep._experts.activations import Activation
from jax_ep._experts.operations import Inner, Operations, Rows
from jax_ep._experts.quantized import QuantizedWeights, Which
from jax_ep._ops.remat import GATE_UP_NAME, named_bits


class Biases(NamedTuple):
    """`[L, F]`, `[L, F]` and `[L, H]`; each may be None."""

    gate: jax.Array | None
    up: jax.Array | None
    down: jax.Array | None


class Static(NamedTuple):
    """The static arguments of a program.

    Attributes:
        dtype: dtype of the result and of the cotangents of rows.
        activation: as in `Inner`.
        of_kernels: as in `Inner`.
        has_port: whether there is a `port` to take the cotangents of rows.
        masters: dtypes of the gradients of gate_up, or of gate and of up, and of down;
            None if there are none.
        operations: the operations to use.
        wgrad: what is multiplied for the gradients of masters.
    """

    dtype: Dtype
    activation: Callable[..., jax.Array] | None
    of_kernels: kernels.Activation | None
    has_port: bool
    masters: Any
    operations: Operations
    wgrad: Wgrad

    def inner(self, biases: Biases, consts: Any) -> Inner:
        """Returns the computation between gate/up and down."""
        given = biases.gate, biases.up, consts
        return Inner(*given, self.activation, self.of_kernels)


def apply(
    static: Static,
    port: jax.Array | None,
    masters: tuple[kernels.GateUp, jax.Array] | None,
    biases: Biases,
    activation: Activation | None,
    rows: Rows,
    weights: QuantizedWeights,
    sizes: jax.Array,
) -> jax.Array:
    """Applies experts to rows; the derivative is straight-through.

    Args:
        static: see `Static`; its activation is set here.
        port: `[N, H]`, which gets the cotangent of the rows; its values are not read.
        masters: gate_up, which may be a pair, and down, which get the cotangents of the
            weights; their values are not read either, so XLA leaves out what computes
            them.
        biases: see `Biases`.
        activation: a function of (gate, up) in float32; None means
            `silu(gate) * up`.
        rows: `[N, H]`.
        weights: the weights of L experts.
        sizes: int32 `[L]`.

    Returns:
        `[N, H]` of `static.dtype`.
    """
    given = (port, masters, biases, rows, weights, sizes)
    axes = frozenset().union(*map(varying, jax.tree.leaves(given)))
    consts: tuple[jax.Array, ...] = ()
    static = static._replace(of_kernels=activations.of_kernels(activation))
    if activation is not None:
        shape = rows.values.shape[0], weights.shapes[1][1]
        run, consts, axes = activations.closed(activation, shape, jnp.float32, axes)
        static = static._replace(activation=run)
    first = vary_alike(sorted(axes), axes, *given)
    return _apply(static, *first[:3], consts, *first[3:])


@jax.custom_jvp
def _only_once(value: jax.Array) -> jax.Array:
    """Returns an operand of a derivative, and refuses to be differentiated.

    Otherwise second derivatives would lack what goes straight through.
    """
    return value


@_only_once.defjvp
def _refuse_twice(*_: Any) -> Any:
    raise errors.unusable(
        "experts.fp8",
        "only first derivatives are defined",
        "use jax_ep.experts.auto where gradients are differentiated again",
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
    static: Static,
    port: Any,
    masters: Any,
    biases: Biases,
    consts: Any,
    rows: Rows,
    weights: QuantizedWeights,
    sizes: jax.Array,
) -> jax.Array:
    del port, masters

    def run(biases: Any, consts: Any, rows: Any, weights: Any, sizes: Any) -> Any:
        inner = static.inner(biases, consts)
        return static.operations.apply(
            rows, weights, sizes, inner, biases.down, static.dtype
        )

    return batching.in_turn(run)(biases, consts, rows, weights, sizes)


def _forward(
    static: Static,
    port: Any,
    masters: Any,
    biases: Biases,
    consts: Any,
    rows: Rows,
    weights: QuantizedWeights,
    sizes: jax.Array,
) -> Any:
    jax.tree.map(_only_once, (port, masters, biases))
    h, gate_up_rows = _gate_up(static, biases, consts, rows, weights, sizes)
    # All that the backward pass needs of this product has one name, so that a policy
    # that saves this name repeats no product.
    gate_up_rows = checkpoint_name(gate_up_rows, GATE_UP_NAME)
    h = jax.tree.map(lambda part: named_bits(part, GATE_UP_NAME), h)
    run = static.operations.fprop
    out = _matmul(run, h, weights, "down", sizes, static.dtype, biases.down)
    return out, (biases, consts, rows, h, gate_up_rows, weights, sizes)


def _backward(static: Static, kept: Any, cotangent: jax.Array) -> Any:
    biases, consts, rows, h, gate_up_rows, weights, sizes = kept
    cotangent = _only_once(cotangent)
    # Raises, because gradients would otherwise be missing silently.
    if not static.has_port:
        raise errors.invalid(
            "experts.fp8",
            "d must have the grad_port of its dispatch when it is differentiated",
            "None",
            "keep it, or stop the gradient at the result with jax.lax.stop_gradient",
            operand="d",
        )
    compute = static.operations
    # Cotangents meet weights in "mxfp4", which are frozen, as they are.
    plain = weights.format == "mxfp4"

    def down_dgrad(
        cotangent: Any,
        weights: Any,
        sizes: Any,
        biases: Any,
        consts: Any,
        gate_up_rows: Any,
    ) -> Any:
        inner = static.inner(biases, consts)
        operand = Rows(cotangent, None)
        if not plain:
            operand = compute.quantize_cotangents(cotangent, sizes)
        return compute.down_dgrad(operand, weights, sizes, inner, gate_up_rows)

    operand, to_gate_up_rows, to_consts = batching.in_turn(down_dgrad)(
        cotangent, weights, sizes, biases, consts, gate_up_rows
    )
    to_rows = _matmul(compute.dgrad, operand, weights, "gate_up", sizes, static.dtype)
    count, sides, columns = to_gate_up_rows.shape
    side_by_side = to_gate_up_rows.reshape(count, sides * columns)
    to_biases = _bias_grads(static, biases, side_by_side, cotangent, sizes)
    to_masters = None
    if static.masters is not None:
        first, second = static.masters
        if static.wgrad == "fp8":
            ready = batching.in_turn(compute.for_fp8_wgrad)
            rows, h = ready(rows, sizes), ready(h, sizes)
            cotangent = ready(Rows(cotangent, None), sizes)
            side_by_side = ready(Rows(side_by_side, None), sizes)
            to_gate_up_rows = side_by_side
        if isinstance(first, tuple):
            to_gate_up: Any = tuple(
                _wgrad(static, rows, to_gate_up_rows, sizes, dtype, side)
                for side, dtype in enumerate(first)
            )
        else:
            found = _wgrad(static, rows, side_by_side, sizes, first)
            to_gate_up = found.reshape(weights.shapes[0])
        to_masters = to_gate_up, _wgrad(static, h, cotangent, sizes, second)
    return to_rows, to_masters, to_biases, to_consts, None, None, None


_apply.defvjp(_forward, _backward)


def _gate_up(
    static: Static,
    biases: Biases,
    consts: Any,
    rows: Rows,
    weights: QuantizedWeights,
    sizes: jax.Array,
) -> Any:
    def run(biases: Any, consts: Any, rows: Any, weights: Any, sizes: Any) -> Any:
        inner = static.inner(biases, consts)
        return static.operations.gate_up(
            rows, weights, sizes, inner, True, static.dtype
        )

    return batching.in_turn(run)(biases, consts, rows, weights, sizes)


def _matmul(
    multiply: Callable[..., jax.Array],
    rows: Rows,
    weights: QuantizedWeights,
    which: Which,
    sizes: jax.Array,
    dtype: Any,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Calls `Operations.fprop` with a bias, or `Operations.dgrad` without."""

    def run(rows: Any, weights: Any, sizes: Any, bias: Any) -> Any:
        more = () if bias is None else (bias,)
        return multiply(rows, weights, which, sizes, dtype, *more)

    return batching.in_turn(run)(rows, weights, sizes, bias)


def _wgrad(
    static: Static,
    rows: Any,
    cotangent: Any,
    sizes: jax.Array,
    dtype: Any,
    side: int | None = None,
) -> jax.Array:
    compute = static.operations
    multiply = compute.fp8_wgrad if static.wgrad == "fp8" else compute.wgrad

    def run(rows: Any, cotangent: Any, sizes: Any) -> Any:
        return multiply(rows, cotangent, sizes, dtype, side)

    return batching.in_turn(run)(rows, cotangent, sizes)


def _bias_grads(
    static: Static,
    biases: Biases,
    to_gate_up_rows: jax.Array,
    cotangent: jax.Array,
    sizes: jax.Array,
) -> Biases:
    """Returns the gradients of biases, from the cotangents of gate and up and of rows.

    Gate and up are side by side, and are summed together: a part of the columns would
    have to be copied for a kernel.
    """
    run = batching.in_turn(static.operations.bias_grad)
    sides: list[Any] = [None, None]
    if biases.gate is not None or biases.up is not None:
        sides = jnp.split(run(to_gate_up_rows, sizes), 2, axis=1)
    down = None if biases.down is None else run(cotangent, sizes)

    def of(bias: Any, found: Any) -> Any:
        return None if bias is None else found.astype(bias.dtype)

    return Biases(*map(of, biases, (*sides, down)))
