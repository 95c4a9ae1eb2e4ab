"""Benchmarks in their tiny form, and the records that they write."""

from __future__ import annotations

import json

import jax

from benchmarks.layers import grouped
from benchmarks.overlap import report as overlap_report
from support import helpers

ON_CPU = jax.default_backend() == "cpu"
RANKS = helpers.some_ranks(2)


def tiny(recorder, folder, *arguments):
    """The record that a recorder writes in its tiny form, without a failure."""
    words = ["--tiny", "--results", str(folder), *arguments]
    if recorder is not grouped:
        words += ["--devices", str(RANKS)]
    assert recorder.main(words) == 0
    return written(folder)


def written(folder):
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def rows_by(rows, *names):
    """Rows by these entries, which must be unique."""
    found = {tuple(row.get(name) for name in names): row for row in rows}
    assert len(found) == len(rows)
    return found


TRACE = ["--trace"] * ON_CPU  # on GPUs copies need XLA's flags


def unmeasured(record):
    """The names of rows without a time; the record has no problems or failures."""
    assert record["problems"] == overlap_report.failures(record) == []
    missing = [row for row in record["results"] if "us" not in row]
    return {row["beside"] or row["arrangement"] for row in missing}
