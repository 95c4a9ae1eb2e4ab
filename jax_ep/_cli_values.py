"""Values of the commands' options."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable


def backend_advice() -> str | None:
    """What may help where JAX starts no backend."""
    asked = os.environ.get("JAX_PLATFORMS")
    said = f"JAX_PLATFORMS is {asked!r}: install its plugin, or unset it"
    return said if asked else None


def no_backend(error: str) -> str:
    """What to say where JAX starts none."""
    return "; ".join(
        filter(None, [f"JAX starts no backend: {error}", backend_advice()])
    )


def at_least(low: int) -> Callable[[str], int]:
    """A parser of integers from `low` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"must be an integer of at least {low}, got {text!r}"
            )
        return value

    return parse


def number(low: float, strict: bool = False) -> Callable[[str], float]:
    """A parser of finite numbers from `low` on, or above it if `strict`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (strict and value == low):
            bound = "above" if strict else "of at least"
            raise argparse.ArgumentTypeError(
                f"must be a number {bound} {low:g}, got {text!r}"
            )
        return value

    return parse


def file_problem(path: str) -> str | None:
    """What a file to write must be and `path` is not; None where all is well."""
    whole = os.path.abspath(path)
    if os.path.isdir(whole) or not os.access(os.path.dirname(whole), os.W_OK):
        return "a file in a folder that can be written to"
    return None
