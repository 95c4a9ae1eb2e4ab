"""A plugin of pytest that runs less: --part I/N as record_suite.py does, --cases N."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="I/N: every N-th test, from number I on")
    parser.addoption(
        "--cases",
        type=int,
        help="at most so many cases of each test function, from its first to its last",
    )


def spread(cases: Sequence, most: int) -> list:
    """At most `most` of them, at equal distances; all of them if they are fewer."""
    if len(cases) <= most:
        return list(cases)
    if most == 1:
        return [cases[0]]
    return [cases[i * (len(cases) - 1) // (most - 1)] for i in range(most)]


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    kept = list(items)
    if (most := config.getoption("--cases")) is not None:
        functions = collections.defaultdict(list)
        for item in kept:
            functions[item.nodeid.partition("[")[0]].append(item)
        chosen = {case for cases in functions.values() for case in spread(cases, most)}
        kept = [item for item in kept if item in chosen]
    if part := config.getoption("--part"):
        first, parts = map(int, part.split("/"))
        kept = kept[first::parts]
    if len(kept) < len(items):
        left = set(kept)
        config.hook.pytest_deselected(items=[i for i in items if i not in left])
        items[:] = kept
