"""Times the grouped matmuls of `jax_ep.experts.hopper` and `fp8` on one Hopper GPU.

    python -m benchmarks.layers.grouped [--cases large-256] [--room 1 4]

For each size and each way to multiply it reports microseconds, and teraflops of the
rows that groups hold. Single matmuls (gate and up, down) are timed forward, for the
gradients of rows and for those of matrices. Whole experts with SwiGLU are timed
forward, and forward with all gradients. A time is that of one call: the median of
bursts of 5 calls, for `--seconds`.

`hopper` are the kernels. `jax` is `jax.lax.ragged_dot` under whatever XLA_FLAGS say; on
request `jax_grouped_gemm` and `jax_fusion` are the same with XLA's options of these
names, and `tokamax`, for single matmuls, is that library's. `batched` is the yardstick:
one matmul with equally many rows per expert, as cuBLAS does it. `fp8` runs whole
experts on codes of rows and weights that were made beforehand, `fp8_wgrad` the same
with gradients of weights in fp8; `quantize` is how long the codes of the weights take.
Cases in float32 are rounded to TF32, or are multiplied in "highest" precision; `hopper`
and `fp8` have none. `--room` is how many rows the operand has for each row that a group
holds. Results are compared.
Writes benchmarks/results/grouped-<device>x1-<date>.json. With --tiny it also runs on a
machine without such a GPU: there the kernels are only lowered for one.
"""

import functools
import statistics
import sys
import time
import typing
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from benchmarks.common import arguments as common
from benchmarks.common import recording, timing
from jax_ep import experts
from jax_ep._experts import devices, grouped, kernels


class Case(typing.NamedTuple):
    """Sizes on one rank."""

    hidden: int
    inner: int
    groups: int
    rows: int  # in groups
    dtype: str = "bfloat16"
    precision: str = "default"  # of float32, as in `jax.default_matmul_precision`


CASES = {
    "mid": Case(2048, 1024, 16, 32768),
    "large-64": Case(7168, 2048, 16, 32768),
    "large-256": Case(7168, 2048, 64, 32768),
    "many": Case(7168, 2048, 128, 32768),
    "decode": Case(7168, 2048, 64, 1024),
    "mid, odd": Case(2040, 1021, 16, 32768),
    "mid, float32": Case(2048, 1024, 16, 32768, "float32"),
    "mid, highest": Case(2048, 1024, 16, 32768, "float32", "highest"),
    "large-64, float32": Case(7168, 2048, 16, 32768, "float32"),
    "large-64, highest": Case(7168, 2048, 16, 32768, "float32", "highest"),
}
SMALL = {
    "tiny": Case(128, 128, 2, 256),
    "tiny, highest": Case(128, 128, 2, 256, "float32", "highest"),
    "tiny, odd": Case(127, 61, 2, 256),
}
TINY = ("--cases", *SMALL, "--room", "1", "--seconds", "0")
WAYS = ("hopper", "portable", "jax", "batched", "fp8", "fp8_wgrad")
FP8 = ("fp8", "fp8_wgrad")
# `jax.lax.ragged_dot` with an option of XLA that is only on for that way.
FLAGS = {
    "jax_grouped_gemm": "xla_gpu_experimental_use_ragged_dot_grouped_gemm",
    "jax_fusion": "xla_gpu_experimental_use_ragged_dot_fusion",
}
# They need a library, or flags, that not everyone has.
MORE_WAYS = ("tokamax", *FLAGS)
# Ways in which XLA may multiply every row by every group's matrix.
DENSE = ("jax", *FLAGS)
CALLS = 5  # per time
IN_FLIGHT = 2  # calls, whose results need memory: gradients of large-256 are 6 GB
# Errors of results over the largest element: of products in bfloat16, of codes, and of
# products in float32 by precision.
BOUNDS = {"hopper": 0.02, "fp8": 0.25, "default": 5e-3, "highest": 1e-5}


# ---- Single matmuls -------------------------------------------------------------


class Tokamax:
    """tokamax's ragged dot, with the implementation that it chooses."""

    def fprop(self, rows, matrices, sizes, dtype):
        return self._general(rows, matrices, sizes, ((1,), (1,)), [0], dtype)

    def dgrad(self, cotangents, matrices, sizes, dtype):
        return self._general(cotangents, matrices, sizes, ((1,), (2,)), [0], dtype)

    def wgrad(self, rows, cotangents, sizes, dtype):
        return self._general(rows, cotangents, sizes, ((0,), (0,)), [], dtype)

    def _general(self, a, b, sizes, contracting, groups, dtype):
        import tokamax

        numbers = jax.lax.RaggedDotDimensionNumbers(
            (contracting, ((), ())), [0], groups
        )
        return tokamax.ragged_dot_general(a, b, sizes, numbers).astype(dtype)


def products(op, groups, precision):
    """Returns the ways of one matmul by name, functions of (a, b, sizes)."""
    hopper = grouped.HOPPER
    ragged = grouped.Ragged(None)

    def batched(x, w, _):
        x = x[: len(x) // groups * groups].reshape(groups, -1, x.shape[1])
        if op == "to matrices":
            w = w[: len(w) // groups * groups].reshape(groups, -1, w.shape[1])
            return jnp.einsum("gna,gnb->gab", x, w)
        return jnp.einsum("gna,gba->gnb" if op == "to rows" else "gna,gab->gnb", x, w)

    def by(way):
        if op == "to matrices":
            run = way.wgrad
        else:
            run = way.dgrad if op == "to rows" else way.fprop
        return lambda x, y, sizes: run(x, y, sizes, x.dtype)

    ways = {
        "hopper": by(hopper),
        "portable": by(grouped.portable(precision == "highest")),
        "jax": by(ragged),
        "batched": batched,
    }
    return ways | {"tokamax": by(Tokamax())} | dict.fromkeys(FLAGS, by(ragged))


class Random:
    """Draws operands on the device, all from one seed."""

    def __init__(self, rng):
        """`rng` draws the seed, and the sizes of groups."""
        self.rng = rng
        self.key = jax.random.key(int(rng.integers(2**31)))

    def normal(self, shape, scale=1.0, held=None, dtype="bfloat16"):
        """Draws values; rows from `held` on, in no group, are zero."""
        self.key, key = jax.random.split(self.key)
        values = jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
        return values if held is None else values.at[held:].set(0)

    def sizes(self, groups, held):
        """Draws the sizes of groups: every row's group is random."""
        found = self.rng.multinomial(held, np.full(groups, 1 / groups))
        return jnp.asarray(found, jnp.int32)


def product_operands(random, op, rows, a, b, groups, held, dtype):
    """Draws rows, matrices or other rows, and the sizes of groups."""
    left = random.normal((rows, a), held=held, dtype=dtype)
    if op == "to matrices":
        right = random.normal((rows, b), held=held, dtype=dtype)
    else:
        shape = (groups, b, a) if op == "to rows" else (groups, a, b)
        right = random.normal(shape, dtype=dtype)
    return left, right, random.sizes(groups, held)


# ---- Whole experts --------------------------------------------------------------


def batched_experts(groups):
    """Returns SwiGLU experts as batched matmuls with equally many rows per expert."""

    def run(rows, gate_up, down, _):
        x = rows[: len(rows) // groups * groups].reshape(groups, -1, rows.shape[1])
        both = jnp.einsum("gna,gacb->gncb", x, gate_up)
        h = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
        return jnp.einsum("gnb,gba->gna", h, down).reshape(-1, rows.shape[1])

    return run


class Coded(typing.NamedTuple):
    """Rows or weights: plain ones, which get gradients, and their codes."""

    plain: typing.Any
    codes: typing.Any


def fp8(rows, gate_up, down, sizes, wgrad="bf16"):
    """Calls `jax_ep.experts.fp8`; rows and gate_up are `Coded`."""
    none: typing.Any = None  # experts read no route
    d = jax_ep.Dispatched(
        tokens=rows.codes[0],
        scales=rows.codes[1],
        row_offsets=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)]),
        group_sizes=sizes,
        expert_counts=sizes,
        expert_ids=jnp.arange(len(sizes), dtype=jnp.int32),
        src_info=jnp.zeros((len(rows.plain), 3), jnp.int32),
        router_weights=jnp.ones(len(rows.plain), jnp.float32),
        num_dropped=jnp.zeros(1, jnp.int32),
        num_invalid=jnp.zeros(1, jnp.int32),
        route=none,
        grad_port=rows.plain,
        format="fp8_block128",
        rows_dtype="bfloat16",
    )
    given = d, gate_up.plain, down
    return experts.fp8(*given, quantized=gate_up.codes, wgrad=wgrad)


def with_gradients(run):
    """Returns a function that returns results, and gradients of rows and matrices."""

    def both(rows, gate_up, down, sizes):
        def of_plain(*plain):
            given = (
                Coded(one, each.codes) if isinstance(each, Coded) else one
                for one, each in zip(plain, (rows, gate_up), strict=False)
            )
            return run(*given, plain[2], sizes)

        firsts = (e.plain if isinstance(e, Coded) else e for e in (rows, gate_up))
        y, back = jax.vjp(of_plain, *firsts, down)
        return y, *back(y)

    return both


# ---- Measuring ------------------------------------------------------------------


def median_us(run, args, seconds):
    jax.block_until_ready(run(*args))
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        times.append(timing.seconds(lambda _: run(*args), CALLS, IN_FLIGHT))
    return statistics.median(times) * 1e6


def difference(found, wanted, held):
    """Returns the largest difference over the largest element, in `held` rows."""
    largest = 0.0
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        got, want = (x[:held].astype(jnp.float32) for x in (got, want))
        ratio = jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))
        largest = max(largest, float(ratio))
    return largest


def lowered(program, args):
    """Returns how many kernels a program has if it is lowered for an absent GPU."""
    with mock.patch.object(devices, "device_obstacle", return_value=None):
        # A new function, so that no earlier trace is reused.
        traced = jax.jit(lambda *given: program(*given)).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @ep_")


def leaves_out(name, names, sizes, room, dense_groups):
    """Whether a way is not to be timed."""
    blocks = sizes.hidden % 128 == 0 and sizes.inner % 128 == 0
    return (
        name not in names
        or (name in ("hopper", *FP8) and sizes.dtype != "bfloat16")
        or (name in FP8 and not blocks)
        or (name == "batched" and room > 1)
        or (name in DENSE and sizes.groups > dense_groups)
        or (name == "portable" and jax.default_backend() != "gpu")
    )


def timed(name, program, args, flops, seconds):
    """Times a way; returns the row's entries besides its place, and results or None."""
    if name in ("hopper", *FP8) and jax.default_backend() != "gpu":
        return {"kernels": lowered(program, args)}, None
    options = {FLAGS[name]: True} if name in FLAGS else None
    run = jax.jit(program, compiler_options=options)
    try:
        us = median_us(run, args, seconds)
        return {"us": us, "tflops": flops / us / 1e6}, run(*args)
    except (ImportError, NotImplementedError) as error:
        if name not in MORE_WAYS:
            raise
        return {"error": str(error).partition("\n")[0]}, None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return {"error": "out of memory"}, None
        if name not in MORE_WAYS:
            raise
        return {"error": str(error).partition("\n")[0]}, None


def compared(name, row, results, wanted, held):
    """Adds to `row` how far results are from `wanted`, and returns it."""
    if results is None or wanted is None:
        return row
    row["difference"] = difference(results, wanted, held)
    row["wrong"] = not row["difference"] < BOUNDS[name]
    return row


def compared_library(row, results, wanted, held):
    """Like `compared`, for ways of others: drops the time if the results are wrong."""
    if not compared("hopper", row, results, wanted, held).pop("wrong", False):
        return
    row["error"] = f"results differ by {row['difference']:.2f} of the largest"
    for name in ("us", "tflops"):
        row.pop(name)


def measure_products(case, room, random, names, dense_groups, seconds):
    """Yields the rows of single matmuls."""
    sizes = (CASES | SMALL)[case]
    hidden, inner, groups, held, dtype, precision = sizes
    if hidden % kernels.ALIGNED or inner % kernels.ALIGNED:
        return  # these are padded once for a whole layer
    shapes = {"gate and up": (hidden, 2 * inner), "down": (inner, hidden)}
    for matrix, (a, b) in shapes.items():
        for op in ("forward", "to rows", "to matrices"):
            one, other = (b, a) if op == "to rows" else (a, b)
            drawn = room * held, one, other, groups, held, dtype
            args = product_operands(random, op, *drawn)
            kept = groups if op == "to matrices" else held
            found = results = None
            for name, program in products(op, groups, precision).items():
                if leaves_out(name, names, sizes, room, dense_groups):
                    continue
                place = {"case": case, "matrix": matrix, "op": op, "way": name}
                place["room"] = room
                row, results = timed(name, program, args, 2 * held * a * b, seconds)
                if name in ("jax", "portable"):
                    compared("hopper", row, found, results, kept)
                elif name in MORE_WAYS:
                    compared_library(row, results, found, kept)
                found = results if name == "hopper" else found
                yield place | row
            # Freed before the next ones are made: large ones do not fit twice.
            del args, found, results


def padded(op, args):
    """Returns results of XLA's matmuls, of groups that are padded to the largest."""
    largest = -int(jnp.max(args[3])) // 128 * -128
    run = experts.Padded(largest)
    with jax.default_matmul_precision("highest"):
        return jax.jit(with_gradients(run) if op == "gradients" else run)(*args)


def measure_experts(case, room, random, names, dense_groups, seconds):
    """Yields the rows of whole experts, and of making codes of their weights."""
    of_case = (CASES | SMALL)[case]
    hidden, inner, groups, held, dtype, precision = of_case
    rows = random.normal((room * held, hidden), held=held, dtype=dtype)
    gate_up = random.normal((groups, hidden, 2, inner), hidden**-0.5, dtype=dtype)
    down = random.normal((groups, inner, hidden), inner**-0.5, dtype=dtype)
    sizes = random.sizes(groups, held)
    flops = 2 * 3 * held * hidden * inner
    ways = {
        "hopper": experts.hopper,
        "portable": experts.portable,
        "jax": experts.ragged_dot,
        "batched": batched_experts(groups),
    } | dict.fromkeys(FLAGS, experts.ragged_dot)
    coded: typing.Any = None
    if not all(leaves_out(name, names, of_case, room, dense_groups) for name in FP8):
        place = {"case": case, "matrix": "experts", "op": "quantize", "way": "fp8"}
        row, codes = timed("fp8", experts.quantize_weights, (gate_up, down), 0, seconds)
        row.pop("tflops", None)
        yield place | {"room": room} | row
        if codes is None:
            codes = jax.jit(experts.quantize_weights)(gate_up, down)
        of_rows = jax.jit(jax_ep.formats.quantize, static_argnums=1)
        coded = Coded(rows, of_rows(rows, "fp8_block128")), Coded(gate_up, codes)
        ways |= {"fp8": fp8, "fp8_wgrad": functools.partial(fp8, wgrad="fp8")}
    for op in ("forward", "gradients"):
        wanted = None
        if leaves_out("hopper", names, of_case, room, dense_groups):
            wanted = padded(op, (rows, gate_up, down, sizes))
        for name, run in ways.items():
            if leaves_out(name, names, of_case, room, dense_groups):
                continue
            if name == "fp8_wgrad" and op == "forward":
                continue  # as fp8
            given = (*(coded if name in FP8 else (rows, gate_up)), down, sizes)
            program, done = run, flops
            if op == "gradients":
                program, done = with_gradients(run), 3 * flops
            row, results = timed(name, program, given, done, seconds)
            if name == "hopper":
                wanted = results
            elif name in ("jax", "portable"):
                bound = "hopper" if dtype == "bfloat16" else precision
                compared(bound, row, wanted, results, held)
            elif name in FLAGS:
                compared_library(row, results, wanted, held)
            elif name in FP8:
                compared("fp8", row, results, wanted, held)
            del results
            place = {"case": case, "matrix": "experts", "op": op, "way": name}
            yield place | {"room": room} | row


def parse(arguments):
    parser = common.parser(__doc__)
    known = [*CASES, *SMALL]
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=known)
    parser.add_argument("--room", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=(*WAYS, *MORE_WAYS))
    parser.add_argument(
        "--what", nargs="+", default=PARTS, choices=PARTS, help="single or whole"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of a time, at least"
    )
    parser.add_argument(
        "--dense-groups", type=int, default=64, help="most groups for ragged_dot"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the operands")
    common.add_tiny(parser)
    return common.parsed(parser, arguments, TINY)


PARTS = {"products": measure_products, "experts": measure_experts}


def shown(row):
    """Returns a row's entries as they are printed."""
    return [f"{v:.4g}" if type(v) is float else v for v in row.values()]


def main(arguments=None):
    args = parse(arguments)
    if jax.default_backend() != "gpu" and not args.tiny:
        sys.exit("grouped.py: kernels need a Hopper GPU, got none; run it with --tiny")
    if jax.default_backend() == "gpu" and not kernels.built():
        sys.exit("grouped.py: this jax_ep has no kernels; build it with nvcc on PATH")
    random, rows = Random(np.random.default_rng(args.seed)), []
    for case in args.cases:
        for room in args.room:
            for part in args.what:
                how = (args.ways, args.dense_groups, args.seconds)
                with jax.default_matmul_precision((CASES | SMALL)[case].precision):
                    for row in PARTS[part](case, room, random, *how):
                        rows.append(row)
                        print(*shown(row))
    record = recording.head_here(
        "grouped",
        "layers.grouped",
        arguments,
        cases={case: (CASES | SMALL)[case]._asdict() for case in args.cases},
        results=rows,
    )
    recording.write(recording.of("grouped", record), record, args.results)
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
