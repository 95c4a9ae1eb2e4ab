"""Serves an expert layer whose traffic is skewed, and moves experts as it changes.

    python examples/rebalance.py              8 virtual CPU devices, or the GPUs present
    python examples/rebalance.py --plot maps  also writes maps/*.png (needs matplotlib)

Each rank has one place more than its share of the experts. Loads are measured with
jax_ep.stats. From time to time jax_ep.placement.balance chooses new places, with copies
of the busiest experts, and the weights move there between two steps. The step is
compiled once. The same layer without copies runs beside it. The command exits 1 if the
losses are not equal, or if a move does not make ranks more even.
"""

import argparse
import pathlib
import sys

import jax_ep  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

HIDDEN, INNER, TOP_K, TOKENS, LOCAL = 64, 32, 2, 64, 4
TOLERANCE = 1e-5  # relative to a loss; a GPU may sum larger groups in another order


def make_params(rng, experts):
    def normal(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    return {
        "router": normal(HIDDEN, experts),
        "gate_up": np.stack([normal(experts, HIDDEN, INNER) for _ in range(2)], 2),
        "down": normal(experts, INNER, HIDDEN),
    }


def traffic(rng, router, popularity, count):
    """Draws tokens that the router sends to some experts more than to others."""
    wanted = rng.choice(len(popularity), count, p=popularity / popularity.sum())
    tokens = 3 * router[:, wanted].T + 0.5 * rng.standard_normal((count, HIDDEN))
    return tokens.astype(np.float32)


def make_step(ep):
    """Makes one step, which returns the loss and the load so far."""

    def body(params, placement, tokens, wanted):
        y, aux = jax_ep.moe_ffn(ep, tokens, params, placement=placement)
        return jax.lax.pmean(jnp.mean((y - wanted) ** 2), "ep"), aux

    run = jax.shard_map(
        body,
        mesh=ep.mesh,
        in_specs=(SPECS, P(), P("ep"), P("ep")),
        out_specs=(P(), jax_ep.MoEAux.specs("ep")),
    )

    def step(params, placement, load, tokens, wanted):
        loss, aux = run(params, placement, tokens, wanted)
        return loss, jax_ep.stats.update(load, aux)

    return jax.jit(step)


SPECS = {"router": P(), "gate_up": P("ep"), "down": P("ep")}
MOVED = ("gate_up", "down")  # parameters in the order of places


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8, help="between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=pathlib.Path, help="a folder for the heat maps")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps must be positive, got {args.steps}")
    return args


def main(arguments=None):
    args = parse(arguments)
    if args.plot:
        args.plot.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.seed)
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("ep",), (AxisType.Auto,))
    experts, slots = LOCAL * ranks, (LOCAL + 1) * ranks
    sizes = {"top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens_per_rank": TOKENS}
    plain, ep = (
        jax_ep.init(
            mesh, "ep", jax_ep.EPConfig(num_experts=count, dtype="float32", **sizes)
        )
        for count in (experts, slots)
    )
    params = make_params(rng, experts)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(params, shardings)
    router = np.asarray(params["router"])

    # Before loads are known, all experts count as equal.
    placement = jax_ep.placement.balance(np.ones(experts), slots, ep_size=ranks)
    own = {name: placement.gather(params[name]) for name in MOVED}
    steps = make_step(plain), make_step(ep)
    found, apart, number = [], 0.0, 0
    for period in range(2):  # other experts are popular in the second
        popularity = rng.permutation(1 / np.arange(1, experts + 1) ** 1.2)
        for state in ("before", "after"):
            load = jax_ep.stats.init(ep)
            of_experts = jax_ep.stats.init(plain)
            for _ in range(args.steps):
                tokens = traffic(rng, router, popularity, TOKENS * ranks)
                batch = jax.device_put((tokens, np.tanh(tokens)), shardings["down"])
                want, of_experts = steps[0](params, None, of_experts, *batch)
                loss, load = steps[1](params | own, placement, load, *batch)
                apart = max(apart, abs(float(loss / want) - 1))
                number += 1
            seen = jax_ep.stats.summary(load, placement=placement)
            known = jax_ep.stats.summary(of_experts)
            found.append((state, seen.rank_imbalance, known.rank_imbalance))
            path = args.plot and args.plot / f"{state}{period + 1}.png"
            print(jax_ep.stats.heat_map(load, path, placement=placement))
            print(
                f"steps to {number}: loss {float(loss):.6f}, without copies "
                f"{float(want):.6f}; busiest rank {seen.rank_imbalance:.2f} x the "
                f"mean, without copies {known.rank_imbalance:.2f} x\n"
            )
            if state == "before":
                old, loads = placement, seen.expert_rows
                placement = jax_ep.placement.balance(loads, slots, ep_size=ranks)
                own = placement.reshard(own, old)
    ep.check()
    same = apart <= TOLERANCE
    even = all(
        found[i + 1][1] < min(found[i][1], found[i + 1][2]) or ranks == 1
        for i in (0, 2)
    )
    compiled = steps[1]._cache_size()
    print(
        f"losses differ by at most {apart:.1e}: {'the same' if same else 'WRONG'}; "
        f"ranks are {'more even' if even else 'NOT more even'} after each move; the "
        f"step was compiled {compiled} time{'s' * (compiled != 1)}"
    )
    return 0 if same and even and compiled == 1 else 1


if __name__ == "__main__":
    # Only affects the CPU platform.
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    sys.exit(main())
