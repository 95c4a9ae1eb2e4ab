"""The part of the jax_ep.flax layers that does not depend on Flax.

A layer of any library holds a `Layer` and its parameters, and calls `apply`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_ep._core import context, errors, operands, traces
from jax_ep._core.arrays import as_array, require_values
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import (
    ROUTER_BIASES,
    Format,
    RouterBiases,
    Transport,
    WeightFormat,
)
from jax_ep._core.types import ExpertsFunction
from jax_ep._experts.interface import Experts
from jax_ep._experts.quantized import QuantizedWeights
from jax_ep._layers import codes, expert_rows, fsdp, moe_checks, places
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
from jax_ep.router import Router, RouterFunction, Routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the layers' constructors; see `jax_ep.flax.MoE`."""

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
    router: Router | RouterFunction | Literal[False] | None
    router_bias: bool | RouterBiases
    shared_intermediate_size: int | None
    tp_axis_name: str | None
    fsdp_axis_name: str | None
    spec: PartitionSpec | None
    transport: Transport
    experts: ExpertsFunction | None
    activation: Activation | None
    expert_bias: bool
    weights_format: WeightFormat | None
    gated_shared_expert: bool
    gated_linear_unit: bool
    shared_activation: Activation | None
    apply_router_weight_on_input: bool
    num_identity_experts: int
    chunks: int

    @classmethod
    def of(cls, fields: Any) -> Arguments:
        """Returns the arguments that an object has as attributes of their names."""
        names = [field.name for field in dataclasses.fields(Arguments)]
        return Arguments(**{name: getattr(fields, name) for name in names})


class PerToken(NamedTuple):
    """What a call of a layer has for each token, in the dimensions of its tokens.

    Attributes:
        x: `[..., hidden]`.
        mask: bool `[...]`, False for padding.
        residual: `[..., hidden]`, added to the result.
        topk_ids: int32 `[..., K]`, experts that were chosen elsewhere.
        routing: the decision of the user's own router, without its loss.
    """

    x: Any
    mask: Any = None
    residual: Any = None
    topk_ids: Any = None
    routing: Routing | None = None

    def mapped(self, function: Callable[..., Any], *others: PerToken) -> PerToken:
        """Returns the same with `function` of each array, and those of `others`."""
        leaves, form = jax.tree.flatten(self)
        own = [jax.tree.leaves(other) for other in others]
        return form.unflatten(map(function, leaves, *own))

    def padding(self) -> PerToken:
        """Returns what tokens have in each array that stand for none."""
        fields: dict[str, Any] = {"x": 0, "mask": False, "residual": 0, "topk_ids": -1}
        of_routing: Any = (-1, 0.0, 0.0, 0.0)
        fields["routing"] = Routing(*of_routing)
        there = {name: getattr(self, name) is not None for name in fields}
        return PerToken(*(fields[name] if there[name] else None for name in fields))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Arguments):
    """The static, hashable state of a layer: its arguments after defaults and checks.

    Attributes:
        function: the layer's name in error messages.
        config: sizes and options, with `config_options` merged in. Its `num_experts`
            counts places, and its `max_tokens_per_rank` the tokens of a chunk.
    """

    function: str
    config: EPConfig

    @classmethod
    def made(cls, function: str, given: Arguments) -> Layer:
        """Makes the layer."""
        arguments = {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
        mesh, name = given.mesh, given.axis_name
        require_mesh(function, mesh)
        context.require_usable(function, mesh)
        own = {name: arguments[name] for name in CONFIG_FIELDS}
        moe_checks.require_chunks(function, given.chunks)
        tokens = given.max_tokens_per_rank
        if type(tokens) is int:  # EPConfig refuses what is not
            own["max_tokens_per_rank"] = -(-tokens // given.chunks)
        with errors.told_of(function, part=False):
            axes = init.axis_names(mesh, name)
        ranks = math.prod(mesh.shape[axis] for axis in axes)
        asked = given.num_slots, given.num_experts, given.top_k
        own["num_experts"] = places.checked_slots(function, *asked, ranks)
        options = config_fields(function, given.config_options)
        with errors.told_of(function, part=False):
            config = EPConfig(**own, **options)
            init.group_axes(mesh, name, config)
        codes.require_format(function, given.weights_format)
        settled = {
            "axis_name": name if isinstance(name, str) else axes,
            "dtype": config.dtype,
            "config_options": None,
            "num_slots": config.num_experts,
            "router": Router() if given.router is None else given.router,
        }
        return cls(**arguments | settled, function=function, config=config)

    def __post_init__(self) -> None:
        """Checks everything that does not need arrays."""
        moe_checks.require_choices(
            self.function, None if self.router is False else self.router, self.experts
        )
        remedy = "leave it out for experts with a gate"
        gate = self.gated_linear_unit
        moe_checks.require_type(
            self.function, "gated_linear_unit", gate, bool, "a bool", remedy
        )
        errors.require(
            gate or self._run.takes_ungated,
            self.function,
            "experts without a gate must not be multiplied as codes",
            f"experts={self._run!r}",
            "leave experts and weights_format out, or gated_linear_unit",
        )
        moe_checks.require_activations(
            self.function,
            gate,
            self.shared_intermediate_size is not None,
            self.config.fused_shared_expert,
            self.activation,
            self.shared_activation,
        )
        on_input, identity = self.apply_router_weight_on_input, "num_identity_experts"
        moe_checks.require_sent_weights(self.function, self.config, on_input)
        moe_checks.require_count(self.function, identity, self.num_identity_experts)
        remedy = "pass True and the layer makes biases of zeros"
        moe_checks.require_type(
            self.function, "expert_bias", self.expert_bias, bool, "a bool", remedy
        )
        remedy = "True multiplies the shared expert's result by a sigmoid"
        gated = self.gated_shared_expert
        moe_checks.require_type(
            self.function, "gated_shared_expert", gated, bool, "a bool", remedy
        )
        errors.require(
            not gated
            or (
                self.shared_intermediate_size is not None
                and not self.config.fused_shared_expert
            ),
            self.function,
            "gated_shared_expert needs shared_intermediate_size, and no "
            "fused_shared_expert",
            f"shared_intermediate_size={errors.brief(self.shared_intermediate_size)}",
            "pass the size, and leave fused_shared_expert out",
        )
        what, flag = f"a bool or one of {list(ROUTER_BIASES)}", self.router_bias
        moe_checks.require_type(
            self.function, "router_bias", flag, bool | str, what, remedy
        )
        errors.require(
            not isinstance(flag, str) or flag in ROUTER_BIASES,
            self.function,
            f"router_bias must be {what}",
            repr(flag),
            '"logits" is trained, True only chooses experts, "both" has the two',
        )
        errors.require(
            not flag or self.router is not False,
            self.function,
            "router_bias needs a router",
            "router=False",
            "leave router_bias out, and add the bias where you make the routing",
        )
        for name in ("router", "experts", "activation", "shared_activation"):
            moe_checks.require_hashable(self.function, name, getattr(self, name))
        config = self.config
        if isinstance(self.router, Router):
            self.router._check_choice(self.function, self.num_choices, config.top_k)
        moe_checks.require_mode(self.function, config)
        shared = self.shared_intermediate_size
        if config.fused_shared_expert and shared != self.intermediate_size:
            raise ValueError(
                f"jax_ep.{self.function}: shared_intermediate_size must be "
                f"intermediate_size {self.intermediate_size} with fused_shared_expert, "
                f"got {errors.brief(shared)}; pass it, or leave fused_shared_expert out"
            )
        tp = self.tp_axis_name
        others = set(self.mesh.axis_names) - set(self.ep_axes)
        if not errors.is_one_of(tp, {None, *others}):
            raise ValueError(
                f"jax_ep.{self.function}: tp_axis_name must be an axis of the mesh "
                f"outside of {self.ep_axes}, got {errors.brief(tp)}; the mesh has "
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
            if type(value) is not int or not 0 < value < 2**31 or value % parts:
                multiple = f"multiple of {parts}, the size of tp_axis_name"
                raise ValueError(
                    f"jax_ep.{self.function}: {name} must be an int and "
                    f"{f'a positive {multiple}' if tp else 'positive'}, below 2**31, "
                    f"got {errors.brief(value)}; change it, or convert it with int()"
                )
        if self._multiple > 1:
            hidden, inner = self.config.hidden_size, self.intermediate_size
            parts = self.mesh.shape[tp] if tp else 1
            codes.require_blocks(
                self.function,
                repr(self._run),
                self._multiple,
                hidden,
                inner,
                tp,
                parts,
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
        """Returns the parameters by name; experts' weights have one entry per expert.

        With a `weights_format`, "gate_up" and "down" are codes, and there are also
        "gate_up_scales" and "down_scales".
        """
        by_expert = self._layouts()[0]
        if self.weights_format is None:
            return by_expert
        return codes.in_place(by_expert, self.weights_format)

    @property
    def _multiple(self) -> int:
        rows = self.config.dispatch_format
        return self._run.multiple_of(self.weights_format, rows)

    @property
    def _run(self) -> Experts:
        """What is asked of the experts."""
        holds_codes = self.weights_format is not None
        return expert_rows.implementation(self.experts, holds_codes)

    def _layouts(self) -> list[dict[str, Param]]:
        """Returns the parameters by expert, and by place as `moe_ffn` takes them.

        Codes and scales are sharded as the weights that they replace would be.
        """
        axes, mesh, tp = self.ep_axes, self.mesh, self.tp_axis_name
        sizes = Sizes(
            self.config.hidden_size,
            self.intermediate_size,
            self.shared_intermediate_size,
            None if self.router is False else self.num_choices,
            2 if self.gated_linear_unit else 1,
            self.expert_bias,
            self.router_bias in ROUTER_BIASES,
            self.gated_shared_expert,
        )
        ep = axes[0] if len(axes) == 1 else axes
        # If the ranks do not divide the experts, every rank holds all their weights.
        own = None if self.num_experts % self._ep_size else ep
        found = [
            params(sizes, self.num_experts, own, tp),
            params(sizes, self.config.num_experts, ep, tp),
        ]
        if self.fsdp_axis_name is None:
            return found
        multiple, axis = self._multiple, self.fsdp_axis_name
        return fsdp.sharded(self.function, mesh, axis, axes, found, multiple)

    @property
    def num_choices(self) -> int:
        """The number of experts that the router knows."""
        return self.num_experts + self.num_identity_experts

    @property
    def corrects_choice(self) -> bool:
        """Whether the router has a bias for choosing experts, "router_bias"."""
        return bool(self.router_bias) and self.router_bias != "logits"

    @property
    def _ep_size(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.ep_axes)

    def initializer(self, name: str) -> Any:
        """Returns a `(key, dtype) -> array` that makes a parameter, sharded."""
        return self._layouts()[0][name].initializer(self.mesh)

    def quantize_weights(
        self,
        gate_up: jax.Array,
        down: jax.Array,
        name: WeightFormat = "fp8_block128",
        backward: bool = False,
    ) -> QuantizedWeights:
        """Returns codes of the experts' weights: global arrays sharded like these."""
        if self.weights_format is not None:
            raise errors.unusable(
                self.function,
                "the layer holds codes already, because it has a weights_format",
                "quantise the weights of the layer that was trained",
            )
        depth = self._require_shapes({"gate_up": gate_up, "down": down}, stack=True)
        # The weights must be split into whole blocks, which they are if _multiple > 1.
        layer = self if self._multiple > 1 else self.with_codes(name)
        layout, whole = layer._layouts()[0], (None,) * depth
        fields = "gate_up", "down"
        specs = tuple(PartitionSpec(*whole, *layout[n].spec) for n in fields)
        weights = self._placed((gate_up, down), specs)
        program = _quantizer(layer, name, backward, traces.spmd_axis_names(), depth)
        return program(*weights)

    def _held(self, values: Mapping[str, Any]) -> QuantizedWeights:
        """Returns the codes among the parameters of a layer with a `weights_format`."""
        assert self.weights_format is not None
        own = [values[field] for field in codes.FIELDS]
        return QuantizedWeights(*own, format=self.weights_format)

    def prepared(self, values: Mapping[str, Any]) -> QuantizedWeights:
        """Returns the codes among the parameters, with what else kernels read."""
        if self.weights_format is None:
            raise errors.unusable(
                self.function,
                "the layer holds no codes, because it has no weights_format",
                "call quantize_weights, which returns codes that are prepared",
            )
        fields = {n: values[n] for n in codes.FIELDS}
        depth = self._require_shapes(fields, stack=True)
        layout, whole = self.params(), (None,) * depth
        specs = {n: PartitionSpec(*whole, *layout[n].spec) for n in fields}
        held = self._held(self._placed(fields, specs))
        return _preparer(self, traces.spmd_axis_names(), depth)(held)

    def _require_shapes(self, values: Mapping[str, Any], *, stack: bool = False) -> int:
        """Raises unless parameters have their shapes, or with `stack` those of a stack.

        Returns the number of leading dimensions, of the layers of a stack.
        """
        layout = self.params()
        shapes = {name: param.shape for name, param in layout.items()}
        shapes["router_bias"] = (self.num_choices,)
        found = {}
        for name, value in values.items():
            require_values(self.function, name, value)
            if name in shapes:
                found[name] = jnp.shape(value)
        name = next(iter(found))
        front = found[name][: len(found[name]) - len(shapes[name])]
        if all(found[name] == (*front, *shapes[name]) for name in found):
            if stack or not front:
                return len(front)
            raise errors.invalid(
                self.function,
                "parameters must be those of one layer",
                f"those of a stack, {name} of shape {found[name]}",
                "call the layer inside a scan or vmap over the stack (docs/layers.md)",
            )
        name = next(n for n in found if found[n] != (*front, *shapes[n]))
        raise errors.invalid(
            self.function,
            f"{name} must have shape {shapes[name]}",
            found[name],
            moe_checks.remedy_of_parameters(found, shapes),
        )

    def initial_codes(
        self, keys: Callable[[], jax.Array], dtype: Any
    ) -> QuantizedWeights:
        """Returns codes of weights drawn with two keys."""
        assert self.weights_format is not None
        # Without the experts, because it is codes that suit them.
        whole = dataclasses.replace(self, weights_format=None, experts=None)
        drawn = [whole.initializer(n)(keys(), dtype) for n in ("gate_up", "down")]
        return whole.quantize_weights(drawn[0], drawn[1], self.weights_format)

    def with_codes(self, name: WeightFormat) -> Layer:
        """Returns the same layer with codes in place of the experts' weights."""
        return dataclasses.replace(self, weights_format=name)

    def handle(self, ep: EPHandle | None = None) -> EPHandle:
        """Returns `ep` if given, else the handle that layers of equal sizes share.

        It also works while tracing, which is when Linen and `nnx.jit` call it.

        Raises:
            ValueError, TypeError: `ep` is not a handle for this layer.
        """
        if ep is not None:
            return self._checked(ep)
        with errors.told_of(self.function, part=False):
            return shared_handle(self.mesh, self.ep_axes, self.config, self.transport)

    def _checked(self, ep: EPHandle) -> EPHandle:
        moe_checks.require_handle(self.function, ep)
        configs = ep.config, self.config
        for name, got, must in (
            ("config", _differences(*configs), _differences(*reversed(configs))),
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
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        routing: Routing | None = None,
        topk_ids: ArrayLike | None = None,
        input_scale: ArrayLike | None = None,
        placement: Placement | None = None,
        quantized: QuantizedWeights | None = None,
    ) -> tuple[jax.Array, MoEAux]:
        """Applies the layer to a global `x`, cast to the config's dtype.

        If the ranks do not divide the tokens, it adds padding tokens that go to no
        expert, and removes their rows from the result.

        Args:
            ep: what `handle` returned.
            values: global arrays by name: those of `params()`, and "router_bias".
            x: `[..., hidden]`.
            mask: bool `[...]`, False for padding.
            residual: `[..., hidden]`, cast like x and added to the result.
            routing: the decision of the user's own router, `[..., K]`.
            topk_ids: int32 `[..., K]`, as in `jax_ep.moe_ffn`.
            input_scale: as in `jax_ep.dispatch`, the same for all ranks.
            placement: which experts the places hold; None spreads them evenly.
            quantized: codes of the experts' weights; the weights get the gradients.

        Returns:
            `[..., hidden]` in the config's dtype, and a `MoEAux` of all ranks.
        """
        context.require_usable(self.function, self.mesh)
        x = as_array(self.function, "x", x)
        require_floating(self.function, x)
        spec = self._leading_spec(x)
        padded = not divides(self.mesh, spec, x.shape)
        given = self._per_token(x, mask, residual, routing, topk_ids)
        self._require_shapes(values)
        placement = places.checked(
            self.function,
            placement,
            self.num_experts,
            self.config.num_experts,
            self._ep_size,
        )
        values = self._with_codes(values, quantized)
        names = tuple(values)
        form = codes.Form.of(values["experts"]) if "experts" in values else None
        specs = self._specs(self._layouts()[0], names, form)
        loss = None if routing is None else routing.loss
        arrays = (values, given, loss, input_scale, placement)
        split, whole = PartitionSpec() if padded else spec, PartitionSpec()
        # Cached in the handle, so that eager calls compile once.
        key = (self, names, form, spec, padded, traces.spmd_axis_names())
        program = ep._programs.get(key)
        if program is None:
            make = self._padded if padded else self._mapped
            run = make(ep, names, form, spec)
            program = ep._programs[key] = jax.jit(context.under(self.mesh, run))
        of_tokens = given.mapped(lambda _: split)
        all_specs = (specs, of_tokens, whole, whole, whole)
        return program(*self._placed(arrays, all_specs))

    def _per_token(
        self,
        x: jax.Array,
        mask: ArrayLike | None,
        residual: ArrayLike | None,
        routing: Routing | None,
        topk_ids: ArrayLike | None,
    ) -> PerToken:
        """Returns what a call has for each token, checked and cast."""
        function, front = self.function, x.shape[:-1]
        errors.require(
            routing is not None or self.router is not False,
            function,
            "the layer has no router (router=False), and calls need routing",
            "None",
            "pass what jax_ep.router.route returns",
        )
        what, remedy = "a jax_ep.router.Routing", "jax_ep.router.route makes one"
        moe_checks.require_type(function, "routing", routing, Routing, what, remedy)
        given = {"mask": mask, "residual": residual, "topk_ids": topk_ids}
        names = {n: f"routing.{n}" for n in moe_checks.OF_ROUTING}
        given |= {name: getattr(routing, n, None) for n, name in names.items()}
        sizes = {
            "...": front,
            "H": (self.config.hidden_size, "hidden_size"),
            "K": (self.config.top_k, "top_k"),
            "E": self.num_choices,
        }
        found = operands.checked(function, moe_checks.PER_TOKEN, given, sizes)
        dtype = self.config.dtype
        residual = found.get("residual")
        return PerToken(
            x.astype(dtype),
            found.get("mask"),
            None if residual is None else residual.astype(dtype),
            found.get("topk_ids"),
            None
            if routing is None
            else Routing(*(found[name] for name in names.values())),
        )

    def _with_codes(self, values: Mapping[str, Any], quantized: Any) -> dict[str, Any]:
        """Returns `values` with any codes and scales under the name "experts"."""
        if self.weights_format is not None:
            rest = {n: value for n, value in values.items() if n not in codes.FIELDS}
            if quantized is None:
                return rest | {"experts": self._held(values)}
            found = codes.checked(self.function, quantized, self._layouts()[0])
            errors.require(
                found.format == self.weights_format,
                self.function,
                f"quantized must be in the layer's weights_format "
                f"{self.weights_format!r}",
                repr(found.format),
                "pass what `prepared` of this layer returned, or leave it out",
            )
            return rest | {"experts": found}
        if quantized is None:
            return dict(values)
        found = codes.checked(self.function, quantized, self._layouts()[0])
        return {**values, "experts": found}

    def _specs(
        self,
        layout: Mapping[str, Param],
        names: Sequence[str],
        form: codes.Form | None,
    ) -> dict[str, Any]:
        """Returns the specs of parameters by name; `form` is the form of the codes."""
        entries = {name: param.spec for name, param in layout.items()}
        found: dict[str, Any] = {
            name: PartitionSpec(*entries.get(name, ())) for name in names
        }
        if form is not None:
            found["experts"] = codes.specs(layout, form)
        return found

    def _mapped(
        self,
        ep: EPHandle,
        names: tuple[str, ...],
        form: codes.Form | None,
        spec: PartitionSpec,
    ) -> Callable[..., Any]:
        """Returns the shard_map of `_body`, after the steps that need global arrays."""
        by_expert, by_place = self._layouts()
        whole = PartitionSpec()
        # Weights are quantised by expert, before ranks exchange any of them.
        name = None if form else self._run.quantizes
        if name:
            names = (*names, "experts")
            form = codes.Form.made(by_expert, name, self.mesh)
        mapped = jax.shard_map(
            partial(self._body, ep, spec_axes(spec)),
            mesh=self.mesh,
            in_specs=(self._specs(by_place, names, form), spec, whole, whole, whole),
            out_specs=(spec, MoEAux.specs(spec_axes(spec))),
            # JAX batches a shard_map over a mesh axis only without this check.
            check_vma=not traces.spmd_axis_names(),
        )

        def run(
            values: Any, given: PerToken, loss: Any, input_scale: Any, placement: Any
        ) -> Any:
            if name:
                masters = values["gate_up"], values["down"]
                made = codes.made(
                    self.function, self.mesh, by_expert, masters, name, True
                )
                values = {**values, "experts": made}
            if placement is not None:
                values = places.gathered(placement, values, by_place, self.mesh)
            return mapped(values, given, loss, input_scale, placement)

        return run

    def _padded(
        self,
        ep: EPHandle,
        names: tuple[str, ...],
        form: codes.Form | None,
        spec: PartitionSpec,
    ) -> Callable[..., Any]:
        """Returns `_mapped` for any number of tokens: it adds masked tokens.

        All leading dimensions are flattened first, so that fewer tokens are added than
        there are ranks, however few sequences there are.
        """
        axes = spec_axes(spec)
        flat, whole = PartitionSpec(axes), PartitionSpec()
        mapped = self._mapped(ep, names, form, flat)
        parts = math.prod(self.mesh.shape[axis] for axis in axes)

        def run(values: Any, given: PerToken, *rest: Any) -> Any:
            shape = given.x.shape
            count = math.prod(shape[:-1])
            missing = -count % parts
            if given.mask is None and given.routing is None:
                given = given._replace(mask=jnp.ones(shape[:-1], bool))

            def pad(array: jax.Array, value: Any) -> jax.Array:
                rows = jnp.reshape(array, (count, *array.shape[len(shape) - 1 :]))
                more = ((0, missing), *[(0, 0)] * (rows.ndim - 1))
                rows = jnp.pad(rows, more, constant_values=value)
                return self._placed(rows, flat)

            y, aux = mapped(values, given.mapped(pad, given.padding()), *rest)
            y = self._placed(y, whole)
            return y[:count].reshape(shape), aux

        return run

    def _body(
        self,
        ep: EPHandle,
        split: tuple[str, ...],
        values: Any,
        given: PerToken,
        loss: Any,
        input_scale: Any,
        placement: Placement | None,
    ) -> tuple[jax.Array, MoEAux]:
        shape = given.x.shape
        given = given.mapped(lambda a: a.reshape(-1, *a.shape[len(shape) - 1 :]))
        routing = given.routing
        if routing is not None:
            routing = dataclasses.replace(routing, loss=loss)
        with errors.told_of(self.function):
            if self.fsdp_axis_name is not None:
                order, dtype = self.mesh.axis_names, self.config.dtype
                layout = self._layouts()[1]
                values = fsdp.gather(layout, values, dtype, order, split)
                if "experts" in values:
                    whole = fsdp.gather_codes(layout, values["experts"])
                    values["experts"] = whole
            y, aux = moe_ffn(
                ep,
                given.x,
                values,
                router=None if routing is not None else self.router or None,
                routing=routing,
                topk_ids=given.topk_ids,
                mask=given.mask,
                residual=given.residual,
                input_scale=input_scale,
                tp_axis=self.tp_axis_name,
                experts=self.experts,
                activation=self.activation,
                shared_activation=self.shared_activation,
                apply_router_weight_on_input=self.apply_router_weight_on_input,
                num_identity_experts=self.num_identity_experts,
                placement=placement,
                chunks=self.chunks,
            )
        return y.reshape(shape), aux

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
        most = self.max_tokens_per_rank
        if n > most:
            raise ValueError(
                f"jax_ep.{self.function}: x must have at most max_tokens_per_rank = "
                f"{most} tokens per rank, got {n} on each of {parts} in {x.shape}; "
                f"make the layer with max_tokens_per_rank={n}, or pass fewer tokens"
            )
        return spec

    def _placed(self, arrays: Any, specs: Any) -> Any:
        """Reshards arrays as `shard_map` requires on a mesh with explicit axes."""
        if AxisType.Explicit not in self.mesh.axis_types:
            return arrays

        def place(spec: PartitionSpec, tree: Any) -> Any:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(
                lambda leaf: jax.sharding.reshard(jnp.asarray(leaf), sharding), tree
            )

        return jax.tree.map(
            place, specs, arrays, is_leaf=lambda x: isinstance(x, PartitionSpec)
        )


@functools.lru_cache(maxsize=256)
def _quantizer(
    layer: Layer,
    name: WeightFormat,
    backward: bool,
    stages: frozenset[str],
    depth: int,
) -> Callable[..., QuantizedWeights]:
    """Returns a jitted function of global gate_up and down; cached, to compile once.

    `stages` are the axes of the surrounding vmaps, on which the program depends. The
    arrays have `depth` leading dimensions of layers.
    """
    del stages
    layout = layer._layouts()[0]

    def run(gate_up: jax.Array, down: jax.Array) -> QuantizedWeights:
        both = gate_up, down
        return codes.made(layer.function, layer.mesh, layout, both, name, backward)

    return jax.jit(_of_each(context.under(layer.mesh, run), depth))


@functools.lru_cache(maxsize=256)
def _preparer(
    layer: Layer, stages: frozenset[str], depth: int
) -> Callable[[QuantizedWeights], QuantizedWeights]:
    """Returns a jitted function of global codes, cached as in `_quantizer`."""
    del stages
    layout = layer._layouts()[0]

    def run(held: QuantizedWeights) -> QuantizedWeights:
        return codes.prepared(layer.function, layer.mesh, layout, held)

    return jax.jit(_of_each(context.under(layer.mesh, run), depth))


def _of_each(run: Callable[..., Any], depth: int) -> Callable[..., Any]:
    """Returns `run` for a stack of layers with `depth` leading dimensions.

    It runs for one layer at a time, so that the program is that of one.
    """
    if depth == 0:
        return run
    inner = _of_each(run, depth - 1)
    return lambda *stack: jax.lax.map(lambda each: inner(*each), stack)


def _differences(config: EPConfig, other: EPConfig) -> str:
    """Describes the fields of `config` in which it differs from `other`."""
    pairs = (
        (field.name, getattr(config, field.name), getattr(other, field.name))
        for field in dataclasses.fields(EPConfig)
    )
    return ", ".join(f"{name}={own!r}" for name, own, others in pairs if own != others)


def refuse_pickling(function: str) -> NoReturn:
    """Raises the TypeError for pickling a layer."""
    raise TypeError(
        f"jax_ep.{function} cannot be pickled, because it holds devices of one process;"
        " save its parameters (a checkpoint loads on any mesh, docs/layers.md) and "
        "make the layer again from its arguments"
    )
