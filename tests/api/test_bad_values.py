"""Extreme values and sizes that are no errors, or only for lack of memory."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe, oracle
from support.errors import check_form, raises


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


@pytest.fixture
def strict():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


# ---- NaN and infinity ---------------------------------------------------------------


def test_bad_tokens_stay_with_themselves(mesh) -> None:
    """NaN and Inf in tokens, weights and rows reach only their own sums."""
    config = helpers.make_config(dtype="float32", max_tokens_per_rank=16)
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(0)
    inputs = helpers.make_inputs(
        rng, config, mesh.size, routing="duplicates", fill=helpers.normal
    )
    assert inputs.weights is not None
    values = (np.nan, np.inf, -np.inf)
    for rank in range(mesh.size):
        for token, value in enumerate(values):
            inputs.tokens[rank][token, token::5] = value
            inputs.weights[rank][3 + token, 1] = value
    d = helpers.run_dispatch(ep, mesh, inputs)
    helpers.assert_dispatched(config, d, inputs)
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    weights = helpers.unstack(d.router_weights, mesh.size)
    y = helpers.run_combine(
        ep, mesh, d.route, [o.tokens for o in outputs], list(weights.values())
    )
    wanted = oracle.combine(
        config, inputs.ids, [o.tokens for o in outputs], list(weights.values())
    )
    for rank, want in enumerate(wanted):
        helpers.assert_sums(y[rank], want, f"rank {rank}")
        reached = inputs.ids[rank] >= 0
        clean = np.isfinite(y[rank]).all(axis=1)
        assert clean[6:].all()
        for token in range(3):
            assert clean[token] != reached[token].any()
            assert clean[3 + token] != reached[3 + token, 1]


# ---- No tokens ----------------------------------------------------------------------

MODES = {
    "plain": {},
    "aligned": {"expert_alignment": 4},
    "mxfp8": {"dispatch_format": "mxfp8", "hidden_size": 32},
    "source": {"reduce": "source"},
    "shared": {"fused_shared_expert": True},
    "local": {"skip_a2a": True},
}


@pytest.mark.parametrize("name", MODES)
def test_no_tokens_at_all(mesh, name: str) -> None:
    """n = 0 on every rank: empty results, no rows, zero gradients."""
    config = helpers.make_config(**MODES[name])
    with jax_ep.init(mesh, "ep", config) as ep:
        n_weights = (0, config.top_k)

        def layer(x, w, scale):
            d = jax_ep.dispatch(ep, x, jnp.zeros(n_weights, jnp.int32), w)
            rows = d.tokens if d.scales is None else jax_ep.dequantize(d)
            weights = w if config.reduce == "source" else d.router_weights
            rows = rows + scale.astype(rows.dtype)
            return jax_ep.combine(ep, rows, d.route, weights), d

        # XLA needs an operand that is not empty, and no empty one beside it:
        # docs/sharp_bits.md.
        def body(scale):
            x = jnp.zeros((0, config.hidden_size), jnp.bfloat16)
            empty = jax.lax.pcast((x, jnp.zeros(n_weights)), "ep", to="varying")
            y, pull, d = jax.vjp(layer, *empty, scale, has_aux=True)
            return y, d.expert_counts, d.src_info, d.num_invalid, pull(y)

        run = moe.sharded(mesh, body, in_specs=P("ep"), out_specs=P("ep"))
        y, counts, info, invalid, grads = jax.jit(run)(jnp.ones(mesh.size))
        assert y.shape == (0, config.hidden_size)
        assert not np.asarray(counts).any()
        assert (np.asarray(info) == -1).all()
        assert not np.asarray(invalid).any()
        assert [g.shape for g in grads] == [y.shape, n_weights, (mesh.size,)]
        assert not np.asarray(grads[2]).any()
        assert ep.check() is None


# ---- Layouts ------------------------------------------------------------------------


def test_layouts_do_not_matter(mesh) -> None:
    """Arrays may be column-major on host and device: XLA gives handlers rows."""
    config = helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(3), config, mesh.size)
    whole = [np.concatenate(part) for part in vars(inputs).values()]
    sharding = NamedSharding(mesh, P("ep"))
    run = helpers.dispatch_fn(ep, mesh, P("ep"))
    columns = Format(Layout((1, 0)), sharding)

    def put(array, sharding):
        # Not device_put, which compares values of several processes: NaN != NaN.
        return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])

    on_host = [put(np.asfortranarray(a), sharding) for a in whole]
    for args in (on_host, [jax.device_put(a, columns) for a in on_host]):
        helpers.assert_dispatched(config, run(*args), inputs)
    transposed = jax.jit(
        lambda *args: run(*(jnp.transpose(a) for a in args)),
    )
    turned = [
        put(np.ascontiguousarray(a.T), NamedSharding(mesh, P(None, "ep")))
        for a in whole
    ]
    helpers.assert_dispatched(config, transposed(*turned), inputs)


def test_wide_types_of_x64(mesh) -> None:
    """With jax_enable_x64, NumPy's default float64 and int64 are errors, not cast."""
    config = helpers.make_config(dtype="float32")
    ep = helpers.make_ep(mesh, config)
    n = mesh.size * config.max_tokens_per_rank
    with jax.enable_x64(True):
        good = {
            "tokens": np.zeros((n, 16), np.float32),
            "topk_ids": np.zeros((n, 3), np.int32),
            "router_weights": np.zeros((n, 3), np.float32),
        }
        run = moe.sharded(mesh, functools.partial(jax_ep.dispatch, ep))
        jax.eval_shape(run, *good.values())
        for name, wide in (
            ("tokens", np.float64),
            ("topk_ids", np.int64),
            ("router_weights", np.float64),
        ):
            args = good | {name: good[name].astype(wide)}
            with raises() as caught:
                jax.eval_shape(run, *args.values())
            check_form(caught, "dispatch", name, np.dtype(wide).name)


@pytest.mark.parametrize(
    "changes",
    [
        {"reduce": "none"},
        {"reduce": "source"},
        {"skip_a2a": True, "fused_shared_expert": True},
        {"dispatch_format": "mxfp8", "scale_layout": "tiled_128x4"},
    ],
    ids=str,
)
def test_strict_settings_of_jax(mesh, strict, changes) -> None:
    """jax_ep does not rely on JAX's promotion of dtypes or dimensions."""
    config = helpers.make_config(dtype="float32", hidden_size=128, **changes)
    ep = helpers.make_ep(mesh, config)

    def there_and_back(x, weights, ids):
        d = jax_ep.dispatch(ep, x, ids, weights)
        given = {"rank": d.router_weights, "source": weights, "none": None}
        rows = jax_ep.dequantize(d)
        y = jax_ep.combine(ep, rows, d.route, given[config.reduce])
        return jnp.sum(y, keepdims=True).reshape(1)

    def both(x, weights, ids):
        y, back = jax.vjp(functools.partial(there_and_back, ids=ids), x, weights)
        return y, back(y)

    shapes = (
        jax.ShapeDtypeStruct((8 * mesh.size, 128), jnp.float32),
        jax.ShapeDtypeStruct((8 * mesh.size, config.top_k), jnp.float32),
        jax.ShapeDtypeStruct((8 * mesh.size, config.top_k), jnp.int32),
    )
    y, grads = jax.eval_shape(moe.sharded(mesh, both), *shapes)
    assert {leaf.dtype for leaf in (y, *grads)} == {jnp.dtype("float32")}


def test_strict_settings_of_jax_around_the_calls(mesh, strict) -> None:
    ep = helpers.make_ep(mesh, helpers.make_config(num_experts=8))
    router = jax_ep.router.Router(score="sigmoid", num_groups=4, top_groups=2)

    def around(load):
        rows, bias = jnp.ones((16, 8), jnp.float32), jnp.zeros(8, jnp.float32)
        sizes, ranks = jnp.zeros(2, jnp.int32), jnp.zeros(mesh.size, jnp.int32)
        gate_up = jnp.ones((2, 8, 2, 4), jnp.float32)
        out = jax_ep.experts.Padded(8)(
            rows, gate_up, jnp.ones((2, 4, 8), jnp.float32), sizes
        )
        routing = jax_ep.router.route(out, 2, router, bias=bias)
        losses = jax_ep.router.losses(routing)
        counts = jnp.zeros(8, jnp.int32)
        several = losses.balance_loss, losses.z_loss, losses.load, counts
        aux = jax_ep.MoEAux(*several, ranks, ranks)
        bias = jax_ep.router.update_bias(bias, losses.load)
        return jax_ep.stats.update(load, aux), bias, out

    before = jax.eval_shape(functools.partial(jax_ep.stats.init, ep))
    after, *floats = jax.eval_shape(around, before)
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}


# ---- Too large ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens_per_rank": 2**30},
        {"max_tokens_per_rank": 2**31 - 1, "recv_capacity": 16},
        {"max_tokens_per_rank": 2**24, "capacity_factor": 1e3},
    ],
    ids=["rows", "entries", "factor"],
)
def test_more_than_can_be_counted(mesh, changes) -> None:
    config = helpers.make_config(**changes)
    with raises() as caught:
        jax_ep.init(mesh, "ep", config)
    words = "recv_capacity", "max_tokens_per_rank", str(config.capacity(mesh.size))
    check_form(caught, "init", *words)


def test_more_than_there_is_memory_for(mesh) -> None:
    """A config whose rows fit no machine: init names it, and only the call fails."""
    config = helpers.make_config(
        max_tokens_per_rank=2**22, hidden_size=2**24, top_k=1, num_experts=mesh.size
    )
    rows = mesh.size * 2**22
    with pytest.warns(UserWarning, match=r"jax_ep\.init: .*GB") as caught:
        ep = jax_ep.init(mesh, "ep", config, transport="collective")
    assert any(str(rows) in str(warning.message) for warning in caught)
    x = jnp.zeros((mesh.size, 2**24), jnp.bfloat16)
    ids = jnp.zeros((mesh.size, 1), jnp.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)memory|bytes"):
            jax.block_until_ready(
                helpers.dispatch_fn(ep, mesh, P("ep"))(x, ids, None).tokens
            )
    ep.close()
    small = helpers.make_ep(mesh, helpers.make_config())
    inputs = helpers.make_inputs(np.random.default_rng(4), small.config, mesh.size)
    helpers.assert_dispatched(
        small.config, helpers.run_dispatch(small, mesh, inputs), inputs
    )
