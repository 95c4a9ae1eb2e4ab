"""Draws the picture of `jax_ep.stats.heat_map`; defines the colours of all pictures."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from jax_ep._stats import view as _load_view

SUFFIXES = (".png", ".pdf", ".svg")
INK, BLUE, ORANGE = "#333333", "#2a6fb0", "#d9661f"
MAP = "RdBu_r"
_IDLE = "#8c8c8c"
_WIDTH = 9.0  # inches, with _DPI pixels each
_LABEL = 2.2  # inches that the label of the colour bar needs
_DPI = 140
_MOST_TICKS = 16


def problem(path: str) -> str | None:
    """Returns what `path` fails to be for a picture, or None if it is fine."""
    if not path.lower().endswith(SUFFIXES):
        return f"a file name in one of {', '.join(SUFFIXES)}"
    try:
        folder = os.path.dirname(os.path.abspath(path))
        fits = os.access(folder, os.W_OK) and not os.path.isdir(path)
    except ValueError:  # a null character
        fits = False
    return None if fits else "a file in a folder that can be written to"


def scale() -> Any:
    """Returns the scale from multiples of the mean to colours, with white at 1."""
    from matplotlib.colors import LogNorm

    return LogNorm(1 / 4, 4)


def label_scale(bar: Any) -> None:
    """Sets ticks and label of a colour bar for `scale`."""
    bar.set_ticks([1 / 4, 1 / 2, 1, 2, 4], labels=["1/4", "1/2", "1", "2", "4"])
    bar.minorticks_off()
    bar.set_label("rows, as a multiple of the mean")


def save(view: _load_view.View, path: str | os.PathLike[str]) -> None:
    """Draws the picture and writes it, in the format of the extension of `path`."""
    figure(view).savefig(path, dpi=_DPI)


def figure(view: _load_view.View) -> Any:
    """Draws one layer as a grid of its places, or a stack with a row per layer."""
    # Not pyplot, which changes global state and looks for a display.
    from matplotlib.figure import Figure

    result = Figure(layout="constrained", facecolor="white")
    draw = _draw_layers if view.stacked else _draw_experts
    draw(result, view)
    title = "Load of " + _load_view.headline(view)
    result.suptitle(title, x=0.02, ha="left", fontsize=13, color=INK)
    return result


def grid_width(view: _load_view.View) -> int:
    """Returns the places per line: whole ranks, or an equal part of one rank."""
    wanted = max(8, 2 ** math.ceil(math.log2(2 * view.places) / 2))
    if view.local >= wanted:
        return math.ceil(view.local / math.ceil(view.local / wanted))
    most = min(wanted // view.local, view.ranks)
    even = max(n for n in range(1, most + 1) if view.ranks % n == 0)
    return view.local * (even if 2 * even >= most else most)


def _draw_experts(result: Any, view: _load_view.View) -> None:
    width = grid_width(view)
    of_rank = max(1, math.ceil(view.local / width))  # lines per rank
    lines = math.ceil(view.ranks / max(1, width // view.local)) * of_rank
    height = max(1.0, lines * min(0.8, 0.75 * _WIDTH / width))
    if view.ranks == 1:
        height = max(_LABEL, height)  # the colour bar has the same height
        result.set_size_inches(_WIDTH, 1.6 + height)
        cells, bars = result.subplots(), None
    else:
        result.set_size_inches(_WIDTH, 3.2 + height)
        cells, bars = result.subplots(2, height_ratios=(height, 1.2))

    # Cells stay blank if a rank does not fill its last line.
    grid = np.full(lines * width, np.nan)
    grid[_cells(view, width, of_rank)] = _load_view.multiples(view.rows)[0]
    grid = grid.reshape(lines, width)
    image = _image(cells, grid)
    if width <= 16:
        _write_values(cells, grid)
    _label_lines(cells, view, width, of_rank, lines)
    _part_ranks(cells, view, width, of_rank, lines)
    _title(cells, view)
    if bars is not None:
        _draw_ranks(bars, view)
    beside = [axes for axes in (cells, bars) if axes is not None]
    label_scale(result.colorbar(image, ax=beside, extend="both", pad=0.02, aspect=25))


def _cells(view: _load_view.View, width: int, of_rank: int) -> np.ndarray:
    """Returns the index of each place's cell, counted along the lines."""
    place = np.arange(view.places)
    if of_rank == 1:
        return place
    rank, own = np.divmod(place, view.local)
    return rank * of_rank * width + own


def _image(axes: Any, grid: np.ndarray, **options: Any) -> Any:
    """Draws multiples of the mean in colours, and experts without rows in grey."""
    from matplotlib.colors import ListedColormap

    at_all = np.ma.masked_where(np.isnan(grid) | (grid == 0), grid)
    image = axes.imshow(
        at_all,
        aspect="auto",
        interpolation="nearest",
        cmap=MAP,
        norm=scale(),
        **options,
    )
    idle = np.ma.masked_where(grid != 0, grid)
    axes.imshow(
        idle,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([_IDLE]),
        **options,
    )
    return image


def _write_values(axes: Any, grid: np.ndarray) -> None:
    at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for (line, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            color = INK if 0.52 < value < 1.95 else "white"
            axes.text(column, line, f"{value:.2f}", color=color, **at)


def _label_lines(
    axes: Any, view: _load_view.View, width: int, of_rank: int, lines: int
) -> None:
    """Labels each cell of a single line, or else the first cell of each line."""
    own = np.arange(0, width, _step(width))
    if lines == 1:
        axes.set(xlabel=view.cell, yticks=[])
        axes.set_xticks(own)
        return
    first = f"{view.cell}, from the first of its line"
    axes.set(xlabel=first, ylabel=f"line's first {view.cell}")
    axes.set_xticks(own, labels=[f"+{n}" for n in own])
    shown = np.arange(0, lines, _step(lines))
    rank, part = np.divmod(shown, of_rank)
    firsts = rank * (width if of_rank == 1 else view.local) + part * width
    axes.set_yticks(shown, labels=[str(n) for n in firsts])


def _part_ranks(
    axes: Any, view: _load_view.View, width: int, of_rank: int, lines: int
) -> None:
    """Draws lines between ranks, and rank numbers at the top or at the right."""
    between: dict[str, Any] = {"color": INK, "lw": 0.8}
    if view.ranks == 1 or view.local == 1:
        return
    side_by_side = max(1, width // view.local)
    for rank in range(1, side_by_side):
        axes.axvline(rank * view.local - 0.5, **between)
    firsts = np.arange(0, lines, of_rank)
    for line in firsts[1:]:
        axes.axhline(line - 0.5, **between)
    if lines == 1:
        top = axes.secondary_xaxis("top")
        ranks = np.arange(view.ranks)
        centres = (ranks + 0.5) * view.local - 0.5
        top.set_xticks(centres, labels=[f"rank {rank}" for rank in ranks])
        top.tick_params(length=0, labelsize=8)
        return
    step = _step(len(firsts))
    right = axes.secondary_yaxis("right")
    right.set_yticks(
        firsts[::step] + (of_rank - 1) / 2,
        labels=[
            _load_view.ranks(first, min(first + side_by_side, view.ranks))
            for first in range(0, view.ranks, side_by_side * step)
        ],
    )
    right.tick_params(length=0, labelsize=8)


def _draw_ranks(axes: Any, view: _load_view.View) -> None:
    mean = max(view.rank_rows[0].mean(), 1)
    rows, dropped = view.rank_rows[0] / mean, view.dropped[0] / mean
    ranks = np.arange(view.ranks)
    wide = {"width": 0.4 if view.ranks < 4 else 0.8 if view.ranks <= 64 else 1.0}
    axes.bar(ranks, rows, color=BLUE, label="arrived", **wide)
    if dropped.any():
        axes.bar(
            ranks, dropped, bottom=rows - dropped, color=ORANGE, label="dropped", **wide
        )
        axes.legend(
            frameon=False, ncols=2, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1)
        )
    axes.axhline(1, color=INK, lw=0.8, ls="--")
    axes.set(xlabel="rank", ylabel="rows / mean", xlim=(-0.6, view.ranks - 0.4))
    axes.set_xticks(ranks[:: _step(view.ranks)])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_layers(result: Any, view: _load_view.View) -> None:
    height = min(5.5, max(_LABEL, 0.4 * view.layers))
    result.set_size_inches(_WIDTH + 1, 2.0 + height)
    maps, side = result.subplots(1, 2, sharey=True, width_ratios=(5, 1))
    size = _load_view.bin_size(view, 1024)
    multiples = _load_view.multiples(view.rows)
    grid = _load_view.binned(multiples, size)
    extent = (-0.5, grid.shape[1] * size - 0.5, view.layers - 0.5, -0.5)
    image = _image(maps, grid, extent=extent)
    if view.local > 1 and view.ranks <= 64:
        for rank in range(1, view.ranks):
            maps.axvline(rank * view.local - 0.5, color=INK, lw=0.8)
        top = maps.secondary_xaxis("top")
        ranks = np.arange(0, view.ranks, _step(view.ranks))
        centres = (ranks + 0.5) * view.local - 0.5
        top.set_xticks(centres, labels=[f"rank {ranks[0]}", *map(str, ranks[1:])])
        top.tick_params(length=0, labelsize=8)
    each = f" (the busiest of each {size})" if size > 1 else ""
    maps.set(xlabel=view.cell + each, ylabel="layer")
    maps.set_xticks(range(0, view.places, _step(view.places)))
    maps.set_yticks(range(0, view.layers, _step(view.layers)))
    _title(maps, view)

    layers = np.arange(view.layers)
    marks: dict[str, Any] = {"marker": "o", "ms": 3.5, "lw": 0.8}
    side.plot(multiples.max(axis=1), layers, color=ORANGE, label=view.cell, **marks)
    if view.ranks > 1 and view.local > 1:
        by_rank = _load_view.multiples(view.rank_rows)
        side.plot(by_rank.max(axis=1), layers, color=BLUE, label="rank", **marks)
    side.axvline(1, color=INK, lw=0.8, ls="--")
    side.set(xlabel="busiest / mean", ylim=(view.layers - 0.5, -0.5))
    side.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1))
    side.grid(alpha=0.25)
    side.spines[["top", "right"]].set_visible(False)
    side.tick_params(labelleft=False)
    bar = result.colorbar(
        image, ax=side, extend="both", pad=0.05, fraction=0.2, aspect=25
    )
    label_scale(bar)


def _title(axes: Any, view: _load_view.View) -> None:
    facts = _load_view.facts(view)
    facts = [f"{fact} (grey)" if "without" in fact else fact for fact in facts]
    lines = _load_view.wrapped(facts, 100)
    axes.set_title("\n".join(lines), fontsize=9, color=INK, loc="left")


def _step(count: int) -> int:
    """Returns the distance of ticks, a power of two, so that ranks start at ticks."""
    return 2 ** math.ceil(math.log2(max(1, count / _MOST_TICKS)))
