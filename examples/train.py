"""Trains a byte-level mixture-of-experts transformer, data x expert parallel.

    python examples/train.py                 8 virtual CPU devices, or the GPUs present
    python examples/train.py --layer sharded jax_ep.sharded in place of jax_ep.flax.MoE
    python examples/train.py --json run.json --plot run.svg
    python examples/train.py --quick

Learns the sources of Python's standard library. The same model, with the same first
parameters and experts computed densely, is trained beside it; the command prints the
curves and exits 1 where they part. Needs pip install 'jax_ep[flax]' optax, and
matplotlib to draw.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import sys

import jax_ep  # before JAX starts its backend  # isort: skip

import global_arrays
import jax
import model as lm
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep.flax

# Sums are taken in another order; a near tie of the router then turns one token, and
# its step's loss by about 1e-4.
TOLERANCE = 2e-3
PICTURES = (".png", ".svg", ".pdf")


def read_text(limit=2_000_000):
    """The standard library's sources, as uint8."""
    text = b""
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return np.frombuffer(text, np.uint8)


def batches(text, sizes, steps, seed):
    """int32 `[sequences, length + 1]` at random places, one a step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        at = rng.integers(0, text.size - sizes.length, (sizes.sequences, 1))
        yield text[at + np.arange(sizes.length + 1)].astype(np.int32)


def make_mesh(devices):
    """data x expert parallel: two halves, where the devices have halves."""
    dp = 2 if len(devices) % 2 == 0 and len(devices) > 2 else 1
    return jax.make_mesh(
        (dp, len(devices) // dp), ("dp", "ep"), (AxisType.Auto,) * 2, devices=devices
    )


def make_model(sizes, mesh, layer, seed):
    """The model over `mesh`; with layer "dense" on one device."""
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
    """Nats a byte of each step, and the load of the first layer's experts."""
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, text, load):
        grad = nnx.value_and_grad(lm.loss, has_aux=True)
        (_, (nats, reports)), grads = grad(model, text)
        optimizer.update(model, grads)
        if load is not None:
            load = jax_ep.stats.update(load, reports[0])
        return nats, load

    curve = []
    for text in text_batches:
        text = text if sharding is None else jax.device_put(text, sharding)
        nats, load = step(model, optimizer, text, load)
        curve.append(float(nats))
    return curve, load


def largest_gap(record, layer):
    """The greatest difference of a layer's curve from the dense one."""
    curves = record["curves"]
    return float(np.abs(np.subtract(curves[layer], curves["dense"])).max())


def print_curves(record):
    """Some dozen steps of every curve, and the largest differences."""
    dense = record["curves"]["dense"]
    layers = [name for name in record["curves"] if name != "dense"]
    print(f"{'step':>6} {'dense':>9}" + "".join(f" {n:>9} {'gap':>9}" for n in layers))
    for step, nats in enumerate(dense):
        if step % max(1, len(dense) // 12) == 0 or step == len(dense) - 1:
            ours = [record["curves"][name][step] for name in layers]
            cells = "".join(f" {each:>9.4f} {each - nats:>9.1e}" for each in ours)
            print(f"{step + 1:>6} {nats:>9.4f}{cells}")
    for name in layers:
        gap = largest_gap(record, name)
        verdict = "the same curve" if gap <= TOLERANCE else "WRONG"
        print(f"{name}: largest difference {gap:.1e}: {verdict}")


def plot(record, path):
    """The curves, and below them how far each is from the dense one."""
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
    above.set(ylabel="nats a byte")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="less dense")
    figure.suptitle(f"{record['count']} x {record['device']}, mesh {record['mesh']}")
    figure.savefig(path)


def commit():
    """Of the checkout that this file lies in."""
    benchmarks = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
    sys.path.append(str(benchmarks))
    import recording

    return recording.commit()


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layer", nargs="+", choices=("flax", "sharded"), default=["flax"]
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small, 12 steps")
    parser.add_argument("--json", type=pathlib.Path, help="write the curves there")
    parser.add_argument("--plot", type=pathlib.Path, help="draw them there")
    args = parser.parse_args(arguments)
    # Before minutes of training.
    for name, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not os.access(path.absolute().parent, os.W_OK):
            parser.error(f"{name} must be in a folder that can be written to: {path}")
    if args.plot and args.plot.suffix not in PICTURES:
        parser.error(f"--plot must end in one of {', '.join(PICTURES)}: {args.plot}")
    if args.steps < 1:
        parser.error(f"--steps must be positive, got {args.steps}")
    return args


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
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
        "command": " ".join(["examples/train.py", *arguments]),
        "sizes": dataclasses.asdict(sizes),
        "seed": args.seed,
        "tolerance": TOLERANCE,
        "curves": {},
    }
    print(f"{record['count']} x {record['device']}, mesh {record['mesh']}, {sizes}")
    text = read_text()
    make = functools.partial(batches, text, sizes, steps, args.seed)
    curves = record["curves"]
    with jax.default_matmul_precision("highest"):
        dense = make_model(sizes, mesh, "dense", args.seed)
        curves["dense"], _ = train(dense, make())
        for layer in dict.fromkeys(args.layer):
            model = make_model(sizes, mesh, layer, args.seed)
            spread = NamedSharding(mesh, P(mesh.axis_names))
            load = jax_ep.stats.init(model.blocks[0].moe.ep)
            curves[layer], load = train(model, make(), spread, load)
            model.blocks[0].moe.ep.check()
            print(layer, jax_ep.stats.heat_map(load), sep=": ")
    print_curves(record)
    if args.json:
        record["commit"] = commit()
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        plot(record, args.plot)
    same = [largest_gap(record, name) <= TOLERANCE for name in curves]
    return 0 if all(same) else 1


if __name__ == "__main__":
    # Changes the CPU platform alone.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
