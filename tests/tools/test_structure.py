"""Imports have no cycles, and packages import only earlier ones (docs/code.md)."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import jax_ep
from support import WORKERS

PACKAGE = pathlib.Path(jax_ep.__file__).parent

# Each may import those before it, and modules in the same package.
ORDER = (
    "_native",
    "_core",
    "formats",
    "_peers",
    "_transport",
    "_setup",
    "_ops",
    "router _experts _placement",
    "experts placement",
    "checkpoints _layers",
    "sharded _stats",
    "stats flax",
    "__init__",
    "_cli",
    "__main__",
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        folder = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
        found[".".join(folder)] = path
    return found


def imported(node: ast.AST, known: set[str]) -> Iterator[str]:
    """What a module imports from jax_ep: when it is loaded or run, or for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            root, _, rest = child.module.partition(".")
            if root != "jax_ep":
                continue
            for alias in child.names:
                if alias.name == "_native_cpu":  # compiled
                    continue
                name = f"{rest}.{alias.name}".removeprefix(".")
                yield name if name in known else rest or "__init__"
        else:
            yield from imported(child, known)


def graph() -> dict[str, set[str]]:
    files = modules()
    known = set(files)
    edges = {
        name: set(imported(ast.parse(path.read_text()), known)) & known - {name}
        for name, path in files.items()
    }
    assert len(edges) > 60
    assert edges["_ops.dispatch"] >= {"_ops.ordering", "_transport"}
    return edges


def test_no_circles() -> None:
    edges = graph()
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name in done:
            return
        for other in edges[name]:
            visit(other, (*path, name))
        done.add(name)

    for name in edges:
        visit(name, ())
    assert done == set(edges)


def test_packages_import_earlier_ones_alone() -> None:
    for name, others in graph().items():
        own = LEVEL[name.partition(".")[0]]
        for other in others:
            level = LEVEL[other.partition(".")[0]]
            assert level <= own, f"{name} imports {other}"


def test_workers_import_support_before_the_programs() -> None:
    """A process of workers/ finds benchmarks/ and tools/ only after `support`."""
    reached = set()
    for path in sorted(WORKERS.glob("*.py")):
        roots = [
            (node.lineno, name.split(".")[0])
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
        ]
        first = {name: line for line, name in reversed(roots)}
        programs = {"benchmarks", "tools"} & set(first)
        late = {name for name in programs if first.get("support", 10**6) > first[name]}
        assert not late, f"{path.name} imports {late} before support"
        reached |= programs
    assert reached == {"benchmarks"}
