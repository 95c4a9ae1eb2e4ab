"""The parameters of the layers of jax_ep.flax: shapes, shardings, initial values."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep._config import EPConfig


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter: its whole shape, how it lies on the mesh, and its fans' axes."""

    shape: tuple[int, ...]
    spec: tuple[Any, ...]
    fan_out: tuple[int, ...]
    fan_in: int
    batch: tuple[int, ...] = ()

    def initializer(self, mesh: Mesh) -> Any:
        """A `(key, dtype) -> array` that makes the whole array where it belongs.

        The values depend on the key alone, not on the mesh.
        """
        draw = jax.nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=self.fan_in,
            out_axis=self.fan_out,
            batch_axis=self.batch,
        )
        sharding = NamedSharding(mesh, PartitionSpec(*self.spec))

        explicit = AxisType.Explicit in mesh.axis_types

        def make(key: jax.Array, dtype: Any) -> jax.Array:
            place = partial(draw, shape=self.shape, dtype=dtype)
            if explicit and isinstance(key, Tracer):
                # There a sharding is part of a type: what is traced is moved to it, and
                # out_shardings would only be compared with what it has.
                return jax.sharding.reshard(place(key), sharding)
            return jax.jit(place, out_shardings=sharding)(key)

        return make


def params(
    config: EPConfig,
    inner: int,
    shared: int | None,
    ep_axes: tuple[str, ...],
    tp: str | None,
) -> dict[str, Param]:
    """The parameters by name, as `jax_ep.moe_ffn` takes them."""
    experts, hidden = config.num_experts, config.hidden_size
    ep = ep_axes[0] if len(ep_axes) == 1 else ep_axes
    found = {
        "router": Param((hidden, experts), (None, None), (1,), 0),
        "gate_up": Param(
            (experts, hidden, 2, inner), (ep, None, None, tp), (2, 3), 1, (0,)
        ),
        "down": Param((experts, inner, hidden), (ep, tp, None), (2,), 1, (0,)),
    }
    if shared is not None:
        found["shared_gate_up"] = Param(
            (hidden, 2, shared), (None, None, tp), (1, 2), 0
        )
        found["shared_down"] = Param((shared, hidden), (tp, None), (1,), 0)
    return found
