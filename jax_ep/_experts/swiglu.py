"""SwiGLU experts with the activation inside the matmuls, by kernels that have it.

The kernel of gate_up applies SwiGLU to its float32 sums, and the kernel for the
backward pass of down applies SwiGLU's derivative to the float32 cotangents. The kernels
are differentiated as the same formula in grouped matmuls, so derivatives of any order
work.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._core import batching
from jax_ep._experts import grouped
from jax_ep._ops.remat import GATE_UP_NAME


def apply(
    rows: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    sizes: jax.Array,
    products: grouped.Fused,
) -> jax.Array:
    """Applies experts; rows past the groups are unspecified, and may hold anything.

    Args:
        rows: `[N, H]`, of a dtype that the kernels take.
        gate_up: `[L, H, 2, F]`, of any floating dtype: it is multiplied in the dtype of
            the rows, and gets gradients in its own.
        down: `[L, F, H]`, likewise.
        sizes: int32 `[L]`.
        products: the kernels.

    Returns:
        `[N, H]` in the dtype of the rows.
    """
    hidden = rows.shape[1]
    # Here, and not around each kernel, so that nothing between them is copied.
    rows, gate_up = grouped.aligned(rows, 1), grouped.aligned(gate_up, 1, 3)
    down = grouped.aligned(down, 1, 2)
    dtypes = gate_up.dtype, down.dtype
    given = grouped.varied(rows, gate_up, down, sizes)
    return grouped.cut(_apply(*given, products, dtypes), hidden)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _apply(
    rows: Any, gate_up: Any, down: Any, sizes: Any, products: Any, dtypes: Any
) -> Any:
    del dtypes
    gate_up, down = gate_up.astype(rows.dtype), down.astype(rows.dtype)
    return batching.in_turn(products.experts)(rows, gate_up, down, sizes)


def _forward(
    rows: Any, gate_up: Any, down: Any, sizes: Any, products: Any, dtypes: Any
) -> Any:
    del dtypes
    gate_up, down = gate_up.astype(rows.dtype), down.astype(rows.dtype)
    # Both have one name, so that a policy that saves it repeats no product.
    hidden: Any = _hidden(rows, gate_up, sizes, products)
    h, gate_up_rows = (checkpoint_name(part, GATE_UP_NAME) for part in hidden)
    out = grouped.fprop(h, down, sizes, products)
    return out, (rows, gate_up, down, sizes, h, gate_up_rows)


def _backward(products: Any, dtypes: Any, kept: Any, cotangent: Any) -> Any:
    rows, gate_up, down, sizes, h, gate_up_rows = kept
    back: Any = _down_dgrad(cotangent, down, gate_up_rows, sizes, products)
    to_gate_up_rows = _side_by_side(back)
    to_rows = grouped.dgrad(to_gate_up_rows, _side_by_side(gate_up), sizes, products)
    to_gate_up: Any = grouped.wgrad(rows, to_gate_up_rows, sizes, products, dtypes[0])
    to_down = grouped.wgrad(h, cotangent, sizes, products, dtypes[1])
    return to_rows, to_gate_up.reshape(gate_up.shape), to_down, None


_apply.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _hidden(rows: Any, gate_up: Any, sizes: Any, products: Any) -> Any:
    """Returns h `[N, F]`, and gate and up `[N, 2, F]`."""
    run = partial(products.gate_up, keep=True)
    return batching.in_turn(run)(rows, gate_up, sizes)


def _hidden_forward(rows: Any, gate_up: Any, sizes: Any, products: Any) -> Any:
    found: Any = _hidden(rows, gate_up, sizes, products)
    h, gate_up_rows = found
    return (h, gate_up_rows), (rows, gate_up, sizes, gate_up_rows)


def _hidden_backward(products: Any, kept: Any, cotangents: Any) -> Any:
    rows, gate_up, sizes, gate_up_rows = kept
    to_h, to_gate_up_rows = cotangents
    back = _side_by_side(_swiglu_dgrad(to_h, gate_up_rows) + to_gate_up_rows)
    to_rows = grouped.dgrad(back, _side_by_side(gate_up), sizes, products)
    to_gate_up: Any = grouped.wgrad(rows, back, sizes, products, gate_up.dtype)
    return to_rows, to_gate_up.reshape(gate_up.shape), None


_hidden.defvjp(_hidden_forward, _hidden_backward)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _down_dgrad(
    cotangent: Any, down: Any, gate_up_rows: Any, sizes: Any, products: Any
) -> Any:
    """Returns the cotangents of gate and up, from those of down's rows."""
    run = batching.in_turn(products.down_dgrad)
    return run(cotangent, down, gate_up_rows, sizes)


def _down_dgrad_forward(
    cotangent: Any, down: Any, gate_up_rows: Any, sizes: Any, products: Any
) -> Any:
    given = (cotangent, down, gate_up_rows, sizes)
    return _down_dgrad(*given, products), given


def _down_dgrad_backward(products: Any, kept: Any, cotangents: Any) -> Any:
    *given, sizes = kept

    def plain(cotangent: Any, down: Any, gate_up_rows: Any) -> Any:
        to_h: Any = grouped.dgrad(cotangent, down, sizes, products)
        return _swiglu_dgrad(to_h, gate_up_rows)

    _, back = jax.vjp(plain, *given)
    return *back(cotangents), None


_down_dgrad.defvjp(_down_dgrad_forward, _down_dgrad_backward)


def _swiglu_dgrad(to_h: jax.Array, gate_up_rows: jax.Array) -> jax.Array:
    """Returns the cotangents of gate and up `[N, 2, F]`, from those of h `[N, F]`."""
    gate, up = (gate_up_rows[:, side].astype(jnp.float32) for side in (0, 1))
    to = to_h.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    to_gate = to * up * (sigmoid + silu * (1 - sigmoid))
    return jnp.stack([to_gate, to * silu], 1).astype(gate_up_rows.dtype)


def _side_by_side(values: jax.Array) -> jax.Array:
    """Merges the last two dimensions: gate's columns, then up's."""
    *leading, sides, columns = values.shape
    return values.reshape(*leading, sides * columns)
