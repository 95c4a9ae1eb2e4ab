"""A mixture-of-experts layer for Flax Linen, equal to `jax_ep.flax.MoE`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Self, overload

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_ep._core import calls as _calls
from jax_ep._core import errors as _errors
from jax_ep._core.handle import EPHandle
from jax_ep._core.literals import Format, RouterBiases, Transport, WeightFormat
from jax_ep._core.types import ExpertsFunction
from jax_ep._layers import layer as _layer
from jax_ep._layers import params as _layer_params
from jax_ep._layers.codes import FIELDS
from jax_ep._layers.moe import MoEAux
from jax_ep.experts import Activation, QuantizedWeights
from jax_ep.placement import Placement
from jax_ep.router import Router, RouterFunction, Routing

__all__ = ["MoE"]


def _require_names(
    values: Mapping[str, Any], names: Sequence[str], method: str, argument: str
) -> None:
    """Raises ValueError if a method got params in place of variables, or vice versa."""
    passed = {"params": "variables['params']", "variables": "all variables"}
    _errors.require(
        set(names) <= set(values),
        f"flax.linen.MoE.{method}",
        f"{argument} must have {list(names)}",
        sorted(values),
        f"pass {passed[argument]} of this layer",
    )


@_calls.explained_class("flax.linen.MoE")
class MoE(nn.Module):
    """Router, experts and an optional shared expert: `[..., hidden] -> [..., hidden]`.

    The fields are the arguments of `jax_ep.flax.MoE`. The parameters have the same
    names as there, except that `router` is called `router_kernel`; they are
    `nn.Partitioned` and created sharded over the mesh. The bias that only chooses
    experts, if any, is "bias" in the collection "router_state"; the one of the logits
    is the parameter "router_logit_bias". With a `weights_format`, codes and scales
    are in the collection "codes": "gate_up", "gate_up_scales", "down" and
    "down_scales". If the collection "losses" is mutable, the losses are sown into it as
    "balance_loss" and "z_loss".
    """

    mesh: Mesh
    axis_name: str | Sequence[str]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    max_tokens_per_rank: int
    dtype: DTypeLike = "bfloat16"
    param_dtype: DTypeLike = "float32"
    capacity_factor: float | None = None
    dispatch_format: Format = "bf16"
    config_options: Mapping[str, Any] | None = None
    router: Router | RouterFunction | Literal[False] | None = None
    router_bias: bool | RouterBiases = False
    shared_intermediate_size: int | None = None
    tp_axis_name: str | None = None
    fsdp_axis_name: str | None = None
    spec: PartitionSpec | None = None
    transport: Transport = "auto"
    experts: ExpertsFunction | None = None
    activation: Activation | None = None
    expert_bias: bool = False
    num_slots: int | None = None
    weights_format: WeightFormat | None = None
    gated_shared_expert: bool = False
    gated_linear_unit: bool = True
    shared_activation: Activation | None = None
    apply_router_weight_on_input: bool = False
    num_identity_experts: int = 0
    chunks: int = 1
    ep: EPHandle | None = None

    def __reduce__(self) -> NoReturn:
        """Raises, because the mesh belongs to one process."""
        _layer.refuse_pickling("flax.linen.MoE")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns a clone that shares the mesh and the handle."""
        return self.clone()

    @nn.nowrap
    def _made(self) -> _layer.Layer:
        return _layer.Layer.made("flax.linen.MoE", _layer.Arguments.of(self))

    @nn.nowrap
    def quantize_weights(
        self,
        params: Mapping[str, Any],
        format: WeightFormat = "fp8_block128",
        backward: bool = False,
    ) -> QuantizedWeights:
        """Returns the experts' weights as codes; see `jax_ep.flax.MoE`.

        Args:
            params: this layer's `variables["params"]`, boxed or not.
            format: as in `jax_ep.experts.quantize_weights`.
            backward: whether gradients will be taken with these codes.

        Raises:
            ValueError, TypeError: as in `jax_ep.flax.MoE.quantize_weights`.
        """
        layer = self._made()
        whole = nn.unbox(params)
        _require_names(whole, ("gate_up", "down"), "quantize_weights", "params")
        return layer.quantize_weights(whole["gate_up"], whole["down"], format, backward)

    @nn.nowrap
    def quantized(
        self, variables: Mapping[str, Any], format: WeightFormat = "fp8_block128"
    ) -> tuple[Self, dict[str, Any]]:
        """Returns a layer for inference, with codes in place of the experts' weights.

        Args:
            variables: this layer's variables, with "params", boxed or not.
            format: "fp8_block128" or "mxfp4".

        Returns:
            The layer with `weights_format=format`, and its variables, unboxed.

        Raises:
            ValueError, TypeError: as in `jax_ep.flax.MoE.quantize_weights`.
        """
        whole = nn.unbox(dict(variables))
        _require_names(whole, ("params",), "quantized", "variables")
        codes = self.quantize_weights(whole["params"], format)
        rest = {
            name: value
            for name, value in whole["params"].items()
            if name not in ("gate_up", "down")
        }
        held = {name: getattr(codes, name) for name in FIELDS}
        found = {**whole, "params": rest, "codes": held}
        return self.clone(weights_format=format), found

    @nn.nowrap
    def prepared(self, variables: Mapping[str, Any]) -> QuantizedWeights:
        """Returns the codes of a layer with a `weights_format`; see `jax_ep.flax.MoE`.

        Args:
            variables: this layer's variables, with "codes", boxed or not.

        Raises:
            ValueError: the layer has no `weights_format`.
        """
        layer = self._made()
        return layer.prepared(nn.unbox(dict(variables)).get("codes", {}))

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

    @nn.compact
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
        """Applies the layer; see `jax_ep.flax.MoE.__call__`."""
        layer = self._made()
        dtype = _layer_params.param_dtype("flax.linen.MoE", self.param_dtype)
        params = {}
        drawn = functools.cache(
            lambda: layer.initial_codes(lambda: self.make_rng("params"), dtype)
        )
        for name, param in layer.params().items():
            if param.dtype is not None:
                start = nn.with_partitioning(
                    functools.partial(_field, drawn, name), param.spec, mesh=self.mesh
                )
                params[name] = self.variable("codes", name, start).value
                continue
            make = nn.with_partitioning(
                layer.initializer(name), param.spec, mesh=self.mesh
            )
            # "router" is a field of this module, so the parameter needs another name.
            params[name] = self.param(_PARAM_NAMES.get(name, name), make, dtype)
        if layer.corrects_choice:
            bias = self.variable(
                "router_state", "bias", jnp.zeros, (layer.num_choices,), jnp.float32
            )
            params["router_bias"] = bias.value
        ep = layer.handle(self.ep)
        y, aux = layer.apply(
            ep,
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
        if not self.is_initializing():
            self.sow("losses", "balance_loss", aux.balance_loss)
            self.sow("losses", "z_loss", aux.z_loss)
        return (y, aux) if return_aux else y


def _field(codes: Callable[[], QuantizedWeights], name: str) -> jax.Array:
    return getattr(codes(), name)


_PARAM_NAMES = {"router": "router_kernel"}
