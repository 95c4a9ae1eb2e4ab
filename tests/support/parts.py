"""A pytest plugin to run fewer tests, by drawing.

--percent draws test functions, and --cases draws cases of those that are left.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        help="at most so many cases of each test function, drawn at random",
    )
    parser.addoption(
        "--percent", type=float, help="about so many test functions, drawn at random"
    )
    parser.addoption(
        "--always",
        action="append",
        default=[],
        metavar="NAME",
        help="a test function that --percent keeps",
    )
    parser.addoption("--draw", default="", help="the seed of both: any word")


def is_drawn(function: str, percent: float, seed: str) -> bool:
    """Whether --percent keeps a test function."""
    return random.Random(f"{seed} percent {function}").random() * 100 < percent


def function_of(item: pytest.Item) -> str:
    """The test function's id, without parameters."""
    return item.nodeid.partition("[")[0]


def drawn(function: str, cases: Sequence, most: int, seed: str) -> list:
    """At most `most` of them; another seed draws others, and so do other functions."""
    # Seeded by a string, which unlike hash() is the same in every process.
    chance = random.Random(f"{seed} {function}")
    return chance.sample(list(cases), min(most, len(cases)))


# After -m and -k have left out cases.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    kept = list(items)
    seed = config.getoption("--draw")
    if (percent := config.getoption("--percent")) is not None:
        always = set(config.getoption("--always"))
        kept = [
            item
            for item in kept
            if getattr(item, "originalname", item.name) in always
            or is_drawn(function_of(item), percent, seed)
        ]
    if (most := config.getoption("--cases")) is not None:
        functions = collections.defaultdict(list)
        for item in kept:
            functions[function_of(item)].append(item)
        chosen = {
            case
            for name, cases in functions.items()
            for case in drawn(name, cases, most, seed)
        }
        kept = [item for item in kept if item in chosen]
    if len(kept) < len(items):
        left = set(kept)
        config.hook.pytest_deselected(items=[i for i in items if i not in left])
        items[:] = kept
