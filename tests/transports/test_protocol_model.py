"""Every interleaving of the window protocol: what holds, and what breaks without it."""

from __future__ import annotations

import dataclasses

import pytest

from support.protocol_model import Outcome, explore
from support.protocol_program import Design

FINISHED, DEADLOCK, CORRUPT, DETECTED, REFUSED = (
    frozenset({outcome}) for outcome in Outcome
)

REMAT = "D C D D C D C C"
PENDING = [
    "D>a D>b D<a D<b",
    "D>a D>b D<b D<a",
    "D>a D D D D<a",
    "D>a D>b D<b D>c D<a D<c",
    "D>a C D C>b D<a D C C<b",
]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("program", ["D D D", REMAT])
def test_two_ranks(program: str, depth: int, workers: int) -> None:
    result = explore(program, 2, Design(depth=depth, workers=workers))
    assert result.outcomes == FINISHED, result
    # Makes sure that the model has something to interleave.
    assert result.states > 60


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("program", "design"),
    [
        ("D D D", Design()),
        ("D D D", Design(depth=2)),
        ("D D", Design(workers=2)),
        ("D D", Design(chunks=2)),
        ("D", Design(route_items=1)),
        (REMAT, Design()),
        ("D>a D>b D<b D>c D<a D<c", Design(depth=2)),
    ],
)
def test_three_ranks(program: str, design: Design) -> None:
    result = explore(program, 3, design)
    assert result.outcomes == FINISHED, result
    assert result.states > 1000


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("roles", ["split", "helping", "send_first"])
def test_route_items_and_chunks(roles: str, workers: int) -> None:
    design = Design(chunks=2, route_items=2, workers=workers, roles=roles)
    assert explore("D D", 2, design).outcomes == FINISHED


@pytest.mark.parametrize("roles", ["split", "helping", "send_first"])
def test_own_rank(roles: str) -> None:
    design = Design(own=True, chunks=2, route_items=2, roles=roles)
    assert explore("D D C C D", 1, design).outcomes == FINISHED
    design = Design(own=True, depth=2, roles=roles)
    assert explore("D D", 2, design).outcomes == FINISHED


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("roles", ["split", "helping"])
@pytest.mark.parametrize("program", PENDING)
def test_pending_calls(program: str, roles: str, workers: int) -> None:
    design = Design(depth=2, workers=workers, roles=roles)
    assert explore(program, 2, design).outcomes == FINISHED


# Ranks that end a call without reading some flags, although these arrive, beside ranks
# that wait for theirs.
NEEDLESS = [
    ["C C C", "C~ C~ C~"],
    ["C~ C C~ C", "C C~ C~ C"],
    ["C~ C~ C~ C~", "C~ C~ C~ C~"],
    ["D C~ D C D C", "D C D C~ D C~"],
    ["C C. C~ C", "C~ C. C~ C"],
]
NEEDLESS_PENDING = ["C>a C~ C<a C~ C", "C>a C C<a C C~"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("programs", NEEDLESS)
def test_ranks_that_need_nothing(programs: list[str], depth: int, workers: int) -> None:
    result = explore(programs, 2, Design(depth=depth, workers=workers))
    assert result.outcomes == FINISHED, result


def test_ranks_that_need_nothing_beside_pending_calls() -> None:
    for workers in (1, 2):
        design = Design(depth=2, workers=workers)
        assert explore(NEEDLESS_PENDING, 2, design).outcomes == FINISHED


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "programs",
    [
        ["C C", "C~ C~", "C C"],
        ["C~1 C~2", "C~2 C", "C~ C~0"],
        ["C C C", "C~0 C~0 C~0", "C~ C~ C~"],
        ["D C~ D", "D C D", "D C~0 D"],
    ],
)
def test_three_ranks_of_which_some_need_nothing(
    programs: list[str], depth: int
) -> None:
    assert explore(programs, 3, Design(depth=depth)).outcomes == FINISHED


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("ranks", "programs"), [(2, ["C", "C~"]), (2, NEEDLESS[0]), (3, ["C", "C~0", "C"])]
)
def test_credit_of_the_epoch_to_be_sent(
    ranks: int, programs: list[str], depth: int
) -> None:
    """A source gets it if the destination needed nothing from the source."""
    refusing = Design(depth=depth, early_credits=False)
    assert explore(programs, ranks, refusing).outcomes >= DETECTED
    # Ranks that wait for every flag cannot tell the difference.
    assert explore("C C C", 2, refusing).outcomes == FINISHED


@pytest.mark.parametrize("depth", [1, 2])
def test_calls_without_items_wait_for_credits(depth: int) -> None:
    """Otherwise a rank runs ahead, and its credit is later than the source's epoch."""
    empty = " C." * depth
    programs = ["C" + empty, "C~" + empty]
    waiting = Design(depth=depth)
    assert explore(programs, 2, waiting).outcomes == FINISHED
    free = dataclasses.replace(waiting, empty_waits=False)
    assert explore(programs, 2, free).outcomes >= DETECTED


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("senders", [1, 2])
def test_first_comers_send(senders: int, workers: int) -> None:
    design = Design(roles="arrival", senders=senders, workers=workers, chunks=2)
    assert explore("D D", 2, design).outcomes == FINISHED
    assert explore(["D D", "D~ D~"], 2, design).outcomes == FINISHED
    routed = dataclasses.replace(design, chunks=1, route_items=2)
    assert explore("D D", 2, routed).outcomes == FINISHED
    alone = dataclasses.replace(routed, own=True)
    assert explore("D D", 1, alone).outcomes == FINISHED
    assert (
        explore("D", 3, Design(roles="arrival", workers=workers)).outcomes == FINISHED
    )


@pytest.mark.parametrize(
    ("program", "depth", "outcomes"),
    [
        ("D>a D>b D<a D<b", 1, REFUSED),
        ("D>a D D<a", 1, REFUSED),
        ("D>a D>b D D<a D<b", 2, REFUSED),
        ("D>a D>b D D<a D<b", 3, FINISHED),
    ],
)
def test_too_many_pending_calls_are_refused(
    program: str, depth: int, outcomes: frozenset[Outcome]
) -> None:
    assert explore(program, 2, Design(depth=depth)).outcomes == outcomes


# The first call is begun and never ended: it makes room for later ones.
DROPPED = [
    "D>a D>b D>c D D<b D<c",
    "D>a D>b D D>c D<c D D<b",
    "D>a D>b D>c D>d D<d D D<c",
    "D>a C>b D>c C<b D>d C D<c D D<d",
]


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("program", [*PENDING, *DROPPED])
def test_fewer_turns_than_regions(program: str, turns: int) -> None:
    design = Design(depth=3, turns=turns, surplus="return")
    assert explore(program, 2, design).outcomes == FINISHED


@pytest.mark.parametrize("program", DROPPED)
def test_dropped_calls(program: str) -> None:
    design = Design(depth=3, turns=1, surplus="return", workers=2, roles="helping")
    assert explore(program, 2, design).outcomes == FINISHED
    # A region without its credit is lost to all later calls.
    kept = dataclasses.replace(design, surplus="keep")
    assert explore(program + " D D D", 2, kept).outcomes == DEADLOCK
    assert explore(program + " D<a", 2, design).outcomes == REFUSED


def test_dropped_calls_fill_the_regions() -> None:
    assert explore(DROPPED[0], 2, Design(depth=3)).outcomes == REFUSED


def test_dropped_calls_of_three_ranks() -> None:
    design = Design(depth=2, turns=1, surplus="return")
    assert explore("D>a D>b D D<b D", 3, design).outcomes == FINISHED


def test_region_by_epoch_alone_deadlocks() -> None:
    design = Design(depth=2, regions="modulo")
    result = explore("D>a D D D<a", 2, design)
    assert result.outcomes == DEADLOCK
    assert "rank 0 call 2 waits for credit" in result.stuck
    one = Design(depth=1, regions="modulo")
    assert explore("D>a D>b D<a D<b", 2, one).outcomes == DEADLOCK


@pytest.mark.parametrize(
    ("program", "regions"),
    [("D>a D>b D<b D>c D<a D<c", "modulo"), ("D>a D D D D<a", "free")],
)
def test_one_credit_word_for_all_regions_corrupts(program: str, regions: str) -> None:
    design = Design(depth=2, regions=regions, credits="watermark")
    assert explore(program, 2, design).outcomes >= CORRUPT
    fixed = dataclasses.replace(design, credits="region")
    assert not CORRUPT & explore(program, 2, fixed).outcomes


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_credits_data_is_overwritten(ranks: int) -> None:
    outcomes = explore("D D", ranks, Design(credits="none")).outcomes
    assert outcomes >= CORRUPT | DETECTED


@pytest.mark.parametrize(
    ("ranks", "design"),
    [
        (2, Design(publish="before_payload")),
        (3, Design(publish="before_payload")),
        (3, Design(publish="between_peers")),
    ],
)
def test_payload_comes_before_its_flag(ranks: int, design: Design) -> None:
    assert explore("D", ranks, design).outcomes >= CORRUPT


@pytest.mark.parametrize("program", ["D D", "D>a D D<a D"])
@pytest.mark.parametrize(
    "design",
    [
        # Placers of a worker that has not left still read.
        Design(leave="first", workers=2, chunks=2, depth=2),
        # So does the placer of the only worker.
        Design(leave="senders", chunks=2, depth=2),
    ],
)
def test_credits_before_the_last_leave(program: str, design: Design) -> None:
    if program == "D D":
        design = dataclasses.replace(design, depth=1)
    assert explore(program, 2, design).outcomes >= CORRUPT | DETECTED
    last = dataclasses.replace(design, leave="last")
    assert explore(program, 2, last).outcomes == FINISHED


@pytest.mark.parametrize(("ranks", "own"), [(1, True), (2, False), (3, False)])
def test_placing_must_not_keep_from_sending(ranks: int, own: bool) -> None:
    # Workers that all wait for flags starve the peers, or themselves.
    workers = max(ranks - 1, 1)
    design = Design(roles="place_first", workers=workers, own=own)
    assert explore("D", ranks, design).outcomes == DEADLOCK
    for roles in ("split", "helping", "send_first", "arrival"):
        good = dataclasses.replace(design, roles=roles)
        assert explore("D", ranks, good).outcomes == FINISHED


def test_ring_inside_a_call_needs_placers() -> None:
    ring = Design(chunks=2, ring=1, roles="send_first")
    assert explore("D", 2, ring).outcomes == DEADLOCK
    two = dataclasses.replace(ring, workers=2)
    assert explore("D", 2, two).outcomes == FINISHED
    split = dataclasses.replace(ring, roles="split")
    assert explore("D", 2, split).outcomes == FINISHED


def test_ranks_must_agree_on_the_order() -> None:
    assert explore(["D C", "C D"], 2, Design(workers=2)).outcomes == DEADLOCK
    swapped = ["D=1 D=2", "D=2 D=1"]
    assert explore(swapped, 2).outcomes == DETECTED
    assert explore(swapped, 2, Design(check_tag=False)).outcomes == CORRUPT


@pytest.mark.parametrize(
    ("program", "design"),
    [
        ("D D D", Design(workers=2)),
        ("D D", Design(chunks=2)),
        ("D D", Design(chunks=2, roles="helping")),
        ("D D", Design(chunks=2, roles="arrival", workers=2)),
        (NEEDLESS[1], Design(workers=2)),
        (NEEDLESS[1], Design(depth=2)),
        (["C C.", "C~ C."], Design()),
        (["C C.", "C~ C."], Design(empty_waits=False)),
        (["C C", "C~ C~"], Design(early_credits=False)),
        ("D", Design(route_items=2, workers=2)),
        ("D>a D D D<a", Design(depth=2)),
        ("D>a D D D<a", Design(depth=2, regions="modulo")),
        ("D>a D D D D<a", Design(depth=2, credits="watermark")),
        ("D D", Design(credits="none")),
        ("D D", Design(leave="first", workers=2, chunks=2)),
        ("D D", Design(leave="senders")),
        ("D", Design(chunks=2, ring=1, roles="send_first", workers=2)),
    ],
)
def test_reduction_loses_no_outcome(program: str | list[str], design: Design) -> None:
    full = explore(program, 2, design, reduce=False)
    reduced = explore(program, 2, design)
    assert full.outcomes == reduced.outcomes
    assert full.states > reduced.states
