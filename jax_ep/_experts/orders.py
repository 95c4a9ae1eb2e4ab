"""The orders in which other libraries keep experts' weights, and the way to ours.

jax_ep takes gate and up as `[L, H, 2, F]`, gate first, and down as `[L, F, H]`. A shape
may fit another order. What it does not tell, such as whether gate and up alternate,
the remedy leaves to the user.
"""

from __future__ import annotations

import itertools
from typing import Any

from jax_ep._core.operands import ANY, Found, Operand

Shape = tuple[int, ...]

_SWAPPED = "swapaxes(-2, -1)"


def remedy(gate_up: Shape, down: Shape, hidden: int | None = None) -> str:
    """Returns how to bring weights into jax_ep's order; "" if no order fits.

    What it says is right for whole arrays as well as for a part of the experts.

    Args:
        gate_up: shape of gate_up, `[L, ...]`.
        down: shape of down, likewise.
        hidden: H, or None if it is not known.
    """
    return _remedy("", "F", gate_up[1:], down[1:], 1, hidden)


def shared_remedy(gate_up: Shape, down: Shape, hidden: int) -> str:
    """Returns the same for a shared expert's weights, `[H, 2, S]` and `[S, H]`."""
    return _remedy("shared_", "S", gate_up, down, 0, hidden)


def _remedy(
    prefix: str,
    letter: str,
    gate_up: Shape,
    down: Shape,
    lead: int,
    hidden: int | None,
) -> str:
    if len(down) != 2:
        return ""
    names = f"{prefix}gate_up", f"{prefix}down"
    found = []  # for each order of down that fits: whether to transpose it, and gate_up
    for transposed in (False, True):
        inner, wide = down[::-1] if transposed else down
        ways = _of_gate_up(names[0], letter, gate_up, inner, wide, lead)
        if hidden in (None, wide) and ways:
            found.append((transposed, ways))
    if not found:
        return ""
    each = dict.fromkeys(way for _, ways in found for way in ways if way)
    steps = [", or ".join(each)] if each else []
    order = f"[{'L, ' * lead}{letter}, H]"
    of_down = f"transpose {names[1]} to {order} with {names[1]}.{_SWAPPED}"
    fitting = [transposed for transposed, _ in found]
    if fitting == [True]:
        steps.append(of_down)
    elif len(fitting) == 2 and each:
        steps.append(f"{of_down} if it is [{'L, ' * lead}H, {letter}]")
    return ", and ".join(steps)


def _of_gate_up(
    name: str, letter: str, shape: Shape, inner: int, wide: int, lead: int
) -> list[str]:
    """Returns what to do with gate_up in each order that fits; "" for nothing."""
    before = "L, " * lead
    if shape == (wide, 2, inner):
        return [""]
    plain, transposed = shape == (wide, 2 * inner), shape == (2 * inner, wide)
    if plain or transposed:
        if transposed:
            fused = f"[{before}2{letter}, H]"
            when = f", if it is {fused} as in PyTorch," if plain else f" of {fused}"
            first = f"transpose {name}{when} with {name}.{_SWAPPED}, then reshape it"
        else:
            first = f"reshape {name} of [{before}H, 2{letter}]"
        return [f"{first} to [{before}H, 2, {letter}]: {split(name)}"]
    sizes, ways = {"H": wide, "2": 2, letter: inner}, []
    for order in itertools.permutations(sizes):
        if shape == tuple(sizes[each] for each in order):
            axes = [lead + order.index(each) for each in sizes]
            given = ", ".join(map(str, [*range(lead), *axes]))
            ways.append(
                f"transpose {name} of [{before}{', '.join(order)}] to [{before}H, 2, "
                f"{letter}] with {name}.transpose({given})"
            )
    return ways


def _remedy_of_matrices(found: Found) -> str:
    hidden = found.sizes.get("H")
    return remedy(found.shapes[0], found.shapes[1], hidden) or (
        "pass the matrices of this rank's experts in this order, gate first"
    )


MATRICES = Operand(
    "gate_up and down", "[L, H, 2, F] and [L, F, H]", ANY, _remedy_of_matrices
)


# The same without a gate.
UNGATED = Operand(
    "gate_up and down",
    "[L, H, 1, F] and [L, F, H]",
    ANY,
    "transpose what has F and H exchanged, with .swapaxes",
)
# The same with gate and up apart.
PAIR = Operand(
    "gate, up and down",
    "[L, H, F], [L, H, F] and [L, F, H]",
    ANY,
    "transpose what has F and H exchanged, with .swapaxes(1, 2)",
)


def is_gated(gate_up: Any) -> bool:
    """Whether gate_up has a gate: `[L, H, 1, F]` is up alone."""
    shape = getattr(gate_up, "shape", ())
    return len(shape) != 4 or shape[2] != 1


def is_pair(gate_up: Any) -> bool:
    """Whether gate and up are given as a pair."""
    return isinstance(gate_up, tuple | list) and len(gate_up) == 2


def split(name: str) -> str:
    """Returns how to split the last dimension of `name` into gate and up."""
    return (
        f"{name}.reshape(*{name}.shape[:-1], 2, -1) if gate comes first, or, if gate "
        f"and up alternate as in gpt-oss, {name}.reshape(*{name}.shape[:-1], -1, 2)."
        f"{_SWAPPED}"
    )
