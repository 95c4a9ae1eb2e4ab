"""Parsers and checks of the commands' options and files."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jax_ep._cli.text import complain

_GPU_PLATFORMS = frozenset({"cuda", "gpu", "rocm"})


def backend_problem(error: str) -> str:
    """Returns a sentence on why JAX cannot start a backend.

    Args:
        error: the exception, as "AssertionError" or "RuntimeError: its text".
    """
    asked = os.environ.get("JAX_PLATFORMS")
    if not asked:
        return f"JAX starts no backend: {error}"
    kind, _, why = error.partition(": ")
    # If the machine has no visible GPU, JAX skips "cuda" silently. It then fails an
    # assertion, or tries the other platforms that "gpu" stands for.
    wordless = kind == "AssertionError" or (asked == "gpu" and "'rocm'" in why)
    if wordless and set(asked.split(",")) <= _GPU_PLATFORMS:
        return f"JAX was told by JAX_PLATFORMS to use {asked} and found no GPU"
    return f"JAX was told by JAX_PLATFORMS to use {asked} and could not: {why or kind}"


def backend_advice() -> str | None:
    """Returns advice if JAX_PLATFORMS may be the reason, or None."""
    if not os.environ.get("JAX_PLATFORMS"):
        return None
    return "unset JAX_PLATFORMS, so that JAX uses the devices that it finds"


def no_backend(error: str) -> str:
    """Returns `backend_problem` and advice in one line."""
    lines = error.splitlines() or [""]
    return "; ".join(filter(None, [backend_problem(lines[0]), backend_advice()]))


def top_k_problem(experts: int, top_k: int) -> str | None:
    """Returns an error if `top_k` exceeds the number of experts, or None."""
    if top_k <= experts:
        return None
    return (
        f"--top-k must be at most --experts, got --top-k {top_k} and --experts "
        f"{experts}; lower --top-k or raise --experts"
    )


def ranks_problem(experts: int, ranks: int) -> str | None:
    """Returns an error if the ranks do not divide the experts, or None."""
    if experts % ranks == 0:
        return None
    return (
        f"--ranks must divide --experts, got --ranks {ranks} and --experts {experts}; "
        f"choose --ranks {_divisors(experts, ranks)}"
    )


def nodes_problem(ranks: int, ranks_per_node: int) -> str | None:
    """Returns an error if `ranks_per_node` does not divide the ranks, or None."""
    if ranks % ranks_per_node == 0:
        return None
    return (
        "--ranks-per-node must divide the ranks of the group, got --ranks-per-node "
        f"{ranks_per_node} and {ranks} ranks; choose --ranks-per-node "
        f"{_divisors(ranks, ranks_per_node)}, or other --ranks"
    )


def _divisors(number: int, near: int) -> str:
    """Returns the divisors of `number` closest to `near`, below and above it."""
    every = [each for each in range(1, number + 1) if number % each == 0]
    below = [each for each in every if each < near][-1:]
    above = [each for each in every if each > near][:1]
    return " or ".join(map(str, below + above))


def at_least(low: int) -> Callable[[str], int]:
    """Returns a parser of integers of at least `low`."""

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
    """Returns a parser of finite numbers of at least `low`, or above it if `strict`."""

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
    """Returns what `path` fails to be for writing, or None if it is fine.

    Tries to write, because permissions do not tell about full disks and root's files.
    An existing file keeps its content; a file that did not exist is removed again.
    """
    try:
        if os.path.isfile(path):
            with open(path, "ab"):
                return None
        if os.path.exists(path):
            # Only a check of permissions: opening a pipe would wait for its reader.
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
    """Writes a file and prints the outcome; returns whether it succeeded."""
    try:
        write(pathlib.Path(name))
    except OSError as error:
        complain(
            f"jax-ep bench: {name!r} cannot be written: {error.strerror or error}; "
            "make room or name another file, and measure again"
        )
        return False
    print(f"wrote {name}")
    return True
