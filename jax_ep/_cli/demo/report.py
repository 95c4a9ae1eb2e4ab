"""The demo's output on stdout."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence

import jax
import numpy as np

import jax_ep
from jax_ep._cli.demo import check, devices, model
from jax_ep._cli.demo.check import Check
from jax_ep._cli.demo.corpus import Corpus
from jax_ep._cli.demo.model import Sizes
from jax_ep._cli.demo.train import Metrics
from jax_ep._cli.text import entry, fill, width

_TABLE_HEAD = " step    loss  held out  dropped rows  busiest expert"
_NARROW_HEAD = " step   loss held out dropped busiest"
_LAST_PART = 10  # final statistics cover the last 1/10 of the steps


@dataclasses.dataclass
class History:
    """A training run so far.

    Attributes:
        metrics: metrics of every step.
        held_out: pairs of (steps done, loss on held-out text).
        seconds: time in training steps only.
    """

    metrics: list[Metrics] = dataclasses.field(default_factory=list)
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def expert_counts(self) -> np.ndarray:
        """Returns rows sent to experts, `[steps, layers, experts]`."""
        return np.stack([step.stats.expert_counts for step in self.metrics])

    def dropped(self) -> np.ndarray:
        """Returns the dropped rows of each step."""
        return np.array([step.stats.num_dropped.sum() for step in self.metrics])


def set_up(
    ep: jax_ep.EPHandle,
    sizes: Sizes,
    params: model.Params,
    text: Corpus,
    remark: str | None,
) -> None:
    """Prints versions, devices, text and sizes."""
    used = list(ep.mesh.devices.flat)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    tokens = sizes.sequences * sizes.length
    lines = {
        "jax-ep demo": f"jax_ep {jax_ep.__version__}, jax {jax.__version__}, "
        f"Python {platform.python_version()}",
        "devices": devices.describe(used) + (f" ({remark})" if remark else ""),
        "transport": ep.transport,
        "text": f"{text.files} files of {text.root}: {text.train.size / 1e6:.1f} MB to "
        f"learn, {text.held_out.size / 1e6:.1f} MB held out",
        "model": f"{count / 1e6:.2f} M parameters, {sizes.blocks} blocks, top "
        f"{sizes.top_k} of {sizes.experts} experts, {ep.local_experts} per device",
        "batch": f"{tokens} bytes; {tokens // len(used)} per device, whose experts "
        f"take {ep.recv_capacity} rows (capacity factor {sizes.capacity_factor:g})",
    }
    for name, line in lines.items():
        print("\n".join(entry(name, line)), flush=True)


def _narrow() -> bool:
    return width() < len(_TABLE_HEAD)


def table_head() -> str:
    """Returns the heading for the lines of `table_line`."""
    return _NARROW_HEAD if _narrow() else _TABLE_HEAD


def table_line(step: int, metrics: Metrics, held_out: float) -> str:
    """Returns the table's line about one step."""
    counts = np.asarray(metrics.stats.expert_counts)
    dropped = metrics.stats.num_dropped.sum() / counts.sum()
    if _narrow():
        return (
            f"{step:5d} {metrics.loss:6.3f}    {held_out:5.3f} {dropped:7.2%} "
            f"{_imbalance(counts):5.2f} x"
        )
    return (
        f"{step:5d}   {metrics.loss:5.3f}     {held_out:5.3f}        {dropped:6.2%}"
        f"   {_imbalance(counts):4.2f} x mean"
    )


def check_lines(result: Check) -> str:
    """Returns the outcome of the check as text."""
    outcome = "passed" if result.passed else "FAILED"
    head = (
        f"check: {outcome}: first {result.steps} losses against the dense model on one "
        "device, without jax_ep:"
    )
    found = (
        f"largest difference {result.loss_difference:.1e} (tolerance "
        f"{check.LOSS_TOLERANCE:.0e});",
        "largest relative difference of a gradient's norm "
        f"{result.norm_difference:.1e} (tolerance {check.NORM_TOLERANCE:.0e});",
        f"rows dropped for capacity {result.dropped:,}, in the dense model "
        f"{result.dense_dropped:,}",
    )
    lines = fill(head, rest=" " * 7)
    return "\n".join(lines + [line for text in found for line in fill(text, " " * 7)])


def result(history: History, sizes: Sizes) -> None:
    """Prints the loss, speed, drops and tokens per expert of a whole run."""
    counts, dropped = history.expert_counts(), history.dropped()
    losses = [float(step.loss) for step in history.metrics]
    last = -(-len(losses) // _LAST_PART)
    tokens = len(losses) * sizes.sequences * sizes.length
    rows = counts.sum(axis=(1, 2))
    steps = f"the last {last} steps" if last > 1 else "the last step"
    lines = entry(
        "loss",
        f"{losses[0]:.3f} -> {np.mean(losses[-last:]):.3f} nats per byte (mean of "
        f"{steps}); held out {history.held_out[0][1]:.3f} -> "
        f"{history.held_out[-1][1]:.3f}",
    )
    lines += entry(
        "speed",
        f"{tokens / history.seconds:,.0f} tokens per second ({tokens:,} bytes in "
        f"{history.seconds:.1f} s)",
    )
    lines += entry(
        "dropped",
        f"{dropped.sum():,} of {rows.sum():,} rows ({dropped.sum() / rows.sum():.2%}); "
        f"in {steps} {dropped[-last:].sum():,} "
        f"({dropped[-last:].sum() / rows[-last:].sum():.2%})",
    )
    lines += fill(f"tokens per expert and step, mean of {steps}:", rest="  ")
    for layer, mean in enumerate(counts[-last:].mean(axis=0)):
        lines += fill(
            f"least {mean.min():.0f}, mean {mean.mean():.0f}, most {mean.max():.0f} "
            f"({_imbalance(mean):.2f} x mean): {_row(mean)}",
            f"  layer {layer}   ",
        )
    print("", *lines, sep="\n")


def _row(values: Sequence[float] | np.ndarray) -> str:
    return " ".join(f"{value:.0f}" for value in values)


def _imbalance(counts: np.ndarray) -> float:
    """Returns the busiest expert's rows over the mean, in the worst layer."""
    return float(np.max(counts.max(axis=-1) / counts.mean(axis=-1)))
