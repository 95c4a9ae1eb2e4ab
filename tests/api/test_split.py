"""Calls in halves have the bits and gradients of whole ones, wherever Pendings go."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, options, quantized, remat

pytestmark = pytest.mark.usefixtures("quick_compiles")

MODES = pytest.mark.parametrize("mode", ["plain", *options.MODES])


def split_dispatch(ep: Any, *args: Any, **keywords: Any) -> Any:
    return jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, *args, **keywords))


def split_combine(ep: Any, *args: Any, **keywords: Any) -> Any:
    return jax_ep.combine_wait(jax_ep.combine_async(ep, *args, **keywords))


CALLS = [
    (jax_ep.dispatch, jax_ep.combine),
    (split_dispatch, split_combine),
]


def both(ep: Any, dispatch: Any, combine: Any, x: Any, ids: Any, w: Any) -> Any:
    """All results of one rank's dispatch and combine with these calls."""
    d = dispatch(ep, x, ids, w)
    config = ep.config
    weights = {"rank": d.router_weights, "source": w, "none": None}[config.reduce]
    residual = x if options.takes_residual(config) else None
    rows = jnp.sin(jax_ep.dequantize(d))
    return d, combine(ep, rows, d.route, weights, residual=residual)


with_halves = functools.partial(moe.setup, **helpers.HALVES)


def setup(mode: str, **changes: Any) -> moe.Setup:
    return with_halves(1, 4, **options.MODES.get(mode, {}), **changes)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["bf16", "fp8_block128", "nvfp4"])
@MODES
def test_same_bits(mode: str, name: str) -> None:
    s = setup(mode, dtype="bfloat16", **quantized.config_of(name))
    x, ids, w, _ = s.global_arrays()
    whole, split = (
        jax.jit(moe.sharded(s.mesh, functools.partial(both, s.ep, *calls)))(x, ids, w)
        for calls in CALLS
    )
    assert jax.tree.structure(whole) == jax.tree.structure(split)
    jax.tree.map(helpers.assert_bits, split, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("weighted", [True, False])
@MODES
def test_same_gradients(mode: str, weighted: bool) -> None:
    s = setup(mode, expert_alignment=4)
    x, _, w, p = s.global_arrays()

    def grad(calls: Any) -> Any:
        def layer(x: Any, w: Any, p: Any) -> Any:
            x = jnp.tanh(x @ p[0])
            _, y = both(s.ep, *calls, x, ids_of(), w if weighted else None)
            return y

        def ids_of() -> Any:
            rank = jax.lax.axis_index("ep")
            return jax.lax.dynamic_slice_in_dim(jnp.asarray(s.ids), rank * 8, 8)

        run = moe.sharded(s.mesh, layer)
        return jax.jit(jax.grad(lambda *a: moe.wave(run(*a)), (0, 1, 2)))(x, w, p)

    whole, split = map(grad, CALLS)
    assert np.any(np.asarray(whole[0]))
    assert np.any(np.asarray(whole[1])) == (weighted and mode[-4:] != "none")
    jax.tree.map(helpers.assert_bits, split, whole)


def split_layer(ep: Any, x: Any, ids: Any, w: Any, params: Any) -> Any:
    """moe.layer in halves, with work of the same rank in between."""
    pending = jax_ep.dispatch_async(ep, x, ids, w)
    beside = jnp.tanh(x)
    d = jax_ep.dispatch_wait(pending)
    rows = jnp.tanh(moe.gathered_dot(d.tokens, params, d.group_sizes))
    pending = jax_ep.combine_async(ep, rows, d.route, d.router_weights, residual=x)
    beside = jnp.sin(beside)
    return jax_ep.combine_wait(pending) + beside


def dense_layer(x: Any, w: Any, p: Any, ids: Any) -> Any:
    return moe.wave(moe.dense(x, ids, w, p) + jnp.sin(jnp.tanh(x)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_layer(check_vma: bool) -> None:
    s = with_halves(2)
    layer = functools.partial(split_layer, s.ep)
    moe.check(s, moe.loss(s.mesh, layer, check_vma=check_vma), dense_layer)


def test_grad_of_grad() -> None:
    s = with_halves(3)

    def second(loss: Any) -> Any:
        def norm(*args: Any) -> Any:
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*args)) / 64

        return norm

    layer = functools.partial(split_layer, s.ep)
    moe.check(s, second(moe.loss(s.mesh, layer)), second(dense_layer))


@pytest.mark.parametrize("wrap", [jax.checkpoint, remat.save_route])
def test_rematerialised(wrap: Any) -> None:
    s = with_halves(4, ranks=2)
    layer = wrap(functools.partial(split_layer, s.ep))
    moe.check(s, moe.loss(s.mesh, layer), dense_layer)


def test_save_route_exchanges_nothing_twice() -> None:
    s = with_halves(5, ranks=2)

    def count(wrap: Any) -> int:
        layer = wrap(functools.partial(split_layer, s.ep))

        def layers(x: Any, ids: Any, w: Any, p: Any) -> Any:
            return jax.lax.scan(
                lambda x, c: (layer(x, ids, w * c, p), None), x, jnp.ones(3)
            )[0]

        loss = moe.loss(s.mesh, layers)
        return remat.exchanges(jax.grad(loss, (0, 1, 2)), *remat.arguments(s))

    plain, saved, again = map(count, (remat.bare, remat.save_route, jax.checkpoint))
    assert 0 < plain == saved < again


def test_two_batches_in_flight() -> None:
    """The second batch's dispatch overlaps with the first's experts, and so on."""
    s = with_halves(6, max_tokens_per_rank=4)

    def layer(x: Any, ids: Any, w: Any, p: Any) -> Any:
        parts = [(x[i : i + 4], ids[i : i + 4], w[i : i + 4]) for i in (0, 4)]
        sent = [jax_ep.dispatch_async(s.ep, *part) for part in parts]
        back = []
        for pending, (x, _, _) in zip(sent, parts, strict=True):
            d = jax_ep.dispatch_wait(pending)
            rows = jnp.tanh(jax.lax.ragged_dot(d.tokens, p, d.group_sizes))
            back.append(
                jax_ep.combine_async(s.ep, rows, d.route, d.router_weights, residual=x)
            )
        return jnp.concatenate([jax_ep.combine_wait(pending) for pending in back])

    other = with_halves(6)  # operands of 8 tokens per rank
    other.ep = s.ep
    moe.check(other, moe.loss(s.mesh, layer), moe.dense_loss)


def test_pending_as_a_carry() -> None:
    """In a pipelined scan each step waits for what the step before has begun."""
    s = with_halves(7)
    steps = 4

    def scales(i: Any) -> Any:
        return 1.0 + jnp.asarray(i, jnp.float32)

    def run(x: Any, ids: Any, w: Any, p: Any) -> Any:
        def step(carry: Any, i: Any) -> Any:
            pending, total = carry
            after = jax_ep.dispatch_async(s.ep, x * scales(i + 1), ids, w)
            d = jax_ep.dispatch_wait(pending)
            rows = jnp.tanh(jax.lax.ragged_dot(d.tokens, p, d.group_sizes))
            y = jax_ep.combine(s.ep, rows, d.route, d.router_weights)
            return (after, total + y), None

        first = jax_ep.dispatch_async(s.ep, x * scales(0), ids, w)
        (last, total), _ = jax.lax.scan(step, (first, x), jnp.arange(steps))
        jax_ep.dispatch_wait(last)
        return total

    def dense(x: Any, w: Any, p: Any, ids: Any) -> Any:
        total = x
        for i in range(steps):
            y = moe.dense(x * scales(i), ids, w, p) - x * scales(i)
            total = total + y
        return moe.wave(total)

    moe.check(s, moe.loss(s.mesh, run), dense)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mode", "kind", "jit"),
    [
        *[(mode, AxisType.Auto, True) for mode in ("plain", *options.MODES)],
        ("plain", AxisType.Auto, False),
        ("plain", AxisType.Explicit, True),
        ("shared_source", AxisType.Explicit, False),
    ],
)
def test_global_arrays(mode: str, kind: AxisType, jit: bool) -> None:
    mesh = helpers.make_mesh(4, kind=kind)
    config = helpers.make_config(**helpers.HALVES, **options.MODES.get(mode, {}))
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(8), config, 4)
    parts = inputs.tokens, inputs.ids, inputs.weights
    x, ids, w = (helpers.put(mesh, part) for part in parts)
    wrap = jax.jit if jit else lambda fn: fn
    api = jax_ep.sharded
    pending = wrap(functools.partial(api.dispatch_async, ep))(x, ids, w)
    d = wrap(api.dispatch_wait)(pending)
    whole = api.dispatch(ep, x, ids, w)
    jax.tree.map(helpers.assert_bits, d, whole)
    weights = {"rank": d.router_weights, "source": w, "none": None}[config.reduce]
    args = whole.tokens, whole.route, weights
    y = wrap(api.combine_wait)(wrap(functools.partial(api.combine_async, ep))(*args))
    helpers.assert_bits(y, api.combine(ep, *args))


def test_half_inside_half_outside() -> None:
    """A Pending leaves one shard_map and enters another, with gradients."""
    s = with_halves(9)
    x, ids, w, _ = s.global_arrays()

    def loss(x: Any, w: Any) -> Any:
        first = moe.sharded(s.mesh, functools.partial(jax_ep.dispatch_async, s.ep))
        d = moe.sharded(s.mesh, jax_ep.dispatch_wait)(first(x, ids, w))
        return moe.wave(d.tokens * d.router_weights[:, None])

    def whole(x: Any, w: Any) -> Any:
        d = jax_ep.sharded.dispatch(s.ep, x, ids, w)
        return moe.wave(d.tokens * d.router_weights[:, None])

    actual, expected = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (loss, whole))
    moe.assert_close(actual, expected, 1e-6)


def test_no_tokens() -> None:
    s = setup("plain")
    x, ids, w, _ = s.global_arrays()

    def body(x: Any, ids: Any, w: Any) -> Any:
        d = split_dispatch(s.ep, x[:0], ids[:0], w[:0])
        y = split_combine(s.ep, d.tokens, d.route, d.router_weights)
        assert y.shape == (0, 16)
        return jnp.sum(d.tokens)[None] + jnp.sum(y)[None], d.row_offsets

    total, offsets = jax.jit(moe.sharded(s.mesh, body))(x, ids, w)
    assert not np.any(total)
    assert not np.any(offsets)


def test_replicated_over_other_axes() -> None:
    """A mesh has an axis that is not an EP axis, and operands are equal along it."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    config = helpers.make_config(**helpers.HALVES, dtype="float32")
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(10), config, 2, fill=helpers.normal
    )
    spec = P("ep")
    operands = [
        helpers.put(mesh, part, spec)
        for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    whole, split = (
        jax.jit(
            moe.sharded(
                mesh,
                lambda *a, calls=calls: both(ep, *calls, *a)[1],
                in_specs=spec,
                out_specs=spec,
            )
        )(*operands)
        for calls in CALLS
    )
    helpers.assert_bits(split, whole)
