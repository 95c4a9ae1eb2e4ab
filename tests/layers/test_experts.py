"""jax_ep.experts: every implementation equals the formula, with its gradients."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import experts
from jax_ep._experts import interface, kernels, of_rows
from support import grouped_kernels, helpers
from support.grouped_kernels import F, H, skip_without_hopper

pytestmark = pytest.mark.usefixtures("quick_compiles")

L, N = 3, 64
HOPPER_SIZES = [
    ((10, 0, 30), N),
    *(
        pytest.param(*case, marks=pytest.mark.thorough, id=str(case))
        for case in (
            ((1,) * 8, 100),
            ((7, 0, 3, 70, 64, 0, 1, 50), 200),
            ((700, 0, 3, 129, 64, 0, 1, 100), 1000),
            ((512, 512), 1024),
            ((0, 0, 5), 5),
        )
    ),
]


def formula(rows, gate_up, down, sizes, largest=N):
    """The formula in float32 by group; rows past `largest` of a group give zeros."""
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
    rows[sum(sizes) :] = np.nan  # unspecified after a dispatch without zero_tail
    return jnp.asarray(rows, dtype), gate_up / H**0.5, down / F**0.5


def both_ways(run, reference, sizes, dtype="float32", count=N):
    """Largest errors of y and of all gradients, relative to the largest element."""
    args = operands(sizes, dtype, count)
    real = (jnp.arange(count) < sum(sizes))[:, None]

    def main(rows, *weights):
        y = run(rows, *weights, jnp.array(sizes, jnp.int32))
        # Cotangents of the other rows are NaN, too.
        return jnp.where(real, y * jnp.where(real, 1, jnp.nan).astype(y.dtype), 0)

    found, back = jax.vjp(jax.jit(main), *args)
    wide = [jnp.asarray(each, jnp.float32) for each in args]
    wide[0] = jnp.where(real, wide[0], 0)
    want, wanted_back = jax.vjp(jax.jit(lambda *a: reference(*a, sizes)), *wide)
    cotangent = np.random.default_rng(1).standard_normal(want.shape)
    cotangent = jnp.asarray(cotangent, jnp.float32)
    to_rows, *to_weights = jax.jit(back)(cotangent.astype(found.dtype))
    gots = found, jnp.where(real, to_rows, 0), *to_weights
    assert found.dtype == args[0].dtype
    wanted = want, *jax.jit(wanted_back)(cotangent)
    for got, each in zip(gots, wanted, strict=True):
        got = np.asarray(got, np.float32)
        yield np.abs(got - each).max() / np.abs(each).max()


@pytest.mark.few(2)
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


OPERANDS = {
    "rows": jax.ShapeDtypeStruct((8, 16), jnp.float32),
    "gate_up": jax.ShapeDtypeStruct((4, 16, 2, 8), jnp.float32),
    "down": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32),
    "group_sizes": jax.ShapeDtypeStruct((4,), jnp.int32),
}
MATRICES = r"gate_up and down must be \[L, H, 2, F\] and \[L, F, H\] with L = 4"


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "words"),
    [
        ("rows", (1, 8, 16), "float32", r"rows and group_sizes must be \[N, H\]"),
        ("rows", (8, 16), "int8", "rows must be bfloat16, float16 or float32"),
        ("gate_up", (8, 16, 2, 8), "float32", MATRICES),
        ("gate_up", (4, 16, 16), "float32", MATRICES),
        ("down", (4, 16, 8), "float32", MATRICES),
        ("group_sizes", (4,), "float32", "group_sizes must be int32"),
        ("group_sizes", (), "int32", r"rows and group_sizes must be \[N, H\]"),
    ],
)
@pytest.mark.parametrize("way", [experts.auto, experts.ragged_dot, experts.Padded(8)])
def test_operands_that_do_not_fit(way, name, shape, dtype, words):
    assert jax.eval_shape(way, *OPERANDS.values()).shape == (8, 16)
    given = OPERANDS | {name: jax.ShapeDtypeStruct(shape, dtype)}
    with pytest.raises((ValueError, TypeError), match=rf"^jax_ep.experts.\w+: {words}"):
        jax.eval_shape(way, *given.values())


@pytest.mark.parametrize("largest", [0, 2.0, True])
def test_largest_must_be_positive(largest):
    with pytest.raises(ValueError, match=r"^jax_ep.experts.Padded: largest .*got"):
        experts.Padded(largest)


def test_hopper_names_what_it_lacks(monkeypatch):
    hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(kernels, "built", lambda: True)
    assert experts.hopper_obstacle(H, F, hopper) is None
    assert experts.hopper_obstacle(100, 3, hopper) is None  # columns are padded
    monkeypatch.setattr(kernels, "built", lambda: False)
    found = experts.hopper_obstacle(H, F, hopper)
    assert found is not None
    assert found.startswith("a CUDA module with its kernels")
    assert found.endswith("got none")
    newer = types.SimpleNamespace(
        platform="gpu", compute_capability="10.0", device_kind="NVIDIA B200"
    )
    found = experts.hopper_obstacle(H, F, newer)
    assert found == "GPUs of compute capability 9.0, got NVIDIA B200 10.0"


def test_hopper_says_where_it_does_not_run(monkeypatch):
    monkeypatch.setattr(kernels, "built", lambda: False)
    assert experts.hopper_obstacle(H, 100) is not None
    rows, gate_up, down = operands((1, 1, 1), "bfloat16")
    with pytest.raises(ValueError, match=r"^jax_ep.experts.hopper: must have .*, got"):
        experts.hopper(rows, gate_up[..., :100], down[:, :100], jnp.ones(L, jnp.int32))


def test_hopper_refuses_float32(monkeypatch):
    grouped_kernels.pretend(monkeypatch)
    with pytest.raises(
        ValueError, match=r"^jax_ep.experts.hopper: must have rows .*got float32"
    ):
        experts.hopper(*operands((1, 1, 1)), jnp.ones(L, jnp.int32))


def largest_error(name, sizes, count):
    reference = functools.partial(formula, largest=count)
    return max(both_ways(getattr(experts, name), reference, sizes, "bfloat16", count))


def curvature(run, sizes, dtype, count):
    """Errors of a Hessian times a vector for every argument, like `both_ways`."""
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
@pytest.mark.parametrize("name", ["hopper", "padded"])
def test_second_derivatives_equal_the_formulas(name, monkeypatch):
    if name == "hopper":
        grouped_kernels.fake(monkeypatch)
    run = experts.Padded(32) if name == "padded" else getattr(experts, name)
    dtype, bound = ("bfloat16", 0.05) if name == "hopper" else ("float32", 1e-5)
    assert max(curvature(run, (10, 0, 30), dtype, N)) < bound


def test_no_derivative_reads_cotangents_past_the_end():
    """Nor do second derivatives, if the last group has room for more rows."""
    sizes = (10, 0, 30)

    def run(*args):
        return experts.Padded(32)(*args, jnp.array(sizes, jnp.int32))

    def both(*args):
        y, back = jax.vjp(run, *args)
        return y, back(jnp.where(real, y, jnp.nan))

    real = (jnp.arange(N) < sum(sizes))[:, None]
    (y, grads), back = jax.vjp(jax.jit(both), *operands(sizes))
    ones = jax.tree.map(jnp.ones_like, grads)
    to_rows, *to_weights = jax.jit(back)((jnp.where(real, y, jnp.nan), ones))
    for found in (jnp.where(real, to_rows, 0), *to_weights):
        assert np.isfinite(found).all()
        assert np.any(found)


@pytest.mark.parametrize(("sizes", "count"), HOPPER_SIZES, ids=str)
def test_hopper_equals_the_formula(sizes, count, monkeypatch):
    """With gradients; on GPUs with the kernels, elsewhere with JAX in their place."""
    if jax.default_backend() == "cpu":
        grouped_kernels.fake(monkeypatch)
    skip_without_hopper()
    assert largest_error("hopper", sizes, count) < 0.03


@pytest.mark.gpu
def test_second_derivatives_on_hopper():
    skip_without_hopper()
    assert max(curvature(experts.auto, (7, 0, 3, 70), "bfloat16", 100)) < 0.05


HOPPER, AMPERE, OLDER = ("9.0", "8.0", "7.5")


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "wanted"),
    [
        ("gpu", HOPPER, "bfloat16", "hopper"),
        ("gpu", HOPPER, "float16", "hopper"),
        ("gpu", HOPPER, "float32", "portable"),
        ("gpu", HOPPER, "float64", "ragged_dot"),
        ("gpu", AMPERE, "bfloat16", "portable"),
        ("gpu", "12.0", "float32", "portable"),
        ("gpu", OLDER, "bfloat16", "ragged_dot"),
        ("gpu", "gfx942", "bfloat16", "ragged_dot"),
        ("cpu", "", "float32", "portable"),
        ("cpu", "", "float64", "ragged_dot"),
    ],
)
def test_auto_is_the_first_that_runs(platform, capability, dtype, wanted, monkeypatch):
    device = types.SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind="one"
    )
    monkeypatch.setattr(kernels, "built", lambda: True)
    case = interface.Case(device, dtype)
    assert of_rows.first(case).name == wanted
    names = [each.name for each in of_rows.IN_ORDER]
    assert [*of_rows.reasons(case)] == names[: names.index(wanted)]
    plain = wanted == "ragged_dot" or platform == "cpu"
    assert experts.auto.reads_tail(case) == plain


def test_auto_runs_what_it_has_chosen(monkeypatch):
    device = jax.devices()[-1]
    case = interface.Case(device, "float32")

    def apply(found, given, *_):
        assert given == case
        return found.name

    for each in of_rows.IN_ORDER:
        monkeypatch.setattr(type(each), "apply", apply)
    args = operands((10, 0, 30))
    found = experts.auto(*args, jnp.ones(L, jnp.int32), device=device)
    assert found == of_rows.first(case).name


def test_auto_warns_once_of_dense_products(monkeypatch):
    device = jax.devices()[-1]
    monkeypatch.setattr(of_rows, "_told", set())
    monkeypatch.setattr(of_rows, "shortfall", lambda _: "slow; do otherwise")
    args = (*operands((10, 0, 30)), jnp.ones(L, jnp.int32))
    words = r"^jax_ep.experts.auto: slow; do otherwise"
    with pytest.warns(RuntimeWarning, match=words):
        experts.auto(*args, device=device)
    experts.auto(*args, device=device)


def test_density_is_asked_for_in_a_trace_under_a_mesh():
    """The answer is compiled outside of the caller's trace and mesh."""
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
