"""Trains a byte-level mixture-of-experts transformer, data x expert parallel.

    python examples/train.py                 8 virtual CPU devices, or the GPUs present
    python examples/train.py --layer sharded jax_ep.sharded in place of jax_ep.flax.MoE
    python examples/train.py --quick

Learns the sources of Python's standard library. The same model, with the same first
parameters and experts computed densely, is trained beside it; the command prints both
curves and exits 1 where they part. Needs pip install 'jax_ep[flax]' optax.
"""

import argparse
import functools
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


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", choices=("flax", "sharded"), default="flax")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small, 12 steps")
    args = parser.parse_args(arguments)
    devices = jax.devices()
    sizes = lm.Sizes(experts=2 * len(devices), sequences=4 * len(devices))
    steps = args.steps
    if args.quick:
        steps = min(steps, 12)
        sizes = lm.Sizes(
            2 * len(devices), hidden=32, inner=16, sequences=len(devices), length=32
        )
    mesh = make_mesh(devices)
    print(
        f"{len(devices)} x {devices[0].device_kind}, mesh {dict(mesh.shape)}, {sizes}"
    )
    text = read_text()
    make = functools.partial(batches, text, sizes, steps, args.seed)
    with jax.default_matmul_precision("highest"):
        model = make_model(sizes, mesh, args.layer, args.seed)
        spread = NamedSharding(mesh, P(mesh.axis_names))
        load = jax_ep.stats.init(model.blocks[0].moe.ep)
        curve, load = train(model, make(), spread, load)
        model.blocks[0].moe.ep.check()
        dense, _ = train(make_model(sizes, mesh, "dense", args.seed), make())
    print(f"{'step':>6} {'expert parallel':>16} {'dense':>8} {'difference':>11}")
    for step in range(steps):
        if step % max(1, steps // 12) == 0 or step == steps - 1:
            gap = curve[step] - dense[step]
            print(
                f"{step + 1:>6} {curve[step]:>16.4f} {dense[step]:>8.4f} {gap:>11.1e}"
            )
    print(jax_ep.stats.heat_map(load))
    largest = np.abs(np.subtract(curve, dense)).max()
    same = bool(largest <= TOLERANCE)
    print(f"largest difference {largest:.1e}: {'the same curve' if same else 'WRONG'}")
    return 0 if same else 1


if __name__ == "__main__":
    # Changes the CPU platform alone.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
