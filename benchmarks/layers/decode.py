"""Times experts that get few rows each, as in a decode step, on one Hopper GPU.

    python -m benchmarks.layers.decode [--rows 262144 1024 16] [--layer]

There are 64 experts of hidden 7168 and inner 2048. Every token has 8 distinct experts,
drawn uniformly.

The ways: `bf16` is `jax_ep.experts.hopper`. `fp8`, `mxfp4` and `mxfp4-fp8` are
`jax_ep.experts.fp8` with weights in fp8_block128 or mxfp4; rows are codes for `fp8` and
`mxfp4-fp8`, and bfloat16 for `mxfp4`. `batched` is one bfloat16 matmul with equally
many rows for every expert, as cuBLAS does it. The limit is `read`: XLA's maximum over
as many bytes as the weights of the experts that are hit have in a format, in the faster
of two forms.

A call has the steps of a model of --unrolled times 4 layers, or as many reads. They
share what XLA takes between two calls. With more than 8192 rows, as in a prefill, a
call is one step. Results take the places of those of the call
before, as in a decode loop whose state is donated.

For each way it reports microseconds per step, the GB/s at which the weights of experts
that are hit were read, and the time over that of `read`. Everything with the same
number of rows is timed in turn, and rows of the results are compared with float32
products of the same codes. `clocks` are medians of the first GPU's clock and power
meanwhile. --layer adds whole layers by `jax_ep.moe_ffn` on all GPUs:
for each kind of weights the layer's time, and as `exchange` that of the same program
with experts that return their rows unchanged.
Writes benchmarks/results/decode-<device>x<n>-<date>.json. With --tiny it also runs on a
machine without such a GPU, with what runs everywhere in place of the kernels.
"""

import functools
import math
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.common import arguments as common
from benchmarks.common import clocks, recording, timing
from benchmarks.layers import decode_steps as steps
from benchmarks.layers import grouped, kinds
from benchmarks.layers.decode_steps import DRAWS, FORMATS, READS, WAYS, Sizes
from jax_ep import experts
from jax_ep._cli.bench import process
from jax_ep._experts import (
    devices,
)

SIZES = Sizes(7168, 2048, 64, 8)
SMALL = Sizes(128, 128, 8, 2)
ROWS = (1024, 256, 64, 16, 8)
TOKENS = (1, 8, 32, 128)  # per rank, for whole layers
TINY = (
    *("--rows", "16", "4", "--layer", "--tokens", "3", "--seconds", "0"),
    *("--unrolled", "2"),
)
# Per measurement, of which the host takes up to a millisecond to begin and to notice
# its end.
MEASURED_S = 0.15
IN_FLIGHT = 16
# With more rows, steps are long and their arrays large: a call is one step.
MOST_UNROLLED = 8192
# Relative to a row's norm. Activations near a tie get other codes, and `batched` rounds
# gate and up.
BOUND = 0.02


def by_turns(runs, seconds):
    """Times all runs in turn; returns microseconds per step, by name.

    `runs` has pairs: a function of the call's number, and how many steps a call makes.
    """
    times, calls = {name: [] for name in runs}, {}
    measured = min(MEASURED_S, seconds)
    for name, (run, _) in runs.items():
        jax.block_until_ready([run(call) for call in range(2)])
        calls[name] = max(1, math.ceil(measured / timing.seconds(run, 4, IN_FLIGHT)))
    turns, end = 0, time.monotonic() + seconds * len(runs)
    while turns < 3 or time.monotonic() < end:
        turns += 1
        for name, (run, count) in runs.items():
            times[name].append(timing.seconds(run, calls[name], IN_FLIGHT) / count)
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def tried(make):
    """Returns what `make` does, a row's first entries and runs, or an error's row."""
    try:
        return make()
    except Exception as error:  # of one way of many
        return {"error": process.error_text(error)}, {}


def checked(difference):
    """Returns the entries of a row that say how far off its results are."""
    return {"difference": difference, "wrong": not difference < BOUND}


# ---- Experts ------------------------------------------------------------------------


def prepare_reads(words, hit, bytes_, times):
    """Returns the runs of `read`, and the entries of its row for each format."""
    runs, facts = {}, {}
    for name in FORMATS:
        count = min(steps.rounded(hit * bytes_[name] / 4), len(words))
        facts[name] = {"bytes": 4 * count, "wrong": False}
        for how in READS:
            run = steps.reading(how, words, count, times)
            run(0)
            facts[name]["wrong"] |= steps.read_wrongly(how, run.found[0], count)
            runs["read", name, how] = run, times
    return runs, facts


def prepare_way(way, draws, weights):
    """Returns the entries of a way's row, and the run to time."""
    step = functools.partial(steps.run_way, way)
    run = steps.Repeated(steps.in_turn(step), draws, weights)
    run(0)
    last = run.found[-DRAWS:], draws[-DRAWS:]
    facts = checked(steps.difference(way, *last, weights))
    return facts, {way: (run, len(draws))}


def measure_experts(sizes, args):
    """Yields the rows of `read` and of each way."""
    random = grouped.Random(np.random.default_rng(args.seed))
    weights = steps.make_weights(sizes, args.seed)
    bytes_ = {name: steps.bytes_of_expert(each) for name, each in weights.items()}
    words = steps.make_words(sizes.groups * max(bytes_.values()) / 4)
    for rows in args.rows:
        if rows > MOST_UNROLLED:
            draws = steps.make_draws(random, sizes, rows, 1)
        else:
            draws = steps.make_draws(random, sizes, rows, DRAWS) * args.unrolled
        hit = float(np.mean([np.count_nonzero(draw.sizes) for draw in draws]))
        place = {"part": "experts", "rows": rows, "hit": hit}
        runs, reads = prepare_reads(words, hit, bytes_, len(draws))
        facts = {}
        for way, (name, _) in WAYS.items():
            if way not in args.ways or (way == "batched" and rows < sizes.groups):
                continue
            make = functools.partial(prepare_way, way, draws, weights[name])
            facts[way], more = tried(make)
            runs |= more
        with clocks.sampled() as gpu:
            us = by_turns(runs, args.seconds)
        place |= {"clocks": gpu}
        limits = {}
        for name, found in reads.items():
            how = min(READS, key=lambda how, name=name: us["read", name, how])
            limits[name] = us["read", name, how]
            row = place | {"way": "read", "format": name, "how": how}
            rate = found["bytes"] / limits[name] / 1e3
            yield row | {"us": limits[name], "gb_s": rate, "wrong": found["wrong"]}
        for way, found in facts.items():
            name = WAYS[way][0]
            row = place | {"way": way, "format": name, **found}
            if way in us:
                row["us"] = us[way]
                row["gb_s"] = hit * bytes_[name] / us[way] / 1e3
                row["of_read"] = us[way] / limits[name]
            yield row


# ---- Whole layers -------------------------------------------------------------------


@experts.takes_dispatched
def unchanged(d, *_, **__):
    """Experts that return their rows unchanged."""
    return d.tokens if d.scales is None else jax_ep.dequantize(d)


def layer_params(router, weights):
    """Returns the parameters of `jax_ep.moe_ffn`, and their specs."""
    if isinstance(weights, experts.QuantizedWeights):
        params = {"router": router, "experts": weights}
    else:
        params = {"router": router, "gate_up": weights[0], "down": weights[1]}
    return params, {name: P() if name == "router" else P("ep") for name in params}


def of_rank(array, rank, ranks):
    """Returns a rank's part of an array."""
    start = rank * (array.shape[0] // ranks)
    shards = array.addressable_shards
    (found,) = (one.data for one in shards if (one.index[0].start or 0) == start)
    return found


def layer_difference(outs, draws, router, weights, coded, ranks, top_k):
    """Returns the largest difference of the first token's output, over all draws."""
    largest, router = [], np.asarray(router)
    for out, tokens in zip(outs, draws, strict=True):
        token = np.asarray(of_rank(tokens, 0, ranks)[0])
        routing = kinds.route(token[None], router, top_k)
        want = 0.0
        for expert, weight in zip(
            np.asarray(routing.ids[0]), np.asarray(routing.weights[0]), strict=True
        ):
            rank, own = divmod(int(expert), router.shape[1] // ranks)
            there = jax.tree.map(lambda a, r=rank: of_rank(a, r, ranks), weights)
            row = steps.wanted(there, np.int32(own), token, coded=coded)
            want = want + np.asarray(row, np.float64) * float(weight)
        largest.append(steps.distance(of_rank(out, 0, ranks)[0], want))
    return float(np.max(largest))


def prepare_layer(kind, mesh, sizes, tokens, draws, router, weights, handles):
    """Returns the entries of a layer's row, and the runs of layer and exchange."""
    name, coded = WAYS[kind]
    config = jax_ep.EPConfig(
        num_experts=router.shape[1],
        top_k=sizes.top_k,
        hidden_size=sizes.hidden,
        max_tokens_per_rank=tokens,
        dispatch_format="fp8_block128" if coded else "bf16",
    )
    ep = jax_ep.init(mesh, "ep", config)
    handles.append(ep)
    params, specs = layer_params(router, weights)
    own = steps.plain_experts() if name == "bf16" else experts.fp8

    def program(function):
        def step(tokens, params):
            return jax_ep.moe_ffn(ep, tokens, params, experts=function)[0]

        run = jax.shard_map(
            steps.in_turn(step), mesh=mesh, in_specs=(P("ep"), specs), out_specs=P("ep")
        )
        place = NamedSharding(mesh, P("ep"))
        return steps.Repeated(run, draws, params, sharding=place)

    runs = {}
    for part, function in (("layer", own), ("exchange", unchanged)):
        run = program(function)
        jax.block_until_ready(run(0))
        runs[kind, part] = run, len(draws)
        if part == "layer":
            last = run.found[-DRAWS:], draws[-DRAWS:]
            given = router, weights, coded, mesh.size, sizes.top_k
            facts = checked(layer_difference(*last, *given))
    return {"transport": ep.transport, **facts}, runs


def measure_layers(sizes, args):
    """Yields the rows of whole layers, one per kind of weights."""
    mesh = process.ep_mesh(args.devices)
    weights = steps.make_weights(sizes, args.seed, mesh)
    keys = jax.random.split(jax.random.key(args.seed + 1), 1 + DRAWS)
    router = jax.random.normal(keys[0], (sizes.hidden, sizes.groups * mesh.size))
    router = jax.device_put(router * sizes.hidden**-0.5, NamedSharding(mesh, P()))
    for tokens in args.tokens:
        shape = tokens * mesh.size, sizes.hidden
        draws = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:]]
        draws = jax.device_put(draws, NamedSharding(mesh, P("ep"))) * args.unrolled
        runs, facts, handles = {}, {}, []
        try:
            for kind, (name, _) in WAYS.items():
                if kind not in args.ways or kind == "batched":
                    continue
                given = mesh, sizes, tokens, draws, router, weights[name], handles
                make = functools.partial(prepare_layer, kind, *given)
                facts[kind], more = tried(make)
                runs |= more
            us = by_turns(runs, args.seconds)
            for ep in handles:
                ep.check()
            yield from layer_rows(tokens, facts, us)
        finally:
            for ep in handles:
                ep.close()


def layer_rows(tokens, facts, us):
    """Yields a row for each kind of weights."""
    for kind, found in facts.items():
        row = {"part": "layer", "tokens": tokens, "way": kind, **found}
        if (kind, "layer") in us:
            whole, exchange = us[kind, "layer"], us[kind, "exchange"]
            row |= {"us": whole, "exchange_us": exchange}
            row["exchange_share"] = exchange / whole
        yield row


# ---- The program --------------------------------------------------------------------


def line(row):
    """Formats a row as one line."""
    if "rows" in row:
        head = f"{row['rows']} rows, {row['hit']:g} experts, {row['way']}"
        head += "" if row["way"] in WAYS else f" {row['format']}"
    else:
        head = f"layer, {row.get('tokens')} tokens per rank, {row.get('way')}"
    parts = []
    if "error" in row:
        parts.append(row["error"].partition("\n")[0][:150])
    if "us" in row:
        parts.append(f"{row['us']:.1f} us")
    if "gb_s" in row:
        parts.append(f"{row['gb_s']:.0f} GB/s")
    if "of_read" in row:
        parts.append(f"{row['of_read']:.2f} of read")
    if "exchange_share" in row:
        parts.append(f"exchange {row['exchange_share']:.0%}")
    if "difference" in row:
        parts.append(f"difference {row['difference']:.4f}")
    return f"{head}: " + ", ".join(parts + ["WRONG"] * bool(row.get("wrong")))


def unfit(rows):
    """Whether a row is wrong or was not measured."""
    return any(row.get("wrong") or "us" not in row for row in rows)


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of a step")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--layer", action="store_true", help="whole layers as well")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=TOKENS, help="per rank, of a layer"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of a time, on average"
    )
    parser.add_argument(
        "--unrolled", type=int, default=8, help="times that a call takes all draws"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows")
    common.add_place(parser)
    args = common.parsed(parser, arguments, TINY)
    top_k = (SMALL if args.tiny else SIZES).top_k
    if any(rows % top_k or rows < top_k for rows in args.rows):
        parser.error(f"--rows must be multiples of {top_k}, the experts of a token")
    if args.unrolled < 1:
        parser.error(f"--unrolled must be 1 or more, not {args.unrolled}")
    return args


PARTS = (measure_experts, measure_layers)


def main(arguments=None):
    args = parse(arguments)
    obstacle = devices.device_obstacle()
    if obstacle is not None and not args.tiny:
        sys.exit(f"decode.py: must have {obstacle}; or run it with --tiny")
    sizes, rows = SMALL if args.tiny else SIZES, []
    count = process.ep_mesh(args.devices).size if args.layer else 1
    record = recording.head_here(
        "decode",
        "layers.decode",
        arguments,
        count,
        sizes=sizes._asdict(),
        kernels=obstacle is None,
        steps=DRAWS * args.unrolled,
        results=rows,
    )
    try:
        for part in PARTS[: 1 + args.layer]:
            for row in part(sizes, args):
                rows.append(row)
                print(line(row), flush=True)
    finally:
        recording.write(recording.of("decode", record), record, args.results)
    return int(unfit(rows))


if __name__ == "__main__":
    raise SystemExit(main())
