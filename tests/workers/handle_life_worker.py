"""One process of test_handle_life.py: a scenario that could hang or crash it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import warnings

import jax_ep

# isort: split
import jax
import numpy as np

from support import helpers

jax.config.update("jax_num_cpu_devices", 4)
CALLS = 60


class Layer:
    """A handle with its compiled dispatch and operands."""

    def __init__(self, mesh, **changes):
        self.mesh = mesh
        self.ep = helpers.init(mesh, **changes)
        self.inputs = helpers.make_inputs(
            np.random.default_rng(0), self.ep.config, mesh.size
        )
        self.operands = [helpers.put(mesh, part) for part in vars(self.inputs).values()]
        self.call = jax.jit(
            jax.shard_map(
                self.dispatch,
                mesh=mesh,
                in_specs=jax.P("ep"),
                out_specs=jax.P("ep"),
            )
        )

    def dispatch(self, *operands):
        return jax_ep.dispatch(self.ep, *operands)

    def run(self):
        return self.call(*self.operands)

    def check(self):
        helpers.assert_dispatched(self.ep.config, self.run(), self.inputs)


def fork_early(mesh):
    """Forks a child after using JAX but before init."""
    assert jax.device_count() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)  # if it waits for threads that a fork does not copy
        try:
            helpers.init(mesh, top_k=3)
        except ValueError as error:
            print("child:", error, flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    helpers.init(mesh, top_k=3).close()
    print("parent right")


def fork(mesh):
    """A forked child's handle raises errors, but the child can close and drop it."""
    layer, dropped = Layer(mesh), helpers.init(mesh, top_k=2)
    layer.check()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of threads
        child = os.fork()
    if child == 0:
        # Only tracing works, as the fork did not copy JAX's threads.
        for act in (
            lambda: jax_ep.dispatch(layer.ep, *layer.operands),
            lambda: jax_ep.combine(layer.ep, None, None),
            layer.ep.check,
            lambda: helpers.init(mesh, top_k=3),
        ):
            try:
                act()
            except ValueError as error:
                print("child:", error, flush=True)
        layer.ep.close()
        del dropped
        gc.collect()
        print("child left", flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    layer.check()
    dropped.check()
    print("parent right")


def collect(mesh):
    """Drops handles, programs and results in any order, also with calls in flight."""
    choose = random.Random(5)
    kept = Layer(mesh)
    for round_ in range(12):
        layer = Layer(mesh, top_k=1 + round_ % 3)
        things = {
            "ep": layer.ep,
            "call": layer.call,
            "results": [layer.run() for _ in range(3)],
            "cycle": layer,
        }
        layer.itself = layer
        if round_ % 2:
            layer.ep.close()
        del layer
        names = list(things)
        choose.shuffle(names)
        for name in names:
            del things[name]
            if choose.random() < 0.5:
                threading.Thread(target=gc.collect).start()
            gc.collect()
        if round_ % 4 == 3:
            jax.clear_caches()
    kept.check()
    print("right")


def launch(layer, launching):
    for _ in range(CALLS):
        with launching:
            yield layer.run()


def exit_end(mesh, launching=None):
    layer = Layer(mesh)
    results = list(launch(layer, launching or contextlib.nullcontext()))
    print("leaving", flush=True)
    assert results


def exit_thread(mesh):
    layer, launching = Layer(mesh), helpers.launching(mesh)
    layer.run()
    # A thread that the interpreter does not wait for.
    thread = threading.Thread(
        target=lambda: list(launch(layer, launching)), daemon=True
    )
    thread.start()
    exit_end(mesh, launching)


def exit_error(mesh):
    layer = Layer(mesh)
    try:
        with layer.ep:
            results = [layer.run() for _ in range(CALLS)]
            raise KeyboardInterrupt(len(results))
    except KeyboardInterrupt:
        print("leaving", flush=True)


def exit_closing(mesh):
    layers = [Layer(mesh) for _ in range(3)]
    results = [layer.run() for layer in layers for _ in range(CALLS // 3)]
    for layer in layers[:2]:
        layer.ep.close()
    print("leaving", flush=True)
    sys.exit(len(results) - CALLS)


if __name__ == "__main__":
    scenarios = (fork, fork_early, collect, exit_end, exit_thread, exit_error)
    scenarios += (exit_closing,)
    chosen = {scenario.__name__: scenario for scenario in scenarios}
    chosen[sys.argv[1]](helpers.make_mesh(helpers.some_ranks(4)))
