"""Tables of records of whole layers and of training, for README.md and docs."""

import math

import layer_bars
import performance_tables

from benchmarks.layers import grouped as grouped_benchmark
from benchmarks.layers import report
from jax_ep._layers.logits import FEW_TOKENS


def _times(data, table):
    """Yields the table of whole layers over jax_ep and over what JAX has, and notes."""
    failures = report.failures(data)
    if failures:
        raise SystemExit(f"the newest layer file is unfit: {failures}")
    untimed = [report.sizes(data, case) for case in report.untimed(data)]
    header, *rows = report.table(data)
    yield table(*_without_blanks(header, rows))
    yield from (f"No time was left for {sizes}." for sizes in untimed)


def _without_blanks(header, rows):
    """Leaves out empty columns."""
    kept = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def layers_in_short(data, _):
    """Shows the picture of README.md."""
    # Of the run that measured the first size, which the picture shows.
    run = {**data, **data.get("runs", [data])[0]}
    head = (
        f"A layer's times on {data['count']} x {data['device']} "
        f"({performance_tables.versions(run)}{run['date']}), for router, exchange, "
        f"SwiGLU experts and exchange, {data['tokens']} tokens per rank, top-"
        f"{data['top_k']}, bfloat16; other sizes are in "
        "[docs/benchmarks.md](docs/benchmarks.md#whole-layers):"
    )
    return f"{head}\n\n![{layer_bars.caption(data)}](docs/{layer_bars.PICTURE})"


def layers(data, table):
    """Shows layers with all columns and explanations."""
    times = list(_times(data, table))

    def seen(key, *names):
        rows = [r for r in data["results"] if r["layer"] in names and "ms" in r]
        return ", ".join(sorted({row[key] for row in rows}))

    flags = seen("flags", "ragged")
    ragged = (
        "`ragged` is the same layer over `jax.lax.ragged_all_to_all` "
        "(`jax_ep/_cli/bench/ragged.py`): with an update per rank and default flags, "
        "in the way that the column names, and in the "
        f"[fastest](#ways-to-call-ragged_all_to_all) of {flags}. "
    )
    default = seen("matmul", report.default_experts())
    at_default = (
        "`default experts` is p2p's layer with the experts that were the default at "
        f"that commit ({default}). "
    )
    ways = seen("matmul", *report.OURS)
    padded = "`padded` has the room that the timed routings need. "
    head = (
        f"**Whole layers** ({performance_tables.runs(data)}): "
        f"{data['tokens']} tokens per rank, top-{data['top_k']}, bfloat16. "
        "Times are in milliseconds, for router, exchange, SwiGLU experts and exchange; "
        "the second row of each size includes every gradient. In brackets is the share "
        "of the time that is left after subtracting that of the same router and "
        "experts on rows that are already there. "
        f"{ragged if flags else ''}"
        "`dense` is `all_to_all` with room for 1.25 times the mean (the excess is "
        "dropped) and batched matmuls. "
        f"{at_default if default else ''}{_fp8(data)}"
        "All other layers multiply by the fastest of the ways of `jax_ep.experts` that "
        f"were timed in each size (here {ways}). {padded * ('padded' in ways)}"
        "The last columns are p2p's speed-up over each of the other layers. "
        "All results and gradients were compared, within rounding, in the run that "
        "timed them."
    )
    return "\n\n".join([head, *times])


def _fp8(data):
    """Explains the columns of fp8 experts, if they were timed."""
    if report.FP8_COLUMNS[0] not in report.table(data)[0]:
        return ""
    return (
        "`fp8 experts` is p2p's layer with tokens in `fp8_block128`, whose codes "
        "`jax_ep.experts.fp8` multiplies by codes of the weights that were made "
        "beforehand. `fp8 over bf16` is its speed-up over p2p's layer in bfloat16. "
    )


def all_layers(data, table):
    """Shows `layers`, and the other tables of the same record."""
    alone = [
        (case, each, f"`{way}`", ms) for case, each, way, ms in report.matmuls(data)
    ]
    return "\n\n".join(
        [
            layers(data, table),
            *_rates(data, table),
            "The experts alone, for each way of multiplying:",
            table(("size", "pass", "way", "ms"), alone),
            *_stats_cost(data, table),
            *_capacity_cost(data, table),
            *_memory(data, table),
            *_steps(data, table),
        ]
    )


_PRODUCTS = {"forward": 1, "both": 3}  # with each matrix of an expert


def _rates(data, table):
    """Yields the rates of p2p's layer in bfloat16, counted as others do."""
    cells = []
    for each in report.summary(data):
        case = data["cases"][each["case"]]
        if each["p2p"]:
            products = case["tokens"] * case["top_k"] * case["hidden"] * case["inner"]
            flops = 6 * products * _PRODUCTS[each["pass"]]
            rate = f"{flops / each['p2p']['ms'] / 1e9:.0f}"
            name = report.sizes(data, each["case"])
            cells.append((name, report.PASSES[each["pass"]], rate))
    if cells:
        yield (
            "The TFLOP/s per GPU of p2p's layer in bfloat16, which count the three "
            "products of each token with its experts, and three times as much with "
            "gradients:"
        )
        yield table(("layer", "", "TFLOP/s"), cells)


OPS = {
    "forward": "rows",
    "to rows": "gradient of rows",
    "to matrices": "gradient of matrices",
}


def grouped(data, table):
    """Shows the matmuls of `jax_ep.experts.hopper` beside other ways to multiply."""
    wrong = [row for row in data["results"] if row.get("wrong")]
    if wrong:
        raise SystemExit(f"the newest grouped file is unfit: {wrong}")
    found, wholes = {}, []
    for row in data["results"]:
        if row.get("matrix") == "experts":
            wholes.append(row)
            continue
        place = row["case"], row["op"], row["room"]
        ways = found.setdefault(place, {})
        ways[row["way"]] = ways.get(row["way"], 0) + row.get("us", float("nan"))
    others, rows = _other_ways(data["results"]), []
    has_jax = "jax" in others
    for (case, op, room), us in found.items():
        ours = us.get("hopper")
        rate = f"{_flops(data, case) / (ours or us['portable']) / 1e6:.0f}"
        cells = [_number(us.get(way)) for way in (*others, "batched")]
        ratios = [_ratio(ours, us.get("batched"))]
        if has_jax:
            ratios.insert(0, _ratio(us.get("jax"), ours))
        rows.append((case, OPS[op], room, _number(ours), rate, *cells, *ratios))
    sizes = "; ".join(
        f"{case} has {s['rows']} rows and {s['groups']} experts of hidden "
        f"{s['hidden']} and inner {s['inner']}"
        for case, s in data["cases"].items()
    )
    source = performance_tables.source(data, data["command"])
    head = (
        f"The grouped matmuls of `hopper` ({source}), in bfloat16 unless a size says "
        f"otherwise, with random group sizes: {sizes}. `room` is how many rows the "
        "operand has for each row in a group; in a default layer that is the number of "
        "ranks. "
        "Times are in microseconds, for gate, up and down together. TFLOP/s are those "
        "of `hopper`, or of `portable` where that has none. "
        f"{_of_ways(data, others)}"
        "`batched` is one matmul with the same number of rows in every group "
        f"(cuBLAS). {_of_more_ways(data)}"
        f"{FASTER if has_jax else ''}`of batched` is the time of `hopper` over that of "
        "`batched`. Results were compared in the same run."
    )
    columns = ("size", "result", "room", "us", "TFLOP/s", *others.values(), "batched")
    columns += ("faster",) * has_jax + ("of batched",)
    parts = [head, table(columns, rows)]
    if wholes:
        parts += _experts(data, table, wholes)
    return "\n\n".join(parts)


def fp8_wgrad(data, table):
    """Shows whole experts with gradients of weights in bfloat16 and in fp8."""
    found = {}
    for row in data["results"]:
        if row["matrix"] == "experts" and row["op"] == "gradients":
            found.setdefault((row["case"], row["room"]), {})[row["way"]] = row["us"]
    rows = [
        (case, *(_number(us[way]) for way in FP8_WAYS), *_over(us))
        for (case, _), us in found.items()
    ]
    source = performance_tables.source(data, data["command"])
    columns = (
        *("size", "`hopper` us", '`fp8` us, `wgrad="bf16"`', '`wgrad="fp8"`'),
        *("over `fp8`", "`hopper` over it"),
    )
    head = (
        "Whole experts with SwiGLU, forward and with all gradients, on codes of rows "
        f"and weights that were made beforehand ({source}):"
    )
    return f"{head}\n\n{table(columns, rows)}"


FP8_WAYS = ("hopper", "fp8", "fp8_wgrad")


def _over(us):
    own = us["fp8_wgrad"]
    return _ratio(own, us["fp8"]), _ratio(us["hopper"], own)


FASTER = "`faster` is the time of `jax` over that of `hopper`. "
# What the columns of other ways are.
OTHER_WAYS = {
    "portable": "`portable` are the kernels for GPUs of compute capability 8.0 and "
    "newer, compiled from the PTX of 8.0. ",
    "jax": "`jax` is `jax.lax.ragged_dot`. ",
}


def _other_ways(rows):
    """Returns the columns of a record's ways besides `hopper` and `batched`."""
    ways = {row["way"] for row in rows}
    found = {way: way for way in OTHER_WAYS if way in ways}
    return found | _more_ways({"results": rows})


def _of_ways(data, others):
    return "".join(OTHER_WAYS[way] for way in others if way in OTHER_WAYS)


# The names of the columns of ways that not every record has.
MORE_WAYS = {
    "jax_grouped_gemm": "jax, grouped GEMM",
    "jax_fusion": "jax, fusion",
    "tokamax": "tokamax",
}


def _more_ways(data):
    """Returns those of MORE_WAYS that a record has."""
    ways = {row["way"] for row in data["results"]}
    return {way: name for way, name in MORE_WAYS.items() if way in ways}


def _of_more_ways(data):
    """Explains these ways, and why some have no time."""
    text = ""
    for way, name in _more_ways(data).items():
        option = grouped_benchmark.FLAGS.get(way)
        text += f"`{name}` is " + (
            f"`jax.lax.ragged_dot` with XLA's option `{option}`"
            if option
            else "that library's ragged dot"
        )
        rows = [r for r in data["results"] if r["way"] == way and "error" in r]
        far = [row["difference"] for row in rows if "difference" in row]
        others = sorted({row["error"] for row in rows if "difference" not in row})
        if far:
            text += (
                "; it has no time where its results are off by more than rounding (by "
                f"{min(far):.2f} to {max(far):.2f} of the largest element)"
            )
        text += f"; it did not always run ({'; '.join(others)})" if others else ""
        text += ". "
    return text


def _flops(data, case):
    """Counts the operations of gate, up and down: multiplications and additions."""
    sizes = data["cases"][case]
    return 2 * 3 * sizes["rows"] * sizes["hidden"] * sizes["inner"]


def _number(us):
    return "" if us is None or us != us else f"{us:.0f}"


def _ratio(us, other):
    known = us is not None and other is not None and us == us and other == other
    return f"{us / other:.2f}" if known else ""


def _experts(data, table, rows):
    """Shows whole experts, with a column for each way."""
    found = {}
    for row in rows:
        ways = found.setdefault((row["case"], row["op"], row["room"]), {})
        ways[row["way"]] = row.get("us", float("nan"))
    yield (
        "Whole experts with SwiGLU, in microseconds: forward, and forward with the "
        "gradients of rows and of both matrices. `fp8` multiplies codes that were made "
        "beforehand; `quantize` is the time it takes to make those of the weights, in "
        "both orientations."
    )
    more = _other_ways(rows)
    ways = ("hopper", "fp8", *more, "batched")
    cells = [
        (*place, *(_number(us.get(way)) for way in ways)) for place, us in found.items()
    ]
    names = (more.get(way, way) for way in ways)
    yield table(("size", "pass", "room", *names), cells)


def _stats_cost(data, table):
    rows = list(report.stats_cost(data))
    if rows:
        yield "What `jax_ep.stats.update` adds to p2p's layer:"
        yield table(("size", "pass", "ms", "with it", ""), rows)


def _capacity_cost(data, table):
    rows = list(report.capacity_cost(data))
    if rows:
        yield (
            "p2p's layer with the room for rows that the timed routings need (`ms`), "
            "and with the default room, which is enough for the worst case (`default "
            "capacity`):"
        )
        columns = ("experts", "size", "pass", "ms", "default capacity", "")
        yield table(columns, rows)


def _memory(data, table):
    rows = list(report.memory(data))
    if rows:
        yield (
            "MiB per GPU that a layer's program needs besides its operands and "
            "results, as XLA reports it (`memory_analysis`), and those of its windows, "
            "which all calls of a handle share:"
        )
        yield table(report.MEMORY_COLUMNS, rows)


def _steps(data, table):
    rows = list(report.steps(data))
    if rows:
        yield (
            "The time to make the codes of the experts' weights (`codes ms`), and "
            "steps of p2p's layer. `GB/s`, per GPU, counts reading the weights once "
            "and writing codes, in both orders, and scales. A step runs forward and "
            "backward over the given number of microbatches; in fp8 it first makes the "
            "codes, once:"
        )
        yield table(report.STEP_COLUMNS, rows)


def train(data, table):
    """Shows about a dozen steps of the curves of examples/train.py."""
    curves = data["curves"]
    names = [name for name in curves if name != "dense"]
    apart = {
        name: [abs(a - b) for a, b in zip(curves[name], curves["dense"], strict=True)]
        for name in names
    }
    alike = data["alike"]
    before = {n: max(gaps[: alike[n]], default=math.inf) for n, gaps in apart.items()}
    if not names or max(before.values()) > 1e-4:
        raise SystemExit(f"the newest train file is unfit: {before}")
    norms = max(data["norms"].values())
    if norms > 1e-3:
        raise SystemExit(f"the newest train file has other gradients: {norms}")
    steps = len(curves["dense"])
    shown = [0, *range(steps // 12 - 1, steps, max(1, steps // 12))]
    rows = [
        (step + 1, *(f"{curves[name][step]:.4f}" for name in ("dense", *names)))
        for step in dict.fromkeys(max(0, step) for step in shown)
    ]
    sizes = data["sizes"]
    found = ", ".join(
        f"{name} {before[name]:.1e} in {data['alike'][name]} steps and "
        f"{max(apart[name]):.1e} in all {steps}"
        for name in names
    )
    head = (
        f"{performance_tables.source(data, data['command'])}, mesh "
        f"{' x '.join(f'{k} {v}' for k, v in data['mesh'].items())}: "
        f"{sizes['blocks']} blocks, hidden {sizes['hidden']}, top-{sizes['top_k']} of "
        f"{sizes['experts']} experts, {sizes['sequences']} sequences of "
        f"{sizes['length']} bytes per step, Adam, seed {data['seed']}. Losses are in "
        "nats per byte. Rounding may decide a near tie of a router differently, so "
        "that a token goes to another expert than in the dense model. The largest "
        f"differences from the dense curve before that and in all steps: {found}. "
        "Before that, no norm of a parameter's gradient was off by more than "
        f"{norms:.1e} of its value."
    )
    return f"{head}\n\n" + table(("step", "dense", *names), rows)


def options(data, table):
    """Shows a layer with each of its options beside the plain layer."""
    found = {}
    for row in data["results"]:
        found.setdefault((row["case"], row["option"]), {})[row["pass"]] = row
    cells = []
    for place, passes in found.items():
        cells.append([*place])
        for name in ("forward", "gradients"):
            row = passes.get(name)
            shown = ("over plain", "explained")
            ms = f"{row['ms']:.2f}" if row else ""
            cells[-1] += [ms, *(f"{row[each]:.2f}" if row else "" for each in shown)]
        cells[-1].append(f"{passes['forward']['of weights']:.2f}")
    sizes = "; ".join(
        f"{case} has {s['tokens']} tokens, hidden {s['hidden']}, and top-{s['top_k']} "
        f"of {s['experts']} experts of inner {s['inner']}"
        for case, s in data["cases"].items()
    )
    head = (
        "A layer with each of its options ("
        f"{performance_tables.runs(data)}): {sizes}. Times are in "
        "milliseconds, forward and with the gradients of tokens and parameters; `over` "
        "is a time over that of the plain layer in the same run, and `explained` what "
        "that should be for the products and bytes that the option adds, at the plain "
        "layer's rate "
        f"and at {data['copy_gb_s']:.0f} GB/s, which a copy reached. "
        "`memory` is that of intermediate results in the forward pass, over the "
        "experts' weights in bfloat16."
    )
    columns = ("size", "option", "forward", "over", "explained")
    columns += ("gradients", "over", "explained", "memory")
    return f"{head}\n\n" + table(columns, cells)


def routers(data, table):
    """Shows the times to choose experts by the kernel and in plain JAX."""
    by_way = {}
    for row in data["results"]:
        if row["wrong"]:
            raise SystemExit(f"the newest routers file is unfit: {row}")
        name = row.get("router", f"hidden {data['hidden']}")
        by_way.setdefault((name, row["part"], row["tokens"]), []).append(row)
    cells = [
        (
            *map(str, place),
            *(f"{row['us']:.1f} ({row['kernels']:g})" for row in ways[:2]),
            f"{ways[0]['us'] / ways[1]['us']:.2f}",
        )
        for place, ways in by_way.items()
    ]
    head = (
        f"`jax_ep.router.route` ({performance_tables.source(data, data['command'])}), "
        f"top-{data['top_k']} of {data['experts']} experts: from logits to ids and "
        "weights, and the same with the gradient of a function of the weights. A "
        f"program does this {data['steps']} times. The table has the microseconds on "
        "the GPU for each time, and in brackets its number of kernels. `plain` is the "
        "same router in plain JAX, as it runs outside of `shard_map`, and `ours` is "
        "the kernel. Logits are computed from bfloat16 tokens and a float32 router: "
        "`plain` takes one product of highest precision, `ours` does what a layer "
        f"does, which for more than {FEW_TOKENS} tokens is to multiply parts in "
        "bfloat16."
    )
    columns = ("router", "part", "tokens", "plain", "ours", "times as fast")
    return f"{head}\n\n" + table(columns, cells)
