"""Every interleaving of the window protocol: what holds, and what breaks without it."""

from __future__ import annotations

import dataclasses

import pytest
from protocol_model import Outcome, explore
from protocol_program import Design

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
    # Guards against a model that has nothing to interleave.
    assert result.states > 60


@pytest.mark.parametrize(
    ("program", "design"),
    [
        ("D D D", Design()),
        ("D D D", Design(depth=2)),
        ("D D", Design(workers=2)),
        ("D D", Design(counts=True)),
        (REMAT, Design()),
        ("D>a D>b D<b D>c D<a D<c", Design(depth=2)),
    ],
)
def test_three_ranks(program: str, design: Design) -> None:
    result = explore(program, 3, design)
    assert result.outcomes == FINISHED, result
    assert result.states > 1000


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_counts_and_chunks(workers: int) -> None:
    design = Design(chunks=2, counts=True, workers=workers)
    assert explore("D D", 2, design).outcomes == FINISHED


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("program", PENDING)
def test_pending_calls(program: str, workers: int) -> None:
    design = Design(depth=2, workers=workers)
    assert explore(program, 2, design).outcomes == FINISHED


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
    "design",
    [
        Design(publish="before_payload"),
        Design(consume="before_reads"),
        Design(consume="first_reader", chunks=2),
    ],
)
def test_order_of_publication(design: Design) -> None:
    assert explore("D D", 2, design).outcomes >= CORRUPT


@pytest.mark.parametrize("ranks", [2, 3])
def test_queue_order(ranks: int) -> None:
    # With fewer workers than place items, waiting before sending starves the peers.
    workers = ranks - 1
    design = Design(queue="place_first", workers=workers)
    assert explore("D", ranks, design).outcomes == DEADLOCK
    good = Design(queue="send_first", workers=workers)
    assert explore("D", ranks, good).outcomes == FINISHED


def test_ring_inside_a_call_needs_resident_workers() -> None:
    ring = Design(chunks=2, ring=1)
    assert explore("D", 2, ring).outcomes == DEADLOCK
    two = dataclasses.replace(ring, workers=2)
    assert explore("D", 2, two).outcomes == FINISHED
    assert explore("D", 3, two).outcomes >= DEADLOCK


def test_ranks_must_agree_on_the_order() -> None:
    assert explore(["D C", "C D"], 2, Design(workers=2)).outcomes == DEADLOCK
    swapped = ["D=1 D=2", "D=2 D=1"]
    assert explore(swapped, 2).outcomes == DETECTED
    assert explore(swapped, 2, Design(check_tag=False)).outcomes == CORRUPT


@pytest.mark.parametrize(
    ("program", "design"),
    [
        ("D D D", Design(workers=2)),
        ("D D", Design(chunks=2, counts=True)),
        ("D>a D D D<a", Design(depth=2)),
        ("D>a D D D<a", Design(depth=2, regions="modulo")),
        ("D>a D D D D<a", Design(depth=2, credits="watermark")),
        ("D D", Design(credits="none")),
        ("D D", Design(consume="first_reader", chunks=2)),
        ("D", Design(chunks=2, ring=1, workers=2)),
    ],
)
def test_reduction_loses_no_outcome(program: str, design: Design) -> None:
    full = explore(program, 2, design, reduce=False)
    reduced = explore(program, 2, design)
    assert full.outcomes == reduced.outcomes
    assert full.states > reduced.states
