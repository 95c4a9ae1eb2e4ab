"""Chooses how many copies experts get, and packs them into ranks; NumPy on the host.

Loads are integers, so that sums are exact and every process finds the same packing, on
whatever CPU. A copy of an expert takes an equal part of its load.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterator

import numpy as np

# A packing is good enough if its fullest rank is this close to the lower bound.
_GOOD = 1.01
# A layer tries at most this many different numbers of extra copies of hot experts.
_TRIES = 8
# A layer gets this many further tries, divided by the square of its number of places.
_STEPS = 2**16
# The largest load, in units. The sum over 2**11 experts, the maximum, cannot overflow.
_UNITS = 2**40


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of what experts are packed into.

    Attributes:
        slots: places of all ranks.
        ranks: ranks, with equally many places each.
        per_node: ranks per node; `ranks` if all are on one.
    """

    slots: int
    ranks: int
    per_node: int

    @property
    def own(self) -> int:
        """Places per rank."""
        return self.slots // self.ranks


def pack(load: np.ndarray, shape: Shape) -> np.ndarray:
    """Returns the expert of each place, `[slots]`, for a layer's float64 loads `[E]`.

    The fullest rank is never fuller than with the experts in order, E / R per rank, and
    no further copies.
    """
    units = np.ones(len(load), np.int64)
    if load.any():
        units = np.rint(load / load.max() * _UNITS).astype(np.int64)
    found, fullest = _best(units, shape)
    plain = _in_order(len(units), shape)
    if plain is not None and _fullest(units, plain, shape) < fullest:
        return plain
    return found


def _best(load: np.ndarray, shape: Shape) -> tuple[np.ndarray, int]:
    """Returns the best packing that was found, and the load of its fullest rank."""
    enough = _GOOD * _lower_bound(load, shape)
    best, counts, least = load, load, np.iinfo(np.int64).max
    for copies in _counts(load, shape):
        found, fullest = _packed(load, copies, shape)
        if fullest < least:
            best, counts, least = found, copies, fullest
        if least <= enough:
            return best, least
    left = _STEPS // shape.slots**2
    while left > 0:
        before = least
        for copies in itertools.islice(_neighbours(counts, shape), left):
            left -= 1
            found, fullest = _packed(load, copies, shape)
            if fullest < least:
                best, counts, least = found, copies, fullest
                break
        if least == before or least <= enough:
            break
    return best, least


def _fullest(load: np.ndarray, expert_of: np.ndarray, shape: Shape) -> int:
    """Returns the load of the fullest rank."""
    copies = np.bincount(expert_of, minlength=len(load))
    share = load[expert_of] // copies[expert_of]
    return int(share.reshape(shape.ranks, -1).sum(axis=1).max())


def _lower_bound(load: np.ndarray, shape: Shape) -> float:
    """Returns a lower bound on the load of the fullest rank, whatever the packing."""
    spare = shape.slots - len(load)
    one = np.ones(len(load), np.int64)
    most = _hottest_first(load, spare, one, shape.ranks)
    return max(load.sum() / shape.ranks, float((load / most).max()))


def _counts(load: np.ndarray, shape: Shape) -> Iterator[np.ndarray]:
    """Yields numbers of copies `[E]` to try, the most promising first.

    Spare places first go to the expert with the largest load per copy. If a rank then
    has two copies of a hot expert, or a second hot expert, that can be worse than a
    copy of a cold one, so in later tries some spare places go to the coldest instead.
    """
    spare = shape.slots - len(load)
    tries = np.linspace(spare, 0, min(_TRIES, spare + 1)).round().astype(int)
    for hot in tries:
        copies = np.ones(len(load), np.int64)
        copies = _hottest_first(load, hot, copies, shape.ranks)
        yield _coldest_first(load, shape.slots - copies.sum(), copies, shape.ranks)


def _hottest_first(
    load: np.ndarray, spare: int, copies: np.ndarray, ranks: int
) -> np.ndarray:
    """Gives `spare` copies to experts of largest load per copy, at most one per rank.

    When every expert has one copy per rank, each may get another one per rank.
    """
    copies = copies.copy()
    limit = ranks
    queue = [(-load[e] / n, n, e) for e, n in enumerate(copies.tolist())]
    heapq.heapify(queue)
    full = []
    for _ in range(spare):
        while not queue or queue[0][1] >= limit:
            if queue:
                full.append(heapq.heappop(queue))
            else:
                queue, full, limit = full, [], limit + ranks
                heapq.heapify(queue)
        _, n, e = queue[0]
        heapq.heapreplace(queue, (-load[e] / (n + 1), n + 1, e))
        copies[e] += 1
    return copies


def _coldest_first(
    load: np.ndarray, spare: int, copies: np.ndarray, ranks: int
) -> np.ndarray:
    """Gives `spare` copies to experts of least load, in turn, at most one per rank."""
    copies = copies.copy()
    order = np.argsort(load, kind="stable")
    limit = ranks
    while spare:
        takers = order[copies[order] < limit][:spare]
        copies[takers] += 1
        spare -= len(takers)
        limit += 0 if len(takers) else ranks
    return copies


def _neighbours(copies: np.ndarray, shape: Shape) -> Iterator[np.ndarray]:
    """Yields numbers of copies in which one expert gives a copy to another."""
    most = max(shape.ranks, copies.max())
    for source, target in itertools.permutations(range(len(copies)), 2):
        if copies[source] > 1 and copies[target] < most:
            changed = copies.copy()
            changed[source] -= 1
            changed[target] += 1
            yield changed


def _packed(
    load: np.ndarray, copies: np.ndarray, shape: Shape
) -> tuple[np.ndarray, int]:
    """Packs copies into nodes, and each node's copies into its ranks.

    Returns:
        The expert of each place, `[slots]`, and the load of the fullest rank.
    """
    expert = np.repeat(np.arange(len(load)), copies)
    share = load // copies
    nodes = shape.ranks // shape.per_node
    node_of = _Bins(expert, share, nodes).packed()
    found = []
    for node in range(nodes):
        own = expert[node_of == node]
        rank_of = _Bins(own, share, shape.per_node).packed()
        for rank in range(shape.per_node):
            found.append(np.sort(own[rank_of == rank]))
    expert_of = np.concatenate(found)
    return expert_of, _fullest(load, expert_of, shape)


class _Bins:
    """Bins of equal size for copies of experts.

    A bin has no more copies of an expert than an even spread over the bins needs.

    Attributes:
        expert: expert of each copy, `[n]`, ascending.
        weight: load of each copy, `[n]`.
        limit: most copies of each expert in one bin, `[E]`.
        size: copies per bin.
        held: copies of each expert in each bin, `[E, bins]`.
        filled: copies in each bin.
        loads: load of each bin.
        bin_of: bin of each copy, -1 before it has one.
    """

    def __init__(self, expert: np.ndarray, share: np.ndarray, bins: int) -> None:
        """Makes `bins` empty bins for the copies; `share` is the load of one, `[E]`."""
        self.expert, self.weight = expert, share[expert]
        self.limit = -(-np.bincount(expert, minlength=len(share)) // bins)
        self.size = len(expert) // bins
        self.held = np.zeros((len(share), bins), np.int64)
        self.filled = np.zeros(bins, np.int64)
        self.loads = np.zeros(bins, np.int64)
        self.bin_of = np.full(len(expert), -1)

    def packed(self) -> np.ndarray:
        """Returns the bin of each copy, `[n]`; nearly minimises the fullest bin."""
        if len(self.loads) == 1:
            return np.zeros(len(self.expert), np.int64)
        for item in np.argsort(-self.weight, kind="stable"):
            e = int(self.expert[item])
            takers = (self.filled < self.size) & (self.held[e] < self.limit[e])
            at = _emptiest(self.loads, takers) if takers.any() else self._make_room(e)
            self._add(item, at, 1)
        while self._swap_one():
            pass
        return self.bin_of

    def _add(self, item: int, at: int, sign: int) -> None:
        """Puts a copy into a bin, or with sign -1 takes it out."""
        self.held[self.expert[item], at] += sign
        self.filled[at] += sign
        self.loads[at] += sign * self.weight[item]
        self.bin_of[item] = at

    def _make_room(self, e: int) -> int:
        """Moves a copy out of a full bin that may take expert `e`; returns the bin.

        No bin with room may take `e`. A full bin that may take it has more copies of
        other experts than a bin with room has, so one of them may move to the latter.
        """
        to = _emptiest(self.loads, self.filled < self.size)
        source = _emptiest(self.loads, self.held[e] < self.limit[e])
        items = np.flatnonzero(self.bin_of == source)
        others = self.expert[items]
        items = items[self.held[others, to] < self.limit[others]]
        moved = int(items[self.weight[items].argmax()])
        self._add(moved, source, -1)
        self._add(moved, to, 1)
        return source

    def _swap_one(self) -> bool:
        """Swaps a copy in the fullest bin for one in another; returns whether it did.

        It does if both bins then have less load than the fullest had. The sum of the
        squares of the loads falls, so swaps come to an end.
        """
        full = int(self.loads.argmax())
        mine = np.flatnonzero(self.bin_of == full)
        others = np.flatnonzero(self.bin_of != full)
        at = self.bin_of[others]
        less = self.weight[mine][:, None] - self.weight[others]
        ours, theirs = self.expert[mine][:, None], self.expert[others]
        fits = self.held[ours, at] < self.limit[ours]
        fits &= self.held[theirs, full] < self.limit[theirs]
        after = np.maximum(self.loads[full] - less, self.loads[at] + less)
        after = np.where(fits, after, self.loads[full])
        i, j = np.unravel_index(after.argmin(), after.shape)
        if after[i, j] >= self.loads[full]:
            return False
        for item, old, new in ((mine[i], full, at[j]), (others[j], at[j], full)):
            self._add(item, old, -1)
            self._add(item, new, 1)
        return True


def _emptiest(loads: np.ndarray, among: np.ndarray) -> int:
    """Returns the bin of least load for which `among` holds."""
    return int(np.where(among, loads, np.iinfo(np.int64).max).argmin())


def _in_order(experts: int, shape: Shape) -> np.ndarray | None:
    """Returns experts in order, E / R per rank; None if they do not divide.

    Spare places repeat the rank's own experts, which changes no rank's load.
    """
    if experts % shape.ranks:
        return None
    local = experts // shape.ranks
    own = np.sort(np.arange(shape.own) % local)
    return (np.arange(shape.ranks)[:, None] * local + own).ravel()
