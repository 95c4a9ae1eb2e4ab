"""Writes jax_ep/_native/tables.pyi and expected.py; --check only compares.

Both are made from the native tables. Type checkers read tables.pyi in place of
tables.py, whose NamedTuples exist at run time alone: for each target it has one of the
results, and the arguments of `call`. expected.py has the fingerprints of the native
modules that this Python code is for.
"""

import ast
import dataclasses
import inspect
import pathlib
import sys
import types

# Otherwise jax_ep would refuse a module whose fingerprint is not written yet.
if __name__ == "__main__":
    _none = types.ModuleType("jax_ep._native.expected")
    vars(_none)["FINGERPRINTS"] = {}
    sys.modules[_none.__name__] = _none

from jax_ep._native import fingerprint, tables
from jax_ep._native.loader import cpu

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "jax_ep"
STUB = PACKAGE / "_native/tables.pyi"
EXPECTED = PACKAGE / "_native/expected.py"
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


def names_of(module: str) -> list[str]:
    """Returns the names that a native module's stub lists."""
    found = []
    for node in ast.parse((PACKAGE / f"{module}.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.append(ast.unparse(node.target))
    return found


def fingerprints() -> str:
    """Returns the text of expected.py."""
    # The modules of CUDA may not be here, but their tables are those of the CPU's.
    found = {
        "_native_cpu": (cpu.operand_tables(), cpu.formats()),
        "_native_cuda": (cpu.operand_tables(), None),
        "_native_shmem": (None, None),
    }
    lines = [
        f'    "{name}": "{fingerprint.made_of(names_of(name), *parts)}",'
        for name, parts in found.items()
    ]
    head = [
        "# Written by .ci/table_stubs.py.",
        '"""The fingerprints of the native modules that this Python code is for."""',
        "",
        "FINGERPRINTS = {",
    ]
    return "\n".join([*head, *lines, "}"]) + "\n"


def main() -> None:
    """Writes the files, or compares them with --check."""
    for path, text in ((STUB, stub()), (EXPECTED, fingerprints())):
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path} is stale; run python .ci/table_stubs.py")


if __name__ == "__main__":
    main()
