"""Calls with the wrong arguments: of jax_ep by the user, of the user's functions by it.

Python says which argument is missing or unknown, but not what to pass instead.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from jax_ep._core import errors

_Call = TypeVar("_Call", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)

_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def explained(
    function: str | Callable[[Any], str], remedy: str | None = None
) -> Callable[[_Call], _Call]:
    """Returns a decorator that raises jax_ep's error for arguments that do not bind.

    Args:
        function: the public name, below `jax_ep`; of a method, it may be a function of
            `self` that returns it.
        remedy: what to do about missing or surplus arguments, if that is not obvious.
    """

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except TypeError as error:
                # Only now, because binding takes longer than the call of a handle.
                name = function if isinstance(function, str) else function(args[0])
                wrong = _mistake(name, remedy, call, args, kwargs)
                if wrong is None:
                    raise
                raise wrong from error

        made: Any = checked
        return made

    return decorate


def explained_class(function: str) -> Callable[[_Class], _Class]:
    """Returns a decorator that does the same for the constructor of a class."""

    def decorate(made: _Class) -> _Class:
        start: Any = made.__init__
        made.__init__ = explained(function)(start)
        return made

    return decorate


def _mistake(
    function: str,
    remedy: str | None,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Exception | None:
    """Returns the error for arguments that `call` cannot take; None if it can."""
    taken = inspect.signature(call)
    try:
        taken.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return None
    each = [p for p in taken.parameters.values() if p.name != "self"]
    names = [p.name for p in each if p.kind in _NAMED]
    unknown = [name for name in kwargs if name not in names]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in each)
    if unknown and not takes_any:
        rule = f"arguments must be among {names}"
        value = ", ".join(unknown)
        left = [name for name in names if name not in kwargs]
        remedy = meant(unknown, left) or "correct the name or leave it out"
        return errors.invalid(function, rule, value, remedy, kind=TypeError)
    rule = f"must be called as {_signed(function, each)}"
    filled = set(names[: len(args) - ("self" in taken.parameters)])
    missing = [
        p.name
        for p in each
        if p.kind in _NAMED
        and p.default is p.empty
        and p.name not in filled.union(kwargs)
    ]
    if missing:
        value = f"a call without {' and '.join(missing)}"
        found = meant(unknown, missing)
        value += f", but with {' and '.join(unknown)}" if found else ""
        remedy = found or remedy or f"pass {missing[0]} as its docstring says"
    else:
        count = len(args) - ("self" in taken.parameters)
        value = f"{count} positional arguments"
        remedy = remedy or "pass each argument once, and options by name"
    return errors.invalid(function, rule, value, remedy, kind=TypeError)


def _signed(function: str, each: Iterable[inspect.Parameter]) -> str:
    """Returns a call with the names of the parameters that have no default."""
    words = []
    for parameter in each:
        if parameter.default is parameter.empty and parameter.kind in _NAMED:
            keyword = parameter.kind is parameter.KEYWORD_ONLY
            words.append(parameter.name + ("=..." if keyword else ""))
    return f"{function.rpartition('.')[2]}({', '.join(words)})"


def meant(unknown: Iterable[str], known: Sequence[str]) -> str | None:
    """Returns "did you mean ...?" for misspelt names; None if nothing is similar."""
    for name in unknown:
        if near := difflib.get_close_matches(name, known, n=1):
            return f"did you mean {near[0]}?"
    return None


def require_takes(
    function: str,
    name: str,
    value: Any,
    operands: Sequence[str],
    keywords: Sequence[str] = (),
) -> None:
    """Raises TypeError if `value`, a function of the user, cannot be called so.

    Args:
        function: the function of jax_ep that will call it.
        name: the name of the argument.
        value: the function. If Python does not know its parameters, it passes.
        operands: what it will be called with, by position.
        keywords: what it may also get, if it has parameters of these names.
    """
    try:
        taken = inspect.signature(value)
    except (TypeError, ValueError):  # None, or not a Python function
        return
    given = {word: None for word in keywords if word in [*taken.parameters][1:]}
    try:
        taken.bind(*operands, **given)
    except TypeError as error:
        must = f"{name} must be a function of ({', '.join(operands)})"
        wrapped = f"for example in lambda {', '.join(operands)}: ..."
        remedy = f"wrap it, {wrapped}"
        if _takes_more(taken, operands, given):
            must += f" and of keywords among {list(keywords)}" if keywords else ""
            remedy = f"give its other parameters defaults, or bind them, {wrapped}"
        raise errors.invalid(
            function,
            must,
            described(value),
            remedy,
            operand=name,
            kind=TypeError,
        ) from error


def _takes_more(
    taken: inspect.Signature, operands: Sequence[str], given: dict[str, None]
) -> bool:
    """Whether only further arguments are missing."""
    try:
        taken.bind_partial(*operands, **given)
    except TypeError:
        return False
    return True


def described(function: Any) -> str:
    """Returns the name of a function with those of its parameters."""
    taken = inspect.signature(function)
    plain = [
        each.replace(annotation=each.empty, default=each.empty)
        for each in taken.parameters.values()
    ]
    words = taken.replace(parameters=plain, return_annotation=taken.empty)
    return f"{name_of(function)}{words}"


def name_of(function: Any) -> str:
    """Returns the name of a function or of its class."""
    return getattr(function, "__name__", type(function).__name__)
