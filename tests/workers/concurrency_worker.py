"""One process of test_concurrency.py: many exchanges at once; prints "right" if so."""

from __future__ import annotations

import functools
import sys
import threading

import jax_ep

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from support import helpers, moe, oracle

jax.config.update("jax_num_cpu_devices", 8)

CALLS = 12


# A GPU would round to TF32.
exact = functools.partial(jnp.matmul, precision="highest")


def calls(mesh, changes):
    """A compiled program of independent exchanges, each after a different work load."""
    eps = [helpers.make_ep(mesh, helpers.make_config(**c)) for c in changes]

    def one(ep, index, x, ids, w):
        """Multiplies by an orthogonal matrix and back, `index` times: x stays exact."""
        n = x.shape[1]
        swap = jnp.eye(n, dtype=x.dtype)[::-1]
        heavy = jax.lax.fori_loop(
            0, 40 * (index * 5 % 7), lambda _, a: exact(a, swap), x
        )
        d = jax_ep.dispatch(ep, heavy, ids, w)
        y = jax_ep.combine(ep, d.tokens, d.route, router_weights=d.router_weights)
        return d.tokens, d.src_info, y

    def body(operands):
        return [
            one(eps[i % len(eps)], i, *operand) for i, operand in enumerate(operands)
        ]

    run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    return eps, jax.jit(run)


def operands(mesh, eps, seed, count=CALLS):
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        config = eps[i % len(eps)].config
        inputs = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
        made.append(tuple(helpers.put(mesh, p) for p in vars(inputs).values()))
    return made


def expected(mesh, run, operand_list):
    """The program's results when nothing else runs; the oracle checks them, too."""
    return jax.tree.map(np.asarray, jax.block_until_ready(run(operand_list)))


def check_with_oracle(mesh, eps, operand_list, results) -> None:
    for i, (operand, (rows, info, y)) in enumerate(
        zip(operand_list, results, strict=True)
    ):
        config = eps[i % len(eps)].config
        parts = [[np.asarray(a) for a in np.split(o, mesh.size)] for o in operand]
        out = oracle.dispatch(config, *parts)
        for name, got in (("tokens", rows), ("src_info", info)):
            helpers.assert_bits(got, np.concatenate([getattr(o, name) for o in out]))
        sums = oracle.combine(
            config, parts[1], [o.tokens for o in out], [o.router_weights for o in out]
        )
        helpers.assert_bits(y, np.concatenate(sums))


def same(actual, wanted) -> None:
    jax.tree.map(helpers.assert_bits, actual, wanted)


def independent(mesh) -> None:
    """A program of independent calls after unequal work, on one and several handles."""
    for changes in ([{}], [{}, {"top_k": 1}, {"expert_alignment": 4}]):
        eps, run = calls(mesh, [{"dtype": "float32"} | c for c in changes])
        made = operands(mesh, eps, 1)
        wanted = expected(mesh, run, made)
        host = [tuple(np.asarray(a) for a in o) for o in made]
        check_with_oracle(mesh, eps, host, wanted)
        for result in [run(made) for _ in range(20)]:
            same(result, wanted)


def in_flight(mesh, runs: int = 300) -> None:
    """Enqueues runs without waiting for any, with and without data dependence."""
    eps, run = calls(mesh, [{"dtype": "float32"}])
    made = [operands(mesh, eps, seed, 1) for seed in range(4)]
    wanted = [expected(mesh, run, m) for m in made]
    results = [run(made[i % 4]) for i in range(runs)]
    for i, result in enumerate(results):
        same(result, wanted[i % 4])

    # A chain: each run's tokens are the previous run's sums, with one expert per token.
    ep = helpers.make_ep(mesh, helpers.make_config(top_k=1))
    x, ids, _ = operands(mesh, [ep], 9, 1)[0]
    ids = helpers.put(mesh, [np.arange(ids.shape[0], dtype=np.int32)[:, None] % 24])

    def step(x, ids):
        d = jax_ep.dispatch(ep, x, ids)
        return jax_ep.combine(ep, d.tokens, d.route) * 2

    chained = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    )
    small = jnp.ldexp(x.astype(jnp.float32), -100).astype(x.dtype)
    y = small
    for _ in range(runs // 3):
        y = chained(y, ids)
    helpers.assert_bits(y, np.asarray(x))


def threads(mesh, runs: int = 60) -> None:
    """Two threads use own handles, then share one; neither waits for the other."""
    launching = helpers.launching(mesh)
    programs = [calls(mesh, [{"dtype": "float32", "top_k": k}]) for k in (1, 3)]
    programs.append(programs[0])
    made = [operands(mesh, eps, i, 3) for i, (eps, _) in enumerate(programs)]
    wanted = [
        expected(mesh, run, m) for (_, run), m in zip(programs, made, strict=True)
    ]
    errors = []

    def work(index: int) -> None:
        try:
            results = []
            for _ in range(runs):
                with launching:
                    results.append(programs[index][1](made[index]))
            for result in results:
                same(result, wanted[index])
        except Exception as error:
            errors.append(error)

    for pair in ((0, 1), (0, 2)):
        started = [threading.Thread(target=work, args=(i,)) for i in pair]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        if errors:
            raise errors[0]


def layers(mesh, runs: int = 40) -> None:
    """Training steps that alternate between two handles, with many in flight."""
    config = {"dtype": "float32"}
    eps = [
        helpers.make_ep(mesh, helpers.make_config(**config | c))
        for c in ({}, {"expert_alignment": 4})
    ]
    x, ids, w = operands(mesh, eps[:1], 5, 1)[0]
    params = helpers.normal(np.random.default_rng(6), (24, 16, 16), np.float32) / 4
    params_on = helpers.put(mesh, [params.astype(np.float32)])

    def model(x, ids, w, p):
        for ep in eps * 2:
            x = moe.layer(ep, x, ids, w / 4, p)
        return x

    step = jax.jit(jax.value_and_grad(moe.loss(mesh, model), (0, 1, 2)))
    first = jax.tree.map(np.asarray, step(x, w, params_on, ids))
    for result in [step(x, w, params_on, ids) for _ in range(runs)]:
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
            result,
            first,
        )


if __name__ == "__main__":
    chosen = {f.__name__: f for f in (independent, in_flight, threads, layers)}
    chosen[sys.argv[1]](helpers.make_mesh(helpers.some_ranks(8)))
    print("right")
