"""Benchmarks in their tiny form, and the records that they write."""

from __future__ import annotations

import json

import jax

from benchmarks.layers import grouped
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
