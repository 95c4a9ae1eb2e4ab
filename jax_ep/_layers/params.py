"""Parameters of the jax_ep.flax layers: shapes, shardings, initial values, checks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep._core import calls, errors, traces
from jax_ep._core.arrays import dtype_of
from jax_ep._core.config import EPConfig


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter.

    Attributes:
        shape: global shape.
        spec: mesh axes of each dimension, as in a PartitionSpec.
        fan_out: dimensions that count as fan-out for the initial values.
        fan_in: dimension that counts as fan-in.
        batch: dimensions over which parameters are independent.
        zeros: whether the initial values are zeros, as for biases.
        gathered: None, or a dimension and the additional axes that shard it. Over these
            it is gathered where the parameter is used.
        dtype: the dtype of codes and scales; None means the layer's `param_dtype`.
    """

    shape: tuple[int, ...]
    spec: tuple[Any, ...]
    fan_out: tuple[int, ...]
    fan_in: int
    batch: tuple[int, ...] = ()
    zeros: bool = False
    gathered: tuple[int, tuple[str, ...]] | None = None
    dtype: Any = None

    def initializer(self, mesh: Mesh) -> Any:
        """Returns a `(key, dtype) -> array` that makes the global array, sharded.

        The values depend only on the key, not on the mesh.
        """
        sharding = NamedSharding(mesh, PartitionSpec(*self.spec))
        explicit = AxisType.Explicit in mesh.axis_types

        def make(key: jax.Array, dtype: Any) -> jax.Array:
            if explicit and isinstance(key, Tracer):
                # With explicit axes a sharding is part of the type. Inside a trace JAX
                # would only compare out_shardings with it, so reshard.
                return jax.sharding.reshard(self.draw(key, dtype), sharding)
            return _drawing(self, sharding, jnp.dtype(dtype))(key)

        return make

    def draw(self, key: jax.Array, dtype: Any) -> jax.Array:
        """Returns initial values."""
        if self.zeros:
            return jnp.zeros(self.shape, dtype)
        draw = jax.nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=self.fan_in,
            out_axis=self.fan_out,
            batch_axis=self.batch,
        )
        return draw(key, self.shape, dtype)


@functools.lru_cache(maxsize=256)
def _drawing(param: Param, sharding: NamedSharding, dtype: Any) -> Any:
    """Returns a program that draws, which equal parameters of all layers share."""
    return jax.jit(lambda key: param.draw(key, dtype), out_shardings=sharding)


class Sizes(NamedTuple):
    """Sizes of a layer, and which optional params it has.

    Attributes:
        hidden: H.
        inner: F.
        shared: S, or None.
        choices: the experts that the router knows, or None without a router.
        sides: 2, or 1 if experts have no gate.
        biases: whether experts have biases.
        logit_bias: whether the router's logits have one.
        shared_gate: whether a gate multiplies the shared expert's result.
    """

    hidden: int
    inner: int
    shared: int | None
    choices: int | None
    sides: int
    biases: bool
    logit_bias: bool
    shared_gate: bool


def params(sizes: Sizes, count: int, ep: Any, tp: str | None) -> dict[str, Param]:
    """Returns the parameters by name, as `jax_ep.moe_ffn` takes them.

    Args:
        sizes: the sizes of the layer.
        count: first dimension of the experts' weights: E, or the number of places.
        ep: the entry of a spec that splits this dimension, or None.
        tp: the tensor axis, or None.
    """
    hidden, inner, shared, choices, sides, biases, logit_bias, shared_gate = sizes
    found = {}
    if choices is not None:
        found["router"] = Param((hidden, choices), (None, None), (1,), 0)
        if logit_bias:
            name = "router_logit_bias"
            found[name] = Param((choices,), (None,), (), 0, zeros=True)
    found["gate_up"] = Param(
        (count, hidden, sides, inner), (ep, None, None, tp), (2, 3), 1, (0,)
    )
    found["down"] = Param((count, inner, hidden), (ep, tp, None), (2,), 1, (0,))
    if shared is not None:
        found["shared_gate_up"] = Param(
            (hidden, sides, shared), (None, None, tp), (1, 2), 0
        )
        found["shared_down"] = Param((shared, hidden), (tp, None), (1,), 0)
    if shared_gate:
        found["shared_expert_gate"] = Param((hidden, 1), (None, None), (1,), 0)
    if biases:
        for name, size, axis in (
            *([("gate_bias", inner, tp)] if sides == 2 else []),
            ("up_bias", inner, tp),
            ("down_bias", hidden, None),
        ):
            found[name] = Param((count, size), (ep, axis), (1,), 0, zeros=True)
    return found


# Fields of EPConfig that are arguments of the layers; config_options has the others.
CONFIG_FIELDS = (
    "num_experts",
    "top_k",
    "hidden_size",
    "max_tokens_per_rank",
    "dtype",
    "capacity_factor",
    "dispatch_format",
)
# Others of which a layer takes only the default.
_FIXED = {"reduce", "skip_a2a", "allreduce_world_size"}


def param_dtype(function: str, dtype: Any) -> jnp.dtype:
    """Returns `dtype` as a dtype; raises TypeError unless it is a floating one."""
    found = dtype_of(dtype)
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(
            f"jax_ep.{function}: param_dtype must be a floating dtype, got "
            f"{errors.brief(dtype)}; "
            'the default is "float32"'
        )
    return found


def config_fields(function: str, options: Any) -> Mapping[str, Any]:
    """Returns `config_options`, the fields of `EPConfig` that are not arguments."""
    options = {} if options is None else options
    known = {field.name for field in dataclasses.fields(EPConfig)} - set(CONFIG_FIELDS)
    wrong = []
    if isinstance(options, Mapping):
        wrong = [name for name in map(str, options) if name not in known]
    errors.require(
        isinstance(options, Mapping) and not wrong,
        function,
        f"config_options must be a mapping with names among {sorted(known - _FIXED)}",
        ", ".join(wrong) or errors.brief(options),
        "pass other fields as arguments of the layer"
        if set(wrong) <= set(CONFIG_FIELDS)
        else calls.meant(wrong, sorted(known | {*CONFIG_FIELDS}))
        or "correct the name or leave it out",
    )
    return options


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns all axes of `spec`."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def entry_axes(entry: Any) -> Sequence[str]:
    """Returns the axes of one dimension of a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def require_floating(function: str, x: jax.Array) -> None:
    """Raises unless `x` has a floating dtype, which the layer may cast to its own."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"jax_ep.{function}: x must have a floating dtype, got {x.dtype}; pass "
            "embeddings, not ids, or cast it"
        )


def require_mesh(function: str, mesh: Any) -> None:
    """Raises unless all axes have one kind, which Flax needs to place parameters."""
    # For None init would use the mesh of jax.set_mesh; parameters cannot.
    what, remedy = "a jax.sharding.Mesh", "make one with jax.make_mesh"
    errors.require_type(function, "mesh", mesh, Mesh, what, remedy)
    if len(set(mesh.axis_types)) > 1:
        raise ValueError(
            f"jax_ep.{function}: mesh must have axes of one kind, explicit or "
            f"automatic, got {mesh.axis_types}; make it with the same axis_types for "
            "all axes, or call jax_ep.moe_ffn, which takes any mesh"
        )


def require_spec(
    function: str, spec: Any, mesh: Mesh, ep_axes: tuple[str, ...], tp: str | None
) -> None:
    """Raises unless `spec` is None or shards dimensions in a way a layer supports."""
    remedy = "leave it out to shard dimension 0 over all axes"
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"jax_ep.{function}: spec must be a jax.sharding.PartitionSpec, got "
            f"{errors.brief(spec)}; {remedy}"
        )
    if spec is not None and PartitionSpec.UNCONSTRAINED in tuple(spec):
        raise ValueError(
            f"jax_ep.{function}: spec must have axes of the mesh or None for each "
            f"dimension, got {spec} with P.UNCONSTRAINED; {remedy}"
        )
    used = () if spec is None else spec_axes(spec)
    if spec is not None and (
        not set(ep_axes) <= set(used) <= set(mesh.axis_names)
        or len(set(used)) < len(used)
        or tp in used
    ):
        raise ValueError(
            f"jax_ep.{function}: spec must shard dimensions before the last over axes "
            f"of the mesh, each once, that include {ep_axes} and not tp_axis_name, got "
            f"{spec} for axes {mesh.axis_names}; {remedy}"
        )


def leading_spec(
    function: str,
    mesh: Mesh,
    tp: str | None,
    spec: PartitionSpec | None,
    shape: tuple[int, ...],
) -> PartitionSpec:
    """Returns the spec of all dimensions of x but the last, checked against x's shape.

    Trailing Nones are dropped, so P("ep", None) for [n, hidden] becomes P("ep").
    """
    if 0 in shape:
        raise ValueError(
            f"jax_ep.{function}: x must have tokens, got {shape}; leave the call out "
            "where there are none"
        )
    if spec is None:
        names = traces.unmapped(mesh.axis_names)
        spec = PartitionSpec(tuple(name for name in names if name != tp))
    entries = list(spec)
    fits = len(entries) <= len(shape)
    while entries and not entry_axes(entries[-1]):
        entries.pop()
    if not fits or len(entries) >= len(shape):
        raise ValueError(
            f"jax_ep.{function}: spec must shard dimensions of x before the last, got "
            f"{spec} for {shape}; leave it out to shard dimension 0 over all axes"
        )
    return PartitionSpec(*entries)


def divides(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]) -> bool:
    """Whether `spec` cuts arrays of `shape` into equal parts."""
    return all(
        size % math.prod(mesh.shape[axis] for axis in entry_axes(entry)) == 0
        for size, entry in zip(shape, spec, strict=False)
    )
