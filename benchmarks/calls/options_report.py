"""Lines and tables of the rows of options_cost.py, for it and for docs/generate.py."""

from benchmarks.common import reports
from jax_ep._cli.bench.report import number, print_aligned

PLAIN, FIRST_HALF = "plain", "first_half"
NAMES = {
    "source": '`reduce="source"`',
    "none": '`reduce="none"`',
    "shared": "`fused_shared_expert=True`",
    "local": "`skip_a2a=True`, and a psum",
    "residual": "`residual=`",
    "added": "an addition after the call",
    "halves": "in halves",
    FIRST_HALF: "the first half alone",
}
# Calls that an option does not change, or that do not take it.
_ALIKE = {("dispatch", name) for name in ("source", "none", "residual", "added")}


def measured(op, name):
    """Whether an option changes the operation, so that it is measured."""
    return (op, name) not in _ALIKE


def line(row):
    """Formats a row as one line of progress."""
    sms = "" if row["num_sms"] is None else f"{row['num_sms']} SMs"
    head = f"T {row['tokens']:<5}{row['option']:<11}{row['op']:<9}{sms:<7}"
    if "us" not in row:
        return f"{head} {reports.error_line(row)}"
    tail = f"  WRONG: {row['differences']}" if row["wrong"] else ""
    return f"{head}{row['us']:9.1f} us{tail}"


def failures(record):
    """Lists what makes a record unfit: wrong results."""
    return reports.failures(record["results"], line)


def unfit(record):
    """Whether the run failed: results were wrong, or nothing was measured."""
    return reports.unfit(record["results"])


def missing(record):
    """Lists what was not measured."""
    return reports.missing(record["results"], record["problems"], line)


def _by_key(record):
    names = ("option", "op", "tokens", "num_sms")
    return {tuple(row[name] for name in names): row for row in record["results"]}


def _tokens(record):
    return sorted({row["tokens"] for row in record["results"]})


def _cell(row, base):
    if row is None:
        return ""
    if not reports.good(row):
        return reports.absent([row])
    shown = number(row["us"], 1)
    if base is None or base is row or not reports.good(base):
        return shown
    return f"{shown} ({row['us'] / base['us']:.2f})"


def header(record):
    return ("", "", *(f"T {tokens}" for tokens in _tokens(record)))


def cells(record):
    """Yields (option, op, *microseconds at each T, in brackets over the plain call)."""
    found = _by_key(record)
    for op in ("dispatch", "combine"):
        for name in (PLAIN, *NAMES):
            rows = [found.get((name, op, t, None)) for t in _tokens(record)]
            if name == FIRST_HALF or not any(rows):
                continue
            bases = [found.get((PLAIN, op, t, None)) for t in _tokens(record)]
            shown = map(_cell, rows, bases)
            yield (NAMES.get(name, "plain"), op, *shown)


def halves(record):
    """Yields (op, T, *microseconds of the first half for each `num_sms`)."""
    found = _by_key(record)
    for op in ("dispatch", "combine"):
        for tokens in _tokens(record):
            rows = [found.get((FIRST_HALF, op, tokens, n)) for n in _num_sms(record)]
            if any(rows):
                base = found.get((FIRST_HALF, op, tokens, None))
                yield (op, tokens, *(_cell(row, base) for row in rows))


def _num_sms(record):
    rows = [row for row in record["results"] if row["option"] == FIRST_HALF]
    return sorted({row["num_sms"] for row in rows}, key=lambda n: n or 0)


def halves_header(record):
    sms = ("default" if n is None else f"{n} SMs" for n in _num_sms(record))
    return ("", "T per rank", *sms)


def print_tables(record):
    """Prints both tables, and what is wrong or missing."""
    print_aligned(header(record), cells(record))
    print_aligned(halves_header(record), halves(record))
    reports.print_faults(failures(record), missing(record))
