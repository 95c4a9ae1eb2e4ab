"""Error messages of one form, whose parts travel with the exception.

For a value: `jax_ep.<function>: <what must hold>, got <value>; <remedy>`.
For a state: `jax_ep.<function>: <plain sentence>; <remedy>`.
"""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

# The attribute of an exception that holds its `Parts`.
_PARTS = "_jax_ep_parts"


class Parts(NamedTuple):
    """What an error message is made of.

    Attributes:
        function: name below `jax_ep`, for instance "sharded.dispatch".
        problem: "<rule>, got <value>", or the sentence that describes a state.
        remedy: what the user can do.
        operand: name of the operand at fault, if there is one.
        note: appended in parentheses, if not empty.
    """

    function: str
    problem: str
    remedy: str
    operand: str | None = None
    note: str = ""

    def __str__(self) -> str:
        """The message."""
        note = f" ({self.note})" if self.note else ""
        return f"jax_ep.{self.function}: {self.problem}; {self.remedy}{note}"


def _made(kind: type[Exception], parts: Parts) -> Exception:
    # An attribute, so that users still see a plain ValueError or TypeError.
    error = kind(str(parts))
    vars(error)[_PARTS] = parts
    return error


_LONGEST = 100
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxtuple = 1, 3, 3
_BRIEF.maxstring = _BRIEF.maxother = _LONGEST


def brief(value: Any, words: Callable[[Any], str] = repr) -> str:
    """Returns `words(value)`, its beginning if that is long, or the type if that fails.

    Python refuses to write an int of more than 4,300 digits, also inside of a list.
    """
    try:
        text = words(value)
        return text if len(text) <= _LONGEST else _BRIEF.repr(value)
    except Exception:
        if isinstance(value, int):
            return f"an int of {value.bit_length()} bits"
        return f"a {type(value).__name__} that cannot be written"


def is_one_of(value: Any, names: Container[str | None]) -> bool:
    """Whether `value` is a string (or None) among `names`; arrays cannot be compared.

    `in` alone asks an array for its truth value, and raises.
    """
    return (value is None or isinstance(value, str)) and value in names


def invalid(
    function: str,
    rule: str,
    value: Any,
    remedy: str,
    *,
    operand: str | None = None,
    kind: type[Exception] = ValueError,
) -> Exception:
    """An error for a wrong value, to be raised by the caller."""
    got = value if isinstance(value, str) else brief(value, str)
    return _made(kind, Parts(function, f"{rule}, got {got}", remedy, operand))


def unusable(
    function: str, state: str, remedy: str, *, kind: type[Exception] = ValueError
) -> Exception:
    """An error for a wrong state, to be raised by the caller."""
    return _made(kind, Parts(function, state, remedy))


def require(holds: bool, function: str, rule: str, value: Any, remedy: str) -> None:
    """Raises ValueError unless `holds`."""
    if not holds:
        raise invalid(function, rule, value, remedy)


def require_type(
    function: str, name: str, value: Any, kinds: Any, what: str, remedy: str
) -> None:
    """Raises TypeError unless `value` is of `kinds`, which the message calls `what`."""
    if not isinstance(value, kinds):
        rule = f"{name} must be {what}"
        raise invalid(
            function, rule, brief(value), remedy, operand=name, kind=TypeError
        )


@contextlib.contextmanager
def by_the_user() -> Iterator[None]:
    """Keeps `told_of` from re-raising errors of a function that the user wrote.

    They name the function of jax_ep that the user called in there.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        vars(error).pop(_PARTS, None)
        raise


@contextlib.contextmanager
def told_of(
    function: str,
    whole: Mapping[str, tuple[int, ...]] | None = None,
    *,
    part: bool = True,
) -> Iterator[None]:
    """Re-raises errors of an inner call as errors of `function`, which made the call.

    Args:
        function: what the user called.
        whole: global shapes of the operands, by name.
        part: whether `function` was called with global arrays, of which the inner call
            gets the part of one rank.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        parts = vars(error).get(_PARTS)
        if parts is None:
            raise
        note = f"raised by jax_ep.{parts.function}"
        note += " for the part of one rank" if part else ""
        shape = (whole or {}).get(parts.operand or "")
        if shape is not None:
            note += f"; {parts.operand} of all ranks is {shape}"
        parts = parts._replace(function=function, note=note)
        raise _made(type(error), parts) from error
