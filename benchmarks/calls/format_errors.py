"""What each token format loses, for the table of docs/formats.md.

    python -m benchmarks.calls.format_errors

Every bfloat16 amax of one binade, and below each every bfloat16 down to 2**-12 of it:
the largest error of an element, relative to its block's amax. Where scale and elements
are inside their ranges, this is the same in every binade.
"""

import jax.numpy as jnp
import numpy as np

from jax_ep import formats

MANTISSAS = 128
BINADES = 12


def rows_of(block):
    """Blocks in float32 that begin with their amax, and whole rows of them."""
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
    # A token is a multiple of 16 bytes of codes.
    even = np.resize(whole, (-(-len(whole) // 2) * 2, block))
    return even.reshape(-1, 2 * block).astype(np.float32)


def largest_error(name):
    """Of an element, relative to the amax of its block."""
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
