"""Exhaustive interleaving model of the window protocol (xla_ffi/protocol/signals.h).

Every rank runs its program of calls. The senders and placers of its workers take the
items of a call's queues in order and execute one memory operation per step. `explore`
visits every reachable state and says how executions can end. Memory is sequentially
consistent here; docs/protocol.md argues which orders weak memory needs, and they are
tested under ThreadSanitizer. `test_protocol_model.py` states which designs must hold
and which must fail.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from support.protocol_program import (
    LEAVE,
    PLACE,
    SEND,
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
    DETECTED = "a flag or credit showed a greater epoch, or a flag another tag"
    REFUSED = "every region holds a pending call"


@dataclass(frozen=True)
class Result:
    """What `explore` found."""

    outcomes: frozenset[Outcome]
    states: int
    stuck: str = ""  # the waits of one deadlocked state


# A running item: (role that runs it, queue, index, next step).
_Busy = tuple[int, int, int, int]
# A rank: (call, items taken from each queue, running items in sorted order).
_Rank = tuple[int, tuple[int, int, int], tuple[_Busy, ...]]
_State = tuple[tuple[_Rank, ...], tuple[int, ...]]

# The queues of each role, in the order in which it empties them. Roles are numbered
# like queues; where there are no placers, "senders" do all the work.
_QUEUES = {
    "split": ((SEND,), (PLACE,)),
    "helping": ((SEND, PLACE), (PLACE,)),
    "send_first": ((SEND, PLACE), ()),
    "place_first": ((PLACE, SEND), ()),
    "arrival": ((SEND, PLACE), (PLACE,)),
}


def _in_role(design: Design) -> tuple[int, int]:
    """How many workers have each role."""
    workers = design.workers
    if design.roles != "arrival":
        return (workers, workers)
    # A worker that comes after another has left finds no work: the last sender leaves
    # both queues empty.
    senders = min(design.senders, workers)
    return (senders, workers - senders)


def _may_leave(design: Design, idle: list[int]) -> bool:
    """Whether the worker that returns the credits is done with its queues."""
    workers = _in_role(design)
    if design.leave == "first":
        return min(idle) > 0
    if design.leave == "senders":
        return idle[SEND] == workers[SEND]
    return idle == list(workers)


def _settle(calls: tuple[Call, ...], design: Design, rank: _Rank) -> _Rank:
    """Retires finished items, hands out the next ones, starts the next call.

    None of it touches shared memory, so doing it at once hides no interleaving.
    """
    call, taken, busy = rank
    while call < len(calls):
        queues = calls[call]
        next_of = list(taken)
        running = [b for b in busy if b[3] < len(queues[b[1]][b[2]])]
        idle = []
        for role, order in enumerate(_QUEUES[design.roles]):
            free = _in_role(design)[role] - sum(b[0] == role for b in running)
            for queue in order:
                while free and next_of[queue] < len(queues[queue]):
                    running.append((role, queue, next_of[queue], 0))
                    next_of[queue] += 1
                    free -= 1
            idle.append(free)
        if next_of[LEAVE] < len(queues[LEAVE]) and _may_leave(design, idle):
            running.append((LEAVE, LEAVE, next_of[LEAVE], 0))
            next_of[LEAVE] += 1
        busy = tuple(sorted(running))
        if busy:
            return (call, (next_of[0], next_of[1], next_of[2]), busy)
        call, taken = call + 1, (0, 0, 0)
    return (call, (0, 0, 0), ())


def _goes_first(step: Step) -> bool:
    """Whether a state that offers the step needs no other branch.

    Once possible, the step stays possible, and no other step can tell whether it ran
    before or after it. Giving a credit is an exception, but the earlier a credit is
    given, the surer it is to exceed a limit.
    """
    if step.op is Op.AWAIT_MARK:
        return step.limit is None
    return step.op in (Op.LAST, Op.RAISE)


def _apply(
    step: Step, memory: tuple[int, ...], check_tag: bool
) -> tuple[int, ...] | Outcome | None:
    """The memory after the step, how the step fails, or None while it must wait."""
    seen = memory[step.cell]
    if step.op is Op.AWAIT_MARK:
        if step.limit is not None and seen > step.limit:
            return Outcome.DETECTED
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
        after[step.cell] = (seen + 1) % step.value
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
      programs: the calls of every rank, or one program per rank.
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
    begin: _Rank = (0, (0, 0, 0), ())
    first = tuple(_settle(code[r], design, begin) for r in range(ranks))
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
        for i, (role, queue, index, at) in enumerate(busy):
            item = code[r][call][queue][index]
            step = item[at]
            result = _apply(step, memory, design.check_tag)
            if result is None:
                continue
            if isinstance(result, Outcome):
                errors.add(result)
                continue
            ends = step.op is Op.LAST and result[step.cell] != 0
            ran = (role, queue, index, len(item) if ends else at + 1)
            moved = (*busy[:i], ran, *busy[i + 1 :])
            rank = _settle(code[r], design, (call, taken, moved))
            following = ((*ranks[:r], rank, *ranks[r + 1 :]), result)
            if reduce and _goes_first(step):
                return [following], set()
            after.append(following)
    return after, errors


def _waits(state: _State, code: list[tuple[Call, ...]], cells: Cells) -> str:
    names = {i: " ".join(map(str, n)) for n, i in cells.index.items()}
    return "; ".join(
        f"rank {r} call {call} waits for {names[code[r][call][queue][item][at].cell]}"
        for r, (call, _, busy) in enumerate(state[0])
        for _, queue, item, at in busy
    )
