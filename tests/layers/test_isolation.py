"""A NaN stays with its row and its expert, and rows without a token change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import experts
from jax_ep._experts import grouped
from support import fp8_experts, grouped_kernels

pytestmark = pytest.mark.usefixtures("quick_compiles")

H, F = grouped_kernels.H, grouped_kernels.F
# Group 1 ends with a row of padding; the last rows belong to no group.
SIZES, PADDING, COUNT = (3, 4, 0, 5), 6, 16
REAL = np.isin(np.arange(COUNT), [PADDING, 12, 13, 14, 15], invert=True)
L = len(SIZES)
WAYS = ["ragged_dot", "dense", "Padded", "hopper", "fp8", "codes", "mxfp4"]


def singular(alpha: Any) -> experts.Activation:
    """Derivatives are infinite at 0."""
    return lambda gate, up: alpha * jnp.sign(gate) * jnp.sqrt(jnp.abs(gate)) * up


def operands() -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape)

    return {
        "rows": jnp.where(REAL[:, None], normal(COUNT, H), 0),
        "gate_up": normal(L, H, 2, F) / H**0.5,
        "down": normal(L, F, H) / F**0.5,
        # One that is not zero makes gate of a row of zeros differ from 0.
        "gate_bias": jnp.zeros((L, F)),
        "up_bias": normal(L, F),
        "down_bias": normal(L, H),
        "alpha": jnp.float32(1.5),
    }


def run(way: str, given: dict[str, Any], tail: Any, sizes: Any = SIZES) -> jax.Array:
    """Applies experts to rows, of which those past the groups are `tail`."""
    past = (np.arange(COUNT) >= sum(sizes))[:, None]
    rows = jnp.where(past, tail, given["rows"])
    options = {name: given[name] for name in ("gate_bias", "up_bias", "down_bias")}
    options["activation"] = singular(given["alpha"])
    gate_up, down, number = given["gate_up"], given["down"], jnp.array(sizes)
    if way == "Padded":
        return experts.Padded(8)(rows, gate_up, down, number, **options)
    if way == "hopper":
        rows = rows.astype(jnp.bfloat16)
    if way in ("ragged_dot", "dense", "hopper"):
        function = getattr(experts, way.replace("dense", "ragged_dot"))
        return function(rows, gate_up, down, number, **options)
    d = fp8_experts.dispatched(np.zeros((COUNT, H)), sizes)
    d = dataclasses.replace(d, tokens=rows)
    if way == "fp8":
        return experts.fp8(d, gate_up, down, **options)
    form = "mxfp4" if way == "mxfp4" else "fp8_block128"
    weights = experts.quantize_weights(gate_up, down, format=form)
    return experts.fp8(d, weights, None, **options)


@pytest.fixture
def both(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A jitted function of (operands, rows past the groups): rows and gradients."""
    way = request.param
    if way == "hopper":
        grouped_kernels.fake(monkeypatch)
    if way == "dense":  # as on GPUs without a grouped matmul of XLA's
        monkeypatch.setattr(
            grouped, "everywhere", lambda *_, **__: grouped.Ragged(None)
        )
    weigh = jnp.where(
        REAL[:, None], jax.random.normal(jax.random.key(9), (COUNT, H)), 0
    )

    def loss(given: Any, tail: Any) -> Any:
        y = run(way, given, tail).astype(jnp.float32)
        return jnp.sum(jnp.where(REAL[:, None], y, 0) * weigh), y

    return jax.jit(jax.grad(loss, has_aux=True))


each_way = pytest.mark.parametrize("both", WAYS, indirect=True)


@pytest.mark.few(2)
@each_way
def test_rows_without_a_token_change_no_gradient(both: Any) -> None:
    given = operands()
    clean, y = both(given, 1.0)
    for name, gradient in clean.items():
        of = REAL if name == "rows" else ...
        assert np.isfinite(gradient[of]).all(), name
    for tail in (0.0, np.nan):
        found, same = both(given, tail)
        np.testing.assert_array_equal(y[REAL], same[REAL])
        for name, gradient in found.items():
            of = REAL if name == "rows" else ...
            np.testing.assert_array_equal(gradient[of], clean[name][of], err_msg=name)


@pytest.mark.few(2)
@each_way
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_stays_with_its_expert(both: Any, value: float) -> None:
    given = operands()
    clean, y = both(given, 0.0)
    found, z = both(given | {"rows": given["rows"].at[0, 3].set(value)}, 0.0)
    others = REAL & (np.arange(COUNT) != 0)
    assert not np.isfinite(z[0]).all()
    np.testing.assert_array_equal(z[others], y[others])
    for name, gradient in found.items():
        if name == "alpha":  # all rows share it
            assert not np.isfinite(gradient)
            continue
        rest = others if name == "rows" else np.arange(L) != 0
        np.testing.assert_array_equal(gradient[rest], clean[name][rest], err_msg=name)


@pytest.mark.few(2)
@each_way
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_a_weight_stays_with_its_expert(both: Any, name: str) -> None:
    given = operands()
    clean, y = both(given, 0.0)
    bad = given[name].reshape(-1).at[7].set(jnp.nan).reshape(given[name].shape)
    found, z = both(given | {name: bad}, 0.0)
    others = REAL & (np.arange(COUNT) >= SIZES[0])
    assert not np.isfinite(z[: SIZES[0]]).all(axis=1).any()
    np.testing.assert_array_equal(z[others], y[others])
    for of, gradient in found.items():
        if of == "alpha":
            continue
        rest = others if of == "rows" else np.arange(L) != 0
        np.testing.assert_array_equal(gradient[rest], clean[of][rest], err_msg=of)


@pytest.mark.parametrize("way", ["ragged_dot", "Padded", "fp8", "mxfp4"])
def test_a_rank_without_rows_adds_nothing(way: str) -> None:
    def loss(given: Any) -> Any:
        y = run(way, given, jnp.nan, sizes=(0,) * L)
        return jnp.sum(jnp.where(jnp.zeros_like(y, bool), y, 0))

    for name, gradient in jax.jit(jax.grad(loss))(operands()).items():
        if name != "rows":
            assert not np.asarray(gradient, np.float32).any(), name


def test_second_derivatives_count_cotangents_that_are_zero() -> None:
    """With down = 0 cotangents of the activation are zero, but not their tangents."""
    given = operands()
    rows, gate_up = given["rows"][:3], given["gate_up"][:1]

    def square(gate: Any, up: Any) -> Any:
        return gate**2 * up

    def by_formula(gate_up: Any, down: Any) -> Any:
        both = jnp.einsum("nh,hcf->ncf", rows, gate_up[0])
        return square(both[:, 0], both[:, 1]) @ down[0]

    def by_experts(gate_up: Any, down: Any) -> Any:
        sizes = jnp.array([3], jnp.int32)
        return experts.ragged_dot(rows, gate_up, down, sizes, activation=square)

    def second(function: Any) -> Any:
        def first(down: Any) -> Any:
            def loss(gate_up: Any) -> Any:
                return jnp.sum(jnp.sin(function(gate_up, down) + 1))

            return jnp.sum(jax.grad(loss)(gate_up) * jnp.cos(gate_up))

        return jax.jit(jax.grad(first))(jnp.zeros((1, F, H)))

    want = second(by_formula)
    assert np.abs(want).max() > 1e-3
    np.testing.assert_allclose(second(by_experts), want, rtol=1e-3, atol=1e-4)
