"""Programs run over p2p and over collective on the same arrays, compared on the GPUs.

This is for shapes that are too large for the host and the oracle. The oracle has
checked the collective transport.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from support import device_random, format_values, gpus, helpers, oracle


def p2p_mesh(ranks: int | None = None) -> Mesh:
    """A mesh over `ranks` GPUs, by default up to four; skips where p2p cannot run.

    The driver says whether it can, so that a test fails if jax_ep refuses wrongly.
    """
    mesh = helpers.make_mesh(ranks or helpers.some_ranks(4))
    reason = gpus.why_no_p2p(mesh.devices.flat)
    if reason:
        pytest.skip(reason)
    return mesh


@dataclasses.dataclass
class Operands:
    """The operands of `everything`; None for each one that calls omit."""

    tokens: Any
    ids: Any
    weights: Any
    rows: Any
    row_weights: Any
    residual: Any
    dy: Any


jax.tree_util.register_dataclass(Operands)


def make_operands(
    mesh: Mesh,
    ep: Any,
    seed: int,
    n: int,
    routing: str | Sequence[str] = "random",
    weighted: bool = True,
    residual: bool = True,
) -> Operands:
    """Random operands of all ranks: tokens of any bits, and finite values to sum."""
    config, ranks, rng = ep.config, mesh.size, np.random.default_rng(seed)
    words = [routing] * ranks if isinstance(routing, str) else list(routing)[:ranks]
    ids = [helpers.make_ids(rng, config, n, word) for word in words]
    weights = helpers.normal(rng, (ranks * n, config.top_k), np.float32)
    draw = _drawn(mesh, n, ep.recv_capacity, config.hidden_size, config.dtype)
    tokens, rows, row_weights, skip, dy = draw(np.uint32(seed))
    return Operands(
        tokens,
        helpers.put(mesh, ids),
        helpers.put(mesh, [weights]) if weighted else None,
        rows,
        row_weights if weighted else None,
        skip if residual else None,
        dy,
    )


@functools.cache
def _drawn(mesh: Mesh, n: int, capacity: int, hidden: int, name: str) -> Any:
    """A program that draws all but ids and their weights on devices, from a seed."""
    ranks, dtype = mesh.size, oracle.DTYPES[name]

    def draw(seed):
        return (
            format_values.draw(seed, (ranks * n, hidden), name),
            device_random.numbers(seed, 5, (ranks * capacity, hidden)).astype(dtype),
            device_random.numbers(seed, 6, (ranks * capacity, 1))[:, 0],
            device_random.numbers(seed, 7, (ranks * n, hidden)).astype(dtype),
            device_random.numbers(seed, 8, (ranks * n, hidden)).astype(dtype),
        )

    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.jit(draw, out_shardings=sharding)


def _bits(a: Any) -> Any:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return a
    unsigned = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(a, unsigned)


def _cleared(rows: Any, where: Any) -> Any:
    # Clears bits, because not every dtype of scales has a zero.
    bits = jnp.where(where[:, None], 0, _bits(rows))
    return jax.lax.bitcast_convert_type(bits, rows.dtype)


def everything(ep: Any, o: Operands) -> dict[str, Any]:
    """Dispatch and combine with both backward passes, on one rank.

    Whatever must not be read is NaN. What zero_tail=False leaves unspecified is cleared
    before it is returned.
    """

    quantised = ep.config.dispatch_format != "bf16"
    input_scale = None
    if ep.config.dispatch_format == "nvfp4":
        input_scale = jnp.float32(0.37)

    def forward(tokens, weights):
        d = jax_ep.dispatch(ep, tokens, o.ids, weights, input_scale=input_scale)
        rows = jax_ep.dequantize(d) if quantised else d.tokens
        return (rows, d.router_weights), d

    _, pull_dispatch, d = jax.vjp(forward, o.tokens, o.weights, has_aux=True)
    tail = jnp.arange(ep.recv_capacity) >= d.row_offsets[-1]
    by_row = quantised and ep.config.scale_layout == "rows"
    if not ep.config.zero_tail:
        d = dataclasses.replace(
            d,
            tokens=_cleared(d.tokens, tail),
            scales=_cleared(d.scales, tail) if by_row else d.scales,
            src_info=jnp.where(tail[:, None], -1, d.src_info),
            router_weights=jnp.where(tail, 0.0, d.router_weights),
        )
    absent = tail | (d.src_info[:, 0] < 0)
    rows = jnp.where(absent[:, None], jnp.nan, o.rows).astype(o.rows.dtype)
    weights = None
    if o.row_weights is not None:
        weights = jnp.where(absent, jnp.nan, o.row_weights)

    def back(rows, weights, residual):
        return jax_ep.combine(
            ep, rows, d.route, router_weights=weights, residual=residual
        )

    y, pull_combine = jax.vjp(back, rows, weights, o.residual)
    d_rows, d_weights, d_residual = pull_combine(o.dy)
    # Any float32 [N] will do as the cotangent of the rows' weights.
    dx, dw = pull_dispatch((rows, d_rows[:, 0].astype(jnp.float32)))
    exact = {
        "dispatch": d,
        "combine": y,
        "d_rows": d_rows,
        "d_residual": d_residual,
        "d_tokens": dx,
        "d_weights": dw,
    }
    # XLA computes products with E and may sum in another order in another program.
    return {"exact": exact, "near": d_weights}


def mapped(mesh: Mesh, body: Callable[..., Any]) -> Any:
    """`body` on every rank, jitted; empty operands are made inside it.

    XLA of jax 0.11.2 crashes on a shard_map over several GPUs that takes both empty and
    other operands.
    """
    axes = mesh.axis_names

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)

        def rank(full: Sequence[Any]) -> Any:
            parts = iter(full)
            local = [next(parts) if leaf.size else empty(leaf) for leaf in leaves]
            return body(*jax.tree.unflatten(tree, local))

        def empty(leaf: Any) -> Any:
            shape = (leaf.shape[0] // mesh.size, *leaf.shape[1:])
            return jax.lax.pcast(jnp.zeros(shape, leaf.dtype), axes, to="varying")

        spec = P(axes)
        ranks = jax.shard_map(rank, mesh=mesh, in_specs=spec, out_specs=spec)
        return ranks([leaf for leaf in leaves if leaf.size])

    return jax.jit(run)


@jax.jit
def _unequal(actual: Any, wanted: Any) -> Any:
    return jax.tree.map(
        lambda a, w: jnp.sum(_bits(a) != _bits(w), dtype=jnp.int32), actual, wanted
    )


def assert_same(actual: Any, wanted: Any, what: str = "") -> None:
    """Equal bits of all leaves, compared on the devices; routes' keys may differ."""
    actual = jax.tree.leaves(actual)
    names = [jax.tree_util.keystr(k) for k, _ in jax.tree.leaves_with_path(wanted)]
    wanted = jax.tree.leaves(wanted)
    shapes = [(a.shape, a.dtype) for a in actual]
    assert shapes == [(w.shape, w.dtype) for w in wanted], what
    counts = [int(count) for count in _unequal(actual, wanted)]
    found = {name: count for name, count in zip(names, counts, strict=True) if count}
    assert not found, f"{what}: elements that differ from collective's: {found}"


def assert_near(actual: Any, wanted: Any) -> None:
    """Asserts equality within float32's rounding of a long sum."""
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    scale = max(1.0, float(np.max(np.abs(wanted), initial=0)))
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-5 * scale)


class Pair:
    """Two handles of one config, over p2p and collective; a context manager."""

    def __init__(self, mesh: Mesh, config: Any, axis: Any = "ep") -> None:
        gpus.require_stream(config.overlap)
        self.mesh = mesh
        self._stack = contextlib.ExitStack()
        self.p2p, self.collective = (
            self._stack.enter_context(jax_ep.init(mesh, axis, config, transport=name))
            for name in ("p2p", "collective")
        )
        self._programs = [
            mapped(mesh, functools.partial(everything, ep))
            for ep in (self.p2p, self.collective)
        ]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def operands(self, *args: Any, **options: Any) -> Operands:
        """Calls `make_operands` with the p2p handle."""
        return make_operands(self.mesh, self.p2p, *args, **options)

    def compare(self, operands: Operands, what: str = "") -> Any:
        """Asserts that both give the same; returns collective's dispatch."""
        actual, wanted = (program(operands) for program in self._programs)
        assert_same(actual["exact"], wanted["exact"], what)
        if wanted["near"] is not None:
            assert_near(actual["near"], wanted["near"])
        return wanted["exact"]["dispatch"]
