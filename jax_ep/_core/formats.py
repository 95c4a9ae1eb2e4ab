"""What the native module knows about token formats (docs/formats.md)."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp

from jax_ep._core.literals import Format, WireFormat
from jax_ep._native.loader import cpu as native

_FORMATS: dict[Format, dict[str, Any]] = {
    entry["name"]: entry for entry in native.formats()
}


def names() -> tuple[Format, ...]:
    """The formats that `EPConfig.dispatch_format` takes."""
    return tuple(_FORMATS)


def wire_names() -> tuple[WireFormat, ...]:
    """The formats that `EPConfig.combine_format` and `grad_format` take."""
    found = (name for name, entry in _FORMATS.items() if entry["is_wire_format"])
    return cast("tuple[WireFormat, ...]", tuple(found))


def is_quantized(name: Format) -> bool:
    """Whether tokens in format `name` have scales."""
    return _FORMATS[name]["scale_dtype"] is not None


def takes_input_scale(name: Format) -> bool:
    """Whether format `name` has a global scale that the caller may give."""
    return _FORMATS[name]["takes_input_scale"]


def tiles_scales(name: Format) -> bool:
    """Whether scales in format `name` may have `scale_layout="tiled_128x4"`."""
    return _FORMATS[name]["tiles_scales"]


def columns_of_scales(name: Format) -> bool:
    """Whether scales in format `name` may have `scale_layout="columns"`."""
    return _FORMATS[name]["columns_of_scales"]


def block(name: Format) -> int:
    """How many elements share one scale; `hidden_size` is a multiple of it."""
    return _FORMATS[name]["block"]


def payload_dtype(name: Format, dtype: str) -> jnp.dtype:
    """The dtype of dispatched tokens in format `name`, for tokens of `dtype`."""
    return jnp.dtype(_FORMATS[name]["payload_dtype"] or dtype)


def scale_dtype(name: Format) -> jnp.dtype | None:
    """The dtype of the scales of format `name`, or None."""
    found = _FORMATS[name]["scale_dtype"]
    return None if found is None else jnp.dtype(found)


def columns(name: Format, hidden: int) -> int:
    """Columns of dispatched tokens of `hidden` elements: two 4-bit codes share one."""
    if not is_quantized(name):
        return hidden
    return native.encoded_bytes(name, hidden, 2)[0]
