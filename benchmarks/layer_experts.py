"""SwiGLU experts on rows grouped by expert, in several ways. For layer.py.

All layers of a run use the same one, so that they differ in the exchange alone. Each
is a function of (rows [N, H], gate_up [L, H, 2, F], down [L, F, H], group_sizes [L])
as `jax_ep.moe_ffn` takes it; rows must be finite, those past the last group too.

* "ragged_dot": `jax.lax.ragged_dot`, what jax_ep has by default. Where XLA has no
  grouped matmul for it, it multiplies every row with every expert's matrix.
* "mosaic": JAX's own grouped matmuls for Hopper (`jax.experimental.pallas.ops.gpu`),
  with their derivatives.
* "padded": every group padded to the largest of the run, then XLA's batched matmul.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ragged

NAMES = ("ragged_dot", "mosaic", "padded")
_TILES = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
}


def available(name, sizes):
    """Whether this machine's devices can run it for these sizes."""
    if name != "mosaic":
        return True
    device = jax.devices()[0]
    return (
        device.platform == "gpu"
        and str(getattr(device, "compute_capability", "")) == "9.0"
        and sizes["hidden"] % 128 == 0
        and sizes["inner"] % 128 == 0
    )


def make(name, largest):
    """The function; `largest` is the most rows that any group has in this run."""
    if name == "padded":
        return functools.partial(_padded, largest)
    matmul = grouped_matmul if name == "mosaic" else jax.lax.ragged_dot
    return functools.partial(_sparse, matmul)


def _grouped(which, columns):
    from jax.experimental.pallas.ops.gpu import (
        ragged_dot_mgpu,
        transposed_ragged_dot_mgpu,
    )

    found = {
        "rows": ragged_dot_mgpu.ragged_dot,
        "weights": transposed_ragged_dot_mgpu.transposed_ragged_dot,
    }
    # Tiles of neighbouring columns run side by side and share what they read.
    side_by_side = math.gcd(columns // _TILES["block_n"], 8)
    return functools.partial(found[which], grid_block_n=side_by_side, **_TILES)


@jax.custom_vjp
def grouped_matmul(rows, weights, group_sizes):
    """[N, A] by [L, A, B]; rows past the last group come out unspecified."""
    multiply = _grouped("rows", weights.shape[2])
    return multiply(rows, weights, group_sizes=group_sizes)


def _grouped_forward(rows, weights, group_sizes):
    return grouped_matmul(rows, weights, group_sizes), (rows, weights, group_sizes)


def _grouped_backward(kept, cotangent):
    rows, weights, sizes = kept
    multiply = _grouped("rows", weights.shape[1])
    to_rows = multiply(cotangent, weights, group_sizes=sizes, transpose_rhs=True)
    multiply = _grouped("weights", weights.shape[2])
    return to_rows, multiply(rows, cotangent, group_sizes=sizes), None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def swiglu(both):
    """Gate and up, side by side in the last dimension, to what down takes."""
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _sparse(matmul, rows, gate_up, down, group_sizes):
    groups, hidden = gate_up.shape[:2]
    both = matmul(rows, gate_up.reshape(groups, hidden, -1), group_sizes)
    # Tiles of the last group are read beyond it, and 0 * NaN is NaN.
    real = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
    return matmul(swiglu(jnp.where(real[:, None], both, 0)), down, group_sizes)


def _places(group_sizes, count, largest):
    """Which row each padded place takes, [L * largest], and the place of each row."""
    starts = jnp.cumsum(group_sizes) - group_sizes
    place = jnp.arange(largest, dtype=jnp.int32)
    row = jnp.minimum(starts[:, None] + place, count - 1)
    filled = place < group_sizes[:, None]
    index = jnp.arange(count, dtype=jnp.int32)
    group = jnp.searchsorted(
        starts + group_sizes, index, side="right", method="compare_all"
    )
    group = jnp.minimum(group, group_sizes.size - 1).astype(jnp.int32)
    at = group * largest + jnp.clip(index - starts[group], 0, largest - 1)
    return row.reshape(-1), filled, at


def _padded(largest, rows, gate_up, down, group_sizes):
    groups, hidden = gate_up.shape[:2]
    row, filled, at = _places(group_sizes, rows.shape[0], largest)
    padded = ragged.gather(rows, row, at[:, None]).reshape(groups, largest, hidden)
    padded = jnp.where(filled[:, :, None], padded, 0)
    both = jnp.einsum("lnh,lhf->lnf", padded, gate_up.reshape(groups, hidden, -1))
    out = jnp.einsum("lnf,lfh->lnh", swiglu(both), down)
    return ragged.gather(out.reshape(-1, hidden), at, row[:, None])
