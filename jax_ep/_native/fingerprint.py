"""Whether a native module is of the same commit as this Python code.

A module of another commit may have the same version, load, and then take other
operands. So Python compares what the module has with what it was written for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from jax_ep._native import expected


def of(module: ModuleType) -> str:
    """Returns the fingerprint of a module: of its names, tables and formats."""
    return made_of(
        (name for name in vars(module) if not name.startswith("_")),
        getattr(module, "operand_tables", lambda: None)(),
        getattr(module, "formats", lambda: None)(),
    )


def made_of(names: Iterable[str], tables: Any, formats: Any) -> str:
    """Returns the fingerprint of a module with these names, tables and formats."""
    text = json.dumps([sorted(names), tables, formats], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def mismatch(module: ModuleType) -> str | None:
    """Returns what a module must have and has, or None if it fits."""
    found = of(module)
    # Empty while .ci/fingerprints.py writes them.
    wanted = expected.FINGERPRINTS.get(module.__name__.rpartition(".")[2], found)
    if found == wanted:
        return None
    return (
        f"must be of the same commit as jax_ep's Python code, with fingerprint "
        f"{wanted}, got {found} in {module.__file__}"
    )
