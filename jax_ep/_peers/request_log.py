"""Requests of all processes of a job, in one order that all of them see.

Entry n is a key in the key-value store of jax.distributed, which only the first writer
sets. Every process reads all entries, one after the other.
"""

from __future__ import annotations

import json
from typing import Any

import jax

_FOLDER = "jax_ep/requests"


class RequestLog:
    """One process's view of the log: what it appends, and how far it has read."""

    def __init__(self, store: Any) -> None:
        """Begins at the first entry of `store`, the client of jax.distributed."""
        self._store = store
        self._next = 0

    def append(self, request: dict[str, Any]) -> None:
        """Adds an entry after all others."""
        raw = json.dumps(request).encode()
        number = self._next
        while True:
            try:
                self._store.key_value_set_bytes(_key(number), raw, False)
                return
            except jax.errors.JaxRuntimeError as error:
                if "ALREADY_EXISTS" not in str(error):
                    raise
            number += 1

    def read(self) -> tuple[int, dict[str, Any]] | None:
        """Returns the next entry with its number, or None if there is none yet.

        An entry that cannot be read is empty.
        """
        try:
            raw = self._store.key_value_try_get_bytes(_key(self._next))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
        self._next += 1
        try:
            request = json.loads(raw)
        except (ValueError, RecursionError):
            request = {}
        return self._next - 1, request if isinstance(request, dict) else {}


def _key(number: int) -> str:
    return f"{_FOLDER}/{number}"
