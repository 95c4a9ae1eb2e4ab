"""Bad arguments of formats.quantize and dequantize: what is raised and what it says."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from errors import check_form, raises

from jax_ep import formats

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
        "(1, 256)",
    ),
    "result": (
        lambda: formats.dequantize(
            *formats.quantize(X, "mxfp8"), "mxfp8", dtype="int8"
        ),
        "dequantize",
        "int8",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    call, function, *words = ERRORS[case]
    with raises() as caught:
        call()
    check_form(caught, f"formats.{function}", *words)
