"""Trains a byte-level mixture-of-experts transformer, data and expert parallel.

    python examples/train.py                 8 virtual CPU devices, or the GPUs present
    python examples/train.py --layer sharded jax_ep.sharded in place of jax_ep.flax.MoE
    python examples/train.py --json run.json --plot run.svg
    python examples/train.py --quick

It learns the sources of Python's standard library. The same model is trained beside it
from the same initial parameters, with experts computed densely. The command prints the
loss curves, and exits 1 if they differ before any token goes to another expert. Needs
pip install 'jax_ep[flax]' optax, and matplotlib to draw. train_fp8.py trains the model
with experts in fp8 beside bfloat16.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax_ep  # before JAX starts its backend  # isort: skip

import global_arrays
import jax
import jax.numpy as jnp
import model as lm
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep.flax

# Sums are taken in another order, so at some step rounding decides a near tie in a
# router and a token goes to another expert. Before that step the losses are equal
# within rounding; from then on they are those of two different runs.
TOLERANCE = 1e-4  # relative to a loss before that step; rounding makes some 3e-6
FEWEST = 5  # steps that there must be before it
LATER = 0.05  # relative to a loss afterwards
# Relative to a gradient's norm before that step. Losses alone would not tell: Adam
# takes the same steps if all gradients are twice as large.
NORM_TOLERANCE = 1e-3
PICTURES = (".png", ".svg", ".pdf")


def read_text(limit=2_000_000):
    """Returns the sources of the standard library as uint8."""
    text = b""
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return np.frombuffer(text, np.uint8)


def batches(text, sizes, steps, seed):
    """Yields int32 `[sequences, length + 1]` from random places, one for each step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        at = rng.integers(0, text.size - sizes.length, (sizes.sequences, 1))
        yield text[at + np.arange(sizes.length + 1)].astype(np.int32)


def make_mesh(devices):
    """Makes a mesh of data x expert parallel, with data split in two if possible."""
    dp = 2 if len(devices) % 2 == 0 and len(devices) > 2 else 1
    return jax.make_mesh(
        (dp, len(devices) // dp), ("dp", "ep"), (AxisType.Auto,) * 2, devices=devices
    )


def make_model(sizes, mesh, layer, seed):
    """Makes the model on `mesh`, or on one device if the layer is "dense"."""
    if layer == "dense":
        make_moe = functools.partial(lm.DenseMoE, sizes)
    else:
        kinds = {"flax": jax_ep.flax.MoE, "sharded": global_arrays.ShardedMoE}
        options = {
            "mesh": mesh,
            "axis_name": "ep",
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.inner,
            "num_experts": sizes.experts,
            "top_k": sizes.top_k,
            "max_tokens_per_rank": sizes.sequences * sizes.length // mesh.size,
            "dtype": "float32",
        }

        def make_moe(rngs):
            return kinds[layer](**options, rngs=rngs)

    return lm.Model(sizes, make_moe, nnx.Rngs(seed))


def train(model, text_batches, sharding=None, load=None, rate=3e-3):
    """Trains; returns nats per byte, experts' shares and gradients' norms of each step.

    Also returns the first layer's load.
    """
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, text, load):
        grad = nnx.value_and_grad(lm.loss, has_aux=True)
        (_, (nats, reports)), grads = grad(model, text)
        optimizer.update(model, grads)
        if load is not None:
            load = jax_ep.stats.update(load, reports[0])
        norms = jnp.stack([jnp.linalg.norm(g.ravel()) for g in jax.tree.leaves(grads)])
        return nats, [report.load for report in reports], norms, load

    curve, shares, norms = [], [], []
    for text in text_batches:
        text = text if sharding is None else jax.device_put(text, sharding)
        nats, share, norm, load = step(model, optimizer, text, load)
        curve.append(float(nats))
        shares.append(np.array(share))
        norms.append(np.array(norm))
    return curve, np.array(shares), np.array(norms), load


def first_other_choice(shares, others):
    """Counts the steps before the first in which shares of two runs differ."""
    differs = (shares != others).any((1, 2))
    return int(differs.argmax()) if differs.any() else len(differs)


def gaps(record, layer):
    """Returns the largest differences from the dense curve while `alike`, and after."""
    curves, alike = record["curves"], record["alike"][layer]
    apart = np.abs(np.subtract(curves[layer], curves["dense"]))
    return float(apart[:alike].max(initial=0)), float(apart[alike:].max(initial=0))


def same_curve(record, layer):
    """Whether a layer's curve is the dense one, as far as rounding allows."""
    before, after = gaps(record, layer)
    enough = record["alike"][layer] >= min(FEWEST, len(record["curves"]["dense"]))
    scaled = record["norms"][layer] <= NORM_TOLERANCE
    return bool(enough and before <= TOLERANCE and after <= LATER and scaled)


def print_curves(record):
    """Prints about a dozen steps of every curve, and the largest differences."""
    dense = record["curves"]["dense"]
    layers = [name for name in record["curves"] if name != "dense"]
    print(f"{'step':>6} {'dense':>9}" + "".join(f" {n:>9} {'gap':>9}" for n in layers))
    for step, nats in enumerate(dense):
        if step % max(1, len(dense) // 12) == 0 or step == len(dense) - 1:
            ours = [record["curves"][name][step] for name in layers]
            cells = "".join(f" {each:>9.4f} {each - nats:>9.1e}" for each in ours)
            print(f"{step + 1:>6} {nats:>9.4f}{cells}")
    for name in layers:
        before, after = gaps(record, name)
        verdict = "the same curve" if same_curve(record, name) else "WRONG"
        print(
            f"{name}: largest difference {before:.1e} in the {record['alike'][name]} "
            f"steps before a token chose another expert, {after:.1e} after; until then "
            f"no norm of a gradient is off by more than {record['norms'][name]:.1e} of "
            f"it: {verdict}"
        )


def plot(record, path):
    """Plots the curves, and below them how far each is from the dense one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    curves = record["curves"]
    steps = np.arange(1, len(curves["dense"]) + 1)
    for name, curve in curves.items():
        dense = name == "dense"
        look = {"ls": "none", "marker": "o", "ms": 3.5} if dense else {"lw": 1.3}
        above.plot(steps, curve, label=name, **look)
        if not dense:
            below.plot(steps, np.subtract(curve, curves["dense"]), label=name)
    above.set(ylabel="nats per byte")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="less dense")
    figure.suptitle(f"{record['count']} x {record['device']}, mesh {record['mesh']}")
    figure.savefig(path)


def commit():
    """Returns the commit of this file's checkout; JAX_EP_COMMIT overrides it."""
    folder = pathlib.Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    if "JAX_EP_COMMIT" in os.environ or shutil.which("git") is None:
        return os.environ.get("JAX_EP_COMMIT", "unknown")
    found = subprocess.run(  # noqa: S603  (git, with this file's folder)
        command, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--layer", nargs="+", choices=("flax", "sharded"), default=["flax"]
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small, 12 steps")
    parser.add_argument("--json", type=pathlib.Path, help="write the curves there")
    parser.add_argument("--plot", type=pathlib.Path, help="draw them there")
    args = parser.parse_args(arguments)
    # Checked now rather than after minutes of training.
    for name, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            parser.error(f"{name} must be in a folder that can be written to: {path}")
    if args.plot and args.plot.suffix not in PICTURES:
        parser.error(f"--plot must end in one of {', '.join(PICTURES)}: {args.plot}")
    if args.steps < 1:
        parser.error(f"--steps must be positive, got {args.steps}")
    return args


def main(arguments=None):
    args = parse(arguments)
    devices = jax.devices()
    sizes = lm.Sizes(experts=2 * len(devices), sequences=4 * len(devices))
    steps = args.steps
    if args.quick:
        steps = min(steps, 12)
        small = {"hidden": 32, "inner": 16, "length": 32, "blocks": 1}
        sizes = lm.Sizes(2 * len(devices), sequences=len(devices), **small)
    mesh = make_mesh(devices)
    record = {
        "kind": "train",
        "device": devices[0].device_kind,
        "count": len(devices),
        "mesh": dict(mesh.shape),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "command": f"examples/train.py --layer {' '.join(args.layer)} --steps {steps}"
        + " --quick" * args.quick,
        "sizes": dataclasses.asdict(sizes),
        "seed": args.seed,
        "alike": {},
        "norms": {},
        "curves": {},
    }
    print(f"{record['count']} x {record['device']}, mesh {record['mesh']}, {sizes}")
    text = read_text()
    make = functools.partial(batches, text, sizes, steps, args.seed)
    curves = record["curves"]
    with jax.default_matmul_precision("highest"):
        dense = make_model(sizes, mesh, "dense", args.seed)
        curves["dense"], shares, norms, _ = train(dense, make())
        for layer in dict.fromkeys(args.layer):
            model = make_model(sizes, mesh, layer, args.seed)
            spread = NamedSharding(mesh, P(mesh.axis_names))
            load = jax_ep.stats.init(model.blocks[0].moe.ep)
            curves[layer], others, found, load = train(model, make(), spread, load)
            alike = record["alike"][layer] = first_other_choice(shares, others)
            off = np.abs(found - norms)[:alike] / norms[:alike]
            record["norms"][layer] = float(off.max(initial=0))
            model.blocks[0].moe.ep.check()
            print(layer, jax_ep.stats.heat_map(load), sep=": ")
    print_curves(record)
    if args.json:
        record["commit"] = commit()
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        plot(record, args.plot)
    return 0 if all(same_curve(record, name) for name in record["alike"]) else 1


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
