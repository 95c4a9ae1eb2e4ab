"""Makes inputs and programs for layer.py's workers, compares results and times them."""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.common import timing
from benchmarks.layers import kinds
from jax_ep._cli.bench import checks, loops, routings
from jax_ep._cli.bench.transports import normal

DRAWS = 2  # token arrays that calls take in turn, each with a routing of its own
PASSES = ("forward", "both")
MICROBATCHES = (1, 8)  # per step
_GROUP_MULTIPLE = 128
# Relative to the largest element. Sums round in other places, and elements of fp8
# tokens have 3 bits of mantissa.
TOLERANCES = {"bf16": 0.03, "fp8_block128": 0.15}
SPECS = {"router": P(), "gate_up": P("ep"), "down": P("ep")}


@dataclasses.dataclass
class Case:
    """One size of layer: its global arrays, and the rows that their routing needs."""

    mesh: Mesh
    sizes: dict  # hidden, inner, experts, top_k, tokens per rank
    params: dict
    tokens: list[jax.Array]
    cotangent: jax.Array
    capacity: int  # rows of the fullest rank, and some more
    largest: int  # rows of the fullest expert, rounded up


def make_case(mesh, sizes, seed):
    """Draws random tokens and parameters; the router's own choices are the routing."""
    hidden, inner, experts = sizes["hidden"], sizes["inner"], sizes["experts"]
    keys = iter(jax.random.split(jax.random.key(seed), 4 + DRAWS))

    def param(name, fan_in, *shape):
        key, scale = next(keys), fan_in**-0.5
        return normal(mesh, key, shape, spec=SPECS[name], scale=scale)

    params = {
        "router": param("router", hidden, hidden, experts),
        "gate_up": param("gate_up", hidden, experts, hidden, 2, inner),
        "down": param("down", inner, experts, inner, hidden),
    }
    shape = (mesh.size * sizes["tokens"], hidden)
    cotangent = normal(mesh, next(keys), shape)
    tokens = [normal(mesh, next(keys), shape) for _ in range(DRAWS)]

    @functools.partial(jax.jit, static_argnums=2)
    def choose(tokens, router, top_k):
        return kinds.route(tokens, router, top_k).ids

    draws = [np.asarray(choose(t, params["router"], sizes["top_k"])) for t in tokens]
    capacity = routings.recv_capacity(
        draws, mesh.size, sizes["tokens"], sizes["top_k"], experts, "uniform"
    )
    largest = max(np.bincount(ids.reshape(-1)).max() for ids in draws)
    largest = math.ceil(largest / _GROUP_MULTIPLE) * _GROUP_MULTIPLE
    return Case(mesh, sizes, params, tokens, cotangent, capacity, largest)


def group_sizes(case):
    """Returns the rows that each expert gets of the first tokens: global int32 [E]."""

    @jax.jit
    def count(tokens, router):
        ids = kinds.route(tokens, router, case.sizes["top_k"]).ids
        experts = jnp.arange(case.sizes["experts"])
        return jnp.sum(ids.reshape(-1, 1) == experts, axis=0, dtype=jnp.int32)

    counts = count(case.tokens[0], case.params["router"])
    return jax.device_put(counts, NamedSharding(case.mesh, P("ep")))


def compiling(case, layer, *operands):
    """Returns, by pass, functions that compile `layer` on the case's global arrays.

    "forward" returns what the layer returns; "both" also returns every gradient, for
    random cotangents of the float outputs. `operands` are the layer's other arguments:
    first arrays of floats, then others, which may be pytrees. A compiled program takes
    tokens, and optionally operands that replace these.
    """
    mapped = jax.shard_map(
        layer,
        mesh=case.mesh,
        in_specs=(P("ep"), SPECS, *[P("ep")] * len(operands)),
        out_specs=P("ep"),
        check_vma=False,
    )

    def both(cotangents, tokens, params, *operands):
        floats = [x for x in operands if _is_float(x)]
        others = operands[len(floats) :]

        def main(tokens, params, *floats):
            return mapped(tokens, params, *floats, *others)

        out, back, rest = jax.vjp(
            lambda *args: _split(main(*args)), tokens, params, *floats, has_aux=True
        )
        return (*out, *rest), back(cotangents)

    first = (case.tokens[0], case.params, *operands)
    outputs, _ = _split(jax.eval_shape(mapped, *first))
    cotangents = tuple(_cotangent(case, each) for each in outputs)
    forward = jax.jit(mapped).lower(*first)
    backward = jax.jit(both).lower(cotangents, *first)

    def finish(lowered, before):
        executable = lowered.compile()

        def run(tokens, *others):
            return executable(*before, tokens, case.params, *(others or operands))

        stats = executable.memory_analysis()
        run.temp_bytes = None if stats is None else stats.temp_size_in_bytes
        return run

    return {
        "forward": functools.partial(finish, forward, ()),
        "both": functools.partial(finish, backward, (cotangents,)),
    }


def _is_float(x):
    """Whether `x` is an array of floats, not another array or a pytree of several."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _split(outputs):
    """Splits outputs into arrays of floats and the rest."""
    floats = [_is_float(x) for x in outputs]
    return tuple(x for x, f in zip(outputs, floats, strict=True) if f), [
        x for x, f in zip(outputs, floats, strict=True) if not f
    ]


def _cotangent(case, output):
    if output.shape == case.cotangent.shape and output.dtype == case.cotangent.dtype:
        return case.cotangent
    key = jax.random.key(len(output.shape))
    return normal(case.mesh, key, output.shape, output.dtype)


def errors(got, want):
    """Returns the largest errors of y and each gradient, over the largest element.

    `got` and `want` are what "both" returns. Arrays with a row per token are compared
    without the tokens that lost a row. If `got` and `want` lost rows of different
    tokens, the gradients of parameters are left out, since they are sums over all
    tokens.
    """
    (y, dropped), (tokens, params) = got
    (want_y, want_dropped), (want_tokens, want_params) = want
    found = {
        "y": checks.largest_error(y, want_y, dropped),
        "d tokens": checks.largest_error(tokens, want_tokens, dropped),
    }
    alike = bool((dropped == want_dropped).all())
    for name in sorted(params) if alike else ():
        found[f"d {name}"] = checks.largest_error(params[name], want_params[name])
    return found


def quantizing(case):
    """Returns a function that makes the weights' codes in every order kernels read."""
    quantize = functools.partial(jax_ep.experts.quantize_weights, backward=True)
    program = checks.mapped(case.mesh, quantize)
    return lambda: program(case.params["gate_up"], case.params["down"])


def quantized_bytes(case, codes):
    """Returns the bytes that a rank reads and writes to make codes of its weights."""
    arrays = jax.tree.leaves((case.params["gate_up"], case.params["down"], codes))
    return sum(array.nbytes for array in arrays) // case.mesh.size


def measure(case, run, milliseconds, repeats, in_flight=2):
    """Returns milliseconds per call: median, least and most of the repeats."""
    draws = case.tokens
    jax.block_until_ready([run(tokens) for tokens in draws])
    start = time.perf_counter()
    jax.block_until_ready(run(draws[0]))
    once = time.perf_counter() - start
    calls = max(2, math.ceil(milliseconds / 1e3 / once))

    # Few are in flight, since a call's gradients are as large as the parameters.
    def repeat():
        seconds = timing.seconds(lambda i: run(draws[i % len(draws)]), calls, in_flight)
        return seconds * 1e3

    times = [repeat() for _ in range(repeats)]
    return {**loops.spread("ms", times), "calls": calls}


def measure_step(case, run, quantize, microbatches, milliseconds, repeats):
    """Like `measure`, per step, which makes codes of the weights once for its calls.

    Without `quantize` a step is just its calls.
    """
    draws, codes = case.tokens, []

    def call(index):
        if quantize is not None and index % microbatches == 0:
            codes.clear()  # calls in flight keep the codes that they need
            codes.append(quantize())
        return run(draws[index % len(draws)], *codes)

    def repeat(steps):
        # One in flight: outputs are as large as the parameters, and the codes of two
        # steps may exist.
        return timing.seconds(call, steps * microbatches, 1) * microbatches

    repeat(1)
    steps = max(2, math.ceil(milliseconds / 1e3 / repeat(1)))
    times = [repeat(steps) * 1e3 for _ in range(repeats)]
    return {**loops.spread("ms", times), "steps": steps}
