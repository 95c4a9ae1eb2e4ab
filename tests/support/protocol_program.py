"""Programs and designs of the protocol model: what every rank does, step by step.

A program is written "D C D>a D D<a": D and C are kinds of calls (dispatch, combine).
`D>a` only sends and leaves the call pending under the name a, and `D<a` places it,
which is refused if it is not pending. `D=7` is a fused call whose flags carry the tag
7. In `C~` this rank needs nothing and looks at no flag, in `C~02` at none of ranks 0
and 2. `C.` is a call without items. `protocol_model.explore` runs programs.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

TAGS = 16  # cells of flags and payloads hold epoch * TAGS + tag

# The queues of a call. The last holds one item: returning the credits.
SEND, PLACE, LEAVE = range(3)


@dataclass(frozen=True)
class Design:
    """The choices of the protocol. The defaults are what signals.h does."""

    depth: int = 1
    turns: int | None = None  # regions that calls take in turn; all of them by default
    # What happens to the oldest pending call if a new one would leave no free region:
    # "" refuses the new call, "return" returns the old one's credits, "keep" does not.
    surplus: str = ""
    workers: int = 1  # per rank, resident at a time
    chunks: int = 1
    route_items: int = 0  # the last one posts the counts, which every placer needs
    own: bool = False  # a rank sends to itself as well
    # "split": a worker is a sender and a placer at once; "helping": as "split", but a
    # sender without items places; "send_first", "place_first": a worker does one thing
    # at a time; "arrival": the first `senders` workers send first, the others place.
    roles: str = "split"
    senders: int = 1
    regions: str = "free"  # or "modulo": epoch % depth, pending or not
    credits: str = "region"  # or "watermark": one word per peer; or "none"
    early_credits: bool = True  # the credit for the epoch to be sent is no error
    empty_waits: bool = True  # a call without items waits for its credits
    publish: str = "after_payload"  # or "before_payload", "between_peers"
    # Who returns the credits: the "last" worker to leave, the "first", or the
    # "senders" once they have nothing left to send.
    leave: str = "last"
    check_tag: bool = True
    ring: int | None = None  # chunk slots that are freed inside a call


class Op(enum.IntEnum):
    AWAIT_MARK = 0  # cell >= value, and an error beyond the limit: a credit
    AWAIT_FLAG = 1  # the epoch in cell == value's
    WRITE = 2
    READ = 3  # cell == value, or the data is wrong
    RAISE = 4  # cell = max(cell, value)
    LAST = 5  # count up to value; every item but the last to count ends here


@dataclass(frozen=True)
class Step:
    op: Op
    cell: int
    value: int
    limit: int | None = None


@dataclass
class Cells:
    """Hands out the indexes of the memory's cells by name."""

    index: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __call__(self, *name: object) -> int:
        return self.index.setdefault(name, len(self.index))


class RefusedError(Exception):
    pass


Item = tuple[Step, ...]
Queue = tuple[Item, ...]
Call = tuple[Queue, Queue, Queue]


@dataclass(frozen=True)
class _Exchange:
    """One call at one rank."""

    design: Design
    cells: Cells
    ranks: int
    rank: int
    kind: str
    epoch: int
    region: int
    previous: int  # the epoch that used the region before
    tag: int
    ignored: frozenset[int] = frozenset()  # ranks whose flags this one skips

    @property
    def _stamp(self) -> int:
        return self.epoch * TAGS + self.tag

    @property
    def _peers(self) -> list[int]:
        first = 0 if self.design.own else 1
        return [(self.rank + i) % self.ranks for i in range(first, self.ranks)]

    def _slot(self, chunk: int) -> int:
        ring = self.design.ring
        return chunk if ring is None or chunk < 0 else chunk % ring

    def _mark(self, chunk: int) -> int:
        return self.epoch * self.design.chunks + chunk

    def _credit_cell(self, source: int, destination: int) -> int:
        region = (self.region,) if self.design.credits == "region" else ()
        return self.cells("credit", self.kind, source, destination, *region)

    def _freed_cell(self, source: int, destination: int, chunk: int) -> int:
        slot = self._slot(chunk)
        return self.cells("freed", self.kind, source, destination, self.region, slot)

    def _await_space(self, peer: int, chunk: int) -> list[Step]:
        steps = []
        if self.design.credits != "none":
            cell = self._credit_cell(self.rank, peer)
            if self.design.credits == "watermark":
                need, limit = self.epoch - self.design.depth, None
            else:
                need = self.previous
                limit = self.epoch if self.design.early_credits else self.epoch - 1
            steps.append(Step(Op.AWAIT_MARK, cell, need, limit))
        if self.design.ring is not None and chunk >= self.design.ring:
            cell = self._freed_cell(self.rank, peer, chunk)
            need = self._mark(chunk - self.design.ring)
            steps.append(Step(Op.AWAIT_MARK, cell, need))
        return steps

    def _put(self, chunk: int) -> Item:
        """A chunk for all destinations: all payloads, then all flags."""
        payloads, flags = [], []
        for peer in self._peers:
            where = (self.kind, peer, self.rank, self.region, self._slot(chunk))
            cells = self.cells("payload", *where), self.cells("flag", *where)
            payloads.append(Step(Op.WRITE, cells[0], self._stamp))
            flags.append(Step(Op.WRITE, cells[1], self._stamp))
        stores = {
            "after_payload": [*payloads, *flags],
            "before_payload": [*flags, *payloads],
            # The first flag covers only the first payload, the last comes too early.
            "between_peers": [payloads[0], *flags, *payloads[1:]],
        }[self.design.publish]
        return (*self._await_spaces(chunk), *stores)

    def _await_spaces(self, chunk: int) -> list[Step]:
        return [s for peer in self._peers for s in self._await_space(peer, chunk)]

    def send_items(self) -> Queue:
        parts = self.design.route_items
        totals = Step(Op.LAST, self.cells("totals", self.kind, self.rank), parts)
        routes = [(totals, *self._put(-1))] * parts
        return (*routes, *(self._put(chunk) for chunk in range(self.design.chunks)))

    def _take(self, source: int, chunk: int) -> list[Step]:
        where = (self.kind, self.rank, source, self.region, self._slot(chunk))
        return [
            Step(Op.AWAIT_FLAG, self.cells("flag", *where), self._stamp),
            Step(Op.READ, self.cells("payload", *where), self._stamp),
        ]

    def _place(self, source: int, chunk: int) -> Item:
        routed = self._peers if self.design.route_items else []
        steps = [s for peer in routed for s in self._take(peer, -1)]
        steps += self._take(source, chunk)
        if self.design.ring is not None:
            freed = self._freed_cell(source, self.rank, chunk)
            steps.append(Step(Op.RAISE, freed, self._mark(chunk)))
        return tuple(steps)

    def place_items(self) -> Queue:
        chunks = range(self.design.chunks)
        return tuple(
            self._place(peer, chunk)
            for chunk in chunks
            for peer in self._peers
            if peer not in self.ignored
        )

    def empty_items(self) -> Queue:
        waits = tuple(self._await_spaces(0))
        return (waits,) if waits and self.design.empty_waits else ()

    def credit_items(self) -> Queue:
        cells = [self._credit_cell(peer, self.rank) for peer in self._peers]
        return (tuple(Step(Op.RAISE, cell, self.epoch) for cell in cells),)


def _ignored(name: str, ranks: int) -> frozenset[int]:
    return frozenset(map(int, name) if name else range(ranks))


def _give_up(
    design: Design, kind: str, pending: dict[tuple[str, str], _Exchange]
) -> Queue:
    """Gives up the oldest pending call if calls of a kind fill all regions."""
    own = [name for name in pending if name[0] == kind]
    if not design.surplus or len(own) < design.depth:
        return ()
    oldest = pending.pop(min(own, key=lambda name: pending[name].epoch))
    return oldest.credit_items() if design.surplus == "return" else ()


def compile_program(
    design: Design, ranks: int, rank: int, program: str, cells: Cells
) -> tuple[Call, ...]:
    """The items of every call. Regions are fixed here, as ranks agree on them."""
    last_sent: dict[tuple[str, int], int] = {}
    next_epoch: dict[str, int] = {}
    pending: dict[tuple[str, str], _Exchange] = {}
    calls: list[Call] = []
    for word in program.split():
        match = re.fullmatch(r"([A-Z])(?:([<>=])(\w+)|(~)(\d*)|(\.))?", word)
        if match is None:
            raise ValueError(f"not a call: {word}")
        kind, form = match[1], match[2] or match[4] or match[6]
        name = match[3] or match[5]
        if form == "<":
            if (kind, name) not in pending:
                raise RefusedError
            sent = pending.pop((kind, name))
            calls.append(((), sent.place_items(), sent.credit_items()))
            continue
        epoch = next_epoch.get(kind, 1)
        next_epoch[kind] = epoch + 1
        held = {p.region for (k, _), p in pending.items() if k == kind}
        first = epoch % (design.turns or design.depth)
        tried = [(first + i) % design.depth for i in range(design.depth)]
        free = [r for r in tried if design.regions == "modulo" or r not in held]
        if not free:
            raise RefusedError
        previous = last_sent.get((kind, free[0]), 0)
        last_sent[kind, free[0]] = epoch
        exchange = _Exchange(
            design=design,
            cells=cells,
            ranks=ranks,
            rank=rank,
            kind=kind,
            epoch=epoch,
            region=free[0],
            previous=previous,
            tag=int(name) if form == "=" else 0,
            ignored=_ignored(name, ranks) if form == "~" else frozenset(),
        )
        if form == ">":
            pending[kind, name] = exchange
            calls.append((exchange.send_items(), (), _give_up(design, kind, pending)))
        elif form == ".":
            calls.append((exchange.empty_items(), (), exchange.credit_items()))
        else:
            calls.append(
                (
                    exchange.send_items(),
                    exchange.place_items(),
                    exchange.credit_items(),
                )
            )
    return tuple(calls)
