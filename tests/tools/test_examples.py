"""The examples run in a short form and give the promised results."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import sys
import warnings

import jax
import numpy as np
import pytest

import jax_ep
from support import ROOT
from support.launch import run_to_end


def run(name, *arguments):
    environment = dict(os.environ)
    package = pathlib.Path(jax_ep.__file__).parent.parent
    # This process may hold most of the GPUs' memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if jax.default_backend() == "cpu":
        # A short form spends most of its time in the compiler.
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(package), *sys.path])
    return run_to_end(
        [sys.executable, str(ROOT / "examples" / name), *arguments], env=environment
    )


def needs_to_train():
    """Skips if an extra of the examples is not installed; does not import it."""
    for name in ("flax", "optax"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")


@pytest.mark.multiprocess
def test_training_follows_the_dense_model(tmp_path):
    needs_to_train()
    path = tmp_path / "run.json"
    words = ["--quick", "--layer", "flax", "sharded", "--json", str(path)]
    drawn = tmp_path / "run.svg"
    if importlib.util.find_spec("matplotlib"):
        words += ["--plot", str(drawn)]
    done = run("train.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    dense = np.array(record["curves"].pop("dense"))
    assert dense.shape == (12,)
    assert set(record["curves"]) == {"flax", "sharded"}
    for name, curve in record["curves"].items():
        alike = record["alike"][name]
        assert alike >= 5
        np.testing.assert_allclose(curve[:alike], dense[:alike], atol=1e-4)
        assert curve[-1] < curve[0] - 1
    assert done.stdout.count("the same curve") == 2
    assert all(0 < off < 1e-5 for off in record["norms"].values())
    assert "--plot" not in words or "<svg" in drawn.read_text()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mixtral_block", "deepseek_block"])
def test_blocks_of_models(name, monkeypatch, capsys, quick_compiles):
    """Small blocks have the dense formula's gradients; the models' own blocks trace."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module(name)
    found = module.main(["--sequence", "4"])
    off = found[0] if name == "deepseek_block" else found
    assert max(off.values()) < 1e-5, off
    assert "loss" in capsys.readouterr().out
    if name == "deepseek_block":
        loads = found[1]
        assert loads[-1] < loads[0]
    for size in set(module.SIZES) - {"small"}:
        config = module.SIZES[size]
        mesh = module.make_mesh(config)
        params = jax.eval_shape(
            lambda key, config=config: module.init(config, key), jax.random.key(0)
        )
        x = jax.ShapeDtypeStruct((mesh.size, 4, config.hidden_size), config.dtype)
        operands = [params, x]
        if name == "deepseek_block":
            experts = config.n_routed_experts
            operands.insert(1, jax.ShapeDtypeStruct((experts,), "float32"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about the worst case's size
            made = jax.eval_shape(
                functools.partial(module.block, config, mesh), *operands
            )
        y = made[0] if name == "deepseek_block" else made
        assert (y.shape, y.dtype) == (x.shape, x.dtype)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_rebalancing(tmp_path):
    """Each rebalancing evens out the ranks; losses are the same as without copies."""
    words = ["--steps", "3"]
    if importlib.util.find_spec("matplotlib"):
        words += ["--plot", str(tmp_path / "maps")]
    done = run("rebalance.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(
        r"steps to (\d+): loss (.*), without copies (.*); busiest rank (.*) x the "
        r"mean, without copies (.*) x",
        done.stdout,
    )
    assert [int(line[0]) for line in lines] == [3, 6, 9, 12]
    found = np.array(lines, float)
    np.testing.assert_allclose(found[:, 1], found[:, 2], rtol=1e-5)
    before, after = found[::2, 3:], found[1::2, 3:]
    if jax.device_count() > 2:
        assert before.min() > 1.5
    assert after[:, 0].max() < 1.25
    assert done.stdout.count(" places of ") == 4
    if "--plot" in words:
        maps = sorted(path.name for path in (tmp_path / "maps").iterdir())
        assert maps == ["after1.png", "after2.png", "before1.png", "before2.png"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_fewer_ranks():
    """The curve continues, with the experts on two of three ranks."""
    words = ["--processes", "3", "--steps", "6", "--kill-at", "3"]
    done = run("fewer_ranks.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 2 of 3 was killed in step 3" in done.stdout
    line = r"step +(\d+) on (\d) ranks: loss (.*), (.*)"
    found = np.array(re.findall(line, done.stdout), float)
    steps, ranks, losses, want = found.T
    # Steps after the last checkpoint are repeated.
    again = np.argmax(ranks == 2)
    assert steps[again:].tolist() == [2, 3, 4, 5]
    assert steps[:again].tolist() in ([0, 1], [0, 1, 2])
    assert (ranks[:again] == 3).all()
    np.testing.assert_allclose(losses, want, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "weights", "most"),
    [
        ("nvfp4", "bf16", 12),
        ("fp8_block128", "fp8_block128", 8),
        ("bf16", "mxfp4", 20),
    ],
)
def test_decoding(name, weights, most):
    words = ("--format", name, "--weights", weights)
    done = run("decode.py", *words, "--steps", "4", "--tokens", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"us per step, \d+ tokens per second", done.stdout)) == 2
    line = r"(?m)^ *(\d+) (?:all|of them) .*?(?:: median (.*)%, at most (.*)%)?$"
    every, same, other = re.findall(line, done.stdout)
    assert int(every[0]) == int(same[0]) + int(other[0]) > 2 * int(other[0])
    assert 0 < float(same[1]) < most
    assert float(same[1]) <= float(same[2]) < 25
    assert float(same[1]) / 2 < float(every[1]) <= float(every[2])


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"norms": {"flax": 0.5}}, False),
        ({"alike": {"flax": 1}}, False),
        ({"curves": {"dense": [5.0] * 9, "flax": [5.0] * 8 + [5.1]}}, False),
    ],
)
def test_what_is_the_same_curve(changes, same, monkeypatch):
    """With all gradients doubled Adam takes the same steps, but norms show it."""
    for name in ("flax", "optax"):
        pytest.importorskip(name)
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train

    curves = {"dense": [5.0] * 9, "flax": [5.0] * 9}
    record = {"curves": curves, "alike": {"flax": 9}, "norms": {"flax": 1e-7}}
    assert train.same_curve(record | changes, "flax") is same


@pytest.mark.slow
@pytest.mark.multiprocess
def test_training_in_fp8(tmp_path):
    """fp8 ends where bfloat16 does, and each parameter's gradients are parallel."""
    needs_to_train()
    path = tmp_path / "run.json"
    done = run(
        "train_fp8.py", "--quick", "--steps", "4", "--seeds", "1", "--json", str(path)
    )
    record = json.loads(path.read_text())
    curves = record["curves"]
    assert curves["fp8"] != curves["bf16"]
    np.testing.assert_allclose(curves["fp8"], curves["bf16"], rtol=0.01)
    assert curves["fp8"][-1] < curves["fp8"][0] - 1
    (plain,), served = record["finals"]["bf16"], record["served"]
    off = {name: abs(loss / plain - 1) for name, (loss,) in served.items()}
    assert 0 < off["fp8_block128"] < 2e-3
    assert 0 < off["mxfp4"] < 2e-2
    for each in record["cosines"].values():
        assert len(each) == 11
        assert 0.98 < min(each.values()) < max(each.values()) < 1
    assert done.returncode == (abs(record["gaps"]["fp8"]) > 2.5e-3), (
        done.stdout + done.stderr
    )
