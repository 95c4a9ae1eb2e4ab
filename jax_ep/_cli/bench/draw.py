"""Draws a record: microseconds and GB/s against T, with the wire's floor.

Needs matplotlib. The picture's metadata has a digest of the record that it shows.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from jax_ep._cli.bench import report

_INK, _GRID = "#333333", "#dddddd"
_FLOOR = "#888888"
# key of a summary's row, label, colour, marker
_SERIES = (
    ("ragged_default_us", "ragged_all_to_all", "#b0472f", "v"),
    ("ragged_best_us", "ragged_all_to_all, its best", "#e08a2e", "^"),
    ("collective_us", "jax_ep collective", "#2e8b57", "s"),
    ("p2p_us", "jax_ep p2p", "#2a6fb0", "o"),
)
_ROUTINGS = {"uniform": "-", "zipf": ":"}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def mark(record: dict[str, Any]) -> str:
    """Returns the metadata of a picture of `record`: a digest of the record."""
    text = json.dumps(record, sort_keys=True)
    return f"jax_ep p2p {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _points(rows: Sequence[report.Row], key: str) -> list[tuple[Any, ...]]:
    points = []
    for row in sorted(rows, key=lambda row: row["tokens"]):
        p2p = row["p2p"]
        us = (p2p and p2p["us"]) if key == "p2p_us" else row[key]
        if us:
            points.append((row["tokens"], us, row["bytes"] / us / 1e3))
    return points


def _draw_column(axes: Any, rows: Sequence[report.Row], peak: float | None) -> None:
    """Draws the times of one operation, and below them its speeds."""
    times, speeds = axes
    # Skewed routing is shown for one transport only, the fastest of jax_ep's.
    skewed = "p2p_us" if any(row["p2p"] for row in rows) else "collective_us"
    for routing, style in _ROUTINGS.items():
        drawn = [row for row in rows if row["routing"] == routing]
        plain = routing == "uniform"
        for key, label, colour, marker in _SERIES:
            points = _points(drawn, key)
            if not points or not (plain or key == skewed):
                continue
            tokens, us, gb_s = zip(*points, strict=True)
            look = {"color": colour, "marker": marker, "ms": 5, "ls": style, "lw": 1.8}
            # The limits include all points, but a marker may extend past the axis.
            look["clip_on"] = False
            name = label if plain else f"{label}, skewed (Zipf) routing"
            times.plot(tokens, us, label=name, **look)
            speeds.plot(tokens, gb_s, **look)
        floor = _points(drawn, "floor_us") if plain else []
        if floor:
            tokens, us, _ = zip(*floor, strict=True)
            times.plot(tokens, us, color=_FLOOR, ls="--", lw=1.5, label="wire floor")
    if peak:
        speeds.axhline(peak, color=_FLOOR, ls="--", lw=1.5)
        speeds.text(
            0.01,
            peak * 0.985,
            f"peer write peak {peak:.0f}",
            transform=speeds.get_yaxis_transform(),
            color=_INK,
            fontsize=9,
            va="top",
        )


def _short(tokens: int) -> str:
    whole = tokens >= 1024 and tokens % 1024 == 0
    return f"{tokens // 1024}k" if whole else str(tokens)


def _dress(axis: Any, rows: Sequence[report.Row]) -> None:
    tokens = sorted({row["tokens"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(tokens, [_short(each) for each in tokens])
    axis.minorticks_off()
    if tokens:
        # Room for whole markers, and for a single one.
        room = max(1.15, (tokens[-1] / tokens[0]) ** 0.05)
        axis.set_xlim(tokens[0] / room, tokens[-1] * room)
    axis.set_xlabel("tokens per rank")
    axis.grid(color=_GRID, lw=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _measured(row_of_axes: Any) -> list[float]:
    lines = [line for axis in row_of_axes for line in axis.lines]
    return [
        y for line in lines if line.get_marker() != "None" for y in line.get_ydata()
    ]


def _scale_times(row_of_axes: Any) -> None:
    """Makes the scale logarithmic, fitted to the measured times but not the floor."""
    from matplotlib.ticker import LogLocator, NullLocator

    values = _measured(row_of_axes)
    first = row_of_axes[0]
    first.set_yscale("log")
    if not values:
        return
    # Over few decades, labels 2 and 5 of each decade as well.
    ratio = max(values) / min(values)
    few = ratio < 100
    first.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    first.yaxis.set_minor_locator(NullLocator())
    first.yaxis.set_major_formatter("{x:,g}")
    # Times that hardly differ must look so.
    room = max(1.1 * ratio**0.06, (4 / ratio) ** 0.5)
    first.set_ylim(min(values) / room, max(values) * room)


def _scale_speeds(row_of_axes: Any, peak: float | None) -> None:
    largest = max([*_measured(row_of_axes), peak or 0], default=0)
    row_of_axes[0].set_ylim(0, 1.08 * largest or 1)


def figure(record: dict[str, Any]) -> Any:
    """Returns the picture of a record as a matplotlib figure."""
    # Not pyplot, which changes global state and looks for a display.
    from matplotlib.figure import Figure

    rows = report.summary(record["results"])
    result = Figure(figsize=(11, 8), layout="constrained", facecolor="white")
    result.suptitle(
        f"Expert-parallel dispatch and combine on {report.machine(record)}: "
        f"hidden {record['hidden']}, {record['dtype']}, top-{record['top_k']} of "
        f"{record['experts']} experts",
        fontsize=13,
        color=_INK,
    )
    grid = result.subplots(2, 2, sharey="row", height_ratios=(1.3, 1))
    for column, op in enumerate(("dispatch", "combine")):
        drawn = [row for row in rows if row["op"] == op]
        _draw_column(grid[:, column], drawn, record["peak_gb_s"])
        grid[0, column].set_title(op, color=_INK)
        for axis in grid[:, column]:
            _dress(axis, drawn)
    _scale_times(grid[0])
    _scale_speeds(grid[1], record["peak_gb_s"])
    unit = "device" if record["device"] == "cpu" else "GPU"
    grid[0, 0].set_ylabel("microseconds per call")
    grid[1, 0].set_ylabel(f"GB/s per {unit}, sent or received")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    result.legend(
        handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=10
    )
    return result


def save(record: dict[str, Any], path: pathlib.Path) -> None:
    """Draws `record` to `path`; the same record gives the same bytes of SVG."""
    import matplotlib

    facts: dict[str, Any] = {"Description": mark(record)}
    if path.suffix == ".svg":
        facts["Date"] = None
    with matplotlib.rc_context({"svg.hashsalt": "jax_ep"}):
        figure(record).savefig(path, dpi=150, metadata=facts)
