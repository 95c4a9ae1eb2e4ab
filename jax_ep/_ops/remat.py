"""Names for remat policies, and the policy `save_route`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep._core.types import STATIC_FIELDS, Dispatched

ROUTE_NAME = "jax_ep_route"
ROWS_NAME = "jax_ep_rows"
OUT_NAME = "jax_ep_out"
# `jax_ep.experts.fp8` uses this name; `save_route` does not save it.
GATE_UP_NAME = "jax_ep_gate_up"

# Policy for jax.checkpoint: a rematerialised layer saves the results of exchanges
# (routes, received rows, combined tokens), so that it exchanges nothing twice.
save_route: Callable[..., bool] = jax.checkpoint_policies.save_only_these_names(
    ROUTE_NAME, ROWS_NAME, OUT_NAME
)


def named_dispatch(d: Dispatched) -> Dispatched:
    """Returns `d` with names for remat policies."""

    def name(field: str) -> Any:
        if field == "grad_port":  # zeros, which are not worth saving
            return d.grad_port
        is_row = field in ("tokens", "scales", "router_weights")
        return named_bits(getattr(d, field), ROWS_NAME if is_row else ROUTE_NAME)

    fields = (f.name for f in dataclasses.fields(d) if f.name not in STATIC_FIELDS)
    return dataclasses.replace(d, **{field: name(field) for field in fields})


def named_bits(value: Any, name: str) -> Any:
    """Returns `value` with a name; one-byte floats are named as integers.

    JAX rounds saved values to the precision of their dtype as if each dtype had
    infinities, which turns float8_e4m3fn values from 256 on into NaN.
    """
    if not isinstance(value, jax.Array) or value.dtype.itemsize != 1:
        return checkpoint_name(value, name)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint8)
    return jax.lax.bitcast_convert_type(checkpoint_name(bits, name), value.dtype)
