"""The grouped matmuls' kernels for Hopper, interpreted, and the tiles they take."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep._experts import grouped_outer, grouped_rows, hopper
from support import grouped_kernels
from support.grouped_kernels import (
    needs_interpreter,
    needs_kernels,
    skip_without_mosaic,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Groups, rows of the operand.
CASES = [
    ((10, 0, 30), 64),
    ((1,) * 8, 104),
    ((7, 0, 3, 70, 64, 0, 1, 50), 200),
    ((700, 0, 3, 129, 64, 0, 1, 100), 1000),
    ((512, 512), 1024),
    ((300, 0, 20), 2048),
    ((0, 0, 5), 8),
    ((0, 0), 200),
]
LARGE = (tuple(range(0, 330, 10)), 6000)


def alternating(*values):
    """The cases, each with one of `values`; test_on_hopper has every pair."""
    return [(*case, values[i % len(values)]) for i, case in enumerate(CASES)]


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Kernels within find no race of memory between their threads and copies."""
    from jax._src.pallas.mosaic_gpu.interpret import (
        interpret_pallas_call as interpreter,
    )
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax.experimental.pallas import mosaic_gpu

    monkeypatch.setattr(hopper, "multiprocessors", lambda: 3)
    # The interpreter counts copies on their way out, kernels groups of copies.
    monkeypatch.setattr(grouped_rows, "OUT_SLOTS", 1)
    with mosaic_gpu.force_gpu_interpret_mode(InterpretGPUParams(detect_races=True)):
        yield
    assert not interpreter.get_races().races_found


def bfloat16(rng, *shape):
    return np.asarray(rng.standard_normal(shape), jnp.bfloat16)


def error(found, wanted):
    largest = np.abs(wanted).max(initial=1e-9)
    return np.abs(np.asarray(found, np.float32) - wanted).max(initial=0) / largest


@needs_interpreter
@pytest.mark.parametrize(
    ("sizes", "count", "transposed"), alternating(False, True), ids=str
)
def test_rows(sizes, count, transposed, monkeypatch):
    """Rows of no group, which may be anything, reach nothing and are not written."""
    rng, total = np.random.default_rng(0), sum(sizes)
    # Warpgroups with 64 and with 128 columns.
    depth, columns = 192, 512 if transposed else 384
    rows = bfloat16(rng, count, depth)
    rows[total:] = np.nan
    shape = (columns, depth) if transposed else (depth, columns)
    matrices = bfloat16(rng, len(sizes), *shape)
    with interpreted(monkeypatch):
        found = grouped_rows.grouped_rows(
            jnp.asarray(rows),
            jnp.asarray(matrices),
            group_sizes=jnp.array(sizes, jnp.int32),
            transpose_rhs=transposed,
        )
        found = np.asarray(found)
    wanted = grouped_kernels.of_rows(
        rows, matrices.astype(np.float32), sizes, transposed
    )
    assert error(found[:total], wanted[:total].astype(np.float32)) < 0.01
    # The interpreter fills what a kernel has not written with NaN.
    assert np.isnan(found[total:].astype(np.float32)).all()


@needs_interpreter
@pytest.mark.parametrize(("sizes", "count", "columns"), alternating(512, 384), ids=str)
def test_outer(sizes, count, columns, monkeypatch):
    """Also where a row further than its REACH from a group is NaN."""
    rng, total = np.random.default_rng(0), sum(sizes)
    left, right = bfloat16(rng, count, 128), bfloat16(rng, count, columns)
    left[total + grouped_outer.REACH :] = right[total + grouped_outer.REACH :] = np.nan
    with interpreted(monkeypatch):
        found = grouped_outer.grouped_outer(
            jnp.asarray(left),
            jnp.asarray(right),
            group_sizes=jnp.array(sizes, jnp.int32),
        )
        found = np.asarray(found, np.float32)
    ends = np.cumsum(sizes)
    for matrix, size, end in zip(found, sizes, ends, strict=True):
        own = slice(end - size, end)
        pair = (each[own].astype(np.float32) for each in (left, right))
        wanted = next(pair).T @ next(pair)
        assert error(matrix, wanted) < 0.01
        assert size or not matrix.any()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [640, 1024])
@pytest.mark.parametrize(("sizes", "count"), [*CASES, LARGE], ids=str)
def test_on_hopper(sizes, count, columns):
    """All three, against float32 sums of the same products."""
    skip_without_mosaic()
    rng, total, depth = np.random.default_rng(0), sum(sizes), 1536
    rows, others = bfloat16(rng, count, depth), bfloat16(rng, count, columns)
    matrices = bfloat16(rng, len(sizes), depth, columns)
    rows[total:] = others[total:] = np.nan
    groups = jnp.array(sizes, jnp.int32)
    there = grouped_rows.grouped_rows(rows, matrices, group_sizes=groups)
    back = grouped_rows.grouped_rows(
        others, matrices, group_sizes=groups, transpose_rhs=True
    )
    for found, given, transposed in ((there, rows, False), (back, others, True)):
        wanted = grouped_kernels.of_rows(given, matrices, sizes, transposed)[:total]
        assert error(found[:total], wanted.astype(np.float32)) < 0.01
    rows[total:] = others[total:] = 0
    found = grouped_outer.grouped_outer(rows, others, group_sizes=groups)
    found = np.asarray(found, np.float32)
    for matrix, size, end in zip(found, sizes, np.cumsum(sizes), strict=True):
        own = slice(end - size, end)
        wanted = rows[own].astype(np.float32).T @ others[own].astype(np.float32)
        assert error(matrix, wanted) < 0.01


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("x64", [False, True])
def test_lower(dtype, x64, monkeypatch):
    """For GPUs, whose memory has limits and whose loads begin where they can."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 132)

    def both(rows, matrices, sizes):
        to = grouped_rows.grouped_rows(rows, matrices, group_sizes=sizes)
        back = grouped_rows.grouped_rows(
            to, matrices, group_sizes=sizes, transpose_rhs=True
        )
        return back, grouped_outer.grouped_outer(rows, to, group_sizes=sizes)

    with jax.enable_x64(x64):
        shapes = [((1000, 7168), dtype), ((3, 7168, 512), dtype), ((3,), jnp.int32)]
        structs = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
        traced = jax.jit(both).trace(*structs)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_tiles_are_the_groups_rows(seed):
    """Each once, of its group; loads begin where they can and stay within the rows."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, rng.choice([2, 9, 400]), rng.integers(1, 9))
    sizes *= rng.random(len(sizes)) < 0.8
    count = max(hopper.ROWS, (sum(sizes) + rng.integers(0, 300)) // 8 * 8 + 8)
    tiles = grouped_rows.tiles_of(jnp.array(sizes, jnp.int32), int(count))
    total = int(tiles.total[0])
    assert total <= len(tiles.group)
    owner = np.full(count, -1)
    for group, first, skipped, rows in zip(
        *(t[:total] for t in tiles[:4]), strict=True
    ):
        assert first % hopper.SWIZZLED_ROWS == 0
        assert first + hopper.ROWS <= count
        assert skipped >= 0
        assert 1 <= rows <= hopper.ROWS - skipped
        own = owner[first + skipped : first + skipped + rows]
        assert (own == -1).all()
        own[:] = group
    wanted = np.repeat(np.arange(len(sizes)), sizes)
    np.testing.assert_array_equal(owner[: len(wanted)], wanted)
    assert (owner[len(wanted) :] == -1).all()
    # No more than the groups' rows take.
    assert total <= sum(-(-(size + 7) // hopper.ROWS) for size in sizes if size)
