"""Writes jax_ep/_native/expected.py; --check only compares.

It has the fingerprints of the native modules that this Python code is for, made from
their stubs and the native tables.
"""

import ast
import pathlib
import sys
import types

# Otherwise jax_ep would refuse a module whose fingerprint is not written yet.
if __name__ == "__main__":
    _none = types.ModuleType("jax_ep._native.expected")
    vars(_none)["FINGERPRINTS"] = {}
    sys.modules[_none.__name__] = _none

from jax_ep._native import fingerprint
from jax_ep._native.loader import cpu

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "jax_ep"
EXPECTED = PACKAGE / "_native/expected.py"


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
        "# Written by .ci/fingerprints.py.",
        '"""The fingerprints of the native modules that this Python code is for."""',
        "",
        "FINGERPRINTS = {",
    ]
    return "\n".join([*head, *lines, "}"]) + "\n"


def main() -> None:
    """Writes the file, or compares it with --check."""
    text = fingerprints()
    if "--check" not in sys.argv:
        EXPECTED.write_text(text)
    elif EXPECTED.read_text() != text:
        sys.exit(f"{EXPECTED} is stale; run python .ci/fingerprints.py")


if __name__ == "__main__":
    main()
