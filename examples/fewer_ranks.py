"""Trains in several processes, kills one, and goes on with the rest.

    python examples/fewer_ranks.py [--processes 4] [--steps 12] [--kill-at 7]

It runs on CPUs, with one process per rank, started by this one. The last is killed in
the middle of a step. That leaves the others waiting in a collective of XLA, so all are
ended, and one fewer start from the last checkpoint. It has weights by expert and the
measured loads, so that jax_ep.placement.balance can place the experts on any number of
ranks. Batches follow from the number of the step. The loss curve is compared with that
of a run in one process that nobody kills; the command exits 1 if they differ.
"""

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import jax_ep  # before JAX starts its backend  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 12, 16, 16, 2, 96
RATE, EVERY = 2.0, 2  # learning rate; steps between checkpoints
TOLERANCE = 1e-4  # relative to a loss: sums over ranks are in another order
SPECS = {"router": P(), "gate_up": P("ep"), "down": P("ep")}


def first_state():
    """Returns the state before step 0: weights by expert, and equal loads."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    return {
        "step": np.array(0),
        "load": np.ones(EXPERTS, np.int64),
        "router": normal(HIDDEN, EXPERTS),
        "gate_up": np.stack([normal(EXPERTS, HIDDEN, INNER) for _ in range(2)], 2),
        "down": normal(EXPERTS, INNER, HIDDEN),
    }


def batch(step):
    """Returns one of two batches in turn, so that the loss falls from the start."""
    tokens = np.random.default_rng(step % 2).standard_normal((TOKENS, HIDDEN))
    return tokens.astype(np.float32), np.roll(tokens, 1, axis=1).astype(np.float32)


def save(path, state):
    """Saves the state as a whole or not at all: a process may be killed here, too."""
    with open(path.with_suffix(".new"), "wb") as file:
        np.savez(file, **state)
    os.replace(path.with_suffix(".new"), path)


def train(folder, steps, kill_at=None, devices=None):
    """Trains from the checkpoint in `folder`, by default on all devices."""
    path = folder / "checkpoint.npz"
    state = dict(np.load(path)) if path.exists() else first_state()
    devices = devices or jax.devices()
    ranks = len(devices)
    mesh = jax.make_mesh((ranks,), ("ep",), (AxisType.Auto,), devices=devices)
    slots = (EXPERTS // ranks + 1) * ranks
    placement = jax_ep.placement.balance(state["load"], slots, ep_size=ranks)
    sizes = {"top_k": TOP_K, "hidden_size": HIDDEN, "dtype": "float32"}
    sizes["max_tokens_per_rank"] = TOKENS // ranks
    ep = jax_ep.init(mesh, "ep", jax_ep.EPConfig(num_experts=slots, **sizes))
    split = NamedSharding(mesh, P("ep"))

    def put(array, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])

    def body(params, placement, tokens):
        return jax_ep.moe_ffn(ep, tokens, params, placement=placement, residual=tokens)

    layer = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(SPECS, P(), P("ep")),
        out_specs=(P("ep"), jax_ep.MoEAux.specs("ep")),
    )

    def loss(params, placement, tokens, wanted):
        places = {name: params[name] for name in ("gate_up", "down")}
        places = placement.gather(places, sharding=split)
        y, aux = layer(params | places, placement, tokens)
        return jnp.mean((y - wanted) ** 2), aux

    @jax.jit
    def update(params, placement, load, tokens, wanted):
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = grad(params, placement, tokens, wanted)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        return value, params, jax_ep.stats.update(load, aux)

    params = {name: put(state[name], spec) for name, spec in SPECS.items()}
    load = jax_ep.stats.init(ep)
    for step in range(int(state["step"]), steps):
        if step == kill_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tokens, wanted = (put(each, P("ep")) for each in batch(step))
        value, params, load = update(params, placement, load, tokens, wanted)
        if jax.process_index() == 0:
            with (folder / "curve.txt").open("a") as curve:
                curve.write(f"{step} {ranks} {float(value):.7f}\n")
        if (step + 1) % EVERY == 0:  # in all processes, which gather their parts
            whole = multihost_utils.process_allgather(params, tiled=True)
            rows = jax_ep.stats.summary(load, placement=placement).expert_rows
            if jax.process_index() == 0:
                save(path, whole | {"step": np.array(step + 1), "load": rows})


def worker(port, processes, process, folder, steps, kill_at):
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(processes),
        int(process),
        cluster_detection_method="deactivate",
    )
    train(pathlib.Path(folder), int(steps), int(kill_at))


def run_processes(count, folder, steps, kill_at):
    """Returns None once all are done, or the number of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(folder), str(steps), str(kill_at)]
    started = []
    for process in range(count):
        command = [sys.executable, __file__, "--worker", str(port), str(count)]
        with (folder / f"log{process}of{count}.txt").open("w") as log:
            started.append(
                subprocess.Popen(  # noqa: S603  (this program itself)
                    [*command, str(process), *words],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                )
            )
    try:
        while True:
            codes = [process.poll() for process in started]
            failed = [i for i, code in enumerate(codes) if code]
            if failed:
                # The others fail or wait for that one, depending on where they are.
                killed = [i for i in failed if codes[i] == -signal.SIGKILL]
                return (killed or failed)[0]
            if None not in codes:
                return None
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()


def read_curve(folder):
    lines = (folder / "curve.txt").read_text().splitlines()
    return [(int(s), int(r), float(v)) for s, r, v in map(str.split, lines)]


def parse(arguments):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=4, choices=(2, 3, 4))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill-at", type=int, default=7, help="the step")
    args = parser.parse_args(arguments)
    if not 0 < args.kill_at < args.steps:
        parser.error(f"--kill-at must be a step after the first, got {args.kill_at}")
    return args


def main(arguments=None):
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        count, kill_at = args.processes, args.kill_at
        failed = run_processes(count, folder, args.steps, kill_at)
        if failed != count - 1:
            print((folder / f"log{failed or 0}of{count}.txt").read_text())
            print(f"process {failed} failed, but the last one was to be killed")
            return 1
        print(f"process {failed} of {count} was killed in step {kill_at}")
        failed = run_processes(count - 1, folder, args.steps, -1)
        if failed is not None:
            print((folder / f"log{failed}of{count - 1}.txt").read_text())
            return 1
        curve = read_curve(folder)
        alone = folder / "alone"
        alone.mkdir()
        train(alone, args.steps, devices=jax.devices()[:1])
        want = [value for _, _, value in read_curve(alone)]
    for step, ranks, value in curve:
        print(f"step {step:>3} on {ranks} ranks: loss {value:.6f}, {want[step]:.6f}")
    apart = max(abs(value / want[step] - 1) for step, _, value in curve)
    same = apart <= TOLERANCE and curve[-1][0] == args.steps - 1
    falls = want[-1] < 0.9 * want[0]
    verdict = "the same curve" if same and falls else "WRONG"
    print(f"losses differ from one process's by at most {apart:.1e}: {verdict}")
    return 0 if same and falls else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        jax.config.update("jax_platforms", "cpu")
        sys.exit(main())
