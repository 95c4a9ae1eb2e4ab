"""Checks that error messages have the contract's form."""

from __future__ import annotations

import re
from typing import Any

import pytest

# jax_ep.dispatch: <what must hold>, got <value>; <remedy of at least three words>
FORM = re.compile(
    r"(?P<where>jax_ep\.[\w.]+): (?P<rule>\S.+?), got (?P<value>\S.*?)"
    r"[.;:,)\n]\s+(?P<remedy>(?:\S+\s+){2,}\S+)",
    re.DOTALL,
)


def check_form(caught: Any, where: str, *words: str) -> None:
    """The message has the contract's form, names the function and holds `words`."""
    message = str(caught.value)
    match = FORM.fullmatch(message)
    assert match, message
    assert match["where"] == f"jax_ep.{where}"
    for word in words:
        assert word in message, message


# jax_ep.dispatch_wait: <what is the case>; <remedy of at least three words>
STATE = re.compile(
    r"(?P<where>jax_ep\.[\w.]+): (?P<state>\S.+?); (?P<remedy>(?:\S+\s+){2,}\S+)",
    re.DOTALL,
)


def check_state(caught: Any, where: str, *words: str) -> None:
    """Like `check_form`, for messages that describe a state and no value."""
    message = str(caught.value)
    match = STATE.fullmatch(message)
    assert match, message
    assert match["where"] == f"jax_ep.{where}"
    for word in words:
        assert word in message, message


def raises() -> Any:
    """Expects one of the two exceptions that the contract allows."""
    return pytest.raises((ValueError, TypeError))
