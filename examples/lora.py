"""Fine-tunes through frozen codes with LoRA: only adapters train, experts stay codes.

    python examples/lora.py                             weights in mxfp4
    python examples/lora.py --weights fp8_block128
    python examples/lora.py --on-result                 adapts the experts' results, too

Each expert has low-rank matrices A and B beside its gate and up, which then multiply by
W + A B. No such sum is made: rows are multiplied by the codes of W, and by A and then
B. A stack of layers learns to be another one, whose experts have random A and B beside
the same codes. The command exits 1 unless the loss on tokens that it has not trained on
falls by the factor below. Runs on 8 virtual CPU devices, or GPUs. Needs pip install
optax.
"""

import argparse
import functools
import sys
from typing import Literal

import jax_ep  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FACTOR = 5
LAYERS, HIDDEN, INNER, TOP_K, TOKENS = 2, 128, 128, 2, 64
# How tokens travel: codes of rows suit codes of eight bits.
DISPATCH: dict[str, Literal["bf16", "fp8_block128"]] = {
    "mxfp4": "bf16",
    "fp8_block128": "fp8_block128",
}
multiply = jax_ep.experts.grouped_matmul


def experts_with(adapters):
    """Returns experts for `jax_ep.moe_ffn`: codes, and adapters of this rank's experts.

    `adapters` has pairs of A `[L, in, rank]` and B `[L, rank, out]` for "gate" and
    "up", and perhaps "result".
    """

    @jax_ep.experts.takes_dispatched
    def experts(d, codes, down):
        def added(rows, name):
            a, b = adapters[name]
            return multiply(multiply(rows, a, d.group_sizes), b, d.group_sizes)

        rows = jax_ep.dequantize(d)
        gate_more, up_more = added(rows, "gate"), added(rows, "up")

        # Frozen codes have no gradients, but what an activation closes over does.
        def activation(gate, up):
            return jax.nn.silu(gate + gate_more) * (up + up_more)

        out = jax_ep.experts.fp8(d, codes, down, activation=activation)
        return out + added(out, "result") if "result" in adapters else out

    return experts


def normalise(x):
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def stack(ep, adapters, frozen, tokens):
    """Applies layers to the tokens of a rank; runs inside shard_map."""
    for own, layer in zip(adapters, frozen, strict=True):
        y, _ = jax_ep.moe_ffn(ep, normalise(tokens), layer, experts=experts_with(own))
        tokens = tokens + y
    return tokens


def apply(ep, adapters, frozen, tokens):
    """Applies layers to global arrays."""
    layer = {"router": P(), "experts": P("ep")}
    over_ranks = jax.shard_map(
        functools.partial(stack, ep),
        mesh=ep.mesh,
        in_specs=(P("ep"), [layer] * len(frozen), P("ep")),
        out_specs=P("ep"),
    )
    return over_ranks(adapters, frozen, tokens)


def make_frozen(mesh, key, experts, weights):
    """Draws routers, and experts as codes, each rank its own."""
    quantize = functools.partial(
        jax_ep.experts.quantize_weights, format=weights, backward=True
    )
    quantize = jax.jit(
        jax.shard_map(quantize, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    )

    def layer(key):
        of_router, of_gate_up, of_down = jax.random.split(key, 3)
        gate_up = jax.random.normal(of_gate_up, (experts, HIDDEN, 2, INNER))
        down = jax.random.normal(of_down, (experts, INNER, HIDDEN))
        router = jax.random.normal(of_router, (HIDDEN, experts))
        return {
            "router": router * HIDDEN**-0.5,
            "experts": quantize(gate_up * HIDDEN**-0.5, down * INNER**-0.5),
        }

    return [layer(each) for each in jax.random.split(key, LAYERS)]


def make_adapters(mesh, key, experts, rank, on_result, size=0.0):
    """Draws A, and B of a size; with 0 experts are at first what their codes are."""
    widths = {"gate": INNER, "up": INNER} | ({"result": HIDDEN} if on_result else {})

    def pair(key, width):
        of_a, of_b = jax.random.split(key)
        a = jax.random.normal(of_a, (experts, HIDDEN, rank)) * HIDDEN**-0.5
        b = jax.random.normal(of_b, (experts, rank, width)) * size * rank**-0.5
        return jax.device_put((a, b), NamedSharding(mesh, P("ep")))

    def layer(key):
        keys = jax.random.split(key, len(widths))
        return {
            name: pair(each, width)
            for each, (name, width) in zip(keys, widths.items(), strict=True)
        }

    return [layer(each) for each in jax.random.split(key, LAYERS)]


def loss(ep, adapters, frozen, tokens, target):
    y = apply(ep, adapters, frozen, tokens)
    return jnp.mean(jnp.square((y - target).astype(jnp.float32)))


def train(ep, adapters, teacher, frozen, steps, rate, dtype):
    """Returns trained adapters, and the loss on other tokens before and after."""
    rule = optax.adam(optax.cosine_decay_schedule(rate, steps))
    run = jax.jit(functools.partial(apply, ep))

    def draw(number):
        shape = TOKENS * ep.mesh.size, HIDDEN
        tokens = jax.random.normal(jax.random.key(number), shape, dtype)
        tokens = jax.device_put(tokens, NamedSharding(ep.mesh, P("ep")))
        return tokens, run(teacher, frozen, tokens)

    @jax.jit
    def step(adapters, state, frozen, tokens, target):
        grads = jax.grad(functools.partial(loss, ep))(adapters, frozen, tokens, target)
        updates, state = rule.update(grads, state)
        return optax.apply_updates(adapters, updates), state

    held_out = draw(0)
    measure = jax.jit(functools.partial(loss, ep))
    before, state = float(measure(adapters, frozen, *held_out)), rule.init(adapters)
    for number in range(1, steps + 1):
        adapters, state = step(adapters, state, frozen, *draw(number))
    return adapters, before, float(measure(adapters, frozen, *held_out))


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", default="mxfp4", choices=tuple(DISPATCH))
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.03)
    parser.add_argument("--on-result", action="store_true")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args(arguments)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))
    experts = 2 * mesh.size
    config = jax_ep.EPConfig(
        num_experts=experts,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=TOKENS,
        dispatch_format=DISPATCH[args.weights],
        dtype=args.dtype,
    )
    keys = jax.random.split(jax.random.key(0), 3)
    frozen = make_frozen(mesh, keys[0], experts, args.weights)
    sizes = experts, args.rank, args.on_result
    adapters = make_adapters(mesh, keys[1], *sizes)
    teacher = make_adapters(mesh, keys[2], *sizes, size=0.5)
    first = bits(frozen)
    with jax_ep.init(mesh, "ep", config) as ep:
        adapters, before, after = train(
            ep, adapters, teacher, frozen, args.steps, args.rate, args.dtype
        )
        ep.check()
    counts = [sum(leaf.size for leaf in jax.tree.leaves(t)) for t in (adapters, frozen)]
    print(f"{counts[0]} parameters train beside codes in {counts[1]} elements")
    print(f"loss {before:.4f} before, {after:.4f} after {args.steps} steps")
    same = bits(frozen) == first
    print(f"codes and routers are {'the same' if same else 'CHANGED'}")
    return 0 if same and after * FACTOR < before else 1


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
