"""Tokens that are already quantised are sent unchanged; weights get gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import (
    compare_transports,
    format_values,
    fp8_experts,
    helpers,
    moe,
    quantizer,
)
from support.errors import check_form, raises
from support.quantized import check, codes_of, config_of, each_format
from support.quantized_grads import HIDDEN

pytestmark = pytest.mark.usefixtures("quick_compiles")

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "float32": {"dtype": "float32", "recv_capacity": 9, "zero_tail": False},
    # A token's scales are not a multiple of 16 bytes.
    "narrow": {"hidden_size": 384, "expert_alignment": 4},
    "shared": {"fused_shared_expert": True},
    "skip_a2a": {"skip_a2a": True, "fused_shared_expert": True},
    "halves": {"pending_calls": 1},
    "copy": {"overlap": "copy"},
}


@pytest.mark.few(12)
@pytest.mark.parametrize("case", CASES)
@each_format
def test_dispatch(name: str, case: str) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    config = helpers.make_config(**config_of(name, **CASES[case]))
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(
        np.random.default_rng(len(case)),
        config,
        ep.ep_size,
        routing="invalid",
        fill=format_values.rows,
    )
    if config.skip_a2a:
        inputs = inputs.pick([0] * ep.ep_size)
    g = 300.0 if name == "nvfp4" else None
    halves = config.most_pending > 0
    check(mesh, ep, inputs, g, coded=True, halves=halves)


@pytest.mark.parametrize("name", quantizer.TILED)
def test_tiled_scales(name: str) -> None:
    """Scales are given by row, and the receiving step tiles them."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    config = helpers.make_config(
        **config_of(name, scale_layout="tiled_128x4", expert_alignment=8)
    )
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(6), config, ep.ep_size)
    check(mesh, ep, inputs, coded=True)


def test_global_arrays() -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    config = helpers.make_config(**config_of("nvfp4", pending_calls=1))
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(11), config, ep.ep_size)
    codes, scales = codes_of(config, inputs, 2.5)
    parts = (inputs.tokens, codes, inputs.ids, inputs.weights, scales)
    tokens, codes, ids, weights, scales = (helpers.put(mesh, part) for part in parts)
    g = jnp.float32(2.5)
    options = {"input_scale": g, "token_scales": scales}
    wanted = jax_ep.sharded.dispatch(ep, tokens, ids, weights, input_scale=g)
    pending = jax_ep.sharded.dispatch_async(ep, codes, ids, weights, **options)
    for d in (
        jax_ep.sharded.dispatch(ep, codes, ids, weights, **options),
        jax_ep.sharded.dispatch_wait(pending),
    ):
        assert jax.tree.structure(d) == jax.tree.structure(wanted)
        jax.tree.map(helpers.assert_bits, d, wanted)


def setup(name: str, **changes: Any) -> tuple[moe.Setup, tuple[Any, ...]]:
    """A layer, and its operands with codes and scales in place of tokens."""
    s = moe.setup(dispatch_format=name, hidden_size=HIDDEN, **changes)
    codes, scales = quantizer.quantize(s.tokens, name)
    x, ids, w, p = s.global_arrays()
    codes, scales = (helpers.put(s.mesh, [part]) for part in (codes, scales))
    return s, (x, codes, scales, ids, w, p)


def layer(
    ep: Any, x: Any, scales: Any, ids: Any, w: Any, p: Any, halves: bool = False
) -> Any:
    """A layer on tokens, or on codes with scales, without a residual."""
    if halves:
        pending = jax_ep.dispatch_async(ep, x, ids, w, token_scales=scales)
        d = jax_ep.dispatch_wait(pending)
    else:
        d = jax_ep.dispatch(ep, x, ids, w, token_scales=scales)
    rows = jnp.tanh(moe.gathered_dot(jax_ep.dequantize(d), p, d.group_sizes))
    return jax_ep.combine(ep, rows, d.route, None if w is None else d.router_weights)


def value_of(s: moe.Setup, fn: Any, **options: Any) -> Any:
    """`wave` of the sharded `fn`, as a function of (w, p, tokens, scales, ids)."""
    run = moe.sharded(s.mesh, fn, **options)
    return lambda w, p, x, scales, ids: moe.wave(run(x, scales, ids, w, p))


def grads(s: moe.Setup, fn: Any, *operands: Any, **options: Any) -> Any:
    """Gradients of weights and of experts, and the compiled program."""
    grad = jax.jit(jax.grad(value_of(s, fn, **options), argnums=(0, 1)))
    program = grad.lower(*operands).compile()
    return program(*operands), program


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit on CPUs; on GPUs each program may choose other matmul algorithms."""
    on_cpu = jax.default_backend() == "cpu"
    same = helpers.assert_bits if on_cpu else compare_transports.assert_near
    jax.tree.map(same, found, wanted)


@pytest.mark.parametrize(
    ("name", "halves", "check_vma"),
    [
        ("fp8_block128", False, True),
        ("mxfp8", True, True),
        ("mxfp4", False, False),
        ("nvfp4", True, False),
    ],
)
def test_gradients(name: str, halves: bool, check_vma: bool) -> None:
    """Weights and experts get the gradients of a dispatch that quantises."""
    s, (x, codes, scales, ids, w, p) = setup(name, ranks=2, pending_calls=1)
    fn = functools.partial(layer, s.ep)
    wanted, _ = grads(s, fn, w, p, x, None, ids)
    fn = functools.partial(layer, s.ep, halves=halves)
    found, _ = grads(s, fn, w, p, codes, scales, ids, check_vma=check_vma)
    assert_same(found, wanted)
    assert all(np.asarray(each).any() for each in found)


@pytest.mark.parametrize("halves", [False, True])
def test_nothing_is_exchanged_for_tokens(halves: bool) -> None:
    """The dispatch's backward exchanges only weights, and nothing without them."""
    s, (x, codes, scales, ids, w, p) = setup("mxfp8", ranks=2, pending_calls=1)
    if s.ep.ep_size == 1:
        pytest.skip("one rank exchanges nothing")
    fn = functools.partial(layer, s.ep, halves=halves)

    def exchanges(x: Any, scales: Any, w: Any) -> int:
        def value(p: Any, x: Any, w: Any) -> Any:
            return value_of(s, fn)(w, p, x, scales, ids)

        # Tokens get a gradient if their dtype allows it.
        at = (0, 1, 2) if w is not None else (0, 1)
        grad = jax.jit(jax.grad(value, argnums=at))
        return moe.exchanges(grad.lower(p, x, w).compile())

    # Two forward; backward one of the combine and one of the dispatch.
    assert exchanges(x, None, None) == 4
    assert exchanges(codes, scales, None) == 3
    assert exchanges(codes, scales, w) == 4
    if helpers.TRANSPORT != "collective":
        return
    _, program = grads(s, fn, w, p, codes, scales, ids)
    weights, *others = sorted(moe.region_words(program))
    # A message with only weights has 128 bytes.
    assert weights <= (128 + 128 * s.ep.config.max_tokens_per_rank) // 4
    assert len(others) == 3
    assert others[0] > 1.5 * weights


def test_codes_and_scales_have_no_cotangent() -> None:
    """Cotangents are zeros for float types, and float0 for integers."""
    s, (_, codes, scales, ids, w, p) = setup("nvfp4", ranks=2)
    value = value_of(s, functools.partial(layer, s.ep))
    grad = jax.grad(value, argnums=(2, 3), allow_int=True)
    d_codes, d_scales = jax.eval_shape(grad, w, p, codes, scales, ids)
    assert (d_codes.dtype, d_scales.dtype) == (jax.dtypes.float0, scales.dtype)
    s, (_, codes, scales, ids, w, p) = setup("fp8_block128", ranks=2)
    value = value_of(s, functools.partial(layer, s.ep))
    for found in jax.jit(jax.grad(value, argnums=(2, 3)))(w, p, codes, scales, ids):
        assert not np.asarray(found, np.float32).any()


@pytest.mark.parametrize("wrap", ["scan", "remat", "vmap"])
def test_loops_remat_and_vmap(wrap: str) -> None:
    """Gradients equal those of the same calls in sequence."""
    s, (_, codes, scales, ids, w, p) = setup("mxfp8", ranks=2)
    once = functools.partial(layer, s.ep)

    def wrapped(x: Any, scales: Any, ids: Any, w: Any, p: Any) -> Any:
        def step(factor: Any) -> Any:
            return once(x, scales, ids, w * factor, p)

        factors = jnp.array([1.0, 2.0])
        if wrap == "vmap":
            return jax.vmap(step)(factors).sum(axis=0)
        if wrap == "remat":
            step = jax.checkpoint(step, policy=jax_ep.save_route)
        zeros = jax.lax.pcast(jnp.zeros((len(ids), HIDDEN)), "ep", to="varying")
        return jax.lax.scan(lambda y, f: (y + step(f), None), zeros, factors)[0]

    def in_a_row(x: Any, scales: Any, ids: Any, w: Any, p: Any) -> Any:
        return once(x, scales, ids, w, p) + once(x, scales, ids, w * 2, p)

    found, wanted = (
        grads(s, fn, w, p, codes, scales, ids)[0] for fn in (wrapped, in_a_row)
    )
    # Elements are sums of much larger terms.
    jax.tree.map(compare_transports.assert_near, found, wanted)


def test_fp8_experts_of_codes() -> None:
    """Experts multiply the codes as given; the rows' cotangent ends there."""
    s = moe.setup(ranks=2, dispatch_format="fp8_block128", hidden_size=HIDDEN)
    rng = np.random.default_rng(5)
    gate_up = helpers.normal(
        rng, (s.ep.config.num_experts, HIDDEN, 2, HIDDEN), np.float32
    )
    down = helpers.normal(rng, (s.ep.config.num_experts, HIDDEN, HIDDEN), np.float32)
    codes, scales = quantizer.quantize(s.tokens, "fp8_block128")
    x, ids, w, _ = s.global_arrays()
    parts = (codes, scales, gate_up / 16, down / 16)
    codes, scales, gate_up, down = (helpers.put(s.mesh, [part]) for part in parts)

    def fn(x: Any, scales: Any, ids: Any, w: Any, p: Any) -> Any:
        d = jax_ep.dispatch(s.ep, x, ids, w, token_scales=scales)
        rows = jax_ep.experts.fp8(d, *p)
        return jax_ep.combine(s.ep, rows, d.route, d.router_weights)

    found, wanted = (
        grads(s, fn, w, (gate_up, down), *sent, ids)[0]
        for sent in ((codes, scales), (x, None))
    )
    if jax.default_backend() == "cpu":
        jax.tree.map(helpers.assert_bits, found, wanted)
        return
    # A sum in another order may round to a code's neighbour.
    for got, want in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert fp8_experts.distance(got, want) < 3e-3


# ---- Errors --------------------------------------------------------------------------

F8, E8 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu


def zeros(*shape: int, dtype: Any = F8) -> jax.Array:
    return jnp.zeros(shape, dtype)


SCALES = zeros(8, 8, dtype=E8)
ERRORS: dict[str, tuple[str, Any, Any, tuple[str, ...]]] = {
    "plain": ("bf16", zeros(8, 256, dtype=jnp.bfloat16), SCALES, ("'bf16'",)),
    "tokens_dtype": (
        "mxfp8",
        zeros(8, 256, dtype=jnp.bfloat16),
        SCALES,
        ("tokens must be float8_e4m3fn", "codes", "bfloat16", "quantize"),
    ),
    "tokens_shape": ("mxfp8", zeros(8, 128), SCALES, ("columns = 256", "(8, 128)")),
    "packed": ("mxfp4", zeros(8, 256, dtype=jnp.uint8), SCALES, ("columns = 128",)),
    "one_token": ("mxfp8", zeros(256), SCALES, ("tokens", "(256,)")),
    "scales_dtype": (
        "mxfp8",
        zeros(8, 256),
        zeros(8, 8, dtype=jnp.float32),
        ("token_scales must be float8_e8m0fnu", "float32"),
    ),
    "scales_shape": (
        "mxfp8",
        zeros(8, 256),
        zeros(8, 2, dtype=E8),
        ("token_scales", "blocks = 8", "(8, 2)"),
    ),
    "fewer_scales": ("mxfp8", zeros(8, 256), SCALES[:4], ("n = 8", "(4, 8)")),
    "tiled": (
        "mxfp8",
        zeros(8, 256),
        zeros(1, 2, 32, 4, 4, dtype=E8),
        ("[n, blocks]", "(1, 2, 32, 4, 4)"),
    ),
    "number": ("mxfp8", zeros(8, 256), 1.0, ("token_scales must be an array",)),
    "no_scales": ("mxfp8", zeros(8, 256), None, ("bfloat16", "token_scales")),
    "many": (
        "mxfp8",
        zeros(9, 256),
        zeros(9, 8, dtype=E8),
        ("max_tokens_per_rank", "9"),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    name, tokens, scales, words = ERRORS[case]
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, helpers.make_config(**config_of(name, pending_calls=1)))
    ids = jnp.zeros((len(tokens), 3), jnp.int32)

    def run(call: Any) -> None:
        def body() -> Any:
            call(ep, tokens, ids, token_scales=scales)
            return ids

        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep")))

    for function in ("dispatch", "dispatch_async"):
        with raises() as caught:
            run(getattr(jax_ep, function))
        check_form(caught, function, *words)


def test_error_along_a_route() -> None:
    mesh = helpers.make_mesh(1)
    ep = helpers.make_ep(mesh, helpers.make_config(**config_of("mxfp8")))
    tokens = zeros(8, 256, dtype=jnp.bfloat16)
    route = jax_ep.sharded.dispatch(ep, tokens, jnp.zeros((8, 3), jnp.int32)).route
    with raises() as caught:
        jax_ep.sharded.dispatch(ep, zeros(8, 256), token_scales=SCALES, route=route)
    check_form(caught, "sharded.dispatch", "token_scales must be None with route")
