"""jax_ep.experts.fp8 on one rank's rows, against the formula in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import experts
from jax_ep._experts import (
    devices,
    grouped,
    hopper_fp8,
    kernels,
    operations,
    select,
)
from support import fp8_experts as formula
from support import helpers, quantizer
from support.errors import check_form, check_state, raises
from support.fp8_experts import cosine, dispatched, distance
from support.grouped_kernels import fake_kernels as fake_kernels

pytestmark = pytest.mark.usefixtures("quick_compiles")

H, F, COUNT = 256, 128, 48
SIZES = (10, 0, 25)
# Another order of sums may change a code of h to its neighbour, which is a 16th off.
# Sums of 14 bits change more codes.
ON_HOPPER = devices.device_obstacle() is None
CLOSE = 1e-2 if ON_HOPPER else 3e-3


def clipped(gate, up):
    """The activation of gpt-oss."""
    gate = jnp.minimum(gate, 1.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _clipped_slopes(gate):
    low = np.minimum(gate, 1.0)
    s = 1 / (1 + np.exp(-1.702 * low))
    passed = np.where(gate == 1, 0.5, gate < 1)  # JAX splits a tie
    return low * s, passed * (s + 1.702 * low * s * (1 - s))


CLIPPED = formula.Activation(
    of=lambda g, u: _clipped_slopes(g)[0] * (u + 1),
    to_gate=lambda g, u: _clipped_slopes(g)[1] * (u + 1),
    to_up=lambda g, u: _clipped_slopes(g)[0],
)
BIASES = ("gate_bias", "up_bias", "down_bias")


def with_port(d, port):
    """`d`, whose rows get their gradient through `port`."""
    field = "tokens" if d.format == "bf16" else "grad_port"
    return dataclasses.replace(d, **{field: port})


def port_of(d):
    return jnp.asarray(d.tokens if d.format == "bf16" else d.grad_port)


def both_ways(d, gate_up, down, dy, **options):
    """y, and gradients by name, with a cotangent that is NaN past the groups."""
    real = (np.arange(len(dy)) < d.group_sizes.sum())[:, None]
    named = {name: options.pop(name) for name in BIASES if name in options}

    def run(port, gate_up, down, named):
        return experts.fp8(with_port(d, port), gate_up, down, **named, **options)

    y, back = jax.vjp(jax.jit(run), port_of(d), gate_up, down, named)
    cotangent = jnp.asarray(np.where(real, dy, np.nan), y.dtype)
    to_rows, to_gate_up, to_down, to_named = jax.jit(back)(cotangent)
    real = real[:, 0]
    return y[real], {
        "rows": to_rows[real],
        "gate_up": to_gate_up,
        "down": to_down,
        **to_named,
    }


@pytest.mark.parametrize(
    ("name", "biased"),
    [("bf16", False), ("fp8_block128", True), ("fp8_block128_e8m0", False)],
)
def test_equals_the_formula(name, biased):
    """With empty groups and NaN past the groups; unquantised operands differ."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, name)
    rng = np.random.default_rng(1)
    dy = rng.standard_normal((COUNT, H)).astype(np.float32)
    biases, options = (None, None, None), {}
    if biased:
        biases = tuple(
            rng.standard_normal((3, size)).astype(np.float32) for size in (F, F, H)
        )
        options = dict(zip(BIASES, biases, strict=True)) | {"activation": clipped}
    y, grads = both_ways(d, gate_up, down, dy, **options)
    want = formula.experts(
        rows,
        gate_up,
        down,
        SIZES,
        row_format="fp8_block128" if name == "bf16" else name,
        dy=dy[: sum(SIZES)],
        biases=biases,
        activation=CLIPPED if biased else formula.SWIGLU,
    )
    assert distance(y, want.y) < CLOSE
    for field, got in grads.items():
        assert got.dtype == np.float32
        assert distance(got, getattr(want, field)) < CLOSE, field
    assert not np.any(grads["gate_up"][1])
    if not biased:
        d = dispatched(rows, SIZES)
        plain, _ = jax.vjp(
            lambda *a: experts.ragged_dot(*a, d.group_sizes), rows, gate_up, down
        )
        assert 0.03 < distance(y, plain[: sum(SIZES)]) < 0.1


def test_an_activation_may_have_parameters():
    """Parameters in its closure get gradients, to which no row past groups adds."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    real = (np.arange(COUNT) < sum(SIZES))[:, None]

    def loss(run, slope):
        y = run(activation=lambda gate, up: jax.nn.silu(gate * slope) * up)
        return jnp.sum(jnp.where(real, y, jnp.nan)[: sum(SIZES)] ** 2)

    def fp8(**options):
        return experts.fp8(d, gate_up, down, **options)

    def plain(**options):
        args = np.nan_to_num(rows), gate_up, down, d.group_sizes
        return experts.ragged_dot(*args, **options)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, run)))(1.5) for run in (fp8, plain)
    )
    np.testing.assert_allclose(got, want, rtol=0.05)


class Untidy(operations.Operations):
    """Leaves NaN past the groups, as kernels may."""

    def fprop(self, rows, weights, which, sizes, dtype, bias=None):
        given = rows, weights, which, sizes, dtype, bias
        return untidy(super().fprop(*given), sizes)

    def dgrad(self, cotangents, weights, which, sizes, dtype):
        return untidy(super().dgrad(cotangents, weights, which, sizes, dtype), sizes)


def untidy(rows, sizes):
    has_token = operations.rows_in_groups(sizes, len(rows))[:, None]
    return jnp.where(has_token, rows, jnp.nan)


def test_nothing_reads_rows_past_the_groups(monkeypatch):
    """Not even when sums of the last group reach into them."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    dy = np.random.default_rng(1).standard_normal((COUNT, H)).astype(np.float32)
    biases = {"gate_bias": np.ones((3, F)), "down_bias": np.ones((3, H))}
    biases = {name: np.float32(value) for name, value in biases.items()}

    def run(slope):
        def activation(gate, up):
            return jax.nn.silu(gate * slope) * up

        return both_ways(d, gate_up, down, dy, activation=activation, **biases)

    def slope_grad():
        def loss(slope):
            y = experts.fp8(
                d, gate_up, down, activation=lambda g, u: jax.nn.silu(g * slope) * u
            )
            return jnp.sum(y[: sum(SIZES)] ** 2)

        return jax.jit(jax.grad(loss))(1.5)

    def reaching(self, rows, cotangents, sizes, dtype):
        whole = sizes.at[-1].add(rows.shape[0] - jnp.sum(sizes))
        return wgrad(self, rows, cotangents, whole, dtype)

    # The operations that every device has, with XLA's products.
    monkeypatch.setattr(select, "operations", operations.Operations)
    monkeypatch.setattr(grouped, "everywhere", grouped.Ragged)
    want, wanted = run(1.5)
    wanted_slope = slope_grad()
    wgrad = grouped.Ragged.wgrad
    monkeypatch.setattr(grouped.Ragged, "wgrad", reaching)
    monkeypatch.setattr(select, "operations", Untidy)
    y, grads = run(1.5)
    helpers.assert_bits(y, want)
    for name, got in grads.items():
        np.testing.assert_allclose(got, wanted[name], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope_grad(), wanted_slope, rtol=1e-5)


def test_rows_are_rounded_once_to_their_dtype():
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    exact, other = (
        experts.fp8(dispatched(rows, SIZES, "fp8_block128", dtype), gate_up, down)
        for dtype in ("float32", "bfloat16")
    )
    assert other.dtype == jnp.bfloat16
    real = slice(sum(SIZES))
    helpers.assert_bits(other[real], exact[real].astype(jnp.bfloat16))


def test_rows_of_a_plain_dispatch_become_the_same_codes():
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    rows = rows.astype(jnp.bfloat16)
    run = jax.jit(experts.fp8)
    here, there = (
        run(dispatched(rows, SIZES, name, "bfloat16"), gate_up, down)
        for name in ("bf16", "fp8_block128")
    )
    helpers.assert_bits(here[: sum(SIZES)], there[: sum(SIZES)])


def test_the_activation_is_quantised_unrounded():
    """Its float32 values are quantised, not those rounded to the tokens' dtype."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    rows = rows[: sum(SIZES)]
    made = operations.quantized_rows(jnp.asarray(rows, jnp.bfloat16))
    inner = operations.Inner(None, None, (), None, kernels.SWIGLU)
    weights = experts.quantize_weights(gate_up, down)
    h, gate_up_rows = select.operations().gate_up(
        made, weights, jnp.array(SIZES), inner, True, jnp.bfloat16
    )
    assert gate_up_rows.dtype == jnp.bfloat16
    assert gate_up_rows.shape == (len(rows), 2, F)
    values = rows.astype(jnp.bfloat16).astype(np.float32)
    want = formula.experts(values, gate_up, down, SIZES).h
    codes, scales = quantizer.quantize(want.astype(np.float32), "fp8_block128")
    np.testing.assert_allclose(h.scales, scales, rtol=1e-3 if ON_HOPPER else 1e-5)
    same = np.mean(np.asarray(h.values).view(np.uint8) == codes.view(np.uint8))
    rounded, _ = quantizer.quantize(want.astype(jnp.bfloat16), "fp8_block128")
    others = np.mean(rounded.view(np.uint8) == codes.view(np.uint8))
    if ON_HOPPER:  # bit for bit in test_fp8_kernels.py
        assert same > 0.98
    else:
        assert same > 0.999 > 0.99 > others


@pytest.mark.parametrize("size", [1e-10, 1e-20])
def test_small_cotangents_keep_their_direction(size):
    """A mean loss has such cotangents; the tokens' floor, 1e-4, would zero them."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    dy = np.random.default_rng(1).standard_normal((COUNT, H)).astype(np.float32)
    _, wanted = both_ways(d, gate_up, down, dy)
    _, found = both_ways(d, gate_up, down, np.float32(size) * dy)
    for field, got in found.items():
        scaled = np.asarray(got, np.float64) / size
        assert distance(scaled, wanted[field]) < CLOSE, field


@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_nan_stays_in_its_row(wgrad):
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    rows[12, 130] = np.nan
    broken = dispatched(rows, SIZES, "fp8_block128")
    dy = np.random.default_rng(1).standard_normal((COUNT, H)).astype(np.float32)
    y, grads = both_ways(d, gate_up, down, dy, wgrad=wgrad)
    found, found_grads = both_ways(broken, gate_up, down, dy, wgrad=wgrad)
    assert np.isnan(found[12]).all()
    others = np.arange(sum(SIZES)) != 12
    helpers.assert_bits(found[others], y[others])
    helpers.assert_bits(found_grads["rows"][others], grads["rows"][others])
    for field in ("gate_up", "down"):
        helpers.assert_bits(found_grads[field][0], grads[field][0])
        assert not np.any(found_grads[field][1])
        assert np.isnan(found_grads[field][2]).any()


@pytest.mark.parametrize("name", ["fp8_block128", "fp8_block128_e8m0"])
def test_gradients_of_weights_in_fp8(name):
    """Near those in bfloat16, in every row and column; nothing else changes."""
    sizes = (150, 0, 40)
    rows, gate_up, down = formula.operands(sizes, H, F, 200)
    d = dispatched(rows, sizes, name)
    dy = np.random.default_rng(1).standard_normal((200, H)).astype(np.float32)
    dy *= np.exp2(np.arange(200) % 12 - 6)[:, None]  # tokens weigh differently
    y, wanted = both_ways(d, gate_up, down, dy)
    same, found = both_ways(d, gate_up, down, dy, wgrad="fp8")
    helpers.assert_bits(same[: sum(sizes)], y[: sum(sizes)])
    helpers.assert_bits(found["rows"], wanted["rows"])
    for field in ("gate_up", "down"):
        got, want = (np.asarray(each[field], np.float64) for each in (found, wanted))
        assert got.any()
        assert not np.array_equal(got, want)
        assert not got[1].any()
        assert cosine(got, want) > 0.998
        for group in (0, 2):
            one, other = (
                each[group].reshape(len(each[group]), -1) for each in (got, want)
            )
            assert min(map(cosine, one, other)) > 0.99
            assert min(map(cosine, one.T, other.T)) > 0.99


def test_no_rows_at_all():
    rows, gate_up, down = formula.operands((0, 0, 0), H, F, COUNT)
    d = dispatched(rows, (0, 0, 0), "fp8_block128")
    y, grads = both_ways(d, gate_up, down, np.zeros_like(rows))
    assert y.shape == (0, H)
    for name in ("gate_up", "down"):
        np.testing.assert_array_equal(grads[name], 0)


def test_codes_made_before():
    """Codes beside the masters, whose values are not read then, or in their place."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    codes = experts.quantize_weights(gate_up, down, backward=True)
    dy = np.random.default_rng(1).standard_normal((COUNT, H)).astype(np.float32)
    y, grads = both_ways(d, gate_up, down, dy)
    masters = np.full_like(gate_up, np.nan), np.full_like(down, np.nan)
    beside, beside_grads = both_ways(d, *masters, dy, quantized=codes)
    helpers.assert_bits(beside, y)
    jax.tree.map(helpers.assert_bits, beside_grads, grads)

    def alone(port, codes):
        return experts.fp8(with_port(d, port), codes, None)

    found, back = jax.vjp(alone, port_of(d), codes)
    to_rows, to_codes = back(jnp.asarray(np.where(np.isnan(rows), 0, dy)))
    real = slice(sum(SIZES))
    np.testing.assert_allclose(found[real], y, rtol=1e-5, atol=1e-5)
    assert distance(to_rows[real], grads["rows"]) < CLOSE
    for each in jax.tree.leaves(to_codes):
        assert not np.any(np.asarray(each).view(np.uint8))


def test_codes_are_a_pytree_of_arrays():
    """Codes can be flattened, stored in a checkpoint and restored, and scanned over."""
    layers = 3
    made = [formula.operands(SIZES, H, F, COUNT, seed) for seed in range(layers)]
    rows = np.nan_to_num(made[0][0])
    stack = [np.stack(each) for each in zip(*(m[1:] for m in made), strict=True)]
    codes = jax.vmap(lambda *each: experts.quantize_weights(*each).canonical())(*stack)
    leaves, kind = jax.tree.flatten(codes)
    assert len(leaves) == 4
    codes = jax.tree.unflatten(kind, [np.asarray(leaf) for leaf in leaves])

    def layer(rows, codes):
        d = dispatched(np.zeros((COUNT, H)), SIZES)
        return experts.fp8(dataclasses.replace(d, tokens=rows), codes, None), None

    found, _ = jax.jit(lambda rows, codes: jax.lax.scan(layer, rows, codes))(
        jnp.asarray(rows), codes
    )
    for _, gate_up, down in made:
        d = dispatched(rows, SIZES)
        rows = np.nan_to_num(jax.jit(experts.fp8)(d, gate_up, down))
    assert distance(found[: sum(SIZES)], rows[: sum(SIZES)]) < 0.05


def products(policy):
    """How many grouped matmuls a rematerialised layer's gradients have."""
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    codes = experts.quantize_weights(gate_up, down)
    d = dispatched(rows, SIZES)

    def loss(port, gate_up, down):
        y = experts.fp8(with_port(d, port), gate_up, down, quantized=codes)
        return jnp.sum(jnp.sin(y))

    run = jax.checkpoint(loss, policy=policy)
    program = jax.make_jaxpr(jax.value_and_grad(run, (0, 1, 2)))
    return count(program(rows, gate_up, down).jaxpr)


def count(jaxpr):
    """How many grouped matmuls a program has, nested ones included."""
    found = 0
    for equation in jaxpr.eqns:
        # A loop on CPUs.
        found += equation.primitive.name.startswith(("ragged_dot", "while"))
        for each in jax.tree.leaves(equation.params):
            inner = getattr(each, "jaxpr", each)
            found += count(inner) if hasattr(inner, "eqns") else 0
    return found


def test_remat_by_name_repeats_no_gate_up(monkeypatch):
    for name in ("device_obstacle", "portable_obstacle"):
        monkeypatch.setattr(devices, name, lambda *_: "as on a CPU")
    named = jax.checkpoint_policies.save_only_these_names("jax_ep_gate_up")
    # 2 forward and 4 backward; without a policy the forward pass is repeated.
    assert products(jax.checkpoint_policies.everything_saveable) == 6
    assert products(None) == 8
    assert products(named) == 7


@pytest.mark.parametrize(("shared", "wgrad"), [(True, "bf16"), (False, "fp8")])
def test_vmap(shared, wgrad):
    made = [formula.operands(SIZES, H, F, COUNT, seed) for seed in range(2)]
    rows = np.nan_to_num(np.stack([m[0] for m in made]))
    weights = [np.stack(each) for each in zip(*(m[1:] for m in made), strict=True)]
    axis = None if shared else 0
    if shared:
        weights = [each[0] for each in weights]

    def loss(rows, gate_up, down):
        d = dispatched(np.zeros((COUNT, H)), SIZES)
        own = dataclasses.replace(d, tokens=rows)
        y = experts.fp8(own, gate_up, down, wgrad=wgrad)
        return jnp.sum(jnp.sin(y[: sum(SIZES)]))

    def whole(*args):
        return jnp.sum(jax.vmap(loss, (0, axis, axis))(*args))

    def one_by_one(rows, gate_up, down):
        pairs = [(gate_up, down)] * 2 if shared else zip(gate_up, down, strict=True)
        return sum(loss(r, *pair) for r, pair in zip(rows, pairs, strict=True))

    got, want = (
        jax.jit(jax.grad(each, (0, 1, 2)))(rows, *weights)
        for each in (whole, one_by_one)
    )
    # Gradients of rows past the groups are unspecified.
    used = [[grads[0][:, : sum(SIZES)], *grads[1:]] for grads in (got, want)]
    for a, b in zip(*used, strict=True):
        assert distance(a, b) < CLOSE


@pytest.mark.parametrize("name", ["bf16", "fp8_block128"])
def test_mxfp4_weights(name):
    """Rows are in the form of the dispatch: bfloat16 or codes."""
    hidden, inner = (96, 64) if name == "bf16" else (H, F)
    rows, gate_up, down = formula.operands(SIZES, hidden, inner, COUNT)
    rows = rows.astype(jnp.bfloat16)
    codes = experts.quantize_weights(gate_up, down, format="mxfp4")
    y = jax.jit(experts.fp8)(dispatched(rows, SIZES, name, "bfloat16"), codes, None)
    want = formula.experts(
        rows,
        gate_up,
        down,
        SIZES,
        row_format=None if name == "bf16" else name,
        weight_format="mxfp4",
    )
    # The result is rounded to bfloat16.
    assert distance(y[: sum(SIZES)], want.y) < 4e-3
    one = dispatched(rows[:1], (1, 0, 0), name, "bfloat16")
    alone = jax.jit(experts.fp8)(one, codes, None)
    np.testing.assert_allclose(
        np.float32(alone[0]), np.float32(y[0]), rtol=0.02, atol=0.02
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "many"),
    [("bf16", False), ("fp8_block128", False), ("fp8_block128", True)],
)
def test_gradients_pass_frozen_weights(name, many, request, monkeypatch):
    """They reach rows, biases and what an activation closes over, but no codes."""
    taken: list[str] = []
    if many:  # with kernels, codes become those of fp8_block128
        if jax.default_backend() == "cpu":
            taken = request.getfixturevalue("fake_kernels")
        monkeypatch.setattr(hopper_fp8, "MANY_ROWS", 1)
    hidden, inner = (96, 64) if name == "bf16" else (H, F)
    rows, gate_up, down = formula.operands(SIZES, hidden, inner, COUNT)
    rows = rows.astype(jnp.bfloat16)
    weights = experts.quantize_weights(gate_up, down, format="mxfp4", backward=True)
    d = dispatched(rows, SIZES, name, "bfloat16")
    rng = np.random.default_rng(2)
    biases = {
        "gate_bias": rng.standard_normal((3, inner)),
        "up_bias": rng.standard_normal((3, inner)),
        "down_bias": rng.standard_normal((3, hidden)),
    }
    biases = jax.tree.map(lambda each: jnp.asarray(each, jnp.float32), biases)
    dy = rng.standard_normal((COUNT, hidden)).astype(jnp.bfloat16)
    real = (np.arange(COUNT) < sum(SIZES))[:, None]

    def loss(port, biases, weights, scale):
        def activation(gate, up):
            return jax.nn.silu(gate) * up * scale

        y = experts.fp8(
            with_port(d, port), weights, None, activation=activation, **biases
        )
        return jnp.sum(jnp.where(real, y * dy, 0).astype(jnp.float32))

    grad = jax.jit(jax.grad(loss, range(4), allow_int=True))
    to_rows, to_biases, to_weights, to_scale = grad(port_of(d), biases, weights, 1.0)
    want = formula.experts(
        rows,
        gate_up,
        down,
        SIZES,
        row_format=None if name == "bf16" else name,
        weight_format="mxfp4",
        dy=dy.astype(np.float64),
        biases=tuple(np.asarray(biases[field], np.float64) for field in BIASES),
    )
    assert distance(to_rows[: sum(SIZES)], want.rows) < 1e-2
    for field, gradient in to_biases.items():
        assert distance(gradient, getattr(want, field)) < 1e-2, field
    assert np.isfinite(to_scale)
    assert to_scale != 0
    assert to_weights.gate_up.dtype == jax.dtypes.float0
    if many and jax.default_backend() == "cpu":
        assert taken.count("fp8_fprop") == 2


def test_gradients_point_where_those_of_bfloat16_do():
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    d = dispatched(rows, SIZES, "fp8_block128")
    dy = np.random.default_rng(1).standard_normal((COUNT, H)).astype(np.float32)
    _, grads = both_ways(d, gate_up, down, dy)
    real = slice(sum(SIZES))

    def plain(*args):
        return experts.ragged_dot(*args, d.group_sizes)

    _, back = jax.vjp(plain, np.nan_to_num(rows), gate_up, down)
    wanted = back(jnp.asarray(np.where(np.isnan(rows), 0, dy)))
    assert cosine(grads["rows"], wanted[0][real]) > 0.997
    assert cosine(grads["gate_up"], wanted[1]) > 0.997
    assert cosine(grads["down"], wanted[2]) > 0.997


ROWS, GATE_UP, DOWN = formula.operands((4,), H, F, 4)


def mistake(**changes):
    d = dispatched(ROWS, (4,), changes.pop("name", "bf16"))
    given = {"gate_up": GATE_UP, "down": DOWN} | changes
    return lambda: experts.fp8(d, **given)


def coded(**changes):
    return dataclasses.replace(experts.quantize_weights(GATE_UP, DOWN), **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "mxfp8"}, ("formats", "'mxfp8'")),
        ({"gate_up": GATE_UP[..., :96], "down": DOWN[:, :96]}, ("128", "F = 96")),
        ({"gate_up": GATE_UP[:, :128], "down": DOWN[..., :128]}, ("256",)),
        ({"down": None}, ("down",)),
        ({"wgrad": "fp4"}, ("wgrad", "'fp4'")),
        ({"wgrad": ["fp8"]}, ("wgrad", "['fp8']")),
        ({"gate_up": GATE_UP.reshape(1, H, -1)}, ("gate_up and down",)),
        ({"quantized": GATE_UP}, ("quantized", "QuantizedWeights")),
        ({"gate_up": "codes"}, ("down and quantized",)),
        ({"quantized": "half"}, ("quantized must hold",)),
        ({"gate_up": "wrong", "down": None}, ("gate_up_scales", "float32")),
        ({"gate_up": "flat", "down": None}, ("must hold codes",)),
    ],
)
def test_mistakes(changes, words):
    makers = {
        "codes": coded,
        "half": lambda: experts.quantize_weights(GATE_UP[:, :128], DOWN[..., :128]),
        "wrong": lambda: coded(gate_up_scales=GATE_UP),
        "flat": lambda: coded(gate_up=coded().gate_up.reshape(1, H, -1)),
    }
    changes = {
        key: makers[value]() if isinstance(value, str) and value in makers else value
        for key, value in changes.items()
    }
    with raises() as caught:
        mistake(**changes)()
    check_form(caught, "experts.fp8", *words)


def test_a_derivative_needs_the_port():
    d = dispatched(ROWS, (4,), "fp8_block128")
    d = dataclasses.replace(d, grad_port=None)

    @jax.jit
    def run(gate_up):
        return experts.fp8(d, gate_up, DOWN)

    assert run(GATE_UP).shape == ROWS.shape
    with raises() as caught:
        jax.grad(lambda gate_up: jnp.sum(run(gate_up)))(GATE_UP)
    check_form(caught, "experts.fp8", "grad_port")


@pytest.mark.parametrize("of", ["masters", "rows", "cotangent"])
def test_second_derivatives_are_refused(of):
    d = dispatched(ROWS, (4,), "bf16")

    def loss(port, gate_up, factor):
        return jnp.sum(factor * experts.fp8(with_port(d, port), gate_up, DOWN))

    at = {"rows": 0, "masters": 1, "cotangent": 2}[of]
    operands = port_of(d), GATE_UP, jnp.float32(2)

    def gradient(*operands):
        return jnp.sum(jax.grad(loss, 1)(*operands))

    jax.eval_shape(gradient, *operands)
    with raises() as caught:
        jax.eval_shape(jax.grad(gradient, at), *operands)
    check_state(caught, "experts.fp8", "only first derivatives", "jax_ep.experts.auto")


@pytest.mark.parametrize("name", ["auto", "ragged_dot", "hopper"])
def test_others_take_no_codes(name):
    with raises() as caught:
        getattr(experts, name)(ROWS, coded(), None, np.array([4], np.int32))
    check_form(caught, f"experts.{name}", "QuantizedWeights", "experts.fp8")


@pytest.mark.few(1)
@pytest.mark.parametrize("by", ["reference", "kernels"])
def test_weights_in_mxfp4_take_rows_of_any_format(by, request):
    """Those of "mxfp8" are exact in bfloat16. Sizes are multiples of 32, not of 128."""
    if by == "kernels" and jax.default_backend() == "cpu":
        request.getfixturevalue("fake_kernels")
    hidden, inner = 96, 160
    rows, gate_up, down = formula.operands(SIZES, hidden, inner, COUNT)
    codes = experts.quantize_weights(gate_up, down, format="mxfp4")
    real = (np.arange(COUNT) < sum(SIZES))[:, None]
    found = []
    for name in ("mxfp8", "bf16"):
        d = dispatched(rows, SIZES, "mxfp8", "bfloat16")
        if name == "bf16":
            decoded = np.asarray(jax_ep.dequantize(d), np.float32)
            d = dispatched(decoded, SIZES, "bf16", "bfloat16")
        port = "tokens" if name == "bf16" else "grad_port"

        def loss(rows, d=d, port=port):
            y = experts.fp8(dataclasses.replace(d, **{port: rows}), codes, None)
            return jnp.sum(jnp.where(real, jnp.sin(y.astype(jnp.float32)), 0)), y

        grad, y = jax.jit(jax.grad(loss, has_aux=True))(jnp.asarray(getattr(d, port)))
        found.append((y[: sum(SIZES)], grad[: sum(SIZES)]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(
            *(np.asarray(x, np.float32) for x in (one, other))
        )
        assert np.any(np.asarray(one, np.float32))


@pytest.mark.few(2)
@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
@pytest.mark.parametrize("by", ["reference", "kernels"])
def test_a_pair_gives_the_same_bits(by, wgrad, request):
    """Gate and up apart as masters, with codes made before and in the call."""
    taken = []
    if by == "kernels" and jax.default_backend() == "cpu":
        taken = request.getfixturevalue("fake_kernels")
    rows, gate_up, down = formula.operands(SIZES, H, F, COUNT)
    gate_up, down = (jnp.asarray(each, jnp.bfloat16) for each in (gate_up, down))
    pair = gate_up[:, :, 0], gate_up[:, :, 1]
    d = dispatched(rows, SIZES, "fp8_block128", "bfloat16")
    real = (np.arange(COUNT) < sum(SIZES))[:, None]
    helpers.assert_bits(
        experts.quantize_weights(pair, down).gate_up,
        experts.quantize_weights(gate_up, down).gate_up,
    )
    found = []
    for given in (gate_up, pair):
        for made in (None, experts.quantize_weights(given, down, backward=True)):

            def loss(given, down, made=made):
                y = experts.fp8(d, given, down, quantized=made, wgrad=wgrad)
                return jnp.sum(jnp.where(real, jnp.sin(y.astype(jnp.float32)), 0))

            value, grads = jax.value_and_grad(loss, (0, 1))(given, down)
            if isinstance(given, tuple):
                grads = jnp.stack(grads[0], 2), grads[1]
            found.append((value, *grads))
    for other in found[1:]:
        jax.tree.map(helpers.assert_bits, found[0], other)
    assert not taken or "quantize_matrices" in taken
    assert not taken or ("fp8_wgrad" in taken) == (wgrad == "fp8")
