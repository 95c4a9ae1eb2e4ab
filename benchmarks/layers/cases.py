"""The inputs, programs, comparisons and times of layer.py's workers."""

import collections
import dataclasses
import functools
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.layers import kinds
from jax_ep._cli.bench import routings

DRAWS = 2  # token arrays, each with a routing of its own, that calls take in turn
PASSES = ("forward", "both")
_GROUP_MULTIPLE = 128
# Of the largest element. Sums round in other places; fp8 tokens have 3 bits.
TOLERANCES = {"bf16": 0.03, "fp8_block128": 0.15}
ROWS = P("ep")
SPECS = {"router": P(), "gate_up": P("ep"), "down": P("ep")}


@dataclasses.dataclass
class Case:
    """One size of layer: global arrays, and what their routing needs."""

    mesh: Mesh
    sizes: dict  # hidden, inner, experts, top_k, tokens a rank
    params: dict
    tokens: list[jax.Array]
    cotangent: jax.Array
    capacity: int  # rows of the fullest rank, and some more
    largest: int  # rows of the fullest expert, rounded up


def sharded_normal(mesh, key, shape, spec=ROWS, scale=1.0):
    """Random bfloat16, made where it belongs."""
    make = jax.jit(
        lambda key: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(scale),
        out_shardings=NamedSharding(mesh, spec),
    )
    return make(key)


def make_case(mesh, sizes, seed):
    """Random tokens and parameters; the router's own choices are the routing."""
    hidden, inner, experts = sizes["hidden"], sizes["inner"], sizes["experts"]
    keys = iter(jax.random.split(jax.random.key(seed), 4 + DRAWS))
    normal = functools.partial(sharded_normal, mesh)
    params = {
        "router": normal(next(keys), (hidden, experts), P(), hidden**-0.5),
        "gate_up": normal(
            next(keys), (experts, hidden, 2, inner), P("ep"), hidden**-0.5
        ),
        "down": normal(next(keys), (experts, inner, hidden), P("ep"), inner**-0.5),
    }
    shape = (mesh.size * sizes["tokens"], hidden)
    cotangent = normal(next(keys), shape, P("ep"))
    tokens = [normal(next(keys), shape, P("ep")) for _ in range(DRAWS)]

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
    """int32 [experts] of the first tokens, global: what each rank's experts get."""

    @jax.jit
    def count(tokens, router):
        ids = kinds.route(tokens, router, case.sizes["top_k"]).ids
        experts = jnp.arange(case.sizes["experts"])
        return jnp.sum(ids.reshape(-1, 1) == experts, axis=0, dtype=jnp.int32)

    counts = count(case.tokens[0], case.params["router"])
    return jax.device_put(counts, NamedSharding(case.mesh, P("ep")))


def compiling(case, layer, *operands):
    """By pass, functions that compile `layer` on the case's global arrays.

    "forward" returns what the layer does; "both" that and every gradient, of float
    outputs with random cotangents. `operands` are what the layer takes besides, arrays
    of floats before all else, which may be pytrees.
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
        return lambda tokens: executable(*before, tokens, case.params, *operands)

    return {
        "forward": functools.partial(finish, forward, ()),
        "both": functools.partial(finish, backward, (cotangents,)),
    }


def _is_float(x):
    """Whether it is an array of floats: no other array, and no pytree of several."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _split(outputs):
    """Floats, and the rest."""
    floats = [_is_float(x) for x in outputs]
    return tuple(x for x, f in zip(outputs, floats, strict=True) if f), [
        x for x, f in zip(outputs, floats, strict=True) if not f
    ]


def _cotangent(case, output):
    if output.shape == case.cotangent.shape and output.dtype == case.cotangent.dtype:
        return case.cotangent
    key = jax.random.key(len(output.shape))
    make = jax.jit(
        lambda key: jax.random.normal(key, output.shape, output.dtype),
        out_shardings=NamedSharding(case.mesh, P("ep")),
    )
    return make(key)


@jax.jit
def _largest_error(got, want, skip):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    skip = skip.reshape(-1, *[1] * (got.ndim - 1))
    error = jnp.where(skip, 0, jnp.abs(got - want))
    # A NaN must not pass for a small error.
    return jnp.max(jnp.where(jnp.isnan(error), jnp.inf, error)) / jnp.max(jnp.abs(want))


def errors(got, want):
    """Largest error of y and of each gradient over the largest element, by name.

    `got` and `want` are of "both"; tokens that lost a row are left out of what is by
    token. Where others lost one than are wanted to, so are the parameters, whose
    gradients are sums of all tokens'.
    """
    (y, dropped), (tokens, params) = got
    (want_y, want_dropped), (want_tokens, want_params) = want
    found = {
        "y": _largest_error(y, want_y, dropped),
        "d tokens": _largest_error(tokens, want_tokens, dropped),
    }
    none = jnp.zeros(1, bool)
    alike = bool((dropped == want_dropped).all())
    for name in sorted(params) if alike else ():
        found[f"d {name}"] = _largest_error(params[name], want_params[name], none)
    return {name: float(error) for name, error in found.items()}


def measure(case, run, milliseconds, repeats):
    """Milliseconds a call: median, least and most of the repeats."""
    jax.block_until_ready([run(tokens) for tokens in case.tokens])
    start = time.perf_counter()
    jax.block_until_ready(run(case.tokens[0]))
    once = time.perf_counter() - start
    calls = max(2, math.ceil(milliseconds / 1e3 / once))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        _call(run, case.tokens, calls)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return {
        "ms": statistics.median(times),
        "ms_least": min(times),
        "ms_most": max(times),
        "calls": calls,
        "repeats": repeats,
    }


def _call(run, draws, calls):
    """Calls enqueued ahead, so that the host's work hides behind the device's.

    At most two are unfinished: a call's gradients are as large as the parameters.
    """
    running = collections.deque()
    for call in range(calls):
        running.append(run(draws[call % len(draws)]))
        if len(running) > 2:
            jax.block_until_ready(running.popleft())
    jax.block_until_ready(list(running))
