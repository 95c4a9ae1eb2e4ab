"""What public calls require of their arrays: a table for each call, and its reader.

A table is a tuple of `Operand`, in the order of the docstring:

    _OPERANDS = (
        Operand("topk_ids", "[n, K]", IDS, "give each token its top_k ids"),
        Operand("residual", "[n, H]", remedy="pass a row per token", optional=True),
    )
    arrays = operands.checked("combine", _OPERANDS, given, {"n": 8, "K": 2}, "bfloat16")

Letters are those of docstrings. `sizes` has the ones that are known; the others get
their sizes from the first operand that has them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._core import errors, formats
from jax_ep._core.arrays import as_array, as_ids, cast_remedy
from jax_ep._core.literals import DTYPES

CODES_REMEDY = "these are codes of a quantised dispatch: pass jax_ep.dequantize(d)"
SWAPPED = "ids before weights: jax.lax.top_k returns the weights first"

Shape = tuple[int, ...]
# Size of a letter, and in words what has that size if the letter does not say it; of
# "...", the dimensions in front.
Size = int | tuple[int, str] | Shape


class Kind(NamedTuple):
    """The dtypes that an operand may have.

    Attributes:
        words: the dtypes as in "must be <words>".
        holds: whether a dtype is one of them.
        becomes: the dtype that arrays are widened to, or None to leave them.
        remedy: returns what to do about a dtype, or None to cast to `becomes`.
        convert: makes an array of an operand.
    """

    words: str
    holds: Callable[[Any], bool]
    becomes: str | None = None
    remedy: Callable[[Any], str | None] = lambda dtype: None
    convert: Callable[[str, str, Any], jax.Array] = as_array


def is_codes(dtype: Any) -> bool:
    """Whether `dtype` holds the codes of a quantised format, not values."""
    quantized = filter(formats.is_quantized, formats.names())
    return any(dtype == formats.payload_dtype(name, "float32") for name in quantized)


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def dequantized(dtype: Any) -> str | None:
    """Returns what to do about codes in place of rows; None for other dtypes."""
    return CODES_REMEDY if is_codes(dtype) else None


def _of_values(dtype: Any) -> str:
    return dequantized(dtype) or "cast them to the dtype of the tokens"


IDS = Kind(
    "int32",
    lambda dtype: dtype == jnp.int32,
    "int32",
    lambda dtype: f"pass {SWAPPED}" if _is_float(dtype) else None,
    as_ids,
)
# Narrower floats are widened, which is exact.
WEIGHTS = Kind("float32", lambda d: _is_float(d) and d.itemsize <= 4, "float32")
FLOATS = Kind("of a floating dtype", _is_float)
WIDE_FLOATS = Kind(
    "bfloat16, float16, float32 or float64",
    lambda dtype: _is_float(dtype) and dtype.itemsize > 1,
    remedy=_of_values,
)
SUPPORTED = Kind(
    f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}",
    lambda dtype: dtype.name in DTYPES,
    remedy=_of_values,
)
ANY = Kind("of any dtype", lambda dtype: True)


class Found(NamedTuple):
    """What a remedy is made from.

    Attributes:
        shapes: the shapes of the operands that a row names, in its order.
        sizes: the known letters of the row.
    """

    shapes: Sequence[Shape]
    sizes: Mapping[str, int]


class Operand(NamedTuple):
    """A row of a table: an operand, or some whose shapes an error shows together.

    Attributes:
        names: a name, or "rows, bias and group_sizes".
        shapes: "[n, K]", or one for each name in the same form; "[..., H]" may have
            further dimensions in front, "" any shape.
        dtype: the dtypes that each may have, or a tuple with those of each name; None
            for the `dtype` of the call.
        remedy: what to do about a wrong shape.
        cast: what to do about a wrong dtype; None for what the kind says.
        optional: whether None is allowed.
    """

    names: str
    shapes: str
    dtype: Kind | str | tuple[Kind | str, ...] | None = None
    remedy: str | Callable[[Found], str] = (
        "pass arrays of one call, shaped as its docstring says"
    )
    cast: str | Callable[[Any], str | None] | None = None
    optional: bool = False


def of_codes(name: str, shapes: str, dtype: Any, words: str, remedy: str) -> Operand:
    """Returns the row of codes or scales of one dtype, which `words` describe."""

    def cast(found: Any) -> str:
        return cast_remedy(name, found, dtype) or remedy

    kind = Kind(f"{dtype}, {words}", lambda found: found == dtype)
    return Operand(name, shapes, kind, remedy, cast)


def checked(
    function: str,
    table: Sequence[Operand],
    given: Mapping[str, Any],
    sizes: Mapping[str, Size] | None = None,
    dtype: str | None = None,
) -> dict[str, jax.Array]:
    """Returns the operands of a table as arrays, without those that were omitted.

    Args:
        function: name below `jax_ep`, for messages.
        table: what the call requires.
        given: what the user passed, by name.
        sizes: sizes of letters, if need be with words.
        dtype: the dtype of rows that give none.

    Raises:
        TypeError: an operand is no array, or has another dtype.
        ValueError: it has another shape.
    """
    arrays = {}
    for row in table:
        names = _names(row.names)
        own: Any = row.dtype or dtype
        kinds = (own,) * len(names) if isinstance(own, Kind | str) else own
        for name, kind in zip(names, kinds, strict=True):
            value = given[name]
            if value is not None or not row.optional:
                arrays[name] = _cast(function, row, name, value, kind)
    bound: dict[str, Any] = {}
    words: dict[str, str] = {}
    for letter, size in (sizes or {}).items():
        of_letter: Any = size if isinstance(size, tuple) else (size, "")
        bound[letter], words[letter] = of_letter if letter != "..." else (size, "")
    for row in table:
        bound = _fitted(function, row, arrays, bound, words)
    return arrays


def _cast(
    function: str, row: Operand, name: str, value: Any, kind: Kind | str | None
) -> jax.Array:
    """Returns an operand as an array of a dtype that its row allows."""
    kind = _of_name(kind) if isinstance(kind, str) else kind
    assert kind is not None
    array = kind.convert(function, name, value)
    found = array.dtype
    if kind.holds(found):
        widened = kind.becomes is not None and found != kind.becomes
        return array.astype(kind.becomes) if widened else array
    cast = row.cast(found) if callable(row.cast) else row.cast
    to = kind.becomes or "float32"
    raise errors.invalid(
        function,
        f"{name} must be {kind.words}",
        found,
        cast or kind.remedy(found) or f"cast it with {name.split()[0]}.astype({to!r})",
        operand=name,
        kind=TypeError,
    )


@functools.cache
def _of_name(name: str) -> Kind:
    return Kind(name, lambda dtype: dtype == jnp.dtype(name), name)


def names_of(row: Operand) -> tuple[str, ...]:
    """Returns the names of the operands of a row."""
    return _names(row.names)


@functools.cache
def _names(names: str) -> tuple[str, ...]:
    return tuple(re.split(r", | and ", names))


@functools.cache
def _letters(shapes: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(filter(None, each.split(", ")))
        for each in re.findall(r"\[([^]]*)\]", shapes)
    )


def _fitted(
    function: str,
    row: Operand,
    arrays: Mapping[str, Any],
    bound: Mapping[str, Any],
    words: Mapping[str, str],
) -> dict[str, Any]:
    """Returns `bound` with the letters of a row; raises unless its shapes fit."""
    if not row.shapes:
        return dict(bound)
    names, patterns = _names(row.names), _letters(row.shapes)
    after, fits = dict(bound), True
    for name, letters in zip(names, patterns, strict=True):
        if name in arrays:
            fits = fits and _bind(after, letters, arrays[name].shape)
    if fits:
        return after
    found = [arrays[name].shape for name in names if name in arrays]
    known = {x: bound[x] for letters in patterns for x in letters if x in bound}
    texts = [
        f"{letter} = {size}" + (f" ({words[letter]})" if words.get(letter) else "")
        for letter, size in known.items()
        if size != ()
    ]
    remedy = row.remedy
    raise errors.invalid(
        function,
        f"{row.names} must be {row.shapes}" + " with " * bool(texts) + _listed(texts),
        _listed(list(map(str, found))),
        remedy if isinstance(remedy, str) else remedy(Found(found, known)),
        operand=names[0],
    )


def _bind(sizes: dict[str, Any], letters: Sequence[str], shape: Shape) -> bool:
    """Adds the sizes of new letters to `sizes`; returns whether all others agree."""
    if letters[:1] == ("...",):
        front = len(shape) - len(letters) + 1
        if front < 0 or sizes.setdefault("...", shape[:front]) != shape[:front]:
            return False
        letters, shape = letters[1:], shape[front:]
    return len(letters) == len(shape) and all(
        size == (int(x) if x.isdigit() else sizes.setdefault(x, size))
        for x, size in zip(letters, shape, strict=True)
    )


def _listed(texts: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
