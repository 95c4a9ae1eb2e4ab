"""Records of `jax-ep bench`: reading and comparing them."""

from __future__ import annotations

import json
import pathlib
import reprlib
import sys
from collections.abc import Callable
from typing import Any

from jax_ep._cli.text import fill, table

_TEXT, _TRUTH = "a line of text", "true or false"
_WHOLE, _TIME = "a whole number of at least 0", "a finite number above 0"
_FITS: dict[str, Callable[[Any], bool]] = {
    _TEXT: lambda value: isinstance(value, str) and value.isprintable(),
    _TRUTH: lambda value: isinstance(value, bool),
    # type() rather than isinstance, because bool is a subclass of int.
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
    """Returns the record of `jax-ep bench` in the file `path`, fit to be compared.

    Raises:
        ValueError: it is no record, or cannot be read; one line says which and why.
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
    seen: dict[tuple[Any, ...], int] = {}
    for index, row in enumerate(rows):
        where = f"results[{index}]"
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be an object, got {reprlib.repr(row)}")
        # A row without a time says what could not be measured.
        if "us" in row:
            _check(row, f"{where}.", _ROW, _ROW_MAY)
            first = seen.setdefault(_case(row), index)
            if first != index:
                name = " ".join(_case_cells(_case(row)))
                raise ValueError(
                    f"{where} must be a case of its own, got that of results[{first}], "
                    f"{name!r}"
                )


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


_CASE = ("op", "tokens", "routing", "transport", "num_sms", "flags", "zero_tail")
_PLAIN = "bf16"  # also the format of rows that name none


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row.get(name) for name in _CASE), row.get("format") or _PLAIN)


def _times(record: dict[str, Any]) -> dict[tuple[Any, ...], float | None]:
    """Returns the microseconds by case, or None if the result was wrong."""
    found = {}
    for row in record["results"]:
        if "us" in row:
            found[_case(row)] = None if row.get("wrong") else row["us"]
    return found


def _case_cells(case: tuple[Any, ...]) -> tuple[str, str, str, str]:
    """Returns op, tokens, routing, and the transport with its options."""
    op, tokens, routing, transport, num_sms, flags, zero_tail, form = case
    name = f"{transport}{f', {num_sms} SMs' if num_sms else ''}"
    name += f", {flags}" if flags else ""
    name += ", zeroed" if zero_tail else ""
    name += f", {form}" if form != _PLAIN else ""
    return op, str(tokens), routing, name


def compare(
    before: dict[str, Any], after: dict[str, Any], tolerance: float
) -> tuple[list[str], int]:
    """Returns a table of both runs' times, and the number of failures.

    Failures are calls slower than tolerated, cases that `after` lacks or has wrong, and
    facts that differ between the runs.
    """
    lines = []
    for name, record in (("before", before), ("after", after)):
        run = (
            f"{record['count']} x {record['device']}, jax {record.get('jax')}, "
            f"{record['date']}, commit {record['commit'][:12]}"
        )
        lines += fill(run, f"{name:<7} ")
    unlike = 0
    for name in ("device", "count", "hidden", "dtype", "experts", "top_k"):
        if before.get(name) != after.get(name):
            unlike += 1
            told = f"NOT ALIKE: {name} {before.get(name)!r} and {after.get(name)!r}"
            lines += fill(told, rest="  ")
    old, new = _times(before), _times(after)
    rows = []
    slower = unfit = common = 0
    for case in {**old, **new}:
        was, now = old.get(case), new.get(case)
        then = f"{was:.1f} us" if was is not None else ""
        if now is None:
            # A case that was wrong before is no loss if it is missing.
            bad = case in new or was is not None
            unfit += bad
            verdict = "WRONG" if case in new else "MISSING" if bad else "missing"
            rows.append((*_case_cells(case), then, verdict, "", ""))
        elif was is not None:
            common += 1
            change = now / was - 1
            slower += change > tolerance
            mark = "SLOWER" if change > tolerance else ""
            rows.append(
                (*_case_cells(case), then, f"{now:.1f} us", f"{change:+.1%}", mark)
            )
    heads = ("op", "T", "routing", "transport", "before", "after", "change", "")
    lines += table(heads, rows, names=4)
    summary = (
        f"{common} cases in both, {slower} slower by more than {tolerance:.0%}, "
        f"{unfit} wrong or missing"
    )
    return lines + fill(summary), slower + unfit + unlike + (not common)
