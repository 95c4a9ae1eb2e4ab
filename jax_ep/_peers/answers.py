"""What processes may tell each other: checks of values that have come as JSON.

Another process may run another version of jax_ep, or have memory that went bad. A check
takes any value and returns whether it is as this version makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]


def anything(value: Any) -> bool:
    """Any value, which nobody looks at."""
    return True


def flag(value: Any) -> bool:
    """A bool."""
    return isinstance(value, bool)


def text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def hexadecimal(value: Any) -> bool:
    """Hexadecimal digits, such as `bytes.hex` makes."""
    return text(value) and set(value) <= set("0123456789abcdef")


def count(value: Any) -> bool:
    """An int that fits in 64 bits and is not negative."""
    return type(value) is int and 0 <= value < 2**63


def optional(check: Check) -> Check:
    """None, or what `check` takes."""
    return lambda value: value is None or check(value)


def several(check: Check) -> Check:
    """A list of what `check` takes."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def tuple_of(*checks: Check) -> Check:
    """A list with one value for each check."""
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(each) for check, each in zip(checks, value, strict=True))
    )


def by_name(check: Check) -> Check:
    """An object with any names and values that `check` takes."""
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def record(**checks: Check) -> Check:
    """An object with at least these names."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in checks.items())
    )


# See `fabric.Obstacle`.
obstacle = optional(tuple_of(text, text))
