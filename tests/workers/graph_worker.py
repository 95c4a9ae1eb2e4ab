"""A process of test_gpu: one compiled program runs many times, with changing routing.

Its environment has XLA make CUDA graphs even of a single node, so that the custom calls
are captured and replayed. "open" compares with the first run of each operand set, which
the oracle checks; "close" closes the handle and then replays.
"""

import json
import sys

import jax
import numpy as np

import jax_ep
from support import gpus, helpers, oracle

SETS = 8
CALLS = 400


def program(ep, mesh):
    """Two independent layers on one handle."""

    def layer(tokens, ids, weights):
        d = jax_ep.dispatch(ep, tokens, ids, weights)
        y = jax_ep.combine(ep, d.tokens * 2, d.route, d.router_weights)
        return d.tokens, d.src_info, d.expert_counts, y

    def two(first, second):
        return layer(*first), layer(*second)

    spec = jax.P("ep")
    return jax.jit(jax.shard_map(two, mesh=mesh, in_specs=spec, out_specs=spec))


def make_operands(mesh, config, rng):
    """Inputs of both layers, on the host and on the devices."""
    inputs = [
        helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
        for _ in range(2)
    ]
    parts = [(i.tokens, i.ids, i.weights) for i in inputs]
    return inputs, [tuple(helpers.put(mesh, p) for p in part) for part in parts]


def check(config, inputs, results):
    """Compares with the oracle, bit for bit; returns the results on the host."""
    results = jax.tree.map(np.asarray, results)
    for one, (rows, info, counts, y) in zip(inputs, results, strict=True):
        out = oracle.dispatch(config, one.tokens, one.ids, one.weights)
        for name, got in (
            ("tokens", rows),
            ("src_info", info),
            ("expert_counts", counts),
        ):
            want = np.concatenate([getattr(o, name) for o in out])
            helpers.assert_bits(got, want, name)
        sums = oracle.combine(
            config,
            one.ids,
            [o.tokens * 2 for o in out],
            [o.router_weights for o in out],
        )
        helpers.assert_bits(y, np.concatenate(sums), "y")
    return results


def equal(actual, wanted):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)
    return all(np.array_equal(a, w) for a, w in pairs)


def is_nothing(results):
    """Whether the call gave up, which makes it return NaN, -1 and 0."""
    return all(
        np.isnan(np.asarray(rows, np.float32)).all()
        and (np.asarray(info) == -1).all()
        and not np.asarray(counts).any()
        and np.isnan(np.asarray(y, np.float32)).all()
        for rows, info, counts, y in results
    )


def main(mode):
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    fields = {"max_tokens_per_rank": 32, "top_k": 4, "hidden_size": 64}
    ep = helpers.init(mesh, **fields)
    run, rng = program(ep, mesh), np.random.default_rng(3)
    made = [make_operands(mesh, ep.config, rng) for _ in range(SETS)]
    first = [check(ep.config, inputs, run(*args)) for inputs, args in made]
    if mode != "close":
        wrong = 0
        for _ in range(CALLS // SETS):
            again = [run(*args) for _, args in made]
            wrong += sum(not equal(*pair) for pair in zip(again, first, strict=True))
        found = {"transport": ep.transport, "calls": CALLS, "wrong": wrong}
        return found | {"launches": gpus.launches()}
    for _ in range(4):  # the calls are captured after that
        jax.block_until_ready([run(*args) for _, args in made])
    captured = gpus.launches()
    ep.close()
    found = {"calls": 0, "right": 0, "nothing": 0, "refused": 0, "wrong": 0}
    for _ in range(5):
        for (_, args), wanted in zip(made, first, strict=True):
            found["calls"] += 1
            try:
                result = jax.tree.map(np.asarray, run(*args))
            except jax.errors.JaxRuntimeError:
                found["refused"] += 1
                continue
            if is_nothing(result):
                found["nothing"] += 1
            else:
                found["right" if equal(result, wanted) else "wrong"] += 1
    new = helpers.init(mesh, **fields)
    inputs, args = made[0]
    check(new.config, inputs, program(new, mesh)(*args))
    return found | {"right_afterwards": True, "launches": captured}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
