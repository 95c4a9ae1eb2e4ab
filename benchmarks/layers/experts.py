"""The ways of `jax_ep.experts` to multiply, by name, for layer.py and overlap.py.

All layers of a run use the same one, so that they differ only in the exchange.
"""

from jax_ep import experts
from jax_ep.experts import grouped_matmul

__all__ = ["available", "default", "grouped_matmul", "make"]

_FP8_MULTIPLE = 128  # of H and F


def available(name, sizes):
    """Whether the devices here can run it, or "fp8", for these sizes."""
    hidden, inner = sizes["hidden"], sizes["inner"]
    if name == "fp8":  # plain JAX where there are no kernels
        return hidden % _FP8_MULTIPLE == inner % _FP8_MULTIPLE == 0
    return name != "hopper" or experts.hopper_obstacle(hidden, inner) is None


def default(sizes):
    """What `jax_ep.experts.auto` is here, for bfloat16 rows."""
    dense = experts.ragged_dot_is_dense("bfloat16")
    return "hopper" if dense and available("hopper", sizes) else "ragged_dot"


def make(name, largest):
    """The function; `largest` is the most rows that any group has in this run."""
    return experts.Padded(largest) if name == "padded" else getattr(experts, name)
