"""The part of the jax_ep.flax layers that does not depend on Flax.

A layer of any library holds a `Layer` and its parameters, and calls `apply`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_ep._core import context, errors, traces
from jax_ep._core.arrays import as_array, require_values
from jax_ep._core.choice import check_choice
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Format, Transport
from jax_ep._core.types import ExpertsFunction
from jax_ep._layers import fsdp, moe_checks, places
from jax_ep._layers.moe import MoEAux, moe_ffn
from jax_ep._layers.params import (
    CONFIG_FIELDS,
    Param,
    Sizes,
    config_fields,
    divides,
    leading_spec,
    params,
    require_floating,
    require_mesh,
    require_spec,
    spec_axes,
)
from jax_ep._setup import init
from jax_ep._setup.shared import shared_handle
from jax_ep.experts import Activation
from jax_ep.placement import Placement
from jax_ep.router import Router, RouterFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the layers' constructors; `jax_ep.flax.MoE` documents them."""

    mesh: Mesh
    axis_name: str | Sequence[str]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_slots: int | None
    top_k: int
    max_tokens_per_rank: int
    dtype: DTypeLike
    capacity_factor: float | None
    dispatch_format: Format
    config_options: Mapping[str, Any] | None
    router: Router | RouterFunction | None
    router_bias: bool
    shared_intermediate_size: int | None
    tp_axis_name: str | None
    fsdp_axis_name: str | None
    spec: PartitionSpec | None
    transport: Transport
    experts: ExpertsFunction | None
    activation: Activation | None
    expert_bias: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Arguments):
    """The static, hashable state of a layer: its arguments after defaults and checks.

    Attributes:
        function: the layer's name in error messages.
        config: sizes and options, with `config_options` merged in. Its `num_experts`
            counts places.
    """

    function: str
    config: EPConfig

    @classmethod
    def of(cls, function: str, given: Mapping[str, Any]) -> Layer:
        """Makes the layer from a constructor's variables or a module's fields."""
        names = [field.name for field in dataclasses.fields(Arguments)]
        arguments = {name: given[name] for name in names}
        mesh, name = arguments["mesh"], arguments["axis_name"]
        require_mesh(function, mesh)
        context.require_usable(function, mesh)
        own = {name: arguments[name] for name in CONFIG_FIELDS}
        ranks = math.prod(mesh.shape[axis] for axis in init.axis_names(mesh, name))
        asked = arguments["num_slots"], own["num_experts"], own["top_k"]
        own["num_experts"] = places.checked_slots(function, *asked, ranks)
        options = config_fields(function, arguments["config_options"])
        config = EPConfig(**own, **options)
        axes = init.group_axes(mesh, name, config)
        router = arguments["router"]
        settled = {
            "axis_name": name if isinstance(name, str) else axes,
            "dtype": config.dtype,
            "config_options": None,
            "num_slots": config.num_experts,
            "router": Router() if router is None else router,
        }
        return cls(**arguments | settled, function=function, config=config)

    def __post_init__(self) -> None:
        """Checks everything that does not need arrays."""
        moe_checks.require_choices(
            self.function, self.router, self.experts, self.activation
        )
        for name in ("router_bias", "expert_bias"):
            what, remedy = "a bool", "pass True and the layer makes biases of zeros"
            flag = getattr(self, name)
            moe_checks.require_type(self.function, name, flag, bool, what, remedy)
        for name in ("router", "experts", "activation"):
            moe_checks.require_hashable(self.function, name, getattr(self, name))
        config = self.config
        if isinstance(self.router, Router):
            check_choice(self.function, self.router, self.num_experts, config.top_k)
        moe_checks.require_mode(self.function, config)
        shared = self.shared_intermediate_size
        if config.fused_shared_expert and shared != self.intermediate_size:
            raise ValueError(
                f"jax_ep.{self.function}: shared_intermediate_size must be "
                f"intermediate_size {self.intermediate_size} with fused_shared_expert, "
                f"got {shared!r}; pass it, or leave fused_shared_expert out"
            )
        tp = self.tp_axis_name
        if tp is not None and (tp not in self.mesh.axis_names or tp in self.ep_axes):
            raise ValueError(
                f"jax_ep.{self.function}: tp_axis_name must be an axis of the mesh "
                f"outside of {self.ep_axes}, got {tp!r}; the mesh has "
                f"{self.mesh.axis_names}"
            )
        require_spec(self.function, self.spec, self.mesh, self.ep_axes, tp)
        axes = [name for name in self.mesh.axis_names if name != tp]
        fsdp.require_axis(
            self.function,
            self.mesh,
            self.fsdp_axis_name,
            (*self.ep_axes, tp) if tp else self.ep_axes,
            tuple(axes) if self.spec is None else spec_axes(self.spec),
        )
        for name in ("intermediate_size", "shared_intermediate_size"):
            value = getattr(self, name)
            if value is None and name.startswith("shared"):
                continue
            parts = self.mesh.shape[tp] if tp else 1
            if type(value) is not int or value < 1 or value % parts:
                raise ValueError(
                    f"jax_ep.{self.function}: {name} must be an int and a positive "
                    f"multiple of {parts}, the size of tp_axis_name, got {value!r}; "
                    "change it, or convert it with int()"
                )
        self.params()  # raises where a weight does not divide

    def __reduce__(self) -> NoReturn:
        """Raises, because the mesh of a layer belongs to one process."""
        refuse_pickling(self.function)

    def __copy__(self) -> Self:
        """Returns itself, as it is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns itself, so that a Flax layer that holds it can be copied."""
        return self

    @property
    def ep_axes(self) -> tuple[str, ...]:
        """Axes of the EP group."""
        name = self.axis_name
        return (name,) if isinstance(name, str) else tuple(name)

    def params(self) -> dict[str, Param]:
        """Returns the parameters by name, those of experts by expert."""
        return self._layouts()[0]

    def _layouts(self) -> list[dict[str, Param]]:
        """Returns the parameters by expert, and as `moe_ffn` takes them, by place."""
        axes, mesh, tp = self.ep_axes, self.mesh, self.tp_axis_name
        sizes = Sizes(
            self.config.hidden_size,
            self.intermediate_size,
            self.shared_intermediate_size,
            self.num_experts,
            self.expert_bias,
        )
        ep = axes[0] if len(axes) == 1 else axes
        # Weights of experts that the ranks do not divide are whole on each of them.
        own = None if self.num_experts % self._ep_size else ep
        found = [
            params(sizes, self.num_experts, own, tp),
            params(sizes, self.config.num_experts, ep, tp),
        ]
        if self.fsdp_axis_name is None:
            return found
        return fsdp.sharded(self.function, mesh, self.fsdp_axis_name, axes, found)

    @property
    def _ep_size(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.ep_axes)

    def initializer(self, name: str) -> Any:
        """Returns a `(key, dtype) -> array` that makes a parameter, sharded."""
        return self.params()[name].initializer(self.mesh)

    def handle(self, ep: EPHandle | None = None) -> EPHandle:
        """Returns `ep` if given, else the handle that layers of equal sizes share.

        It works while tracing, where Linen and `nnx.jit` call it.

        Raises:
            ValueError, TypeError: `ep` is not a handle for this layer.
        """
        if ep is not None:
            return self._checked(ep)
        return shared_handle(self.mesh, self.ep_axes, self.config, self.transport)

    def _checked(self, ep: EPHandle) -> EPHandle:
        moe_checks.require_handle(self.function, ep)
        for name, got, must in (
            ("config", ep.config, self.config),
            ("axis_names", ep.axis_names, self.ep_axes),
            ("mesh", ep.mesh, self.mesh),
        ):
            if got != must:
                raise ValueError(
                    f"jax_ep.{self.function}: ep.{name} must equal that of the layer, "
                    f"{must}, got {got}; init ep with it or leave ep out"
                )
        return ep

    def apply(
        self,
        ep: EPHandle,
        values: Mapping[str, Any],
        x: ArrayLike,
        mask: ArrayLike | None = None,
        input_scale: ArrayLike | None = None,
        placement: Placement | None = None,
    ) -> tuple[jax.Array, MoEAux]:
        """Applies the layer to a global `x`, cast to the config's dtype.

        If the ranks do not divide the tokens, it pads them with tokens that go to no
        expert, and cuts these off the result.

        Args:
            ep: what `handle` returned.
            values: global arrays by name: those of `params()`, and "router_bias".
            x: `[..., hidden]`.
            mask: bool `[...]`, False for padding.
            input_scale: as in `jax_ep.dispatch`, the same for all ranks.
            placement: which experts the places hold; None spreads them evenly.

        Returns:
            `[..., hidden]` in the config's dtype, and a `MoEAux` of all ranks.
        """
        context.require_usable(self.function, self.mesh)
        x = as_array(self.function, "x", x)
        require_floating(self.function, x)
        spec = self._leading_spec(x)
        padded = not divides(self.mesh, spec, x.shape)
        if mask is not None:
            mask = moe_checks.checked_mask(self.function, mask, x.shape[:-1])
        for name, value in values.items():
            require_values(self.function, name, value)
        placement = places.checked(
            self.function,
            placement,
            self.num_experts,
            self.config.num_experts,
            self._ep_size,
        )
        names = tuple(values)
        specs = self._specs(self.params(), names)
        arrays = (dict(values), x.astype(self.config.dtype), mask, input_scale)
        operands = (*arrays, placement)
        given, whole = PartitionSpec() if padded else spec, PartitionSpec()
        # Cached in the handle, so that eager calls compile once.
        key = (self, names, spec, padded, traces.spmd_axis_names())
        program = ep._programs.get(key)
        if program is None:
            make = self._padded if padded else self._mapped
            run = make(ep, names, spec)
            program = ep._programs[key] = jax.jit(context.under(self.mesh, run))
        return program(*self._placed(operands, (specs, given, given, whole, whole)))

    def _specs(self, layout: Mapping[str, Param], names: Sequence[str]) -> Any:
        """Returns the specs of parameters by name."""
        entries = {name: param.spec for name, param in layout.items()}
        return {name: PartitionSpec(*entries.get(name, ())) for name in names}

    def _mapped(
        self, ep: EPHandle, names: tuple[str, ...], spec: PartitionSpec
    ) -> Callable[..., Any]:
        """Returns the shard_map of `_body`, with what it needs of global arrays."""
        _, by_place = self._layouts()
        whole = PartitionSpec()
        mapped = jax.shard_map(
            partial(self._body, ep, spec_axes(spec)),
            mesh=self.mesh,
            in_specs=(self._specs(by_place, names), spec, spec, whole, whole),
            out_specs=(spec, MoEAux.specs(spec_axes(spec))),
            # JAX batches a shard_map over a mesh axis without this check only.
            check_vma=not traces.spmd_axis_names(),
        )

        def run(
            values: Any, x: Any, mask: Any, input_scale: Any, placement: Any
        ) -> Any:
            if placement is not None:
                values = places.gathered(placement, values, by_place, self.mesh)
            return mapped(values, x, mask, input_scale, placement)

        return run

    def _padded(
        self, ep: EPHandle, names: tuple[str, ...], spec: PartitionSpec
    ) -> Callable[..., Any]:
        """Returns `_mapped` for any number of tokens: it adds masked ones.

        All leading dimensions are flattened first, so that no rank has more than one
        token more than another needs, however few sequences there are.
        """
        axes = spec_axes(spec)
        flat, whole = PartitionSpec(axes), PartitionSpec()
        mapped = self._mapped(ep, names, flat)
        parts = math.prod(self.mesh.shape[axis] for axis in axes)

        def run(values: Any, x: Any, mask: Any, *rest: Any) -> Any:
            count = math.prod(x.shape[:-1])
            rows = jnp.reshape(x, (count, x.shape[-1]))
            real = jnp.ones(count, bool) if mask is None else jnp.reshape(mask, count)
            missing = -count % parts
            rows = jnp.pad(rows, ((0, missing), (0, 0)))
            real = jnp.pad(real, (0, missing))
            rows, real = self._placed((rows, real), (flat, flat))
            y, aux = mapped(values, rows, real, *rest)
            y = self._placed(y, whole)
            return y[:count].reshape(x.shape), aux

        return run

    def _body(
        self,
        ep: EPHandle,
        split: tuple[str, ...],
        values: Any,
        x: jax.Array,
        mask: Any,
        input_scale: Any,
        placement: Placement | None,
    ) -> tuple[jax.Array, MoEAux]:
        with errors.told_of(self.function):
            if self.fsdp_axis_name is not None:
                order, dtype = self.mesh.axis_names, self.config.dtype
                layout = self._layouts()[1]
                values = fsdp.gather(layout, values, dtype, order, split)
            y, aux = moe_ffn(
                ep,
                x.reshape(-1, self.config.hidden_size),
                values,
                router=self.router,
                mask=None if mask is None else mask.reshape(-1),
                input_scale=input_scale,
                tp_axis=self.tp_axis_name,
                experts=self.experts,
                activation=self.activation,
                placement=placement,
            )
        return y.reshape(x.shape), aux

    def _leading_spec(self, x: jax.Array) -> PartitionSpec:
        """Returns the spec of all dimensions of `x` but the last, checked against x."""
        hidden = self.config.hidden_size
        if x.ndim < 2 or x.shape[-1] != hidden:
            raise ValueError(
                f"jax_ep.{self.function}: x must be [..., hidden_size] with "
                f"hidden_size {hidden} and at least one dimension before it, got "
                f"{x.shape}; reshape it"
            )
        spec = leading_spec(
            self.function, self.mesh, self.tp_axis_name, self.spec, x.shape
        )
        parts = math.prod(self.mesh.shape[axis] for axis in spec_axes(spec))
        n = -(-math.prod(x.shape[:-1]) // parts)
        most = self.config.max_tokens_per_rank
        if n > most:
            raise ValueError(
                f"jax_ep.{self.function}: x must have at most max_tokens_per_rank = "
                f"{most} tokens per rank, got {n} on each of {parts} in {x.shape}; "
                f"make the layer with max_tokens_per_rank={n}, or pass fewer tokens"
            )
        return spec

    def _placed(self, operands: Any, specs: Any) -> Any:
        """Reshards arrays as `shard_map` requires on a mesh with explicit axes."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return operands

        def place(spec: PartitionSpec, tree: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(
                lambda leaf: jax.sharding.reshard(jnp.asarray(leaf), sharding), tree
            )

        return jax.tree.map(
            place, specs, operands, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )


def refuse_pickling(function: str) -> NoReturn:
    """Raises the TypeError for pickling a layer."""
    raise TypeError(
        f"jax_ep.{function} cannot be pickled, because it holds devices of one process;"
        " save its parameters (a checkpoint loads on any mesh, docs/layers.md) and "
        "make the layer again from its arguments"
    )
