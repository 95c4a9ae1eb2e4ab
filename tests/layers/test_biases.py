"""Gradients of biases are exact sums over many rows, however few bits rows have."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import experts
from jax_ep._experts import grouped
from support import helpers
from support.grouped_kernels import skip_without_hopper

pytestmark = pytest.mark.usefixtures("quick_compiles")

# A sum of bfloat16 values near 1 that is kept in bfloat16 stops at 256.
SIZES, N = (2000, 0, 1500), 3600
H, F = 64, 32


def given(dtype="bfloat16"):
    rng = np.random.default_rng(0)
    shapes = {"rows": (N, H), "gate_up": (3, H, 2, F), "down": (3, F, H)}
    found = {n: jnp.asarray(rng.standard_normal(s), dtype) for n, s in shapes.items()}
    return {**found, "group_sizes": jnp.array(SIZES, jnp.int32)}


def exact_sums(values):
    values, bounds = np.asarray(values, np.float64), np.cumsum((0, *SIZES))
    pairs = itertools.pairwise(bounds)
    return np.stack([values[start:end].sum(0) for start, end in pairs])


def cotangent(dtype="bfloat16", columns=H):
    rng = np.random.default_rng(1)
    values = 1 + rng.standard_normal((N, columns)) / 8
    values[sum(SIZES) :] = np.nan  # of rows past the groups, where it may be anything
    return jnp.asarray(values, dtype)


def close(got, want, tolerance=1e-5):
    got = np.asarray(got, np.float64)
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


WAYS = ("ragged_dot", "Padded", "hopper")


def way(name):
    if name == "hopper":
        skip_without_hopper()
    return experts.Padded(max(SIZES)) if name == "Padded" else getattr(experts, name)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_of_down(name, dtype):
    """Its gradient is the sum of the cotangents, rounded to the bias's dtype once."""
    run, arrays, to = way(name), given(), cotangent()

    def main(bias):
        return run(**arrays, down_bias=bias)

    _, back = jax.vjp(jax.jit(main), jnp.ones((3, H), dtype))
    (got,) = back(to)
    assert got.dtype == dtype
    close(got, exact_sums(to), 1e-5 if dtype == "float32" else 2**-8)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("activation", [None, lambda gate, up: gate + 2 * up])
def test_biases_of_gate_and_up(name, activation):
    """They equal the float32 experts' gradients; a missing one changes no other."""
    run, arrays, to = way(name), given(), cotangent() / 64
    made = {n: jnp.full((3, F), 0.5, jnp.float32) for n in ("gate_bias", "up_bias")}

    def grads(run, arrays, biases, to):
        def main(biases):
            return run(**arrays, **biases, activation=activation)

        return jax.jit(lambda: jax.vjp(main, biases)[1](to)[0])()

    wide = {
        n: x if n == "group_sizes" else x.astype("float32") for n, x in arrays.items()
    }
    real = (jnp.arange(N) < sum(SIZES))[:, None]
    plain = jnp.where(real, to.astype(jnp.float32), 0)
    want = grads(experts.ragged_dot, wide, made, plain)
    got = grads(run, arrays, made, to)
    assert got.keys() == want.keys()
    for each in got:
        close(got[each], np.asarray(want[each]), 0.02)
        # The other bias is part of the formula, so its absence is a bias of zeros.
        other = {n: made[n] if n == each else jnp.zeros_like(made[n]) for n in made}
        alone = grads(run, arrays, {each: made[each]}, to)[each]
        both = grads(run, arrays, other, to)[each]
        np.testing.assert_array_equal(alone, both)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_add_bias(dtype):
    """It adds as indexing does, and its gradients are those of float64 sums."""
    rows = given(dtype)["rows"]
    bias = jnp.asarray(np.random.default_rng(2).standard_normal((3, H)), "float32")
    sizes = jnp.array(SIZES, jnp.int32)
    to = cotangent(dtype)
    got, back = jax.vjp(jax.jit(lambda r, b: experts.add_bias(r, b, sizes)), rows, bias)
    group = np.repeat(np.arange(3), SIZES)
    want = rows[: len(group)] + bias.astype(dtype)[group]
    np.testing.assert_array_equal(got[: len(group)], want)
    to_rows, to_bias = back(to)
    np.testing.assert_array_equal(to_rows[: len(group)], to[: len(group)])
    assert got.dtype == to_rows.dtype == dtype
    close(to_bias, exact_sums(to))


def test_add_bias_twice_derived_and_batched():
    rows, sizes = given("float32")["rows"], jnp.array(SIZES, jnp.int32)
    rows = jnp.where((jnp.arange(N) < sum(SIZES))[:, None], rows, 0)

    def loss(bias):
        return jnp.sum(experts.add_bias(rows, bias, sizes) ** 3) / N

    bias = jnp.ones((3, H), jnp.float32)
    second = jax.grad(lambda b: jnp.sum(jax.grad(loss)(b) * b))
    wanted = 3 * (rows + 1) ** 2 / N, 6 * (rows + 1) / N
    close(jax.grad(loss)(bias), exact_sums(wanted[0]), 1e-4)
    close(second(bias), exact_sums(wanted[0] + wanted[1]), 1e-4)
    several = jnp.stack([bias, 2 * bias])
    got = jax.vmap(jax.grad(loss))(several)
    want = jnp.stack([jax.grad(loss)(each) for each in several])
    close(got, np.asarray(want))


def test_kernels_and_plain_sums():
    """The kernels for Hopper sum what plain JAX sums, without rows past the groups."""
    skip_without_hopper()
    sizes, values = jnp.array(SIZES, jnp.int32), cotangent(columns=136)
    for products in (grouped.everywhere(), grouped.HOPPER):
        found = jax.jit(products.sums)(values, sizes)
        assert found.dtype == jnp.float32
        close(found, exact_sums(values))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rows": jnp.zeros((4, 8), jnp.int32)}, TypeError, "rows must be bfloat16"),
        ({"bias": jnp.zeros((2, 8), jnp.float8_e4m3fn)}, TypeError, "bias must be"),
        ({"bias": jnp.zeros((2, 4))}, ValueError, r"\(4, 8\), \(2, 4\) and \(2,\)"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, ValueError, r"and \(3,\)"),
        ({"group_sizes": jnp.zeros(2)}, TypeError, "group_sizes must be int32"),
    ],
)
def test_errors(change, kind, message):
    arrays = {
        "rows": jnp.zeros((4, 8)),
        "bias": jnp.zeros((2, 8)),
        "group_sizes": jnp.zeros(2, jnp.int32),
    }
    with pytest.raises(kind, match=f"jax_ep.experts.add_bias: .*{message}"):
        experts.add_bias(**{**arrays, **change})


@pytest.mark.parametrize("check_vma", [False, True])
def test_under_shard_map(check_vma):
    """Where rows are split and the bias is not, its gradients are summed over ranks."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    sizes = jnp.array([3, 4], jnp.int32)
    rows = jnp.ones((8 * mesh.size, H), jnp.bfloat16)

    def body(rows, bias):
        return experts.add_bias(rows, bias, sizes)[:7]

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("ep"), P()),
        out_specs=P("ep"),
        check_vma=check_vma,
    )
    bias = jnp.zeros((2, H), jnp.float32)
    got = jax.jit(jax.grad(lambda b: mapped(rows, b).astype("float32").sum()))(bias)
    np.testing.assert_array_equal(got, mesh.size * np.array([[3.0], [4.0]]) + 0 * bias)
