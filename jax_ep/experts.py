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

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ep._core import errors, operands, threads
from jax_ep._core.operands import Operand
from jax_ep._experts import (
    biases,
    devices,
    grouped,
    of_quantized,
    of_rows,
)
from jax_ep._experts.activations import Activation as Activation
from jax_ep._experts.activations import geglu as geglu
from jax_ep._experts.activations import relu_squared as relu_squared
from jax_ep._experts.activations import swiglu as swiglu
from jax_ep._experts.activations import swiglu_clamped as swiglu_clamped
from jax_ep._experts.interface import Case
from jax_ep._experts.of_quantized import prepare as prepare
from jax_ep._experts.of_quantized import quantize_weights as quantize_weights
from jax_ep._experts.of_rows import Padded as Padded
from jax_ep._experts.quantized import QuantizedWeights as QuantizedWeights

__all__ = [
    "Padded",
    "QuantizedWeights",
    "add_bias",
    "auto",
    "auto_is_hopper",
    "fp8",
    "geglu",
    "grouped_matmul",
    "hopper",
    "hopper_obstacle",
    "portable",
    "prepare",
    "quantize_weights",
    "ragged_dot",
    "ragged_dot_is_dense",
    "relu_squared",
    "swiglu",
    "swiglu_clamped",
    "takes_dispatched",
]

_Marked = TypeVar("_Marked", bound=Callable[..., Any])

auto: of_rows.Auto = of_rows.Auto()
ragged_dot: of_rows.RaggedDot = of_rows.RaggedDot()
hopper: of_rows.Hopper = of_rows.Hopper()
portable: of_rows.Portable = of_rows.Portable()
fp8: of_quantized.Fp8 = of_quantized.Fp8()


def takes_dispatched(experts: _Marked) -> _Marked:
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


def _remedy_of_product(found: operands.Found) -> str:
    rows, matrices, _ = found.shapes
    if len(matrices) == 3 and rows[1:] == matrices[2:]:
        return "pass transposed=True if the matrices have the contracted dimension last"
    return "give them the same groups, and A columns"


_FLOATS, _SIZES = operands.WIDE_FLOATS, "int32"
_MULTIPLIED = (
    Operand(
        "rows, matrices and group_sizes",
        "[N, A], [L, A, B] and [L]",
        (_FLOATS, _FLOATS, _SIZES),
        _remedy_of_product,
    ),
)
_TRANSPOSED = (
    _MULTIPLIED[0]._replace(
        shapes="[N, A], [L, B, A] and [L]",
        remedy="give them the same groups, and A columns",
    ),
)
_BIASED = (
    Operand(
        "rows, bias and group_sizes",
        "[N, F], [L, F] and [L]",
        (_FLOATS, _FLOATS, _SIZES),
        "pass the rows and the biases of this rank's experts",
    ),
)


def grouped_matmul(
    rows: jax.Array,
    matrices: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool = False,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix, on any device.

    It is what `auto` multiplies by: kernels on GPUs of compute capability 8.0 and
    newer, a loop over tiles of rows on CPUs. Its cost follows the rows that groups
    hold. It has reverse-mode derivatives of any order and works under `vmap`.

    Unlike with `jax.lax.ragged_dot`, rows past the groups may hold anything, even NaN,
    their results are unspecified, and their cotangents are ignored. So a sum over all
    rows, such as the gradient of a scalar that multiplies them, must leave these rows
    out by `jnp.where`. There is no forward-mode derivative.

    Args:
        rows: `[N, A]`, bfloat16, float16, float32 or float64, grouped.
        matrices: `[L, A, B]`, or with `transposed` `[L, B, A]`, cast to the dtype of
            the rows.
        group_sizes: int32 `[L]`, rows of each group.
        transposed: whether the matrices have the contracted dimension last.
        preferred_element_type: dtype of the result: None for that of the rows, or a
            wider one, to which the sums are not rounded before.

    Returns:
        `[N, B]`.

    Raises:
        ValueError, TypeError: while tracing, if shapes or dtypes are not as described.
    """
    function = "experts.grouped_matmul"
    given = {"rows": rows, "matrices": matrices, "group_sizes": group_sizes}
    table = _TRANSPOSED if transposed else _MULTIPLIED
    arrays = operands.checked(function, table, given)
    rows, matrices, group_sizes = arrays.values()
    case = Case(jax.local_devices()[0], rows.dtype.name)
    out = jnp.dtype(preferred_element_type or rows.dtype)
    errors.require(
        jnp.promote_types(out, rows.dtype) == out,
        function,
        f"preferred_element_type must hold {rows.dtype}",
        out,
        "leave it out, or cast the result",
    )
    products = of_rows.first(case).products(case)
    return grouped.matmul_to(rows, matrices, group_sizes, products, transposed, out)


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
    given = {"rows": rows, "bias": bias, "group_sizes": group_sizes}
    operands.checked("experts.add_bias", _BIASED, given)
    case = Case(jax.local_devices()[0], rows.dtype.name)
    products = of_rows.first(case).products(case)
    return biases.add(rows, bias, group_sizes, products)


def auto_is_hopper(
    dtype: DTypeLike, hidden_size: int, intermediate_size: int, device: Any = None
) -> bool:
    """Whether `auto` uses the kernels of `hopper`.

    Args:
        dtype: dtype of the rows.
        hidden_size: H, which may be any.
        intermediate_size: F per rank, which may be any.
        device: the `jax.Device` to run on; None means this process's first.
    """
    del hidden_size, intermediate_size
    device = device or jax.local_devices()[0]
    return hopper.obstacle(Case(device, jnp.dtype(dtype).name)) is None


def hopper_obstacle(
    hidden_size: int, intermediate_size: int, device: Any = None
) -> str | None:
    """Returns "<what hopper needs>, got <what there is>", or None if it can run.

    Args:
        hidden_size: H, which may be any.
        intermediate_size: F per rank, which may be any.
        device: the `jax.Device` to run on; None means this process's first.
    """
    del hidden_size, intermediate_size
    return devices.device_obstacle(device)


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
