"""The data of a heat map of `jax_ep.stats`, and its form as text."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np

COLUMNS = 80
_SHADES = " .:-=+*#%@"
_LINES = 32  # with more ranks than this, ranks share lines
# Characters per line: of one rank, of several ranks, of a layer.
_OWN, _SHARED, _LAYER = 32, 40, 48


@dataclasses.dataclass(frozen=True)
class View:
    """A load by place and by rank of the EP group, summed over EP groups.

    Places are experts by their global ids, unless some experts have copies.

    Attributes:
        rows: int64 `[layers, P]`, rows sent to each place.
        dropped: int64 `[layers, R]`, rows that each rank of the EP group dropped.
        invalid: int64 `[layers, R]`, invalid ids among each rank's tokens.
        stacked: whether the load is one of a stack of layers.
        replicas: number of EP groups, which all hold the same experts.
        steps: `[layers]`, steps counted.
        mean_imbalance: `[layers]`, mean over steps of the busiest expert's rows over
            the mean; NaN if unknown.
        worst_imbalance: `[layers]`, the largest of these ratios; NaN if unknown.
        fullest: most rows that were sent to a rank in one step.
        expert_rows: int64 `[layers, E]`, rows sent to each expert, if places are not
            experts, else None.
    """

    rows: np.ndarray
    dropped: np.ndarray
    invalid: np.ndarray
    stacked: bool
    replicas: int
    steps: np.ndarray
    mean_imbalance: np.ndarray
    worst_imbalance: np.ndarray
    fullest: int
    expert_rows: np.ndarray | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.rows.shape[0]

    @property
    def places(self) -> int:
        """P, number of places; E if they are experts."""
        return self.rows.shape[1]

    @property
    def cell(self) -> str:
        """The word for what a place is."""
        return "expert" if self.expert_rows is None else "place"

    @property
    def ranks(self) -> int:
        """R, ranks of one EP group."""
        return self.dropped.shape[1]

    @property
    def local(self) -> int:
        """L, places per rank."""
        return self.places // self.ranks

    @property
    def rank_rows(self) -> np.ndarray:
        """Rows sent to each rank, `[layers, R]`."""
        return self.rows.reshape(self.layers, self.ranks, -1).sum(axis=2)


def multiples(rows: np.ndarray) -> np.ndarray:
    """Divides rows `[layers, n]` by each layer's mean; 0 in layers without rows."""
    mean = rows.mean(axis=1, keepdims=True)
    return rows / np.where(mean > 0, mean, 1)


def bin_size(view: View, most: int) -> int:
    """Returns places per bin for at most `most` bins, aligned to ranks if possible."""
    least = math.ceil(view.places / most)
    for size in range(least, 2 * least + 1):
        if size % view.local == 0 or view.local % size == 0:
            return size
    return least


def binned(values: np.ndarray, size: int) -> np.ndarray:
    """Returns the maximum of each `size` places of `[layers, P]`."""
    return np.maximum.reduceat(values, range(0, values.shape[1], size), axis=1)


def headline(view: View) -> str:
    """Returns a line with the numbers of layers, experts, ranks and steps."""
    parts = [f"{_count(view.layers, 'layer')} of " if view.stacked else ""]
    parts.append(f"{_count(view.places, view.cell)}")
    if view.expert_rows is not None:
        parts.append(f" of {_count(view.expert_rows.shape[1], 'expert')}")
    parts.append(f" on {_count(view.ranks, 'rank')}")
    if view.replicas > 1:
        parts.append(f", sum of {view.replicas} EP groups")
    least, most = int(view.steps.min()), int(view.steps.max())
    steps = (
        f"{least:,} to {_count(most, 'step')}" if least < most else _count(most, "step")
    )
    return "".join(parts) + f", {steps}"


def facts(view: View) -> list[str]:
    """Returns phrases about imbalance, drops, the fullest rank and idle experts."""
    if not view.rows.any():
        found = ["no rows"]
    elif view.expert_rows is None:
        found = [_busiest(view, "expert", view.rows)]
    else:
        found = [_busiest(view, "rank", view.rank_rows)]
        found.append(_busiest(view, "expert", view.expert_rows))
    worst = view.worst_imbalance
    if not np.isnan(worst).any():
        mean = view.mean_imbalance.mean()
        found.append(f"in a step {mean:.2f} x on average, {worst.max():.2f} x at worst")
    rows, dropped = int(view.rows.sum()), int(view.dropped.sum())
    share = percent(dropped / max(rows, 1))
    lost = f"dropped {short(dropped)} of {short(rows)} rows ({share})"
    found.append(lost if dropped else "no rows dropped")
    invalid = int(view.invalid.sum())
    if invalid:
        found.append(f"{short(invalid)} invalid ids")
    found.append(f"fullest rank {_count(view.fullest, 'row')} per step")
    idle = int((view.rows == 0).sum())
    if idle and rows:
        each = " of all layers" if view.stacked else ""
        found.append(f"{_count(idle, view.cell)}{each} without rows")
    return found


def _busiest(view: View, what: str, rows: np.ndarray) -> str:
    """Returns which of `rows`, `[layers, n]`, is busiest."""
    factors = multiples(rows)
    layer, at = np.unravel_index(factors.argmax(), rows.shape)
    where = f" in layer {layer}" if view.stacked else ""
    return f"busiest {what} {at}{where}, {factors[layer, at]:.2f} x the mean"


def text(view: View) -> str:
    """Returns the heat map in at most COLUMNS columns."""
    table = _layer_lines(view) if view.stacked else _rank_lines(view)
    lines = [*wrapped([headline(view)]), *table, *wrapped(facts(view))]
    return "\n".join(lines)


def _rank_lines(view: View) -> Iterator[str]:
    """Yields lines with one rank each, or with several small ranks side by side."""
    rows, local, ranks = view.rows[0], view.local, view.ranks
    side_by_side = 1
    while ranks > _LINES and 2 * side_by_side * (local + (local > 1)) <= _SHARED:
        side_by_side *= 2
    # A rank with many experts has several lines of equal length.
    step = side_by_side * local
    if side_by_side == 1:
        step = math.ceil(local / math.ceil(local / _OWN))
    top = int(rows.max())
    yield from wrapped(
        [f"a character for each {view.cell}; blank no rows, @ {_count(top, 'row')}"]
    )
    cells = [["rank", f"{view.cell}s", "", "rows", "dropped"]]
    for first in range(0, ranks, side_by_side):
        last = min(first + side_by_side, ranks)
        for start in range(first * local, last * local, step):
            end = min(start + step, last * local)
            each = local if 1 < local < step else step
            shades = "|".join(
                _shades(rows[at : min(at + each, end)], top)
                for at in range(start, end, each)
            )
            own = [_range(first, last), short(int(view.rank_rows[0, first:last].sum()))]
            dropped = int(view.dropped[0, first:last].sum())
            own.append(short(dropped) if dropped else "")
            if start > first * local:
                own = [""] * 3
            cells.append([own[0], _range(start, end), f"|{shades}|", *own[1:]])
    if not view.dropped.any():
        cells = [row[:-1] for row in cells]
    yield from _table(cells, left=(2,))


def _layer_lines(view: View) -> Iterator[str]:
    """Yields one line per layer."""
    size = bin_size(view, _LAYER)
    values = multiples(view.rows)
    top = float(values.max())
    each = f"the busiest of {size} {view.cell}s" if size > 1 else f"each {view.cell}"
    yield from wrapped(
        [f"a character for {each}", f"blank no rows, @ {top:.2f} x the layer's mean"]
    )
    over = f" {view.cell}s 0-{view.places - 1}"
    cells = [["layer", over, f"busiest {view.cell}", "dropped"]]
    for layer, row in enumerate(binned(values, size)):
        busiest = int(values[layer].argmax())
        dropped = int(view.dropped[layer].sum())
        cells.append(
            [
                str(layer),
                f"|{_shades(row, top)}|",
                f"{busiest}, {values[layer, busiest]:.2f} x" if row.any() else "",
                short(dropped) if dropped else "",
            ]
        )
    if not view.dropped.any():
        cells = [row[:-1] for row in cells]
    yield from _table(cells, left=(1,))


def _table(cells: Sequence[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    """Yields lines of aligned columns; those in `left` are flush left, others right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield " ".join(aligned).rstrip()


def _shades(values: np.ndarray, top: float) -> str:
    """Returns one character per value; only 0 is blank."""
    most = len(_SHADES) - 1
    levels = np.ceil(values * most / (top or 1)).astype(int)
    return "".join(_SHADES[level] for level in np.clip(levels, 0, most))


def wrapped(parts: Sequence[str], columns: int = COLUMNS) -> list[str]:
    """Joins phrases to lines; breaks lines between phrases, or inside long ones."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}; {part}".removeprefix("; ")
        lines = [*lines[:-1], longer] if len(longer) <= columns else [*lines, part]
    return [piece for line in lines for piece in textwrap.wrap(line, columns)]


def ranks(first: int, end: int) -> str:
    """Returns "rank 3" or "ranks 3-5"."""
    return f"rank{'s' * (end - first > 1)} {_range(first, end)}"


def _range(start: int, end: int) -> str:
    return str(start) if end - start == 1 else f"{start}-{end - 1}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """Returns a share in percent with two digits; a small one is not rounded to 0."""
    return f"{100 * share:.2g}%" if share >= 1e-5 else "under 0.001%"


def short(number: int) -> str:
    """Formats a number in at most 7 characters: 999,999, then 1.00M."""
    if number < 1_000_000:
        return f"{number:,}"
    value = number / 1000
    for unit in "MGTPE":
        value /= 1000
        if value < 999.5:
            return f"{value:.3g}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
    return f"{value:.0f}E"
