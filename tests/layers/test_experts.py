"""jax_ep.experts: every way of multiplying equals the formula, with its gradients."""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import experts
from jax_ep._experts import grouped as _grouped
from support import grouped_kernels, helpers
from support.grouped_kernels import (
    F,
    H,
    needs_interpreter,
    needs_kernels,
    skip_without_mosaic,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

L, N = 3, 64
MOSAIC_SIZES = [
    ((10, 0, 30), N),
    ((1,) * 8, 100),
    ((7, 0, 3, 70, 64, 0, 1, 50), 200),
    ((700, 0, 3, 129, 64, 0, 1, 100), 1000),
    ((512, 512), 1024),
    ((0, 0, 5), 5),
]
try:
    from jax.experimental.pallas import mosaic_gpu
except ImportError:  # it imports absl, which JAX does not require
    mosaic_gpu = None


def formula(rows, gate_up, down, sizes, largest=N):
    """In float32, group by group; rows past `largest` of a group come out as zeros."""
    out, start = jnp.zeros(rows.shape), 0
    for group, size in enumerate(sizes):
        part = rows[start : start + min(size, largest)]
        both = jnp.einsum("nh,hcf->ncf", part, gate_up[group])
        y = jax.nn.silu(both[:, 0]) * both[:, 1] @ down[group]
        out = out.at[start : start + len(part)].set(y)
        start += size
    return out


def operands(sizes, dtype="float32", count=N):
    rng = np.random.default_rng(0)
    shapes = (count, H), (len(sizes), H, 2, F), (len(sizes), F, H)
    rows, gate_up, down = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    rows[sum(sizes) :] = np.nan  # dispatch leaves anything there, without zero_tail
    return jnp.asarray(rows, dtype), gate_up / H**0.5, down / F**0.5


def both_ways(run, reference, sizes, dtype="float32", count=N):
    """Largest errors of y and of all gradients, over the largest element."""
    args = operands(sizes, dtype, count)
    real = (jnp.arange(count) < sum(sizes))[:, None]

    def main(rows, *weights):
        y = run(rows, *weights, jnp.array(sizes, jnp.int32))
        # Cotangents of the rest are NaN too.
        return jnp.where(real, y * jnp.where(real, 1, jnp.nan).astype(y.dtype), 0)

    found, back = jax.vjp(jax.jit(main), *args)
    wide = [jnp.asarray(each, jnp.float32) for each in args]
    wide[0] = jnp.where(real, wide[0], 0)
    want, wanted_back = jax.vjp(lambda *a: reference(*a, sizes), *wide)
    cotangent = np.random.default_rng(1).standard_normal(want.shape)
    cotangent = jnp.asarray(cotangent, jnp.float32)
    to_rows, *to_weights = back(cotangent.astype(found.dtype))
    gots = found, jnp.where(real, to_rows, 0), *to_weights
    assert found.dtype == args[0].dtype
    for got, each in zip(gots, (want, *wanted_back(cotangent)), strict=True):
        got = np.asarray(got, np.float32)
        yield np.abs(got - each).max() / np.abs(each).max()


@pytest.mark.parametrize("sizes", [(10, 0, 30), (24, 24, 16)], ids=str)
@pytest.mark.parametrize("name", ["ragged_dot", "padded"])
def test_equal_the_formula(name, sizes):
    run = experts.ragged_dot if name == "ragged_dot" else experts.Padded(32)
    assert max(both_ways(run, formula, sizes)) < 1e-5


def test_rows_past_the_largest_are_zeros_without_a_gradient():
    def cut(*args):
        return formula(*args, largest=16)

    assert max(both_ways(experts.Padded(16), cut, (10, 0, 30))) < 1e-5
    assert max(both_ways(experts.Padded(16), formula, (10, 0, 30))) > 0.1


@pytest.mark.parametrize("largest", [0, 2.0, True])
def test_largest_must_be_positive(largest):
    with pytest.raises(ValueError, match=r"^jax_ep.experts.Padded: largest .*got"):
        experts.Padded(largest)


def test_mosaic_names_what_its_kernels_lack(monkeypatch):
    def kernels():
        raise ModuleNotFoundError("No module named 'absl'")

    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(_grouped, "kernels", dict)
    assert experts.mosaic_obstacle(H, F, hopper) is None
    monkeypatch.setattr(_grouped, "kernels", kernels)
    found = experts.mosaic_obstacle(H, F, hopper)
    assert found is not None
    assert found.endswith("such as absl-py, got No module named 'absl'")


def test_mosaic_says_where_it_does_not_run():
    obstacle = experts.mosaic_obstacle(H, 96)
    assert obstacle is not None
    rows, gate_up, down = operands((1, 1, 1), "bfloat16")
    with pytest.raises(ValueError, match=r"^jax_ep.experts.mosaic: must have .*, got"):
        experts.mosaic(rows, gate_up[..., :96], down[:, :96], jnp.ones(L, jnp.int32))


def test_mosaic_refuses_float32(monkeypatch):
    monkeypatch.setattr(experts, "mosaic_obstacle", lambda *_: None)
    with pytest.raises(ValueError, match=r"^jax_ep.experts.mosaic: rows .*got float32"):
        experts.mosaic(*operands((1, 1, 1)), jnp.ones(L, jnp.int32))


def largest_error(name, sizes, count):
    reference = functools.partial(formula, largest=count)
    return max(both_ways(getattr(experts, name), reference, sizes, "bfloat16", count))


def curvature(run, sizes, dtype, count):
    """Errors of a Hessian times a vector, every argument's, as `both_ways`."""
    rng = np.random.default_rng(2)
    real = (jnp.arange(count) < sum(sizes))[:, None]
    *args, weights = (*operands(sizes, dtype, count), rng.standard_normal((count, H)))
    args = [jnp.where(real, args[0], 0), *args[1:]]
    directions = [rng.standard_normal(np.shape(arg)) for arg in args]

    def products(run, *args):
        def loss(*args):
            y = jnp.where(real, run(*args), 0)
            return jnp.sum(y.astype(jnp.float32) * weights)

        def along(*args):
            grads = jax.grad(loss, (0, 1, 2))(*args)
            pairs = zip(grads, directions, strict=True)
            return sum(jnp.sum(g.astype(jnp.float32) * d) for g, d in pairs)

        to_rows, *rest = jax.jit(jax.grad(along, (0, 1, 2)))(*args)
        return jnp.where(real, to_rows, 0), *rest

    found = products(lambda *args: run(*args, jnp.array(sizes, jnp.int32)), *args)
    wide = [jnp.asarray(arg, jnp.float32) for arg in args]
    for got, want in zip(found, products(formula_of(sizes), *wide), strict=True):
        got = np.asarray(got, np.float32)
        yield np.abs(got - want).max() / np.abs(want).max()


def formula_of(sizes):
    return lambda *args: formula(*args, sizes, largest=max(sizes))


# JAX has no second derivatives of ragged_dot.
@pytest.mark.parametrize("name", ["mosaic", "padded"])
def test_second_derivatives_equal_the_formulas(name, monkeypatch):
    if name == "mosaic":
        grouped_kernels.fake(monkeypatch)
    run = experts.Padded(32) if name == "padded" else getattr(experts, name)
    dtype, bound = ("bfloat16", 0.05) if name == "mosaic" else ("float32", 1e-5)
    assert max(curvature(run, (10, 0, 30), dtype, N)) < bound


def test_no_derivative_reads_cotangents_past_the_end():
    """Those of second derivatives neither, where the last group has room for them."""
    sizes = (10, 0, 30)

    def run(*args):
        return experts.Padded(32)(*args, jnp.array(sizes, jnp.int32))

    def both(*args):
        y, back = jax.vjp(run, *args)
        return y, back(jnp.where(real, y, jnp.nan))

    real = (jnp.arange(N) < sum(sizes))[:, None]
    (y, grads), back = jax.vjp(both, *operands(sizes))
    ones = jax.tree.map(jnp.ones_like, grads)
    to_rows, *to_weights = back((jnp.where(real, y, jnp.nan), ones))
    for found in (jnp.where(real, to_rows, 0), *to_weights):
        assert np.isfinite(found).all()
        assert np.any(found)


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "count"), MOSAIC_SIZES, ids=str)
def test_mosaic_equals_the_formula(sizes, count):
    skip_without_mosaic()
    assert largest_error("mosaic", sizes, count) < 0.03


@pytest.mark.gpu
def test_second_derivatives_on_hopper():
    skip_without_mosaic()
    assert max(curvature(experts.auto, (7, 0, 3, 70), "bfloat16", 100)) < 0.05


@needs_interpreter
@pytest.mark.parametrize(("sizes", "count"), MOSAIC_SIZES[2:3], ids=str)
def test_mosaic_equals_the_formula_interpreted(sizes, count, monkeypatch):
    grouped_kernels.pretend(monkeypatch)
    with mosaic_gpu.force_gpu_interpret_mode():
        assert largest_error("mosaic", sizes, count) < 0.03


@needs_kernels
@pytest.mark.parametrize("count", [5, 100, 1000])
def test_mosaic_lowers_for_hopper(count, monkeypatch):
    """With its derivatives, which have kernels of their own."""
    grouped_kernels.pretend(monkeypatch)

    def both(*args):
        y, back = jax.vjp(experts.mosaic, *args)
        return y, back(y)

    args = (*operands((1, 0, 2), "bfloat16", count), jnp.ones(3, jnp.int32))
    traced = jax.jit(both).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == 6


@pytest.mark.parametrize("end", [0, 1, 100, 299, 300])
@pytest.mark.parametrize("count", [300, 128, 5])
def test_rows_after_the_end_become_zeros(end, count):
    rows = np.arange(1, 2 * count + 1, dtype=np.float32).reshape(count, 2)
    end = min(end, count)
    found = np.asarray(_grouped._zero_after(jnp.asarray(rows), jnp.int32(end)))
    np.testing.assert_array_equal(found[:end], rows[:end])
    assert not found[end : end + 64].any()


@pytest.mark.parametrize(
    ("dtype", "obstacle", "dense", "wanted"),
    [
        ("bfloat16", None, True, "mosaic"),
        ("float16", None, True, "mosaic"),
        ("bfloat16", None, False, "ragged_dot"),
        ("bfloat16", "another GPU", True, "ragged_dot"),
        ("float32", None, True, "ragged_dot"),
    ],
)
def test_the_default_is_what_is_fast(dtype, obstacle, dense, wanted, monkeypatch):
    device = jax.devices()[-1]

    def obstacle_of(hidden_size, intermediate_size, where):
        assert (hidden_size, intermediate_size, where) == (H, F, device)
        return obstacle

    def is_dense(name, where):
        assert (name, where) == (dtype, device)
        return dense

    monkeypatch.setattr(experts, "mosaic_obstacle", obstacle_of)
    monkeypatch.setattr(experts, "ragged_dot_is_dense", is_dense)
    for name, function in (("mosaic", "_by_mosaic"), ("ragged_dot", "ragged_dot")):
        monkeypatch.setattr(experts, function, lambda *_, name=name, **__: name)
    args = operands((10, 0, 30), dtype)
    found = experts.auto(*args, jnp.ones(L, jnp.int32), device=device)
    assert found == wanted


def test_density_is_asked_for_in_a_trace_under_a_mesh():
    """What is compiled for the answer is none of the caller's."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    answers = []

    def body(x):
        experts._ragged_dot_is_dense.cache_clear()
        answers.append(experts.ragged_dot_is_dense("float32", mesh.local_devices[0]))
        return x

    with jax.set_mesh(mesh):
        run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        jax.jit(run)(jnp.zeros(mesh.size))
    experts._ragged_dot_is_dense.cache_clear()
    assert answers == [experts.ragged_dot_is_dense("float32")]
