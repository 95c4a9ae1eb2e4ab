"""Prints how much each token format rounds, for the table of docs/formats.md.

    python -m benchmarks.calls.format_errors

For each format: the largest error of an element relative to its block's amax. It tries
every bfloat16 amax of one binade and, below each, every bfloat16 of 12 binades. The
error is the same in every binade as long as scale and elements are in range.
"""

import jax.numpy as jnp
import numpy as np

from jax_ep import formats

MANTISSAS = 128
BINADES = 12


def rows_of(block):
    """Returns float32 rows of two blocks; each block begins with its amax."""
    below = np.ldexp(
        1 + np.arange(MANTISSAS) / MANTISSAS, -np.arange(BINADES)[:, None]
    ).ravel()
    blocks = []
    for amax in 1 + np.arange(MANTISSAS) / MANTISSAS:
        elements = below[below <= amax]
        count = -(-len(elements) // (block - 1))
        filled = np.resize(elements, (count, block - 1))
        blocks.append(np.insert(filled, 0, amax, axis=1))
    whole = np.concatenate(blocks)
    # A token needs a multiple of 16 bytes of codes.
    even = np.resize(whole, (-(-len(whole) // 2) * 2, block))
    return even.reshape(-1, 2 * block).astype(np.float32)


def largest_error(name):
    """Returns the largest error of an element, relative to its block's amax."""
    block = formats.block(name)
    rows = rows_of(block)
    tokens = jnp.asarray(rows, jnp.bfloat16)
    values = formats.dequantize(*formats.quantize(tokens, name), name)
    blocks = rows.reshape(-1, block)
    errors = np.abs(np.asarray(values).reshape(blocks.shape) - blocks).max(axis=1)
    return float((errors / blocks[:, 0]).max())


def main():
    for name in formats.names():
        if formats.is_quantized(name):
            print(f"{name:>14} {largest_error(name):.4f}")


if __name__ == "__main__":
    main()
