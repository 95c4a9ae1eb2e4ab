"""Draws the time of experts over their rows, from a record of decode.py.

Like the diagrams it is plain SVG with a light background of its own. Both axes are
logarithmic.
"""

from __future__ import annotations

import math

from diagrams import PAD, picture

PICTURE = "rows.svg"  # in docs/
WIDTH, HEIGHT, LEFT, BELOW, KEY = 560, 320, 60, 44, 250
# (way, its label, its colour)
WAYS = (
    ("bf16", "bfloat16", "#2a6fb0"),
    ("fp8", "fp8_block128, rows as codes", "#2e8b57"),
    ("mxfp4", "mxfp4", "#c9a27a"),
    ("mxfp4-fp8", "mxfp4, rows as codes", "#e08a2e"),
)


def points(data) -> dict[str, list[tuple[float, float]]]:
    """Returns (rows per expert that is hit, microseconds) by way."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in data["results"]:
        if row["part"] == "experts" and "us" in row:
            place = row["rows"] / row["hit"], row["us"]
            found.setdefault(row["way"], []).append(place)
    return found


def svg(data) -> str:
    """Draws a line for each way."""
    found = points(data)
    shown = [place for way, *_ in WAYS for place in found.get(way, [])]
    xs, ys = ([math.log2(each[i]) for each in shown] for i in (0, 1))
    first, last = math.floor(min(xs)), math.ceil(max(xs))
    low, high = math.floor(min(ys)), math.ceil(max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - first) / (last - first)
        up = (math.log2(y) - low) / (high - low)
        return PAD + LEFT + WIDTH * across, PAD + HEIGHT * (1 - up)

    parts = []
    for power in range(first, last + 1, 2):
        x, y = at(2**power, 2**low)
        parts += [
            f'<path d="M{x:.1f} {PAD}V{y:.1f}" stroke="#e4e4e4"/>',
            f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">'
            f"{2**power}</text>",
        ]
    for power in range(low, high + 1, 2):
        x, y = at(2**first, 2**power)
        label = f'x="{x - 8:.1f}" y="{y + 5:.1f}" text-anchor="end"'
        parts += [
            f'<path d="M{x:.1f} {y:.1f}H{PAD + LEFT + WIDTH}" stroke="#e4e4e4"/>',
            f"<text {label}>{2**power}</text>",
        ]
    bottom = PAD + HEIGHT
    parts.append(
        f'<text x="{PAD + LEFT + WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">'
        "rows per expert; microseconds</text>"
    )
    for index, (way, label, colour) in enumerate(WAYS):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in found[way]))
        x, y = PAD + LEFT + WIDTH + 24, PAD + 16 + 26 * index
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" '
            'stroke-width="2.5"/>',
            f'<path d="M{x} {y - 5}h24" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{x + 34}" y="{y}">{label}</text>',
        ]
    width, height = 2 * PAD + LEFT + WIDTH + KEY, 2 * PAD + HEIGHT + BELOW
    return picture(width, height, parts)
