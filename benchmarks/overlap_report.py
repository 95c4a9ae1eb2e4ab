"""What overlap.py says of its rows: a line of each, and the tables at the end.

Used by docs/generate.py too.
"""

from p2p_report import number

COLUMNS = {
    "whole": "one stream, whole",
    "halves": "one stream, halves",
    "stream_whole": "two streams, whole",
    "stream_halves": "two streams, halves",
    "copy_halves": "copy engines, halves",
}


def exposed(us, beside_us, alone_us):
    """What stays of an exchange that takes `alone_us` where both take `us`."""
    rest = None if beside_us is None else us - beside_us
    share = None if rest is None or not alone_us else 1 - rest / alone_us
    return {
        "beside_us": beside_us,
        "alone_us": alone_us,
        "exposed_us": rest,
        "hidden": share,
    }


def line(row):
    """A row in one line, as progress."""
    if "graphs" in row:
        state = "on" if row["graphs"] else "off"
        head = f"T {row['tokens']:<5}{row.get('op', ''):<9} graphs {state:<4}"
        return head + (row.get("error") or f"{row['us']:9.1f} us")
    sms = "" if row["num_sms"] is None else f"{row['num_sms']} SMs"
    head = (
        f"{row['op'] or '':<9}{row['arrangement'] or 'without':<14}{sms:<8}"
        f"beside {row['beside'] or 'nothing':<14}"
    )
    if "us" not in row:
        return f"{head} {row.get('error', 'not measured').splitlines()[0][:150]}"
    tail = ""
    if row.get("hidden") is not None:
        tail = (
            f"  exposed {row['exposed_us']:7.1f} us, {100 * row['hidden']:.0f}% hidden"
        )
    if row["wrong"]:
        tail += f"  WRONG: {row['differences']}"
    return f"{head}{row['us']:9.1f} us{tail}"


def failures(record):
    """What makes a record unfit: wrong or missing rows, workers that ended early."""
    rows = [
        line(row)
        for row in [*record["results"], *record["graphs"]]
        if row.get("wrong") or "us" not in row
    ]
    return [*rows, *(problem["problem"] for problem in record["problems"])]


def _best(rows, **wanted):
    """The right row of these entries with the least exposed, or None."""
    found = [
        row
        for row in rows
        if row.get("exposed_us") is not None
        and not row["wrong"]
        and all(row[name] == value for name, value in wanted.items())
    ]
    return min(found, key=lambda row: row["exposed_us"], default=None)


def _cell(row):
    if row is None:
        return ""
    notes = [] if row["num_sms"] is None else [f"{row['num_sms']} SMs"]
    if "latency_hiding" in row["flags"]:
        notes.append("scheduler")
    noted = f" [{', '.join(notes)}]" if notes else ""
    return f"{row['exposed_us']:.0f} ({100 * row['hidden']:.0f}%){noted}"


def cells(record):
    """Rows of the table, least exposed of all `num_sms` and flags."""
    rows = record["results"]
    for op, name in dict.fromkeys(
        (row["op"], row["beside"]) for row in rows if row.get("exposed_us") is not None
    ):
        found = [_best(rows, op=op, beside=name, arrangement=each) for each in COLUMNS]
        first = next((row for row in found if row), None)
        if first is not None:
            times = (number(first["alone_us"]), number(first["beside_us"]))
            yield (op, name, *times, *map(_cell, found))


def header():
    return ("", "beside", "alone us", "beside us", *COLUMNS.values())


def graphs(record):
    """(T, op, microseconds without graphs, with them, ratio)."""
    found = {
        (row["tokens"], row["op"], row["graphs"]): row["us"]
        for row in record["graphs"]
        if "us" in row and not row["wrong"]
    }
    for tokens, op in sorted({key[:2] for key in found}):
        off, on = (found.get((tokens, op, state)) for state in (False, True))
        ratio = number(off / on if off and on else None, 2)
        yield tokens, op, number(off, 1), number(on, 1), ratio


GRAPHS_HEADER = ("T a rank", "", "without us", "captured us", "ratio")


def print_table(record):
    tables = (header(), list(cells(record))), (GRAPHS_HEADER, list(graphs(record)))
    for head, rows in tables:
        if not rows:
            continue
        shown = [[str(cell) for cell in row] for row in (head, *rows)]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        print()
        for row in shown:
            padded = [c.ljust(w) for c, w in zip(row, widths, strict=True)]
            print("  ".join(padded).rstrip())
    for each in failures(record):
        print(f"FAILED: {each}")
