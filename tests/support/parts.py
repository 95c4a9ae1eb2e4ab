"""A pytest plugin to run fewer tests, by drawing.

--percent draws test functions, and --cases draws cases of those that are left. Of a
function with the mark `few(n)` all cases but n, always the same ones, are thorough.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Sequence
from typing import Any

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


def by_function(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found = collections.defaultdict(list)
    for item in items:
        found[function_of(item)].append(item)
    return found


def is_special(item: pytest.Item) -> bool:
    """Whether a bare run leaves it out anyway, or needs a GPU for it."""
    return any(map(item.get_closest_marker, ("slow", "thorough", "gpu")))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list) -> Iterator[Any]:
    for name, cases in by_function(items).items():
        few = cases[0].get_closest_marker("few")
        if few is None:
            continue
        common = [item for item in cases if not is_special(item)]
        chosen = set(drawn(name.rpartition("/")[2], common, few.args[0], ""))
        for item in common:
            if item not in chosen:
                item.add_marker("thorough")
    result = yield
    # After -m and -k have left out cases.
    draw(config, items)
    return result


def draw(config: pytest.Config, items: list) -> None:
    """Does what the options say."""
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
        chosen = {
            case
            for name, cases in by_function(kept).items()
            for case in drawn(name, cases, most, seed)
        }
        kept = [item for item in kept if item in chosen]
    if len(kept) < len(items):
        left = set(kept)
        config.hook.pytest_deselected(items=[i for i in items if i not in left])
        items[:] = kept
