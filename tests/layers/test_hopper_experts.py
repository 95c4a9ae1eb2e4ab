"""The 16-bit kernels for Hopper against float64, and the experts that use them.

On a Hopper GPU tests of kernels run the real ones. On CPUs they check the stand-ins of
support/grouped_kernels.py, which the other tests use there.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import experts
from jax_ep._experts import kernels
from support import grouped_kernels, helpers
from support.fp8_experts import sigmoid
from support.grouped_kernels import F, H, skip_without_hopper

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Group sizes, rows of the operand, A, B.
CASES = [
    ((10, 0, 30), 64, 128, 128),
    ((1,) * 8, 104, 136, 72),
    ((7, 0, 3, 70, 64, 0, 1, 50), 200, 64, 200),
    ((0, 0, 5), 5, 8, 8),
    ((0, 0), 16, 128, 64),
]
LARGE = [
    ((700, 0, 3, 129, 64, 0, 1, 100), 1000, 1536, 640),
    ((512, 512), 1024, 512, 1032),
    ((300, 0, 20), 2048, 1032, 256),
    (tuple(range(0, 330, 10)), 6000, 256, 520),
    ((4096,) * 4, 16384, 2048, 1024),
]
ALL = grouped_kernels.weighed(CASES, LARGE)
# The relative error of rounding a result once.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-23}
# The error of a float32 sum, relative to the sum of magnitudes.
SUMS = 1e-5


@pytest.fixture
def ready(monkeypatch):
    """The real kernels on Hopper; elsewhere stand-ins, whose names are collected."""
    if jax.default_backend() == "cpu":
        return grouped_kernels.fake(monkeypatch)
    return skip_without_hopper()


def normal(rng, *shape, dtype):
    return np.asarray(rng.standard_normal(shape), jnp.dtype(dtype))


def wide(*arrays):
    return [np.asarray(array).astype(np.float64) for array in arrays]


def groups_of(sizes):
    ends = np.cumsum(sizes)
    return list(zip(range(len(sizes)), ends - sizes, ends, strict=True))


def products(rows, matrices, sizes):
    """Products of all rows in groups, and the products of magnitudes."""
    rows, matrices = wide(rows, matrices)
    total = sum(sizes)
    out = np.zeros((2, total, matrices.shape[2]))
    for group, first, end in groups_of(sizes):
        part = rows[first:end], matrices[group]
        out[:, first:end] = part[0] @ part[1], np.abs(part[0]) @ np.abs(part[1])
    return out


def assert_near(found, want, bound, dtype):
    """Equal within one rounding to `dtype` and, in addition, `bound`."""
    assert found.dtype == jnp.dtype(dtype)
    found = np.asarray(found).astype(np.float64)
    # float16 has denormals, for which the rounding error is absolute.
    excess = np.abs(found - want) - UNIT[jnp.dtype(dtype).name] * np.abs(want) - bound
    assert np.all(excess <= 2.0**-25), excess.max(initial=0)


def operands(sizes, count, *shapes, dtype, seed=0):
    """Rows `[N, A]`, NaN past the groups, and matrices, of these `shapes`."""
    rng = np.random.default_rng(seed)
    made = []
    for shape in shapes:
        if shape[0] == count:
            each = normal(rng, *shape, dtype=dtype)
            each[sum(sizes) :] = np.nan
        else:
            each = normal(rng, *shape, dtype=dtype) / np.sqrt(shape[1])
        made.append(jnp.asarray(each, dtype))
    return *made, jnp.array(sizes, jnp.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["fprop", "dgrad"])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_rows_by_matrices(sizes, count, a, b, name, dtype, ready):
    matrix = (a, b) if name == "fprop" else (b, a)
    rows, matrices, groups = operands(
        sizes, count, (count, a), (len(sizes), *matrix), dtype=dtype
    )
    found = jax.jit(getattr(kernels.HOPPER, name))(rows, matrices, groups)
    matrices = matrices if name == "fprop" else matrices.swapaxes(1, 2)
    want, magnitudes = products(rows, matrices, sizes)
    assert_near(found[: sum(sizes)], want, SUMS * magnitudes, dtype)


def silu(gate):
    return gate * sigmoid(gate)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_gate_up(sizes, count, a, b, keep, dtype, ready):
    shapes = (count, a), (len(sizes), a, 2, b)
    rows, matrices, groups = operands(sizes, count, *shapes, dtype=dtype)
    h, gate_up_rows = jax.jit(functools.partial(kernels.HOPPER.gate_up, keep=keep))(
        rows, matrices, groups
    )
    side_by_side = matrices.reshape(len(sizes), a, 2 * b)
    sums, magnitudes = products(rows, side_by_side, sizes)
    (gate, up), (gates, ups) = (np.split(e, 2, axis=1) for e in (sums, magnitudes))
    want = silu(gate) * up
    bound = 2 * SUMS * (gates * np.abs(up) + ups * np.abs(gate) + gates * ups * SUMS)
    assert_near(h[: sum(sizes)], want, bound + 1e-6 * np.abs(want), dtype)
    assert (gate_up_rows is not None) == keep
    if gate_up_rows is not None:
        assert gate_up_rows.shape == (count, 2, b)
        flat = gate_up_rows[: sum(sizes)].reshape(sum(sizes), 2 * b)
        assert_near(flat, sums, SUMS * magnitudes, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_down_dgrad(sizes, count, a, b, dtype, ready):
    shapes = (count, a), (len(sizes), b, a), (count, 2, b)
    cotangents, matrices, gate_up_rows, groups = operands(
        sizes, count, *shapes, dtype=dtype
    )
    found = jax.jit(kernels.HOPPER.down_dgrad)(
        cotangents, matrices, gate_up_rows, groups
    )
    to_h, magnitudes = products(cotangents, matrices.swapaxes(1, 2), sizes)
    (values,) = wide(gate_up_rows[: sum(sizes)])
    gate, up = values[:, 0], values[:, 1]
    s = sigmoid(gate)
    slopes = np.stack([up * (s + silu(gate) * (1 - s)), silu(gate)], 1)
    want, bound = to_h[:, None] * slopes, magnitudes[:, None] * np.abs(slopes)
    # If terms of the slope cancel, its own error remains.
    bound = SUMS * bound + 2e-6 * np.abs(to_h[:, None]) * (1 + np.abs(up[:, None]))
    assert_near(found[: sum(sizes)], want, bound, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide_out", [False, True])
@pytest.mark.parametrize(("sizes", "count", "a", "b"), ALL, ids=str)
def test_wgrad(sizes, count, a, b, wide_out, dtype, ready):
    shapes = (count, a), (count, b)
    rows, cotangents, groups = operands(sizes, count, *shapes, dtype=dtype)
    out = "float32" if wide_out else dtype
    found = jax.jit(kernels.HOPPER.wgrad, static_argnames="dtype")(
        rows, cotangents, groups, dtype=jnp.dtype(out)
    )
    for group, first, end in groups_of(sizes):
        pair = wide(rows[first:end], cotangents[first:end])
        want = pair[0].T @ pair[1]
        bound = SUMS * (np.abs(pair[0]).T @ np.abs(pair[1]))
        assert_near(found[group], want, bound, out)
        assert first != end or not np.any(found[group])


def test_nan_stays_in_its_row(ready):
    """NaN or infinity changes only its own row, or in a matrix only its own group."""
    sizes, count, total = (10, 0, 30), 64, 40
    shapes = (count, H), (3, H, 2, F), (3, F, H)
    rows, gate_up, down, groups = operands(sizes, count, *shapes, dtype="bfloat16")
    clean = rows.at[3].set(1.0)
    bad = clean.at[3].set(jnp.nan)
    others = np.delete(np.arange(total), 3)

    def run(rows):
        y, back = jax.vjp(
            lambda *args: experts.hopper(*args, groups), rows, gate_up, down
        )
        return y, *back(jnp.ones_like(y))

    want, found = (jax.jit(run)(each) for each in (clean, bad))
    for i in (0, 1):
        helpers.assert_bits(found[i][others], want[i][others])
        assert np.isnan(np.asarray(found[i][3], np.float32)).all()
    for i in (2, 3):
        helpers.assert_bits(found[i][1:], want[i][1:])
        assert np.isnan(np.asarray(found[i][0], np.float32)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_one_sign_lose_nothing(dtype):
    """Sums only grow, so that a narrower accumulator would drop low bits."""
    skip_without_hopper()
    rng = np.random.default_rng(0)
    a, b, sizes = 7168, 256, (200, 0, 56)
    rows = jnp.asarray(rng.uniform(0.5, 1.5, (256, a)), dtype)
    matrices = jnp.asarray(rng.uniform(0.5, 1.5, (3, a, b)) / a, dtype)
    found = kernels.HOPPER.fprop(rows, matrices, jnp.array(sizes, jnp.int32))
    want, _ = products(rows, matrices, sizes)
    assert abs(np.sum(np.asarray(found, np.float64)) / np.sum(want) - 1) < 5e-4


@pytest.mark.gpu
def test_calls_run_in_captured_graphs():
    """Also without an init, which would load kernels: a first call may be captured."""
    skip_without_hopper()
    shapes = (64, H), (3, H, 2, F), (3, F, H)
    rows, gate_up, down, groups = operands((10, 0, 30), 64, *shapes, dtype="bfloat16")

    @jax.jit
    def many(rows):
        def step(rows, _):
            y = experts.hopper(jnp.nan_to_num(rows), gate_up, down, groups)
            return y * jnp.bfloat16(0.5), None

        return jax.lax.scan(step, rows, None, length=4)[0]

    first = many(rows)[:40]
    for _ in range(3):
        helpers.assert_bits(many(rows)[:40], first)


# ---- What is lowered ------------------------------------------------------------


def custom_calls(text):
    """(target, line) of each custom call of jax_ep."""
    found = re.findall(r"(stablehlo\.custom_call @(ep_\w+)\(.*)", text)
    return [(target, line) for line, target in found]


def lowered_text(function, *args):
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def lowered(function, *args):
    return custom_calls(lowered_text(function, *args))


def both_ways(rows, gate_up, down, sizes):
    y, back = jax.vjp(lambda *args: experts.hopper(*args, sizes), rows, gate_up, down)
    return y, back(y)


def structs(count, dtype, masters):
    shapes = ((count, 256), dtype), ((3, 256, 2, 128), masters)
    shapes += ((3, 128, 256), masters), ((3,), "int32")
    return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("masters", ["own", "float32"])
@pytest.mark.parametrize(
    ("dtype", "word", "count"),
    [("bfloat16", "bf16", 1000), ("float16", "f16", 5), ("bfloat16", "bf16", 0)],
)
def test_lowered_for_hopper(dtype, word, count, masters, x64, monkeypatch):
    """Each product is one call, and gradients of float32 matrices are not rounded."""
    grouped_kernels.pretend(monkeypatch)
    with jax.enable_x64(x64):
        args = structs(count, dtype, dtype if masters == "own" else masters)
        forward = lowered(experts.hopper, *args)
        calls = lowered(both_ways, *args)
    # With many rows, so that the result can take the place of the rows.
    apart = ["ep_gate_up", "ep_fprop"]
    wanted = apart if count > 128 * 3 else ["ep_experts"]
    assert [target for target, _ in forward] == wanted
    if wanted != apart:
        assert (f"(tensor<{count}x128x{word}>, tensor<{count}x256x{word}>)") in forward[
            0
        ][1]
    assert Counter(target for target, _ in calls) == {
        "ep_gate_up": 1,
        "ep_fprop": 1,
        "ep_down_dgrad": 1,
        "ep_dgrad": 1,
        "ep_wgrad": 2,
    }
    lines = dict(calls)
    assert "keep = true" in lines["ep_gate_up"]
    assert (
        f"(tensor<{count}x256x{word}>, tensor<3x256x2x128x{word}>, "
        f"tensor<0x256x128x{word}>, tensor<3xi32>, tensor<0x2x128xf32>) -> "
        f"(tensor<{count}x128x{word}>, tensor<{count}x2x128x{word}>)"
    ) in lines["ep_gate_up"]
    assert f"tensor<3x256x256x{word}>" in lines["ep_dgrad"]
    # The call overwrites gate and up.
    assert "operand_index = 2" in lines["ep_down_dgrad"]
    out = dtype if masters == "own" else "float32"
    for target, line in calls:
        assert (f'out_dtype = "{out}"' in line) == (target == "ep_wgrad")


def test_policies_save_gate_and_up(monkeypatch):
    """Policies save them by name; without one the product is repeated."""
    grouped_kernels.pretend(monkeypatch)
    save = jax.checkpoint_policies.save_only_these_names("jax_ep_gate_up")

    def loss(policy, *args):
        run = jax.checkpoint(experts.hopper, policy=policy)
        return jnp.sum(run(*args).astype(jnp.float32))

    counts = []
    for policy in (None, save):
        grad = jax.value_and_grad(functools.partial(loss, policy), (0, 1, 2))
        targets = [
            each for each, _ in lowered(grad, *structs(64, "bfloat16", "float32"))
        ]
        counts.append(Counter(targets)["ep_gate_up"])
    assert counts == [2, 1]


@pytest.mark.parametrize("name", ["swiglu_clamped", "geglu", "relu_squared"])
def test_activations_and_biases_are_part_of_the_products(name, monkeypatch):
    """The kernels of the forward and backward pass have them; only sums are beside."""
    grouped_kernels.pretend(monkeypatch)
    given = getattr(experts, name)
    activation = given(1.5, 3.0) if name == "swiglu_clamped" else given
    biases = {
        "gate_bias": jax.ShapeDtypeStruct((3, 128), jnp.bfloat16),
        "down_bias": jax.ShapeDtypeStruct((3, 256), jnp.float32),
    }

    def run(biases, *args):
        def apply(biases, *rest):
            return experts.hopper(*rest, args[3], activation=activation, **biases)

        y, back = jax.vjp(apply, biases, *args[:3])
        return y, back(y)

    calls = lowered(run, biases, *structs(1000, "bfloat16", "bfloat16"))
    assert Counter(target for target, _ in calls) == {
        "ep_gate_up": 1,
        "ep_fprop": 1,
        "ep_down_dgrad": 1,
        "ep_dgrad": 1,
        "ep_wgrad": 4,
    }
    lines = dict(calls)
    for target in ("ep_gate_up", "ep_down_dgrad"):
        assert f'activation = "{name}"' in lines[target]
    assert "tensor<3x2x128xf32>" in lines["ep_gate_up"]
    assert "tensor<3x256xf32>" in lines["ep_fprop"]


@pytest.mark.parametrize("activation", [None, jax.nn.gelu])
def test_gate_and_up_apart_are_not_joined(activation, monkeypatch):
    """No array of a program has the size of both."""
    grouped_kernels.pretend(monkeypatch)
    rows, _, down, sizes = structs(1000, "bfloat16", "bfloat16")
    side = jax.ShapeDtypeStruct((3, 256, 128), jnp.bfloat16)
    function = None if activation is None else lambda g, u: activation(g) * u

    def run(rows, gate, up, down, sizes):
        def apply(rows, gate, up, down):
            pair = gate, up
            return experts.hopper(rows, pair, down, sizes, activation=function)

        y, back = jax.vjp(apply, rows, gate, up, down)
        return y, back(y)

    text = lowered_text(run, rows, side, side, down, sizes)
    for shape in ("3x256x2x128", "3x256x256", "3x2x256x128"):
        assert f"tensor<{shape}x" not in text
    if activation is None:
        assert text.count("@ep_wgrad(") == 3
        assert text.count("@ep_dgrad(") == 1


def test_other_activations_have_products_of_their_own(monkeypatch):
    grouped_kernels.pretend(monkeypatch)

    def run(activation, *args):
        y, back = jax.vjp(
            lambda *rest: experts.hopper(*rest, args[3], activation=activation),
            *args[:3],
        )
        return y, back(y)

    args = structs(64, "bfloat16", "bfloat16")
    calls = lowered(functools.partial(run, lambda g, u: jnp.tanh(g) * u), *args)
    assert Counter(target for target, _ in calls) == {
        "ep_fprop": 2,
        "ep_dgrad": 2,
        "ep_wgrad": 2,
    }


# ---- What is made of them, on CPUs ----------------------------------------------


def test_gradients_of_float32_matrices_are_not_rounded(ready):
    shapes = (64, H), (3, H, 2, F), (3, F, H)
    rows, gate_up, down, groups = operands((10, 0, 30), 64, *shapes, dtype="bfloat16")
    masters = gate_up.astype(jnp.float32), down.astype(jnp.float32)
    _, (_, *found) = jax.jit(both_ways)(rows, *masters, groups)
    _, (_, *rounded) = jax.jit(both_ways)(rows, gate_up, down, groups)
    for got, near in zip(found, rounded, strict=True):
        assert got.dtype == jnp.float32
        assert near.dtype == jnp.bfloat16
        helpers.assert_bits(got.astype(jnp.bfloat16), near)
        assert np.any(np.asarray(got) != np.asarray(near, np.float32))


@pytest.mark.parametrize("shared", [False, True])
def test_vmap(shared, ready):
    """Entries run one after the other; shared weights get the sum of gradients."""
    sizes = [(10, 0, 30), (1, 2, 3)]
    shapes = (64, H), (3, H, 2, F), (3, F, H)
    given = [
        operands(each, 64, *shapes, dtype="bfloat16", seed=seed)
        for seed, each in enumerate(sizes)
    ]
    given = [(jnp.nan_to_num(rows), *rest) for rows, *rest in given]
    if shared:
        given = [(each[0], *given[0][1:3], each[3]) for each in given]
    axes = (0, None, None, 0) if shared else 0
    stacked = [
        each[0] if shared and i in (1, 2) else jnp.stack(each)
        for i, each in enumerate(zip(*given, strict=True))
    ]

    def loss(rows, gate_up, down, groups):
        real = jnp.arange(64) < jnp.sum(groups)
        y = experts.hopper(rows, gate_up, down, groups)
        return jnp.sum(jnp.where(real[:, None], y, 0).astype(jnp.float32) ** 2)

    def total(*args):
        return jnp.sum(jax.vmap(loss, axes)(*args))

    value, found = jax.jit(jax.value_and_grad(total, (1, 2)))(*stacked)
    singles = [jax.jit(jax.value_and_grad(loss, (1, 2)))(*each) for each in given]
    np.testing.assert_allclose(value, sum(v for v, _ in singles), rtol=1e-5)
    for i, got in enumerate(found):
        parts = [np.asarray(grads[i], np.float32) for _, grads in singles]
        want = sum(parts) if shared else np.stack(parts)
        got = np.asarray(got, np.float32)
        assert np.abs(got - want).max() <= 0.01 * np.abs(want).max()


def test_under_shard_map_with_constant_weights(ready):
    """check_vma requires a custom call's operands to vary over the same axes."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    shapes = (64, H), (3, H, 2, F), (3, F, H)
    rows, gate_up, down, groups = operands((10, 0, 30), 64, *shapes, dtype="bfloat16")
    rows = jnp.concatenate([jnp.nan_to_num(rows)] * mesh.size)

    def loss(rows, gate_up, down):
        y = experts.hopper(rows, gate_up, down, groups)
        real = (jnp.arange(64) < 40)[:, None]
        total = jnp.sum(jnp.where(real, y, 0).astype(jnp.float32) ** 2)
        return jax.lax.psum(total, "ep")

    run = jax.shard_map(loss, mesh=mesh, in_specs=(P("ep"), P(), P()), out_specs=P())
    found = jax.jit(jax.grad(run, (0, 1, 2)))(rows, gate_up, down)

    def alone(rows, gate_up, down):
        y = experts.hopper(rows, gate_up, down, groups)
        return jnp.sum(y[:40].astype(jnp.float32) ** 2)

    want = jax.jit(jax.grad(alone, (0, 1, 2)))(rows[:64], gate_up, down)
    for name, got, one in zip(("rows", "gate_up", "down"), found, want, strict=True):
        got, one = np.asarray(got, np.float32), np.asarray(one, np.float32)
        one = np.concatenate([one] * mesh.size) if name == "rows" else one * mesh.size
        if name == "rows":
            real = np.tile(np.arange(64) < 40, mesh.size)
            got, one = got[real], one[real]
        assert np.abs(got - one).max() <= 0.02 * np.abs(one).max(), name


@pytest.mark.parametrize("biased", [False, True])
def test_biases_and_activations(biased, ready):
    """Biases and activations that kernels do not have are applied outside of them."""
    shapes = (64, H), (3, H, 2, F), (3, F, H)
    rows, gate_up, down, groups = operands((10, 0, 30), 64, *shapes, dtype="bfloat16")
    rng = np.random.default_rng(5)
    options = {"down_bias": jnp.asarray(rng.standard_normal((3, H)), jnp.float32)}
    if biased:
        for name in ("gate_bias", "up_bias"):
            options[name] = jnp.asarray(rng.standard_normal((3, F)), jnp.float32)
        options["activation"] = lambda gate, up: jnp.tanh(gate) * (up + 1)

    def both(run, rows, gate_up, down):
        y, back = jax.vjp(lambda *a: run(*a, groups, **options), rows, gate_up, down)
        real = (jnp.arange(64) < 40)[:, None]
        return y, back(jnp.where(real, jnp.ones_like(y), jnp.nan))

    y, grads = jax.jit(functools.partial(both, experts.hopper))(rows, gate_up, down)
    whole = [jnp.nan_to_num(each.astype(jnp.float32)) for each in (rows, gate_up, down)]

    def plain(*args):
        y = experts.ragged_dot(*args, groups, **options)
        return jnp.where((jnp.arange(64) < 40)[:, None], y, 0)

    want, back = jax.vjp(jax.jit(plain), *whole)
    wanted = jax.jit(back)(jnp.ones_like(want))
    for got, one in zip((y, *grads), (want, *wanted), strict=True):
        got, one = np.asarray(got, np.float32), np.asarray(one)
        if got.shape[0] == 64:
            got, one = got[:40], one[:40]
        assert np.abs(got - one).max() <= 0.03 * np.abs(one).max()


def test_what_an_activation_closes_over(ready):
    """The closure's gradient sums over rows, without those past the groups."""
    shapes = (64, H), (3, H, 2, F), (3, F, H)
    rows, gate_up, down, groups = operands((10, 0, 30), 64, *shapes, dtype="bfloat16")

    def loss(run, slope):
        y = run(
            rows,
            gate_up,
            down,
            groups,
            activation=lambda gate, up: jax.nn.sigmoid(slope * gate) * up,
        )
        return jnp.sum(y[:40].astype(jnp.float32) ** 2)

    slope = jnp.float32(1.5)
    found = jax.grad(functools.partial(loss, experts.hopper))(slope)
    want = jax.grad(functools.partial(loss, experts.ragged_dot))(slope)
    assert np.abs(found - want) <= 0.03 * np.abs(want)
