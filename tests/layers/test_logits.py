"""Router logits from products of bfloat16 parts, as on GPUs, tested on any device."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._layers import logits, routing
from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import N, config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROWS, HIDDEN, EXPERTS = 24, 96, 16
# Relative to the sum of magnitudes: several float32 roundings. Two parts have 2^-16.
NEAR = 2.0**-20
ROUNDED = 2.0**-8  # bfloat16's rounding
KERNELS = ["float32", "bfloat16"]


def plain(left, right):
    """The product in float32, with JAX's own derivatives."""
    left, right = (each.astype(jnp.float32) for each in (left, right))
    return jnp.dot(left, right, precision=jax.lax.Precision.HIGHEST)


@pytest.fixture
def any_dot(monkeypatch):
    """Multiplies in float32 on CPUs, as XLA lacks some bfloat16 layouts on some CPUs.

    Either way products are exact and are added in float32.
    """
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(logits, "_dot", plain)


def normal(seed, *shape, dtype="float32"):
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, dtype)


def operands(dtype="float32", ranks=1):
    tokens = normal(1, ranks * ROWS, HIDDEN, dtype="bfloat16")
    return tokens, normal(2, HIDDEN, EXPERTS, dtype=dtype)


def check(found, left, right):
    """Compares with the float64 product, allowing one rounding to the dtype."""
    left, right = (np.asarray(each, np.float64) for each in (left, right))
    wanted, room = left @ right, np.abs(left) @ np.abs(right)
    error = np.abs(np.asarray(found, np.float64) - wanted)
    rounding = ROUNDED * np.abs(wanted) if found.dtype == jnp.bfloat16 else 0
    assert np.all(error <= NEAR * room + rounding)


@pytest.mark.parametrize("scale", [1, 1e30, 1e-30, "mixed", "largest"])
@pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_products_against_float64(counts, scale, any_dot):
    """Products of each kind, with the largest and smallest numbers in one operand."""
    dtypes = ["bfloat16" if count == 1 else "float32" for count in counts]
    left = normal(1, ROWS, HIDDEN, dtype=dtypes[0]).astype(jnp.float32)
    right = normal(2, HIDDEN, EXPERTS).astype(jnp.float32)
    if scale == "mixed":
        right = right * 10.0 ** np.random.default_rng(3).integers(-28, 28, right.shape)
    elif scale == "largest":
        left = left / 2**10
        right = jnp.sign(right) * np.finfo(np.float32).max
    else:
        right = right * scale
    if counts[1] == 1:
        right = jnp.clip(right, -3e38, 3e38).astype(jnp.bfloat16).astype(jnp.float32)
    left, right = left.astype(dtypes[0]), right.astype(jnp.float32)
    found = jax.jit(logits._product, static_argnums=2)(left, right, counts)
    assert found.dtype == jnp.float32
    assert found.shape == (ROWS, EXPERTS)
    check(found, left, right)


def test_three_parts_are_all_of_a_float32():
    bits = np.random.default_rng(0).integers(0x0C800000, 0x7F7FFFFF, 4096)
    values = bits.astype(np.uint32).view(np.float32) * np.float32([1, -1] * 2048)
    parts = jax.jit(logits._split, static_argnums=1)(values, 3)
    assert [part.dtype for part in parts] == [jnp.bfloat16] * 3
    np.testing.assert_array_equal(
        sum(np.asarray(part, np.float64) for part in parts), values
    )


# The last is a NaN whose upper half equals that of infinity.
STRANGE = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001], np.uint32)


@pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("side", [0, 1])
def test_infinities_and_nan_are_those_of_the_plain_product(side, counts, any_dot):
    """Also multiplied with numbers whose smaller parts are 0."""
    given = [
        np.array(each.astype(jnp.bfloat16), np.float32)
        for each in (normal(1, ROWS, HIDDEN), normal(2, HIDDEN, EXPERTS))
    ]
    if counts[1 - side] > 1:
        given[1 - side][:, ::2] *= 1 + 2.0**-12  # parts that are not 0
    values = STRANGE.view(np.float32)[: 4 if counts[side] > 1 else 3]
    for place, value in enumerate(values):
        at = (2 * place, 3) if side == 0 else (3, 2 * place)
        given[side][at] = value
    found = jax.jit(logits._product, static_argnums=2)(*given, counts)
    wanted = plain(*map(jnp.asarray, given))
    for kind in (np.isposinf, np.isneginf, np.isnan):
        np.testing.assert_array_equal(kind(found), kind(wanted))
    assert np.isinf(wanted).any()
    assert np.isnan(wanted).any()
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [*KERNELS, "float16"])
def test_logits_and_gradients_against_float64(dtype, any_dot):
    tokens, kernel = operands(dtype)
    cotangent = normal(4, ROWS, EXPERTS)

    @jax.jit
    def run(tokens, kernel):
        found, back = jax.vjp(logits.by_parts, tokens, kernel)
        return found, *back(cotangent)

    found, to_tokens, to_kernel = run(tokens, kernel)
    assert (to_tokens.dtype, to_kernel.dtype) == (jnp.bfloat16, dtype)
    check(found, tokens, kernel)
    check(to_tokens, cotangent, kernel.T)
    if dtype == "float16":
        np.testing.assert_allclose(
            to_kernel, np.float64(tokens).T @ np.float64(cotangent), rtol=1e-2
        )
    else:
        check(to_kernel, tokens.T, cotangent)


def derivative(product, order, left, right):
    """The derivative of this order: gradients of a sum of gradients, and so on."""

    def total_of_gradients(value):
        def total(*args):
            grads = jax.grad(value, argnums=(0, 1))(*args)
            return sum(jnp.sum(jnp.sin(grad)) for grad in grads)

        return total

    def value(left, right):
        return jnp.sum(jnp.sin(product(left, right)))

    for _ in range(order - 1):
        value = total_of_gradients(value)
    return jax.jit(jax.grad(value, argnums=(0, 1)))(left, right)


def check_derivatives(found, left, right, order, room):
    """Compares with derivatives in float64."""
    with jax.enable_x64(True):
        given = (np.asarray(each, np.float64) for each in (left, right))
        wanted = jax.device_get(derivative(jnp.dot, order, *given))
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.dtype == np.float64
        error = np.abs(np.asarray(ours, np.float64) - theirs)
        assert error.max() < room * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("counts", "order"),
    [((1, 1), 2), ((1, 3), 2), ((3, 1), 2), ((3, 3), 2), ((1, 3), 3)],
)
def test_higher_derivatives(counts, order, any_dot):
    """For float32 operands, so that nothing is rounded to bfloat16."""
    left, right = normal(1, 6, 8) / 8, normal(2, 8, 4) / 8
    if counts[0] == 1:
        left = left.astype(jnp.bfloat16).astype(jnp.float32)
    if counts[1] == 1:
        right = right.astype(jnp.bfloat16).astype(jnp.float32)
    found = derivative(lambda *args: logits._product(*args, counts), order, left, right)
    check_derivatives(found, left, right, order, 1e-5)


@pytest.mark.parametrize("dtype", KERNELS)
def test_second_derivatives_of_the_logits(dtype, any_dot):
    """First derivatives by tokens are rounded to bfloat16 in between."""
    tokens, kernel = operands(dtype)
    tokens, kernel = tokens / 8, kernel / 8
    found = derivative(logits.by_parts, 2, tokens, kernel)
    assert [each.dtype for each in found] == [jnp.bfloat16, dtype]
    check_derivatives(found, tokens, kernel, 2, 2 * ROUNDED)


@pytest.mark.few(3)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("dtype", KERNELS)
def test_vmap_with_gradients(dtype, axes, any_dot):
    given = [
        each if axis is None else jnp.stack([each, each[::-1], 2 * each])
        for each, axis in zip(operands(dtype), axes, strict=True)
    ]
    cotangent = normal(4, 3, ROWS, EXPERTS)

    def run(cotangent, *args):
        found, back = jax.vjp(logits.by_parts, *args)
        return found, *back(cotangent)

    found = jax.jit(jax.vmap(run, in_axes=(0, *axes)))(cotangent, *given)
    for entry in range(3):
        args = [
            each if axis is None else each[entry]
            for each, axis in zip(given, axes, strict=True)
        ]
        alone = jax.jit(run)(cotangent[entry], *args)
        for ours, theirs in zip(found, alone, strict=True):
            ours, theirs = np.float32(ours[entry]), np.float32(theirs)
            np.testing.assert_allclose(ours, theirs, rtol=ROUNDED, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", KERNELS)
def test_in_shard_map(dtype, check_vma, any_dot):
    """Gradients of a kernel are summed over ranks in float32, and rounded once."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    tokens, kernel = operands(dtype, mesh.size)
    cotangent = normal(4, len(tokens), EXPERTS)
    run = jax.shard_map(
        logits.by_parts,
        mesh=mesh,
        in_specs=(P("ep"), P()),
        out_specs=P("ep"),
        check_vma=check_vma,
    )

    @jax.jit
    def both(tokens, kernel):
        found, back = jax.vjp(run, tokens, kernel)
        return found, *back(cotangent)

    found, to_tokens, to_kernel = both(tokens, kernel)
    check(found, tokens, kernel)
    check(to_tokens, cotangent, kernel.T)
    if check_vma or dtype == "float32":
        check(to_kernel, tokens.T, cotangent)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.everything_saveable,
        jax_ep.save_route,
    ],
)
def test_remat(policy, any_dot):
    def gradients(product):
        def loss(tokens, kernel):
            return jnp.sum(jnp.sin(product(tokens, kernel)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(*operands())

    found = gradients(jax.checkpoint(logits.by_parts, policy=policy))
    for ours, theirs in zip(found, gradients(logits.by_parts), strict=True):
        ours, theirs = np.float32(ours), np.float32(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=ROUNDED, atol=1e-4)


def products(function, *args):
    """The types of operands and result of each dot in the program for CUDA."""
    traced = jax.jit(function).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    return [[part.split(">")[0] for part in dot.split("tensor<")[1:]] for dot in dots]


@pytest.mark.parametrize("default", [None, "highest", "F32_F32_F32"])
@pytest.mark.parametrize(
    ("dtype", "parts", "pairs"), [(*KERNELS[:1], 3, 6), (*KERNELS[1:], 1, 3)]
)
def test_programs_multiply_bfloat16_alone(dtype, parts, pairs, default):
    """One matmul forward and two backward, whatever the default precision is."""

    def both(tokens, kernel, cotangent):
        return jax.vjp(logits.by_parts, tokens, kernel)[1](cotangent)

    given = *operands(dtype), normal(4, ROWS, EXPERTS)
    with jax.default_matmul_precision(default):
        forward = products(logits.by_parts, *given[:2])
        back = products(both, *given)
    columns = parts * EXPERTS
    assert forward == [
        [f"{ROWS}x{HIDDEN}xbf16", f"{HIDDEN}x{columns}xbf16", f"{ROWS}x{columns}xf32"]
    ]
    inner, columns = pairs * EXPERTS, 3 * EXPERTS
    assert back == [
        [f"{ROWS}x{inner}xbf16", f"{inner}x{HIDDEN}xbf16", f"{ROWS}x{HIDDEN}xf32"],
        [f"{HIDDEN}x{ROWS}xbf16", f"{ROWS}x{columns}xbf16", f"{HIDDEN}x{columns}xf32"],
    ]


@pytest.mark.parametrize(
    ("platform", "capability", "dtype", "wanted"),
    [
        ("gpu", "9.0", "bfloat16", True),
        ("gpu", "10.0", "bfloat16", True),
        ("gpu", "8.0", "bfloat16", True),
        ("gpu", "7.5", "bfloat16", False),
        ("gpu", "gfx942", "bfloat16", False),
        ("gpu", "9.0", "float16", False),
        ("gpu", "9.0", "float32", False),
        ("cpu", None, "bfloat16", False),
    ],
)
def test_parts_are_for_tensor_cores(platform, capability, dtype, wanted):
    device = types.SimpleNamespace(platform=platform)
    if capability is not None:
        device.compute_capability = capability
    tokens, kernel = operands()
    run = functools.partial(logits.logits_of, device=device)
    (dot,) = products(run, tokens.astype(dtype), kernel)
    assert (dot[0] == f"{ROWS}x{HIDDEN}xbf16") == wanted
    few = logits.FEW_TOKENS
    for count, of in (few, kernel), (few + 1, kernel), (few, kernel.astype("bfloat16")):
        (dot,) = products(run, tokens[:count].astype(dtype), of)
        pays = count > few or of.dtype == jnp.bfloat16
        assert (dot[0] == f"{count}x{HIDDEN}xbf16") == (wanted and pays)


def layer(monkeypatch, dtype="bfloat16"):
    """A function of (params, x) that returns y and aux, with params and x.

    Makes its few tokens enough for products of parts.
    """
    monkeypatch.setattr(logits, "FEW_TOKENS", 0)
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ep = helpers.make_ep(mesh, config(dtype=dtype))
    params = moe_dense.params(shared=False)
    x = normal(5, N * mesh.size, moe_dense.HIDDEN, dtype=dtype)
    mask = np.arange(len(x)) % 5 > 0
    run = expert_parallel(mesh, ep, params, Router())
    return lambda params, x: run(params, x, mask), params, x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_program_of_a_layer_where_there_are_no_tensor_cores(dtype, monkeypatch):
    """It has one float32 product; with float32 tokens that is so on every device."""
    run, params, x = layer(monkeypatch, dtype)
    # A new function each time, so that nothing is cached.
    found = jax.jit(lambda *args: run(*args)).lower(params, x).as_text()
    monkeypatch.setattr(routing, "logits_of", lambda t, k, device: plain(t, k))
    wanted = jax.jit(lambda *args: run(*args)).lower(params, x).as_text()
    in_parts = dtype == "bfloat16" and logits._multiplies_bfloat16(jax.devices()[0])
    assert (found == wanted) != in_parts


@pytest.mark.parametrize("dtype", KERNELS)
def test_a_layer_by_parts(dtype, monkeypatch, any_dot):
    """Its choices, losses and gradients equal those of the float32 product."""
    run, params, x = layer(monkeypatch)
    params = params | {"router": jnp.asarray(params["router"], dtype)}

    taken = []
    by_parts = logits.by_parts
    monkeypatch.setattr(
        logits, "by_parts", lambda *of: taken.append(1) or by_parts(*of)
    )

    def gradients(parts):
        patch = functools.partial(monkeypatch.setattr, logits, "_multiplies_bfloat16")
        patch(lambda device: parts)

        def loss(params, x):
            y, aux = run(params, x)
            total = jnp.sum(jnp.sin(y.astype(jnp.float32)))
            return total + aux.balance_loss + aux.z_loss, (y, aux)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return jax.jit(grad)(params, x)

    (_, (y, aux)), found = gradients(True)
    count = len(taken)
    (_, (wanted_y, wanted)), theirs = gradients(False)
    assert 0 < count == len(taken)
    np.testing.assert_array_equal(aux.expert_counts, wanted.expert_counts)
    np.testing.assert_allclose(aux.balance_loss, wanted.balance_loss, rtol=1e-6)
    np.testing.assert_allclose(aux.z_loss, wanted.z_loss, rtol=1e-6)
    for ours, other in zip(
        *map(jax.tree.leaves, ((y, found), (wanted_y, theirs))), strict=True
    ):
        ours, other = np.float32(ours), np.float32(other)
        atol = 2 * ROUNDED * np.abs(other).max()
        np.testing.assert_allclose(ours, other, rtol=0, atol=atol)
