"""Weights, steps, reads and comparisons of decode.py."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.layers import grouped
from jax_ep import experts, formats
from jax_ep._experts import quantized, select


class Sizes(typing.NamedTuple):
    """Of the experts of one GPU, and of a token's choice."""

    hidden: int
    inner: int
    groups: int
    top_k: int


FORMATS = ("bf16", "fp8_block128", "mxfp4")
# By way, the format of its weights, and whether its rows are codes.
WAYS = {
    "bf16": ("bf16", False),
    "fp8": ("fp8_block128", True),
    "mxfp4": ("mxfp4", False),
    "mxfp4-fp8": ("mxfp4", True),
    "batched": ("bf16", False),
}
DRAWS = 4  # of rows and their experts; the steps of a program
WORDS = 8192  # in a row of a read
STREAMS = 64  # of the other form


# ---- Weights ------------------------------------------------------------------------


def random_weights(sizes, seed, index):
    """gate_up and down in bfloat16, of the experts that `index` [L] numbers."""

    # By expert, as below: XLA's values on the way to all would be many times as large.
    def one(number):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        shapes = (sizes.hidden, 2, sizes.inner), (sizes.inner, sizes.hidden)
        return tuple(
            jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[0] ** -0.5)
            for key, shape in zip(keys, shapes, strict=True)
        )

    return jax.lax.map(one, index)


def in_format(name, gate_up, down):
    """Weights of "bf16" are a pair of matrices, others a `QuantizedWeights`."""
    if name == "bf16":
        return gate_up, down
    if name == "fp8_block128":  # which a kernel makes in one pass
        return experts.quantize_weights(gate_up, down, format=name)

    def one(matrices):
        given = (matrix[None] for matrix in matrices)
        found = experts.quantize_weights(*given, format=name)
        return jax.tree.map(lambda array: array[0], found)

    return jax.lax.map(one, (gate_up, down))


def make_weights(sizes, seed, mesh=None):
    """By format; with a mesh each rank's own."""
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
    """What a step reads of the weights of an expert that is hit."""
    if not isinstance(weights, experts.QuantizedWeights):
        arrays = weights
    elif weights.gate_up_turned is None:
        arrays = jax.tree.leaves(weights)
    else:
        arrays = [weights.gate_up_turned, weights.down_turned]
        if weights.format == "fp8_block128":  # other tiles hold their scales
            arrays += [weights.gate_up_scales, weights.down_scales]
    return sum(array.nbytes for array in arrays) // len(arrays[0])


# ---- Steps --------------------------------------------------------------------------


class Draw(typing.NamedTuple):
    """Rows of one step by expert, as they are and as codes."""

    values: typing.Any  # bfloat16 [N, H]
    codes: typing.Any
    scales: typing.Any
    sizes: typing.Any  # int32 [L]


def draw_sizes(rng, sizes, rows):
    """Rows of each expert; a token's experts are distinct."""
    chosen = [
        rng.permutation(sizes.groups)[: sizes.top_k] for _ in range(rows // sizes.top_k)
    ]
    found = np.bincount(np.concatenate(chosen), minlength=sizes.groups)
    return found.astype(np.int32)


def make_draws(random, sizes, rows):
    to_codes = jax.jit(lambda values: formats.quantize(values, "fp8_block128"))
    draws = []
    for _ in range(DRAWS):
        values = random.normal((rows, sizes.hidden))
        group_sizes = jnp.asarray(draw_sizes(random.rng, sizes, rows))
        draws.append(Draw(values, *to_codes(values), group_sizes))
    return draws


def dispatched(draw, coded):
    """A draw as if a dispatch had brought it."""
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
    """The kernels, or what replaces them where there are none."""
    missing = select.device_obstacle() is not None
    return experts.ragged_dot if missing else experts.hopper


def run_way(way, draw, weights):
    """`[N, H]` of a step."""
    name, coded = WAYS[way]
    if way == "batched":
        run = grouped.batched_experts(weights[0].shape[0])
        return run(draw.values, *weights, None)
    if name == "bf16":
        return plain_experts()(draw.values, *weights, draw.sizes)
    return experts.fp8(dispatched(draw, coded), weights, None)


def in_turn(step):
    """A function of (draws, operand) that returns what `step` makes of each draw."""

    def run(draws, operand):
        found = []
        for draw in draws:
            if found:
                # One after the other: XLA would merge small operations of several.
                draw, found[-1] = jax.lax.optimization_barrier((draw, found[-1]))
            found.append(step(draw, operand))
        return found

    return run


# ---- The limit ----------------------------------------------------------------------


def rounded(count):
    """A number of words that both forms of `read` take."""
    unit = WORDS * STREAMS
    return max(1, round(count / unit)) * unit


def make_words(count):
    """int32 0, 1, ...: as many as the largest read takes."""
    return jax.jit(lambda: jax.lax.iota(jnp.int32, rounded(count)))()


def largest_of_rows(words, start, count):
    """One reduction, of each row of `WORDS`."""
    part = jax.lax.slice_in_dim(words, start, start + count)
    return jnp.max(part.reshape(-1, WORDS), axis=1)


def largest_of_streams(words, start, count):
    """One elementwise operation on `STREAMS` parts, side by side."""
    size = count // STREAMS
    ends = range(start, start + count, size)
    parts = [jax.lax.slice_in_dim(words, at, at + size) for at in ends]
    return functools.reduce(jnp.maximum, parts)


READS = {"rows": largest_of_rows, "streams": largest_of_streams}


def reading(how, words, count):
    """A function of a call's number: reads `count` words from either end in turn."""
    starts = sorted({0, len(words) - count})
    programs = [
        jax.jit(functools.partial(READS[how], start=start, count=count))
        for start in starts
    ]
    return lambda call: programs[call % len(programs)](words)


def read_wrongly(how, found, count):
    """Whether a read from the start missed something."""
    if how == "rows":
        want = np.arange(WORDS - 1, count, WORDS)
    else:
        want = np.arange(count - count // STREAMS, count)
    return not np.array_equal(found, want)


# ---- Comparing ----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="coded")
def wanted(weights, expert, row, coded):
    """What one expert makes of a row `[H]`, in float32 from the same codes."""
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
    """The norm of the difference, of that of `want`; of rows the largest."""
    found, want = (np.asarray(each, np.float64) for each in (found, want))
    return float(
        np.max(np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1))
    )


def difference(way, outs, draws, weights):
    """Of some rows of each draw: the first, the last, and one of the largest group."""
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
