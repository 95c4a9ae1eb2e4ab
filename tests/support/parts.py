"""A plugin of pytest: --part I/N runs a part of the tests, as record_suite.py does."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="I/N: every N-th test, from number I on")


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    if part := config.getoption("--part"):
        first, parts = map(int, part.split("/"))
        kept = items[first::parts]
        config.hook.pytest_deselected(
            items=[item for item in items if item not in kept]
        )
        items[:] = kept
