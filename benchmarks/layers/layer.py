"""Times whole expert layers: over jax_ep, over ragged_all_to_all and over all_to_all.

    python -m benchmarks.layers.layer [--budget 540]
    python -m benchmarks.layers.layer --cases mid --layers p2p ragged --matmul padded

It runs on all GPUs of this process, with T tokens per rank. A layer is router,
exchange, SwiGLU experts, exchange. It is timed forward, and forward with every
gradient. The layers:

* "p2p", "collective": `jax_ep.moe_ffn` over that transport, with tokens as they are and
  as fp8_block128, whose rows become bfloat16 again;
* "p2p, fp8 experts", and the same for collective: tokens as fp8_block128, and
  `jax_ep.experts.fp8`, which multiplies their codes with codes of the weights that were
  made before, and gives the weights their gradients. Only for sizes that are multiples
  of 128; `--experts bf16` leaves them out;
* "ragged": rows sorted by expert, exchanged by `jax.lax.ragged_all_to_all`
  (jax_ep/_cli/bench/ragged.py), with XLA's default flags and with others (RAGGED of
  jax_ep/_cli/bench/measure.py), each set in a process of its own;
* "dense": `all_to_all` with room for 1.25 times the mean for each (rank, expert), which
  drops the rest, and batched matmuls.

The router is the same function in all of them. So are the experts, except in "dense"
and with fp8: each case takes the way of multiplying (experts.py) that is fastest here,
and p2p's layer is also timed as a user gets it who names none. `jax.lax.ragged_dot` is
tried in the mid-size case, and in large ones if --matmul names it. `recv_capacity` is
1.25 * T * K rounded up to 128.

For each layer the record has the memory that XLA says its program needs besides
operands and results ("temp_bytes"), and the bytes of its windows.

Making the codes of the weights is timed by itself (pass "quantize"), and as a part of a
step (pass "step"), which makes them once and then goes forward and back over 1 or 8
microbatches, all enqueued. The step of p2p's layer in bfloat16 is timed beside it.

A time is in milliseconds per call: the host's clock over many calls of a jitted
function that are enqueued ahead on all GPUs, divided by the calls; the median of the
repeats; two token arrays in turn. The share that is not experts is the time of the
layer less that of the same router and experts on rows that exist already (on codes, for
fp8), over the time of the layer.

Results and all gradients are compared with those of transport collective, within
rounding. Wrong ones are marked, and the command then exits 1.

Writes benchmarks/results/layer-<gpu>x<n>-<date>.json and prints a table last. --merge
adds the cases of earlier records that this run did not time. If no layer of a case was
timed, the command exits 1 as well.
"""

import functools
import json
import sys

from benchmarks.common import arguments as common
from benchmarks.common import merging, recording
from benchmarks.layers import report
from jax_ep._cli.bench import measure

# In the order in which they are measured. These are sizes of models that people train.
CASES = {
    "large-256": {"hidden": 7168, "inner": 2048, "experts": 256},
    "large-64": {"hidden": 7168, "inner": 2048, "experts": 64},
    "mid": {"hidden": 2048, "inner": 1024, "experts": 64},
    # A decode step, with a number of tokens of its own.
    "decode": {"hidden": 7168, "inner": 2048, "experts": 128, "tokens": 128},
    # Sizes of whole layers that others publish times of.
    "many small": {
        "hidden": 2048,
        "inner": 768,
        "experts": 128,
        "tokens": 8192,
        "top_k": 8,
    },
    "few wide": {
        "hidden": 4096,
        "inner": 14336,
        "experts": 8,
        "tokens": 8192,
        "top_k": 2,
    },
}
SMALL = {"tiny": {"hidden": 128, "inner": 128, "experts": 4}}
LAYERS = ("p2p", "collective", "dense", "ragged")
FORMATS = ("bf16", report.FP8)
EXPERTS = ("bf16", "fp8")
# For experts.make. The surest way comes first, one that may be slow last.
MATMULS = ("padded", "hopper", "ragged_dot")
# In the large cases the last way may take 341 ms per matmul on H200s, depending on XLA.
_WITH_RAGGED_DOT = ("mid", *SMALL)
WORKER = "benchmarks.layers.worker"
TINY = (
    *("--cases", *SMALL, "--layers", "collective", "dense", "ragged"),
    *("--transport", "collective", "--take", MATMULS[0], "--tokens", "8"),
    *("--top-k", "2", "--milliseconds", "0.1", "--repeats", "1", "--devices", "2"),
)


def parse(arguments):
    parser = common.parser(__doc__)
    known = [*CASES, *SMALL]
    parser.add_argument("--cases", nargs="+", choices=known, default=list(CASES))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument(
        "--experts",
        nargs="+",
        choices=EXPERTS,
        default=EXPERTS,
        help="of jax_ep's layers; fp8 has tokens as fp8_block128",
    )
    parser.add_argument(
        "--matmul", nargs="+", choices=MATMULS, help="default: all that are fast enough"
    )
    parser.add_argument(
        "--take", choices=MATMULS, help="this way of multiplying, if not the fastest"
    )
    parser.add_argument(
        "--transport",
        choices=report.OURS,
        default=report.OURS[0],
        help="whose layer is also timed with jax_ep.stats, with the default experts, "
        "and in steps",
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="per rank, but in a decode step"
    )
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--seed", type=int, help="of tokens and parameters")
    common.add_times(parser, repeats=5, milliseconds=200, budget=540)
    common.add_merge(parser)
    common.add_place(parser)
    return common.parsed(parser, arguments, TINY)


def workers(args, cases):
    """Yields each worker's (name, XLA flags, share of the time, specification)."""
    shared = {
        "cases": cases,
        "seed": args.seed,
        "repeats": args.repeats,
        "milliseconds": args.milliseconds,
        "ours": [],
        "fp8": [],
        "transport": args.transport,
        "take": args.take,
        "dense": False,
        "ragged": (),
        **common.place(args),
    }
    transports = [name for name in args.layers if name in report.OURS]
    formats = args.formats if "bf16" in args.experts else ()
    found = {
        "ours": [(name, each) for name in transports for each in formats],
        "fp8": transports * ("fp8" in args.experts and report.FP8 in args.formats),
        "dense": "dense" in args.layers,
    }
    with_ragged = "ragged" in args.layers
    if args.tiny:
        ragged = [way for *_, ways in measure.ragged(0.5, here=True) for way in ways]
        yield "all layers", "", 1.0, {**shared, **found, "ragged": ragged * with_ragged}
        return
    if any(found.values()):
        share = 0.5 if with_ragged else 1.0
        yield "jax_ep", "", share, {**shared, **found}
    if with_ragged:
        for name, flags, share, measured in measure.ragged(0.5, here=False):
            yield name, flags, share, {**shared, "ragged": measured}


def chosen_matmuls(results, offered):
    """Returns the way that the first worker found fastest, by case, for later ones."""
    found = {
        row["case"]: [row["matmul"]]
        for row in results
        if "ms" in row and row["layer"] in report.OURS
    }
    return {case: found.get(case, matmuls) for case, matmuls in offered.items()}


def offered_matmuls(args, case):
    """Returns the ways of multiplying to try in a case."""
    return list(args.matmul or (MATMULS if case in _WITH_RAGGED_DOT else MATMULS[:2]))


def merged(before, after):
    """Joins the records of two runs on the same devices; later rows of a case win."""
    same = functools.partial(merging.require_same, "layer.py")
    for name in ("device", "count", "jax", "tokens", "top_k"):
        same(name, before[name], after[name])
    same("transport", *map(report.main_transport, (before, after)))
    for case in before["cases"].keys() & after["cases"].keys():
        same(f"sizes of {case}", before["cases"][case], after["cases"][case])
    measured = set(after["cases"]) - set(report.untimed(after))
    rows = [row for row in before["results"] if row["case"] not in measured]
    rows += [row for row in after["results"] if row["case"] in measured]
    cases = before["cases"] | after["cases"]
    return merging.joined(before, after, cases=cases, results=rows)


def main(arguments=None):
    args = parse(arguments)
    earlier = [json.loads(path.read_text()) for path in args.merge]
    cases = {
        name: {"tokens": args.tokens, "top_k": args.top_k, **(CASES | SMALL)[name]}
        for name in args.cases
    }
    facts = {"cases": cases, "tokens": args.tokens, "top_k": args.top_k}
    facts |= {"transport": args.transport, "flags": {}}
    run = recording.run("layer", "layers.layer", args, arguments, **facts)
    record = run.record
    offered = {case: offered_matmuls(args, case) for case in cases}
    for name, flags, share, spec in workers(args, cases):
        spec["matmul"] = chosen_matmuls(record["results"], offered)
        record["flags"][name] = flags
        if problem := run.work(name, flags, spec, share, WORKER):
            record["problems"].append(f"{name}: {problem}")
    name = recording.of("layer", record)
    try:
        record = functools.reduce(merged, [*earlier, record])
    finally:
        # Written even if it cannot be joined.
        recording.write(name, record, args.results)
    report.print_table(record)
    return 1 if report.failures(record) or report.untimed(record) else 0


if __name__ == "__main__":
    sys.exit(main())
