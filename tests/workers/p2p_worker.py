"""A process of test_p2p_order or test_p2p_faults: one scenario; prints JSON last."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time

import jax_ep

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from support import compare_transports, faults, helpers

FIELDS = {"max_tokens_per_rank": 64, "hidden_size": 64, "top_k": 4}
# How many runs another thread must have done meanwhile.
OTHERS = 5
CALLS = 120
RANKS = int(os.environ.get("JAX_EP_TEST_RANKS", "4"))


def layer(ep, reduce, o):
    """A layer; with `reduce`, XLA's own collectives come before, between and after."""
    x = o.dy
    if reduce:
        x = x + jax.lax.pmax(jnp.max(o.ids), "ep").astype(x.dtype)
    d = jax_ep.dispatch(ep, x, o.ids, o.weights)
    rows = d.tokens
    if reduce:
        counts = jax.lax.all_gather(d.expert_counts, "ep", tiled=True)
        rows = rows + jax.lax.psum(jnp.sum(counts), "ep").astype(rows.dtype)
    y = jax_ep.combine(ep, rows, d.route, d.router_weights)
    if reduce:
        y = jax.lax.all_gather(y, "ep", tiled=True)
    return d.tokens, d.src_info, y


class Work:
    """Calls of one p2p handle, and the results that they must give."""

    def __init__(self, mesh, seed, reduce=False, **changes):
        config = helpers.make_config(**(FIELDS | changes))
        self.pair = compare_transports.Pair(mesh, config)
        self.sets = [self.pair.operands(seed + i, 64 - i) for i in range(4)]
        fast, plain = (
            compare_transports.mapped(mesh, functools.partial(layer, ep, reduce))
            for ep in (self.pair.p2p, self.pair.collective)
        )
        self.wanted = [plain(o) for o in self.sets]
        jax.block_until_ready(self.wanted)
        self.run = fast

    def calls(self):
        return [self.run(self.sets[i % 4]) for i in range(CALLS)]

    def wrong(self, results):
        count = 0
        for i, result in enumerate(results):
            try:
                compare_transports.assert_same(result, self.wanted[i % 4])
            except AssertionError as error:
                print(error, file=sys.stderr)
                count += 1
        return count


def beside(other, work):
    """Runs `other()` over and over in a thread while `work`'s calls are in flight."""
    stop, done, errors = threading.Event(), [], []

    def loop():
        try:
            while not stop.is_set():
                done.append(other(len(done)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    calls = wrong = 0
    # Until the other thread has done its share, too, or has failed.
    while (len(done) < OTHERS and not errors) or calls < CALLS:
        results = work.calls()
        jax.block_until_ready(results[-1])
        calls += len(results)
        wrong += work.wrong(results)
        print(f"{calls} calls, {len(done)} others", file=sys.stderr, flush=True)
    stop.set()
    thread.join()
    if errors:
        raise errors[0]
    return {"calls": calls, "wrong": wrong, "others": len(done)}


def collectives(mesh):
    """psum and all_gather in the same program, and in another thread's programs."""
    work = Work(mesh, 1, reduce=True)
    x = helpers.put(mesh, [np.ones((8, 128), np.float32)] * mesh.size)
    total = compare_transports.mapped(mesh, lambda x: jax.lax.psum(x, "ep"))

    def other(_):
        np.testing.assert_array_equal(total(x), float(mesh.size))

    return beside(other, work)


def compiling(mesh):
    """Compiles and runs new programs, with cold cuBLAS shapes and kernels."""
    work = Work(mesh, 2)

    def other(index):
        n = 32 + 8 * index
        made = jax.jit(lambda a: jnp.sort(a @ a.T, axis=0) + index)
        for device in mesh.devices.flat:
            made(jax.device_put(np.ones((n, n), np.float32), device))
        return made(np.ones((n, n), np.float32)).block_until_ready()

    return beside(other, work)


def threads(mesh):
    """Two threads with handles of their own; neither waits for the other."""
    works = [Work(mesh, 3), Work(mesh, 9, top_k=2, dtype="float32")]
    results = [[], []]

    def enqueue(index):
        results[index] = works[index].calls()

    started = [threading.Thread(target=enqueue, args=(i,)) for i in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return {
        "calls": len(results[0]),
        "others": len(results[1]),
        "wrong": sum(w.wrong(r) for w, r in zip(works, results, strict=True)),
    }


SCENARIOS = {f.__name__: f for f in (collectives, compiling, threads)}
SCENARIOS |= faults.ALL

if __name__ == "__main__":
    start = time.monotonic()
    found = SCENARIOS[sys.argv[1]](helpers.make_mesh(helpers.some_ranks(RANKS)))
    print(json.dumps(found | {"seconds": round(time.monotonic() - start, 1)}))
