"""Programs and designs of the protocol model: what every rank does, step by step.

A program is written "D C D>a D D<a": D and C are kinds of calls (dispatch, combine),
`D>a` only sends and leaves the call pending under the name a, `D<a` places it, and
`D=7` is a fused call whose flags carry the tag 7. `protocol_model.explore` runs it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

TAGS = 16  # cells of flags and payloads hold epoch * TAGS + tag


@dataclass(frozen=True)
class Design:
    """The choices of the protocol. The defaults are what signals.h does."""

    depth: int = 1
    workers: int = 1
    chunks: int = 1
    counts: bool = False  # a route item posts counts, which every place item needs
    queue: str = "send_first"  # or "place_first"
    regions: str = "free"  # or "modulo": epoch % depth, pending or not
    credits: str = "region"  # or "watermark": one word a peer; or "none"
    publish: str = "after_payload"  # or "before_payload"
    consume: str = "after_reads"  # or "before_reads", "first_reader"
    check_tag: bool = True
    ring: int | None = None  # chunk slots that are credited inside a call


class Op(enum.IntEnum):
    AWAIT_MARK = 0  # cell >= value: a credit
    AWAIT_FLAG = 1  # the epoch in cell == value's
    WRITE = 2
    READ = 3  # cell == value, or the data is wrong
    RAISE = 4  # cell = max(cell, value)
    FINISH = 5  # count a reader; the one in `at` publishes the credit


@dataclass(frozen=True)
class Step:
    op: Op
    cell: int
    value: int
    credit: int = -1
    members: int = 0
    at: int = 0


@dataclass
class Cells:
    """Hands out the indexes of the memory's cells by name."""

    index: dict[tuple[object, ...], int] = field(default_factory=dict)

    def __call__(self, *name: object) -> int:
        return self.index.setdefault(name, len(self.index))


class RefusedError(Exception):
    pass


Item = tuple[Step, ...]
Call = tuple[Item, ...]


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
    previous: int  # the region's epoch before
    tag: int

    @property
    def _stamp(self) -> int:
        return self.epoch * TAGS + self.tag

    @property
    def _peers(self) -> list[int]:
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

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

    def _put(self, peer: int, chunk: int) -> list[Step]:
        steps = []
        if self.design.credits != "none":
            watermark = self.design.credits == "watermark"
            need = self.epoch - self.design.depth if watermark else self.previous
            cell = self._credit_cell(self.rank, peer)
            steps.append(Step(Op.AWAIT_MARK, cell, need))
        if self.design.ring is not None and chunk >= self.design.ring:
            cell = self._freed_cell(self.rank, peer, chunk)
            need = self._mark(chunk - self.design.ring)
            steps.append(Step(Op.AWAIT_MARK, cell, need))
        where = (self.kind, peer, self.rank, self.region, self._slot(chunk))
        payload = Step(Op.WRITE, self.cells("payload", *where), self._stamp)
        flag = Step(Op.WRITE, self.cells("flag", *where), self._stamp)
        early = self.design.publish == "before_payload"
        return [*steps, flag, payload] if early else [*steps, payload, flag]

    def send_items(self) -> list[Item]:
        items: list[Item] = []
        if self.design.counts:
            items.append(tuple(s for peer in self._peers for s in self._put(peer, -1)))
        for chunk in range(self.design.chunks):
            items += [tuple(self._put(peer, chunk)) for peer in self._peers]
        return items

    def _take(self, source: int, chunk: int) -> list[Step]:
        where = (self.kind, self.rank, source, self.region, self._slot(chunk))
        return [
            Step(Op.AWAIT_FLAG, self.cells("flag", *where), self._stamp),
            Step(Op.READ, self.cells("payload", *where), self._stamp),
        ]

    def _place(self, source: int, chunk: int) -> Item:
        design = self.design
        finish = Step(
            Op.FINISH,
            self.cells("readers", self.kind, self.rank, source, self.region),
            self.epoch,
            credit=self._credit_cell(source, self.rank),
            members=design.chunks,
            at=1 if design.consume == "first_reader" else design.chunks,
        )
        done = [finish]
        if design.ring is not None:
            freed = self._freed_cell(source, self.rank, chunk)
            done.append(Step(Op.RAISE, freed, self._mark(chunk)))
        counts = self._take(source, -1) if design.counts else []
        flag, read = self._take(source, chunk)
        if design.consume == "before_reads":
            return (*counts, flag, *done, read)
        return (*counts, flag, read, *done)

    def place_items(self) -> list[Item]:
        chunks = range(self.design.chunks)
        return [self._place(peer, chunk) for chunk in chunks for peer in self._peers]


def compile_program(
    design: Design, ranks: int, rank: int, program: str, cells: Cells
) -> tuple[Call, ...]:
    """The items of every call. Regions are known here: ranks agree on them."""
    last_sent: dict[tuple[str, int], int] = {}
    next_epoch: dict[str, int] = {}
    pending: dict[tuple[str, str], _Exchange] = {}
    calls: list[Call] = []
    for word in program.split():
        match = re.fullmatch(r"([A-Z])(?:([<>=])(\w+))?", word)
        if match is None:
            raise ValueError(f"not a call: {word}")
        kind, form, name = match[1], match[2], match[3]
        if form == "<":
            calls.append(tuple(pending.pop((kind, name)).place_items()))
            continue
        epoch = next_epoch.get(kind, 1)
        next_epoch[kind] = epoch + 1
        held = {p.region for (k, _), p in pending.items() if k == kind}
        tried = [(epoch + i) % design.depth for i in range(design.depth)]
        free = [r for r in tried if design.regions == "modulo" or r not in held]
        if not free:
            raise RefusedError
        previous = last_sent.get((kind, free[0]), 0)
        last_sent[kind, free[0]] = epoch
        tag = int(name) if form == "=" else 0
        exchange = _Exchange(
            design, cells, ranks, rank, kind, epoch, free[0], previous, tag
        )
        items = [exchange.send_items()]
        if form == ">":
            pending[kind, name] = exchange
        else:
            items.append(exchange.place_items())
        if design.queue == "place_first":
            items.reverse()
        calls.append(tuple(item for part in items for item in part))
    return tuple(calls)
