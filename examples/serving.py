"""What serve_gpt_oss.py and serve_deepseek.py share; see there how to run them.

That is the folder of a checkpoint, the transformer around attention and experts, the
prefill of a batch of prompts and the greedy decode loop with a cache, their times, and
the comparison with transformers. A `Model` says what differs.

Each rank has some of the prompts, with their cache, and some of the experts of every
layer. It has all other weights.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import pathlib
import tempfile
import time
import types

import jax_ep  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ep import checkpoints

FILES = 3  # of a checkpoint of random weights


class Model:
    """A transformer whose layers have attention and experts, or an MLP.

    Attributes:
        config: the checkpoint's config.json.
        dtype: of activations and of all weights that are no codes.
        dispatch_format: how tokens travel to their experts.
        reference: the model's class in transformers.
        decoder: the class there that says to decode codes; None if that is done here.
    """

    dispatch_format = "bf16"
    reference: str
    decoder: str | None = None

    def __init__(self, config, dtype="bfloat16"):
        self.config = types.SimpleNamespace(**config)
        self.dtype = np.dtype(dtype)

    @classmethod
    def random(cls, rng):
        """Returns config.json and the tensors of a small checkpoint."""
        raise NotImplementedError

    @property
    def num_experts(self):
        raise NotImplementedError

    def attention_of(self, tensors, layer):
        """Returns the parameters of a layer's attention."""
        raise NotImplementedError

    def experts_of(self, tensors, layer):
        """Returns `jax_ep.moe_ffn`'s parameters: of all ranks, and of each its own."""
        raise NotImplementedError

    def cache_shapes(self):
        """Returns the shapes of what a layer keeps of a token."""
        raise NotImplementedError

    def attend(self, layer, params, x, positions, cache):
        """Returns the attention of x `[b, t, H]`, and the cache with its tokens."""
        raise NotImplementedError

    def feed(self, ep, params, rows):
        """Returns the result of experts or an MLP for rows `[n, H]`."""
        raise NotImplementedError

    def matrix(self, tensors, name):
        """Returns the matrix of a PyTorch `Linear` as `[in, out]`."""
        return decoded(tensors, name).T.astype(self.dtype)

    def vector(self, tensors, name):
        return tensors[name].astype(self.dtype)


# Checkpoints


def decoded(tensors, name):
    """Returns a weight `[out, in]`: as it is, or the values of fp8 codes."""
    codes, scales = tensors[f"{name}.weight"], f"{name}.weight_scale_inv"
    if scales not in tensors:
        return codes
    each = np.kron(tensors[scales].astype(np.float32), np.ones((128, 128), np.float32))
    # The last block of a dimension may be smaller.
    return codes.astype(np.float32) * each[: codes.shape[0], : codes.shape[1]]


def write(folder, config, tensors):
    """Writes a checkpoint as it is published: config.json, an index and some files."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(tensors), {}
    size = -(-len(names) // FILES)
    for number in range(FILES):
        file = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = names[number * size : (number + 1) * size]
        checkpoints.save_safetensors(folder / file, {n: tensors[n] for n in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def normal(rng, *shape, fan_in=None):
    """Draws a weight `[out, in]` in bfloat16."""
    spread = (fan_in or shape[-1]) ** -0.5
    return (rng.standard_normal(shape, np.float32) * spread).astype(jnp.bfloat16)


def near_one(rng, size):
    """Draws the weights of a norm."""
    return (1 + 0.1 * rng.standard_normal(size, np.float32)).astype(jnp.bfloat16)


def load(model, mesh, tensors):
    """Puts a checkpoint on the mesh; each device reads its own experts only."""
    whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("ep")))
    prepare = jax.jit(
        jax.shard_map(
            jax_ep.experts.prepare, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
        )
    )

    def layer(number):
        name = f"model.layers.{number}"
        of_all, experts = model.experts_of(tensors, number)
        placed = checkpoints.place(experts, split)
        if "experts" in placed:
            placed["experts"] = prepare(placed["experts"])  # once, not in every call
        params = {
            "attention_norm": model.vector(tensors, f"{name}.input_layernorm.weight"),
            "attention": model.attention_of(tensors, number),
            "feed_norm": model.vector(
                tensors, f"{name}.post_attention_layernorm.weight"
            ),
            "feed": of_all,
        }
        params = checkpoints.place(params, whole)
        params["feed"] |= placed
        return params

    ends = {
        "embed": model.vector(tensors, "model.embed_tokens.weight"),
        "norm": model.vector(tensors, "model.norm.weight"),
        "head": model.matrix(tensors, "lm_head"),
    }
    layers = [layer(number) for number in range(model.config.num_hidden_layers)]
    return checkpoints.place(ends, whole) | {"layers": layers}


# The transformer


def rms_norm(x, weight, epsilon):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + epsilon)
    return (x32 * weight).astype(x.dtype)


def logarithmic(factor, scale=1.0):
    """How much larger YaRN makes attention's logits, as a root, for longer contexts."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def rotary(size, theta, scaling):
    """Returns the angle per position of each of `size / 2` pairs, and a factor.

    With `scaling`, as config.json has it for YaRN, pairs that turn less than
    `beta_slow` times in the context of the pretraining turn more slowly, by the factor
    by which the context grew. Those that turn more than `beta_fast` times stay as they
    are. The factor multiplies sines and cosines.
    """
    speeds = theta ** (-np.arange(0, size, 2) / size)
    if scaling is None:
        return speeds, 1.0
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_with(turns):
        return size * math.log(context / turns / (2 * math.pi)) / (2 * math.log(theta))

    first = pair_with(scaling.get("beta_fast", 32))
    last = pair_with(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    slowed = (np.arange(size // 2) - first) / max(last - first, 1e-3)
    slowed = np.clip(slowed, 0, 1)
    speeds = speeds * (1 - slowed) + speeds / factor * slowed
    kinds = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if all(kinds):
        return speeds, logarithmic(factor, kinds[0]) / logarithmic(factor, kinds[1])
    return speeds, logarithmic(factor)


def rotate(x, positions, speeds, factor, *, interleaved=False):
    """Rotates pairs of x `[b, t, heads, size]`.

    A pair is an element of the first half with one of the second, or if interleaved two
    neighbours. The result has halves in either case.
    """
    angles = positions[:, None, None] * jnp.asarray(speeds, jnp.float32)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    x32 = x.astype(jnp.float32)
    if interleaved:
        one, other = x32[..., ::2], x32[..., 1::2]
    else:
        one, other = jnp.split(x32, 2, -1)
    turned = one * cos - other * sin, other * cos + one * sin
    return jnp.concatenate(turned, -1).astype(x.dtype)


def attention(q, keys, values, positions, *, scale, window=None, sinks=None):
    """Attends from q `[b, t, heads, d]`, whose tokens have `positions`, over a cache.

    Keys `[b, s, groups, d]` and values `[b, s, groups, e]` are those of positions from
    0, and serve heads / groups heads each. With a window, a token sees itself and those
    just before it, `window` in all. Sinks `[heads]` are logits that take a share and
    have no value. The result is `[b, t, heads, e]`.
    """
    batch, length, heads, _ = q.shape
    groups = keys.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, -1)
    wide = {"preferred_element_type": jnp.float32}
    logits = jnp.einsum("btgid,bsgd->bgits", q, keys, **wide) * scale
    at = jnp.arange(keys.shape[1])
    seen = at <= positions[:, None]
    if window is not None:
        seen &= at > positions[:, None] - window
    logits = jnp.where(seen, logits, -jnp.inf)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(groups, -1, 1, 1)
        column = jnp.broadcast_to(column, (*logits.shape[:-1], 1))
        logits = jnp.concatenate([logits, column], -1)
    shares = jax.nn.softmax(logits)[..., : len(at)].astype(values.dtype)
    mixed = jnp.einsum("bgits,bsge->btgie", shares, values)
    return mixed.reshape(batch, length, heads, -1)


def empty_cache(model, batch, capacity):
    return [
        [
            jnp.zeros((batch, capacity, *shape), model.dtype)
            for shape in model.cache_shapes()
        ]
        for _ in range(model.config.num_hidden_layers)
    ]


def extended(cache, new, positions):
    """Returns a layer's cache with what it keeps of the tokens at `positions`."""
    return [
        jax.lax.dynamic_update_slice_in_dim(old, each, positions[0], axis=1)
        for old, each in zip(cache, new, strict=True)
    ]


def forward(model, ep, params, tokens, cache, start):
    """Applies all layers to tokens `[b, t]` whose positions count from `start`.

    Returns hidden states `[b, t, H]` and the cache.
    """
    positions, epsilon = start + jnp.arange(tokens.shape[1]), model.config.rms_norm_eps
    x, kept = params["embed"][tokens], []
    for number, (layer, own) in enumerate(zip(params["layers"], cache, strict=True)):
        rows = rms_norm(x, layer["attention_norm"], epsilon)
        y, own = model.attend(number, layer["attention"], rows, positions, own)
        x = x + y
        rows = rms_norm(x, layer["feed_norm"], epsilon)
        y = model.feed(ep, layer["feed"], rows.reshape(-1, x.shape[-1]))
        x = x + y.reshape(x.shape)
        kept.append(own)
    return rms_norm(x, params["norm"], epsilon), kept


def logits_of(params, x):
    return jnp.matmul(x, params["head"], preferred_element_type=jnp.float32)


# Prefill and decode, which run inside shard_map on one rank's prompts


def prefill(model, ep, capacity, params, prompts, *, every=False):
    """Returns logits `[b, t, vocabulary]`, t being 1 unless `every`, and the cache."""
    cache = empty_cache(model, len(prompts), capacity)
    x, cache = forward(model, ep, params, prompts, cache, 0)
    return logits_of(params, x if every else x[:, -1:]), cache


def decode(model, ep, start, steps, params, logits, cache):
    """Decodes `steps` tokens after the most likely one by `logits` `[b, 1, ...]`.

    Returns tokens `[b, 1 + steps]`, and the logits `[b, steps, vocabulary]` that tell
    all but the first.
    """

    def most_likely(logits):
        return jnp.argmax(logits, -1).astype(jnp.int32)

    def one(carry, position):
        tokens, cache = carry
        x, cache = forward(model, ep, params, tokens, cache, position)
        logits = logits_of(params, x)
        tokens = most_likely(logits)
        return (tokens, cache), (tokens[:, 0], logits[:, 0])

    first = most_likely(logits)
    at = start + jnp.arange(steps)
    _, (tokens, logits) = jax.lax.scan(one, (first, cache), at)
    tokens = jnp.concatenate([first, tokens.T], 1)
    return tokens, jnp.moveaxis(logits, 0, 1)


def over_ranks(mesh, params, run, count):
    """Jits a function of params and `count` arguments that are split over ranks."""
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    given = (specs, *[P("ep")] * count)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=P("ep")))


def handle(model, mesh, tokens):
    """Opens a handle for calls with up to `tokens` tokens per rank."""
    config = jax_ep.EPConfig(
        num_experts=model.num_experts,
        top_k=model.config.num_experts_per_tok,
        hidden_size=model.config.hidden_size,
        max_tokens_per_rank=tokens,
        dispatch_format=model.dispatch_format,
        dtype=model.dtype,
    )
    return jax_ep.init(mesh, "ep", config)


def prefilled(model, mesh, params, tokens):
    """Returns all logits of tokens `[n, length]`, without a cache of earlier ones."""
    count, length = tokens.shape
    with handle(model, mesh, count // mesh.size * length) as ep:
        run = functools.partial(prefill, model, ep, length, every=True)
        logits, _ = over_ranks(mesh, params, run, 1)(params, tokens)
        return np.asarray(logits)


def timed(run, *arguments):
    """Returns the result, and the seconds that the fastest of several calls took."""
    out = jax.block_until_ready(run(*arguments))  # compiles
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - start)
    return out, min(times)


def serve(model, mesh, params, prompts, steps):
    """Continues prompts `[n, length]`.

    Returns what `decode` does, and the seconds of prefill and of decode.
    """
    count, length = prompts.shape
    own = count // mesh.size
    # Calls of a decode step have few rows per expert: a handle for as many as they need
    # keeps their buffers small, and lets kernels for few rows run.
    with handle(model, mesh, own * length) as ep, handle(model, mesh, own) as small:
        run = functools.partial(prefill, model, ep, length + steps)
        run = over_ranks(mesh, params, run, 1)
        (logits, cache), before = timed(run, params, prompts)
        run = functools.partial(decode, model, small, length, steps)
        run = over_ranks(mesh, params, run, 2)
        (tokens, logits), after = timed(run, params, logits, cache)
        ep.check()
        small.check()
    return np.asarray(tokens), np.asarray(logits), (before, after)


# The comparison


def missing():
    """Returns those libraries that the comparison needs and that are not installed."""
    names = ("torch", "transformers", "accelerate")
    return [name for name in names if importlib.util.find_spec(name) is None]


def write_decoded(source, folder):
    """Writes a checkpoint again, with values in place of fp8 codes."""
    tensors = checkpoints.open_safetensors(source)
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    values = {
        name: decoded(tensors, name.removesuffix(".weight"))
        for name in tensors
        if name.endswith(".weight")
    }
    others = {name for name in tensors if not name.endswith("_scale_inv")} - set(values)
    write(folder, config, values | {name: tensors[name] for name in others})


def logits_of_transformers(model, folder, tokens):
    """Returns transformers' logits, in float32 from the decoded weights."""
    torch, theirs = map(importlib.import_module, ("torch", "transformers"))
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    with tempfile.TemporaryDirectory() as other:
        if model.decoder:
            decoder = getattr(theirs, model.decoder)
            options["quantization_config"] = decoder(dequantize=True)
        else:
            write_decoded(folder, folder := pathlib.Path(other))
        kind = getattr(theirs, model.reference)
        reference = kind.from_pretrained(folder, local_files_only=True, **options)
    with torch.no_grad():
        logits = reference.float()(torch.tensor(np.asarray(tokens, np.int64))).logits
    return logits.numpy()


def differences(logits, others):
    """Returns each token's largest difference, as a share of the largest logit."""
    return np.abs(logits - others).max(-1) / np.abs(others).max()


def compare(model, mesh, params, folder, prompts, tokens, decoded_logits):
    """Prints how far logits are from those of transformers; returns all differences."""
    length = prompts.shape[1]
    wanted = logits_of_transformers(
        model, folder, np.concatenate([prompts, tokens[:, :-1]], 1)
    )
    found = {
        "prefill": (prefilled(model, mesh, params, prompts), wanted[:, :length]),
        "decode": (decoded_logits, wanted[:, length:]),
    }
    offs = []
    for what, (logits, others) in found.items():
        off = differences(logits, others)
        same = np.mean(logits.argmax(-1) == others.argmax(-1))
        print(
            f"{what} beside transformers in float32: a token's logits differ by "
            f"{np.median(off):.1e} of the largest one (median), at most "
            f"{off.max():.1e}; {same:.0%} have the same most likely token"
        )
        offs.append(off.ravel())
    return np.concatenate(offs)


# The command


def parse(description, arguments):
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        help="of a checkpoint; where there is none, a small random one is written",
    )
    parser.add_argument("--prompts", type=int, default=2, help="per rank")
    parser.add_argument("--length", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=32, help="tokens to decode")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with transformers, which decodes all weights to float32 on the CPU",
    )
    return parser.parse_args(arguments)


def main(kind, description, arguments=None):
    """Serves the checkpoint in a folder with a `Model` of class `kind`."""
    args = parse(description, arguments)
    precision = "highest" if args.dtype == "float32" else "default"
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision(precision))
        folder = args.folder
        if folder is None:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "config.json").exists():
            print("writing a small checkpoint of random weights")
            write(folder, *kind.random(np.random.default_rng(0)))
        return run(kind, folder, args)


def run(kind, folder, args):
    """Serves random prompts; returns 1 if the logits are not those of transformers."""
    model = kind(json.loads((folder / "config.json").read_text()), args.dtype)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))
    start = time.perf_counter()
    params = load(model, mesh, checkpoints.open_safetensors(folder))
    jax.block_until_ready(params)
    print(f"loaded in {time.perf_counter() - start:.1f} s onto {mesh.size} devices")
    shape = args.prompts * mesh.size, args.length
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, model.config.vocab_size, shape, np.int32)
    prompts = jax.device_put(prompts, NamedSharding(mesh, P("ep")))
    tokens, logits, (before, after) = serve(model, mesh, params, prompts, args.steps)
    count = len(prompts)
    print(f"prefill: {count * args.length / before:.0f} tokens per second")
    print(f"decode: {count * args.steps / after:.0f} tokens per second")
    print(f"tokens after the first prompt: {tokens[0, :8].tolist()} ...")
    if not args.compare:
        return 0
    if names := missing():
        print(f"no comparison with transformers: {', '.join(names)} not installed")
        return 0
    off = compare(model, mesh, params, folder, np.asarray(prompts), tokens, logits)
    # A wrong formula moves logits by their own size; rounding sometimes moves a token
    # to another expert, so that the largest difference says little.
    return 0 if np.median(off) < 0.1 else 1
