"""Router logits: float32 products of tokens and the router's kernel.

GPUs multiply float32 without tensor cores, several times slower than bfloat16. But the
product of two bfloat16 numbers is exact in float32, in which tensor cores accumulate,
and any float32 number is the sum of three bfloat16 numbers. So matmuls of bfloat16
parts give a product with the accuracy of float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._core.varying import vary_alike, varying

# Three parts of 8 bits make the 24 bits of a float32 significand.
_PARTS = 3
# Up to this many tokens, one float32 product takes less time than products of a float32
# kernel's parts (benchmarks/layers/routers.py).
FEW_TOKENS = 8
# The lowest major compute capability whose tensor cores take bfloat16.
_CAPABILITY = 8


def logits_of(tokens: jax.Array, kernel: jax.Array, device: Any) -> jax.Array:
    """Returns the logits of tokens, computed in the way that is fast on `device`.

    Args:
        tokens: `[n, H]` of any floating dtype.
        kernel: `[H, E]` of any floating dtype.
        device: a `jax.Device` that runs it.

    Returns:
        float32 `[n, E]`.
    """
    pays = tokens.shape[0] > FEW_TOKENS or kernel.dtype == jnp.bfloat16
    if pays and tokens.dtype == jnp.bfloat16 and _multiplies_bfloat16(device):
        return by_parts(tokens, kernel)
    highest = jax.lax.Precision.HIGHEST
    left, right = (each.astype(jnp.float32) for each in (tokens, kernel))
    return jnp.dot(left, right, precision=highest)


def _multiplies_bfloat16(device: Any) -> bool:
    """Whether `device` has tensor cores that multiply bfloat16."""
    # On AMD's GPUs this is not a number but a name such as gfx942.
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return device.platform == "gpu" and major.isdigit() and int(major) >= _CAPABILITY


def by_parts(tokens: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns float32 `tokens @ kernel`, computed by products of bfloat16 parts.

    Reverse-mode derivatives of any order work.

    Args:
        tokens: bfloat16 `[n, H]`.
        kernel: `[H, E]` of any floating dtype.

    Returns:
        float32 `[n, E]`.
    """
    counts = (1, 1 if kernel.dtype == jnp.bfloat16 else _PARTS)
    # Gradients of a bfloat16 kernel are summed over ranks before they are rounded.
    kernel = jnp.asarray(kernel, jnp.float32)
    # check_vma requires that gradients vary over the same axes as the product.
    axes = varying(tokens) | varying(kernel)
    operands = vary_alike(sorted(axes), axes, tokens, kernel)
    return _product(*operands, counts)


# Its derivatives are products of the same kind, so derivatives of any order work.
@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(left: Any, right: Any, counts: tuple[int, int]) -> Any:
    """Multiplies `[M, K]` by `[K, N]`, to float32 `[M, N]`.

    `counts` has the number of parts of each: 1 for values that are exact in bfloat16.
    """
    lefts, rights = map(_split, (left, right), counts)
    if len(lefts) == 1:
        return _beside(lefts[0], rights)
    return _along(lefts, rights)


def _forward(left: Any, right: Any, counts: tuple[int, int]) -> Any:
    return _product(left, right, counts), (left, right)


def _backward(counts: tuple[int, int], kept: Any, cotangent: Any) -> Any:
    left, right = kept
    to_left: Any = _product(cotangent, right.T, (_PARTS, counts[1]))
    to_right: Any = _product(left.T, cotangent, (counts[0], _PARTS))
    return to_left.astype(left.dtype), to_right.astype(right.dtype)


_product.defvjp(_forward, _backward)


def _split(values: jax.Array, count: int) -> list[jax.Array]:
    """Returns bfloat16 arrays that sum to `values`, largest first.

    Infinities and NaN are in the first part; the other parts are 0 there.
    """
    if count == 1:
        return [values.astype(jnp.bfloat16)]
    finite = jnp.isfinite(values)
    rest = jnp.where(finite, values, 0)
    parts = []
    for _ in range(count):
        # Truncates bits, because XLA may drop a cast to bfloat16 and back. Truncation
        # also keeps the largest values finite.
        bits = jax.lax.bitcast_convert_type(rest, jnp.uint32)
        part = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    parts[0] = jnp.where(finite, parts[0], values.astype(jnp.bfloat16))
    return parts


def _beside(left: jax.Array, rights: list[jax.Array]) -> jax.Array:
    """Multiplies `left` by all parts in one matmul, then adds the products."""
    found = _dot(left, jnp.concatenate(rights, axis=1))
    first, *others = jnp.split(found, len(rights), axis=1)
    if not others:
        return first
    middle, last = others
    # An infinity in `left` times a part that is 0 is NaN.
    return jnp.where(jnp.isfinite(first), last + middle + first, first)


def _along(lefts: list[jax.Array], rights: list[jax.Array]) -> jax.Array:
    """Sums the products of pairs of parts within one matmul.

    The products of the smallest parts are left out: they affect only about the last bit
    of float32.
    """
    pairs = [
        (i, small - i)
        for small in reversed(range(_PARTS))  # the smallest products first
        for i in range(small + 1)
        if i < len(lefts) and small - i < len(rights)
    ]
    # An infinity must meet only the other side's first part, since others may be 0.
    left = [lefts[i] if j == 0 else _finite(lefts[i]) for i, j in pairs]
    right = [rights[j] if i == 0 else _finite(rights[j]) for i, j in pairs]
    return _dot(jnp.concatenate(left, axis=1), jnp.concatenate(right, axis=0))


def _finite(part: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(part), part, jnp.zeros_like(part))


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    # Explicit, because the user may have set a default that suits other dtypes.
    precision = jax.lax.Precision.DEFAULT
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)
