"""What layer.py prints, and the rows of the tables of README.md and docs/layers.md."""

import functools

from benchmarks.common import reports
from jax_ep._cli.bench.process import NO_TIME
from jax_ep._cli.bench.report import number

PASSES = {"forward": "forward", "both": "forward + backward"}
OURS = ("p2p", "collective")
_number = functools.partial(number, digits=2)


def default_experts(transport="p2p"):
    """The row of jax_ep's layer with the experts of a user who chooses none."""
    return f"{transport}, default experts"


def counted(transport="p2p"):
    """The row of the layer with jax_ep.stats.update."""
    return f"{transport}, stats"


def main_transport(record):
    """The transport whose layer is timed in those ways too."""
    return record.get("transport", OURS[0])


def name(row):
    """Which layer a row is of."""
    parts = [row["layer"], row.get("format"), row.get("flags"), row.get("matmul")]
    return ", ".join(part for part in parts if part and part != "bf16")


def line(row):
    """A row in one line, as progress."""
    head = f"{row['case']:<10} {name(row):<44}"
    if "error" in row:
        return f"{head} {reports.error_line(row)}"
    worst = max(row["errors"].values())
    tail = f"largest error {worst:.4f}"
    if row["wrong"]:
        tail += f"  WRONG: {row['errors']}"
    if row.get("tokens_with_drops"):
        tail += f"  {row['tokens_with_drops']} tokens lost rows"
    if row.get("exchange_share") is not None:
        tail = f"exchange {100 * row['exchange_share']:3.0f}%  {tail}"
    return (
        f"{head} {PASSES[row['pass']]:<18} {row['ms']:9.3f} ms "
        f"({row['ms_least']:.3f} to {row['ms_most']:.3f})  {tail}"
    )


def failures(record):
    """What makes a record unfit: wrong results, or results of jax_ep that are missing.

    What XLA's ragged_all_to_all, or a way of multiplying, cannot do is left out, and
    so are the cases of `untimed`.
    """
    left_out, lacking = untimed(record), (*OURS, "all")
    rows = [
        line(row)
        for row in record["results"]
        if (row.get("wrong") and row["layer"] != "experts")
        or (row["layer"] in lacking and "error" in row and row["case"] not in left_out)
    ]
    return [*rows, *record["problems"]]


def untimed(record):
    """The cases for which no time was left: no layer of theirs was timed."""
    rows = [row for row in record["results"] if row["layer"] != "experts"]
    begun = {row["case"] for row in rows if not row.get("error", "").endswith(NO_TIME)}
    return [case for case in record["cases"] if case not in begun]


def sizes(record, case):
    """What a case is called in tables."""
    found = record["cases"][case]
    return f"{found['hidden']} x {found['inner']}, {found['experts']} experts"


def best(rows, **wanted):
    """The fastest right row whose entries are `wanted`, or None."""
    found = [
        row
        for row in rows
        if "ms" in row
        and not row["wrong"]
        and all(row.get(key) == value for key, value in wanted.items())
    ]
    return min(found, key=lambda row: row["ms"], default=None)


def summary(record):
    """A dict for every (case, pass): the table's rows."""
    rows, found = record["results"], []
    for case in record["cases"]:
        for each in PASSES:
            at = {"case": case, "pass": each}
            ours = best(rows, layer="p2p", format="bf16", **at)
            layers = {
                "p2p": ours,
                "p2p_fp8": best(rows, layer="p2p", format="fp8_block128", **at),
                "p2p_default": best(
                    rows, layer=default_experts(main_transport(record)), **at
                ),
                "collective": best(rows, layer="collective", format="bf16", **at),
                "dense": best(rows, layer="dense", **at),
                "ragged_default": best(rows, layer="ragged", flags="default", **at),
                "ragged_rank": best(rows, layer="ragged", flags=PER_RANK, **at),
                "ragged": best(rows, layer="ragged", **at),
            }
            speed_ups = {
                key: layers[key]["ms"] / ours["ms"] if ours and layers[key] else None
                for key in BASELINES
            }
            found.append({**at, **layers, "speed_ups": speed_ups})
    return [each for each in found if any(each[key] for key in _LAYERS)]


PER_RANK = "decomposer"  # measure.RAGGED: one update per rank, XLA's better flags
# What p2p's speed-up is said over.
BASELINES = {
    "dense": "over dense",
    "ragged_default": "over ragged",
    "ragged_rank": "over ragged, flags",
    "ragged": "over ragged, best",
}
_LAYERS = (
    "p2p",
    "p2p_fp8",
    "p2p_default",
    "collective",
    "dense",
    "ragged_default",
    "ragged_rank",
    "ragged",
)
COLUMNS = (
    "layer",
    "",
    "experts ms",
    "p2p",
    "p2p, fp8",
    "p2p, default experts",
    "collective",
    "dense",
    "ragged",
    "ragged, flags",
    "ragged, best",
    *BASELINES.values(),
)


def _time(row):
    if row is None:
        return ""
    if row["exchange_share"] is None:
        return f"{row['ms']:.2f}"
    return f"{row['ms']:.2f} ({100 * row['exchange_share']:.0f}%)"


def cells(record):
    """The table's cells, as text."""
    for each in summary(record):
        apart = ("dense", "p2p_default")  # have other experts than the rest
        sparse = [each[key] for key in _LAYERS if each[key] and key not in apart]
        yield (
            sizes(record, each["case"]),
            PASSES[each["pass"]],
            _number(sparse[0]["experts_ms"] if sparse else None),
            *(_time(each[key]) for key in _LAYERS),
            *(_number(each["speed_ups"][key]) for key in BASELINES),
        )


def matmuls(record):
    """Milliseconds of the experts alone, by case, pass and way of multiplying."""
    shown = set()  # later workers time the chosen way again, with their flags
    for row in record["results"]:
        key = (row["case"], row.get("pass"), row.get("matmul"))
        if row["layer"] == "experts" and key not in shown:
            shown.add(key)
            ms = _number(row.get("ms")) if not row.get("wrong") else "wrong"
            yield row["case"], row.get("pass", ""), row.get("matmul", ""), ms


def stats_cost(record):
    """What jax_ep.stats.update adds to a layer: case, pass, ms without and with."""
    main = main_transport(record)
    for case in record["cases"]:
        for each in PASSES:
            at = {"case": case, "pass": each}
            ours = best(record["results"], layer=main, format="bf16", **at)
            both = best(record["results"], layer=counted(main), **at)
            if ours and both:
                change = f"{100 * (both['ms'] / ours['ms'] - 1):+.1f}%"
                yield case, each, _number(ours["ms"]), _number(both["ms"]), change


def print_table(record):
    print(
        f"\n{record['count']} x {record['device']}, {record['tokens']} tokens per rank,"
        f" top-{record['top_k']}, bfloat16; ms per step (share that is not experts)"
    )
    lines = [COLUMNS, *cells(record)]
    widths = [max(len(str(row[i])) for row in lines) for i in range(len(COLUMNS))]
    for row in lines:
        print("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)))
    print("\nexperts alone")
    for case, each, matmul, ms in matmuls(record):
        print(f"{case:>10} {each:<8} {matmul:<11} {ms:>9} ms")
    for case, each, without, counted, change in stats_cost(record):
        print(f"{case:>10} {each:<8} {without} ms, with stats {counted} ms, {change}")
    for row in record["results"]:
        if "error" in row or row.get("wrong"):
            print(line(row))
    for problem in record["problems"]:
        print(problem)
