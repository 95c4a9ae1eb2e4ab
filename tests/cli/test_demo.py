"""jax-ep demo: a quick run including its picture, its check, its usage errors."""

from __future__ import annotations

import functools
import io
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep._cli import main
from jax_ep._cli.bench import command as bench
from jax_ep._cli.demo import (
    check,
    corpus,
    dense,
    devices,
    moe,
    picture,
    progress,
    report,
    run,
    train,
)
from jax_ep._cli.demo.train import Metrics
from jax_ep._cli.doctor import command as _cli_doctor
from jax_ep._native import ffi
from support.launch import run_to_end

QUICK = ("-m", "jax_ep._cli.main", "demo", "--quick")
# What the demo must choose for itself.
OWN_CHOICE = {"JAX_NUM_CPU_DEVICES", "NPROC", "XLA_FLAGS"}


def python(folder: pathlib.Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in OWN_CHOICE}
    return run_to_end([sys.executable, *args], cwd=folder, env=env)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_quick_run_learns_passes_and_draws(tmp_path):
    done = python(tmp_path, *QUICK, "--out", "loss.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check: passed: first 20 losses" in done.stdout
    table = re.findall(r"^ +(\d+) +(\d\.\d+) +(\d\.\d+) +[\d.]+% ", done.stdout, re.M)
    assert (table[0][0], table[-1][0]) == ("1", str(run.QUICK_STEPS))
    for column in (1, 2):  # losses of training and of held-out text
        losses = [float(row[column]) for row in table]
        assert losses[0] == pytest.approx(np.log(256), abs=0.1)
        assert losses[-1] < losses[0] - 1
    assert len(re.findall(r"^  layer \d .*x mean", done.stdout, re.M)) == 2
    assert "tokens per second" in done.stdout
    assert "training, step 30/30" in done.stderr
    drawn = tmp_path / "loss.png"
    assert drawn.exists() == picture.available()
    if picture.available():
        assert drawn.read_bytes().startswith(b"\x89PNG")
        assert str(drawn) in done.stdout
    else:
        assert "pip install 'jax_ep[demo]'" in done.stdout


@pytest.mark.slow
@pytest.mark.multiprocess
def test_check_fails_when_a_gradient_is_wrong(tmp_path):
    program = """
import sys
import jax
from jax_ep._cli import main
from jax_ep._cli.bench import command as bench
from jax_ep._cli.demo import dense, moe
right = moe.experts
def wrong(rows, params, group_sizes):
    doubled = {k: 2 * v - jax.lax.stop_gradient(v) for k, v in params.items()}
    return right(rows, doubled, group_sizes)
moe.experts = wrong
sys.exit(main.main(["demo", "--quick", "--no-plot", "--steps", "2"]))
"""
    done = python(tmp_path, "-c", program)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "check: FAILED: first 2 losses" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.multiprocess
def test_more_devices_than_there_are_is_a_usage_error(tmp_path):
    done = python(tmp_path, *QUICK, "--devices", "4096")
    assert done.returncode == 2
    assert "--devices must be at most" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("dance",),
        ("demo", "--steps", "0"),
        ("demo", "--steps", "many"),
        ("demo", "--devices", "0"),
        ("demo", "--seed", "-1"),
        ("demo", "--out", "loss.txt"),
        ("demo", "--out", "no/such/folder/loss.png"),
    ],
)
def test_usage_errors(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(args)
    assert stop.value.code == 2
    assert "usage: jax-ep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ("--version",),
        ("--help",),
        (),
        ("demo", "--help"),
        ("doctor", "--help"),
        ("bench", "--help"),
    ],
)
def test_help_and_version(args, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(args)
    assert stop.value.code == 0
    assert "jax-ep" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["demo", "doctor", "bench"])
def test_examples_of_the_help_are_understood(command, monkeypatch, capsys):
    seen = []
    for module, name in ((main, "_demo"), (_cli_doctor, "_run"), (bench, "_run")):
        monkeypatch.setattr(module, name, lambda args, _: seen.append(args) or 0)
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    said = capsys.readouterr().out
    examples = re.findall(r"^  .*?jax-ep ([^|]*?)(?:  .*|\|.*)?$", said, re.MULTILINE)
    assert len(examples) >= 4
    for words in examples:
        assert words.split()[0] == command
        assert main.main(words.split()) == 0
    assert len(seen) == len(examples)


def steps(losses, norms):
    stats = moe.LayerStats(np.zeros((2, 4), np.int32), np.ones((2, 1), np.int32))
    return [
        Metrics(np.float32(loss), np.array([7, norm], np.float32), stats)
        for loss, norm in zip(losses, norms, strict=True)
    ]


@pytest.mark.parametrize(
    ("losses", "norms", "passed"),
    [
        ((5.5, 5.0), (1.0, 0.5), True),
        ((5.5, 5.0005), (1.0, 0.501), True),
        ((5.5, 5.002), (1.0, 0.5), False),
        ((5.5, 5.0), (1.0, 0.52), False),
        ((5.5, np.nan), (1.0, 0.5), False),
        ((5.5, 5.0), (np.nan, 0.5), False),
    ],
)
def test_compare(losses, norms, passed):
    expected = steps((5.5, 5.0), (1.0, 0.5))
    result = check.compare(steps(losses, norms), expected)
    assert result.passed is passed
    assert (result.steps, result.dropped, result.dense_dropped) == (2, 4, 4)


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_report_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    metrics = steps((5.5, 5.0), (1.0, 0.5))
    for step in metrics:
        step.stats.expert_counts[:] = 1000
    history = report.History(metrics, held_out=[(0, 5.6), (2, 5.1)], seconds=1.0)
    print(report.table_head())
    print(report.table_line(2, metrics[1], 5.1))
    print(report.check_lines(check.compare(metrics, metrics)))
    report.result(history, run.choose_sizes(8, quick=True))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    words = " ".join(said.split())
    assert "check: passed: first 2 losses" in words
    assert "layer 1 least 1000, mean 1000, most 1000" in words


def test_progress_on_a_narrow_terminal_shows_its_text(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def drawn(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        with progress.Progress("dense reference, step", 20, stream) as shown:
            shown.update("loss 5.5")
        return stream.getvalue().split("\x1b[2K")[-2].strip("\r")

    for columns in (40, 80):
        assert len(drawn(columns)) < columns
        assert "dense reference, step 1/20, loss 5.5" in drawn(columns)
    assert drawn(80).startswith("[#...")


@pytest.mark.parametrize("capacity", [1, 7, 20, 64])
def test_dense_drops_what_capacity_drops(capacity):
    ranks, experts, top_k, tokens = 3, 6, 2, 32
    rng = np.random.default_rng(capacity)
    ids = np.stack([rng.choice(experts, top_k, replace=False) for _ in range(tokens)])
    expected = np.zeros(ids.shape, bool)
    for rank in range(ranks):
        local = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        rows = [place for e in local for place in np.argwhere(ids == e)]
        for token, k in rows[:capacity]:
            expected[token, k] = True
    actual = dense.kept(jnp.asarray(ids, jnp.int32), experts, ranks, capacity)
    np.testing.assert_array_equal(actual, expected)


def test_corpus_is_the_same_each_time_and_held_out_apart():
    first, second = corpus.load(), corpus.load()
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.held_out, second.held_out)
    assert first.train.size + first.held_out.size <= (
        corpus.MAX_BYTES + corpus.MAX_FILE_BYTES
    )


def test_no_sources_is_an_error(tmp_path):
    (tmp_path / "alone.py").write_text("pass\n")
    with pytest.raises(corpus.CorpusError, match=r"must be under .* got 5 bytes"):
        corpus.load(tmp_path)


@pytest.mark.parametrize("ranks", range(1, devices.MAX_CPU_DEVICES + 1))
@pytest.mark.parametrize("quick", [False, True])
def test_sizes_serve_any_number_of_ranks(ranks, quick):
    sizes = run.choose_sizes(ranks, quick=quick)
    assert sizes.experts % ranks == 0
    assert sizes.sequences % ranks == 0
    assert sizes.experts >= sizes.top_k


def test_without_matplotlib_the_picture_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(picture, "available", lambda: False)
    assert run._draw("loss.png", "title", run.History(), [])
    assert "pip install 'jax_ep[demo]'" in capsys.readouterr().out


def test_gpus_that_this_build_cannot_serve_are_passed_over(monkeypatch):
    def refuse(platform):
        raise ValueError("built without a CUDA compiler")

    monkeypatch.setattr(ffi, "native_for", refuse)
    chosen, remark = devices.choose(2)
    assert [device.platform for device in chosen] == ["cpu", "cpu"]
    assert "built without a CUDA compiler" in remark


def test_no_backend_is_one_line(monkeypatch, capsys):
    """JAX_PLATFORMS=cuda without a GPU fails an assertion in JAX, without a message."""

    def devices(*_):
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main.main(["demo", "--quick", "--no-plot"]) == 1
    said = capsys.readouterr().err
    told = "jax-ep demo: JAX was told by JAX_PLATFORMS to use cuda and found no GPU; "
    assert said.startswith(told)
    assert len(said.splitlines()) == 1


def test_a_step_keeps_its_dtypes_under_x64():
    """A compiled step accepts its own results."""
    params = {"w": np.ones((3, 2), np.float32)}
    state = train.State(params, params, params, np.int32(0))

    def loss(params, text):
        return jnp.sum(params["w"] ** 2), (jnp.float32(0), jnp.zeros(1))

    with jax.enable_x64(True):
        after, _ = jax.eval_shape(
            functools.partial(train.adam_step, loss, 30), state, np.zeros(4, np.int32)
        )
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), state, after)
