"""Makes custom calls with operands and results by name, as the native tables list them.

A table has a row for each operand, result and attribute of a target. The native module
makes it from the table that its handlers decode calls with
(xla_ffi/ffi/operand_table.h). Type checkers see neither targets nor results: `call`
itself requires operands and attributes of the right names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import namedtuple
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._native import ffi
from jax_ep._native.loader import cpu as native

# A size: the product of these dimensions, if any, plus a number.
Size = tuple[tuple[str, ...], int]


class Row(NamedTuple):
    """An operand or a result.

    Attributes:
        name: keyword of the operand, or field of the result.
        dtype: dtype of the elements; "token", "output", "payload" and "scale" depend on
            the call.
        shape: size of each dimension.
        form: how to read `shape`. "exact": as it is. "any": ignore it, but there must
            be an element. "longer": the last dimension may be larger. "leading": the
            dimensions before the last count as one, their product. "flat": all
            dimensions do.
        given: flag that says whether it is given, or None if it always is.
        omitted: its shape if it is not given.
        when: flag with which shape and dtype are `other` and `other_dtype`, or None.
        other: the shape with that flag.
        other_dtype: the dtype with that flag.
        in_place_of: the operand whose memory the result takes over, or None.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    form: str
    given: str | None
    omitted: tuple[Size, ...]
    when: str | None
    other: tuple[Size, ...]
    other_dtype: str
    in_place_of: str | None

    def shape_with(self, flags: Mapping[str, bool]) -> tuple[Size, ...]:
        """The shape under these flags."""
        if self.given is not None and not flags[self.given]:
            return self.omitted
        return self.other if self._is_other(flags) else self.shape

    def dtype_with(self, flags: Mapping[str, bool]) -> str:
        """The dtype under these flags."""
        return self.other_dtype if self._is_other(flags) else self.dtype

    def _is_other(self, flags: Mapping[str, bool]) -> bool:
        return self.when is not None and flags[self.when]


class Attribute(NamedTuple):
    """An attribute: its type, and the dimension that it sets, if any."""

    name: str
    type: str
    dim: str | None


@dataclasses.dataclass(frozen=True)
class Table:
    """What a target takes and gives.

    Attributes:
        operands: in order.
        results: in order.
        attributes: all of them, including those that `call` derives from the operands.
        packed: whether the results are one int32 array `[1, all their elements]`.
        shown: flags that a caller gives because no operand or attribute implies them.
    """

    operands: tuple[Row, ...]
    results: tuple[Row, ...]
    attributes: tuple[Attribute, ...]
    packed: bool

    @functools.cached_property
    def from_operands(self) -> frozenset[str]:
        """Flags that say whether operands are given."""
        return frozenset(row.given for row in self.operands if row.given) - _OF_FORMATS

    @functools.cached_property
    def shown(self) -> frozenset[str]:
        """Flags of results that follow from neither operands nor attributes."""
        flags = {row.given for row in self.results if row.given}
        known = {each.name for each in self.attributes} | self.from_operands
        return frozenset(flags - known - _OF_FORMATS)


# Flags that follow from a call's `format` and `scale_layout`.
_OF_FORMATS = frozenset({"quantized", "plain", "tiled"})
_FORMATS = {entry["name"]: entry for entry in native.formats()}


def _table(found: Mapping[str, Any]) -> Table:
    return Table(
        operands=tuple(Row(**row) for row in found["operands"]),
        results=tuple(Row(**row) for row in found["results"]),
        attributes=tuple(Attribute(**row) for row in found["attributes"]),
        packed=found["packed"],
    )


TABLES: dict[str, Table] = {
    target: _table(found) for target, found in native.operand_tables().items()
}


def type_name(target: str) -> str:
    """The name of the class of a target's results."""
    return "".join(word.capitalize() for word in target.removeprefix("ep_").split("_"))


@functools.cache
def _results(target: str) -> Any:
    """The class of a target's results; making all of them would slow the import."""
    table = TABLES[target]
    return namedtuple(
        type_name(target),
        ["results"] if table.packed else [row.name for row in table.results],
    )


# Type checkers would take any name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns a class of results: `Dispatch` is what "ep_dispatch" returns."""
        for target in TABLES:
            if type_name(target) == name:
                return _results(target)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def pick(kind: Any, results: Any, **others: Any) -> Any:
    """Makes a NamedTuple or a dataclass from results by name and from `others`."""
    named = dataclasses.is_dataclass(kind)
    fields = [f.name for f in dataclasses.fields(kind)] if named else kind._fields
    return kind(
        **{f: others[f] if f in others else getattr(results, f) for f in fields}
    )


def struct(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of a result that varies over the mesh axes that `like` varies over."""
    kind = jax.typeof(like)
    # On a mesh with an explicit axis of size 1, the spec has an entry for each
    # dimension of `like`, which may not fit `shape`.
    whole = kind.sharding.update(spec=jax.sharding.PartitionSpec())
    return kind.update(
        shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=whole
    )


def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros that vary as `like` does; also placeholders of omitted operands."""
    return jax.lax.full_like(like, 0, dtype=jnp.dtype(dtype), shape=shape)


def call(
    target: str,
    like: jax.Array,
    dims: Mapping[str, int],
    operands: Mapping[str, jax.Array | None],
    attributes: Mapping[str, int | float | bool | str],
    config: Any = None,
) -> Any:
    """Calls `target` with operands and attributes by name.

    Omit an operand by passing None or leaving it out. Do not pass the attributes that
    say which operands are given, nor those whose value is the config's.

    Args:
        target: a key of `TABLES`.
        like: results vary over the mesh axes that it varies over, and rows of tokens
            have its dtype. Its last dimension is H unless an operand says otherwise.
        dims: sizes of dimensions that no operand has, such as N, G or W.
        operands: by name.
        attributes: by name, and the flags of `Table.shown`.
        config: has the attributes that are not among these, or None.

    Returns:
        A NamedTuple of the results, None for omitted ones. For a target with packed
        results it is `(results,)`, which `unpack` takes apart.
    """
    one = _Call(target, like, dims, operands, attributes, config)
    arrays = [one.operand(row) for row in one.table.operands]
    values = one.attributes()
    if one.table.packed:
        total = sum(math.prod(one.result(row).shape) for row in one.table.results)
        whole = struct(like, (1, total), jnp.int32)
        return _results(target)(ffi.call_on_stream(target, whole, *arrays, **values))
    names = [row.name for row in one.table.operands]
    aliases = {
        names.index(row.in_place_of): i
        for i, row in enumerate(one.table.results)
        if row.in_place_of is not None
    }
    for at in aliases:
        # XLA may pass a slice in place, and then other memory as its result.
        arrays[at] = jax.lax.optimization_barrier(arrays[at])
    results = ffi.call(
        target,
        [one.result(row) for row in one.table.results],
        *arrays,
        input_output_aliases=aliases or None,
        **values,
    )
    given = [row.given is None or one.flags[row.given] for row in one.table.results]
    return _results(target)(
        *(array if there else None for array, there in zip(results, given, strict=True))
    )


def unpack(target: str, results: jax.Array, dims: Mapping[str, int]) -> Any:
    """Takes packed results apart into those of `target`, for a later call.

    Args:
        target: the target that returns the same results unpacked.
        results: the packed results.
        dims: the sizes of all dimensions in the results.
    """
    rows = TABLES[target].results
    shapes = [tuple(_size(size, dims) for size in row.shape) for row in rows]
    ends = [sum(map(math.prod, shapes[: i + 1])) for i in range(len(shapes) - 1)]
    parts = jnp.split(results, ends, axis=1)
    return _results(target)(
        *(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
    )


def _size(size: Size, dims: Mapping[str, int]) -> int:
    factors, number = size
    return number + (math.prod(dims[name] for name in factors) if factors else 0)


class _Call:
    """One call's flags and dimensions."""

    def __init__(
        self,
        target: str,
        like: jax.Array,
        dims: Mapping[str, int],
        operands: Mapping[str, jax.Array | None],
        attributes: Mapping[str, Any],
        config: Any,
    ) -> None:
        self.target, self.like, self.operands = target, like, operands
        self.table = TABLES[target]
        self.values = {
            each.name: getattr(config, each.name)
            for each in self.table.attributes
            if hasattr(config, each.name)
        } | dict(attributes)
        known = {row.name for row in self.table.operands}
        more = {name for name in operands.keys() - known if operands[name] is not None}
        self._require(not more, "operands", more)
        self.format = _FORMATS[self.values.get("format", "bf16")]
        self.flags = self._flags()
        self.dims = self._dims(dims)
        self.placeholders: dict[tuple[Any, Any], jax.Array] = {}

    def _require(self, holds: bool, what: str, found: Any) -> None:
        # Callers in this package are at fault: users' arguments have been checked.
        if not holds:
            raise TypeError(f"{self.target}: wrong {what}, {sorted(found)}")

    def _flags(self) -> dict[str, bool]:
        table, values = self.table, self.values
        quantized = self.format["scale_dtype"] is not None
        flags = {
            "quantized": quantized,
            "plain": not quantized,
            "tiled": values.get("scale_layout") == "tiled_128x4",
        }
        for row in table.operands:
            there = self.operands.get(row.name) is not None
            if row.given is None or row.given in _OF_FORMATS:
                wanted = row.given is None or flags[row.given]
                self._require(there or not wanted, "operands without", [row.name])
            elif flags.setdefault(row.given, there) != there:
                self._require(False, "operands of", [row.given])
        for name in table.shown:
            flags[name] = bool(values.pop(name))
        for each in table.attributes:
            if each.type == "bool" and each.name not in flags:
                flags[each.name] = bool(values.get(each.name))
        return flags

    def _dims(self, dims: Mapping[str, int]) -> dict[str, int]:
        known = dict(dims)
        for each in self.table.attributes:
            if each.dim is not None:
                known[each.dim] = self.values[each.name]
        for row in self.table.operands:
            array = self.operands.get(row.name)
            if array is None or row.form not in ("exact", "longer"):
                continue
            shape = row.shape_with(self.flags)
            for (factors, number), size in zip(shape, array.shape, strict=True):
                if len(factors) == 1 and number == 0:
                    known.setdefault(factors[0], size)
        known.setdefault("H", self.like.shape[-1])
        if "format" in self.values:
            self._format_dims(known)
        return known

    def _format_dims(self, known: dict[str, int]) -> None:
        name, hidden = self.format["name"], known["H"]
        known["P"] = hidden
        if self.flags["quantized"]:
            known["P"] = native.encoded_bytes(name, hidden, 2)[0]
            known["S"] = hidden // self.format["block"]
        if "N" not in known:
            return
        if self.values.get("scale_layout") == "columns":
            known["A"], known["B"] = known["S"], native.scale_line(known["N"])
        elif self.flags["quantized"]:
            known["A"], known["B"] = known["N"], known["S"]
        if self.flags["tiled"]:
            known["V"], known["C"] = native.scale_tiles(
                known["N"], known["G"], known["S"]
            )

    def _dtype(self, row: Row) -> Any:
        dtype = row.dtype_with(self.flags)
        if dtype == "token":
            return self.like.dtype
        if dtype == "output":
            return self.values["out_dtype"]
        if dtype == "payload":
            return self.format["payload_dtype"] or self.like.dtype
        if dtype == "scale":
            return self.format["scale_dtype"] or jnp.uint8
        return dtype

    def _sizes(self, row: Row) -> tuple[int, ...]:
        return tuple(_size(size, self.dims) for size in row.shape_with(self.flags))

    def operand(self, row: Row) -> jax.Array:
        """Returns the operand's array, or one without elements if it is omitted."""
        array = self.operands.get(row.name)
        if array is not None and (row.given is None or self.flags[row.given]):
            return array
        kind = self._sizes(row), jnp.dtype(self._dtype(row))
        if kind not in self.placeholders:
            self.placeholders[kind] = zeros(self.like, *kind)
        return self.placeholders[kind]

    def result(self, row: Row) -> Any:
        """The type of a result."""
        # Results of ep_quantize and ep_dequantize are not: they have as many dimensions
        # as the operands.
        self._require(row.form == "exact", "result for this function", [row.name])
        return struct(self.like, self._sizes(row), self._dtype(row))

    def attributes(self) -> dict[str, Any]:
        """All attributes, in order."""
        made = self.flags.keys() & self.table.from_operands
        given = {name for name in self.values if name not in made}
        wanted = {each.name for each in self.table.attributes} - made
        self._require(given == wanted, "attributes", given ^ wanted)
        return {
            each.name: self.flags[each.name]
            if each.name in made
            else self.values[each.name]
            for each in self.table.attributes
        }
