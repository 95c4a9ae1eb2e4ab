"""Biases, activations by name and gate and up as a pair, in all experts on rows.

On Hopper and other GPUs by the kernels, on CPUs by plain JAX in their place.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import experts
from support import grouped_kernels
from support.grouped_kernels import group_masks

pytestmark = pytest.mark.usefixtures("quick_compiles")

SIZES, COUNT, H, F = (10, 0, 70, 1), 100, 72, 40
CLAMPED = experts.swiglu_clamped(1.702, 0.75)
# One that is known by name, and one that is traced between the products.
ACTIVATIONS = {
    "swiglu": None,
    "swiglu_clamped": CLAMPED,
    "geglu": experts.geglu,
    "relu_squared": experts.relu_squared,
    "tanh": lambda gate, up: jnp.tanh(gate) * up,
}
BIASES = ("gate_bias", "up_bias", "down_bias")


def run_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str, float]:
    """Returns experts, a dtype for them, and how far off they may be."""
    if name == "Padded":
        return experts.Padded(128), "float32", 1e-5
    if name == "hopper":
        if jax.default_backend() == "cpu":
            grouped_kernels.fake(monkeypatch)
        grouped_kernels.skip_without_hopper()
        return experts.hopper, "bfloat16", 0.03
    return getattr(experts, name), "float32", 2e-5


@pytest.fixture(params=["hopper", "portable", "ragged_dot", "Padded"])
def implementation(request, monkeypatch):
    with jax.default_matmul_precision("highest"):
        yield run_of(request.param, monkeypatch)


def operands(dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(4)
    groups = len(SIZES)

    def drawn(*shape: int, by: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * by, dtype)

    found = {
        "rows": drawn(COUNT, H).at[sum(SIZES) :].set(jnp.nan),
        "gate": drawn(groups, H, F, by=H**-0.5),
        "up": drawn(groups, H, F, by=H**-0.5),
        "down": drawn(groups, F, H, by=F**-0.5),
    }
    # Biases may have a dtype of their own.
    for name, size in zip(BIASES, (F, F, H), strict=True):
        found[name] = drawn(groups, size).astype(jnp.float32)
    return found


def applied(run: Any, given: dict[str, Any], activation: Any, pair: bool) -> jax.Array:
    options = {name: given[name] for name in BIASES if name in given}
    if activation is not None:
        options["activation"] = activation
    gate_up = given["gate"], given["up"]
    both = gate_up if pair else jnp.stack(gate_up, 2)
    sizes = jnp.asarray(SIZES, jnp.int32)
    return run(given["rows"], both, given["down"], sizes, **options)


def formula(given: dict[str, Any], activation: Any) -> jax.Array:
    """The same in float32, group by group."""
    given = {name: value.astype(jnp.float32) for name, value in given.items()}
    activation = activation or (lambda gate, up: jax.nn.silu(gate) * up)
    dot = functools.partial(jnp.dot, precision="highest")
    out = jnp.zeros((COUNT, H))
    for group, own in enumerate(group_masks(jnp.asarray(SIZES), COUNT)):
        mine = jnp.where(own[:, None], given["rows"], 0)
        sides = []
        for name in ("gate", "up"):
            bias = given[f"{name}_bias"][group] if f"{name}_bias" in given else 0
            sides.append(dot(mine, given[name][group]) + bias)
        down = dot(activation(*sides), given["down"][group])
        if "down_bias" in given:
            down += given["down_bias"][group]
        out += jnp.where(own[:, None], down, 0)
    return out


def loss_of(run: Any) -> Any:
    has_token = (jnp.arange(COUNT) < sum(SIZES))[:, None]

    def loss(given: dict[str, Any]) -> jax.Array:
        y = jnp.where(has_token, run(given).astype(jnp.float32), 0)
        return jnp.sum(jnp.sin(y))

    return loss


def distance(found: Any, wanted: Any) -> float:
    """Relative to all: near a bound, rounding may exchange single derivatives."""
    found, wanted = (np.asarray(each, np.float64) for each in (found, wanted))
    assert np.isfinite(found).all()
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


# Each activation with all biases and two arrays; other combinations are thorough.
COMBINATIONS = [
    pytest.param(
        name,
        biases,
        pair,
        marks=[] if biases == BIASES and pair else pytest.mark.thorough,
        id=f"{name}-{len(biases)} biases-{'two arrays' if pair else 'one array'}",
    )
    for name in ACTIVATIONS
    for biases in (BIASES, BIASES[:1], ())
    for pair in (True, False)
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "biases", "pair"), COMBINATIONS)
def test_values_and_gradients(implementation, name, biases, pair):
    run, dtype, bound = implementation
    activation = ACTIVATIONS[name]
    given = operands(dtype)
    for other in set(BIASES) - {*biases}:
        del given[other]

    def one(given):
        return applied(run, given, activation, pair)

    real = slice(sum(SIZES))
    y, grads = jax.jit(one)(given), jax.jit(jax.grad(loss_of(one)))(given)
    clean = given | {"rows": given["rows"].at[sum(SIZES) :].set(0)}

    def wanted_of(given):
        return formula(given, activation)

    want = jax.jit(wanted_of)(clean)
    assert y.dtype == given["rows"].dtype
    assert distance(y[real], want[real]) < bound
    wanted = jax.jit(jax.grad(loss_of(wanted_of)))(clean)
    grads["rows"], wanted["rows"] = grads["rows"][real], wanted["rows"][real]
    for operand, found in grads.items():
        assert found.dtype == given[operand].dtype
        assert distance(found, wanted[operand]) < 3 * bound, operand


@pytest.mark.few(2)
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("name", ["swiglu_clamped", "geglu"])
def test_second_derivatives(name, pair, monkeypatch):
    """By kernels, whose derivatives are written by hand."""
    run, dtype, _ = run_of("hopper", monkeypatch)
    given = operands(dtype)
    given["rows"] = given["rows"].at[sum(SIZES) :].set(0)
    activation = ACTIVATIONS[name]

    def curvature(run):
        def slope(given):
            grads = jax.grad(loss_of(run))(given)
            return sum(
                jnp.sum(jnp.square(each.astype(jnp.float32)))
                for each in jax.tree.leaves(grads)
            )

        return jax.jit(jax.grad(slope))(given)

    found = curvature(lambda given: applied(run, given, activation, pair))
    wanted = curvature(lambda given: formula(given, activation))
    found["rows"], wanted["rows"] = (
        each["rows"][: sum(SIZES)] for each in (found, wanted)
    )
    for operand, want in wanted.items():
        assert distance(found[operand], want) < 0.1, operand


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["swiglu", "swiglu_clamped", "tanh"])
def test_a_pair_gives_the_same_bits(implementation, name):
    """But of products that XLA orders, which differ by their columns."""
    run, dtype, bound = implementation
    by_xla = run is experts.ragged_dot or isinstance(run, experts.Padded)
    given, activation = operands(dtype), ACTIVATIONS[name]
    ys, grads = [], []
    for pair in (False, True):
        one = functools.partial(applied, run, activation=activation, pair=pair)
        ys.append(np.asarray(jax.jit(one)(given), np.float32)[: sum(SIZES)])
        grads.append(jax.jit(jax.grad(loss_of(one)))(given))

    def check(stacked, pair):
        if by_xla:
            assert distance(pair, stacked) < bound
        else:
            np.testing.assert_array_equal(pair, stacked)

    check(*ys)
    # Those of rows are sums of two products, in another order where columns are padded.
    for operand in ("gate", "up", "down", *BIASES):
        check(*(np.asarray(each[operand], np.float32) for each in grads))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["swiglu", "tanh"])
def test_vmap_of_pairs(implementation, name):
    """With a batch of rows and of biases, and shared matrices."""
    run, dtype, bound = implementation
    given, activation = operands(dtype), ACTIVATIONS[name]
    batched = {"rows", "gate_bias"}
    axes = {operand: 0 if operand in batched else None for operand in given}
    many = {
        operand: jnp.stack([value, value[::-1]]) if axes[operand] == 0 else value
        for operand, value in given.items()
    }
    many["rows"] = jnp.nan_to_num(many["rows"])
    one = functools.partial(applied, run, activation=activation, pair=True)
    found = jax.jit(jax.vmap(one, (axes,)))(many)
    for entry in range(2):
        own = {
            operand: value[entry] if axes[operand] == 0 else value
            for operand, value in many.items()
        }
        want = formula(own, activation)
        assert distance(found[entry, : sum(SIZES)], want[: sum(SIZES)]) < bound
