"""Registers the package's pytree classes with JAX and with what saves pytrees.

A saved value names its class and its fields, so these names must stay. A field that is
added later needs a default, which values saved before then get; the default of an array
must be None, because a program that was exported before has no such argument.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import jax
from jax import export

from jax_ep._core import errors

T = TypeVar("T")

# What to do if a saved value names another handle.
SAME_HANDLE = (
    "a saved one fits a handle of equal content and number only: call jax_ep.init with "
    "the mesh, axis names and configs of the program that saved it, in its order"
)


class _Kind(NamedTuple):
    """How values of a class are taken apart; `cls(**fields)` puts them together.

    Attributes:
        cls: the class.
        arrays: fields with arrays or pytrees of them, in JAX's order.
        static: all other fields.
        records: the NamedTuple classes of static fields that hold one.
    """

    cls: type
    arrays: tuple[str, ...]
    static: tuple[str, ...]
    records: Mapping[str, Callable[..., Any]]


_kinds: dict[type, _Kind] = {}


def register(
    *, static: Sequence[str] = (), records: Mapping[str, Callable[..., Any]] = {}
) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that makes a dataclass a pytree that can be saved.

    Args:
        static: fields that are part of the structure: ints, strings, None, or
            NamedTuples of tuples of these. All others are children, in their order.
        records: as in `_Kind`.
    """

    def decorate(cls: type[T]) -> type[T]:
        fields = dataclasses.fields(cast(Any, cls))
        arrays = [f.name for f in fields if f.name not in static]
        jax.tree_util.register_dataclass(cls, arrays, list(static))
        return serialisable(cls, arrays, static, records)

    return decorate


def serialisable(
    cls: type[T],
    arrays: Sequence[str],
    static: Sequence[str] = (),
    records: Mapping[str, Callable[..., Any]] = {},
) -> type[T]:
    """Lets `jax.export`, and Flax once `jax_ep.flax` is imported, save a pytree class.

    Args:
        cls: a pytree class whose constructor takes its fields by name.
        arrays: fields that are its children, in order.
        static: fields that its static data are a tuple of, in order.
        records: as in `_Kind`.
    """
    kind = _Kind(cls, tuple(arrays), tuple(static), records)
    _kinds[cls] = kind
    # JAX keeps the first class of a name. It refuses that of a module that is reloaded,
    # which must not fail for that.
    with contextlib.suppress(ValueError):
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"jax_ep.{cls.__name__}",
            serialize_auxdata=partial(_written, kind),
            deserialize_auxdata=json.loads,
            from_children=partial(_read, kind),
        )
    return cls


def classes() -> Iterator[type]:
    """Yields all classes that were made `serialisable`."""
    yield from _kinds


def to_state(value: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the fields of a value by name, for Flax.

    Args:
        value: of a `serialisable` class.
        convert: `flax.serialization.to_state_dict`.
    """
    kind = _kinds[type(value)]
    arrays = {name: convert(getattr(value, name)) for name in kind.arrays}
    return arrays | {name: _plain(getattr(value, name)) for name in kind.static}


def from_state(target: T, state: Any, convert: Callable[..., Any]) -> T:
    """Returns the value that `to_state` took apart.

    Args:
        target: a value of the same structure; its arrays are not used.
        state: what `to_state` returned.
        convert: `flax.serialization.from_state_dict`.

    Raises:
        ValueError: the fields of `state` are not those of the class, or a static field
            is not as in `target`.
    """
    kind = _kinds[type(target)]
    if not isinstance(state, Mapping):
        raise errors.invalid(
            kind.cls.__name__,
            "the saved value must be a mapping from fields to values",
            type(state).__name__,
            "pass what flax.serialization.to_state_dict returned",
            kind=TypeError,
        )
    given = {
        name: convert(getattr(target, name), state[name], name=name)
        if name in kind.arrays
        else _parsed(kind, name, state[name])
        for name in _known(kind, state)
    }
    made = kind.cls(**given)
    for name in kind.static:
        _require_same(kind, name, getattr(target, name), getattr(made, name))
    return made


def _require_same(kind: _Kind, name: str, wanted: Any, found: Any) -> None:
    if wanted == found:
        return
    remedy = "restore it into a value that was made with the same options"
    if name == "key":
        wanted, found, remedy = f"{wanted:#x}", f"{found:#x}", SAME_HANDLE
    raise errors.invalid(
        kind.cls.__name__,
        f"{name} of the saved value must be that of the target, {wanted}",
        found,
        remedy,
    )


def _written(kind: _Kind, aux_data: Any) -> bytes:
    """Returns the static data and the names of the children, for `jax.export`."""
    # The static data of a NamedTuple are not a tuple.
    values = dict(zip(kind.static, aux_data, strict=True)) if kind.static else {}
    static = {name: _plain(value) for name, value in values.items()}
    return json.dumps({"arrays": kind.arrays, "static": static}).encode()


def _read(kind: _Kind, aux_data: Any, children: Sequence[Any]) -> Any:
    """Returns the value that has the data of `_written`."""
    arrays = dict(zip(aux_data["arrays"], children, strict=True))
    given = arrays | {
        name: _parsed(kind, name, value) if name in kind.static else value
        for name, value in aux_data["static"].items()
    }
    return kind.cls(**{name: given[name] for name in _known(kind, given)})


def _known(kind: _Kind, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the given fields; raises if some are unknown or missing."""
    known = {*kind.arrays, *kind.static}
    parameters = inspect.signature(kind.cls).parameters
    empty = inspect.Parameter.empty
    needed = {name for name in known if parameters[name].default is empty}
    rule = f"the saved value must have the fields of {kind.cls.__name__}"
    remedy = "load it with the version of jax_ep that saved it"
    if needed - given.keys():
        missing = f"none of {sorted(needed - given.keys())}"
        raise errors.invalid(kind.cls.__name__, rule, missing, remedy)
    if given.keys() - known:
        more = f"also {sorted(given.keys() - known)}"
        raise errors.invalid(kind.cls.__name__, rule, more, remedy)
    return tuple(given)


def _plain(value: Any) -> Any:
    """Returns a static value as ints, strings, None, lists and dicts."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _parsed(kind: _Kind, name: str, value: Any) -> Any:
    """Returns the static value that `_plain` was given."""
    if isinstance(value, Mapping):
        parts = {part: _parsed(kind, name, each) for part, each in value.items()}
        return kind.records[name](**parts)
    if isinstance(value, list | tuple):
        return tuple(_parsed(kind, name, each) for each in value)
    return value
