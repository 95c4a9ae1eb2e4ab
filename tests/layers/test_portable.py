"""experts.portable and grouped_matmul: on GPUs by kernels, elsewhere by plain JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep import experts
from support.grouped_kernels import group_masks

pytestmark = pytest.mark.usefixtures("quick_compiles")

ON_GPU = jax.default_backend() == "gpu"
EXACT = 2**-19
# Relative to the largest element, without those of TF32, which has 10 bits.
BOUNDS = {"bfloat16": 2**-7, "float16": 2**-9, "float32": EXACT}
# Sizes of groups, rows that there is room for, H and F.
CASES = [
    ((5, 0, 130, 1), 200, 40, 24),
    ((0, 300, 0), 300, 136, 264),
    ((7, 64, 65), 160, 31, 47),
    ((0, 0), 16, 8, 8),
    ((1,), 1, 1, 1),
]


def operands(sizes: tuple[int, ...], count: int, hidden: int, inner: int, dtype: Any):
    """Rows, with NaN past the groups, the matrices and the sizes."""
    rng = np.random.default_rng(sum(sizes) + hidden)
    groups = len(sizes)
    rows = rng.standard_normal((count, hidden))
    rows[sum(sizes) :] = np.nan
    gate_up = rng.standard_normal((groups, hidden, 2, inner)) / hidden**0.5
    down = rng.standard_normal((groups, inner, hidden)) / inner**0.5
    cast = functools.partial(jnp.asarray, dtype=dtype)
    return cast(rows), cast(gate_up), cast(down), jnp.asarray(sizes, jnp.int32)


def formula(rows, gate_up, down, sizes, activation=None):
    """The experts in float64, as a sum over groups."""
    masks = np.asarray(group_masks(sizes, len(rows)))
    rows = np.where(masks.any(0)[:, None], np.asarray(rows, np.float64), 0)
    out = np.zeros_like(rows)
    gate_up, down = (np.asarray(each, np.float64) for each in (gate_up, down))
    for own, one, two in zip(masks, gate_up, down, strict=True):
        both = np.einsum("nh,hcf->ncf", rows[own], one)
        gate, up = both[:, 0], both[:, 1]
        h = gate / (1 + np.exp(-gate)) * up
        out[own] = (h if activation is None else activation(gate, up)) @ two
    return out


def loss_of(run: Any, in_groups: jax.Array) -> Any:
    def loss(rows, gate_up, down):
        y = jnp.where(in_groups, run(rows, gate_up, down).astype(jnp.float32), 0)
        return jnp.sum(jnp.sin(y))

    return loss


def dense(sizes):
    """The same in JAX, in the dtype of its operands, to be differentiated."""

    def run(rows, gate_up, down):
        out = jnp.zeros_like(rows)
        for own, one, two in zip(
            group_masks(sizes, len(rows)), gate_up, down, strict=True
        ):
            mine = jnp.where(own[:, None], rows, 0)
            both = jnp.einsum("nh,hcf->ncf", mine, one, precision="highest")
            h = jax.nn.silu(both[:, 0]) * both[:, 1]
            out += jnp.where(own[:, None], jnp.dot(h, two, precision="highest"), 0)
        return out

    return run


def assert_close(found: Any, wanted: Any, bound: float) -> None:
    found, wanted = (np.asarray(each, np.float64) for each in (found, wanted))
    assert np.isfinite(found).all()
    if found.size == 0:
        return
    assert np.abs(found - wanted).max() <= bound * max(np.abs(wanted).max(), 1e-30)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        ("bfloat16", "default"),
        ("float16", "default"),
        ("float32", "default"),
        ("float32", "highest"),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Any, dtype: str, precision: str) -> None:
    with jax.default_matmul_precision(precision):
        check_values_and_gradients(case, dtype, precision)


def check_values_and_gradients(case: Any, dtype: str, precision: str) -> None:
    rows, gate_up, down, sizes = given = operands(*case, dtype)
    filled = sum(case[0])
    in_groups = jnp.arange(len(rows))[:, None] < filled
    rounds = ON_GPU and (dtype, precision) == ("float32", "default")
    bound = 4 * (2**-9 if rounds else BOUNDS[dtype])
    y = jax.jit(experts.portable)(*given)
    assert y.dtype == rows.dtype
    assert_close(y[:filled], formula(*given)[:filled], bound)

    def run(rows, gate_up, down):
        return experts.portable(rows, gate_up, down, sizes)

    grads = jax.jit(jax.grad(loss_of(run, in_groups), (0, 1, 2)))(rows, gate_up, down)
    wide = [jnp.asarray(each, jnp.float32) for each in (rows, gate_up, down)]
    wide[0] = jnp.where(in_groups, wide[0], 0)
    want = jax.jit(jax.grad(loss_of(dense(sizes), in_groups), (0, 1, 2)))(*wide)
    assert_close(grads[0][:filled], want[0][:filled], 2 * bound)
    for found, wanted, own in zip(grads[1:], want[1:], (gate_up, down), strict=True):
        assert found.dtype == own.dtype
        assert_close(found, wanted, 2 * bound)


def test_float32_can_be_exact() -> None:
    """With large values and an infinity, which stays in its row."""
    rows, gate_up, _, sizes = operands((30, 34), 80, 256, 64, "float32")
    rows = rows.at[3].multiply(2.0**60).at[7, 5].set(jnp.inf)
    with jax.default_matmul_precision("highest"):
        y = jax.jit(experts.grouped_matmul)(rows, gate_up[:, :, 0], sizes)
    finite = np.ones(64, bool)
    finite[7] = False
    masks = np.asarray(group_masks(sizes, len(rows)))[:, :64]
    wide, matrices = (np.asarray(each, np.float64) for each in (rows, gate_up[:, :, 0]))
    wide = wide[:64]
    wide, masks, rest = wide[finite], masks[:, finite], np.asarray(y[:64])[finite]
    want = np.where(masks[0][:, None], wide @ matrices[0], wide @ matrices[1])
    large = np.abs(wide) @ np.abs(matrices).max(0)
    assert (np.abs(rest - want) / large).max() < EXACT
    signs = np.sign(np.asarray(gate_up[0, 5, 0]))
    np.testing.assert_array_equal(np.asarray(y[7]), np.inf * signs)


@pytest.mark.parametrize("op", ["rows", "gradient of rows", "gradient of matrices"])
def test_long_sums_of_float32_are_exact(op: str) -> None:
    """Tensor cores round partial sums towards zero, so the error would grow with K."""
    long, short = 8192, 16
    shape = {"rows": (24, long, short), "gradient of rows": (24, short, long)}
    n, a, b = shape.get(op, (long, 24, short))
    rng = np.random.default_rng(3)
    # All of one sign, so that rounding does not average out.
    rows, matrices, cotangent = (
        rng.random(each, np.float32) for each in ((n, a), (1, a, b), (n, b))
    )
    sizes = jnp.asarray([n], jnp.int32)

    def run(rows, matrices):
        return experts.grouped_matmul(rows, matrices, sizes)

    with jax.default_matmul_precision("highest"):
        y, back = jax.vjp(jax.jit(run), rows, matrices)
        to_rows, to_matrices = back(cotangent)
    wide = [each.astype(np.float64) for each in (rows, matrices[0], cotangent)]
    found, want = {
        "rows": (y, wide[0] @ wide[1]),
        "gradient of rows": (to_rows, wide[2] @ wide[1].T),
        "gradient of matrices": (to_matrices[0], wide[0].T @ wide[2]),
    }[op]
    np.testing.assert_allclose(found, want, rtol=2**-18)


@pytest.mark.few(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grouped_matmul(transposed: bool, dtype: str) -> None:
    rows, gate_up, _, sizes = operands((3, 0, 70), 90, 40, 24, dtype)
    matrices = gate_up[:, :, 0]
    given = matrices.swapaxes(1, 2) if transposed else matrices
    run = functools.partial(
        experts.grouped_matmul,
        group_sizes=sizes,
        transposed=transposed,
        preferred_element_type="float32",
    )
    y = jax.jit(run)(rows, given)
    assert y.dtype == jnp.float32
    masks = np.asarray(group_masks(sizes, len(rows)))
    wide = np.where(masks.any(0)[:, None], np.asarray(rows, np.float64), 0)
    each = np.einsum("nh,lhf->lnf", wide, np.asarray(matrices, np.float64))
    want = np.where(masks[..., None], each, 0).sum(0)
    # The sums are not rounded to bfloat16.
    assert_close(y[:73], want[:73], BOUNDS["float32"] if dtype == "float32" else 2**-18)
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(y.shape), y.dtype)
    cotangent = cotangent.at[73:].set(jnp.nan)
    to_rows, to_matrices = jax.vjp(run, rows, given)[1](cotangent)
    back = np.asarray(cotangent, np.float64)[:73]
    want_rows = np.einsum("lnf,lhf->nh", masks[:, :73, None] * back, matrices)
    assert_close(to_rows[:73], want_rows, 4 * BOUNDS[dtype])
    want = np.einsum("lnh,nf->lhf", masks[:, :73, None] * wide[:73], back)
    want = want.swapaxes(1, 2) if transposed else want
    assert_close(to_matrices, want, 4 * BOUNDS[dtype])


def test_grouped_matmul_refuses() -> None:
    rows, gate_up, _, sizes = operands((3, 4), 7, 40, 24, "bfloat16")
    matrices = gate_up[:, :, 0]
    words = "pass transposed=True"
    with pytest.raises(ValueError, match=rf"^jax_ep.experts.grouped_matmul: .*{words}"):
        experts.grouped_matmul(rows, matrices.swapaxes(1, 2), sizes)
    with pytest.raises(ValueError, match="preferred_element_type must hold"):
        experts.grouped_matmul(rows, matrices, sizes, preferred_element_type="float16")
    with pytest.raises(TypeError, match="rows must be bfloat16"):
        experts.grouped_matmul(rows.astype(jnp.int8), matrices, sizes)


def test_second_derivatives() -> None:
    rows, gate_up, down, sizes = operands((5, 9), 20, 24, 16, "float32")
    in_groups = jnp.arange(20)[:, None] < 14

    def curvature(run: Any, rows: Any) -> Any:
        slope = jax.grad(lambda rows: loss_of(run, in_groups)(rows, gate_up, down))

        def steepness(rows: Any) -> Any:
            return jnp.sum(jnp.where(in_groups, slope(rows), 0) ** 2)

        return jax.grad(steepness)(rows)

    with jax.default_matmul_precision("highest"):
        found = curvature(lambda *args: experts.portable(*args, sizes), rows)
    want = curvature(dense(sizes), jnp.where(in_groups, rows, 0))
    assert_close(found[:14], want[:14], 1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_vmap(shared: bool) -> None:
    rows, gate_up, down, sizes = operands((5, 9), 20, 24, 16, "float32")
    batch = jnp.stack([rows, rows[::-1] * 0 + 1, rows])
    weights = gate_up if shared else jnp.stack([gate_up, 2 * gate_up, gate_up])
    axes = (0, None if shared else 0, None, None)
    found = jax.jit(jax.vmap(experts.portable, axes))(batch, weights, down, sizes)
    for i, each in enumerate(found):
        own = weights if shared else weights[i]
        want = experts.portable(batch[i], own, down, sizes)
        np.testing.assert_array_equal(np.asarray(each)[:14], np.asarray(want)[:14])


@pytest.mark.parametrize(
    ("activation", "plain"),
    [
        (
            experts.swiglu_clamped(),
            lambda g, u: (
                np.minimum(g, 7)
                / (1 + np.exp(-1.702 * np.minimum(g, 7)))
                * (np.clip(u, -7, 7) + 1)
            ),
        ),
        (
            experts.geglu,
            lambda g, u: (
                0.5 * g * (1 + np.tanh((2 / np.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
            ),
        ),
        (experts.relu_squared, lambda g, u: np.maximum(g, 0) ** 2 * u),
    ],
    ids=["swiglu_clamped", "geglu", "relu_squared"],
)
def test_activations_by_name(activation: Any, plain: Any) -> None:
    rows, gate_up, down, sizes = operands((30, 9), 50, 24, 16, "float32")
    given = rows, 8 * gate_up, down, sizes
    assert hash(activation) == hash(activation)
    with jax.default_matmul_precision("highest"):
        y = experts.portable(*given, activation=activation)
    assert_close(y[:39], formula(*given, plain)[:39], 1e-5)


def test_named_activations_are_equal() -> None:
    assert experts.swiglu_clamped() == experts.swiglu_clamped(1.702, 7.0)
    assert experts.swiglu_clamped() != experts.swiglu_clamped(limit=6.0)


def test_biases() -> None:
    rows, gate_up, down, sizes = operands((30, 9), 50, 21, 13, "float32")
    rng = np.random.default_rng(2)
    biases = {
        name: jnp.asarray(rng.standard_normal((2, size)), jnp.float32)
        for name, size in (("gate_bias", 13), ("up_bias", 13), ("down_bias", 21))
    }

    def loss(run: Any, biases: Any) -> Any:
        y = run(rows, gate_up, down, sizes, **biases)[:39]
        return jnp.sum(jnp.sin(y)), y

    with jax.default_matmul_precision("highest"):
        ways = [
            jax.jit(jax.grad(functools.partial(loss, run), has_aux=True))(biases)
            for run in (experts.portable, experts.ragged_dot)
        ]
    for found, want in zip(*map(jax.tree.leaves, ways), strict=True):
        assert_close(found, want, 1e-4)


@pytest.mark.gpu
def test_no_room_is_multiplied() -> None:
    """Its program has no dense product, and no temporaries of the size of all rows."""
    rows, gate_up, down, sizes = operands((5, 9), 64, 128, 128, "float32")
    text = jax.jit(experts.auto).lower(rows, gate_up, down, sizes).as_text()
    assert "ep_portable_gate_up" in text
    assert "ragged_dot" not in text
