"""The demo's picture: the loss curve with the dense points, and the expert load."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ep._stats import picture
from jax_ep._stats.picture import BLUE, INK, ORANGE

_GREEN = "#2e8b57"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def save(
    path: str,
    title: str,
    losses: Sequence[float],
    dense_losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    counts: np.ndarray,
) -> None:
    """Draws and writes the picture; steps count from 1.

    Args:
        path: file to write, with one of `jax_ep._stats.picture.SUFFIXES`.
        title: title of the whole picture.
        losses: loss of every step.
        dense_losses: losses of the first steps, computed densely.
        held_out: pairs of (steps done, loss).
        counts: rows `[steps, layers, experts]`.
    """
    # Not pyplot, which changes global state and looks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8.2), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=13, color=INK)
    layers = counts.shape[1]
    grid = figure.add_gridspec(2, layers, height_ratios=(1.15, 1))
    _draw_loss(figure.add_subplot(grid[0, :]), losses, dense_losses, held_out)
    maps = [figure.add_subplot(grid[1, layer]) for layer in range(layers)]
    _draw_load(figure, maps, counts)
    figure.savefig(path, dpi=150)


def _draw_loss(
    axes: Any,
    losses: Sequence[float],
    dense_losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
) -> None:
    steps = np.arange(1, len(losses) + 1)
    dense_steps = steps[: len(dense_losses)]
    axes.plot(steps, losses, color=BLUE, lw=1.3, label="expert-parallel, training")
    axes.plot(
        *zip(*held_out, strict=True),
        color=_GREEN,
        marker="s",
        ms=5,
        ls="none",
        clip_on=False,
        label="expert-parallel, held-out text",
    )
    dots: dict[str, Any] = {"color": ORANGE, "ls": "none", "marker": "o"}
    axes.plot(
        dense_steps,
        dense_losses,
        ms=3.5,
        label=f"dense on one device, first {len(dense_losses)} steps",
        **dots,
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, len(losses)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=9
    )
    if len(losses) < 3 * len(dense_losses):  # the points are visible without a zoom
        return
    zoom = axes.inset_axes((0.42, 0.4, 0.56, 0.52))
    zoom.plot(dense_steps, losses[: len(dense_losses)], color=BLUE, lw=1.3)
    zoom.plot(dense_steps, dense_losses, ms=5, **dots)
    zoom.set_title(f"the first {len(dense_losses)} steps", fontsize=9, color=INK)
    zoom.tick_params(labelsize=8)
    zoom.grid(alpha=0.25)
    zoom.set_xticks([step for step in (1, 5, 10, 15, 20) if step <= len(dense_losses)])


def _draw_load(figure: Any, maps: Sequence[Any], counts: np.ndarray) -> None:
    steps, layers, experts = counts.shape
    # On a logarithmic scale an expert without rows would have no colour.
    load = np.maximum(counts / counts.mean(axis=2, keepdims=True), 1e-3)
    image = None
    for layer in range(layers):
        axes = maps[layer]
        image = axes.imshow(
            load[:, layer].T,
            aspect="auto",
            interpolation="nearest",
            cmap=picture.MAP,
            norm=picture.scale(),
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )
        axes.set_title(f"expert load, layer {layer}", fontsize=11, color=INK)
        axes.set(xlabel="step", yticks=range(0, experts, max(1, experts // 8)))
    maps[0].set_ylabel("expert")
    bar = figure.colorbar(image, ax=list(maps), extend="both", pad=0.02, aspect=25)
    picture.label_scale(bar)
