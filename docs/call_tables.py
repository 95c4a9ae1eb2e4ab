"""Tables of single calls: p2p beside JAX's own path, CPU steps, collective."""

import performance_tables

from jax_ep._cli.bench import measure, report

COLUMNS = (
    "T per rank",
    "",
    "floor us",
    "p2p us",
    "GB/s",
    "% of peak",
    "collective us",
)
SHORT_TOKENS = 4096


def rows_of(data):
    """Returns the rows of the summary of p2p.py's record, dispatches first."""
    failures = report.failures(data)
    if failures or not data["peak_gb_s"]:
        raise SystemExit(f"the newest p2p file is unfit: {failures or 'no peak'}")
    rows = report.summary(data["results"])
    return sorted(rows, key=lambda row: (row["op"] != "dispatch", row["tokens"]))


def headline(data, table):
    """Makes the table of both ops at one size."""
    found = []
    for row in rows_of(data):
        if row["tokens"] != SHORT_TOKENS or row["routing"] != "uniform":
            continue
        p2p = row["p2p"]
        ragged = row["ragged_default_us"], row["ragged_best_us"]
        times = [f"{us / 1000:.3g} ms" for us in (p2p["us"], *ragged)]
        share = f"{100 * p2p['of_peak']:.0f}%"
        found.append((row["op"], f"**{times[0]}**", share, *times[1:]))
    sizes = (
        f"{SHORT_TOKENS} tokens per rank, hidden {data['hidden']}, {data['dtype']}, "
        f"top-{data['top_k']} of {data['experts']} experts, {data['count']} x "
        f"{data['device']}, {data['date']}"
    )
    columns = (
        sizes,
        "jax_ep",
        "of the link's speed",
        "JAX's `ragged_all_to_all`",
        "the same, called in the [fastest way that we found]"
        "(docs/benchmarks.md#ways-to-call-ragged_all_to_all)",
    )
    return table(columns, found)


def p2p(data, table, picture=None):
    """Shows whole calls beside JAX's own path, with a `picture` if there is one."""
    rows = [row for row in rows_of(data) if row["routing"] == "uniform"]
    ways = report.ragged_ways(data["results"])
    head = (
        f"**Single calls over p2p, {data['count']} x {data['device']}** "
        f"({performance_tables.versions(data)}"
        f"{data['date']}, commit "
        f"{data['commit'][:12]}, seed {data['seed']}; "
        f"{performance_tables.shown(data['command'])}). Hidden "
        f"{data['hidden']}, {data['dtype']}, top-{data['top_k']} of {data['experts']} "
        "experts, distinct random ids. `floor` is the time that the busiest rank's "
        f"bytes need at {report.number(data['peak_gb_s'], 0)} GB/s, the speed of a "
        "plain copy kernel in the same run; GB/s and % count those bytes. `ragged` is "
        "JAX's own path, called in [the ways that the columns "
        "name](#ways-to-call-ragged_all_to_all), and `speed-up` is "
        "p2p's over the fastest of them. Blank cells were not measured. Every result "
        "was compared with transport `collective`'s in the same run, bit for bit (sums "
        "of `ragged` within rounding). "
        "[How calls are timed](#how-calls-are-timed)."
    )
    parts = [head]
    if picture:
        parts.append(
            "![Microseconds and GB/s of dispatch and combine against tokens per rank]"
            f"({picture})"
        )
    columns = [*COLUMNS, *(f"ragged, {way} us" for way in ways), "speed-up"]
    cells = [performance_tables.p2p_row(row, ways) for row in rows]
    return "\n\n".join([*parts, table(columns, cells)])


def ragged_ways():
    """Explains the columns of JAX's own path."""
    lines = []
    for flags, measured in measure.RAGGED:
        named = " and ".join(f"`{flag}`" for flag in flags.split())
        with_flags = named or "XLA's default flags"
        for updates, label in measured:
            lines.append(f"* `{label}`: an update per {updates} with {with_flags}.")
    return "\n".join(lines)


def p2p_others(data, table):
    """Shows calls of the same record with skewed routing, and with all defaults."""
    parts = []
    rows = [row for row in rows_of(data) if row["routing"] == "zipf"]
    if rows:
        parts.append(
            f"**Skewed routing** ({performance_tables.source(data, data['command'])}): "
            "with all experts in a random order, the popularity of each is 1 / its "
            "position. `recv_capacity` is what the fullest rank needs."
        )
        parts.append(table(COLUMNS, map(performance_tables.p2p_row, rows)))
    for row in data["results"]:
        if row["transport"] == "p2p" and row["zero_tail"]:
            parts.append(
                "With the defaults, which are room for the worst case of "
                f"{row['recv_capacity']} rows and a cleared tail, a {row['op']} of T = "
                f"{row['tokens']} takes {row['us']:.0f} us."
            )
    return "\n\n".join(parts)


def cpu(data, table):
    """Shows how long each step of a call takes on one core."""
    rows = [
        (
            r["tokens"],
            f"`{r['step']}`",
            f"{r['step_us']:.0f}",
            f"{r['gb_per_s']:.1f}",
            f"{r['memcpy_us']:.0f}",
            f"{r['ratio']:.2f}",
        )
        for r in data["results"]
    ]
    head = (
        f"**CPU steps, one core** ({data['machine']}, {data['date']}, commit "
        f"{data['commit'][:12]}; `benchmarks/calls/cpu_steps.py`): hidden "
        f"{data['hidden']}, bfloat16, top-{data['top_k']} of {data['experts']}, "
        f"{data['ranks']} ranks. "
        "Bytes are those of the payload rows read and written; `memcpy` moves as many "
        "bytes in one piece, in the same run. Pack and unpack copy rows. The combine "
        "steps also add rows up, and `pack` in a format quantises them."
    )
    columns = ("T", "step", "us", "GB/s", "`memcpy` us", "of `memcpy`'s speed")
    return head + "\n\n" + table(columns, rows)
