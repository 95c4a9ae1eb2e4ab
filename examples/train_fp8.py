"""Trains the model of train.py with experts in fp8 and in bfloat16, on the same data.

    python examples/train_fp8.py                     8 virtual CPU devices, or GPUs
    python examples/train_fp8.py --microbatches 4    gradients summed over four parts
    python examples/train_fp8.py --seeds 1 --json run.json

Weights are quantised once per step, and the codes serve every microbatch and every
rematerialised layer. The command prints the loss curves, and the cosines between the
gradients of every parameter. It exits 1 if a cosine is below 0.95, or if the final
losses, on batches that no run has seen, differ by more than 0.25%. A single pair of
runs differs by chance, some 0.5% to either side, so losses are means over several seeds
of parameters and data. --control also trains in float32, and --wgrad with gradients of
the experts' weights in fp8. The models trained in bfloat16 are then served with weights
of 8 and of 4 bits, on the same batches. Needs pip install 'jax_ep[flax]' optax.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import sys

import jax_ep  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import model as lm
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from train import batches, commit, make_mesh, read_text

import jax_ep.flax

TOLERANCE = 2.5e-3  # relative to the final loss
LEAST_COSINE = 0.95
HELD_OUT = 8  # batches that the final loss is the mean of
KINDS = {
    "bf16": {},
    "fp8": {"experts": jax_ep.experts.fp8, "dispatch_format": "fp8_block128"},
}
# Trained on request.
MORE = {
    "float32": {"dtype": "float32"},
    "fp8 wgrad": {
        "experts": functools.partial(jax_ep.experts.fp8, wgrad="fp8"),
        "dispatch_format": "fp8_block128_e8m0",
    },
}
SERVED = ("fp8_block128", "mxfp4")
# A rematerialised layer exchanges nothing twice, and keeps the results of gate and up,
# which the backward pass needs.
POLICY = jax.checkpoint_policies.save_from_both_policies(
    jax_ep.save_route,
    jax.checkpoint_policies.save_only_these_names("jax_ep_gate_up"),
)


def make_model(sizes, mesh, kind, parts, seed):
    def make_moe(rngs):
        return jax_ep.flax.MoE(
            mesh=mesh,
            axis_name="ep",
            hidden_size=sizes.hidden,
            intermediate_size=sizes.inner,
            num_experts=sizes.experts,
            top_k=sizes.top_k,
            max_tokens_per_rank=sizes.sequences * sizes.length // parts // mesh.size,
            **(KINDS | MORE)[kind],
            rngs=rngs,
        )

    return lm.Model(sizes, make_moe, nnx.Rngs(seed))


def gradients(model, parts, kind):
    """Returns (nats per byte, gradients) over `[parts, sequences, length + 1]`."""
    codes = None
    if kind.startswith("fp8"):
        # Once per step, not in each microbatch or again for the backward pass.
        codes = [block.moe.quantize_weights(backward=True) for block in model.blocks]

    def loss(model, text):
        return lm.loss(model, text, codes)

    grad = nnx.grad(nnx.remat(loss, policy=POLICY), has_aux=True)
    nats, sums = 0.0, None
    for text in parts:
        found, (more, _) = grad(model, text)
        nats = nats + more / len(parts)
        sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
    return nats, jax.tree.map(lambda each: each / len(parts), sums)


def train(model, data, kind, steps, rate=3e-3):
    """Trains with a rate that falls to zero; returns nats per byte of each step."""
    rule = optax.adam(optax.linear_schedule(rate, 0.0, steps))
    optimizer = nnx.Optimizer(model, rule, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, parts):
        nats, grads = gradients(model, parts, kind)
        optimizer.update(model, grads)
        return nats

    return [float(step(model, optimizer, parts)) for parts in data]


def final_loss(model, data):
    """Returns the mean nats per byte of some batches."""
    nats = nnx.jit(lambda model, text: lm.loss(model, text)[1][0])
    return float(np.mean([nats(model, text) for parts in data for text in parts]))


def served_loss(model, data, weights_format):
    """Returns `final_loss` with codes in place of the experts' weights."""
    serving = nnx.clone(model)
    for block in serving.blocks:
        block.moe = block.moe.quantized(weights_format)
    return final_loss(serving, data)


def cosines(one, other, parts):
    """Returns cosines between two models' gradients at the first one's parameters."""
    nnx.update(other, nnx.state(one))
    run = nnx.jit(gradients, static_argnums=2)
    pairs = zip((one, other), KINDS, strict=True)
    found = [run(model, parts, kind)[1] for model, kind in pairs]
    result = {}
    for (path, a), (_, b) in zip(
        *(jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(g)) for g in found),
        strict=True,
    ):
        a, b = (np.asarray(each, np.float64).ravel() for each in (a, b))
        product = np.linalg.norm(a) * np.linalg.norm(b)
        result[jax.tree_util.keystr(path)] = float(a @ b / product)
    return result


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--control", action="store_true", help="train in float32, too")
    parser.add_argument("--wgrad", action="store_true", help="and with wgrad in fp8")
    parser.add_argument("--quick", action="store_true", help="small, 12 steps")
    parser.add_argument("--json", type=pathlib.Path, help="write the record there")
    args = parser.parse_args(arguments)
    if min(args.steps, args.seeds) < 1 or args.microbatches not in (1, 2, 4):
        parser.error("--steps and --seeds must be positive, --microbatches 1, 2 or 4")
    return args


def main(arguments=None):
    args = parse(arguments)
    devices = jax.devices()
    sizes = lm.Sizes(
        experts=2 * len(devices), sequences=4 * len(devices), hidden=128, inner=128
    )
    steps = args.steps
    if args.quick:
        steps = min(steps, 12)
        sizes = dataclasses.replace(sizes, length=16, blocks=1)
    mesh = make_mesh(devices)
    spread = NamedSharding(mesh, P(None, mesh.axis_names))
    text = read_text()

    def data(seed, count=steps):
        for each in batches(text, sizes, count, seed):
            parts = each.reshape(args.microbatches, -1, each.shape[-1])
            yield jax.device_put(parts, spread)

    asked = {"float32": args.control, "fp8 wgrad": args.wgrad}
    kinds = [*KINDS, *(kind for kind in MORE if asked[kind])]
    seeds = range(args.seed, args.seed + args.seeds)
    finals, every = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
    served = {name: [] for name in SERVED}
    for seed in seeds:
        models = {
            kind: make_model(sizes, mesh, kind, args.microbatches, seed)
            for kind in kinds
        }
        first = next(data(seed))
        if seed == args.seed:
            at_first = cosines(models["bf16"], models["fp8"], first)
        for kind, model in models.items():
            every[kind].append(train(model, data(seed), kind, steps))
            finals[kind].append(final_loss(model, data(seed + 1000, HELD_OUT)))
            model.blocks[0].moe.ep.check()
        for name, losses in served.items():
            held_out = data(seed + 1000, HELD_OUT)
            losses.append(served_loss(models["bf16"], held_out, name))
        if seed == args.seed:
            at_last = cosines(models["bf16"], models["fp8"], first)
        told = ", ".join(f"{finals[kind][-1]:.4f} in {kind}" for kind in kinds)
        print(f"seed {seed}: final loss {told}", flush=True)
    curves = {kind: np.mean(each, axis=0).tolist() for kind, each in every.items()}
    final = {kind: float(np.mean(each)) for kind, each in finals.items()}
    gaps = {kind: final[kind] / final["bf16"] - 1 for kind in kinds[1:]}
    gap = gaps["fp8"]
    print(f"{'step':>6}" + "".join(f" {kind:>9}" for kind in kinds))
    for step in sorted({*range(0, steps, max(1, steps // 12)), steps - 1}):
        print(f"{step + 1:>6}" + "".join(f" {curves[k][step]:>9.4f}" for k in kinds))
    for name in at_first:
        print(f"cosine {at_first[name]:.4f} first, {at_last[name]:.4f} last: {name}")
    for kind in kinds:
        apart = f", {gaps[kind]:+.3%}" if kind in gaps else ""
        print(f"final loss in {kind}, mean of {len(seeds)}: {final[kind]:.4f}{apart}")
    for name, losses in served.items():
        apart = np.mean(losses) / final["bf16"] - 1
        print(f"served with weights in {name}: {np.mean(losses):.4f}, {apart:+.3%}")
    least = min(*at_first.values(), *at_last.values())
    same = abs(gap) <= TOLERANCE and least >= LEAST_COSINE
    print(f"least cosine {least:.4f}: {'the same' if same else 'WRONG'}")
    if args.json:
        record = {
            "kind": "train_fp8",
            "device": devices[0].device_kind,
            "count": len(devices),
            "mesh": dict(mesh.shape),
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "command": f"examples/train_fp8.py --steps {steps} --microbatches "
            f"{args.microbatches} --seeds {args.seeds}"
            + " --control" * args.control
            + " --wgrad" * args.wgrad
            + " --quick" * args.quick,
            "sizes": dataclasses.asdict(sizes),
            "seed": args.seed,
            "commit": commit(),
            "finals": finals,
            "gaps": gaps,
            "served": served,
            "cosines": {"first": at_first, "last": at_last},
            "curves": curves,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
