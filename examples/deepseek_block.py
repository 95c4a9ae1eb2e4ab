"""DeepSeek-V3's feed-forward block, on `jax_ep.apply_experts`.

    python examples/deepseek_block.py              a small one, beside the dense formula
    python examples/deepseek_block.py --size v3    of the model's own sizes, on GPUs

The block runs in a `jax.shard_map` of its own, as in trainers that have one for other
reasons. Its router is a sigmoid with groups, and with a bias that balances the experts
without a loss; beside the routed experts there is a shared one. At the model's sizes
tokens travel in fp8, with one scale per 128 elements, and sums come back in bfloat16.
"""

import argparse
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, named as in DeepSeek-V3's config.json."""

    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    dispatch_format: str = "fp8_block128"

    @property
    def router(self):
        return jax_ep.router.Router(
            score="sigmoid",
            num_groups=self.n_group,
            top_groups=self.topk_group,
            scale=self.routed_scaling_factor,
        )


SIZES = {
    "small": Config(64, 32, 32, 4, 8, 4, dtype="float32", dispatch_format="bf16"),
    "v3": Config(7168, 2048, 256, 8, 8, 4),
}
SPECS = {
    "norm": P(),
    "router": P(),
    "gate": P("expert"),
    "up": P("expert"),
    "down": P("expert"),
    "shared_gate": P(),
    "shared_up": P(),
    "shared_down": P(),
}
BATCH = P(("data", "expert"))


def init(config, key):
    """Draws the weights of one block."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    experts, shared = config.n_routed_experts, config.n_shared_experts * inner
    shapes = {
        "router": (hidden, experts),
        "gate": (experts, hidden, inner),
        "up": (experts, hidden, inner),
        "down": (experts, inner, hidden),
        "shared_gate": (hidden, shared),
        "shared_up": (hidden, shared),
        "shared_down": (shared, hidden),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: (jax.random.normal(k, shape) / shape[-2] ** 0.5).astype(config.dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    # Which of two nearly equal scores is chosen depends on the router's precision.
    params["router"] = params["router"].astype(jnp.float32)
    return params | {"norm": jnp.ones(hidden, config.dtype)}


def block(config, mesh, params, bias, x):
    """Returns `x + experts(norm(x))` and each expert's share of the rows.

    Arrays are global: x `[batch, sequence, hidden]`, bias float32 `[experts]`.
    """

    def body(params, bias, x):
        normed = rms_norm(x, params["norm"], config.rms_norm_eps)
        routing = route(config, params["router"], bias, normed)

        def experts(rows, group_sizes, expert_of_row):
            gate = jax.lax.ragged_dot(rows, params["gate"], group_sizes)
            up = jax.lax.ragged_dot(rows, params["up"], group_sizes)
            return jax.lax.ragged_dot(
                jax.nn.silu(gate) * up, params["down"], group_sizes
            )

        top_k = config.num_experts_per_tok
        y = jax_ep.apply_experts(
            experts,
            normed,
            routing.ids.reshape(*x.shape[:-1], top_k),
            routing.weights.reshape(*x.shape[:-1], top_k),
            num_experts=config.n_routed_experts,
            axis_name="expert",
            mesh=mesh,
            dispatch_format=config.dispatch_format,
        )
        losses = jax_ep.router.losses(routing, ("data", "expert"))
        return x + y + shared_expert(params, normed), losses.load

    return jax.shard_map(
        body, mesh=mesh, in_specs=(SPECS, P(), BATCH), out_specs=(BATCH, P())
    )(params, bias, x)


def route(config, kernel, bias, x):
    logits = x.reshape(-1, x.shape[-1]).astype(jnp.float32) @ kernel
    top_k = config.num_experts_per_tok
    return jax_ep.router.route(logits, top_k, config.router, bias=bias)


def shared_expert(params, x):
    inner = jax.nn.silu(x @ params["shared_gate"]) * (x @ params["shared_up"])
    return inner @ params["shared_down"]


def rms_norm(x, scale, eps):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def dense(config, params, bias, x):
    """Computes the same, with every expert on every token."""
    normed = rms_norm(x, params["norm"], config.rms_norm_eps)
    routing = route(config, params["router"], bias, normed)
    tokens = normed.reshape(-1, x.shape[-1])
    dot = functools.partial(jnp.einsum, "nh,ehf->nef", tokens)
    rows = jax.nn.silu(dot(params["gate"])) * dot(params["up"])
    rows = jnp.einsum("nef,efh->neh", rows, params["down"])
    chosen = jax.nn.one_hot(routing.ids, config.n_routed_experts)
    y = jnp.einsum("nke,nk,neh->nh", chosen, routing.weights, rows)
    y = x + y.reshape(x.shape) + shared_expert(params, normed)
    return y, jax_ep.router.losses(routing).load


def make_mesh(config):
    """Makes a mesh with ranks that divide the experts, the other devices on "data"."""
    devices = jax.device_count()
    ranks = math.gcd(max(devices // 2, 1), config.n_routed_experts)
    return jax.make_mesh(
        (devices // ranks, ranks),
        ("data", "expert"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def main(arguments=None):
    """Makes a few steps of the bias; compares gradients with the dense formula's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="of the router's bias")
    given = parser.parse_args(arguments)
    config = SIZES[given.size]
    mesh = make_mesh(config)
    params = {
        name: jax.device_put(value, NamedSharding(mesh, SPECS[name]))
        for name, value in init(config, jax.random.key(0)).items()
    }
    shape = (mesh.size, given.sequence, config.hidden_size)
    x = jax.random.normal(jax.random.key(1), shape).astype(config.dtype)
    x = jax.device_put(x, NamedSharding(mesh, BATCH))

    def loss(layer, params, bias):
        y, load = layer(params, bias, x)
        return jnp.mean(jnp.sin(y.astype(jnp.float32))), load

    @jax.jit
    def step(params, bias):
        layer = functools.partial(block, config, mesh)
        grad = jax.value_and_grad(functools.partial(loss, layer), has_aux=True)
        (value, load), grads = grad(params, bias)
        return value, load, grads, jax_ep.router.update_bias(bias, load, rate=0.01)

    bias, loads = jnp.zeros(config.n_routed_experts), []
    for _ in range(max(given.steps, 1)):
        before = bias
        value, load, grads, bias = step(params, before)
        loads.append(float(jnp.max(load)) * config.n_routed_experts)
    print(f"{given.size} on {dict(mesh.shape)}: loss {float(value):.6f}")
    print(f"busiest expert over the mean: {loads[0]:.2f} at first, {loads[-1]:.2f} now")
    if given.size != "small":
        return None
    plain = functools.partial(loss, functools.partial(dense, config))
    wanted, _ = jax.jit(jax.grad(plain, has_aux=True))(params, before)
    off = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))),
        grads,
        wanted,
    )
    print("largest difference of a gradient from the dense formula's, relative:")
    print("  ".join(f"{name} {value:.1e}" for name, value in off.items()))
    return off, loads


if __name__ == "__main__":
    main()
