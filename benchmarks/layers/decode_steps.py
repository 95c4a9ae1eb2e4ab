"""Makes the weights, steps and reads of decode.py, and compares their results."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.layers import grouped
from jax_ep import experts, formats
from jax_ep._experts import (
    devices,
    quantized,
)


class Sizes(typing.NamedTuple):
    """Sizes of the experts of one GPU, and how many of them a token chooses."""

    hidden: int
    inner: int
    groups: int
    top_k: int


FORMATS = ("bf16", "fp8_block128", "mxfp4")
# (the format of the weights, whether the rows are codes)
WAYS = {
    "bf16": ("bf16", False),
    "fp8": ("fp8_block128", True),
    "mxfp4": ("mxfp4", False),
    "mxfp4-fp8": ("mxfp4", True),
    "batched": ("bf16", False),
}
DRAWS = 4  # of few rows and their experts: a program has steps for each
WORDS = 8192  # per row, in the form "rows" of a read
STREAMS = 64  # in the form "streams"


# ---- Weights ------------------------------------------------------------------------


def random_weights(sizes, seed, index):
    """Draws gate_up and down in bfloat16, for the experts with numbers `index` [L]."""

    # One expert at a time, as below: for all at once XLA's temporaries would be many
    # times as large.
    def one(number):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        shapes = (sizes.hidden, 2, sizes.inner), (sizes.inner, sizes.hidden)
        return tuple(
            jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)
            for key, shape in zip(keys, shapes, strict=True)
        )

    return jax.lax.map(one, index)


def in_format(name, gate_up, down):
    """Returns a pair of matrices for "bf16", a `QuantizedWeights` for other formats."""
    if name == "bf16":
        return gate_up, down
    if name == "fp8_block128":  # a kernel makes its codes in one pass
        return experts.quantize_weights(gate_up, down, format=name)

    def one(matrices):
        given = (matrix[None] for matrix in matrices)
        found = experts.quantize_weights(*given, format=name)
        return jax.tree.map(lambda array: array[0], found)

    return jax.lax.map(one, (gate_up, down))


def make_weights(sizes, seed, mesh=None):
    """Returns weights by format. With a mesh, every rank has experts of its own."""
    ranks = mesh.size if mesh else 1
    index = np.arange(ranks * sizes.groups, dtype=np.int32)
    bf16 = functools.partial(random_weights, sizes, seed)

    def run(make, *operands):
        if mesh:
            spec = P("ep")
            make = jax.shard_map(make, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.block_until_ready(jax.jit(make)(*operands))

    matrices = run(bf16, index)
    others = {
        name: run(functools.partial(in_format, name), *matrices)
        for name in FORMATS
        if name != "bf16"
    }
    return {"bf16": matrices, **others}


def bytes_of_expert(weights):
    """Returns the bytes of weights that a step reads for an expert that is hit."""
    if not isinstance(weights, experts.QuantizedWeights):
        arrays = weights
    elif weights.gate_up_transposed is None:
        arrays = jax.tree.leaves(weights)
    else:
        arrays = [weights.gate_up_transposed, weights.down_transposed]
        if weights.format == "fp8_block128":  # tiles of other formats hold their scales
            arrays += [weights.gate_up_scales, weights.down_scales]
    return sum(array.nbytes for array in arrays) // len(arrays[0])


# ---- Steps --------------------------------------------------------------------------


class Draw(typing.NamedTuple):
    """Rows of one step, ordered by expert: as they are, and as codes."""

    values: typing.Any  # bfloat16 [N, H]
    codes: typing.Any
    scales: typing.Any
    sizes: typing.Any  # int32 [L]


def draw_sizes(rng, sizes, rows):
    """Draws how many rows each expert gets; a token's experts are distinct."""
    chosen = [
        rng.permutation(sizes.groups)[: sizes.top_k] for _ in range(rows // sizes.top_k)
    ]
    found = np.bincount(np.concatenate(chosen), minlength=sizes.groups)
    return found.astype(np.int32)


def make_draws(random, sizes, rows, count):
    to_codes = jax.jit(lambda values: formats.quantize(values, "fp8_block128"))
    draws = []
    for _ in range(count):
        values = random.normal((rows, sizes.hidden))
        group_sizes = jnp.asarray(draw_sizes(random.rng, sizes, rows))
        draws.append(Draw(values, *to_codes(values), group_sizes))
    return draws


def dispatched(draw, coded):
    """Returns a draw as if a dispatch had returned it."""
    none: typing.Any = None  # experts read no route
    count, sizes = draw.values.shape[0], draw.sizes
    return jax_ep.Dispatched(
        tokens=draw.codes if coded else draw.values,
        scales=draw.scales if coded else None,
        row_offsets=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes)]),
        group_sizes=sizes,
        expert_counts=sizes,
        expert_ids=jnp.arange(len(sizes), dtype=jnp.int32),
        src_info=jnp.zeros((count, 3), jnp.int32),
        router_weights=jnp.ones(count, jnp.float32),
        num_dropped=jnp.zeros(1, jnp.int32),
        num_invalid=jnp.zeros(1, jnp.int32),
        route=none,
        grad_port=None,
        format="fp8_block128" if coded else "bf16",
        rows_dtype="bfloat16",
    )


def plain_experts():
    """Returns the kernels, or what replaces them where they do not run."""
    missing = devices.device_obstacle() is not None
    return experts.ragged_dot if missing else experts.hopper


def run_way(way, draw, weights):
    """Returns the experts' output `[N, H]` for one step."""
    name, coded = WAYS[way]
    if way == "batched":
        run = grouped.batched_experts(weights[0].shape[0])
        return run(draw.values, *weights, None)
    if name == "bf16":
        return plain_experts()(draw.values, *weights, draw.sizes)
    return experts.fp8(dispatched(draw, coded), weights, None)


def in_turn(step):
    """Returns a function of (draws, operand) that runs `step` on each draw in turn."""

    def run(draws, operand):
        found = []
        for draw in draws:
            if found:
                # Otherwise XLA would merge operations of several steps.
                given = draw, operand, found[-1]
                draw, operand, found[-1] = jax.lax.optimization_barrier(given)
            found.append(step(draw, operand))
        return found

    return run


class Repeated:
    """A program whose results take the places of those of the call before.

    So its buffers stay where they are, as in a decode loop whose state is donated. If
    they moved, XLA would update its CUDA graphs before every call.
    """

    def __init__(self, function, *operands, sharding=None):
        self._operands = operands
        shapes = jax.eval_shape(function, *operands)
        self.found = [
            jnp.zeros(each.shape, each.dtype, device=sharding) for each in shapes
        ]

        def program(before, *operands):
            del before
            return function(*operands), jnp.int32(0)

        self._program = jax.jit(program, donate_argnums=0, keep_unused=True)

    def __call__(self, _):
        """Calls it with any number of a call. The result says when it has run."""
        self.found, ended = self._program(self.found, *self._operands)
        return ended


# ---- The limit ----------------------------------------------------------------------


def rounded(count):
    """Rounds to a number of words that both forms of `read` can take."""
    unit = WORDS * STREAMS
    return max(1, round(count / unit)) * unit


def make_words(count):
    """Returns int32 0, 1, ..., as many as the largest read takes."""
    return jax.jit(lambda: jax.lax.iota(jnp.int32, rounded(count)))()


def largest_of_rows(words, start, count):
    """Reads by one reduction of each row of `WORDS`."""
    part = jax.lax.slice_in_dim(words, start, start + count)
    return jnp.max(part.reshape(-1, WORDS), axis=1)


def largest_of_streams(words, start, count):
    """Reads by one elementwise operation on `STREAMS` parts, side by side."""
    size = count // STREAMS
    ends = range(start, start + count, size)
    parts = [jax.lax.slice_in_dim(words, at, at + size) for at in ends]
    return functools.reduce(jnp.maximum, parts)


READS = {"rows": largest_of_rows, "streams": largest_of_streams}


def reading(how, words, count, times):
    """Returns a program that reads `count` words `times` times.

    They are at either end of `words`, in turn.
    """
    starts = sorted({0, len(words) - count})
    parts = [
        functools.partial(READS[how], start=start, count=count) for start in starts
    ]
    # A draw has no arrays, but says which part to read.
    draws = [jax.tree_util.Partial(parts[i % len(parts)]) for i in range(times)]
    return Repeated(in_turn(lambda draw, words: draw(words)), draws, words)


def read_wrongly(how, found, count):
    """Whether a read from the start has a wrong result."""
    if how == "rows":
        want = np.arange(WORDS - 1, count, WORDS)
    else:
        want = np.arange(count - count // STREAMS, count)
    return not np.array_equal(found, want)


# ---- Comparing ----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="coded")
def wanted(weights, expert, row, coded):
    """Computes one expert's output for a row `[H]`, in float32 from the same codes."""
    if isinstance(weights, experts.QuantizedWeights):
        weights = weights.canonical()
    own = jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, expert, 0), weights
    )
    if isinstance(own, experts.QuantizedWeights):
        own = [quantized.dequantize(own, which) for which in ("gate_up", "down")]
    gate_up, down = (matrix[0].astype(jnp.float32) for matrix in own)
    dot = functools.partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)

    def given(values):
        if not coded:
            return values.astype(jnp.bfloat16).astype(jnp.float32)
        codes = formats.quantize(values, "fp8_block128")
        return formats.dequantize(*codes, "fp8_block128", dtype="float32")

    both = dot(given(row[None]), gate_up.reshape(gate_up.shape[0], -1))
    gate, up = jnp.split(both, 2, axis=1)
    return dot(given(jax.nn.silu(gate) * up), down)[0]


def distance(found, want):
    """Returns the largest norm of a row's difference over that of `want`."""
    found, want = (np.asarray(each, np.float64) for each in (found, want))
    return float(
        np.max(np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1))
    )


def difference(way, outs, draws, weights):
    """Returns the largest distance of some rows of each draw from what they should be.

    These are the first, the last, and the first of the largest group.
    """
    largest = []
    for out, draw in zip(outs, draws, strict=True):
        sizes, count = np.asarray(draw.sizes), len(draw.values)
        if way == "batched":
            sizes = np.full(len(sizes), count // len(sizes))
        group = np.repeat(np.arange(len(sizes)), sizes)
        sample = {0, len(group) - 1, int(np.sum(sizes[: sizes.argmax()]))}
        for at in sorted(sample):
            given = weights, group[at], draw.values[at]
            want = wanted(*given, coded=WAYS[way][1])
            largest.append(distance(out[at], want))
    return float(np.max(largest))  # NaN stays
