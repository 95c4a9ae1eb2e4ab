"""Lines and tables of the rows of overlap.py, for it and for docs/generate.py."""

from benchmarks.common import reports
from jax_ep._cli.bench.report import number, print_aligned

TARGET_US = 30  # what overlap="copy" may leave exposed besides packing and placing
PARTS = ("pack", "copies", "place")
TWO_BATCHES = "two_batches"
# `EPConfig.overlap` of each arrangement.
OVERLAPS = {
    "whole": "sm",
    "halves": "sm",
    "stream_halves": "stream",
    "copy_halves": "copy",
}
COLUMNS = {
    "whole": "one stream, whole",
    "halves": "one stream, halves",
    "stream_halves": "two streams, halves",
    "copy_halves": "copy engines, halves",
}


def exposed(us, beside_us, alone_us):
    """Returns how much of an exchange of `alone_us` is exposed if both take `us`."""
    rest = None if beside_us is None else us - beside_us
    share = None if rest is None or not alone_us else 1 - rest / alone_us
    return {
        "beside_us": beside_us,
        "alone_us": alone_us,
        "exposed_us": rest,
        "hidden": share,
    }


def over_parts(row, pack_us, copies_us, place_us):
    """Returns what a row has exposed besides packing and placing, given their times."""
    if None in (row["exposed_us"], pack_us, place_us):
        return {}
    return {
        "over_parts_us": row["exposed_us"] - pack_us - place_us,
        # If the work is not longer, not all copies can hide.
        "longer": copies_us is not None and row["beside_us"] >= copies_us,
    }


def line(row):
    """Formats a row as one line of progress."""
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
        return f"{head} {reports.error_line(row)}"
    tail = ""
    if row.get("hidden") is not None:
        tail = (
            f"  exposed {row['exposed_us']:7.1f} us, {100 * row['hidden']:.0f}% hidden"
        )
    if row["wrong"]:
        tail += f"  WRONG: {row['differences']}"
    return f"{head}{row['us']:9.1f} us{tail}"


def _rows(record):
    return [*record["results"], *record["graphs"]]


def failures(record):
    """Lists what makes a record unfit: wrong results."""
    return reports.failures(_rows(record), line)


def unfit(record):
    """Whether the run failed: results were wrong, or nothing was measured."""
    return reports.unfit(_rows(record))


def missing(record):
    """Lists what was not measured; the tables say so in its place."""
    problems = [problem["problem"] for problem in record["problems"]]
    return reports.missing(_rows(record), problems, line)


def _best(rows):
    """Returns the right row with the least exposed time, or None."""
    found = [
        row for row in rows if row.get("exposed_us") is not None and not row["wrong"]
    ]
    return min(found, key=lambda row: row["exposed_us"], default=None)


def _noted(row, text):
    notes = [] if row["num_sms"] is None else [f"{row['num_sms']} SMs"]
    if "latency_hiding" in row["flags"]:
        notes.append("scheduler")
    return f"{text} [{', '.join(notes)}]" if notes else text


def _cell(rows):
    row = _best(rows)
    if row is None:
        return reports.absent(rows)
    return _noted(row, f"{row['exposed_us']:.0f} ({100 * row['hidden']:.0f}%)")


def _over(rows):
    """Formats what copy engines' best row exposes over pack + place, with a verdict."""
    row = _best(rows)
    if row is None or row.get("over_parts_us") is None:
        return ""
    over = row["over_parts_us"]
    verdict = " (met)" if over <= TARGET_US else " (missed)"
    return f"{over:.0f}{verdict if row['longer'] else ''}"


def cells(record):
    """Yields the table's rows, with the least exposed of all `num_sms` and flags."""
    rows = [r for r in record["results"] if r["beside"] not in (None, TWO_BATCHES)]
    measured = dict.fromkeys(
        (row["op"], row["beside"]) for row in rows if row["op"] and row["arrangement"]
    )
    seen = {name for _, name in measured}
    for op, name in measured:
        found = [
            [
                row
                for row in rows
                if (row["op"], row["beside"], row["arrangement"]) == (op, name, each)
            ]
            for each in COLUMNS
        ]
        first = next((best for best in map(_best, found) if best), {})
        times = (number(first.get("alone_us")), number(first.get("beside_us")))
        yield (op, name, *times, *map(_cell, found), _over(found[-1]))
    # Work that could not even be made, or for which no time was left.
    for name in dict.fromkeys(row["beside"] for row in rows):
        if name not in seen:
            reason = reports.absent([row for row in rows if row["beside"] == name])
            yield ("", name, "", "", *[reason] * len(COLUMNS), "")


def header():
    return ("", "beside", "alone us", "beside us", *COLUMNS.values(), "over pack+place")


def parts(record):
    """Yields (op, *microseconds of each step with `overlap="copy"`)."""
    for op in ("dispatch", "combine"):
        found = [
            [
                row
                for row in record["results"]
                if (row["op"], row["beside"], row["arrangement"]) == (op, None, part)
            ]
            for part in PARTS
        ]
        if any(found):
            yield (op, *map(_time, found))


def _time(rows):
    times = [row["us"] for row in rows if reports.good(row)]
    return number(min(times)) if times else reports.absent(rows) or "not measured"


PARTS_HEADER = ("", "pack us", "copies us", "place us")


def batches(record):
    """Yields (arrangement, flags, its ms, ms of one after the other, speed-up)."""
    rows = [row for row in record["results"] if row["beside"] == TWO_BATCHES]
    before = {
        row["flags"]: row["us"]
        for row in rows
        if row["arrangement"] is None and "us" in row and not row["wrong"]
    }
    for row in rows:
        if row["arrangement"] is None:
            continue
        name, flags = COLUMNS[row["arrangement"]], row["flags"] or "default"
        base = before.get(row["flags"])
        shown = number(base and base / 1e3, 2)
        if not reports.good(row):
            yield name, f"`{flags}`", reports.absent([row]), shown, ""
            continue
        ratio = number(base and base / row["us"], 2)
        yield name, f"`{flags}`", number(row["us"] / 1e3, 2), shown, ratio


BATCHES_HEADER = ("two micro-batches", "flags", "ms", "in turn ms", "speed-up")


def _captured(row):
    """Formats the time of calls in graphs, if handlers only ran under capture."""
    captured, streamed = row.get("captured"), row.get("streamed")
    if captured is None:
        return number(row["us"], 1)
    # A program's body may run once before capture. Without graphs, all calls count as
    # streamed.
    if captured == 0 or 2 * streamed > row["calls"]:
        return "not captured"
    return number(row["us"], 1)


def graphs(record):
    """Yields (T, op, us without graphs, us with them, ratio, handlers' launches)."""
    found = {
        (row["tokens"], row["op"], row["graphs"]): row
        for row in record["graphs"]
        if "op" in row and not row.get("wrong")
    }
    for tokens, op in sorted({key[:2] for key in found}):
        off, on = (found.get((tokens, op, state), {}) for state in (False, True))
        us_off, us_on = off.get("us"), on.get("us")
        shown = _captured(on) if us_on else "failed"
        ratio = us_off / us_on if us_off and us_on else None
        seen = [
            f"{row.get('captured', '')}/{row.get('streamed', '')}" for row in (off, on)
        ]
        yield (
            *(tokens, op, number(us_off, 1) or "failed", shown),
            number(None if shown == "not captured" else ratio, 2),
            *("" if each == "/" else each for each in seen),
        )


GRAPHS_HEADER = (
    *("T per rank", "", "without us", "captured us", "ratio"),
    *("launches captured/not, without", "with"),
)


def print_table(record):
    for head, rows in (
        (header(), cells(record)),
        (PARTS_HEADER, parts(record)),
        (BATCHES_HEADER, batches(record)),
        (GRAPHS_HEADER, graphs(record)),
    ):
        if found := list(rows):
            print_aligned(head, found)
    reports.print_faults(failures(record), missing(record))
