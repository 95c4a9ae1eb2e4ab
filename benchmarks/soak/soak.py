"""Makes many calls with random routing, sizes and skew, and checks every result.

    python -m benchmarks.soak.soak [--calls 20000] [--minutes M] [--seed S] [--carried]

A program has several steps of layers of two handles (A-B-A) with their derivatives.
Programs of several sizes run in random order, with many in flight (program.py). A call
is one exchange. A second thread runs programs with formats, the kinds of reduce, a
shared expert, skip_a2a and calls in halves (`OPTIONS`). A third one compiles and runs a
program without calls every second, unless --no-compiling is given: on GPUs also
products for which XLA times several kernels, and XLA's own collectives. --threads 1
launches all from one thread and compiles nothing meanwhile. With only --minutes it
makes as many calls as fit. With --carried the inputs of a launch come from the first
device, and on several GPUs calls may hang beside the new programs: docs/sharp_bits.md
says why.
Prints what it found, and writes soak-<device>x<n>-<date>.json to --folder if that is
given. Exits 1 on any mismatch, or if memory was lost. The same seed repeats a failure.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import sys
import time

import jax_ep

# isort: split
import jax
import numpy as np

from benchmarks.common import recording
from benchmarks.soak import memory as host_memory
from benchmarks.soak import program
from benchmarks.soak import run as soak_run
from benchmarks.soak.configs import OPTIONS, changed, configs, defaults
from jax_ep._cli.bench.process import ep_mesh

STEPS = 4
# Tokens per rank of a call. In one program XLA's collectives run between the calls.
SIZES = (1, 40, 300, 768)
REDUCE_AT = 40
OPTION_SIZES = (37,)
SETTLE = 200  # launches
DELAYS = 120  # the longest delay, in small matrix products


def option_handles(mesh, config, transport, names):
    """Opens handles by name, with whether their calls are made in halves."""
    return {
        name: (
            jax_ep.init(mesh, "ep", changed(config, name), transport=transport),
            OPTIONS[name][1],
        )
        for name in names
    }


def free_memory(devices):
    """Returns the least free bytes of all GPUs; on CPUs minus the process's memory."""
    if devices[0].platform == "cpu":
        return -host_memory.resident()
    return min(host_memory.free_on_gpu(each.local_hardware_id) for each in devices)


def memory(devices):
    """Returns bytes free on the devices, and bytes in use on the host's heap."""
    return free_memory(devices), host_memory.in_use()


def executables(parts, seed):
    """Returns `parts` with executables, which have run once, in place of programs."""
    numbers = np.array([seed, 0, 0], np.uint32)
    # Traced one by one, but compiled all at once, since each takes XLA many seconds.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [
            {
                n: (pool.submit(run.lower(numbers).compile), layers)
                for n, (run, layers) in part.items()
            }
            for part in parts
        ]
    found = [
        {n: (run.result(), layers) for n, (run, layers) in part.items()}
        for part in found
    ]
    for part in found:
        for n, (run, _) in part.items():
            jax.block_until_ready(run(numbers))
            print(f"compiled n {n}", flush=True)
    return found


def soak(eps, options, mesh, args, together=soak_run.together, fetch=jax.device_get):
    """Runs launches until there were enough calls or time is up.

    `together` runs them and `fetch` reads their results, in one process or in several.
    """
    layers = (eps[0], eps[1], eps[0])
    delays = DELAYS if mesh.devices.flat[0].platform != "cpu" else 3
    programs = {
        n: (
            program.program(layers, mesh, n, STEPS, delays, n == REDUCE_AT),
            len(layers),
        )
        for n in args.sizes
    }
    others = {
        f"{name} {n}": (
            program.program((ep,), mesh, n, STEPS, delays, split=split),
            1,
        )
        for name, (ep, split) in options.items()
        for n in args.option_sizes
    }
    programs, others = executables((programs, others), args.seed)
    # Each thread has handles of its own; sizes of one may be left out.
    parts = [part for part in (programs, others) if part]
    if args.threads == 1:
        parts = [programs | others]
    calls = -(-args.calls // len(parts))
    launchers = [
        soak_run.Launcher(i, part, args.seed, STEPS, calls, fetch)
        for i, part in enumerate(parts)
    ]
    for launcher in launchers:
        launcher.carried = args.carried
    devices = mesh.local_devices
    compiler = soak_run.Compiler(devices, args.compiling)
    compiler.first()
    start_memory, compiled = memory(devices), compiler.count
    start = time.monotonic()
    deadline = start + (args.minutes * 60 if args.minutes else float("inf"))
    # The host's allocators settle during the first launches.
    together(launchers, compiler, deadline, SETTLE // len(launchers))
    settled = sum(launcher.launches for launcher in launchers)
    over = time.monotonic() >= deadline
    if over or all(launcher.done for launcher in launchers):
        settled = 0
    else:
        start_memory, compiled = memory(devices), compiler.count
        together(launchers, compiler, deadline, float("inf"))
    end_memory = memory(devices)
    return {
        "seconds": round(time.monotonic() - start, 1),
        **soak_run.merged(launchers, compiler),
        "threads": len(launchers),
        "compilations": compiler.count,
        # Launches and compilations before memory was first measured.
        "settled": [settled, compiled],
        "free_memory_start": start_memory[0],
        "free_memory_end": end_memory[0],
        "heap_start": start_memory[1],
        "heap_end": end_memory[1],
    }


def arguments():
    """Makes a parser of the arguments of one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, help="default: 20000, or all in --minutes")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--minutes", type=float, help="stop after that long")
    parser.add_argument("--devices", type=int, default=0, help="default: all")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=2)
    parser.add_argument(
        "--compiling", action=argparse.BooleanOptionalAction, default=True
    )
    parser.add_argument(
        "--carried", action="store_true", help="operands come from the first device"
    )
    parser.add_argument("--options", nargs="*", choices=OPTIONS, help="default: all")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="of calls")
    parser.add_argument(
        "--option-sizes", type=int, nargs="*", default=OPTION_SIZES, help="with options"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="for a record")
    return parser


def parse(given):
    args = arguments().parse_args(given)
    args.compiling = args.compiling and args.threads > 1
    settle(args)
    return args


def main(given=None):
    args = parse(given)
    jax.config.update("jax_num_cpu_devices", args.devices or 4)
    return run(args)


def settle(args):
    """Sets what follows from other arguments."""
    if args.calls is None:
        args.calls = sys.maxsize if args.minutes else 20000


def command(args):
    """Returns the command that runs the same again."""
    words = [f"--calls {args.calls}"] if args.calls < sys.maxsize else []
    words += [f"--seed {args.seed}"]
    words += [f"--minutes {args.minutes:g}"] if args.minutes else []
    words += [f"--devices {args.devices}"] if args.devices else []
    words += [f"--transport {args.transport}"] if args.transport != "auto" else []
    words += ["--threads 1"] if args.threads == 1 else []
    words += [] if args.compiling else ["--no-compiling"]
    words += ["--carried"] if args.carried else []
    words += (
        [" ".join(["--options", *args.options])] if args.options is not None else []
    )
    for name, default in (("sizes", SIZES), ("option_sizes", OPTION_SIZES)):
        given = tuple(getattr(args, name))
        if given != default:
            words += [f"--{name.replace('_', '-')}", *map(str, given)]
    tunables = os.environ.get("GLIBC_TUNABLES")
    before = [f"GLIBC_TUNABLES={tunables}"] if tunables else []
    return " ".join([*before, "python -m benchmarks.soak.soak", *words])


def soaked(mesh, args, **how):
    """Runs one soak on a mesh and returns its record; `how` goes to `soak`."""
    node = getattr(args, "ranks_per_node", None)
    eps = [
        jax_ep.init(
            mesh,
            "ep",
            dataclasses.replace(config, ranks_per_node=node),
            transport=args.transport,
        )
        for config in configs(mesh.size)
    ]
    names = defaults(args.transport) if args.options is None else args.options
    options = option_handles(mesh, eps[1].config, args.transport, names)
    eps += [ep for ep, _ in options.values()]
    found = soak(eps[:2], options, mesh, args, **how)
    for ep in eps:
        try:
            ep.check()
        except jax_ep.InvalidIdError:
            pass  # drawn on purpose
        except jax.errors.JaxRuntimeError as raised:
            found["error"] = found["error"] or str(raised)
    record = recording.head(
        "soak",
        device=mesh.devices.flat[0].device_kind,
        count=mesh.size,
        transport=eps[0].transport,
        jax=jax.__version__,
        seed=args.seed,
        command=command(args),
        asked_calls=args.calls if args.calls < sys.maxsize else None,
        options=list(options),
        **found,
    )
    record["error"] = record["error"] or soak_run.grown(record)
    for ep in eps:
        ep.close()
    return record


def write(record, name, folder):
    """Prints a record, and writes it to a folder; returns the exit status."""
    if folder is not None:
        recording.write(name, record, folder)
    print({k: v for k, v in record.items() if k != "kind"})
    # The NaN of a call that gave up count as mismatches.
    return 1 if record["failures"] or record["error"] else 0


def run(args):
    """Soaks in this process; returns the exit status."""
    record = soaked(ep_mesh(args.devices), args)
    return write(record, recording.of("soak", record), args.folder)


if __name__ == "__main__":
    sys.exit(main())
