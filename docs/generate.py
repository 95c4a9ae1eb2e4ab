"""Rewrites the generated parts of README.md and of docs; --check compares.

The tables of the wire and of formats come from the native module. The others come from
the newest file of each kind in benchmarks/results, and docs/p2p.svg from the newest
file of p2p.py. Drawing it needs matplotlib, checking that it shows the newest file does
not. diagrams.py draws the other pictures.
"""

import ast
import contextlib
import io
import json
import os
import pathlib
import re
import sys

from jax_ep import _native_cpu as native

# For `benchmarks`. It comes last, since the root's jax_ep has no compiled modules.
sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import call_tables
import diagrams
import layer_bars
import layer_tables
import matmul_tables
import performance_tables
import rows_lines

from benchmarks.calls import format_errors
from jax_ep._cli import main as command
from jax_ep._cli.bench import draw

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
P2P_PICTURE = ROOT / "docs" / "p2p.svg"
README = ROOT / "README.md"
BENCHMARKS = ROOT / "docs" / "benchmarks.md"


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
        "bytes per token",
        "of bfloat16's",
        "largest error",
    )
    return table(columns, rows)


def records(prefix):
    files = RESULTS.glob(f"{prefix}-*.json")
    by_date = sorted(files, key=lambda path: (path.stem[-10:], path))
    return [json.loads(path.read_text()) for path in by_date]


# A number of GPUs. On two, a call places more rows in its own memory than it sends over
# the link.
BOUND_BY_THE_LINK = 4


def newest(prefix, count=None):
    """Returns the newest record, or with `count` the newest of as many devices."""
    found = [data for data in records(prefix) if count in (None, data.get("count"))]
    return found[-1] if found else None


def from_newest(prefix, part, count=None):
    data = newest(prefix, count)
    return part(data, table) if data else "No run is recorded yet."


def on_the_link(part):
    return from_newest("p2p", part, BOUND_BY_THE_LINK)


def formats():
    """Shows the newest record of 4 GPUs, then that of 2."""
    counts = BOUND_BY_THE_LINK, 2
    parts = (from_newest("formats", performance_tables.formats, n) for n in counts)
    return "\n\n".join(parts)


def grouped(way, part=layer_tables.grouped):
    """Shows the newest matmuls of `jax_ep.experts` beside this way to multiply."""
    for data in reversed(records("grouped")):
        if any(row["way"] == way for row in data["results"]):
            return part(data, table)
    return "No run is recorded yet."


def targets():
    found = (newest(prefix, BOUND_BY_THE_LINK) for prefix in ("p2p", "formats"))
    return performance_tables.targets(*found, table)


def decode():
    """Shows the newest experts of a decode step on one GPU, and the newest layers."""
    layered = [
        data
        for data in records("decode")
        if any(row["part"] == "layer" for row in data["results"])
    ]
    return matmul_tables.decode(newest("decode", 1), table, layered[-1])


def benchmarks(data, table):
    """Shows single calls, with their picture."""
    return call_tables.p2p(data, table, P2P_PICTURE.name)


def two_gpus(data, table):
    shown = call_tables.p2p, call_tables.p2p_others
    return "\n\n".join(part(data, table) for part in shown)


def other_calls():
    found = [(newest(prefix, count), part) for prefix, count, part in OTHER_CALLS]
    parts = [part(data, table) for data, part in found if data]
    return "\n\n".join(parts) or "No run is recorded yet."


OTHER_CALLS = (
    ("p2p", BOUND_BY_THE_LINK, call_tables.p2p_others),
    ("cpu", None, call_tables.cpu),
)


def command_line():
    """Shows the help of `jax-ep` and of its subcommands, as indented code."""
    os.environ["COLUMNS"] = "96"
    parts = []
    for words in ([], ["demo"], ["doctor"], ["bench"]):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            command.main([*words, "--help"])
        lines = (f"    {line}".rstrip() for line in shown.getvalue().splitlines())
        parts += [f"## {' '.join(['jax-ep', *words])}", "\n".join(lines)]
    return "\n\n".join(parts)


def examples():
    """Lists the programs by the first sentence of their docstrings."""
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text()))
        if "__main__" in path.read_text():
            rows.append((f"`{path.name}`", text.splitlines()[0]))
    return table(("file", "what it does"), rows)


def fill(text, name, body):
    pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)"
    filled, count = re.subn(
        pattern, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"no generated part {name!r}")
    return filled


def draw_p2p(check):
    """Draws docs/p2p.svg if it does not show the newest file; True if it did not."""
    data = newest("p2p", BOUND_BY_THE_LINK)
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
        (ROOT / "docs" / "command_line.md", "command line", command_line()),
        (ROOT / "docs" / "examples.md", "examples", examples()),
        (README, "headline", on_the_link(call_tables.headline)),
        (BENCHMARKS, "calls", on_the_link(benchmarks)),
        (BENCHMARKS, "two_gpus", from_newest("p2p", two_gpus, 2)),
        (BENCHMARKS, "ragged_ways", call_tables.ragged_ways()),
        (BENCHMARKS, "targets", targets()),
        (BENCHMARKS, "others", other_calls()),
        (BENCHMARKS, "formats", formats()),
        (BENCHMARKS, "codes", from_newest("codes", performance_tables.formats)),
        (BENCHMARKS, "host", from_newest("host", performance_tables.host)),
        (README, "layers", from_newest("layer", layer_tables.layers_in_short)),
        (BENCHMARKS, "layers", from_newest("layer", layer_tables.all_layers)),
        (BENCHMARKS, "portable", grouped("portable")),
        (BENCHMARKS, "grouped", grouped("jax_fusion")),
        (BENCHMARKS, "fp8 wgrad", grouped("fp8_wgrad", layer_tables.fp8_wgrad)),
        (
            BENCHMARKS,
            "layer options",
            from_newest("moe-options", layer_tables.options, 1),
        ),
        (BENCHMARKS, "chunks", from_newest("moe-options", layer_tables.options, 2)),
        (BENCHMARKS, "matmuls", from_newest("matmuls", matmul_tables.kernels)),
        (BENCHMARKS, "routers", from_newest("routers", layer_tables.routers)),
        (BENCHMARKS, "decode", decode()),
        (BENCHMARKS, "few rows", from_newest("few-rows", matmul_tables.few_rows)),
        (BENCHMARKS, "train", from_newest("train", layer_tables.train)),
        (BENCHMARKS, "nodes", from_newest("nodes", performance_tables.nodes)),
        (BENCHMARKS, "sms", from_newest("kernels", performance_tables.sms)),
        (
            BENCHMARKS,
            "calls_by_sms",
            from_newest("sms", performance_tables.calls_by_sms),
        ),
        (BENCHMARKS, "overlap", from_newest("overlap", performance_tables.overlap)),
        (BENCHMARKS, "graphs", from_newest("overlap", performance_tables.graphs)),
        (BENCHMARKS, "halves", from_newest("options", performance_tables.halves)),
        (BENCHMARKS, "options", from_newest("options", performance_tables.options)),
    ):
        old = path.read_text()
        new = fill(old, name, body)
        if new != old:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(new)
    pictures = {name: each.svg() for name, each in diagrams.DIAGRAMS.items()}
    if layers := newest("layer"):
        pictures[layer_bars.PICTURE] = layer_bars.svg(layers)
    if few := newest("decode", 1):
        pictures[rows_lines.PICTURE] = rows_lines.svg(few)
    for name, picture in pictures.items():
        path = ROOT / "docs" / name
        if not path.exists() or path.read_text() != picture:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(picture)
    if stale and check:
        raise SystemExit(f"stale: {', '.join(map(str, stale))}; run docs/generate.py")


if __name__ == "__main__":
    main()
