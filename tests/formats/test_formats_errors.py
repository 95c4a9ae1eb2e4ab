"""Bad arguments of formats.quantize and dequantize: what is raised and what it says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import formats
from support import helpers
from support.errors import check_form, raises

X = np.ones((2, 256), np.float32)
ERRORS = {
    "format": (lambda: formats.quantize(X, "fp7"), "quantize", "fp7", "mxfp4"),
    "dtype": (lambda: formats.quantize(X.astype(int), "mxfp8"), "quantize", "int"),
    "scalar": (lambda: formats.quantize(X[0, 0], "mxfp8"), "quantize", "()"),
    "list": (lambda: formats.quantize([1.0], "mxfp8"), "quantize", "list"),
    "block": (lambda: formats.quantize(X[:, :96], "fp8_block128"), "quantize", "96"),
    "16_bytes": (lambda: formats.quantize(X[:, :48], "nvfp4"), "quantize", "48", "16"),
    "no_scale": (
        lambda: formats.quantize(X, "mxfp8", jnp.float32(2)),
        "quantize",
        "input_scale",
        "nvfp4",
    ),
    "scale_number": (
        lambda: formats.quantize(X, "nvfp4", 2.0),
        "quantize",
        "input_scale",
        "float",
    ),
    "scale_dtype": (
        lambda: formats.quantize(X, "nvfp4", jnp.bfloat16(2)),
        "quantize",
        "input_scale",
        "bfloat16",
    ),
    "objects": (lambda: formats.quantize(X.astype(object), "mxfp8"), "quantize"),
    "columns": (
        lambda: formats.dequantize(
            *formats.quantize(X, "mxfp8"), "mxfp8", scale_layout="columns"
        ),
        "dequantize",
        "scale_layout",
        "['fp8_block128']",
        "'mxfp8'",
    ),
    "columns_of_ranks": (
        lambda: formats.dequantize(
            *formats.quantize(X[None], "fp8_block128"),
            "fp8_block128",
            scale_layout="columns",
        ),
        "dequantize",
        "2 dimensions",
        "(1, 2, 256)",
    ),
    "columns_of_others": (
        lambda: formats.dequantize(
            *formats.quantize(X[:1], "fp8_block128"),
            "fp8_block128",
            scale_layout="columns",
        ),
        "dequantize",
        "tokens and scales must be [..., C] and [..., S] with C = ",
    ),
    "no_dtype": (
        lambda: formats.dequantize(*formats.quantize(X, "mxfp8"), "mxfp8", dtype="foo"),
        "dequantize",
        "dtype",
        "'foo'",
    ),
    "dtype_none": (
        lambda: formats.dequantize(*formats.quantize(X, "mxfp8"), "mxfp8", dtype=None),
        "dequantize",
        "dtype",
        "None",
    ),
    "scale_shape": (
        lambda: formats.quantize(X, "nvfp4", jnp.ones(2)),
        "quantize",
        "input_scale",
        "(2,)",
    ),
    "scales_missing": (
        lambda: formats.dequantize(formats.quantize(X, "mxfp8")[0], None, "mxfp8"),
        "dequantize",
        "scales",
        "None",
    ),
    "scales_given": (lambda: formats.dequantize(X, X, "bf16"), "dequantize", "scales"),
    "other_format": (
        lambda: formats.dequantize(*formats.quantize(X, "mxfp8"), "fp8_block128"),
        "dequantize",
        "scales",
        "float32",
    ),
    "other_shape": (
        lambda: formats.dequantize(
            formats.quantize(X, "mxfp8")[0],
            formats.quantize(X[:1], "mxfp8")[1],
            "mxfp8",
        ),
        "dequantize",
        "(2, 256) and (1, 8)",
    ),
    "result": (
        lambda: formats.dequantize(
            *formats.quantize(X, "mxfp8"), "mxfp8", dtype="int8"
        ),
        "dequantize",
        "int8",
    ),
}

# Changes to the config, input_scale, words of the message.
GLOBAL_SCALES = {
    "none": ({}, jnp.float32(2), "bf16", "nvfp4"),
    "other_format": ({"dispatch_format": "mxfp8"}, jnp.float32(2), "mxfp8", "nvfp4"),
    "dtype": ({"dispatch_format": "nvfp4"}, jnp.bfloat16(2), "float32", "bfloat16"),
    "shape": ({"dispatch_format": "nvfp4"}, jnp.ones(2), "(2,)"),
    "number": ({"dispatch_format": "nvfp4"}, 2.0, "float"),
}


@pytest.mark.parametrize("case", GLOBAL_SCALES)
def test_global_scale_of_a_dispatch(case: str) -> None:
    changes, scale, *words = GLOBAL_SCALES[case]
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, helpers.make_config(hidden_size=64, **changes))

    def body(tokens, ids):
        return jax_ep.dispatch(ep, tokens, ids, input_scale=scale)

    spec = P("ep")
    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    shape = jax.ShapeDtypeStruct
    with raises() as caught:
        jax.eval_shape(run, shape((8, 64), "bfloat16"), shape((8, 3), "int32"))
    check_form(caught, "dispatch", "input_scale", *words)


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, function, *words = ERRORS[case]
    with raises() as caught:
        call()
    check_form(caught, f"formats.{function}", *words)
