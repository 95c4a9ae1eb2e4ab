"""Token formats, as the native module lists them (docs/formats.md).

`quantize` and `dequantize` do to tokens what a dispatch does, bit for bit, but send
nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jax_ep._core import errors, operands
from jax_ep._core.arrays import as_array, dtype_of
from jax_ep._core.formats import (
    block,
    columns,
    columns_of_scales,
    is_quantized,
    names,
    payload_dtype,
    scale_dtype,
    takes_input_scale,
    tiles_scales,
    wire_names,
)
from jax_ep._core.literals import DTYPES, Format
from jax_ep._core.operands import Operand
from jax_ep._core.varying import vary_alike, varying
from jax_ep._native import ffi
from jax_ep._native.loader import cpu as native

__all__ = [
    "block",
    "columns",
    "columns_of_scales",
    "dequantize",
    "global_scale",
    "is_quantized",
    "names",
    "payload_dtype",
    "quantize",
    "scale_dtype",
    "takes_input_scale",
    "tiles_scales",
    "wire_names",
]


_TOKENS = Operand(
    "tokens", "[..., H]", operands.SUPPORTED, "give them columns", "cast them"
)


def quantize(
    tokens: ArrayLike, format: Format, input_scale: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns tokens as `jax_ep.dispatch` would send them.

    It runs on the arrays of one device, with any leading dimensions: inside
    `jax.shard_map`, or on arrays that only one device holds. It has no derivative,
    unlike `jax_ep.dequantize`, which takes a `Dispatched`.

    Args:
        tokens: `[..., H]`, bfloat16, float16 or float32. H must be a multiple of the
            block, and a row of codes a multiple of 16 bytes ("nvfp4": H % 32 = 0).
        format: one of `names()`.
        input_scale: the global scale of "nvfp4", float32 `[]` or `[1]`; None is 1.

    Returns:
        `(tokens, scales)`, `[..., H]` (4-bit formats: `[..., H / 2]`) and
        `[..., H / block]`, in the dtypes of docs/formats.md; `(tokens, None)` for
        "bf16".

    Raises:
        ValueError, TypeError: an argument is not as described above.
    """
    _require_format("quantize", format)
    given = {"tokens": tokens}
    tokens = operands.checked("formats.quantize", (_TOKENS,), given)["tokens"]
    scale = global_scale("formats.quantize", format, tokens, input_scale)
    if not is_quantized(format):
        return tokens, None
    *leading, hidden = tokens.shape
    _require_blocks("quantize", format, hidden)
    tokens, scale = _alike(tokens, scale)
    made = ffi.call(
        "ep_quantize",
        (
            _struct(
                tokens, (*leading, columns(format, hidden)), payload_dtype(format, "")
            ),
            _struct(tokens, (*leading, hidden // block(format)), scale_dtype(format)),
        ),
        tokens,
        scale,
        vmap_method="broadcast_all",
        format=format,
    )
    return made[0], made[1]


def dequantize(
    tokens: ArrayLike,
    scales: ArrayLike | None,
    format: Format,
    input_scale: ArrayLike | None = None,
    *,
    dtype: DTypeLike = "float32",
    scale_layout: Literal["rows", "columns"] = "rows",
) -> jax.Array:
    """Returns the values that codes and scales stand for, rounded once to `dtype`.

    Like `quantize`, it runs on the arrays of one device and has no derivative.

    Args:
        tokens: codes as `quantize` or a dispatch made them, `[..., H]` or
            `[..., H / 2]`.
        scales: `[..., H / block]`, or as a dispatch with `scale_layout="columns"` gives
            them; None for "bf16".
        format: one of `names()`.
        input_scale: the one that `quantize` or `dispatch` was given.
        dtype: dtype of the result: bfloat16, float16 or float32.
        scale_layout: "columns" if `scales` are `[H / block, M]` for tokens `[N, H]`,
            where M is N padded to a multiple of 4; else "rows".

    Returns:
        `[..., H]`; for "bf16" `tokens` itself.

    Raises:
        ValueError, TypeError: an argument is not as described above.
    """
    _require_format("dequantize", format)
    tokens = as_array("formats.dequantize", "tokens", tokens)
    if not is_quantized(format):
        if scales is not None:
            raise ValueError(
                f"jax_ep.formats.dequantize: scales must be None for {format!r}, got "
                "some; leave them out"
            )
        return tokens
    result = dtype_of(dtype)
    if result is None or result.name not in DTYPES:
        raise TypeError(
            f"jax_ep.formats.dequantize: dtype must be one of {DTYPES}, got "
            f"{errors.brief(dtype)}; cast the result"
        )
    if scales is None:
        raise ValueError(
            f"jax_ep.formats.dequantize: scales must be given for {format!r}, got "
            "None; pass those that came with the tokens"
        )
    if not errors.is_one_of(scale_layout, ("rows",)):
        scales = as_array("formats.dequantize", "scales", scales)
        scales = _from_columns(tokens, scales, format, scale_layout)
    remedy, of = "pass arrays of one call", f"of {format!r}"
    codes, of_scales = payload_dtype(format, ""), scale_dtype(format)
    table = (
        operands.of_codes("tokens", "", codes, f"codes {of}", remedy),
        operands.of_codes("scales", "", of_scales, f"scales {of}", remedy),
        Operand("tokens and scales", "[..., C] and [..., S]", operands.ANY, remedy),
    )
    given = {"tokens": tokens, "scales": scales}
    blocks = jnp.shape(scales)[-1:]
    sizes = {"C": columns(format, blocks[0] * block(format))} if blocks else {}
    arrays = operands.checked("formats.dequantize", table, given, sizes)
    tokens, scales = arrays["tokens"], arrays["scales"]
    *leading, hidden = (*scales.shape[:-1], scales.shape[-1] * block(format))
    scale = global_scale("formats.dequantize", format, tokens, input_scale)
    tokens, scales, scale = _alike(tokens, scales, scale)
    return ffi.call(
        "ep_dequantize",
        (_struct(tokens, (*leading, hidden), result),),
        tokens,
        scales,
        scale,
        vmap_method="broadcast_all",
        format=format,
    )[0]


def global_scale(
    function: str, format: Format, like: jax.Array, input_scale: ArrayLike | None
) -> jax.Array:
    """Returns `input_scale` as float32 `[1]`; 1 if it was not given.

    Raises:
        ValueError, TypeError: the format takes none, or it is not a float32 scalar.
    """
    if input_scale is None:
        return jax.lax.full_like(like, 1, dtype=jnp.float32, shape=(1,))
    if not takes_input_scale(format):
        taking = [name for name in names() if takes_input_scale(name)]
        raise errors.invalid(
            function,
            f"input_scale must be None unless the format is one of {taking}",
            f"an input_scale for {format!r}",
            "leave it out",
            operand="input_scale",
        )
    scale = as_array(function, "input_scale", input_scale)
    if scale.dtype != jnp.float32 or scale.shape not in ((), (1,)):
        raise errors.invalid(
            function,
            "input_scale must be float32 of shape [] or [1]",
            f"{scale.dtype} {scale.shape}",
            "cast or reshape it",
            operand="input_scale",
            kind=TypeError,
        )
    return scale.reshape(1)


def _from_columns(
    tokens: jax.Array, scales: jax.Array, format: Format, scale_layout: str
) -> jax.Array:
    """Returns scales that lie in columns as scales by row."""
    allowed = [name for name in names() if columns_of_scales(name)]
    if not errors.is_one_of(scale_layout, ("columns",)) or format not in allowed:
        raise errors.invalid(
            "formats.dequantize",
            f'scale_layout must be "rows", or "columns" for a format of {allowed}',
            f"{errors.brief(scale_layout)} for {format!r}",
            "pass scales by row, and jax_ep.dequantize the result of a dispatch",
        )
    if tokens.ndim != 2 or scales.ndim != 2:
        raise errors.invalid(
            "formats.dequantize",
            'tokens and scales must have 2 dimensions with scale_layout="columns"',
            f"{tokens.shape} and {scales.shape}",
            "pass those of one rank",
        )
    return scales.T[: tokens.shape[0]]


def _require_format(function: str, format: Format) -> None:
    if not errors.is_one_of(format, names()):
        raise ValueError(
            f"jax_ep.formats.{function}: format must be one of {list(names())}, got "
            f"{errors.brief(format)}; docs/formats.md describes them"
        )


def _require_blocks(function: str, format: Format, hidden: int) -> None:
    unit = native.ROW_ALIGN_BYTES
    payload = native.encoded_bytes(format, hidden, 2)[0]
    if hidden == 0 or hidden % block(format) or payload % unit:
        raise ValueError(
            f"jax_ep.formats.{function}: the last dimension must be a positive "
            f"multiple of the block of {format!r}, {block(format)}, and {unit} bytes "
            f"of codes, got {hidden}; pad it with zeros"
        )


def _alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    axes = frozenset().union(*map(varying, arrays))
    return vary_alike(sorted(axes), frozenset(), *arrays)


def _struct(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.typeof(like).update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)
