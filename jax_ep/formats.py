"""Token formats, as the native module lists them (SPEC: section 5, formats)."""

from __future__ import annotations

import jax.numpy as jnp

from jax_ep._native import cpu as native

_FORMATS = {entry["name"]: entry for entry in native.formats()}


def names() -> tuple[str, ...]:
    """The formats that `EPConfig.dispatch_format` takes."""
    return tuple(_FORMATS)


def block(name: str) -> int:
    """Elements of a token that share one scale; `hidden_size` is a multiple of it."""
    return _FORMATS[name]["block"]


def payload_dtype(name: str, dtype: str) -> jnp.dtype:
    """The dtype of dispatched tokens in format `name`, for tokens of `dtype`."""
    return jnp.dtype(_FORMATS[name]["payload_dtype"] or dtype)
