"""Lines that layer.py prints, and rows of tables in README.md and docs/layers.md."""

import functools

from benchmarks.common import reports
from jax_ep._cli.bench.process import NO_TIME
from jax_ep._cli.bench.report import number

PASSES = {"forward": "forward", "both": "forward + backward"}
OURS = ("p2p", "collective")
FP8 = "fp8_block128"  # the token format of layers with experts in fp8
_number = functools.partial(number, digits=2)


def default_experts(transport="p2p"):
    """Names the row of jax_ep's layer with the experts that a user gets by default."""
    return f"{transport}, default experts"


def fp8_experts(transport="p2p"):
    """Names the row of the layer with experts in fp8, codes of weights made before."""
    return f"{transport}, fp8 experts"


def counted(transport="p2p"):
    """Names the row of the layer with jax_ep.stats.update."""
    return f"{transport}, stats"


def default_capacity(layer="p2p"):
    """Names the row of a layer with the default capacity, which is the worst case."""
    return f"{layer}, default capacity"


def main_transport(record):
    """Returns the transport whose layer is also timed in these ways."""
    return record.get("transport", OURS[0])


def name(row):
    """Names the layer of a row."""
    parts = [row["layer"], row.get("format"), row.get("flags"), row.get("matmul")]
    return ", ".join(part for part in parts if part and part != "bf16")


def _pass(row):
    if row["pass"] == "quantize":
        return "codes of weights"
    if row["pass"] == "step":
        return f"step of {row['microbatches']}"
    return PASSES[row["pass"]]


def line(row):
    """Formats a row as one line of progress."""
    head = f"{row['case']:<10} {name(row):<44}"
    if "error" in row:
        return f"{head} {reports.error_line(row)}"
    tail = f"largest error {row['largest_error']:.4f}"
    if row["wrong"]:
        tail += f"  WRONG: {row['errors']}"
    if row.get("tokens_with_drops"):
        tail += f"  {row['tokens_with_drops']} tokens lost rows"
    if row.get("exchange_share") is not None:
        tail = f"exchange {100 * row['exchange_share']:3.0f}%  {tail}"
    if "gb_s" in row:
        tail = f"{row['gb_s']:.0f} GB/s  {tail}"
    return (
        f"{head} {_pass(row):<18} {row['ms']:9.3f} ms "
        f"({row['ms_least']:.3f} to {row['ms_most']:.3f})  {tail}"
    )


def failures(record):
    """Lists what makes a record unfit: wrong results, or missing ones of jax_ep.

    It leaves out what XLA's ragged_all_to_all or a way of multiplying cannot do, and
    the cases of `untimed`.
    """
    left_out = untimed(record)
    lacking = (*OURS, *map(fp8_experts, OURS), "all")
    rows = [
        line(row)
        for row in record["results"]
        if (row.get("wrong") and row["layer"] != "experts")
        or (row["layer"] in lacking and "error" in row and row["case"] not in left_out)
    ]
    return [*rows, *record["problems"]]


def untimed(record):
    """Lists the cases of which no layer was timed, since no time was left."""
    rows = [row for row in record["results"] if row["layer"] != "experts"]
    begun = {row["case"] for row in rows if not row.get("error", "").endswith(NO_TIME)}
    return [case for case in record["cases"] if case not in begun]


def sizes(record, case):
    """Returns what tables call a case."""
    found = record["cases"][case]
    name = f"{found['hidden']} x {found['inner']}, {found['experts']} experts"
    if found["tokens"] != record["tokens"]:
        name += f", {found['tokens']} tokens"
    if found["top_k"] != record["top_k"]:
        name += f", top-{found['top_k']}"
    return name


def best(rows, **wanted):
    """Returns the fastest right row whose entries are `wanted`, or None."""
    found = [
        row
        for row in rows
        if "ms" in row
        and not row["wrong"]
        and all(row.get(key) == value for key, value in wanted.items())
    ]
    return min(found, key=lambda row: row["ms"], default=None)


def summary(record):
    """Returns the table's rows, a dict for every (case, pass)."""
    rows, found = record["results"], []
    main = main_transport(record)
    for case in record["cases"]:
        for each in PASSES:
            at = {"case": case, "pass": each}
            ours = best(rows, layer="p2p", format="bf16", **at)
            layers = {
                "p2p": ours,
                "p2p_fp8": best(rows, layer="p2p", format="fp8_block128", **at),
                "p2p_default": best(rows, layer=default_experts(main), **at),
                "p2p_fp8_experts": best(rows, layer=fp8_experts(main), **at),
                "collective": best(rows, layer="collective", format="bf16", **at),
                "dense": best(rows, layer="dense", **at),
                "ragged_default": best(rows, layer="ragged", flags="default", **at),
                "ragged_rank": best(rows, layer="ragged", flags=PER_RANK, **at),
                "ragged": best(rows, layer="ragged", **at),
            }
            speed_ups = {key: _over(layers[key], ours) for key in BASELINES}
            plain = best(rows, layer=main, format="bf16", **at)
            fp8_gain = _over(plain, layers["p2p_fp8_experts"])
            found.append({**at, **layers, "fp8_gain": fp8_gain, "speed_ups": speed_ups})
    return [each for each in found if any(each[key] for key in _LAYERS)]


def _over(row, other):
    """Returns how many times as fast `other` is, or None."""
    return row["ms"] / other["ms"] if row and other else None


PER_RANK = "decomposer"  # the name of its way in measure.RAGGED
# The columns for p2p's speed-up over other layers.
BASELINES = {
    "dense": "over dense",
    "ragged_default": "over ragged",
    "ragged_rank": f"over ragged, {PER_RANK}",
    "ragged": "over ragged, fastest",
}
_LAYERS = (
    "p2p",
    "p2p_fp8",
    "p2p_default",
    "p2p_fp8_experts",
    "collective",
    "dense",
    "ragged_default",
    "ragged_rank",
    "ragged",
)
FP8_COLUMNS = ("p2p, fp8 experts", "fp8 over bf16")
COLUMNS = (
    "layer",
    "",
    "experts ms",
    "p2p",
    "p2p, fp8",
    "p2p, default experts",
    FP8_COLUMNS[0],
    "collective",
    "dense",
    "ragged",
    f"ragged, {PER_RANK}",
    "ragged, fastest",
    FP8_COLUMNS[1],
    *BASELINES.values(),
)


def _time(row):
    if row is None:
        return ""
    if row["exchange_share"] is None:
        return f"{row['ms']:.2f}"
    return f"{row['ms']:.2f} ({100 * row['exchange_share']:.0f}%)"


def _fastest(row):
    """Formats the time of the fastest ragged way, with its name."""
    return f"{_time(row)}, {row['flags']}" if row else ""


def cells(record):
    """Yields the table's rows as text."""
    for each in summary(record):
        # These layers multiply in another way than the rest.
        apart = ("dense", "p2p_default", "p2p_fp8_experts")
        sparse = [each[key] for key in _LAYERS if each[key] and key not in apart]
        yield (
            sizes(record, each["case"]),
            PASSES[each["pass"]],
            _number(sparse[0]["experts_ms"] if sparse else None),
            *((_fastest if key == "ragged" else _time)(each[key]) for key in _LAYERS),
            _number(each["fp8_gain"]),
            *(_number(each["speed_ups"][key]) for key in BASELINES),
        )


def table(record):
    """Returns the table's header and rows, without fp8's columns if they are empty."""
    found = [COLUMNS, *cells(record)]
    kept = [
        index
        for index, column in enumerate(COLUMNS)
        if column not in FP8_COLUMNS or any(row[index] for row in found[1:])
    ]
    return [tuple(row[index] for index in kept) for row in found]


def matmuls(record):
    """Yields (case, pass, way of multiplying, milliseconds of the experts alone)."""
    shown = set()  # later workers time the chosen way again, with their flags
    coded = tuple(map(fp8_experts, OURS))  # whose experts have no rows of their own
    for row in record["results"]:
        key = (row["case"], row.get("pass"), row.get("matmul"))
        ms = row.get("experts_ms") if row["layer"] in coded else row.get("ms")
        alone = row["layer"] == "experts" or (row["layer"] in coded and ms is not None)
        if alone and key not in shown:
            shown.add(key)
            ms = _number(ms) if not row.get("wrong") else "wrong"
            yield row["case"], row.get("pass", ""), row.get("matmul", ""), ms


def stats_cost(record):
    """Yields what jax_ep.stats.update costs: case, pass, ms without and with it."""
    main = main_transport(record)
    yield from _cost(record, {"layer": main, "format": "bf16"}, counted(main))


def capacity_cost(record):
    """Yields what room for the worst case costs: (experts, *as in `stats_cost`)."""
    main = main_transport(record)
    layers = {"bfloat16": (main, "bf16"), "fp8": (fp8_experts(main), FP8)}
    for experts, (layer, form) in layers.items():
        way = {"layer": layer, "format": form}
        for row in _cost(record, way, default_capacity(layer)):
            yield experts, *row


def _cost(record, way, other):
    """Yields the times of the layer of that `way`, and of the layer `other`."""
    for case in record["cases"]:
        for each in PASSES:
            at = {"case": case, "pass": each}
            ours = best(record["results"], **way, **at)
            both = best(record["results"], layer=other, **at)
            if ours and both:
                change = f"{100 * (both['ms'] / ours['ms'] - 1):+.1f}%"
                yield case, each, _number(ours["ms"]), _number(both["ms"]), change


MEMORY_COLUMNS = ("layer", "", "forward", "forward + backward", "windows")


def memory(record):
    """Returns each layer's memory: MiB per GPU besides operands and results."""
    layers = {}
    for row in record["results"]:
        if row.get("temp_bytes") is not None:
            of_passes = layers.setdefault((row["case"], name(row)), {})
            of_passes[row["pass"]] = row["temp_bytes"]
            of_passes["windows"] = row["window_bytes"]
    for (case, title), found in layers.items():
        cells = (_mebibytes(found.get(each)) for each in (*PASSES, "windows"))
        yield sizes(record, case), title, *cells


def _mebibytes(size):
    return "" if size is None else f"{size / 2**20:.0f}"


STEP_COLUMNS = (
    "size",
    "codes ms",
    "GB/s",
    "microbatches",
    "bf16 ms",
    "fp8 ms",
    "fp8 over bf16",
)


def steps(record):
    """Yields, by case and number of microbatches, times of weights' codes and steps."""
    main = main_transport(record)
    layers = {"layer": main, "format": "bf16"}, {"layer": fp8_experts(main)}
    for case in record["cases"]:
        rows = [row for row in record["results"] if row["case"] == case]
        codes = best(rows, **{"pass": "quantize"})
        counts = {row.get("microbatches") for row in rows if row.get("pass") == "step"}
        for count in sorted(counts) or [None] * bool(codes):
            at = {"pass": "step", "microbatches": count}
            plain, coded = (best(rows, **layer, **at) for layer in layers)
            yield (
                case,
                _number(codes and codes["ms"]),
                f"{codes['gb_s']:.0f}" if codes else "",
                "" if count is None else str(count),
                *(_number(row and row["ms"]) for row in (plain, coded)),
                _number(_over(plain, coded)),
            )


def _print_columns(lines):
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        print("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)))


def print_table(record):
    print(
        f"\n{record['count']} x {record['device']}, {record['tokens']} tokens per rank,"
        f" top-{record['top_k']}, bfloat16; ms (share of the time that is not experts)"
    )
    _print_columns(table(record))
    print("\nexperts alone")
    for case, each, matmul, ms in matmuls(record):
        print(f"{case:>10} {each:<8} {matmul:<11} {ms:>9} ms")
    for case, each, without, counted, change in stats_cost(record):
        print(f"{case:>10} {each:<8} {without} ms, with stats {counted} ms, {change}")
    for experts, case, each, ms, more, change in capacity_cost(record):
        print(
            f"{case:>10} {each:<8} {experts} {ms} ms, default capacity {more} ms",
            change,
        )
    if found := list(memory(record)):
        print("\nMiB per GPU besides operands and results, as XLA reports them")
        _print_columns([MEMORY_COLUMNS, *found])
    if found := list(steps(record)):
        print("\nmaking the codes of the experts' weights, and steps that use them")
        _print_columns([STEP_COLUMNS, *found])
    for row in record["results"]:
        if "error" in row or row.get("wrong"):
            print(line(row))
    for problem in record["problems"]:
        print(problem)
