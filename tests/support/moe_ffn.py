"""Runs jax_ep.moe_ffn over a mesh, for tests of the layers."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe_dense

N = 8  # tokens per rank


def config(**changes):
    fields = {
        "num_experts": moe_dense.EXPERTS,
        "top_k": moe_dense.TOP_K,
        "hidden_size": moe_dense.HIDDEN,
        "max_tokens_per_rank": N,
        "dtype": "float32",
    }
    return jax_ep.EPConfig(**(fields | helpers.on_nodes() | changes))


def param_specs(params, tp):
    specs = {
        "router": P(),
        "router_bias": P(),
        "router_logit_bias": P(),
        "gate_up": P("ep", None, None, tp),
        "down": P("ep", tp),
        "gate_bias": P("ep", tp),
        "up_bias": P("ep", tp),
        "down_bias": P("ep"),
        "shared_gate_up": P(None, None, tp),
        "shared_down": P(tp),
        "shared_expert_gate": P(),
    }
    return {name: specs[name] for name in params}


def expert_parallel(mesh, ep, params, router, **options):
    """A function of (params, x, mask) on global arrays: (y, aux)."""
    tp = "tp" if "tp" in mesh.axis_names else None
    tokens = P(tuple(name for name in mesh.axis_names if name != "tp"))
    (axes,) = tokens

    def body(params, x, mask):
        return jax_ep.moe_ffn(
            ep, x, params, router=router, mask=mask, tp_axis=tp, **options
        )

    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(param_specs(params, tp), tokens, tokens),
        out_specs=(tokens, jax_ep.MoEAux.specs(axes)),
    )
