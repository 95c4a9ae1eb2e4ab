"""Many calls with random routing, sizes and skew between ranks, every result checked.

    python benchmarks/soak.py --calls 20000 [--seed S] [--minutes M]

Layers of two handles (A-B-A) with their derivatives, several steps in one program,
programs of several sizes in random order and many in flight (soak_program.py). A call
is one exchange. Programs with formats, the kinds of reduce, a shared expert, skip_a2a
and calls in halves come between (`OPTIONS`). Writes
benchmarks/results/soak-<device>x<n>-<date>.json; exits with 1 on any mismatch. A
failure is run again with the same seed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import random
import sys
import time

import jax_ep

# isort: split
import jax
import numpy as np
import recording
import soak_program
from jax.sharding import AxisType, Mesh

sys.path.insert(0, str(recording.ROOT / "tests"))

STEPS = 4
IN_FLIGHT = 4
# Sizes of a call; the second's program has XLA's collectives between the calls.
SIZES = (1, 40, 300, 768)
REDUCE_AT = 40
OPTION_SIZES = (37,)
SETTLE = 200  # launches
DELAYS = 120  # the longest delay, in small matrix products


# Changes of B, and whether its calls are made in halves. Formats whose scales are
# powers of two keep what soak_program draws exactly.
OPTIONS = {
    "mxfp8": ({"dispatch_format": "mxfp8", "hidden_size": 256}, False),
    "tiled": (
        {
            "dispatch_format": "mxfp4",
            "hidden_size": 256,
            "scale_layout": "tiled_128x4",
            "reduce": "none",
        },
        True,
    ),
    "source": ({"reduce": "source", "combine_dtype": None}, True),
    "shared": ({"fused_shared_expert": True, "expert_alignment": 4}, True),
    "shared_source": (
        {
            "fused_shared_expert": True,
            "reduce": "source",
            "dispatch_format": "mxfp8",
            "hidden_size": 256,
            "combine_dtype": None,
        },
        False,
    ),
    "local": ({"skip_a2a": True, "combine_dtype": None}, False),
    "local_none": ({"skip_a2a": True, "reduce": "none"}, True),
    "halves": ({}, True),
}


def configs(ranks):
    """A: one region, drops. B: two regions, another dtype, a free tail."""
    a = jax_ep.EPConfig(
        num_experts=16 * ranks,
        top_k=8,
        hidden_size=512,
        max_tokens_per_rank=768,
        capacity_factor=1.25,
        expert_alignment=8,
    )
    b = jax_ep.EPConfig(
        num_experts=6 * ranks,
        top_k=3,
        hidden_size=264,
        max_tokens_per_rank=256,
        dtype="float32",
        combine_dtype="bfloat16",
        recv_capacity=700,
        zero_tail=False,
    )
    return a, b


def option_handles(mesh, config, transport, names):
    """Handles by name, with whether their calls are made in halves."""
    return {
        name: (
            jax_ep.init(
                mesh,
                "ep",
                dataclasses.replace(config, recv_capacity=200, **OPTIONS[name][0]),
                transport=transport,
            ),
            OPTIONS[name][1],
        )
        for name in names
    }


def free_memory(devices):
    """The least of all GPUs; of CPUs the process's own, below zero."""
    if devices[0].platform == "cpu":
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return -pages * os.sysconf("SC_PAGE_SIZE")
    import gpus

    return min(gpus.free_bytes(device.local_hardware_id) for device in devices)


class Tally:
    """What came back so far."""

    def __init__(self):
        self.calls = self.checks = 0
        self.failures = collections.Counter()
        self.statistics = collections.Counter()
        self.first_failure = None

    def add(self, launch, n, results):
        """`results`: a list over layers of (mismatches, statistics), [rank, step]."""
        for index, (counts, statistics) in enumerate(results):
            for name, value in statistics.items():
                self.statistics[name] += int(np.sum(value, dtype=np.int64))
            for name, bad in counts.items():
                bad = np.asarray(bad)
                self.checks += bad.size
                if not bad.any():
                    continue
                self.failures[name] += int(np.count_nonzero(bad))
                if self.first_failure is None:
                    rank, step = (int(i) for i in np.argwhere(bad)[0])
                    self.first_failure = {
                        "launch": launch,
                        "n": n,
                        "step": step,
                        "layer": index,
                        "what": name,
                        "rank": rank,
                        "elements": int(bad[rank, step]),
                    }
                    print("MISMATCH", self.first_failure, flush=True)
        self.calls += STEPS * len(results) * soak_program.CALLS_A_LAYER


def soak(eps, options, mesh, args):
    """Runs launches until there were enough calls or time is over."""
    layers = (eps[0], eps[1], eps[0])
    delays = DELAYS if mesh.devices.flat[0].platform != "cpu" else 3
    programs = {
        n: soak_program.program(layers, mesh, n, STEPS, delays, n == REDUCE_AT)
        for n in SIZES
    }
    for name, (ep, split) in options.items():
        for n in OPTION_SIZES:
            programs[f"{name} {n}"] = soak_program.program(
                (ep,), mesh, n, STEPS, delays, split=split
            )
    choose, key = random.Random(args.seed), jax.random.key(args.seed)
    for n, run in programs.items():
        jax.block_until_ready(run(key))
        print(f"compiled n {n}", flush=True)
    devices = list(mesh.devices.flat)
    # The host's allocators settle during the first launches.
    settle = SETTLE if devices[0].platform == "cpu" else 0
    memory_start = free_memory(devices)
    tally, waiting = Tally(), collections.deque()
    start = shown = time.monotonic()
    launch, enqueued, error = 0, 0, None
    limit_s = args.minutes * 60 if args.minutes else float("inf")
    try:
        while waiting or enqueued < args.calls:
            late = time.monotonic() - start > limit_s
            if late and not waiting:
                break
            if enqueued < args.calls and not late:
                n = choose.choice(list(programs))
                result = programs[n](jax.random.fold_in(key, launch))
                waiting.append((launch, n, result))
                launch += 1
                size = len(layers) if n in SIZES else 1
                enqueued += STEPS * size * soak_program.CALLS_A_LAYER
                if choose.random() < 0.1:
                    time.sleep(choose.random() / 100)
                if len(waiting) < IN_FLIGHT:
                    continue
            tally.add(*jax.device_get(waiting.popleft()))
            if launch == settle:
                memory_start = free_memory(devices)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                rate = tally.calls / (shown - start)
                print(f"{tally.calls} calls, {rate:.0f} a second", flush=True)
    except jax.errors.JaxRuntimeError as raised:
        error = str(raised)
        print("ERROR", error, flush=True)
    return {
        "seconds": round(time.monotonic() - start, 1),
        "calls": tally.calls,
        "launches": launch,
        "checks": tally.checks,
        "failures": dict(tally.failures),
        "first_failure": tally.first_failure,
        "error": error,
        **tally.statistics,
        "free_memory_start": memory_start,
        "free_memory_end": free_memory(devices),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, help="stop after that long")
    parser.add_argument("--devices", type=int, default=0, help="default: all")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--options", nargs="*", choices=OPTIONS, help="default: all")
    parser.add_argument("--folder", type=pathlib.Path, default=recording.RESULTS)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices or 4)
    return run(args)


def command(args):
    """What runs the same again."""
    words = [f"--calls {args.calls}", f"--seed {args.seed}"]
    words += [f"--minutes {args.minutes:g}"] if args.minutes else []
    words += [f"--devices {args.devices}"] if args.devices else []
    words += [f"--transport {args.transport}"] if args.transport != "auto" else []
    words += (
        [" ".join(["--options", *args.options])] if args.options is not None else []
    )
    return " ".join(["python benchmarks/soak.py", *words])


def run(args):
    """Soaks and records; the exit status."""
    devices = jax.devices()[: args.devices or None]
    mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
    eps = [
        jax_ep.init(mesh, "ep", config, transport=args.transport)
        for config in configs(mesh.size)
    ]
    names = OPTIONS if args.options is None else args.options
    options = option_handles(mesh, eps[1].config, args.transport, names)
    eps += [ep for ep, _ in options.values()]
    found = soak(eps[:2], options, mesh, args)
    for ep in eps:
        try:
            ep.check()
        except jax_ep.InvalidIdError:
            pass  # drawn on purpose
        except jax.errors.JaxRuntimeError as raised:
            found["error"] = found["error"] or str(raised)
    record = {
        "kind": "soak",
        "device": devices[0].device_kind,
        "count": len(devices),
        "transport": eps[0].transport,
        "jax": jax.__version__,
        "commit": recording.commit(),
        "date": recording.date(),
        "seed": args.seed,
        "command": command(args),
        "asked_calls": args.calls,
        "options": list(options),
        **found,
    }
    for ep in eps:
        ep.close()
    name = f"soak-{recording.short_device(record['device'])}x{len(devices)}"
    recording.write(name, record, args.folder)
    print({k: v for k, v in record.items() if k not in ("kind", "commit")})
    # NaN of a call that gave up is a mismatch too.
    return 1 if record["failures"] or record["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
