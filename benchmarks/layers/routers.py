"""Times `jax_ep.router.route` as a kernel and in plain JAX, and logits, on one GPU.

    python -m benchmarks.layers.routers [--tokens 1 8 32 128 4096 16384]

The routers are a softmax router and one like DeepSeek-V3's, top-8 of 256 experts. Timed
are the choice, and the choice with the gradient of a function of its weights. Inside
`shard_map` a GPU chooses by the kernel, outside by plain JAX. Logits are those of
bfloat16 tokens of hidden 7168 and a float32 router: in `plain` JAX, as one product of
highest precision; as a `layer` computes them on GPUs; and by `parts` of bfloat16, as a
layer does for more than a few tokens.

A program does its work 8 times, one after the other, so that XLA makes a CUDA graph of
it. A time is in microseconds: the profiler's span from the start of the first kernel to
the end of the last, divided by 8, the least of several calls. The ways are compared in
the same run: ids may differ where two scores are a rounding apart, and these tokens are
left out of the other comparisons.
Writes benchmarks/results/routers-<device>x1-<date>.json. With --tiny, on a machine
without a GPU, nothing is timed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.common import arguments as common
from benchmarks.common import recording, trace
from jax_ep._cli.bench import process
from jax_ep._layers.logits import by_parts, logits_of
from jax_ep.router import Router, route

ROUTERS = {
    "softmax": Router(),
    "DeepSeek-V3": Router(score="sigmoid", num_groups=8, top_groups=4, scale=2.5),
}
WAYS = ("plain", "kernel")
PARTS = ("forward", "gradient")
EXPERTS, TOP_K, HIDDEN = 256, 8, 7168
TOKENS = (1, 8, 32, 128, 4096, 16384)
TINY = ("--tokens", "3", "--calls", "1")
STEPS = 8  # per program
LEAST_SAME = 0.999  # the share of ids that must be the same
BOUND = 1e-5  # relative to the largest weight or gradient
SUMS_BOUND = 3e-5  # relative to the largest logit, a float32 sum of `HIDDEN` products


def choice(router, logits, bias):
    """Returns ids and weights."""
    found = route(logits, TOP_K, router, bias=bias)
    return found.ids, found.weights


def gradient(router, logits, bias):
    """Returns ids, and the gradient of a function of the weights."""

    def loss(logits):
        ids, weights = choice(router, logits, bias)
        # Cotangents of both signs for each token: if all were alike, they would cancel.
        return jnp.sum(jnp.sin(8 * weights + jnp.arange(TOP_K))), ids

    found, ids = jax.grad(loss, has_aux=True)(logits)
    return ids, found


def in_turn(step):
    """Returns a function that runs `step` on its arguments `STEPS` times, in turn."""

    def run(*given):
        found = []
        for _ in range(STEPS):
            if found:
                # Keeps XLA from sharing work between steps or running them together.
                given, found[-1] = jax.lax.optimization_barrier((given, found[-1]))
            found.append(step(*given))
        return found

    return run


def program(mesh, way, part, router):
    """Returns a jitted function of logits and a bias."""
    body = in_turn(functools.partial(choice if part == "forward" else gradient, router))
    if way == "kernel":
        body = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.jit(body)


def plain_logits(tokens, kernel):
    """Computes logits as one float32 product of highest precision."""
    highest = jax.lax.Precision.HIGHEST
    return jnp.dot(tokens.astype(jnp.float32), kernel, precision=highest)


def timed(run, args, calls):
    """Returns a row's entries: a step's least time of `calls`, and its kernels."""
    seen = [trace.traced(run, *args) for _ in range(calls)]
    errors = [each["error"] for each in seen if "error" in each]
    if errors:
        return {"untimed": errors[0]}
    best = min(seen, key=lambda each: each["span_us"])
    count = sum(kernel["count"] for kernel in best["kernels"])
    return {"us": best["span_us"] / STEPS, "kernels": round(count / STEPS, 1)}


def compared(found, want):
    """Returns a row's entries that say how far results are from those of plain JAX."""
    row, same, bound = {}, True, SUMS_BOUND
    if isinstance(found, tuple):
        (ids, found), (wanted, want) = found, want
        equal = np.asarray(ids == wanted)
        row["same_ids"], bound = float(np.mean(equal)), BOUND
        same = np.all(equal, axis=1, keepdims=True)
    apart = np.abs(np.where(same, found - want, 0))
    row["difference"] = float(np.max(apart) / np.max(np.abs(want)))
    right = row.get("same_ids", 1) >= LEAST_SAME and row["difference"] <= bound
    return row | {"wrong": not right}


def rows_of(place, runs, given, calls):
    """Yields a row for each way; its results are compared with the first way's."""
    *_, want = next(iter(runs.values()))(*given)
    for way, run in runs.items():
        *_, found = run(*given)
        found = compared(found, want)
        yield place | {"way": way} | found | timed(run, given, calls)


def measure_logits(args):
    """Yields the rows of logits, by tokens and way."""
    kernel = jax.random.normal(jax.random.key(args.seed), (HIDDEN, EXPERTS))
    for tokens in args.tokens:
        shape = tokens, HIDDEN
        given = jax.random.normal(jax.random.key(args.seed + 1), shape, jnp.bfloat16)
        ours = functools.partial(logits_of, device=jax.devices()[0])
        ways = {"plain": plain_logits, "layer": ours, "parts": by_parts}
        runs = {way: jax.jit(in_turn(step)) for way, step in ways.items()}
        place = {"part": "logits", "tokens": tokens}
        yield from rows_of(place, runs, (given, kernel), args.calls)


def measure_choice(args):
    """Yields the rows of choices, by router, tokens, part and way."""
    mesh = process.ep_mesh(1)
    for name, router in ROUTERS.items():
        # DeepSeek-V3 adds a bias to choose experts, but not to the weights.
        bias = jax.random.normal(jax.random.key(args.seed + 1), EXPERTS) / 50
        for tokens in args.tokens:
            logits = jax.random.normal(jax.random.key(args.seed), (tokens, EXPERTS))
            given = logits, bias if router.score == "sigmoid" else None
            for part in PARTS:
                runs = {way: program(mesh, way, part, router) for way in WAYS}
                place = {"router": name, "part": part, "tokens": tokens}
                yield from rows_of(place, runs, given, args.calls)


def line(row):
    """Formats a row as one line."""
    names = row.get("router"), row["part"], f"{row['tokens']} tokens", row["way"]
    head = ", ".join(name for name in names if name)
    time = (
        f"{row['us']:.1f} us, {row['kernels']:g} kernels" if "us" in row else "untimed"
    )
    return f"{head}: {time}" + ", WRONG" * row["wrong"]


def parse(arguments):
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--calls", type=int, default=3, help="of each program")
    parser.add_argument("--seed", type=int, default=0, help="of logits and bias")
    common.add_tiny(parser)
    return common.parsed(parser, arguments, TINY)


def main(arguments=None):
    args, rows = parse(arguments), []
    record = recording.head_here(
        "routers",
        "layers.routers",
        arguments,
        experts=EXPERTS,
        top_k=TOP_K,
        hidden=HIDDEN,
        steps=STEPS,
        results=rows,
    )
    try:
        for measure in (measure_choice, measure_logits):
            for row in measure(args):
                rows.append(row)
                print(line(row), flush=True)
    finally:
        recording.write(recording.of("routers", record), record, args.results)
    untimed = not args.tiny and any("us" not in row for row in rows)
    return int(untimed or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
