"""Entries of rows that the layers' benchmark records."""

from __future__ import annotations


def timing(ms):
    return {"ms": ms, "ms_least": ms, "ms_most": ms}
