"""`rows_back`, which turns combine's cotangent into those of rows, against its formula.

A stand-in replaces the kernel in all tests except those marked for GPUs.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._ops import combine, rows_back
from support import helpers, moe, options

pytestmark = pytest.mark.usefixtures("quick_compiles")
# The modes whose combines have weights.
MODES = {"rank": {}} | {k: v for k, v in options.MODES.items() if "none" not in k}
DTYPES = ["bfloat16", "float16", "float32"]
# The error that bfloat16 may have, relative to the largest value.
BFLOAT16 = 2.0**-6
BACKS = rows_back.rows_back, rows_back.rows_back_reference


def make_operands(shape: tuple[int, ...], dtype: str, slots: int = 1) -> Any:
    """Cotangents, expert_out, weights of rows `[..., N, H]`, slots of the last dims."""
    rng = np.random.default_rng(0)
    row_slot = rng.integers(-1, 2, shape[-1 - slots : -1], np.int32)
    row_slot[..., :1] = 0  # a single row should exist
    cotangents = helpers.normal(rng, shape, jnp.dtype(dtype))
    # Absent rows are zeros, as after an exchange.
    cotangents = np.where(
        row_slot[..., None] >= 0, cotangents, np.zeros_like(cotangents)
    )
    expert_out = helpers.normal(rng, shape, jnp.dtype(dtype))
    weights = helpers.normal(rng, shape[:-1], np.float32)
    return *map(jnp.asarray, (cotangents, expert_out, weights)), jnp.asarray(row_slot)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Replaces the kernel by the stand-in; collects the shape of each call."""
    made: list[tuple[int, ...]] = []

    # Like the kernel's call, it has neither a batching rule nor a derivative.
    @jax.custom_batching.custom_vmap
    def stand_in(cotangents: Any, expert_out: Any, weights: Any, row_slot: Any) -> Any:
        made.append(cotangents.shape)
        operands = (cotangents, expert_out, weights, row_slot)
        to_rows, to_weights = rows_back.rows_back_reference(*operands)
        # The kernel does not change the other rows.
        return jnp.where(row_slot[:, None] >= 0, to_rows, cotangents), to_weights

    @stand_in.def_vmap
    def _(*_: Any) -> Any:
        raise AssertionError("a batch came to the kernel")

    monkeypatch.setattr(rows_back, "_call", stand_in)
    return made


def value(back: Any, operands: Any, cotangent: Any) -> Any:
    """The results of `back`."""
    del cotangent
    return back(*operands)


def pulled(back: Any, operands: Any, cotangent: Any) -> Any:
    """The cotangents of cotangents, expert_out and weights."""
    *values, row_slot = operands
    return jax.vjp(lambda *given: back(*given, row_slot), *values)[1](cotangent)


def curvature(back: Any, operands: Any, cotangent: Any) -> Any:
    """Derivatives of the sum of squares of `pulled`, also by `cotangent`."""
    *values, row_slot = operands

    def squares(values: Any, cotangent: Any) -> Any:
        found = pulled(back, (*values, row_slot), cotangent)
        return sum(jnp.sum(each.astype(jnp.float32) ** 2) for each in found)

    return jax.grad(squares, (0, 1))(values, cotangent)


def assert_alike(actual: Any, expected: Any, least: float = 1e-5) -> None:
    """Leaves have equal dtypes, and equal values except for the rounding of sums.

    `least` is the error that float32 may have, relative to the largest value.
    """
    for got, want in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert got.dtype == want.dtype
        rtol = least if got.dtype == jnp.float32 else BFLOAT16
        got, want = helpers.float32(got), helpers.float32(want)
        largest = float(np.max(np.abs(want)))
        assert 0 < largest < np.inf
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", [value, pulled, curvature])
def test_equals_the_reference(what: Any, dtype: str, calls: Any) -> None:
    operands = make_operands((13, 16), dtype)
    cotangent = (operands[1] + 1, operands[2] - 1)
    found, want = (
        jax.jit(functools.partial(what, back))(operands, cotangent) for back in BACKS
    )
    assert_alike(found, want)
    assert calls == [(13, 16)]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_vmap(count: int, slots: int, calls: Any) -> None:
    """Entry by entry of a batch, with slots for each entry or shared ones."""
    operands = make_operands((count, 13, 16), "float32", slots)
    cotangent = (operands[1] + 1, operands[2] - 1)
    axes = (0, 0, 0, 0 if slots == 2 else None)
    for what in (value, pulled, curvature):
        found, want = (
            jax.jit(functools.partial(what, jax.vmap(back, axes)))(operands, cotangent)
            for back in BACKS
        )
        assert_alike(found, want)
    # Some versions of JAX trace calls of equal shapes only once.
    assert set(calls) == {(13, 16)}


def layer(ep: Any, x: Any, ids: Any, w: Any, scale: Any) -> Any:
    """A layer of one rank, with NaN in the rows that must not be read."""
    d = jax_ep.dispatch(ep, x, ids, w)
    rows = jnp.sin(d.tokens * scale)
    rows = jnp.where(d.src_info[:, :1] < 0, jnp.nan, rows)
    weights = w if ep.config.reduce == "source" else d.router_weights
    y = jax_ep.combine(ep, rows, d.route, weights)
    return jax.lax.psum(y, "ep") if ep.config.skip_a2a else y


def gradients(s: moe.Setup, order: int) -> Any:
    """Gradients of tokens, weights and the scale: first ones, or of their squares."""
    local = s.ep.config.skip_a2a
    spec = P() if local else P("ep")
    n = s.ep.config.max_tokens_per_rank if local else None
    x, ids, w = s.tokens[:n], s.ids[:n], s.weights[:n]
    scale = np.linspace(0.5, 1.5, x.shape[1]).astype(x.dtype)
    run = moe.sharded(
        s.mesh,
        functools.partial(layer, s.ep),
        in_specs=(spec, spec, spec, P()),
        out_specs=spec,
    )

    def loss(*values: Any) -> Any:
        return moe.wave(run(values[0], ids, *values[1:]))

    def squares(*values: Any) -> Any:
        found = jax.grad(loss, (0, 1, 2))(*values)
        return sum(jnp.sum(each.astype(jnp.float32) ** 2) for each in found)

    return jax.jit(jax.grad([loss, squares][order - 1], (0, 1, 2)))(x, w, scale)


@pytest.mark.few(2)
@pytest.mark.parametrize("order", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_combine(
    mode: str,
    dtype: str,
    order: int,
    calls: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients equal those without the kernel, with dropped rows and padding."""
    changes = {"dtype": dtype, "recv_capacity": 12, "expert_alignment": 4}
    ranks = helpers.some_ranks(4)
    s = moe.setup(zlib.crc32(mode.encode()), ranks, **changes, **MODES[mode])
    monkeypatch.setattr(combine, "platform_of", lambda mesh: "cpu")
    want = gradients(s, order)
    assert not calls
    monkeypatch.setattr(combine, "platform_of", lambda mesh: "gpu")
    found = gradients(s, order)
    assert calls
    # On the way to a float32 second derivative, GPUs round other values to bfloat16.
    rounded = jax.default_backend() == "gpu" and dtype == "bfloat16" and order == 2
    assert_alike(found, want, BFLOAT16 if rounded else 1e-5)


def run_kernel(operands: Any) -> Any:
    """Runs the kernel; returns rows and weights."""
    return jax.block_until_ready(jax.jit(rows_back.rows_back)(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [8, 264, 7168])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_kernel(count: int, hidden: int, dtype: str) -> None:
    check_kernel(count, hidden, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_warps(dtype: str) -> None:
    """More rows than the largest grid has warps, so that warps take several rows."""
    check_kernel(200_000, 8, dtype)


def check_kernel(count: int, hidden: int, dtype: str) -> None:
    """Compares the kernel with the reference, also with NaN where it must not read."""
    operands = make_operands((count, hidden), dtype)
    cotangents, expert_out, weights, row_slot = operands
    there = np.asarray(row_slot) >= 0
    to_rows, to_weights = map(np.asarray, run_kernel(operands))
    want, _ = jax.jit(rows_back.rows_back_reference)(*operands)
    helpers.assert_bits(to_rows[there], np.asarray(want)[there])
    helpers.assert_bits(to_rows[~there], np.zeros_like(to_rows[~there]))

    assert to_weights.dtype == np.float32
    wide = (np.asarray(each, np.float64) for each in (cotangents, expert_out))
    products = np.multiply(*wide)
    error = np.abs(to_weights - products.sum(-1))[there]
    assert np.all(error <= 1e-5 * np.abs(products).sum(-1)[there])
    helpers.assert_bits(to_weights[~there], np.zeros_like(to_weights[~there]))

    nan = jnp.asarray(jnp.nan, expert_out.dtype)
    poisoned = (
        cotangents,
        jnp.where(there[:, None], expert_out, nan),
        jnp.where(there, weights, jnp.nan),
        row_slot,
    )
    again = run_kernel(poisoned)
    helpers.assert_bits(again[0], to_rows)
    helpers.assert_bits(again[1], to_weights)
