"""A user's program: type checkers read it (`.ci/run lint`), test_typing.py runs it.

Strict but for what is unknown: JAX's own functions are partly untyped.
"""

# pyright: strict, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

HIDDEN, INNER, EXPERTS, TOKENS = 128, 32, 8, 16
Params = dict[str, jax.Array]


def make_config(overlap: bool) -> jax_ep.EPConfig:
    """Dtypes as programs have them; they are kept as names."""
    config = jax_ep.EPConfig(
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        dtype=jnp.bfloat16,
        combine_dtype=jnp.dtype("float32"),
        dispatch_format="fp8_block128",
        grad_format="fp8_block128",
        pending_calls=1,
        overlap="stream" if overlap else "sm",
    )
    name: str = config.dtype
    assert name == "bfloat16"
    assert config.combine_dtype == "float32"
    return config


def own_experts(
    rows: jax.Array, gate_up: jax.Array, down: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """For `experts=` of a layer."""
    return jax_ep.experts.ragged_dot(rows, gate_up, down, group_sizes)


def halves(
    ep: jax_ep.EPHandle, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """Dispatch and combine on a rank's arrays, with work between their halves."""
    pending = jax_ep.dispatch_async(ep, x, ids, weights)
    beside = jax.nn.silu(x)
    d = jax_ep.dispatch_wait(pending)
    rows = assert_type(jax_ep.dequantize(d), jax.Array)
    assert_type(jax_ep.expert_of_row(d), jax.Array)
    back = jax_ep.combine_async(ep, 2 * rows, d.route, d.router_weights)
    y = assert_type(jax_ep.combine_wait(back), jax.Array)
    return y + beside


def fused(
    ep: jax_ep.EPHandle, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """The same in whole calls."""
    d = assert_type(jax_ep.dispatch(ep, x, ids, weights), jax_ep.Dispatched)
    rows = 2 * jax_ep.dequantize(d)
    y = jax_ep.combine(ep, rows, d.route, d.router_weights, residual=jax.nn.silu(x))
    return assert_type(y, jax.Array)


def doubled(
    rows: jax.Array, group_sizes: jax.Array, expert_of_row: jax.Array
) -> jax.Array:
    """Of one rank, for `apply_experts`."""
    return 2 * rows


def scaled(
    params: Params,
    rows: jax.Array,
    group_sizes: jax.Array,
    expert_of_row: jax.Array,
) -> jax.Array:
    """The same with parameters, for `sharded.apply_experts`."""
    return params["scale"][expert_of_row] * rows


def applied(
    mesh: Mesh, params: Params, x: jax.Array, ids: jax.Array, weights: jax.Array
) -> jax.Array:
    """The whole exchange in one call, on the arrays of a rank and on global ones."""

    def body(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        y, dropped = jax_ep.apply_experts(
            doubled,
            x,
            ids,
            weights,
            num_experts=EXPERTS,
            axis_name="ep",
            mesh=mesh,
            return_dropped=True,
            capacity_factor=8.0,
        )
        assert_type(dropped, jax.Array)
        return y

    y = jax_ep.sharded.apply_experts(
        scaled, params, x, ids, weights, num_experts=EXPERTS, axis_name="ep", mesh=mesh
    )
    assert_type(y, jax.Array)
    spec = P("ep")
    twice = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    return y + twice(x, ids, weights)


def routed(logits: jax.Array) -> jax_ep.router.Routing:
    """By a router with its options."""
    router = jax_ep.router.Router(score="sigmoid", scale=2.5)
    return jax_ep.router.route(logits, 2, router)


def round_trips(x: jax.Array) -> list[jax.Array]:
    """Through the codes of each format."""
    found: list[jax.Array] = []
    for name in jax_ep.formats.names():
        payload, scales = jax_ep.formats.quantize(x, name)
        y = jax_ep.formats.dequantize(payload, scales, name, dtype=jnp.float32)
        found.append(assert_type(y, jax.Array))
    return found


def moved(params: Params, load: jax_ep.stats.Load, places: int, ranks: int) -> Params:
    """Weights by place, of a placement for this load."""
    first = jax_ep.placement.identity(EXPERTS)
    rows = jax_ep.stats.summary(load, placement=first).expert_rows
    after = jax_ep.placement.balance(rows, places, ep_size=ranks)
    assert_type(after, jax_ep.placement.Placement)
    assert_type(after.assign(jnp.zeros((2, 2), jnp.int32), 1), jax.Array)
    gathered = assert_type(after.gather(params), Params)
    return assert_type(first.reshard(gathered, after), Params)


def train(mesh: Mesh, config: jax_ep.EPConfig, steps: int) -> list[float]:
    """Losses of a few steps."""
    key = jax.random.key(0)
    params: Params = {
        "router": jax.random.normal(key, (HIDDEN, EXPERTS)) / 8,
        "gate_up": jax.random.normal(key, (EXPERTS, HIDDEN, 2, INNER)) / 8,
        "down": jax.random.normal(key, (EXPERTS, INNER, HIDDEN)) / 8,
    }
    specs = {"router": P(), "gate_up": P("ep"), "down": P("ep")}
    tokens = jax.random.normal(key, (TOKENS * mesh.size, HIDDEN), config.dtype)
    values: list[float] = []
    with jax_ep.init(mesh, "ep", config, transport="collective") as ep:
        assert ep.transport == "collective"

        def layer(
            params: Params, x: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax_ep.MoEAux]:
            logits = jnp.dot(x.astype(jnp.float32), params["router"])
            routing = routed(logits)
            y = fused(ep, x, routing.ids, routing.weights)
            z = halves(ep, x, routing.ids, routing.weights)
            ffn, aux = jax_ep.moe_ffn(ep, x, params, experts=own_experts)
            assert_type(aux, jax_ep.MoEAux)
            return ffn + y, ffn + z, aux

        mapped = jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(specs, P("ep")),
            out_specs=(P("ep"), P("ep"), jax_ep.MoEAux.specs("ep")),
        )

        def loss(params: Params) -> tuple[jax.Array, jax_ep.MoEAux]:
            whole, parts, aux = jax.checkpoint(mapped, policy=jax_ep.save_route)(
                params, tokens
            )
            error = (whole + parts - tokens).astype(jnp.float32)
            return jnp.mean(error**2) + 1e-2 * aux.balance_loss, aux

        @jax.jit
        def step(
            params: Params, load: jax_ep.stats.Load
        ) -> tuple[Params, jax_ep.stats.Load, jax.Array]:
            (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
            return params, jax_ep.stats.update(load, aux), value

        load = jax_ep.stats.init(ep)
        for _ in range(steps):
            params, load, value = step(params, load)
            values.append(float(value))
        ep.check()
        fullest: int = jax_ep.stats.summary(load).fullest
        text: str = jax_ep.stats.heat_map(load)
        assert fullest > 0
        assert text
        experts = {name: params[name] for name in ("gate_up", "down")}
        back = moved(experts, load, EXPERTS + mesh.size, mesh.size)
        assert all((back[name] == experts[name]).all() for name in experts)
    assert ep.closed
    return values


def main() -> None:
    """Trains over the first two devices."""
    mesh = jax.make_mesh(
        (2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    values = train(mesh, make_config(overlap=False), 2)
    assert values[1] < values[0]
    routing = routed(jnp.ones((4, EXPERTS)))
    load = jax_ep.router.losses(routing).load
    bias = jax_ep.router.update_bias(np.zeros(EXPERTS, np.float32), load)
    jax_ep.router.route(np.ones((4, EXPERTS), np.float32), 2, bias=bias)
    x = jnp.ones((4, HIDDEN), jnp.bfloat16)
    params: Params = {"scale": jnp.ones((EXPERTS, 1), jnp.bfloat16)}
    assert applied(mesh, params, x, routing.ids, routing.weights).shape == x.shape
    assert all(y.shape == (2, 128) for y in round_trips(jnp.ones((2, 128))))


if __name__ == "__main__":
    main()
