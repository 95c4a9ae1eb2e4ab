"""Exhaustive interleaving model of the window protocol (xla_ffi/protocol/signals.h).

Every rank runs its program of calls; workers take the items of a call's queue in order
and execute one memory operation a step. `explore` visits every reachable state and
says how executions can end. Memory is sequentially consistent here: the orders that
weak memory needs are argued in docs/protocol.md and tested under ThreadSanitizer.
`test_protocol_model.py` states which designs must hold and which must fail.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from protocol_program import (
    TAGS,
    Call,
    Cells,
    Design,
    Op,
    RefusedError,
    Step,
    compile_program,
)


class Outcome(enum.Enum):
    """How an execution ends."""

    FINISHED = "every rank ran its whole program"
    DEADLOCK = "nobody can take a step"
    CORRUPT = "a rank read a payload of another call and took it for its own"
    DETECTED = "a flag showed a greater epoch or another tag"
    REFUSED = "every region holds a pending call"


@dataclass(frozen=True)
class Result:
    """What `explore` found."""

    outcomes: frozenset[Outcome]
    states: int
    stuck: str = ""  # the waits of one deadlocked state


# A rank: (call, next item, [(item, step) of each busy worker], sorted).
_Rank = tuple[int, int, tuple[tuple[int, int], ...]]
_State = tuple[tuple[_Rank, ...], tuple[int, ...]]


def _settle(calls: tuple[Call, ...], workers: int, rank: _Rank) -> _Rank:
    """Retires finished items, hands out the next ones, starts the next call.

    None of it touches shared memory, so doing it at once hides no interleaving.
    """
    call, taken, busy = rank
    while call < len(calls):
        items = calls[call]
        running = [b for b in busy if b[1] < len(items[b[0]])]
        while len(running) < workers and taken < len(items):
            running.append((taken, 0))
            taken += 1
        busy = tuple(sorted(running))
        if busy:
            return (call, taken, busy)
        call, taken = call + 1, 0
    return (call, 0, ())


# Once possible these stay possible, and no other step tells whether they have been done
# before or after it: a state that offers one needs no other branch.
_INDEPENDENT = (Op.AWAIT_MARK, Op.FINISH, Op.RAISE)


def _apply(
    step: Step, memory: tuple[int, ...], check_tag: bool
) -> tuple[int, ...] | Outcome | None:
    """The memory after the step, how it fails, or None while it has to wait."""
    seen = memory[step.cell]
    if step.op is Op.AWAIT_MARK:
        return memory if seen >= step.value else None
    if step.op is Op.AWAIT_FLAG:
        if seen // TAGS < step.value // TAGS:
            return None
        if seen // TAGS > step.value // TAGS or (check_tag and seen != step.value):
            return Outcome.DETECTED
        return memory
    if step.op is Op.READ:
        return memory if seen == step.value else Outcome.CORRUPT
    after = list(memory)
    if step.op is Op.WRITE:
        after[step.cell] = step.value
    elif step.op is Op.RAISE:
        after[step.cell] = max(seen, step.value)
    else:
        after[step.cell] = (seen + 1) % step.members
        if seen + 1 == step.at:
            after[step.credit] = max(after[step.credit], step.value)
    return tuple(after)


def explore(
    programs: str | Sequence[str],
    ranks: int,
    design: Design | None = None,
    *,
    reduce: bool = True,
    limit: int = 1_000_000,
) -> Result:
    """Visits every interleaving.

    Args:
      programs: the calls of every rank, or one program a rank.
      ranks: how many ranks.
      design: the protocol; that of signals.h by default.
      reduce: skip the orders of steps that commute with all others.
      limit: states after which the model gives up with a RuntimeError.

    Returns:
      All ways in which an execution can end. An execution stops at its first error.
    """
    design = design or Design()
    each = [programs] * ranks if isinstance(programs, str) else list(programs)
    cells = Cells()
    try:
        code = [compile_program(design, ranks, r, each[r], cells) for r in range(ranks)]
    except RefusedError:
        return Result(frozenset({Outcome.REFUSED}), 0)
    first = tuple(_settle(code[r], design.workers, (0, 0, ())) for r in range(ranks))
    start: _State = (first, (0,) * len(cells.index))
    seen = {start}
    stack = [start]
    outcomes: set[Outcome] = set()
    stuck = ""
    while stack:
        state = stack.pop()
        after, errors = _successors(state, code, design, reduce)
        outcomes |= errors
        if not after and not errors:
            waits = _waits(state, code, cells)
            stuck = stuck or waits
            outcomes.add(Outcome.DEADLOCK if waits else Outcome.FINISHED)
        new = set(after) - seen
        seen |= new
        stack.extend(new)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states")
    return Result(frozenset(outcomes), len(seen), stuck)


def _successors(
    state: _State, code: list[tuple[Call, ...]], design: Design, reduce: bool
) -> tuple[list[_State], set[Outcome]]:
    ranks, memory = state
    after: list[_State] = []
    errors: set[Outcome] = set()
    for r, (call, taken, busy) in enumerate(ranks):
        for worker, (item, at) in enumerate(busy):
            step = code[r][call][item][at]
            result = _apply(step, memory, design.check_tag)
            if result is None:
                continue
            if isinstance(result, Outcome):
                errors.add(result)
                continue
            moved = (*busy[:worker], (item, at + 1), *busy[worker + 1 :])
            rank = _settle(code[r], design.workers, (call, taken, moved))
            following = ((*ranks[:r], rank, *ranks[r + 1 :]), result)
            if reduce and step.op in _INDEPENDENT:
                return [following], set()
            after.append(following)
    return after, errors


def _waits(state: _State, code: list[tuple[Call, ...]], cells: Cells) -> str:
    names = {i: " ".join(map(str, n)) for n, i in cells.index.items()}
    return "; ".join(
        f"rank {r} call {call} waits for {names[code[r][call][item][at].cell]}"
        for r, (call, _, busy) in enumerate(state[0])
        for item, at in busy
    )
