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
    return "\n\n".join(part(newest(prefix)) for prefix, part in PARTS if newest(prefix))


def cpu_part(data):
    rows = [
        (
            r["tokens"],
            r["step"],
            f"{r['microseconds']:.0f}",
            f"{r['gigabytes_per_s']:.2f}",
            f"{r['ratio_to_memcpy']:.2f}",
        )
        for r in data["results"]
    ]
    head = (
        f"CPU steps on one core ({data['cpu']}, {data['date']}, commit "
        f"{data['commit'][:12]}): H 7168, bfloat16, top-8 of 256, 4 ranks; payload "
        "bytes read and written, against one `memcpy` of as many in the same run."
    )
    return head + "\n\n" + table(("T", "step", "us", "GB/s", "of memcpy"), rows)


PARTS = (("cpu", cpu_part),)


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
