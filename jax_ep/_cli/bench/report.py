"""Prints times of dispatch and combine: a line for each row, a table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax_ep._cli.text import fill, fit, table

Row = dict[str, Any]
Record = dict[str, Any]

OURS = "transports"  # the worker that measures jax_ep
PLAIN = "bf16"  # also the format of rows that name none
RECOVERED_AIM = 0.85  # aim for `recovered` in `formats`, at 4096 tokens


def number(value: float | None, digits: int = 0) -> str:
    """Formats a number; None is blank."""
    return "" if value is None else f"{value:.{digits}f}"


def print_aligned(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> None:
    """Prints a table in columns, after an empty line."""
    shown = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    print()
    for row in shown:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(padded).rstrip())


def variant(row: Row) -> str:
    """Returns a row's transport with its options."""
    name = row.get("transport", "")
    if row.get("format", PLAIN) != PLAIN:
        name += f" {row['format']}"
    if row.get("num_sms"):
        name += f", {row['num_sms']} SMs"
    if row.get("flags"):
        name += f", {row['flags']}"
    return name


def error_text(row: Row) -> str:
    """Returns a row's error as one sentence."""
    text = (row["error"].splitlines() or [""])[0]
    # The messages of jax_ep's errors are clear without the type.
    return text.removeprefix("ValueError: ").removeprefix("RuntimeError: ")


def line(row: Row) -> str:
    """Returns a row in one line, to print as progress."""
    head = f"T {row['tokens']:<5}{row['routing']:<8} {row.get('op', ''):<9}"
    if "error" in row:
        return f"{head.rstrip()} {variant(row)}: {error_text(row)}"
    tail = "" if row["zero_tail"] is False else "  worst-case N, zeroed tail"
    if row.get("transport") == "p2p" and row["tie"] != "barrier":
        tail += "  a kernel between calls"
    if row.get("wrong"):
        tail += f"  WRONG: {row['differences']}"
    share = f"{100 * row['of_peak']:4.0f}%" if row.get("of_peak") else ""
    floor = row["floor_us"]
    floor = "" if floor is None else f"floor {floor:.1f}; "
    return (
        f"{head}{variant(row):<28}{row['us']:10.1f} us {rate(row['gb_s']):>7} GB/s "
        f"{share} ({floor}{row['us_least']:.1f} to {row['us_most']:.1f}){tail}"
    )


def rate(gb_s: float) -> str:
    """Formats GB/s, which may be small on CPU devices."""
    return f"{gb_s:.2g}" if gb_s and gb_s < 1 else f"{gb_s:.1f}"


def machine(record: Record) -> str:
    """Returns the devices of a record in words."""
    if record["device"] == "cpu":
        return f"{record['count']} CPU devices"
    return f"{record['count']} x {record['device']}"


def error_lines(rows: Iterable[Row]) -> list[str]:
    """Returns lines with each error once, and the cases that were not measured."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            case = f"T {row['tokens']} {row['routing']}"
            cases = found.setdefault((variant(row), error_text(row)), [])
            if case not in cases:
                cases.append(case)
    lines = []
    for (name, text), cases in found.items():
        lines += fill(f"{name}: {text} (not measured: {', '.join(cases)})", rest="  ")
    return lines


def failures(record: Record) -> list[Any]:
    """Returns what makes a record unfit: wrong results, or missing ones of jax_ep.

    Cases that XLA's ragged_all_to_all cannot do are left out of the table instead.
    """
    rows = [
        line(row)
        for row in record["results"]
        if row.get("wrong") or ("error" in row and row["transport"] != "ragged")
    ]
    workers = [each for each in record["problems"] if each["worker"] == OURS]
    return [*rows, *workers]


def fastest(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """Returns the fastest row with the entries `wanted` and a right result, or None."""
    found = [
        row
        for row in rows
        if "us" in row
        and not row.get("wrong")
        and all(({"format": PLAIN} | row).get(key) == wanted[key] for key in wanted)
    ]
    return min(found, key=lambda row: row["us"], default=None)


def ragged_ways(rows: Iterable[Row]) -> list[str]:
    """Returns the ways of JAX's own path that have times in `rows`, in their order."""
    found = (row for row in rows if row.get("transport") == "ragged" and "us" in row)
    return list(dict.fromkeys(row["flags"] for row in found))


def summary(rows: Sequence[Row]) -> list[Row]:
    """Returns a dict per (routing, op, T, format) for tables, with an N that fits."""
    keys = {
        (row["routing"], row["op"], row["tokens"], row.get("format", PLAIN))
        for row in rows
        if "us" in row and row["zero_tail"] is False
    }
    result = []
    for routing, op, tokens, name in sorted(keys):
        wanted = {"routing": routing, "op": op, "tokens": tokens, "format": name}
        wanted["zero_tail"] = False
        p2p = fastest(rows, transport="p2p", num_sms=None, **wanted)
        collective = fastest(rows, transport="collective", **wanted)
        ragged = {
            label: found["us"]
            for label in ragged_ways(rows)
            if (found := fastest(rows, transport="ragged", flags=label, **wanted))
        }
        best = fastest(rows, transport="ragged", **wanted)
        some = p2p or collective or best
        if some is None:
            continue
        result.append(
            {
                **wanted,
                "bytes": some["bytes"],
                "floor_us": some["floor_us"],
                "p2p": p2p,
                "collective_us": collective and collective["us"],
                "ragged": ragged,
                "ragged_default_us": ragged.get("default"),
                "ragged_best_us": best and best["us"],
                "ragged_best": best and best["flags"],
            }
        )
    return result


def formats(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of p2p in `summary`, compared with bfloat16 if it was measured.

    `recovered` says how much of the ratio of bytes shows in the times: it is 1 if the
    time shrinks as much as the bytes. Calls that send nothing to other ranks, such as
    those on a single rank, have no such ratios.
    """
    rows = [row for row in summary(rows) if row["p2p"]]
    keys = ("routing", "op", "tokens")
    plain = {
        tuple(row[key] for key in keys): row for row in rows if row["format"] == PLAIN
    }
    result = []
    for row in rows:
        base = plain.get(tuple(row[key] for key in keys))
        us = row["p2p"]["us"]
        found: Row = dict.fromkeys(("bytes_ratio", "us_ratio", "recovered"))
        if base is not None:
            found["us_ratio"] = us / base["p2p"]["us"]
        if base is not None and base["bytes"]:
            found["bytes_ratio"] = row["bytes"] / base["bytes"]
            found["recovered"] = found["bytes_ratio"] / found["us_ratio"]
        result.append(row | {"us": us} | found)
    return sorted(
        result,
        key=lambda row: (row["op"] != "dispatch", row["tokens"], -row["bytes"]),
    )


def print_formats(rows: Sequence[Row]) -> None:
    """Prints p2p's times in other formats, compared with bfloat16."""
    found = formats(rows)
    if all(row["format"] == PLAIN for row in found):
        return
    heads = ("routing", "op", "T", "format", "floor", "p2p", "bytes", "time")
    cells = [
        (
            row["routing"],
            row["op"],
            str(row["tokens"]),
            row["format"],
            number(row["floor_us"], 1),
            number(row["us"], 1),
            number(row["bytes_ratio"], 3),
            number(row["us_ratio"], 3),
            number(row["recovered"], 2),
        )
        for row in found
    ]
    print()
    print("\n".join(table((*heads, "recovered"), cells, names=4)))


def print_sweep(rows: Sequence[Row]) -> None:
    """Prints p2p's times by number of SMs, if several were tried."""
    swept = [r for r in rows if r.get("transport") == "p2p" and "us" in r]
    one = len({r.get("format", PLAIN) for r in swept}) == 1
    sms = sorted({r["num_sms"] or 0 for r in swept})
    if len(sms) < 2:
        return
    print("\np2p us by num_sms")
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for r in swept:
        if r["zero_tail"] is False:
            key = (r["routing"], r["op"], r["tokens"], r.get("format", PLAIN))
            found.setdefault(key, {})[r["num_sms"] or 0] = r["us"]
    cells = [
        (
            routing,
            op,
            str(tokens),
            *(number(by_sms.get(each), 1) for each in sms),
            "" if one else name,
        )
        for (routing, op, tokens, name), by_sms in sorted(found.items())
    ]
    used = [f"{each} SMs" if each else "default" for each in sms]
    heads = ("routing", "op", "T", *used, "")
    print("\n".join(table(heads, cells, names=3)))


def print_table(record: Record) -> None:
    """Prints all that a record has measured."""
    rows = record["results"]
    print_sweep(rows)
    peak = record["peak_gb_s"]
    of_peak = f"peak {peak:.1f} GB/s per GPU, " if peak else "peak not measured, "
    about = (
        f"{machine(record)}, {'' if record['device'] == 'cpu' else of_peak}"
        f"hidden {record['hidden']}, {record['dtype']}, top-{record['top_k']} of "
        f"{record['experts']} experts; times in us"
    )
    print()
    print("\n".join(fill(about)))
    ways = ragged_ways(rows)
    heads = ("routing", "op", "T", "floor", "p2p", "GB/s", "%", "collective")
    cells = []
    for s in summary(rows):
        p2p, best = s["p2p"], s["ragged_best_us"]
        share = (p2p or {}).get("of_peak")
        cells.append(
            (
                s["routing"],
                s["op"],
                str(s["tokens"]),
                number(s["floor_us"], 1),
                number(p2p and p2p["us"], 1),
                number(p2p and p2p["gb_s"], 0),
                number(share and 100 * share, 0),
                number(s["collective_us"], 1),
                *(number(s["ragged"].get(way), 0) for way in ways),
                number(best / p2p["us"] if best and p2p else None, 1),
                "" if s["format"] == PLAIN else s["format"],
            )
        )
    if cells:
        ragged = (f"ragged, {way}" for way in ways)
        heads = (*heads, *ragged, "speed-up", "")
        print("\n".join(table(heads, cells, names=3)))
    print_formats(rows)
    for row in rows:
        if "us" in row and (row["zero_tail"] or row.get("wrong")):
            print("\n".join(fit(line(row), 2)))
    for text in error_lines(rows):
        print(text)
    for each in record["problems"]:
        print("\n".join(fill(f"{each['worker']}: {each['problem']}", rest="  ")))
