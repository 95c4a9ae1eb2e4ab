"""Rewrites the generated parts of README.md and docs/protocol.md; --check compares.

The wire table comes from the native module, the speed table from the newest file of
each kind in benchmarks/results.
"""

import json
import pathlib
import re
import sys

from jax_ep import _native_cpu as native

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def layout():
    rows = native.layout_table("bf16", 7168, 2, 8, 64)
    named = [
        (f"`{structure}`", f"`{field}`" if kind else "size", kind, offset)
        for structure, field, kind, offset in rows
    ]
    return table(("structure", "field", "type", "offset"), named)


def newest(prefix):
    files = sorted(RESULTS.glob(f"{prefix}-*.json"))
    return json.loads(files[-1].read_text()) if files else None


def benchmarks():
    found = ((newest(prefix), part) for prefix, part in PARTS)
    return "\n\n".join(part(data) for data, part in found if data)


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
        "in the same run. Pack and unpack copy; the combine steps also sum."
    )
    columns = ("T", "step", "us", "GB/s", "`memcpy` us", "of `memcpy`'s speed")
    return head + "\n\n" + table(columns, rows)


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


def suite_part(data):
    device = data["devices"]
    skipped = sum(data["skipped"].values())
    return (
        f"**Tests on {device['count']} x {device['kind']}** (jax {device['jax']}, "
        f"{data['date']}, commit {data['commit'][:12]}; `benchmarks/record_suite.py`): "
        f"{data['passed']} passed, {len(data['failed'])} failed, {skipped} skipped."
    )


PARTS = (
    ("cpu", cpu_part),
    ("collective", collective_part),
    ("suite", suite_part),
)


def fill(text, name, body):
    pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end generated -->)"
    filled, count = re.subn(
        pattern, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL
    )
    if count != 1:
        raise SystemExit(f"no generated part {name!r}")
    return filled


def main():
    stale = []
    for path, name, body in (
        (ROOT / "docs" / "protocol.md", "layout", layout()),
        (ROOT / "README.md", "benchmarks", benchmarks()),
    ):
        old = path.read_text()
        new = fill(old, name, body)
        if new != old:
            stale.append(path.relative_to(ROOT))
            if "--check" not in sys.argv:
                path.write_text(new)
    if stale and "--check" in sys.argv:
        raise SystemExit(f"stale: {', '.join(map(str, stale))}; run docs/generate.py")


if __name__ == "__main__":
    main()
