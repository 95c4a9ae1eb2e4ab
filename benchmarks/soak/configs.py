"""The handles that soak.py calls."""

from __future__ import annotations

import dataclasses

import jax_ep

# (changes of B, whether its calls are made in halves). Values of codes.py must cross
# exactly, so a format that quantises sums must have one row per sum.
OPTIONS = {
    "mxfp8": ({"dispatch_format": "mxfp8", "hidden_size": 256}, False),
    "tiled": (
        {
            "dispatch_format": "mxfp4",
            "hidden_size": 256,
            "scale_layout": "tiled_128x4",
            "reduce": "none",
        },
        True,
    ),
    "fp8": (
        {
            "dispatch_format": "fp8_block128",
            "hidden_size": 256,
            "reduce": "source",
            "combine_format": "fp8_block128",
            "combine_dtype": None,
        },
        True,
    ),
    "nvfp4": ({"dispatch_format": "nvfp4", "hidden_size": 256}, False),
    "wires": (
        {
            "top_k": 1,
            "hidden_size": 256,
            "combine_format": "fp8_block128",
            "grad_format": "fp8_block128",
            "combine_dtype": None,
        },
        False,
    ),
    "source": ({"reduce": "source", "combine_dtype": None}, True),
    "shared": ({"fused_shared_expert": True, "expert_alignment": 4}, True),
    "shared_source": (
        {
            "fused_shared_expert": True,
            "reduce": "source",
            "dispatch_format": "fp8_block128_e8m0",
            "hidden_size": 256,
            "combine_dtype": None,
        },
        False,
    ),
    "local": ({"skip_a2a": True, "combine_dtype": None}, False),
    "local_none": (
        {"skip_a2a": True, "reduce": "none", "combine_dtype": None},
        True,
    ),
    "halves": ({}, True),
}


def configs(ranks):
    """Returns A: one region, drops; and B: two regions, another dtype, a free tail."""
    a = jax_ep.EPConfig(
        num_experts=16 * ranks,
        top_k=8,
        hidden_size=512,
        max_tokens_per_rank=768,
        capacity_factor=1.25,
        expert_alignment=8,
    )
    b = jax_ep.EPConfig(
        num_experts=6 * ranks,
        top_k=3,
        hidden_size=264,
        max_tokens_per_rank=256,
        dtype="float32",
        combine_dtype="bfloat16",
        recv_capacity=700,
        zero_tail=False,
    )
    return a, b


def changed(config, name):
    """Returns B, `config`, with an option."""
    changes, in_halves = OPTIONS[name]
    pending = 1 if in_halves else 0
    return dataclasses.replace(
        config, recv_capacity=200, pending_calls=pending, **changes
    )


def defaults(transport):
    """Returns all options that a transport supports."""
    exchanging = [name for name in OPTIONS if not OPTIONS[name][0].get("skip_a2a")]
    return exchanging if transport == "shmem" else list(OPTIONS)
