"""Remedies of errors about weights: whoever follows them gets the right result."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from jax_ep._experts import orders
from support import helpers, moe_dense
from support.errors import raises
from support.moe_ffn import N, config

pytestmark = pytest.mark.usefixtures("quick_compiles")

HALVES = "gate_up.reshape(*gate_up.shape[:-1], 2, -1)"
ALTERNATE = "gate_up.reshape(*gate_up.shape[:-1], -1, 2).swapaxes(-2, -1)"
TURN = "gate_up.swapaxes(-2, -1)"
TURN_DOWN = "down.swapaxes(-2, -1)"


def side_by_side(gate_up):
    return gate_up.reshape(*gate_up.shape[:-2], -1)


def by_turns(gate_up):
    """Gate and up alternate, as in gpt-oss."""
    return side_by_side(gate_up.swapaxes(-2, -1))


def transposed(matrix):
    return matrix.swapaxes(-2, -1)


# How other libraries keep gate_up and down, and what of the remedy suits it, in order.
# F is H / 2, so that [L, H, 2F] and [L, 2F, H] have one shape, or not.
ORDERS = {
    "columns": (side_by_side, None, [HALVES]),
    "gpt_oss": (by_turns, None, [ALTERNATE]),
    "transformers": (
        lambda w: transposed(side_by_side(w)),
        transposed,
        [TURN, HALVES, TURN_DOWN],
    ),
    "rows_by_turns": (
        lambda w: transposed(by_turns(w)),
        transposed,
        [TURN, ALTERNATE, TURN_DOWN],
    ),
    "two_first": (
        lambda w: w.transpose(0, 2, 1, 3),
        None,
        ["gate_up.transpose(0, 2, 1, 3)"],
    ),
    "two_last": (transposed, None, ["gate_up.transpose(0, 1, 3, 2)"]),
    "linear": (
        lambda w: w.transpose(0, 2, 3, 1),
        transposed,
        ["gate_up.transpose(0, 3, 1, 2)", TURN_DOWN],
    ),
    "down": (None, transposed, [TURN_DOWN]),
}


def changed(params, gate_up, down, prefix=""):
    found = dict(params)
    for name, change in (("gate_up", gate_up), ("down", down)):
        if change is not None:
            found[prefix + name] = change(found[prefix + name])
    return found


def followed(message, params, steps):
    """Does what the message says, word for word."""
    found = dict(params)
    for step in steps:
        assert step in message, (step, message)
        name = step.partition(".")[0]
        found[name] = eval(step, {name: found[name]})
    return found


@functools.cache
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


@functools.cache
def run():
    """moe_ffn on global arrays."""
    ep = helpers.make_ep(mesh(), config())

    def body(x, params):
        return jax_ep.moe_ffn(ep, x, params)[0]

    def layer(x, params):
        whole = ("router", "shared_gate_up", "shared_down")
        specs = {name: P() if name in whole else P("ep") for name in params}
        mapped = jax.shard_map(
            body, mesh=mesh(), in_specs=(P("ep"), specs), out_specs=P("ep")
        )
        return mapped(x, params)

    return jax.jit(layer)


def tokens():
    rng = np.random.default_rng(6)
    return rng.standard_normal((N * mesh().size, moe_dense.HIDDEN), np.float32)


def check(wrong, right, steps):
    """The error of `wrong` says `steps`, which lead to the result of `right`."""
    x = tokens()
    with raises() as caught:
        run()(x, wrong)
    params = followed(str(caught.value), wrong, steps)
    np.testing.assert_array_equal(run()(x, params), run()(x, right))


@pytest.mark.parametrize("inner", [moe_dense.HIDDEN // 2, 12])
@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_other_libraries(name, inner):
    gate_up, down, steps = ORDERS[name]
    right = moe_dense.params(shared=False, inner=inner)
    check(changed(right, gate_up, down), right, steps)


@pytest.mark.parametrize("name", ["transformers", "gpt_oss", "linear"])
def test_orders_of_a_shared_expert(name):
    """It has no dimension of experts."""
    gate_up, down, steps = ORDERS[name]
    right = moe_dense.params()
    of = [
        change and (lambda w, change=change: change(w[None])[0])
        for change in (gate_up, down)
    ]
    steps = [
        step.replace("gate_up", "shared_gate_up").replace("down", "shared_down")
        for step in steps
    ]
    steps = [step.replace("(0, 3, 1, 2)", "(2, 0, 1)") for step in steps]
    check(changed(right, *of, "shared_"), right, steps)


@pytest.mark.parametrize("names", [("gate", "up"), ("up",)], ids="-".join)
def test_gate_and_up_that_are_transposed(names):
    right = moe_dense.params(shared=False)
    both = right.pop("gate_up")
    right |= {"gate": both[:, :, 0], "up": both[:, :, 1]}
    wrong = right | {name: transposed(right[name]) for name in names}
    check(wrong, right, [f"{name}.swapaxes(1, 2)" for name in names])


def test_a_router_that_is_split_is_told_to_be_whole():
    params = moe_dense.params(shared=False)
    ep = helpers.make_ep(helpers.make_mesh(2), config())
    run = jax.shard_map(
        lambda x, params: jax_ep.moe_ffn(ep, x, params)[0],
        mesh=ep.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    with raises() as caught:
        jax.eval_shape(run, np.ones((2 * N, moe_dense.HIDDEN), np.float32), params)
    assert str(caught.value).endswith("; replicate it over all axes")


def test_a_router_that_is_transposed():
    right = moe_dense.params(shared=False, experts=16, hidden=16)
    right["router"] = right["router"][:, :12]
    right |= {name: right[name][:12] for name in ("gate_up", "down")}
    ep = helpers.make_ep(helpers.make_mesh(1), config(num_experts=12))
    with raises() as caught:
        jax.eval_shape(
            jax.shard_map(
                functools.partial(jax_ep.moe_ffn, ep),
                mesh=ep.mesh,
                in_specs=P(),
                out_specs=P(),
                check_vma=False,
            ),
            np.ones((N, 16), np.float32),
            right | {"router": right["router"].T},
        )
    assert str(caught.value).endswith("transpose it with router.T")


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("name", ["gate_bias", "gate_up_bias"])
def test_biases_of_gate_and_up_in_one(name, alternate):
    right = moe_dense.params(shared=False, expert_bias=True)
    both = np.stack([right["gate_bias"], right["up_bias"]], axis=1)
    whole = both.swapaxes(1, 2) if alternate else both
    whole = whole.reshape(len(whole), -1)
    wrong = {n: v for n, v in right.items() if n not in ("gate_bias", "up_bias")}
    x = tokens()
    with raises() as caught:
        run()(x, wrong | {name: whole})
    steps = [f"{name}[:, 0::2]", f"{name}[:, 1::2]"]
    steps = steps if alternate else [f"jnp.split({name}, 2, -1)"]
    assert all(step in str(caught.value) for step in steps)
    parts = [eval(step, {name: whole, "jnp": jnp}) for step in steps]
    gate, up = parts if alternate else parts[0]
    found = run()(x, wrong | {"gate_bias": gate, "up_bias": up})
    np.testing.assert_array_equal(found, run()(x, right))


def test_biases_that_are_not_split_like_gate_up():
    local, inner = moe_dense.EXPERTS // mesh().size, moe_dense.INNER
    params = moe_dense.params(shared=False, expert_bias=True)
    for name, bias, words in (
        ("gate_bias", params["gate_bias"][:, :-1], "give it the F columns of gate_up"),
        ("down_bias", params["down_bias"][:, :-1], "give it all H columns"),
    ):
        with raises() as caught:
            run()(tokens(), params | {name: bias})
        assert f"{name} must be [L, " in str(caught.value)
        assert f"L = {local} " in str(caught.value)
        size = inner if name == "gate_bias" else moe_dense.HIDDEN
        assert f" = {size}" in str(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_known_to_experts_too(name):
    """The functions of jax_ep.experts, with and without the sizes of rows."""
    gate_up, down, steps = ORDERS[name]
    right = moe_dense.params(shared=False, hidden=128, inner=256, experts=2)
    matrices = {n: right[n] for n in ("gate_up", "down")}
    wrong = changed(matrices, gate_up, down)
    rows, sizes = np.ones((8, 128), np.float32), np.array([5, 3], np.int32)
    for call in (
        lambda gate_up, down: experts.ragged_dot(rows, gate_up, down, sizes),
        experts.quantize_weights,
    ):
        with raises() as caught:
            call(**wrong)
        params = followed(str(caught.value), wrong, steps)
        jax.tree.map(np.testing.assert_array_equal, params, matrices)


def test_sizes_that_fit_several_orders():
    """Where F is H a shape tells less, and the remedy says what it cannot tell."""
    told = orders.remedy((2, 2, 8, 8), (2, 8, 8))
    assert "[L, 2, H, F]" in told
    assert "[L, 2, F, H]" in told
    told = orders.remedy((2, 16, 8), (2, 8, 8))
    assert told.endswith(f"{TURN_DOWN} if it is [L, H, F]")
    assert orders.remedy((2, 8, 2, 8), (2, 8, 8)) == ""
    assert orders.remedy((2, 9), (2, 9, 9)) == ""


CASTS = {
    "bfloat16": lambda scales: scales.astype(jnp.bfloat16),
    "e8m0": lambda scales: scales.astype(jnp.float8_e8m0fnu),
    "bytes": lambda scales: jax.lax.bitcast_convert_type(
        scales.astype(jnp.float8_e8m0fnu), jnp.uint8
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_scales_that_a_cast_makes_right(name):
    """For weights, tokens and their inverse; here all scales are powers of two."""
    change, space = CASTS[name], {"jax": jax, "jnp": jnp}
    scales = jnp.ldexp(1.0, jnp.arange(-3, 1)).reshape(2, 1, 2, 1)
    held = experts.QuantizedWeights(
        jnp.ones((2, 128, 2, 128), jnp.float8_e4m3fn),
        scales,
        jnp.ones((2, 128, 128), jnp.float8_e4m3fn),
        jnp.ones((2, 1, 1)),
    )
    wrong = change(scales)
    with raises() as caught:
        experts.prepare(dataclasses.replace(held, gate_up_scales=wrong))
    step = str(caught.value).rpartition("pass " if name == "bytes" else ": ")[2]
    found = eval(step, space | {"gate_up_scales": wrong})
    np.testing.assert_array_equal(found, scales)
    assert found.dtype == jnp.float32
    codes = jnp.ones((4, 128), jnp.float8_e4m3fn)
    with raises() as caught:
        jax_ep.formats.dequantize(codes, wrong.reshape(4, 1), "fp8_block128")
    assert "scales.astype(jnp" in str(caught.value) or "bitcast" in str(caught.value)


def test_token_scales_that_a_cast_makes_right():
    ep = helpers.make_ep(
        helpers.make_mesh(1),
        config(hidden_size=128, dispatch_format="fp8_block128", dtype="bfloat16"),
    )
    codes, scales = jax_ep.formats.quantize(jnp.ones((N, 128)), "fp8_block128")
    ids = np.zeros((N, moe_dense.TOP_K), np.int32)
    with raises() as caught:
        jax_ep.sharded.dispatch(
            ep, codes, ids, token_scales=scales.astype(jnp.bfloat16)
        )
    assert "exact: token_scales.astype(jnp.float32)" in str(caught.value)
    mx = jax_ep.formats.quantize(jnp.ones((N, 128)), "mxfp8")[1]
    with raises() as caught:
        jax_ep.formats.dequantize(codes, mx.astype(jnp.float32), "mxfp8")
    assert "if all are powers of two, cast them" in str(caught.value)
