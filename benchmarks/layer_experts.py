"""The ways of `jax_ep.experts` to multiply, by name, for layer.py and overlap.py.

All layers of a run use the same one, so that they differ in the exchange alone. Rows
must be finite, those past the last group too.
"""

from jax_ep import experts
from jax_ep.experts import grouped_matmul

__all__ = ["available", "grouped_matmul", "make"]


def available(name, sizes):
    """Whether this machine's devices can run it for these sizes."""
    obstacle = experts.mosaic_obstacle(sizes["hidden"], sizes["inner"])
    return name != "mosaic" or obstacle is None


def make(name, largest):
    """The function; `largest` is the most rows that any group has in this run."""
    return experts.Padded(largest) if name == "padded" else getattr(experts, name)
