"""Mistakes that both type checkers must find; nothing runs this.

A line whose error is not reported has a comment that suppresses nothing, which is an
error itself (reportUnnecessaryTypeIgnoreComment, warn_unused_ignores).
"""

# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

import jax_ep
import jax_ep.flax
import jax_ep.flax.linen


def config() -> jax_ep.EPConfig:
    """Each option with a name that is none of its own."""
    return jax_ep.EPConfig(
        num_experts=8,
        top_k=2,
        hidden_size=128,
        max_tokens_per_rank=8,
        dtype=16,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        combine_dtype=8,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        dispatch_format="fp8",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        combine_format="mxfp8",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        grad_format="bf16",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        reduce="ranks",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        scale_layout="tiled",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        overlap="async",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    )


def fields(config: jax_ep.EPConfig) -> None:
    """A config is frozen, and its dtypes are names."""
    config.dtype = "float32"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    config.dtype.itemsize  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]
    config.combine_dtype.upper()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


def handles(mesh: Mesh, config: jax_ep.EPConfig, name: str) -> bool:
    """Transports."""
    jax_ep.init(mesh, "ep", config, "p2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.init(mesh, "ep", config, name)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.shared_handle(mesh, "ep", config, "p2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with jax_ep.init(mesh, "ep", config) as ep:
        return ep.transport == "auto"  # type: ignore[comparison-overlap]  # pyright: ignore[reportUnnecessaryComparison]


def calls(ep: jax_ep.EPHandle, x: jax.Array, ids: jax.Array) -> bool:
    """What one call returned, where another wants something else of it."""
    d = jax_ep.dispatch(ep, x, ids)
    jax_ep.combine(ep, d.tokens, d)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.combine_wait(d)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.dequantize(d.tokens)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.sharded.combine(ep, d.tokens, d)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    return d.format == "mxfp6"  # type: ignore[comparison-overlap]  # pyright: ignore[reportUnnecessaryComparison]


def formats(x: jax.Array) -> None:
    """Formats and dtypes of the stand-alone functions."""
    jax_ep.formats.quantize(x, "mxfp6")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.formats.dequantize(x, x, "fp4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.formats.dequantize(x, x, "mxfp4", dtype=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.formats.block("fp8")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def routers() -> None:
    """Scores."""
    jax_ep.router.Router(score="relu")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def few_arguments(rows: jax.Array, gate_up: jax.Array) -> jax.Array:
    """No function for `experts=`."""
    return rows * gate_up


def layers(mesh: Mesh, x: jax.Array, rngs: nnx.Rngs) -> None:
    """Of Flax."""
    moe = jax_ep.flax.MoE(
        mesh=mesh,
        axis_name="ep",
        hidden_size=128,
        intermediate_size=32,
        num_experts=8,
        top_k=2,
        max_tokens_per_rank=8,
        rngs=rngs,
        dispatch_format="fp8",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        transport="nccl",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        dtype=16,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        param_dtype=32,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        experts=few_arguments,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    )
    moe(x).aux  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    moe(x, return_aux=True).shape  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    moe.shared_down.get_value()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]
    linen = jax_ep.flax.linen.MoE(
        mesh=mesh,
        axis_name="ep",
        hidden_size=128,
        intermediate_size=32,
        num_experts=8,
        top_k=2,
        max_tokens_per_rank=8,
        dispatch_format="fp8",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        transport="nccl",  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        experts=few_arguments,  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    )
    linen(x, return_aux=True).shape  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def devices() -> None:
    """Dtypes of questions about the machine."""
    jax_ep.experts.ragged_dot_is_dense(16)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jax_ep.experts.ragged_dot_is_dense(dtypes="float32")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
