"""Values of the commands' options, and the files that they name."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import reprlib
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


_TEXT, _TRUTH = "a line of text", "true or false"
_WHOLE, _TIME = "a whole number of at least 0", "a finite number above 0"
_FITS: dict[str, Callable[[Any], bool]] = {
    _TEXT: lambda value: isinstance(value, str) and value.isprintable(),
    _TRUTH: lambda value: isinstance(value, bool),
    # bool is an int, too.
    _WHOLE: lambda value: type(value) is int and value >= 0,
    # Integers may be above what a float can hold.
    _TIME: lambda value: (
        type(value) in (int, float) and 0 < value <= sys.float_info.max
    ),
}
_RECORD = {"count": _WHOLE, "device": _TEXT, "date": _TEXT, "commit": _TEXT}
_RECORD_MAY = {"jax": _TEXT, "dtype": _TEXT}
_RECORD_MAY |= dict.fromkeys(("hidden", "experts", "top_k"), _WHOLE)
_ROW = {"us": _TIME, "op": _TEXT, "tokens": _WHOLE}
_ROW |= {"routing": _TEXT, "transport": _TEXT}
_ROW_MAY = {"num_sms": _WHOLE, "flags": _TEXT, "format": _TEXT}
_ROW_MAY |= {"zero_tail": _TRUTH, "wrong": _TRUTH}


def read_record(path: str) -> dict[str, Any]:
    """The record of `jax-ep bench` in the file `path`, fit to be compared.

    Raises:
        ValueError: it is none, or cannot be read; one line says which and why.
    """
    try:
        record = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        _check_record(record)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        remedy = "write one with jax-ep bench --json"
        raise ValueError(f"got {path!r}: {why}; {remedy}") from error
    return record


def _check_record(record: Any) -> None:
    if not isinstance(record, dict) or record.get("kind") != "p2p":
        raise ValueError("it must be an object of kind 'p2p'")
    _check(record, "", _RECORD, _RECORD_MAY)
    rows = record.get("results")
    if not isinstance(rows, list):
        raise ValueError(f"results must be a list, got {reprlib.repr(rows)}")
    for index, row in enumerate(rows):
        where = f"results[{index}]"
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be an object, got {reprlib.repr(row)}")
        # One without a time says what could not be measured.
        if "us" in row:
            _check(row, f"{where}.", _ROW, _ROW_MAY)


def _check(
    found: dict[str, Any], where: str, needed: dict[str, str], may: dict[str, str]
) -> None:
    for name, kind in (needed | may).items():
        value = found.get(name)
        if name in may and value is None:
            continue
        if not _FITS[kind](value):
            got = reprlib.repr(value) if name in found else "nothing"
            raise ValueError(f"{where}{name} must be {kind}, got {got}")
