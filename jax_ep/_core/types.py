"""The pytrees that dispatch returns and combine takes.

Global arrays stack the fields of all ranks on dimension 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jax_ep._core import pytrees
from jax_ep._core.literals import Dtype, Format, ScaleLayout

STATIC_FIELDS = ("format", "rows_dtype", "scale_layout")  # of Dispatched


@pytrees.register(static=("key",))
@dataclasses.dataclass(frozen=True)
class Route:
    """Records where every token went; combine and gradients need it. Opaque to users.

    The fields from `row_offsets` to `num_invalid` are those of `Dispatched`, for
    further dispatches along the route.

    Attributes:
        slot_of: int32 `[n, K]`, at the source rank: rank * n + slot of each (token, k),
            -1 if the id was -1 or invalid.
        row_of: int32 `[R, n, K]`, at the expert rank: output row of each (source rank,
            slot, k), -1 if there is none or it was dropped.
        row_slot: int32 `[N]`, at the expert rank: source rank * n + slot of each row,
            -1 in padding and tail.
        slot_counts: int32 `[R]`, slots received from each source rank.
        row_offsets: int32 `[G + 1]`.
        expert_counts: int32 `[G]`.
        src_info: int32 `[N, 3]`.
        num_dropped: int32 `[1]`.
        num_invalid: int32 `[1]`.
        key: key of the handle that made it (static).
    """

    slot_of: jax.Array
    row_of: jax.Array
    row_slot: jax.Array
    slot_counts: jax.Array
    row_offsets: jax.Array
    expert_counts: jax.Array
    src_info: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    key: int


@pytrees.register(static=STATIC_FIELDS)
@dataclasses.dataclass(frozen=True)
class Dispatched:
    """The rows that one rank received, grouped by local expert.

    N is the handle's `recv_capacity`, G the number of groups of the grouped matmul.

    Attributes:
        tokens: `[N, H]`, rows ordered by local expert, then source rank, source token,
            k; for 4-bit formats `[N, H / 2]` with the even element in the low nibble.
        scales: None for "bf16", else `[N, H / block]`, or in the config's
            `scale_layout` (docs/formats.md).
        row_offsets: int32 `[G + 1]`, group g is rows `[row_offsets[g],
            row_offsets[g + 1])`.
        group_sizes: int32 `[G]`, `diff(row_offsets)`, for `jax.lax.ragged_dot`.
        expert_counts: int32 `[G]`, rows routed to each group, without padding and
            before any drop.
        expert_ids: int32 `[G]`, local expert of each group.
        src_info: int32 `[N, 3]`, (source rank, source token, k) of each row, -1 in
            padding and tail.
        router_weights: float32 `[N]`, each row's weight, 0 in padding and tail.
        num_dropped: int32 `[1]`, rows that this rank dropped because N was too small.
        num_invalid: int32 `[1]`, ids outside [-1, E) among this rank's tokens.
        route: opaque input of `combine` and of the backward passes.
        grad_port: None for "bf16", else zeros `[N, H]` in the token dtype, through
            which the cotangent of `jax_ep.dequantize` enters the backward pass.
        scales_offsets: int32 `[G]` for tiled scales, else None.
        input_scale: float32 `[1]` for "nvfp4", else None.
        format: the `dispatch_format` of tokens and scales (static).
        rows_dtype: dtype of the tokens before encoding (static).
        scale_layout: layout of `scales` (static).
    """

    tokens: jax.Array
    scales: jax.Array | None
    row_offsets: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    expert_ids: jax.Array
    src_info: jax.Array
    router_weights: jax.Array
    num_dropped: jax.Array
    num_invalid: jax.Array
    route: Route
    grad_port: jax.Array | None
    scales_offsets: jax.Array | None = None
    input_scale: jax.Array | None = None
    format: Format = "bf16"
    rows_dtype: Dtype = "bfloat16"
    scale_layout: ScaleLayout = "rows"


# The type of `experts=` of moe_ffn and the layers: (rows, gate_up, down, group_sizes)
# -> rows, or with `jax_ep.experts.takes_dispatched` (d, gate_up, down) -> rows.
ExpertsFunction = (
    Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    | Callable[[Dispatched, jax.Array, jax.Array], jax.Array]
)
