"""The experts' weights of a layer as codes, made from its parameters or replacing them.

They are sharded like the parameters. Each rank quantises its own part, so that ranks
exchange codes and not parameters. A part therefore consists of whole blocks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec

from jax_ep import experts as _experts
from jax_ep._core import errors, traces
from jax_ep._core.literals import WEIGHT_FORMATS, WeightFormat
from jax_ep._experts import quantized, select
from jax_ep._experts.quantized import QuantizedWeights
from jax_ep._layers.params import Param, entry_axes

FIELDS = quantized.CANONICAL


class Form(NamedTuple):
    """The kind of a `QuantizedWeights`: its format, and the transposed codes it has."""

    format: WeightFormat
    transposed: tuple[str, ...] = ()

    @classmethod
    def of(cls, codes: QuantizedWeights) -> Form:
        """Returns the form of `codes`."""
        names = (n for n in quantized.TRANSPOSED if getattr(codes, n) is not None)
        return cls(codes.format, tuple(names))

    @classmethod
    def made(cls, params: Mapping[str, Param], name: WeightFormat, mesh: Mesh) -> Form:
        """Returns the form of the codes that the function `made` returns."""
        if not select.operations().transposes_weights:
            return cls(name)
        parts = (_part(params[field], mesh) for field in ("gate_up", "down"))
        # Codes that are gathered are transposed afterwards, so that fewer bytes travel.
        whole = (
            n
            for n in quantized.transposed_layout(name, *parts)
            if params[_matrix(n)].gathered is None
        )
        return cls(name, tuple(whole))


def require_format(function: str, name: Any) -> None:
    """Raises unless `name` is None or a format of weights."""
    errors.require(
        errors.is_one_of(name, {None, *WEIGHT_FORMATS}),
        function,
        f"weights_format must be None or one of {list(WEIGHT_FORMATS)}",
        errors.brief(name),
        "leave it out to hold weights that can be trained",
    )


def in_place(params: Mapping[str, Param], name: WeightFormat) -> dict[str, Param]:
    """Returns `params` with codes and scales in place of gate_up and down."""
    matrices = params["gate_up"], params["down"]
    made = quantized.layout(name, *(matrix.shape for matrix in matrices))
    codes = {
        field: dataclasses.replace(params[_matrix(field)], shape=shape, dtype=dtype)
        for field, (dtype, shape) in made.items()
    }
    return {**params, **codes}


def _matrix(field: str) -> str:
    return field.removesuffix("_scales").removesuffix("_transposed")


def _part(param: Param, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of a rank's part."""
    spec = (*param.spec, *(None,) * (len(param.shape) - len(param.spec)))
    return tuple(
        size // math.prod(mesh.shape[axis] for axis in entry_axes(entry))
        for size, entry in zip(param.shape, spec, strict=True)
    )


def specs(params: Mapping[str, Param], form: Form) -> Any:
    """Returns a `QuantizedWeights` of the specs of its arrays."""
    each: Any = [PartitionSpec(*params[_matrix(field)].spec) for field in FIELDS]
    transposed: Any = {}
    for field in form.transposed:
        param = params[_matrix(field)]
        spec = (*param.spec, *(None,) * (len(param.shape) - len(param.spec)))
        entries = quantized.transposed_entries(form.format, spec)
        transposed[field] = PartitionSpec(*entries)
    return QuantizedWeights(*each, format=form.format, **transposed)


def checked(function: str, codes: Any, params: Mapping[str, Param]) -> QuantizedWeights:
    """Returns `codes`; raises unless they are codes of all the weights in `params`."""
    what = "the QuantizedWeights that quantize_weights of the layer returned"
    remedy = "pass it whole, or leave it out"
    errors.require_type(function, "quantized", codes, QuantizedWeights, what, remedy)
    wanted = params["gate_up"].shape, params["down"].shape
    errors.require(
        codes.shapes == wanted,
        function,
        f"quantized must hold codes of all experts, gate_up {wanted[0]} and down "
        f"{wanted[1]}",
        f"codes of {codes.shapes[0]} and {codes.shapes[1]}",
        "make them with quantize_weights of this layer",
    )
    return codes


def made(
    function: str,
    mesh: Mesh,
    params: Mapping[str, Param],
    masters: tuple[jax.Array, jax.Array],
    name: WeightFormat,
    backward: bool,
) -> QuantizedWeights:
    """Quantises gate_up and down, global arrays, each rank its own part."""
    whole = [params[field] for field in ("gate_up", "down")]
    form = Form.made(params, name, mesh)
    dropped = dict.fromkeys(set(quantized.TRANSPOSED) - set(form.transposed))

    def quantize(gate_up: jax.Array, down: jax.Array) -> QuantizedWeights:
        with errors.told_of(function):
            codes = _experts.quantize_weights(gate_up, down, name, backward)
        return dataclasses.replace(codes, **dropped)

    run = jax.shard_map(
        quantize,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*param.spec) for param in whole),
        out_specs=specs(params, form),
        # JAX batches a shard_map over a mesh axis only without this check.
        check_vma=not traces.spmd_axis_names(),
    )
    return run(*map(jax.lax.stop_gradient, masters))


def require_blocks(
    function: str,
    experts: str,
    multiple: int,
    hidden: int,
    inner: int,
    tp: str | None,
    parts: int,
) -> None:
    """Raises unless H and a rank's part of F are multiples of `multiple`."""
    remedy = "pad the weights with zeros, or use jax_ep.experts.auto"
    errors.require(
        hidden % multiple == 0,
        function,
        f"hidden_size must be a multiple of {multiple} for {experts}",
        hidden,
        remedy,
    )
    if tp is not None:
        remedy = f"pad the weights with zeros, or make {tp!r} a smaller axis"
    errors.require(
        inner % (multiple * parts) == 0,
        function,
        f"intermediate_size must be a multiple of {multiple} on each of {parts} "
        f"tensor-parallel ranks for {experts}",
        f"{inner}, which is {inner / parts:g} per rank",
        remedy,
    )


def prepared(
    function: str, mesh: Mesh, params: Mapping[str, Param], canonical: QuantizedWeights
) -> QuantizedWeights:
    """Adds what kernels read to canonical codes; each rank to its part."""
    form = Form.made(params, canonical.format, mesh)
    dropped = dict.fromkeys(set(quantized.TRANSPOSED) - set(form.transposed))

    def prepare(codes: QuantizedWeights) -> QuantizedWeights:
        with errors.told_of(function):
            return dataclasses.replace(_experts.prepare(codes), **dropped)

    run = jax.shard_map(
        prepare,
        mesh=mesh,
        in_specs=(specs(params, Form(canonical.format)),),
        out_specs=specs(params, form),
        # As in `made`.
        check_vma=not traces.spmd_axis_names(),
    )
    return run(canonical)
