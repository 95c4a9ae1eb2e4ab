"""Values of the commands' options, and the files that they name."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any


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
    """What a file to write must be and `path` is not; None where all is well.

    Tries it, because rights alone say nothing of a full disk or of root's files; what
    a file holds stays, and one that is not there is not there afterwards.
    """
    try:
        if os.path.isfile(path):
            with open(path, "ab"):
                return None
        if os.path.exists(path):
            # To open a pipe would wait for its reader.
            fits = not os.path.isdir(path) and os.access(path, os.W_OK)
        else:
            fits = _can_create(os.path.realpath(path))
    except (OSError, ValueError):
        fits = False
    return None if fits else "a file in a folder that can be written to"


def _can_create(path: str) -> bool:
    with open(path, "xb") as file:
        try:
            file.write(b"\n")
            file.flush()
        finally:
            os.remove(path)
    return True


def write_file(name: str, write: Callable[[pathlib.Path], Any]) -> bool:
    """Whether `write` could; says so in either case."""
    try:
        write(pathlib.Path(name))
    except OSError as error:
        print(
            f"jax-ep bench: {name!r} must be a file that can be written, got: "
            f"{error.strerror or error}; make room or name another, and measure again",
            file=sys.stderr,
        )
        return False
    print(f"wrote {name}")
    return True
