"""Rewrites the generated parts of README.md and of docs; --check compares.

The tables of the wire, of formats and of scale.md come from the native module, the
other tables from the newest file of each kind in benchmarks/results (of a test suite:
of each transport and number of devices), and docs/p2p.svg from the one of p2p.py:
drawing it needs matplotlib, checking that it shows that file does not.
"""

import json
import pathlib
import re
import sys

from jax_ep import _native_cpu as native

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import draw
import format_errors
import layer_tables
import p2p_report
import performance_tables
import reliability_table
import scale_model
import suite_table

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
P2P_PICTURE = ROOT / "docs" / "p2p.svg"
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
OPTIONS = ROOT / "docs" / "options.md"
OVERLAP = ROOT / "docs" / "overlap.md"
RELIABILITY = ROOT / "docs" / "reliability.md"
LAYERS = ROOT / "docs" / "layers.md"
SCALE = ROOT / "docs" / "scale.md"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def layout():
    rows = native.layout_table("bf16", 7168, 2, 8, 64)
    named = [(f"`{s}`", f"`{f}`" if t else "size", t, at) for s, f, t, at in rows]
    return table(("structure", "field", "type", "offset"), named)


def token_formats():
    hidden, element_bytes = 7168, 2
    rows = []
    plain = sum(native.encoded_bytes("bf16", hidden, element_bytes))
    for entry in native.formats():
        name, scaled = entry["name"], entry["scale_dtype"]
        sizes = native.encoded_bytes(name, hidden, element_bytes)
        rows.append(
            (
                f"`{name}`",
                entry["payload_dtype"] or "the token's own",
                f"{entry['block']} x {scaled}" if scaled else "none",
                " + ".join(str(size) for size in sizes if size),
                f"{sum(sizes) / plain:.3f}",
                f"{format_errors.largest_error(name):.3f}" if scaled else "0",
            )
        )
    columns = (
        "format",
        "`tokens`",
        "block x `scales`",
        "bytes a token",
        "of bfloat16's",
        "largest error",
    )
    return table(columns, rows)


def records(prefix):
    files = RESULTS.glob(f"{prefix}-*.json")
    by_date = sorted(files, key=lambda path: (path.stem[-10:], path))
    return [json.loads(path.read_text()) for path in by_date]


def newest(prefix, count=None):
    """With `count`, of as many devices."""
    found = [data for data in records(prefix) if count in (None, data.get("count"))]
    return found[-1] if found else None


def from_newest(prefix, part):
    data = newest(prefix)
    return part(data, table) if data else "No run is recorded yet."


def targets():
    return performance_tables.targets(newest("p2p", 4), newest("formats", 4), table)


def benchmarks():
    found = [(newest(prefix), part) for prefix, part in PARTS]
    parts = [part(data) for data, part in found if data]
    parts.append(suite_table.on_gpus(records, table))
    return "\n\n".join(filter(None, parts))


def cpu_part(data):
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
        f"{data['commit'][:12]}; `benchmarks/cpu_steps.py`): hidden {data['hidden']}, "
        f"bfloat16, top-{data['top_k']} of {data['experts']}, {data['ranks']} ranks. "
        "Bytes are payload rows read and written; `memcpy` moves as many in one piece, "
        "in the same run. Pack and unpack copy; the combine steps also sum, and `pack` "
        "in a format quantises."
    )
    columns = ("T", "step", "us", "GB/s", "`memcpy` us", "of `memcpy`'s speed")
    return head + "\n\n" + table(columns, rows)


def p2p_part(data):
    failures = p2p_report.failures(data)
    if failures or not data["peak_gb_s"]:
        raise SystemExit(f"the newest p2p file is unfit: {failures or 'no peak'}")
    rows = p2p_report.summary(data["results"])
    labels = sorted({row["ragged_best"] for row in rows} - {None})
    head = (
        f"**Transport p2p, {data['count']} x {data['device']}** (jax {data['jax']}, "
        f"driver {data['driver']}, {data['date']}, commit {data['commit'][:12]}, seed "
        f"{data['seed']}; `{data['command']}`): hidden {data['hidden']}, "
        f"{data['dtype']}, top-{data['top_k']} of {data['experts']} by distinct random "
        "ids, `recv_capacity` 1.25 * T * K rounded up to 128, `zero_tail=False`, "
        "`num_sms` by default. The time of a call is that of a jitted program of many "
        "calls, each waiting for the one before, with 4 random routings in turn, from "
        "the host's start to the end on all GPUs, over its calls; median of several "
        "runs, nothing subtracted. `floor`: the bytes of the rank that sends or "
        "receives most, a row for each (token, other rank), at "
        f"{p2p_report.number(data['peak_gb_s'], 0)} GB/s, what a copy kernel writes to "
        "the peers on all GPUs at once, in the same run; GB/s and % count the same "
        "bytes. `ragged` is JAX's own path: rows sorted by expert, "
        "`jax.lax.ragged_all_to_all` of each (token, k) and grouping by expert; back, "
        "and the weighted sum (`benchmarks/ragged.py`), with XLA's default flags, with "
        "its best ones for as many updates, and the fastest of what was tried (here "
        f"{', '.join(labels)}); `speed-up` is p2p's over that; what is blank was not "
        "measured. Every table, row and sum of p2p was compared with the collective "
        "transport's in this run, bit for bit."
    )
    columns = (
        "T a rank",
        "",
        "floor us",
        "p2p us",
        "GB/s",
        "% of peak",
        "collective us",
        "ragged us",
        "best flags us",
        "its best us",
        "speed-up",
    )
    order = sorted(rows, key=lambda row: (row["op"] != "dispatch", row["tokens"]))
    tables = [
        table(
            columns,
            [
                performance_tables.p2p_row(row)
                for row in order
                if row["routing"] == "uniform"
            ],
        )
    ]
    skewed = [
        performance_tables.p2p_row(row)[:7] for row in order if row["routing"] == "zipf"
    ]
    if skewed:
        tables += [
            "Skewed routing (popularity of experts as 1 / place, `recv_capacity` what "
            "the fullest rank needs):",
            table(columns[:7], skewed),
        ]
    tables += [
        f"With the defaults, the worst case of {row['recv_capacity']} rows and a "
        f"cleared tail, {row['op']} of T = {row['tokens']} takes {row['us']:.0f} us."
        for row in data["results"]
        if row["transport"] == "p2p" and row["zero_tail"]
    ]
    picture = (
        "![Microseconds and GB/s of dispatch and combine against tokens a rank]"
        f"({P2P_PICTURE.relative_to(ROOT)})"
    )
    return "\n\n".join([head, picture, *tables])


def collective_part(data):
    rows = [
        (
            r["tokens"],
            f"{r['dispatch_us']:.0f}",
            f"{r['combine_us']:.0f}",
            f"{r['all_to_all_us']:.0f}",
        )
        for r in data["results"]
    ]
    head = (
        f"**Collective transport, {data['count']} x {data['device']}** (jax "
        f"{data['jax']}, {data['date']}, commit {data['commit'][:12]}; "
        f"`benchmarks/collective.py`): hidden {data['hidden']}, bfloat16, "
        f"top-{data['top_k']} of {data['experts']}, whole calls back to back, host "
        "clock. `all_to_all` is the exchange alone, of full slots; the rest is pack, "
        "unpack and launches."
    )
    columns = ("T a rank", "dispatch us", "combine us", "`all_to_all` us")
    return head + "\n\n" + table(columns, rows)


PARTS = (
    ("p2p", p2p_part),
    ("cpu", cpu_part),
    ("collective", collective_part),
    ("soak", reliability_table.soak_part),
)


def fill(text, name, body):
    pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)"
    filled, count = re.subn(
        pattern, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"no generated part {name!r}")
    return filled


def draw_p2p(check):
    """Draws docs/p2p.svg if it shows another file than the newest; True if so."""
    data = newest("p2p")
    shown = P2P_PICTURE.read_text() if P2P_PICTURE.exists() else ""
    if data is None or draw.mark(data) in shown:
        return False
    if not check:
        if not draw.available():
            raise SystemExit("docs/p2p.svg is stale; install matplotlib to draw it")
        draw.save(data, P2P_PICTURE)
    return True


def main():
    check = "--check" in sys.argv
    stale = [P2P_PICTURE.relative_to(ROOT)] if draw_p2p(check) else []
    for path, name, body in (
        (ROOT / "docs" / "protocol.md", "layout", layout()),
        (ROOT / "docs" / "formats.md", "formats", token_formats()),
        (README, "benchmarks", benchmarks()),
        (RELIABILITY, "promises", reliability_table.promises(records, table)),
        (RELIABILITY, "figures", reliability_table.figures(records, table)),
        (PERFORMANCE, "targets", targets()),
        (PERFORMANCE, "formats", from_newest("formats", performance_tables.formats)),
        (README, "layers", from_newest("layer", layer_tables.layers)),
        (LAYERS, "layers", from_newest("layer", layer_tables.all_layers)),
        (LAYERS, "grouped", from_newest("grouped", layer_tables.grouped)),
        (LAYERS, "train", from_newest("train", layer_tables.train)),
        (PERFORMANCE, "nodes", from_newest("nodes", performance_tables.nodes)),
        (PERFORMANCE, "sms", from_newest("kernels", performance_tables.sms)),
        (OVERLAP, "overlap", from_newest("overlap", performance_tables.overlap)),
        (OVERLAP, "graphs", from_newest("overlap", performance_tables.graphs)),
        (OVERLAP, "halves", from_newest("options", performance_tables.halves)),
        (OPTIONS, "options", from_newest("options", performance_tables.options)),
        *((SCALE, name, body) for name, body in scale_model.parts(table).items()),
    ):
        old = path.read_text()
        new = fill(old, name, body)
        if new != old:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(new)
    if stale and check:
        raise SystemExit(f"stale: {', '.join(map(str, stale))}; run docs/generate.py")


if __name__ == "__main__":
    main()
