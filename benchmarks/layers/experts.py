"""Names the ways of `jax_ep.experts` to multiply, for layer.py and overlap.py.

All layers of a run use the same way, so that they differ only in the exchange.
"""

import functools

from jax_ep import experts
from jax_ep._experts import grouped

__all__ = ["available", "default", "grouped_matmul", "make"]

# By the kernels for Hopper.
grouped_matmul = functools.partial(grouped.matmul, products=grouped.HOPPER)

_FP8_MULTIPLE = 128  # of H and F


def available(name, sizes):
    """Whether the devices here can run a way, or "fp8", with these sizes."""
    hidden, inner = sizes["hidden"], sizes["inner"]
    if name == "fp8":  # plain JAX where there are no kernels
        return hidden % _FP8_MULTIPLE == inner % _FP8_MULTIPLE == 0
    return name != "hopper" or experts.hopper_obstacle(hidden, inner) is None


def default(sizes):
    """Returns the way that is fastest here for bfloat16 rows."""
    return "hopper" if available("hopper", sizes) else "ragged_dot"


def make(name, largest):
    """Returns the way's function; no group of this run has more than `largest` rows."""
    return experts.Padded(largest) if name == "padded" else getattr(experts, name)
