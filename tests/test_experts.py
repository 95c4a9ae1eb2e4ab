"""jax_ep.experts: every way of multiplying equals the formula, with its gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import experts

pytestmark = pytest.mark.usefixtures("quick_compiles")

L, H, F, N = 3, 128, 128, 64


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


def operands(sizes, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = (N, H), (L, H, 2, F), (L, F, H)
    rows, gate_up, down = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    rows[sum(sizes) :] = 0  # as dispatch leaves them
    return jnp.asarray(rows, dtype), gate_up / H**0.5, down / F**0.5


def both_ways(run, reference, sizes, dtype="float32"):
    """Largest errors of y and of all gradients, over the largest element."""
    args = operands(sizes, dtype)
    real = (jnp.arange(N) < sum(sizes))[:, None]

    def main(*args):
        return jnp.where(real, run(*args, jnp.array(sizes, jnp.int32)), 0)

    found, back = jax.vjp(jax.jit(main), *args)
    wide = [jnp.asarray(each, jnp.float32) for each in args]
    want, wanted_back = jax.vjp(lambda *a: reference(*a, sizes), *wide)
    cotangent = np.random.default_rng(1).standard_normal(want.shape)
    cotangent = jnp.asarray(cotangent, jnp.float32)
    gots = found, *back(cotangent.astype(found.dtype))
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


def test_mosaic_says_where_it_does_not_run():
    obstacle = experts.mosaic_obstacle(H, 96)
    assert obstacle is not None
    rows, gate_up, down = operands((1, 1, 1))
    with pytest.raises(ValueError, match=r"^jax_ep.experts.mosaic: must have .*, got"):
        experts.mosaic(rows, gate_up[..., :96], down[:, :96], jnp.ones(L, jnp.int32))


@pytest.mark.gpu
def test_mosaic_equals_the_formula():
    obstacle = experts.mosaic_obstacle(H, F)
    if obstacle is not None:
        pytest.skip(f"needs {obstacle}")
    assert max(both_ways(experts.mosaic, formula, (10, 0, 30), "bfloat16")) < 0.03
