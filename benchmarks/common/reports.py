"""What the reports of workers' rows have in common.

A row has a time or an "error"; if the results were wrong it is marked "wrong".
"""

from jax_ep._cli.bench.process import NO_TIME


def good(row):
    """Whether a row has a time that counts."""
    return "us" in row and not row.get("wrong")


def error_line(row):
    """Says in one line why a row has no time."""
    lines = row.get("error", "not measured").splitlines() or [""]
    return lines[0][:150]


def absent(rows):
    """Says why none of these rows has a time that counts."""
    late = all(row.get("error") == NO_TIME for row in rows)
    return "" if not rows else "no time" if late else "failed"


def failures(rows, line):
    """Lists what makes a record unfit: rows with wrong results, formatted by `line`."""
    return [line(row) for row in rows if row.get("wrong")]


def unfit(rows):
    """Whether the run failed: results were wrong, or nothing was measured."""
    return any(row.get("wrong") for row in rows) or all("us" not in r for r in rows)


def missing(rows, problems, line):
    """Lists what was not measured."""
    return [*(line(row) for row in rows if "us" not in row), *problems]


def print_faults(failures, missing):
    for word, found in (("FAILED", failures), ("MISSING", missing)):
        for each in found:
            print(f"{word}: {each}")
