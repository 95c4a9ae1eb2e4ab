"""Mixtral's feed-forward block, on `jax_ep.sharded.apply_experts`.

    python examples/mixtral_block.py               a small one, beside the dense formula
    python examples/mixtral_block.py --size 8x7b   of the model's own sizes, on GPUs

All arrays are global. The experts' weights are split over "expert", and stored in parts
over "fsdp", which splits the batch, too.
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
    """Sizes, named as in Mixtral's config.json."""

    hidden_size: int
    intermediate_size: int
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    rms_norm_eps: float = 1e-5
    dtype: str = "bfloat16"


SIZES = {
    "small": Config(64, 96, dtype="float32"),
    "8x7b": Config(4096, 14336),
    "8x22b": Config(6144, 16384),
}
SPECS = {
    "norm": P(),
    "gate": P(),
    "w1": P("expert", "fsdp"),
    "w3": P("expert", "fsdp"),
    "w2": P("expert", "fsdp"),
}


def init(config, key):
    """Draws the weights of one block: SwiGLU's gate `w1`, up `w3` and down `w2`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    experts = config.num_local_experts
    shapes = {
        "gate": (hidden, experts),
        "w1": (experts, hidden, inner),
        "w3": (experts, hidden, inner),
        "w2": (experts, inner, hidden),
    }
    keys = jax.random.split(key, len(shapes))
    params = {
        name: (jax.random.normal(k, shape) / shape[-2] ** 0.5).astype(config.dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"norm": jnp.ones(hidden, config.dtype)}


def block(config, mesh, params, x):
    """Returns `x + experts(norm(x))` for x `[batch, sequence, hidden]`."""
    normed = rms_norm(x, params["norm"], config.rms_norm_eps)
    weights, ids = route(config, params["gate"], normed)
    experts = {name: params[name] for name in ("w1", "w2", "w3")}
    return x + jax_ep.sharded.apply_experts(
        swiglu,
        experts,
        normed,
        ids,
        weights,
        num_experts=config.num_local_experts,
        axis_name="expert",
        mesh=mesh,
        param_specs={name: SPECS[name] for name in experts},
        fsdp_axis="fsdp",
    )


def swiglu(params, rows, group_sizes, expert_of_row):
    """Runs the experts of one rank on rows grouped by expert."""
    gate = jax.lax.ragged_dot(rows, params["w1"], group_sizes)
    up = jax.lax.ragged_dot(rows, params["w3"], group_sizes)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, params["w2"], group_sizes)


def route(config, gate, x):
    """Routes by a softmax over the chosen experts' logits, in float32."""
    logits = (x @ gate).astype(jnp.float32)
    chosen, ids = jax.lax.top_k(logits, config.num_experts_per_tok)
    return jax.nn.softmax(chosen), ids


def rms_norm(x, scale, eps):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * scale


def dense(config, params, x):
    """Computes the same, with every expert on every token."""
    normed = rms_norm(x, params["norm"], config.rms_norm_eps)
    weights, ids = route(config, params["gate"], normed)
    dot = functools.partial(jnp.einsum, "bsh,ehf->bsef", normed)
    rows = jax.nn.silu(dot(params["w1"])) * dot(params["w3"])
    rows = jnp.einsum("bsef,efh->bseh", rows, params["w2"])
    chosen = jax.nn.one_hot(ids, config.num_local_experts) * weights[..., None]
    return x + jnp.einsum("bske,bseh->bsh", chosen.astype(x.dtype), rows)


def make_mesh(config):
    """Makes a mesh with ranks that divide the experts, the other devices on "fsdp"."""
    devices = jax.device_count()
    ranks = math.gcd(max(devices // 2, 1), config.num_local_experts)
    return jax.make_mesh(
        (devices // ranks, ranks),
        ("fsdp", "expert"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def main(arguments=None):
    """Takes a block's gradients; the small one is compared with the dense formula."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--sequence", type=int, default=16)
    given = parser.parse_args(arguments)
    config = SIZES[given.size]
    mesh = make_mesh(config)
    params = {
        name: jax.device_put(value, NamedSharding(mesh, SPECS[name]))
        for name, value in init(config, jax.random.key(0)).items()
    }
    shape = (mesh.size, given.sequence, config.hidden_size)
    x = jax.random.normal(jax.random.key(1), shape).astype(config.dtype)
    x = jax.device_put(x, NamedSharding(mesh, P(("fsdp", "expert"))))

    def loss(layer, params):
        return jnp.mean(jnp.sin(layer(params, x).astype(jnp.float32)))

    layer = jax.checkpoint(
        functools.partial(block, config, mesh), policy=jax_ep.save_route
    )
    step = jax.jit(jax.value_and_grad(functools.partial(loss, layer)))
    value, grads = step(params)
    print(f"{given.size} on {dict(mesh.shape)}: loss {float(value):.6f}")
    if given.size != "small":
        return None
    plain = jax.jit(jax.grad(functools.partial(loss, functools.partial(dense, config))))
    off = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))),
        grads,
        plain(params),
    )
    print("largest difference of a gradient from the dense formula's, relative:")
    print("  ".join(f"{name} {value:.1e}" for name, value in off.items()))
    return off


if __name__ == "__main__":
    main()
