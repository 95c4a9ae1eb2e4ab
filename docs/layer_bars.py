"""Draws the bar chart of whole layers for README.md, from a record of layer.py.

Like the diagrams it is plain SVG with a light background of its own. The bars of a pass
share a scale.
"""

from __future__ import annotations

from html import escape

from diagrams import PAD, picture

from benchmarks.layers import report

PICTURE = "layers.svg"  # in docs/
BAR, GAP, TITLE, LABEL, BARS, NUMBER = 20, 6, 30, 250, 420, 80
# (key in a row of report.summary, its label, its colour); JAX's own ways come first.
WAYS = (
    ("dense", "JAX: dense all_to_all, with drops", "#c9a27a"),
    ("ragged", "JAX: ragged_all_to_all, our experts", "#e08a2e"),
    ("p2p", "jax_ep, bfloat16", "#2a6fb0"),
    ("p2p_fp8_experts", "jax_ep, experts in fp8", "#2e8b57"),
)
SHOWN = {"forward": "forward", "both": "forward and backward"}


def svg(data) -> str:
    """Draws both passes of the record's first size, one below the other."""
    case = next(iter(data["cases"]))
    found = _passes(data)
    width = 2 * PAD + LABEL + BARS + NUMBER
    parts, y = [], PAD
    for each in found:
        bars = [(text, each[key], fill) for key, text, fill in WAYS if each[key]]
        most = max(row["ms"] for _, row, _ in bars)
        title = (
            f"Layer of {report.sizes(data, case)}, {SHOWN[each['pass']]}: "
            "milliseconds, less is better"
        )
        parts.append(f'<text class="name" x="{PAD}" y="{y + 15}">{title}</text>')
        y += TITLE
        for text, row, fill in bars:
            length = round(BARS * row["ms"] / most, 1)
            middle = f'y="{y + BAR - 5}"'
            parts += [
                f'<text x="{PAD}" {middle}>{escape(text)}</text>',
                f'<rect x="{PAD + LABEL}" y="{y}" width="{length}" height="{BAR}" '
                f'rx="3" fill="{fill}"/>',
                f'<text x="{PAD + LABEL + length + 8}" {middle}>{row["ms"]:.1f}</text>',
            ]
            y += BAR + GAP
        y += GAP
    height = y + PAD - 2 * GAP
    return picture(width, height, parts)


def caption(data) -> str:
    """Describes the picture in words, for those who do not see it."""
    case, told = next(iter(data["cases"])), []
    for each in _passes(data):
        times = [
            f"{text} {each[key]['ms']:.1f} ms" for key, text, _ in WAYS if each[key]
        ]
        told.append(f"{SHOWN[each['pass']]}: {', '.join(times)}")
    return f"A layer of {report.sizes(data, case)}, {'; '.join(told)}"


def _passes(data):
    """Returns the summary's rows of the first size."""
    case = next(iter(data["cases"]))
    return [each for each in report.summary(data) if each["case"] == case]
