"""Times the grouped matmuls of `jax_ep.experts.mosaic` on one Hopper GPU.

    python -m benchmarks.layers.grouped [--cases large-256] [--room 1 4]

For each size, each of an expert's matrices and each way to multiply: microseconds and
teraflops of the rows that groups hold. `ours` are the kernels, `jax` is
`jax.experimental.pallas.ops.gpu`'s, `batched` is one matmul with equally many rows per
expert, as cuBLAS does it. `--room` is how many rows the operand has for each that a
group holds, `--set _PANEL=8` changes a constant of hopper.py. Results are compared.
Leaves
benchmarks/results/grouped-<device>x1-<date>.json. With --tiny, on a machine without
such a GPU, the kernels are lowered for one.
"""

import functools
import math
import statistics
import sys
import time
import types
import typing
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments as common
from benchmarks.common import recording, timing
from jax_ep._experts import hopper
from jax_ep._experts.grouped_outer import grouped_outer
from jax_ep._experts.grouped_rows import grouped_rows


class Case(typing.NamedTuple):
    """Sizes on one rank."""

    hidden: int
    inner: int
    groups: int
    rows: int  # that groups hold


CASES = {
    "mid": Case(2048, 1024, 16, 32768),
    "large-64": Case(7168, 2048, 16, 32768),
    "large-256": Case(7168, 2048, 64, 32768),
    "many": Case(7168, 2048, 128, 32768),
    "decode": Case(7168, 2048, 64, 1024),
}
SMALL = {"tiny": Case(128, 128, 2, 256)}
TINY = ("--cases", *SMALL, "--room", "1", "--seconds", "0")
WAYS = ("ours", "jax", "batched")
MULTIPROCESSORS = 132  # of the GPU that kernels are lowered for where there is none
TILES = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4}
CALLS = 5  # of a time
# A sum of products in bfloat16, over the largest element.
BOUND = 0.02


def jax_kernels():
    from jax.experimental.pallas.ops.gpu import (
        ragged_dot_mgpu,
        transposed_ragged_dot_mgpu,
    )

    def tiles(columns):
        return TILES | {"grid_block_n": math.gcd(columns // TILES["block_n"], 8)}

    def rows(x, w, sizes, transposed):
        columns = w.shape[1 if transposed else 2]
        return ragged_dot_mgpu.ragged_dot(
            x, w, group_sizes=sizes, transpose_rhs=transposed, **tiles(columns)
        )

    def outer(x, y, sizes):
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(
            x, y, group_sizes=sizes, **tiles(y.shape[1])
        )

    return rows, outer


def programs(op, groups):
    """By name, each taking (left, right, group sizes)."""
    of_rows, of_outer = jax_kernels()
    transposed = op == "to rows"

    def batched(x, w, _):
        x = x[: len(x) // groups * groups].reshape(groups, -1, x.shape[1])
        if op == "to matrices":
            w = w[: len(w) // groups * groups].reshape(groups, -1, w.shape[1])
            return jnp.einsum("gna,gnb->gab", x, w)
        return jnp.einsum("gna,gba->gnb" if transposed else "gna,gab->gnb", x, w)

    if op == "to matrices":
        ours = lambda x, y, sizes: grouped_outer(x, y, group_sizes=sizes)  # noqa: E731
        return {"ours": ours, "jax": of_outer, "batched": batched}
    return {
        "ours": lambda x, w, sizes: grouped_rows(
            x, w, group_sizes=sizes, transpose_rhs=transposed
        ),
        "jax": functools.partial(of_rows, transposed=transposed),
        "batched": batched,
    }


def operands(op, rows, a, b, groups, held, rng):
    """Random ones, with zeros where no group has a row."""
    keys = iter(jax.random.split(jax.random.key(int(rng.integers(2**31))), 2))

    def normal(shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    left = normal((rows, a)).at[held:].set(0)
    if op == "to matrices":
        right = normal((rows, b)).at[held:].set(0)
    else:
        right = normal((groups, b, a) if op == "to rows" else (groups, a, b))
    sizes = rng.multinomial(held, np.full(groups, 1 / groups))
    return left, right, jnp.asarray(sizes, jnp.int32)


def median_us(run, args, seconds):
    jax.block_until_ready(run(*args))
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        times.append(timing.seconds(lambda _: run(*args), CALLS, CALLS))
    return statistics.median(times) * 1e6


def difference(found, wanted, held):
    """Of the largest element; `held` rows count."""
    found, wanted = (x[:held].astype(jnp.float32) for x in (found, wanted))
    return float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))


def lowered(program, args):
    """What XLA gets of a program for a GPU that is not there."""
    gpus = [types.SimpleNamespace(core_count=MULTIPROCESSORS)]
    with mock.patch.multiple(jax, devices=lambda: gpus, local_devices=lambda: gpus):
        traced = jax.jit(program).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def measure(case, room, rng, names, seconds):
    on_gpu = jax.default_backend() == "gpu"
    hidden, inner, groups, held = (CASES | SMALL)[case]
    shapes = {"gate and up": (hidden, 2 * inner), "down": (inner, hidden)}
    for matrix, (a, b) in shapes.items():
        for op in ("forward", "to rows", "to matrices"):
            one, other = (b, a) if op == "to rows" else (a, b)
            args = operands(op, room * held, one, other, groups, held, rng)
            kept, results = (groups if op == "to matrices" else held), {}
            for name, program in programs(op, groups).items():
                if name not in names or (name == "batched" and room > 1):
                    continue
                row = {"case": case, "matrix": matrix, "op": op, "way": name}
                row |= {"room": room}
                if name != "batched" and not on_gpu:
                    text = lowered(program, args)
                    yield row | {"kernels": text.count("custom_call @mosaic_gpu")}
                    continue
                run = jax.jit(program)
                row |= {"us": median_us(run, args, seconds)}
                row["tflops"] = 2 * held * a * b / row["us"] / 1e6
                if name != "batched":
                    results[name] = run(*args)
                if name == "jax" and len(results) == 2:
                    row["difference"] = difference(*results.values(), kept)
                    row["wrong"] = not row["difference"] < BOUND
                yield row


def parse(arguments):
    parser = common.parser(__doc__)
    known = [*CASES, *SMALL]
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=known)
    parser.add_argument("--room", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--set", nargs="*", default=[], help="constants of hopper.py")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of a time, at least"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the operands")
    common.add_tiny(parser)
    return common.parsed(parser, arguments, TINY)


def main(arguments=None):
    args = parse(arguments)
    if jax.default_backend() != "gpu" and not args.tiny:
        sys.exit("grouped.py: kernels need a Hopper GPU, got none; run it with --tiny")
    for setting in args.set:
        name, _, value = setting.partition("=")
        setattr(hopper, name, int(value))
    rng, rows = np.random.default_rng(args.seed), []
    for case in args.cases:
        for room in args.room:
            for row in measure(case, room, rng, args.ways, args.seconds):
                rows.append(row)
                print(*(f"{v:.4g}" if type(v) is float else v for v in row.values()))
    if not args.set:
        record = recording.head(
            "grouped",
            device=jax.devices()[0].device_kind,
            count=1,
            jax=jax.__version__,
            command=recording.command("layers.grouped", arguments),
            cases={case: (CASES | SMALL)[case]._asdict() for case in args.cases},
            results=rows,
        )
        recording.write(recording.of("grouped", record), record, args.results)
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
