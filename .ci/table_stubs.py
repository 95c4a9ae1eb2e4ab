"""Writes jax_ep/_native/tables.pyi from the native tables; --check compares.

It has a NamedTuple for the results of each target, and what `call` takes for it.
"""

import pathlib
import sys

from jax_ep._native import tables

STUB = pathlib.Path(__file__).resolve().parent.parent / "jax_ep/_native/tables.pyi"
TYPES = {"int64": "int", "float32": "float", "bool": "bool", "string": "str"}
HEAD = """# Written by .ci/table_stubs.py.
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar, overload

import jax

Size = tuple[tuple[str, ...], int]
T = TypeVar("T")

@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    dtype: str
    shape: tuple[Size, ...]
    form: str
    given: str | None
    omitted: tuple[Size, ...]
    when: str | None
    other: tuple[Size, ...]
    in_place_of: str | None
    def shape_with(self, flags: Mapping[str, bool]) -> tuple[Size, ...]: ...

@dataclasses.dataclass(frozen=True)
class Attribute:
    name: str
    type: str
    dim: str | None

@dataclasses.dataclass(frozen=True)
class Table:
    operands: tuple[Row, ...]
    results: tuple[Row, ...]
    attributes: tuple[Attribute, ...]
    packed: bool
    @property
    def from_operands(self) -> frozenset[str]: ...
    @property
    def shown(self) -> frozenset[str]: ...

TABLES: dict[str, Table]

def type_name(target: str) -> str: ...
def pick(kind: type[T], results: Any, **others: Any) -> T: ...
def struct(like: Any, shape: tuple[int, ...], dtype: Any) -> Any: ...
def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array: ...
"""


def has_call(table: tables.Table) -> bool:
    """Whether `call` takes it: not where results have as many dimensions as asked."""
    return all(row.form == "exact" for row in table.results)


def class_of(name: str, base: str, fields: list[tuple[str, str]]) -> str:
    """A class of annotated names."""
    if not fields:
        return f"class {name}({base}): ..."
    lines = [f"    {field}: {kind}" for field, kind in fields]
    return "\n".join([f"class {name}({base}):", *lines])


def classes(target: str, table: tables.Table) -> list[str]:
    """Of what a target gives, and of what it takes."""
    name = tables.type_name(target)
    array, optional = "jax.Array", "jax.Array | None"
    results = [(row.name, optional if row.given else array) for row in table.results]
    operands = [
        (row.name, f"NotRequired[{optional}]" if row.given else array)
        for row in table.operands
    ]
    attributes = [
        (each.name, TYPES[each.type])
        for each in table.attributes
        if each.name not in table.from_operands
    ]
    attributes += [(flag, "bool") for flag in sorted(table.shown)]
    return [
        class_of(name, "NamedTuple", [("results", array)] if table.packed else results),
        class_of(f"{name}Operands", "TypedDict", operands),
        class_of(f"{name}Attributes", "TypedDict", attributes),
    ]


def call_of(target: str) -> str:
    """An overload of `call`."""
    name = tables.type_name(target)
    return f"""@overload
def call(
    target: Literal["{target}"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: {name}Operands,
    attributes: {name}Attributes,
) -> {name}: ..."""


def unpack_of(target: str) -> str:
    """An overload of `unpack`."""
    return f"""@overload
def unpack(
    target: Literal["{target}"], results: jax.Array, dims: Mapping[str, int]
) -> {tables.type_name(target)}: ..."""


def stub() -> str:
    """The whole file."""
    called = {t: table for t, table in tables.TABLES.items() if has_call(table)}
    parts = [part for each in called.items() for part in classes(*each)]
    packed = [t.removesuffix("_aside") for t, table in called.items() if table.packed]
    functions = [call_of(target) for target in called]
    functions += [unpack_of(target) for target in packed]
    return "\n\n".join([HEAD.rstrip(), *parts]) + "\n\n" + "\n".join(functions) + "\n"


def main() -> None:
    """Writes or compares."""
    if "--check" not in sys.argv:
        STUB.write_text(stub())
    elif STUB.read_text() != stub():
        sys.exit("jax_ep/_native/tables.pyi is stale; run python .ci/table_stubs.py")


if __name__ == "__main__":
    main()
