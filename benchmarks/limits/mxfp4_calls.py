"""Calls the kernels for "mxfp4" weights once per product, for kernel_profile.py.

    python -m benchmarks.limits.mxfp4_calls ROWS...

Random codes of 64 experts of hidden 7168 and inner 2048, and tokens of 8 distinct
experts each, as in benchmarks/layers/decode.py. Prints a report in JSON whose results
name the products in the order of the calls.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.layers import decode, decode_steps
from jax_ep._experts import four_bits, kernels

SCALES = 118, 124  # powers of two from 2^-9 on, as those of weights


def random_tiles(key, matrix):
    """Tiles of a matrix of this shape, with any codes."""
    shape = four_bits.shape(matrix)
    codes, scales = jax.random.split(key)
    count = four_bits.COLUMNS
    tail = jax.random.randint(scales, (*shape[:-1], count), *SCALES, jnp.int32)
    made = jax.random.bits(codes, shape, jnp.uint8)
    return made.at[..., -count:].set(tail.astype(jnp.uint8))


def call(sizes, rows):
    """Multiplies `rows` rows by gate and up, and what comes out by down."""
    groups, hidden, inner = sizes.groups, sizes.hidden, sizes.inner
    up, down, values = jax.random.split(jax.random.key(0), 3)
    up = jax.jit(random_tiles, static_argnums=1)(up, (groups, hidden, 2, inner))
    down = jax.jit(random_tiles, static_argnums=1)(down, (groups, inner, hidden))
    drawn = decode_steps.draw_sizes(np.random.default_rng(0), sizes, rows)
    given = jnp.asarray(drawn)
    x = jax.random.normal(values, (rows, hidden), jnp.bfloat16)
    h = kernels.four_bits(x, None, up, given, inner, jnp.bfloat16, True)
    y = kernels.four_bits(h, None, down, given, hidden, jnp.bfloat16, False)
    return jax.block_until_ready(y)


def main(words=None):
    rows = [int(word) for word in (sys.argv[1:] if words is None else words)]
    products = []
    for count in rows:
        call(decode.SIZES, count)
        products += [
            {"case": f"{count} rows", "product": f"mxfp4 {name}"}
            for name in ("gate_up", "down")
        ]
    device = jax.devices()[0].device_kind
    print(json.dumps({"device": device, "count": 1, "results": products}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
