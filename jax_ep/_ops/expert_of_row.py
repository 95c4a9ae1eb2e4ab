"""expert_of_row: the group of each row of a dispatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep._core import errors
from jax_ep._core.types import Dispatched


def expert_of_row(d: Dispatched) -> jax.Array:
    """Returns the group of each row, for example to look up a value of its expert.

    To add biases, call `jax_ep.experts.add_bias`, which sums their gradients well.
    Padding rows belong to the group that they pad. Some grouped matmuls may leave NaN
    in rows past the last group. Select before you use such rows, or NaN gradients would
    reach the last group.

    Args:
        d: the `Dispatched` of one rank.

    Returns:
        int32 `[N]`, in [0, G); G - 1 for rows past the last group. With a fused shared
        expert, group 0 is that expert.

    Raises:
        TypeError: `d` is not a `Dispatched`.
        ValueError: `d` holds several ranks.
    """
    require_dispatched("expert_of_row", d)
    require_one_rank("expert_of_row", d, "call it inside jax.shard_map")
    with jax.named_scope("jax_ep.expert_of_row"):
        groups = d.group_sizes.shape[0]
        group = group_of_row(d.row_offsets[1:], d.src_info.shape[0])
        return jnp.minimum(group, groups - 1)


def group_of_row(ends: jax.Array, rows: int) -> jax.Array:
    """Returns int32 `[rows]`, the group of each row; G for rows past the last one.

    Args:
        ends: int32 `[G]`, the row after the last one of each group.
        rows: N.
    """
    index = jnp.arange(rows, dtype=jnp.int32)
    # One fused comparison of all pairs; the default is a loop of small kernels.
    group = jnp.searchsorted(ends, index, side="right", method="compare_all")
    return group.astype(jnp.int32)


def require_dispatched(function: str, d: Dispatched) -> None:
    """Raises TypeError unless `d` is a `Dispatched`."""
    if not isinstance(d, Dispatched):
        raise errors.invalid(
            function,
            "d must be the Dispatched that jax_ep.dispatch returned",
            type(d).__name__,
            "pass the Dispatched, not its arrays",
            operand="d",
            kind=TypeError,
        )


def require_one_rank(function: str, d: Dispatched, remedy: str) -> None:
    """Raises ValueError if `d` holds the rows of several ranks."""
    # Each rank has one more offset than groups.
    ranks = d.row_offsets.shape[0] - d.group_sizes.shape[0]
    if ranks != 1:
        raise errors.invalid(
            function,
            "d must hold the rows of one rank",
            f"those of {ranks} ranks",
            remedy,
            operand="d",
        )
