"""Times a layer with each of its options beside the plain layer.

    python -m benchmarks.layers.options [--cases mid gpt-oss] [--options fp8]

A row is `jax_ep.moe_ffn` on a mesh of all GPUs, with room for the rows that arrive (a
quarter more on several GPUs), forward and with the gradients of tokens and parameters.
`ms` is the median of bursts that are enqueued together. `over plain` is that over the
plain layer's. `explained` is what it should be: the plain layer's time, and that of
what the option adds, which is products at the plain layer's rate and bytes at the rate
of a copy that is timed in the same run. So `over explained` shows an option that costs
more than what it does. `of weights` is the memory for intermediate results over the
experts' weights in bfloat16. Ways with codes of weights have no gradients of those.
`--merge` puts the options of this run into an earlier record of the same devices.
Writes benchmarks/results/moe-options-<device>x<n>-<date>.json.
"""

import functools
import json
import statistics
import sys
import time
import types
import typing

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.common import arguments as common
from benchmarks.common import merging, recording, timing
from jax_ep import experts


class Sizes(typing.NamedTuple):
    """Sizes of a layer, and the options that it is timed with if these are not all."""

    hidden: int
    inner: int
    experts: int
    tokens: int
    top_k: int
    options: tuple = ()


CHUNKS = ("4 chunks", "8 chunks", "4 chunks, stream", "4 chunks, copy")
CASES = {
    "mid": Sizes(2048, 1024, 64, 4096, 8),
    "large-64": Sizes(7168, 2048, 16, 4096, 8),
    "gpt-oss": Sizes(2880, 2880, 32, 4096, 4),
    "decode-128": Sizes(7168, 2048, 64, 128, 8),
    "decode-32": Sizes(7168, 2048, 64, 32, 8),
    "decode-1": Sizes(7168, 2048, 64, 1, 8),
    "gpt-oss-1": Sizes(2880, 2880, 32, 1, 4),
    "gpt-oss-128": Sizes(2880, 2880, 32, 128, 4),
    "published": Sizes(2560, 1280, 64, 16384, 4, ("portable",)),
    "mid, odd": Sizes(2040, 1021, 64, 4096, 8, ("portable",)),
    "mid, long": Sizes(2048, 1024, 64, 32768, 8, CHUNKS),
    "large-64, long": Sizes(7168, 2048, 16, 32768, 8, CHUNKS),
}
SMALL = {
    "tiny": Sizes(128, 128, 8, 16, 2),
    "tiny, long": Sizes(128, 128, 8, 16, 2, CHUNKS),
}
TINY = ("--cases", *SMALL, "--seconds", "0")
CALLS, IN_FLIGHT = 6, 3


class Option(typing.NamedTuple):
    """A way to call a layer.

    Attributes:
        name: what the tables call it.
        params: names of parameters besides "router", "gate_up" and "down".
        without: names of parameters that others replace.
        config: fields of `EPConfig`.
        call: keywords of `moe_ffn`.
        products: matrices of an expert's size that every token is multiplied by.
        weight_bytes: bytes moved per element of the experts' weights.
        gradients: whether there are any of weights.
        blocks: whether hidden and inner must be multiples of 128.
        chunks: parts in which tokens go through the layer.
    """

    name: str
    params: tuple = ()
    without: tuple = ()
    config: typing.Mapping = types.MappingProxyType({})
    call: typing.Mapping = types.MappingProxyType({})
    products: int = 0
    weight_bytes: float = 0
    gradients: bool = True
    blocks: bool = False
    chunks: int = 1


BIASES = ("gate_bias", "up_bias", "down_bias")
SHARED = ("shared_gate_up", "shared_down")
FP8 = {"dispatch_format": "fp8_block128"}
CODES = ("gate_up", "down")


def gelu(gate, up):
    """A function that kernels do not know."""
    return jax.nn.gelu(gate) * up


def learnt(gate, up, slope):
    """A function that kernels do not know, with a learnt scalar."""
    return jax.nn.gelu(gate) * up * slope


def options():
    """Returns the options; the first one is the plain layer."""
    clamped = {"activation": experts.swiglu_clamped()}
    fp8, fused = {"experts": experts.fp8}, {"fused_shared_expert": True}
    yield Option("plain")
    yield Option("biases", BIASES)
    yield Option("gate and up apart", ("gate", "up"), ("gate_up",))
    yield Option("swiglu_clamped, biases", BIASES, call=clamped)
    yield Option("geglu", call={"activation": experts.geglu})
    yield Option("a traced activation", call={"activation": gelu})
    yield Option("a learnt activation", ("slope",))
    yield Option("shared expert", SHARED, products=1)
    yield Option("shared expert, fused", SHARED, config=fused, products=1)
    yield Option("float32 masters", ("masters",), CODES, weight_bytes=6)
    yield Option("nvfp4 dispatch", config={"dispatch_format": "nvfp4"})
    yield Option("portable", call={"experts": experts.portable})
    yield Option(
        "portable, gate and up apart",
        ("gate", "up"),
        ("gate_up",),
        call={"experts": experts.portable},
    )
    of_portable = {"experts": experts.portable}
    traced = of_portable | {"activation": gelu}
    yield Option("portable, a traced activation", call=traced)
    yield Option("portable, a learnt activation", ("slope",), call=of_portable)
    for name in CHUNKS:
        count, _, overlap = name.partition(" chunks, ")
        config = {"overlap": overlap or "sm"}
        yield Option(name, chunks=int(count.split()[0]), config=config)
    made = {"config": FP8, "call": fp8, "weight_bytes": 4, "blocks": True}
    yield Option("fp8", **made)
    yield Option("fp8, biases", BIASES, **made)
    in_fp8 = {"experts": functools.partial(experts.fp8, wgrad="fp8")}
    yield Option("fp8, wgrad in fp8", **made | {"call": in_fp8})
    yield Option("fp8, swiglu_clamped", BIASES, **made | {"call": fp8 | clamped})
    held = {"call": fp8, "gradients": False}
    rows = held | {"config": FP8, "blocks": True}
    yield Option("fp8 codes", ("fp8_block128",), CODES, **rows)
    yield Option("mxfp4 codes", ("mxfp4",), CODES, **held)
    yield Option("mxfp4 codes, fp8 rows", ("mxfp4",), CODES, **rows)
    four = held | {"call": fp8 | clamped}
    yield Option("mxfp4 codes, swiglu_clamped", ("mxfp4", *BIASES), CODES, **four)


def parameters(sizes, seed):
    """Returns all parameters that an option may name."""
    hidden, inner, count = sizes.hidden, sizes.inner, sizes.experts
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def drawn(*shape, scale=1.0):
        values = jax.random.normal(next(keys), shape, jnp.bfloat16)
        return values * jnp.bfloat16(scale)

    gate_up = drawn(count, hidden, 2, inner, scale=hidden**-0.5)
    down = drawn(count, inner, hidden, scale=inner**-0.5)
    biases = (drawn(count, size, scale=0.1) for size in (inner, inner, hidden))
    return {
        "router": drawn(hidden, count, scale=hidden**-0.5).astype(jnp.float32),
        "gate_up": gate_up,
        "down": down,
        **dict(zip(BIASES, biases, strict=True)),
        "shared_gate_up": drawn(hidden, 2, inner, scale=hidden**-0.5),
        "shared_down": drawn(inner, hidden, scale=inner**-0.5),
    }


def of_option(option, whole):
    """Returns the parameters of an option, made of those of `parameters`."""
    names = {"router", *CODES} - {*option.without} | {*option.params}
    found = {name: whole[name] for name in names if name in whole}
    if "gate" in names:
        found["gate"], found["up"] = (whole["gate_up"][:, :, side] for side in (0, 1))
    if "slope" in names:
        found["slope"] = jnp.float32(1.0)
    if "masters" in names:
        found |= {name: whole[name].astype(jnp.float32) for name in CODES}
    for form in ("fp8_block128", "mxfp4"):
        if form in names:
            make = functools.partial(experts.quantize_weights, format=form)
            found["experts"] = jax.jit(make)(*(whole[name] for name in CODES))
    return found


def specs_of(params):
    """Returns the specs of parameters."""
    found = {}
    for name, value in params.items():
        everywhere = name.startswith(("router", "shared", "slope"))
        spec = P() if everywhere else P("ep")
        found[name] = jax.tree.map(lambda _, spec=spec: spec, value)
    return found


def programs(ep, mesh, option, params):
    """Returns the forward pass and the one with gradients, of (params, tokens)."""

    def body(params, tokens):
        call = {"chunks": option.chunks} | option.call
        if "slope" in params:
            params = params.copy()
            call["activation"] = functools.partial(learnt, slope=params.pop("slope"))
        y, aux = jax_ep.moe_ffn(ep, tokens, params, **call)
        return y + (0 * aux.balance_loss).astype(y.dtype)

    specs = specs_of(params), P("ep")
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"))

    def loss(trained, held, tokens):
        y = run(trained | held, tokens)
        return jnp.sum(y.astype(jnp.float32) * 1e-3)

    def both(params, tokens):
        held = {name: params[name] for name in params if name == "experts"}
        trained = {name: value for name, value in params.items() if name not in held}
        return jax.grad(loss, argnums=(0, 2))(trained, held, tokens)

    yield "forward", jax.jit(run)
    if option.gradients:
        yield "gradients", jax.jit(both)


def median_ms(run, args, seconds):
    jax.block_until_ready(run(*args))
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        times.append(timing.seconds(lambda _: run(*args), CALLS, IN_FLIGHT))
    return statistics.median(times) * 1e3


def copy_rate(seconds, tiny):
    """Returns the bytes per millisecond that a copy reads and writes."""
    values = jnp.ones(2**12 if tiny else 2**28, jnp.float32)
    ms = median_ms(jax.jit(lambda x: x + 1), (values,), seconds)
    return 2 * values.nbytes / ms


def is_timed(option, sizes, ranks):
    """Whether an option is timed for a layer of these sizes."""
    if option.name == "plain":
        return True
    if option.blocks and (sizes.hidden % 128 or sizes.inner % 128):
        return False
    if ranks == 1 and option.config.get("overlap", "sm") != "sm":
        return False  # nothing is exchanged
    return option.name in sizes.options if sizes.options else option.chunks == 1


def measure(case, sizes, names, rate, seconds, seed):
    """Yields the rows of a case."""
    axes = (jax.sharding.AxisType.Auto,)
    ranks = len(jax.devices())
    mesh = jax.make_mesh((ranks,), ("ep",), axes)
    whole = parameters(sizes, seed)
    shape = ranks * sizes.tokens, sizes.hidden
    tokens = jax.random.normal(jax.random.key(seed + 1), shape, jnp.bfloat16)
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("ep")))
    elements = whole["gate_up"].size + whole["down"].size
    plain = {}
    for option in options():
        if option.name not in names or not is_timed(option, sizes, ranks):
            continue
        params = of_option(option, whole)
        of_mesh = functools.partial(NamedSharding, mesh)
        params = jax.device_put(params, jax.tree.map(of_mesh, specs_of(params)))
        part = -(-sizes.tokens // option.chunks)
        rows = part * (sizes.top_k + bool(option.config.get("fused_shared_expert")))
        if mesh.size > 1:
            rows = rows * 5 // 4
        config = jax_ep.EPConfig(
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            hidden_size=sizes.hidden,
            max_tokens_per_rank=part,
            recv_capacity=rows,
            **option.config,
        )
        with jax_ep.init(mesh, "ep", config) as ep:
            for name, run in programs(ep, mesh, option, params):
                ms = median_ms(run, (params, tokens), seconds)
                memory = run.lower(params, tokens).compile().memory_analysis()
                plain.setdefault(name, ms)
                # A token's products with one expert are 1 / top_k of the plain ones.
                more = plain[name] * option.products / sizes.top_k
                explained = plain[name] + more + option.weight_bytes * elements / rate
                yield {
                    "case": case,
                    "option": option.name,
                    "pass": name,
                    "ms": ms,
                    "over plain": ms / plain[name],
                    "explained": explained / plain[name],
                    "of weights": memory.temp_size_in_bytes / (2 * elements),
                }


def merged(before, after):
    """Joins the records of two runs; rows of the later one win, but for plain layers.

    A row is over the plain layer of its own run.
    """
    for name in ("device", "count", "jax"):
        merging.require_same("options.py", name, before[name], after[name])
    rows = {}
    for row in before["results"] + after["results"]:
        place = row["case"], row["option"], row["pass"]
        if place in rows and row["option"] == "plain":
            continue
        rows[place] = row
    cases = before["cases"] | after["cases"]
    order = list(cases)
    found = sorted(rows.values(), key=lambda row: order.index(row["case"]))
    return merging.joined(before, after, cases=cases, results=found)


def main(arguments=None):
    parser = common.parser(__doc__)
    every = [option.name for option in options()]
    parser.add_argument(
        "--cases", nargs="+", default=[*CASES], choices=[*CASES, *SMALL]
    )
    parser.add_argument("--options", nargs="+", default=every, choices=every)
    parser.add_argument("--seconds", type=float, default=0.1, help="per time, at least")
    parser.add_argument("--seed", type=int, default=0, help="of all operands")
    common.add_merge(parser)
    common.add_tiny(parser)
    args = common.parsed(parser, arguments, TINY)
    if jax.default_backend() != "gpu" and not args.tiny:
        sys.exit("options.py: there is no GPU; run it with --tiny")
    rate, rows = copy_rate(args.seconds, args.tiny), []
    for case in args.cases:
        sizes, names = (CASES | SMALL)[case], ("plain", *args.options)
        for row in measure(case, sizes, names, rate, args.seconds, args.seed):
            rows.append(row)
            print(*(f"{v:.4g}" if type(v) is float else v for v in row.values()))
    record = recording.head_here(
        "moe-options",
        "layers.options",
        arguments,
        len(jax.devices()),
        cases={case: (CASES | SMALL)[case]._asdict() for case in args.cases},
        copy_gb_s=rate / 1e6,
        results=rows,
    )
    name = recording.of("moe-options", record)
    earlier = [json.loads(path.read_text()) for path in args.merge]
    recording.write(name, functools.reduce(merged, [*earlier, record]), args.results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
