"""A mixture-of-experts layer for Flax NNX; `jax_ep.flax.linen` has one for Linen."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

try:
    from flax import nnx, serialization
except ModuleNotFoundError as _error:
    raise ImportError(
        "jax_ep.flax: Flax is not installed; run pip install 'jax_ep[flax]'"
    ) from _error

from jax_ep._core import calls as _calls
from jax_ep._core import pytrees
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Format, RouterBiases, Transport, WeightFormat
from jax_ep._core.types import ExpertsFunction
from jax_ep._layers import codes as _codes
from jax_ep._layers import params as _layer_params
from jax_ep._layers.layer import Arguments, Layer
from jax_ep._layers.moe import MoEAux
from jax_ep.experts import Activation, QuantizedWeights
from jax_ep.placement import Placement
from jax_ep.router import Router, RouterFunction, Routing

if TYPE_CHECKING:
    from jax_ep.flax import linen as linen

__all__ = ["Codes", "MoE", "RouterBias"]

# With this import all of jax_ep's pytrees are registered.
importlib.import_module("jax_ep.stats")
for _class in pytrees.classes():
    # Flax has a way of its own for all NamedTuples.
    if not issubclass(_class, tuple):
        serialization.register_serialization_state(
            _class,
            partial(pytrees.to_state, convert=serialization.to_state_dict),
            partial(pytrees.from_state, convert=serialization.from_state_dict),
            override=True,
        )


class RouterBias(nnx.Variable):
    """The bias that chooses experts, not a Param: `jax_ep.router.update_bias` moves it.

    `router_logit_bias`, which is trained, is an `nnx.Param`.
    """


class Codes(nnx.Variable[jax.Array]):
    """Codes or scales of weights; not a Param, so optimisers skip them."""


class MoE(nnx.Module):
    """Router, experts and an optional shared expert: `[..., hidden] -> [..., hidden]`.

    The layer works on global arrays, eagerly and under `jax.jit`, `nnx.jit`, `nnx.grad`
    and `nnx.remat`. Parameters are created sharded over the mesh, and their metadata
    has the sharding (`nnx.get_partition_spec`). Their values depend only on `rngs`, and
    a checkpoint loads on a mesh of any ep_size.

    Attributes:
        router: `nnx.Param` `[H, E]`, or None.
        gate_up: `nnx.Param` `[E, H, 2, F]`. With a `weights_format` `Codes`, shaped as
            in a `jax_ep.experts.QuantizedWeights`; `down` likewise.
        down: `nnx.Param` `[E, F, H]`.
        gate_up_scales: `Codes` with the scales of a `weights_format`, or None.
        down_scales: likewise.
        shared_gate_up: `nnx.Param` `[H, 2, S]`, or None.
        shared_down: `nnx.Param` `[S, H]`, or None.
        shared_expert_gate: `nnx.Param` `[H, 1]`, or None.
        gate_bias: `nnx.Param` `[E, F]`, or None.
        up_bias: `nnx.Param` `[E, F]`, or None.
        down_bias: `nnx.Param` `[E, H]`, or None.
        router_bias: `RouterBias` float32 `[E]`, or None.
        router_logit_bias: `nnx.Param` `[E]`, or None.
        ep: the `jax_ep.EPHandle`.
    """

    @_calls.explained("flax.MoE")
    def __init__(
        self,
        *,
        mesh: Mesh,
        axis_name: str | Sequence[str],
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        rngs: nnx.Rngs,
        dtype: DTypeLike = "bfloat16",
        param_dtype: DTypeLike = "float32",
        capacity_factor: float | None = None,
        dispatch_format: Format = "bf16",
        config_options: Mapping[str, Any] | None = None,
        router: Router | RouterFunction | Literal[False] | None = None,
        router_bias: bool | RouterBiases = False,
        shared_intermediate_size: int | None = None,
        tp_axis_name: str | None = None,
        fsdp_axis_name: str | None = None,
        spec: PartitionSpec | None = None,
        transport: Transport = "auto",
        experts: ExpertsFunction | None = None,
        activation: Activation | None = None,
        expert_bias: bool = False,
        num_slots: int | None = None,
        weights_format: WeightFormat | None = None,
        gated_shared_expert: bool = False,
        gated_linear_unit: bool = True,
        shared_activation: Activation | None = None,
        apply_router_weight_on_input: bool = False,
        num_identity_experts: int = 0,
        chunks: int = 1,
        ep: EPHandle | None = None,
    ) -> None:
        """Creates the parameters, and a handle unless one is given.

        Args:
            mesh: the `jax.sharding.Mesh`.
            axis_name: the EP axis, or a tuple of axes whose product is the group.
            hidden_size: H, elements per token.
            intermediate_size: F, inner size of each expert.
            num_experts: E.
            top_k: K, experts per token.
            max_tokens_per_rank: T, the maximum number of tokens per rank in one call.
            rngs: random streams; "params" initialises the parameters.
            dtype: dtype of the computation; inputs are cast to it and results have it.
            param_dtype: dtype of the parameters.
            capacity_factor: as in `jax_ep.EPConfig`.
            dispatch_format: as in `jax_ep.EPConfig`.
            config_options: other fields of `jax_ep.EPConfig`, by name.
            router: the kind of router, or a hashable function of your own as in
                `jax_ep.moe_ffn`; None means softmax top-k. With False the layer has no
                router, and each call needs `routing`.
            router_bias: True for a bias that only chooses experts and has no gradient,
                as in DeepSeek-V3 (`jax_ep.router.route`); "logits" for one that is
                trained and added to the logits, as in gpt-oss; "both" for the two. They
                start at zero.
            shared_intermediate_size: S, inner size of the shared expert; None means no
                shared expert.
            tp_axis_name: a mesh axis to split F and S over (tensor parallel).
            fsdp_axis_name: a mesh axis that splits tokens, to split weights over as
                well (those of the router and the shared expert over this axis and the
                EP axes). Weights are gathered where they are used, and their gradients
                are reduce-scattered. Each weight is split in the first dimension that
                can be split; biases are not split.
            spec: sharding of `[..., hidden]`, for example `P("dp", "ep", None)`; None
                shards dimension 0 over all axes except tp_axis_name.
            transport: as in `jax_ep.init`.
            experts: one of `jax_ep.experts`, or a function as in `jax_ep.moe_ffn`. With
                `jax_ep.experts.fp8` each call quantises the weights, unless you pass it
                `quantized`.
            activation: a hashable function of (gate, up) for all experts, the shared
                one included; None means `silu(gate) * up`. Without
                `gated_linear_unit` it is a function of up, which has no default.
            expert_bias: whether the routed experts have the biases "gate_bias",
                "up_bias" and "down_bias", which start at zero.
            num_slots: number of places for experts, a multiple of the EP group's size
                and at least E; None means E. The argument `placement` of each call says
                which experts they hold.
            weights_format: with "fp8_block128" or "mxfp4" the layer holds codes in
                place of the experts' weights, for inference, and `experts` defaults to
                `jax_ep.experts.fp8`; `quantized` makes such a layer from a trained one.
                With None the layer holds weights.
            gated_shared_expert: whether the shared expert's result is multiplied by a
                sigmoid of the token, of its product with "shared_expert_gate", as in
                Qwen2-MoE.
            gated_linear_unit: whether experts have a gate. False, as in Nemotron-H,
                makes gate_up `[E, H, 1, F]` and shared_gate_up `[H, 1, S]`.
            shared_activation: that of the shared expert; None means `activation`.
            apply_router_weight_on_input: as in `jax_ep.moe_ffn`, for Llama 4.
            num_identity_experts: Z, as in `jax_ep.moe_ffn`, for LongCat-Flash. The
                router and its biases have E + Z columns.
            chunks: as in `jax_ep.moe_ffn`: the tokens of a rank go through the experts
                in up to this many parts, one after the other, with room for the rows of
                a part. The handle is for ceil(max_tokens_per_rank / chunks) tokens.
            ep: your own handle; None means one that layers of equal sizes share.

        Raises:
            ValueError, TypeError: an argument is not as described above.
        """
        arguments = Arguments(
            mesh=mesh,
            axis_name=axis_name,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            num_slots=num_slots,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            dtype=dtype,
            capacity_factor=capacity_factor,
            dispatch_format=dispatch_format,
            config_options=config_options,
            router=router,
            router_bias=router_bias,
            shared_intermediate_size=shared_intermediate_size,
            tp_axis_name=tp_axis_name,
            fsdp_axis_name=fsdp_axis_name,
            spec=spec,
            transport=transport,
            experts=experts,
            activation=activation,
            expert_bias=expert_bias,
            weights_format=weights_format,
            gated_shared_expert=gated_shared_expert,
            gated_linear_unit=gated_linear_unit,
            shared_activation=shared_activation,
            apply_router_weight_on_input=apply_router_weight_on_input,
            num_identity_experts=num_identity_experts,
            chunks=chunks,
        )
        self._layer = Layer.made("flax.MoE", arguments)
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(
                f"jax_ep.flax.MoE: rngs must be an nnx.Rngs, got {rngs!r}; make one "
                "with nnx.Rngs(0)"
            )
        made = _layer_params.param_dtype("flax.MoE", param_dtype)
        self.ep: EPHandle = self._layer.handle(ep)
        params = self._layer.params()

        def param(name: str) -> nnx.Param[jax.Array]:
            value = self._layer.initializer(name)(rngs.params(), made)
            return nnx.Param(value, out_sharding=params[name].spec, mesh=mesh)

        def optional(name: str) -> nnx.Param[jax.Array] | None:
            return param(name) if name in params else None

        self.router: nnx.Param[jax.Array] | None = optional("router")
        self.gate_up_scales: Codes | None = None
        self.down_scales: Codes | None = None
        if weights_format is None:
            self.gate_up: nnx.Param[jax.Array] | Codes = param("gate_up")
            self.down: nnx.Param[jax.Array] | Codes = param("down")
        else:
            self._hold(self._layer.initial_codes(rngs.params, made))
        self.shared_gate_up: nnx.Param[jax.Array] | None = optional("shared_gate_up")
        self.shared_down: nnx.Param[jax.Array] | None = optional("shared_down")
        self.shared_expert_gate: nnx.Param[jax.Array] | None = optional(
            "shared_expert_gate"
        )
        self.gate_bias: nnx.Param[jax.Array] | None = optional("gate_bias")
        self.up_bias: nnx.Param[jax.Array] | None = optional("up_bias")
        self.down_bias: nnx.Param[jax.Array] | None = optional("down_bias")
        self.router_logit_bias: nnx.Param[jax.Array] | None = optional(
            "router_logit_bias"
        )
        self.router_bias: RouterBias | None = (
            RouterBias(
                jnp.zeros(self._layer.num_choices, jnp.float32),
                out_sharding=(None,),
                mesh=mesh,
            )
            if self._layer.corrects_choice
            else None
        )

    def _hold(self, codes: QuantizedWeights, trained: MoE | None = None) -> None:
        """Keeps codes in place of the weights, those of `trained` if it is given."""
        params, mesh = self._layer.params(), self._layer.mesh

        def code(name: str) -> Codes:
            value, spec = getattr(codes, name), params[name].spec
            stack = (None,) * (value.ndim - len(spec))
            made = Codes(value, out_sharding=(*stack, *spec), mesh=mesh)
            if trained is not None:
                # In a stack it depends on the transformation whether the metadata has
                # the dimension of the layers.
                matrix: Any = getattr(trained, name.removesuffix("_scales"))
                given = matrix.get_metadata().get("out_sharding") or ()
                front = given[: max(len(given) - len(spec), 0)]
                made.set_metadata(out_sharding=(*front, *spec))
            # An attribute that was None is static for Flax until nnx.data marks it.
            return nnx.data(made)

        self.gate_up, self.gate_up_scales = code("gate_up"), code("gate_up_scales")
        self.down, self.down_scales = code("down"), code("down_scales")

    def quantize_weights(
        self, format: WeightFormat = "fp8_block128", backward: bool = False
    ) -> QuantizedWeights:
        """Returns the experts' weights as codes, to pass to calls as `quantized`.

        Quantise once per step if a step calls the layer several times, for microbatches
        or because `nnx.remat` repeats the call. Each rank quantises its own part.

        Args:
            format: as in `jax_ep.experts.quantize_weights`.
            backward: whether gradients will be taken with these codes.

        Returns:
            Global arrays, sharded like the weights.

        Raises:
            ValueError, TypeError: as in `jax_ep.experts.quantize_weights`, where H and
                F are the sizes of one rank's part; or the layer already holds codes.
        """
        masters = self.gate_up.get_value(), self.down.get_value()
        return self._layer.quantize_weights(*masters, format, backward)

    def quantized(self, format: WeightFormat = "fp8_block128") -> Self:
        """Returns a copy for inference, with codes in place of the experts' weights.

        The copy is like a layer made with `weights_format=format`. Its other parameters
        are variables of its own with the same arrays. A stack of layers, as `nnx.vmap`
        makes it along axis 0, becomes a stack.

        Args:
            format: "fp8_block128" or "mxfp4".

        Raises:
            ValueError, TypeError: as in `quantize_weights`.
        """
        codes = self.quantize_weights(format)
        copy = nnx.merge(*nnx.split(self))
        copy._layer = self._layer.with_codes(format)
        copy._hold(codes, self)
        return copy

    def prepared(self) -> QuantizedWeights:
        """Returns the codes of a layer with a `weights_format`, ready for kernels.

        Pass them as `quantized=` in every call of a loop. On Hopper GPUs kernels read
        codes in an order of their own, which a checkpoint does not hold. Unless you
        pass the prepared codes, each call reorders all codes again.

        Returns:
            Global arrays, sharded like the codes.

        Raises:
            ValueError: the layer has no `weights_format`.
        """
        has_codes = self._layer.weights_format is not None
        names = _codes.FIELDS if has_codes else ()
        return self._layer.prepared({n: getattr(self, n).get_value() for n in names})

    @overload
    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        routing: Routing | None = None,
        topk_ids: ArrayLike | None = None,
        input_scale: ArrayLike | None = None,
        placement: Placement | None = None,
        quantized: QuantizedWeights | None = None,
        return_aux: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        routing: Routing | None = None,
        topk_ids: ArrayLike | None = None,
        input_scale: ArrayLike | None = None,
        placement: Placement | None = None,
        quantized: QuantizedWeights | None = None,
        return_aux: Literal[True],
    ) -> tuple[jax.Array, MoEAux]: ...

    @overload
    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        routing: Routing | None = None,
        topk_ids: ArrayLike | None = None,
        input_scale: ArrayLike | None = None,
        placement: Placement | None = None,
        quantized: QuantizedWeights | None = None,
        return_aux: bool,
    ) -> jax.Array | tuple[jax.Array, MoEAux]: ...

    def __call__(
        self,
        x: ArrayLike,
        *,
        mask: ArrayLike | None = None,
        residual: ArrayLike | None = None,
        routing: Routing | None = None,
        topk_ids: ArrayLike | None = None,
        input_scale: ArrayLike | None = None,
        placement: Placement | None = None,
        quantized: QuantizedWeights | None = None,
        return_aux: bool = False,
    ) -> jax.Array | tuple[jax.Array, MoEAux]:
        """Applies the layer.

        Args:
            x: `[..., hidden_size]`, a global array.
            mask: bool `[...]`, False for padding tokens.
            residual: `[..., hidden_size]`, added to the result as in `jax_ep.moe_ffn`.
            routing: the decision of your own router for these tokens, in place of the
                layer's: `[..., K]` and `[..., E]`, for example what
                `jax_ep.router.route` returns for logits `[..., E]`. Its loss, if any,
                is that of the whole batch.
            topk_ids: int32 `[..., K]`, the experts of each token if they were chosen
                elsewhere; the layer's router makes their weights.
            input_scale: float32 `[]` or `[1]`, the global scale of dispatch_format
                "nvfp4", as in `jax_ep.dispatch`; None means 1.
            placement: which of the E experts each of the num_slots places holds
                (`jax_ep.placement`). The layer still has parameters for E experts;
                their weights are gathered to the places, and gradients of copies are
                summed. Changing the placement does not recompile. None puts expert e at
                place e, or spreads the experts evenly if there are more places.
            quantized: what `quantize_weights` returned. The matmuls use the codes, and
                the weights get the gradients. In a layer with a `weights_format`, what
                `prepared` returned.
            return_aux: whether to return a `jax_ep.MoEAux` as well.

        Returns:
            `[..., hidden_size]` in `dtype`; with `return_aux` a tuple of this and a
            `jax_ep.MoEAux` of global arrays.

        Raises:
            ValueError, TypeError: while tracing, if an argument is not as described
                above.
        """
        names = [*self._layer.params()]
        if self.router_bias is not None:
            names.append("router_bias")
        # get_value(), because [...] fails in Flax if a value is a ShapeDtypeStruct.
        params = {name: getattr(self, name).get_value() for name in names}
        y, aux = self._layer.apply(
            self.ep,
            params,
            x,
            mask=mask,
            residual=residual,
            routing=routing,
            topk_ids=topk_ids,
            input_scale=input_scale,
            placement=placement,
            quantized=quantized,
        )
        return (y, aux) if return_aux else y


# Type checkers would take any name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports `jax_ep.flax.linen` when it is first used."""
        if name == "linen":
            return importlib.import_module("jax_ep.flax.linen")
        raise AttributeError(f"module 'jax_ep.flax' has no attribute {name!r}")
