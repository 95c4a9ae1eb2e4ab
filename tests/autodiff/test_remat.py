"""jax.checkpoint: right gradients, and how many exchanges a compiled program has."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, moe
from support.pages import python_blocks
from support.remat import arguments, bare, exchanges, save_route

pytestmark = pytest.mark.usefixtures("quick_compiles")

NAMES = ("jax_ep_route", "jax_ep_rows", "jax_ep_out")


@pytest.fixture(scope="module")
def two() -> moe.Setup:
    """At least two ranks, as otherwise XLA would drop the exchanges to count."""
    s = moe.setup(7, ranks=2)
    s.weights = s.weights / 4  # keeps three layers well conditioned
    return s


def grad_of(s: moe.Setup, wrap, place: str = "inside"):
    """Gradient in (x, w, p) of three layers, each rematerialised by `wrap`.

    The layers are in a scan, because in straight-line code XLA may merge a repeated
    exchange with the first, which would hide it from the count.
    """
    layer = functools.partial(moe.layer, s.ep)

    def stack(layer, x, ids, w, p):
        def step(x, scale):
            return layer(x, ids, w * scale, p), None

        return jax.lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))[0]

    if place == "inside":
        run = moe.sharded(s.mesh, functools.partial(stack, wrap(layer)))
    else:
        run = functools.partial(stack, wrap(moe.sharded(s.mesh, layer)))
    return jax.grad(lambda x, w, p, ids: moe.wave(run(x, ids, w, p)), (0, 1, 2))


def dense_grad(s: moe.Setup):
    def loss(x, w, p):
        for scale in (1.0, 2.0, 3.0):
            x = moe.dense(x, s.ids, w * np.float32(scale), p)
        return moe.wave(x)

    return jax.grad(loss, (0, 1, 2))(s.tokens, s.weights, s.params)


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("wrap", [jax.checkpoint, save_route])
def test_gradients(two: moe.Setup, wrap, place: str) -> None:
    actual = jax.jit(grad_of(two, wrap, place))(*arguments(two))
    moe.assert_close(actual, dense_grad(two))


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_save_route_exchanges_nothing_twice(two: moe.Setup, place: str) -> None:
    plain, saved, again = (
        exchanges(grad_of(two, wrap, place), *arguments(two))
        for wrap in (bare, save_route, jax.checkpoint)
    )
    assert 0 < plain == saved < again


def test_save_route_in_straight_line_code(two: moe.Setup) -> None:
    def count(wrap):
        layer = wrap(functools.partial(moe.layer, two.ep))
        return exchanges(
            jax.grad(moe.loss(two.mesh, layer), (0, 1, 2)), *arguments(two)
        )

    assert 0 < count(bare) == count(save_route)


def test_backward_exchanges_no_counts(two: moe.Setup) -> None:
    """One exchange per call, forward or backward: counts and indices are sent once."""

    def forward(x, w, p, ids):
        run = moe.sharded(two.mesh, functools.partial(moe.layer, two.ep))
        return moe.wave(run(x, ids, w, p))

    args = arguments(two)
    ahead = exchanges(forward, *args)
    both = exchanges(jax.grad(forward, (0, 1, 2)), *args)
    # Dispatch and combine forward, then the exchanges of dy and of drow.
    assert both - ahead == 2
    assert ahead >= 2


def test_names(two: moe.Setup) -> None:
    """checkpoint_name names the outputs, so that users' policies can refer to them."""
    run = moe.sharded(two.mesh, functools.partial(moe.layer, two.ep))
    x, ids, w, p = two.global_arrays()
    named = set(re.findall(r"name\[name=(\w+)", str(jax.make_jaxpr(run)(x, ids, w, p))))
    assert set(NAMES) <= named


def test_own_policy(two: moe.Setup) -> None:
    """With all three names saved nothing is sent again; with none, everything is."""

    def keep(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        return functools.partial(jax.checkpoint, policy=policy)

    args = arguments(two)
    plain = exchanges(grad_of(two, bare), *args)
    everything = exchanges(grad_of(two, keep(*NAMES)), *args)
    nothing = exchanges(grad_of(two, keep("unrelated")), *args)
    assert everything == plain < nothing


@pytest.mark.slow
def test_policies_of_sharp_bits(two: moe.Setup) -> None:
    """Five exchanges with only a user's policy, four with the page's addition to it."""
    names: dict = {"jax": jax, "jax_ep": jax_ep}
    exec(*python_blocks("docs/sharp_bits.md", "policies"), names)

    def count(policy) -> int:
        def wrap(layer):
            def named(x, *rest):
                return layer(checkpoint_name(x * x, "attention_out"), *rest)

            return jax.checkpoint(named, policy=policy)

        return exchanges(grad_of(two, wrap), *arguments(two))

    policies = jax.checkpoint_policies
    plain = count(policies.everything_saveable)
    assert plain == 4
    assert count(policies.save_only_these_names("attention_out")) == plain + 1
    assert count(policies.dots_with_no_batch_dims_saveable) == plain + 1
    assert count(names["by_name"]) == plain
    assert count(names["combined"]) == plain


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs choose algorithms")
def test_rematerialised_bfloat16_without_excess_precision() -> None:
    """Gradients equal the plain layers' bit for bit, as sharp_bits.md says."""
    mesh, hidden, inner, n = helpers.make_mesh(2), 64, 32, 32
    config = jax_ep.EPConfig(
        num_experts=4, top_k=2, hidden_size=hidden, max_tokens_per_rank=n
    )
    ep, rng = helpers.make_ep(mesh, config), np.random.default_rng(9)
    params = {
        "router": helpers.normal(rng, (2, hidden, 4), np.float32) / 8,
        "gate_up": helpers.normal(rng, (2, 4, hidden, 2, inner), np.float32) / 8,
        "down": helpers.normal(rng, (2, 4, inner, hidden), np.float32) / 6,
    }
    tokens = helpers.normal(rng, (2 * n, hidden), jnp.bfloat16)
    specs = {"router": P(), "gate_up": P(None, "ep"), "down": P(None, "ep")}

    def gradients(wrap):
        layer = wrap(lambda x, params: jax_ep.moe_ffn(ep, x, params, residual=x)[0])

        def body(x, params):
            for i in range(2):
                x = layer(x, {name: stack[i] for name, stack in params.items()})
            return x

        run = moe.sharded(mesh, body, in_specs=(P("ep"), specs), out_specs=P("ep"))
        grad = jax.grad(lambda params, x: jnp.sum(jnp.sin(run(x, params))))
        # Without this option the first layer's gradients differ.
        options = {"xla_allow_excess_precision": False}
        return jax.jit(grad, compiler_options=options)(params, tokens)

    plain, again = gradients(bare), gradients(jax.checkpoint)
    for name in ("gate_up", "down"):  # the router's gradients are float32 sums
        np.testing.assert_array_equal(again[name], plain[name], name)


def residual_shapes(s: moe.Setup, weighted: bool) -> list[tuple[int, ...]]:
    """Shapes of the float residuals that combine's backward keeps."""
    x, ids, w, _ = s.global_arrays()
    d = helpers.dispatch_fn(s.ep, s.mesh, P("ep"))(x, ids, w)
    weights = d.router_weights if weighted else None

    def body(rows, route, weights):
        return jax_ep.combine(s.ep, rows, route, router_weights=weights)

    run = moe.sharded(s.mesh, body)
    _, pull = jax.vjp(lambda rows: run(rows, d.route, weights), d.tokens)
    floats = [a for a in jax.tree.leaves(pull) if jnp.issubdtype(a.dtype, jnp.floating)]
    return [tuple(a.shape) for a in floats]


def test_rows_are_kept_only_for_weights(two: moe.Setup) -> None:
    rows = (two.ep.ep_size * two.ep.recv_capacity, two.ep.config.hidden_size)
    assert rows in residual_shapes(two, weighted=True)
    assert rows not in residual_shapes(two, weighted=False)


@pytest.mark.parametrize("wrap", [jax.checkpoint, save_route])
def test_several_layers(wrap) -> None:
    """Rematerialised layers that alternate between two handles."""
    s = moe.setup(8)
    other = helpers.make_ep(
        s.mesh, helpers.make_config(dtype="float32", expert_alignment=4)
    )

    def model(x, ids, w, p):
        for ep in (s.ep, other, s.ep, other):
            x = wrap(functools.partial(moe.layer, ep))(x, ids, w / 4, p)
        return x

    def dense(x, w, p, ids):
        for _ in range(4):
            x = moe.dense(x, ids, w / 4, p)
        return moe.wave(x)

    moe.check(s, moe.loss(s.mesh, model), dense)
