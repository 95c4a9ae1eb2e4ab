"""Arguments that do not bind: the error says what to pass instead."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import experts
from jax_ep._core import calls, errors
from support import helpers
from support.errors import check_form, raises

SIZES = {"num_experts": 8, "hidden_size": 128, "max_tokens_per_rank": 4}
ROWS = np.ones((4, 128), np.float32)
GATE_UP, DOWN = np.ones((2, 128, 2, 128), "f"), np.ones((2, 128, 128), "f")
GROUPS = np.array([3, 1], np.int32)


@pytest.fixture(scope="module")
def ep():
    mesh = helpers.make_mesh(1)
    return helpers.make_ep(mesh, jax_ep.EPConfig(**SIZES, top_k=1, dtype="float32"))


@pytest.fixture(scope="module")
def d(ep):
    return jax_ep.sharded.dispatch(ep, ROWS, np.zeros((4, 1), np.int32))


WRONG = {
    "misspelt": (
        "EPConfig",
        lambda ep, d: jax_ep.EPConfig(**SIZES, topk=2),
        ("got topk; did you mean top_k?",),
    ),
    "missing": (
        "EPConfig",
        lambda ep, d: jax_ep.EPConfig(**SIZES),
        ("EPConfig(num_experts=..., top_k=...", "a call without top_k; pass top_k"),
    ),
    "by_position": (
        "EPConfig",
        lambda ep, d: jax_ep.EPConfig(8, 1, 128, 4),
        ("4 positional arguments; pass each argument once, and options by name",),
    ),
    # num_experts is given, so it is not what num_experts_per_tok stands for.
    "of_others": (
        "EPConfig",
        lambda ep, d: jax_ep.EPConfig(**SIZES, top_k=1, num_experts_per_tok=2),
        ("got num_experts_per_tok; correct the name or leave it out",),
    ),
    "router": (
        "router.Router",
        lambda ep, d: jax_ep.router.Router(norm=True),
        ("did you mean normalize?",),
    ),
    "init": (
        "init",
        lambda ep, d: jax_ep.init(ep.mesh, axis="ep", config=ep.config),
        ("['mesh', 'axis_name', 'config', 'transport'], got axis; did you mean axis_",),
    ),
    "shared_handle": (
        "shared_handle",
        lambda ep, d: jax_ep.shared_handle(ep.mesh, "ep"),
        ("a call without config",),
    ),
    "moe_ffn": (
        "moe_ffn",
        lambda ep, d: jax_ep.moe_ffn(ep, ROWS, {}, tp_axis_name="tp"),
        ("did you mean tp_axis?",),
    ),
    "apply_experts": (
        "sharded.apply_experts",
        lambda ep, d: jax_ep.sharded.apply_experts(
            print, (), ROWS, ROWS, ROWS, num_expert=8, axis_name="ep"
        ),
        ("without num_experts, but with num_expert; did you mean num_experts?",),
    ),
    "combine": (
        "sharded.combine",
        lambda ep, d: jax_ep.sharded.combine(ep, d),
        ("combine(ep, expert_out, route)", "without route", "rows, d.route"),
    ),
    "combine_of_a_rank": (
        "combine",
        lambda ep, d: jax_ep.combine(ep, d),
        ("combine(ep, expert_out, route)", "without route", "rows, d.route"),
    ),
    "combine_all": (
        "sharded.combine",
        lambda ep, d: jax_ep.sharded.combine(ep, d, d.route),
        ("expert_out must be an array, got a whole Dispatched; pass one of its",),
    ),
    "dequantize": (
        "sharded.dequantize",
        lambda ep, d: jax_ep.sharded.dequantize(d),
        ("a call without d; pass the handle, then",),
    ),
    "fp8_of_rows": (
        "experts.fp8",
        lambda ep, d: experts.fp8(ROWS, GATE_UP, DOWN, GROUPS),
        ("fp8(d, gate_up, down), got 4 positional", "call jax_ep.experts.auto"),
    ),
    "auto_of_d": (
        "experts.auto",
        lambda ep, d: experts.auto(d, GATE_UP, DOWN),
        ("without group_sizes; pass d.tokens", "only jax_ep.experts.fp8 takes a"),
    ),
    "padded_of_d": (
        "experts.Padded",
        lambda ep, d: experts.Padded(4)(d, GATE_UP, DOWN),
        ("without group_sizes; pass d.tokens",),
    ),
    "auto_of_all": (
        "experts.auto",
        lambda ep, d: experts.auto(d, GATE_UP, DOWN, d.group_sizes),
        ("rows must be an array, got a whole Dispatched; pass d.tokens",),
    ),
    "auto_of_params": (
        "experts.auto",
        lambda ep, d: experts.auto((GATE_UP, DOWN), ROWS, GROUPS, GROUPS),
        ("rows must be an array, got (", "of type tuple"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_to_pass_instead(name, ep, d):
    where, call, words = WRONG[name]
    with raises() as caught:
        call(ep, d)
    assert isinstance(caught.value, TypeError)
    check_form(caught, where, *words)


def test_signatures_are_those_of_the_functions():
    """Editors and jax.jit's static_argnames read them."""
    assert "num_experts" in inspect.signature(jax_ep.EPConfig).parameters
    assert [*inspect.signature(experts.auto).parameters][:2] == ["rows", "gate_up"]
    assert "axis_name" in inspect.signature(jax_ep.init).parameters


def test_type_errors_from_inside_keep_their_words():
    def raising(value):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        calls.explained("raising")(raising)(3)


def test_long_values_are_shortened(ep):
    """Lists of tokens would fill the screen."""
    many = np.ones((512, 128)).tolist()
    for call in (
        lambda: jax_ep.sharded.dispatch(ep, many, np.zeros((512, 1), np.int32)),
        lambda: jax_ep.router.route(jnp.zeros((4, 8)), 1, many),
        lambda: jax_ep.apply_experts(
            many, ROWS, ROWS, ROWS, num_experts=8, axis_name="ep"
        ),
    ):
        with raises() as caught:
            call()
        assert "[[...], [...], [...], ...]" in str(caught.value)
        assert len(str(caught.value)) < 300
    assert errors.brief([[1, 2]]) == "[[1, 2]]"
    assert errors.brief(10**5000) == "an int of 16610 bits"


def test_int64_of_numpy_is_taken_where_jax_has_none(ep):
    """Of ids and float64 weights; no id wraps around into an expert."""
    ids = np.array([[0], [5], [-1], [7]], np.int64)
    weights = np.linspace(0.1, 1, 4).reshape(4, 1)
    found = jax_ep.sharded.dispatch(ep, ROWS.astype(float), ids, weights)
    wanted = jax_ep.sharded.dispatch(
        ep, ROWS, ids.astype(np.int32), weights.astype(np.float32)
    )
    np.testing.assert_array_equal(found.src_info, wanted.src_info)
    np.testing.assert_array_equal(found.router_weights, wanted.router_weights)
    for bad in (2**32, 2**32 + 5, -(2**32) + 3, 2**63 - 1, -(2**63)):
        ids[1] = bad
        handle_of = jax_ep.sharded.dispatch(ep, ROWS, ids)
        assert int(handle_of.num_invalid[0]) == 1, bad
        np.testing.assert_array_equal(handle_of.route.slot_of[1], [-1])
        y, invalid = jax_ep.sharded.apply_experts(
            keep,
            (),
            ROWS,
            ids,
            weights,
            num_experts=8,
            axis_name="ep",
            mesh=ep.mesh,
            transport=helpers.TRANSPORT,
            return_invalid=True,
        )
        assert int(invalid[0]) == 1
        np.testing.assert_array_equal(y[1], 0)
    with pytest.raises((ValueError, RuntimeError), match="token 1"):
        ep.check()
    with pytest.raises(TypeError, match="must have a dtype that JAX keeps"):
        jax_ep.sharded.dispatch(ep, ROWS.astype(np.int64), ids)


def keep(params, rows, group_sizes, expert_of_row):
    return rows


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("0.1", "rate must be a number, got '0.1'; convert it with float()"),
        (None, "rate must be a number, got None; convert"),
        (jnp.ones(8), r"rate must be one number, got float32 of shape (8,); pass a"),
        (jnp.arange(1), r"rate must be one number, got int32 of shape (1,); pass a"),
    ],
)
def test_the_rate_of_a_bias_is_one_number(rate, words):
    with raises() as caught:
        jax_ep.router.update_bias(jnp.zeros(8), jnp.ones(8), rate)
    check_form(caught, "router.update_bias", words)
    load = jnp.array([0.5, 0.25, 0.25, 0.0])
    for good in (0.1, np.float64(0.1), jnp.float32(0.1), np.array(0.1)):
        found = jax_ep.router.update_bias(jnp.zeros(4), load, good)
        np.testing.assert_allclose(found, [-0.1, 0, 0, 0.1], atol=1e-7)
