"""Decodes with a stack of expert layers, with quantised tokens or weights.

    python examples/decode.py [--format nvfp4] [--steps 32] [--no-graphs]
    python examples/decode.py --format bf16 --weights mxfp4

It decodes a few tokens per rank and step, as in serving: one jitted `lax.scan` over the
steps has the key-value cache, attention, and `jax_ep.moe_ffn`. All shapes are static
and nothing waits for the host, so that on GPUs XLA captures a step in CUDA graphs;
--no-graphs shows what that saves. With `--weights` the experts' weights are codes,
quantised once.

Weights are random. The example shows the loop, its speed and where the time goes, and
how far rounding moves the logits from those of the model in bfloat16. Most move little.
A token's logits move far if rounding decides a near tie in a router, so that it goes to
another expert; such tokens are counted separately.
"""

import argparse
import functools
import os
import sys
import time

import jax_ep  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

BYTES, HIDDEN, INNER, HEADS, BLOCKS, TOP_K = 256, 128, 128, 4, 2, 2


def make_params(key, experts):
    """Draws random bfloat16 parameters for the whole model."""

    def normal(shape, fan_in):
        nonlocal key
        key, this = jax.random.split(key)
        return (jax.random.normal(this, shape) * fan_in**-0.5).astype(jnp.bfloat16)

    def block():
        return {
            "qkv": normal((HIDDEN, 3 * HIDDEN), HIDDEN),
            "out": normal((HIDDEN, HIDDEN), HIDDEN),
            "moe": {
                "router": normal((HIDDEN, experts), HIDDEN),
                "gate_up": normal((experts, HIDDEN, 2, INNER), HIDDEN),
                "down": normal((experts, INNER, HIDDEN), INNER),
            },
        }

    return {
        "embed": normal((BYTES, HIDDEN), 1),
        "head": normal((HIDDEN, BYTES), HIDDEN),
        "blocks": [block() for _ in range(BLOCKS)],
    }


def with_codes(mesh, params, weights):
    """Returns parameters with experts' weights in a format, and specs of them all."""
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: P("ep") if path[-1].key in ("gate_up", "down") else P(), params
    )
    if weights == "bf16":
        return params, specs
    quantize = functools.partial(jax_ep.experts.quantize_weights, format=weights)
    # Each rank quantises its own experts, once.
    quantize = jax.jit(
        jax.shard_map(quantize, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    )
    for block, spec in zip(params["blocks"], specs["blocks"], strict=True):
        moe = block["moe"]
        moe["experts"] = quantize(moe.pop("gate_up"), moe.pop("down"))
        spec["moe"] = {"router": P(), "experts": P("ep")}
    return params, specs


def normalise(x):
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def attend(block, x, cache, step):
    """Attends from one position over `cache` `[2, n, steps, heads, size]`."""
    n = x.shape[0]
    qkv = (normalise(x) @ block["qkv"]).reshape(n, 3, HEADS, HIDDEN // HEADS)
    cache = cache.at[:, :, step].set(jnp.moveaxis(qkv[:, 1:], 1, 0))
    scores = jnp.einsum("nhd,nshd->nhs", qkv[:, 0], cache[0]) * qkv.shape[-1] ** -0.5
    seen = jnp.arange(cache.shape[2]) <= step
    shares = jax.nn.softmax(jnp.where(seen, scores.astype(jnp.float32), -jnp.inf))
    mixed = jnp.einsum("nhs,nshd->nhd", shares.astype(x.dtype), cache[1])
    return x + mixed.reshape(n, HIDDEN) @ block["out"], cache


def choose(block, rows):
    """Routes as `jax_ep.moe_ffn` does; done here to see what the router decides."""
    operands = rows.astype(jnp.float32), block["moe"]["router"].astype(jnp.float32)
    logits = jnp.dot(*operands, precision=jax.lax.Precision.HIGHEST)
    return jax_ep.router.route(logits, TOP_K)


def decode(ep, steps, moe_ffn, params, prompt, given=None):
    """Decodes what follows the bytes `prompt` `[n]`. Runs inside shard_map.

    Returns bytes `[n, steps]`, logits `[n, steps, 256]` and experts
    `[n, steps, BLOCKS, K]`. With `given` `[n, steps]`, these bytes follow instead of
    the most likely ones. `moe_ffn(ep, rows, params, routing)` computes a layer.
    """
    n = prompt.shape[0]
    shape = (BLOCKS, 2, n, steps, HEADS, HIDDEN // HEADS)
    caches = jax.lax.pcast(jnp.zeros(shape, jnp.bfloat16), "ep", to="varying")

    def one(carry, at):
        (tokens, caches), (step, told) = carry, at
        x = params["embed"][tokens]
        kept, experts = [], []
        for block, cache in zip(params["blocks"], caches, strict=True):
            x, cache = attend(block, x, cache, step)
            rows = normalise(x)
            routing = choose(block, rows)
            x = x + moe_ffn(ep, rows, block["moe"], routing)
            kept.append(cache)
            experts.append(routing.ids)
        logits = (normalise(x) @ params["head"]).astype(jnp.float32)
        tokens = jnp.argmax(logits, -1).astype(prompt.dtype) if told is None else told
        out = tokens, logits, jnp.stack(experts, 1)
        return (tokens, jnp.stack(kept)), out

    told = None if given is None else given.T
    carry, each = (prompt, caches), (jnp.arange(steps), told)
    _, out = jax.lax.scan(one, carry, each)
    return tuple(jnp.moveaxis(each, 0, 1) for each in out)


def whole(ep, rows, params, routing):
    """A whole expert layer."""
    quantised = "experts" in params
    run = jax_ep.experts.fp8 if quantised else None
    return jax_ep.moe_ffn(ep, rows, params, routing=routing, experts=run)[0]


def exchange_alone(ep, rows, params, routing):
    """A layer whose experts do nothing."""
    local = ep.config.num_experts // ep.ep_size
    # F may be anything, since nothing reads them.
    none = {
        "router": params["router"],
        "gate_up": jnp.zeros((local, HIDDEN, 2, 1), rows.dtype),
        "down": jnp.zeros((local, 1, HIDDEN), rows.dtype),
    }

    def experts(rows, gate_up, down, group_sizes):
        del gate_up, down, group_sizes
        return rows

    return jax_ep.moe_ffn(ep, rows, none, routing=routing, experts=experts)[0]


def no_layer(ep, rows, params, routing):
    """No layer: times the rest of the model."""
    del ep, params, routing
    return rows


def run(mesh, name, steps, n, given=None, seed=0, weights="bf16", parts=False):
    """Decodes; returns the bytes, every step's logits and experts, and us per step.

    `name` is the dispatch format, `weights` the format of experts' weights. With
    `parts` the time is a dict: of everything, of the exchange and of the experts.
    """
    experts = 4 * mesh.size
    params = make_params(jax.random.key(seed), experts)
    params, specs = with_codes(mesh, params, weights)
    prompt = jax.random.randint(jax.random.key(1), (n * mesh.size,), 0, BYTES)
    config = jax_ep.EPConfig(
        num_experts=experts,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=n,
        dispatch_format=name,
    )

    def timed(ep, layer):
        loop = jax.jit(
            jax.shard_map(
                functools.partial(decode, ep, steps, layer),
                mesh=mesh,
                in_specs=(specs, P("ep"), P("ep")),
                out_specs=P("ep"),
            )
        )
        out = jax.block_until_ready(loop(params, prompt, given))
        times = []
        for _ in range(5):  # graphs are captured in the first runs
            start = time.perf_counter()
            jax.block_until_ready(loop(params, prompt, given))
            times.append(time.perf_counter() - start)
        return out, min(times) / steps * 1e6

    with jax_ep.init(mesh, "ep", config) as ep:
        print(f"{name}, weights {weights}: {ep.ep_size} ranks, {ep.transport}")
        out, us = timed(ep, whole)
        if parts:
            crossing, rest = (timed(ep, each)[1] for each in (exchange_alone, no_layer))
            us = {"all": us, "exchange": crossing - rest, "experts": us - crossing}
        ep.check()
    return *map(np.asarray, out), us


def compare(logits, experts, other_logits, other_experts):
    """Returns what moved, by sequence and step.

    That is the largest difference of a token's logits over the largest logit, and
    whether the token went to another expert in any block.
    """
    errors = np.abs(other_logits - logits).max(-1) / np.abs(logits).max(-1)
    moved = np.sort(other_experts, -1) != np.sort(experts, -1)
    return errors, moved.any((-1, -2))


def describe(errors, rerouted):
    """Describes the findings of `compare` in words."""
    yield "how far a token's logits moved, as a share of the largest of them:"
    for what, part in (
        ("all tokens", errors),
        ("of them with the same experts as before", errors[~rerouted]),
        ("of them that rounding sent to another expert", errors[rerouted]),
    ):
        line = f"{part.size:>8} {what}"
        if part.size:
            line += f": median {np.median(part):.1%}, at most {part.max():.1%}"
        yield line


def ask_for_graphs(wanted):
    """Sets XLA's flags for CUDA graphs, which JAX reads when its backend starts."""
    kinds = "--xla_gpu_enable_command_buffer="  # no kinds of operations
    flag = "--xla_gpu_graph_min_graph_size=1" if wanted else kinds
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--format", default="nvfp4", choices=jax_ep.formats.names())
    parser.add_argument(
        "--weights",
        default="bf16",
        choices=("bf16", "fp8_block128", "mxfp4"),
        help="of experts; rows follow the dispatch format, which must suit experts.fp8",
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4, help="per rank and step")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args(arguments)
    ask_for_graphs(args.graphs)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))
    sizes = args.steps, args.tokens
    plain = run(mesh, "bf16", *sizes, parts=True)
    # Decodes the same bytes, so that every step can be compared.
    quantised = run(
        mesh, args.format, *sizes, plain[0], weights=args.weights, parts=True
    )
    label = f"{args.format}, weights {args.weights}"
    for name, (tokens, *_, us) in (("bf16", plain), (label, quantised)):
        rate = args.tokens * mesh.size / us["all"] * 1e6
        print(f"{name}: {us['all']:.0f} us per step, {rate:.0f} tokens per second")
        shares = (f"{part} {us[part] / us['all']:.0%}" for part in us if part != "all")
        print(f"    of it {', '.join(shares)}; {tokens[0, :8]} ...")
    errors, rerouted = compare(*plain[1:3], *quantised[1:3])
    print("\n".join(describe(errors, rerouted)))
    # It is 8% with 4-bit formats; a wrong row moves a token's logits by their own size.
    return 0 if np.median(errors) < 0.2 else 1


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
