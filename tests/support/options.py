"""What the tests of options share: modes, their operands and their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import jax_ep
from support import helpers, oracle

FUSED, SKIP = {"fused_shared_expert": True}, {"skip_a2a": True}
SOURCE, NONE = {"reduce": "source"}, {"reduce": "none"}
MODES: dict[str, dict[str, Any]] = {
    "source": SOURCE,
    "none": NONE,
    "shared": FUSED,
    "shared_source": FUSED | SOURCE,
    "local": SKIP,
    "local_source": SKIP | SOURCE,
    "local_none": SKIP | NONE,
    "local_shared": SKIP | FUSED,
    "local_shared_source": SKIP | FUSED | SOURCE,
}


def split_dispatch(ep: Any, *args: Any) -> Any:
    """jax_ep.dispatch in halves."""
    return jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, *args))


def split_combine(ep: Any, *args: Any, **keywords: Any) -> Any:
    """jax_ep.combine in halves."""
    return jax_ep.combine_wait(jax_ep.combine_async(ep, *args, **keywords))


# Each is a dispatch and a combine.
WHOLE, SPLIT = (jax_ep.dispatch, jax_ep.combine), (split_dispatch, split_combine)
# Options that skip_a2a refuses, as it sends nothing.
_OF_SENDING = ("combine_dtype", "combine_format", "grad_format", "overlap")


def changes(mode: str, given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `given` and of a mode, without those that the mode refuses."""
    made = given | MODES[mode]
    sends = not made.get("skip_a2a")
    return {k: v for k, v in made.items() if sends or k not in _OF_SENDING}


def make_inputs(
    rng: np.random.Generator, config: Any, ranks: int, **options: Any
) -> helpers.Inputs:
    """Like helpers.make_inputs; with skip_a2a all ranks of a world hold the same."""
    inputs = helpers.make_inputs(rng, config, ranks, **options)
    if not config.skip_a2a:
        return inputs
    world = config.allreduce_world_size or ranks
    return inputs.pick([rank // world * world for rank in range(ranks)])


def takes_weights(config: Any) -> bool:
    return config.reduce != "none"


def takes_residual(config: Any) -> bool:
    return config.reduce != "none" and not config.skip_a2a


def combine_operands(
    rng: np.random.Generator,
    config: Any,
    outputs: list[oracle.RankOutput],
    inputs: helpers.Inputs,
    fill: Callable[..., np.ndarray],
    columns: int | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray] | None, list[np.ndarray] | None]:
    """Rows, weights and residual of each rank; whatever must not be read is NaN."""
    dtype = oracle.DTYPES[config.dtype]
    columns = columns or config.hidden_size
    rows = [fill(rng, (len(o.src_info), columns), dtype) for o in outputs]
    weights = residual = None
    if config.reduce == "source":
        weights = [helpers.normal(rng, i.shape, np.float32) for i in inputs.ids]
    elif takes_weights(config):
        made = [helpers.normal(rng, len(r), np.float32) for r in rows]
        weights = helpers.poisoned(outputs, made)
    if takes_residual(config):
        residual = [fill(rng, (len(x), columns), dtype) for x in inputs.tokens]
    return helpers.poisoned(outputs, rows), weights, residual
