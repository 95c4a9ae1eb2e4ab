"""An activation of one's own: any function, in any experts, inside any layer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from support import fp8_experts, helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

H = F = 128
E, K, N, R = 4, 2, 8, 2


def looped(gate: jax.Array) -> jax.Array:
    def step(carry: jax.Array, _: None) -> Any:
        return jnp.sin(carry) + gate, None

    return jax.lax.scan(step, gate, None, length=2)[0]


# Functions of (alpha, gate, up), where alpha is learnt.
ACTIVATIONS: dict[str, Any] = {
    "gelu": lambda a, g, u: jax.nn.gelu(g) * u,
    "exact gelu": lambda a, g, u: jax.nn.gelu(g, approximate=False) * u,
    "relu squared": lambda a, g, u: jnp.square(jax.nn.relu(g)) * u,
    "clipped": lambda a, g, u: (
        jnp.minimum(g, 7.0)
        * jax.nn.sigmoid(1.702 * jnp.minimum(g, 7.0))
        * (jnp.clip(u, -7.0, 7.0) + 1)
    ),
    "where": lambda a, g, u: jnp.where(g > 0, g, 0.1 * g) * u,
    "cond": lambda a, g, u: (
        jax.lax.cond(jnp.sum(g) > 1e9, lambda g: g, lambda g: 2 * jnp.tanh(g), g) * u
    ),
    "scan": lambda a, g, u: looped(g) * u,
    "checkpoint": lambda a, g, u: jax.checkpoint(lambda g: jnp.tanh(g) * g)(g) * u,
    "jitted": lambda a, g, u: jax.jit(lambda g, u: jax.nn.silu(g) * u)(g, u),
    "learnt": lambda a, g, u: g * jax.nn.sigmoid(a * g) * u,
    "learnt, jitted": lambda a, g, u: jax.jit(jnp.multiply)(a, jax.nn.silu(g)) * u,
    "narrow": lambda a, g, u: (jax.nn.silu(g) * u).astype(jnp.bfloat16),
}


@functools.cache
def jax_refuses() -> set[str]:
    """What JAX itself cannot differentiate in float32 inside shard_map."""

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(ACTIVATIONS["exact gelu"](1.0, x, x)))(x)

    mesh = helpers.make_mesh(1)
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    try:
        jax.eval_shape(mapped, jnp.ones((1, 1)))
    except ValueError:  # jax 0.12
        return {"exact gelu"}
    return set()


def every(alpha: Any) -> experts.Activation:
    """The sum of all functions, so that one program has them all."""
    functions = [f for name, f in ACTIVATIONS.items() if name not in jax_refuses()]

    def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
        return sum((f(alpha, gate, up) for f in functions), 0 * gate)

    return activation


def parameters(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "router": jax.random.normal(keys[0], (H, E)),
        "gate_up": jax.random.normal(keys[1], (E, H, 2, F)) / 11,
        "down": jax.random.normal(keys[2], (E, F, H)) / 11,
    }


def with_codes(params: dict[str, Any], form: Any, beside: bool) -> dict[str, Any]:
    rest = dict(params)
    gate_up, down = rest["gate_up"], rest["down"]
    if not beside:
        del rest["gate_up"], rest["down"]
    return rest | {"experts": experts.quantize_weights(gate_up, down, format=form)}


# Experts, and parameters of a layer.
WAYS: dict[str, tuple[Any, Any]] = {
    "auto": (None, lambda p: p),
    "ragged_dot": (experts.ragged_dot, lambda p: p),
    "Padded": (experts.Padded(2 * N), lambda p: p),
    "fp8": (experts.fp8, lambda p: p),
    "beside": (experts.fp8, lambda p: with_codes(p, "fp8_block128", True)),
    "codes": (None, lambda p: with_codes(p, "fp8_block128", False)),
    "mxfp4": (None, lambda p: with_codes(p, "mxfp4", False)),
}


def layer(way: str) -> tuple[Any, Any, Any]:
    """A function of (alpha, params, x), with the params and x to pass."""
    run, change = WAYS[way]
    params = change(parameters())
    mesh = helpers.make_mesh(R)
    config = jax_ep.EPConfig(
        num_experts=E,
        top_k=K,
        hidden_size=H,
        max_tokens_per_rank=N,
    )
    ep = helpers.make_ep(mesh, config)
    specs = {name: P() if name == "router" else P("ep") for name in params}

    def mapped(alpha: Any, params: Any, x: Any) -> Any:
        def body(alpha: Any, params: Any, x: Any) -> Any:
            options: Any = {"experts": run, "activation": every(alpha)}
            return jax_ep.moe_ffn(ep, x, params, **options)[0]

        return jax.shard_map(
            body, mesh=mesh, in_specs=(P(), specs, P("ep")), out_specs=P("ep")
        )(alpha, params, x)

    x = jax.random.normal(jax.random.key(3), (R * N, H), jnp.bfloat16)
    return mapped, params, x


def trained(params: Any) -> tuple[Any, Any]:
    """Splits params in those that have gradients and the codes."""
    codes = {name: each for name, each in params.items() if name == "experts"}
    return {n: each for n, each in params.items() if n not in codes}, codes


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_every_function_traces_in_a_layer(way: str) -> None:
    mapped, params, x = layer(way)
    params, codes = trained(params)

    def loss(alpha: Any, params: Any, x: Any) -> Any:
        y = mapped(alpha, params | codes, x)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    grad = jax.value_and_grad(loss, (0, 1, 2))
    jax.eval_shape(grad, jnp.float32(1.5), params, x)
    # With an alpha for each entry of a batch.
    batch = jax.vmap(grad, in_axes=(0, None, None))
    jax.eval_shape(batch, jnp.float32([1.5, 2]), params, x)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_every_function_traces_in_flax(kind: str) -> None:
    pytest.importorskip("flax")
    from flax import nnx

    from jax_ep.flax import linen

    mesh = helpers.make_mesh(R)
    sizes: dict[str, Any] = {
        "mesh": mesh,
        "axis_name": "ep",
        "hidden_size": H,
        "intermediate_size": F,
        "num_experts": E,
        "top_k": K,
        "max_tokens_per_rank": N,
        "experts": experts.fp8,
        "activation": every(1.5),
    }
    x = jnp.ones((R * N, H), jnp.bfloat16)
    if kind == "linen":
        module = linen.MoE(**sizes)
        variables = jax.eval_shape(module.init, jax.random.key(0), x)

        def loss(variables: Any) -> Any:
            return jnp.sum(module.apply(variables, x)[0].astype(jnp.float32))

        jax.eval_shape(jax.grad(loss), variables)
        return
    graph, state = nnx.split(
        nnx.eval_shape(lambda: jax_ep.flax.MoE(**sizes, rngs=nnx.Rngs(0)))
    )

    def of_state(state: Any) -> Any:
        return jnp.sum(nnx.merge(graph, state)(x)[0].astype(jnp.float32))

    jax.eval_shape(jax.grad(of_state), state)


def by_formula(alpha: Any, rows: Any, gate_up: Any, down: Any) -> Any:
    outs = []
    for group, part in enumerate(jnp.split(rows, np.cumsum(SIZES)[:-1])):
        both = jnp.einsum("nh,hcf->ncf", part, gate_up[group])
        outs.append(every(alpha)(both[:, 0], both[:, 1]) @ down[group])
    return jnp.concatenate(outs)


SIZES = (5, 0, 8, 3)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("way", "tolerance"), [("ragged_dot", 1e-2), ("Padded", 1e-2), ("fp8", 0.15)]
)
def test_values_and_gradients(way: str, tolerance: float) -> None:
    """All functions at once, against the formula."""
    params = parameters()
    rows = jax.random.normal(jax.random.key(3), (sum(SIZES), H))
    sizes = jnp.array(SIZES, jnp.int32)
    weigh = jax.random.normal(jax.random.key(4), rows.shape)

    def found(alpha: Any, rows: Any, gate_up: Any, down: Any) -> Any:
        options: dict[str, Any] = {"activation": every(alpha)}
        if way == "fp8":
            d = fp8_experts.dispatched(np.zeros(rows.shape), SIZES)
            d = dataclasses.replace(d, tokens=rows)
            return experts.fp8(d, gate_up, down, **options)
        run = experts.Padded(max(SIZES)) if way == "Padded" else experts.ragged_dot
        return run(rows, gate_up, down, sizes, **options)

    def all_of(run: Any) -> Any:
        def loss(*given: Any) -> Any:
            return jnp.sum(run(*given) * weigh)

        return jax.jit(jax.grad(loss, range(4)))

    given = (jnp.float32(1.5), rows, params["gate_up"], params["down"])
    for got, want in zip(
        all_of(found)(*given), all_of(by_formula)(*given), strict=True
    ):
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)
