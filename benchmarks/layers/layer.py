"""Times whole expert layers: jax_ep's, over ragged_all_to_all, over all_to_all.

    python -m benchmarks.layers.layer [--budget 540]
    python -m benchmarks.layers.layer --cases mid --layers p2p ragged --matmul padded

On all GPUs of this process, in one run, for T tokens a rank: router, exchange, SwiGLU
experts, exchange; forward, and forward with every gradient. The layers:

* "p2p", "collective": `jax_ep.moe_ffn` over that transport, tokens as they are and as
  fp8_block128;
* "ragged": rows sorted by expert, `jax.lax.ragged_all_to_all` (ragged.py), with XLA's
  default flags and with its better ones, each in a process of its own;
* "dense": `all_to_all` of 1.25 times the mean for each (rank, expert), what is over
  dropped, and batched matmuls.

The router is the same function in all of them, and so is what the experts do, but for
"dense": of several ways of multiplying (layer_experts.py) each case takes the one that
is fastest here, and p2p's layer is timed besides as one has it that names none.
`jax.lax.ragged_dot` is tried in the mid-size case, and in large ones where --matmul
names it. `recv_capacity` is 1.25 * T * K rounded up to 128.

A time is that of many calls of a jitted function enqueued ahead, all GPUs, by the
host's clock, over the calls; median of the repeats; two token arrays in turn. The share
that is not experts is the time of the layer less the time of the same router and
experts on rows that are there already, over the time of the layer. Results and all
gradients are compared with those of transport collective, within rounding; wrong ones
are marked, and the command then exits 1.

Writes benchmarks/results/layer-<gpu>x<n>-<date>.json and prints a table last. --merge
adds the cases of earlier records that this run did not time. A case without any time
exits 1 as well.
"""

import argparse
import functools
import json
import pathlib
import sys
import time

from benchmarks.calls import p2p
from benchmarks.common import recording
from benchmarks.layers import report
from benchmarks.limits import gpu_limits

# The order in which they are measured. Mixture of the models that people train.
CASES = {
    "large-256": {"hidden": 7168, "inner": 2048, "experts": 256},
    "large-64": {"hidden": 7168, "inner": 2048, "experts": 64},
    "mid": {"hidden": 2048, "inner": 1024, "experts": 64},
}
SMALL = {"tiny": {"hidden": 128, "inner": 128, "experts": 4}}
LAYERS = ("p2p", "collective", "dense", "ragged")
FORMATS = ("bf16", "fp8_block128")
# For layer_experts.make. Surest first; a way that is slow comes last.
MATMULS = ("padded", "mosaic", "ragged_dot")
# As XLA may do it, the last takes 341 ms a matmul on H200s in cases that are large.
_OF_LARGE = MATMULS[:2]
WORKER = "layer_worker.py"
TINY = (
    *("--cases", *SMALL, "--layers", "collective", "dense", "ragged"),
    *("--transport", "collective", "--take", MATMULS[0], "--tokens", "8"),
    *("--top-k", "2", "--milliseconds", "0.1", "--repeats", "1", "--devices", "2"),
)


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = [*CASES, *SMALL]
    parser.add_argument("--cases", nargs="+", choices=known, default=list(CASES))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
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
        help="whose layer is timed with jax_ep.stats and with the default experts too",
    )
    parser.add_argument("--tokens", type=int, default=4096, help="a rank")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=200, help="of a repeat")
    parser.add_argument("--seed", type=int, help="of tokens and parameters")
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument(
        "--merge", type=pathlib.Path, nargs="+", default=[], help="records to join"
    )
    parser.add_argument("--results", type=pathlib.Path, default=recording.RESULTS)
    p2p.add_place(parser)
    return p2p.parsed(parser, arguments, TINY)


def workers(args, cases):
    """(what it measures, XLA flags, its share of the time, its specification)."""
    common = {
        "cases": cases,
        "seed": args.seed,
        "repeats": args.repeats,
        "milliseconds": args.milliseconds,
        "ours": [],
        "transport": args.transport,
        "take": args.take,
        "dense": False,
        "ragged": (),
        **p2p.place(args),
    }
    transports = [name for name in args.layers if name in report.OURS]
    ours = [(name, each) for name in transports for each in args.formats]
    with_dense, with_ragged = ("dense" in args.layers, "ragged" in args.layers)
    if args.tiny:
        # In this process flags change nothing.
        ragged = [each for _, measured in p2p.RAGGED for each in measured]
        found = {"ours": ours, "dense": with_dense, "ragged": ragged * with_ragged}
        yield "all layers", "", 1.0, {**common, **found}
        return
    if ours or with_dense:
        share = 0.5 if with_ragged else 1.0
        yield "jax_ep", "", share, {**common, "ours": ours, "dense": with_dense}
    if with_ragged:
        for index, (flags, measured) in enumerate(p2p.RAGGED):
            name = f"ragged_all_to_all with {flags or 'the default flags'}"
            yield name, flags, 0.8 + 0.2 * index, {**common, "ragged": measured}


def chosen_matmuls(results, offered):
    """By case, what the first worker found fastest; later ones take the same."""
    found = {
        row["case"]: [row["matmul"]]
        for row in results
        if "ms" in row and row["layer"] in report.OURS
    }
    return {case: found.get(case, matmuls) for case, matmuls in offered.items()}


def offered_matmuls(args, case):
    """What is tried for a case."""
    return list(args.matmul or (_OF_LARGE if case.startswith("large") else MATMULS))


OF_A_RUN = ("commit", "date", "seed", "command", "driver", "seconds")


def merged(before, after):
    """One record of two runs on the same devices: of each case the last one's rows."""
    for name in ("device", "count", "jax", "tokens", "top_k"):
        _require_same(name, before[name], after[name])
    transports = map(report.main_transport, (before, after))
    _require_same("transport", *transports)
    for case in before["cases"].keys() & after["cases"].keys():
        _require_same(f"sizes of {case}", before["cases"][case], after["cases"][case])
    measured = set(after["cases"]) - set(report.untimed(after))
    rows = [row for row in before["results"] if row["case"] not in measured]
    rows += [row for row in after["results"] if row["case"] in measured]
    cases = before["cases"] | after["cases"]
    runs = [*_runs(before), *_runs(after)]
    problems = before["problems"] + after["problems"]
    joined = {"cases": cases, "results": rows, "runs": runs, "problems": problems}
    return {**after, **joined}


def _require_same(name, before, after):
    if before != after:
        raise SystemExit(
            f"layer.py: records to merge must have the same {name}, got {before!r} and "
            f"{after!r}; leave one of them out"
        )


def _runs(record):
    return record.get("runs", [{name: record[name] for name in OF_A_RUN}])


def main(arguments=None):
    args = parse(arguments)
    start = time.time()
    earlier = [json.loads(path.read_text()) for path in args.merge]
    print(f"seed {args.seed}")
    cases = {
        name: {**(CASES | SMALL)[name], "tokens": args.tokens, "top_k": args.top_k}
        for name in args.cases
    }
    record = {
        "kind": "layer",
        "device": "unknown",
        "count": 0,
        "driver": gpu_limits.driver(),
        "commit": recording.commit(),
        "date": recording.date(),
        "seed": args.seed,
        "command": p2p.command("layer.py", arguments or sys.argv[1:]),
        "cases": cases,
        "tokens": args.tokens,
        "top_k": args.top_k,
        "transport": args.transport,
        "flags": {},
        "results": [],
        "problems": [],
    }
    offered = {case: offered_matmuls(args, case) for case in cases}
    for name, flags, share, spec in workers(args, cases):
        print(f"{name}, {time.time() - start:.0f} s", flush=True)
        spec["matmul"] = chosen_matmuls(record["results"], offered)
        spec["deadline"] = start + share * args.budget
        record["flags"][name] = flags
        rows, problem = p2p.run_worker(flags, spec, WORKER)
        p2p.take(record, rows)
        if problem:
            record["problems"].append(f"{name}: {problem}")
    record["seconds"] = round(time.time() - start, 1)
    name = recording.short_device(record["device"])
    try:
        record = functools.reduce(merged, [*earlier, record])
    finally:
        # Also where it cannot be joined.
        recording.write(f"layer-{name}x{record['count']}", record, args.results)
    report.print_table(record)
    return 1 if report.failures(record) or report.untimed(record) else 0


if __name__ == "__main__":
    sys.exit(main())
