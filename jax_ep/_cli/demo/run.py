"""The main program of `jax-ep demo`: trains, checks, reports and draws."""

from __future__ import annotations

import dataclasses
import os
import time

import jax
import numpy as np

import jax_ep
from jax_ep._cli.demo import corpus, devices, model, picture, report, train
from jax_ep._cli.demo.check import CHECKED_STEPS, Check, compare
from jax_ep._cli.demo.model import Sizes
from jax_ep._cli.demo.progress import Progress
from jax_ep._cli.demo.report import History
from jax_ep._cli.demo.train import Metrics, Trainer
from jax_ep._cli.text import entry

STEPS, QUICK_STEPS = 200, 30
_TABLE_LINES = 10
_HELD_OUT_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the command line; None means the default."""

    steps: int | None
    devices: int | None
    seed: int
    out: str
    plot: bool
    quick: bool


def run(options: Options) -> int:
    """Runs the demo; returns 0, or 1 if the check failed.

    Raises:
        devices.TooManyDevicesError: there are fewer devices than `options.devices`.
        devices.NoBackendError: JAX has no devices.
        corpus.CorpusError: there is no text to learn.
    """
    used, remark = devices.choose(options.devices)
    text = corpus.load()
    sizes = choose_sizes(len(used), quick=options.quick)
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    mesh = jax.make_mesh((len(used),), (train.AXIS,), devices=used)
    config = jax_ep.EPConfig(
        num_experts=sizes.experts,
        top_k=sizes.top_k,
        hidden_size=sizes.hidden,
        max_tokens_per_rank=sizes.sequences // len(used) * sizes.length,
        dtype="float32",
        capacity_factor=sizes.capacity_factor,
    )
    # Full float32 products even on GPUs: with TF32 the check would measure rounding.
    with (
        jax_ep.init(mesh, train.AXIS, config) as ep,
        jax.default_matmul_precision("highest"),
    ):
        params = model.init_params(sizes, options.seed)
        report.set_up(ep, sizes, params, text, remark)
        rng = np.random.default_rng(options.seed)
        batches = _batches(text.train, steps, sizes, rng)
        held_out = _batches(text.held_out, _HELD_OUT_BATCHES, sizes, rng)
        start = time.monotonic()
        dense = train.dense_trainer(ep, sizes, params, batches[0], steps)
        trainer = train.expert_parallel_trainer(ep, sizes, params, batches[0], steps)
        print(f"{'compiled':<12}in {time.monotonic() - start:.1f} s\n", flush=True)

        dense_metrics = _train_dense(dense, batches[:CHECKED_STEPS])
        history, check = _train(trainer, batches, held_out, dense_metrics)
        ep.check()
    report.result(history, sizes)
    drawn = True
    if options.plot:
        title = (
            f"jax-ep demo: {sizes.experts} experts over {devices.describe(used)}, "
            f"transport {ep.transport}"
        )
        drawn = _draw(options.out, title, history, dense_metrics)
    return 0 if check.passed and drawn else 1


def choose_sizes(ranks: int, *, quick: bool) -> Sizes:
    """Returns sizes with about 16 experts and 32 sequences, the same per rank."""
    experts = ranks * max(1, round(16 / ranks))
    sequences = ranks * max(1, round(32 / ranks))
    if quick:
        return Sizes(experts, sequences, length=32, hidden=64, expert_hidden=32)
    return Sizes(experts, sequences)


def _batches(
    text: np.ndarray, count: int, sizes: Sizes, rng: np.random.Generator
) -> list[np.ndarray]:
    return [
        corpus.sample(text, sizes.sequences, sizes.length, rng) for _ in range(count)
    ]


def _train_dense(trainer: Trainer, batches: list[np.ndarray]) -> list[Metrics]:
    metrics = []
    with Progress("dense reference, step", len(batches)) as progress:
        for text in batches:
            metrics.append(trainer.step(text))
            progress.update()
    return metrics


def _train(
    trainer: Trainer,
    batches: list[np.ndarray],
    held_out: list[np.ndarray],
    dense: list[Metrics],
) -> tuple[History, Check]:
    steps = len(batches)
    every = max(1, steps // _TABLE_LINES)
    history = History(held_out=[(0, trainer.evaluate(held_out))])
    check = None
    with Progress("training, step", steps) as progress:
        progress.say(report.table_head())
        for step, text in enumerate(batches, start=1):
            start = time.monotonic()
            metrics = trainer.step(text)
            history.seconds += time.monotonic() - start
            history.metrics.append(metrics)
            progress.update(f"loss {metrics.loss:.3f}")
            if step == steps or step % every == 0:
                history.held_out.append((step, trainer.evaluate(held_out)))
            if step in (1, steps) or step % every == 0:
                line = report.table_line(step, metrics, history.held_out[-1][1])
                progress.say(line)
            if step == len(dense):
                check = compare(history.metrics, dense)
                progress.say(report.check_lines(check))
    assert check is not None
    return history, check


def _draw(path: str, title: str, history: History, dense: list[Metrics]) -> bool:
    """Saves the picture; returns False if that fails, True without matplotlib."""
    if not picture.available():
        why = "none: matplotlib is not installed; get it with"
        print("\n".join(entry("picture", f"{why} pip install 'jax_ep[demo]'")))
        return True
    losses, dense_losses = (
        [float(step.loss) for step in run] for run in (history.metrics, dense)
    )
    counts = history.expert_counts()
    try:
        picture.save(path, title, losses, dense_losses, history.held_out, counts)
    except OSError as error:
        print("\n".join(entry("picture", f"none: {error}")))
        return False
    print("\n".join(entry("picture", os.path.abspath(path))))
    return True
