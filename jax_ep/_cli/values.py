"""Values of the commands' options, and the files that they name."""

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
    """A sentence on why JAX starts no backend.

    Args:
        error: what it ended with, as "AssertionError" or "RuntimeError: its text".
    """
    asked = os.environ.get("JAX_PLATFORMS")
    if not asked:
        return f"JAX starts no backend: {error}"
    kind, _, why = error.partition(": ")
    # Where the machine shows no GPU, JAX passes over "cuda" without a word, and fails
    # an assertion in the end or goes on to what else "gpu" stands for.
    wordless = kind == "AssertionError" or (asked == "gpu" and "'rocm'" in why)
    if wordless and set(asked.split(",")) <= _GPU_PLATFORMS:
        return f"JAX was told by JAX_PLATFORMS to use {asked} and found no GPU"
    return f"JAX was told by JAX_PLATFORMS to use {asked} and could not: {why or kind}"


def backend_advice() -> str | None:
    """What helps where JAX_PLATFORMS is the reason."""
    if not os.environ.get("JAX_PLATFORMS"):
        return None
    return "unset JAX_PLATFORMS, so that JAX uses whatever devices there are"


def no_backend(error: str) -> str:
    """`backend_problem` and what helps, in one line."""
    lines = error.splitlines() or [""]
    return "; ".join(filter(None, [backend_problem(lines[0]), backend_advice()]))


def top_k_problem(experts: int, top_k: int) -> str | None:
    """That a token has more choices than there are experts; None where all is well."""
    if top_k <= experts:
        return None
    return (
        f"--top-k must be at most --experts, got --top-k {top_k} and --experts "
        f"{experts}; lower --top-k or raise --experts"
    )


def ranks_problem(experts: int, ranks: int) -> str | None:
    """That the experts do not divide among the ranks; None where they do."""
    if experts % ranks == 0:
        return None
    return (
        f"--ranks must divide --experts, got --ranks {ranks} and --experts {experts}; "
        f"choose --ranks {_divisors(experts, ranks)}"
    )


def nodes_problem(ranks: int, ranks_per_node: int) -> str | None:
    """That nodes would have unlike numbers of ranks; None where they have not."""
    if ranks % ranks_per_node == 0:
        return None
    return (
        "--ranks-per-node must divide the ranks of the group, got --ranks-per-node "
        f"{ranks_per_node} and {ranks} ranks; choose --ranks-per-node "
        f"{_divisors(ranks, ranks_per_node)}, or other --ranks"
    )


def _divisors(number: int, near: int) -> str:
    """The divisors of `number` next to `near`, below and above."""
    every = [each for each in range(1, number + 1) if number % each == 0]
    below = [each for each in every if each < near][-1:]
    above = [each for each in every if each > near][:1]
    return " or ".join(map(str, below + above))


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
        complain(
            f"jax-ep bench: {name!r} must be a file that can be written, got: "
            f"{error.strerror or error}; make room or name another, and measure again"
        )
        return False
    print(f"wrote {name}")
    return True
