"""Writes jax_ep/_native/tables.pyi from the native tables; --check only compares.

Type checkers read that file in place of tables.py, whose NamedTuples exist at run time
alone: for each target it has one of the results, and the arguments of `call`.
"""

import dataclasses
import inspect
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
"""
TAIL = """TABLES: dict[str, Table]

def type_name(target: str) -> str: ...
def pick(kind: type[T], results: Any, **others: Any) -> T: ...
def struct(like: Any, shape: tuple[int, ...], dtype: Any) -> Any: ...
def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array: ...
"""


def has_call(table: tables.Table) -> bool:
    """Whether `call` takes the target: only if every result has an exact shape."""
    return all(row.form == "exact" for row in table.results)


def class_of(name: str, base: str, fields: list[tuple[str, str]]) -> str:
    """Returns the source of a class with these annotated fields."""
    if not fields:
        return f"class {name}({base}): ..."
    lines = [f"    {field}: {kind}" for field, kind in fields]
    return "\n".join([f"class {name}({base}):", *lines])


def dataclass_of(kind: type) -> str:
    """Returns the source of a dataclass without what its methods do."""
    lines = ["@dataclasses.dataclass(frozen=True)", f"class {kind.__name__}:"]
    lines += [f"    {each.name}: {each.type}" for each in dataclasses.fields(kind)]
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        lines += ["    @property"] if isinstance(member, property) else []
        signature = str(inspect.signature(function)).replace("'", "")
        lines.append(f"    def {name}{signature}: ...")
    return "\n".join(lines)


def classes(target: str, table: tables.Table) -> list[str]:
    """Returns the classes of a target's results, operands and attributes."""
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
    """Returns the overload of `call` for a target."""
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
    """Returns the overload of `unpack` for a target."""
    return f"""@overload
def unpack(
    target: Literal["{target}"], results: jax.Array, dims: Mapping[str, int]
) -> {tables.type_name(target)}: ..."""


def stub() -> str:
    """Returns the text of the whole file."""
    called = {t: table for t, table in tables.TABLES.items() if has_call(table)}
    parts = [
        dataclass_of(kind) for kind in (tables.Row, tables.Attribute, tables.Table)
    ]
    parts.append(TAIL.rstrip())
    parts += [part for each in called.items() for part in classes(*each)]
    packed = [t.removesuffix("_aside") for t, table in called.items() if table.packed]
    functions = [call_of(target) for target in called]
    functions += [unpack_of(target) for target in packed]
    return "\n\n".join([HEAD.rstrip(), *parts]) + "\n\n" + "\n".join(functions) + "\n"


def main() -> None:
    """Writes the file for type checkers, or compares it with --check."""
    if "--check" not in sys.argv:
        STUB.write_text(stub())
    elif STUB.read_text() != stub():
        sys.exit("jax_ep/_native/tables.pyi is stale; run python .ci/table_stubs.py")


if __name__ == "__main__":
    main()
