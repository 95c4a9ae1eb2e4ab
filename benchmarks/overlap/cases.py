"""What runs beside an exchange, and how the two are arranged in a program.

Functions here take one rank's arrays; operands are global arrays.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from benchmarks.layers import experts
from benchmarks.overlap import report
from jax_ep._cli.bench import checks, loops, transports
from jax_ep._transport import p2p

# A "fitted" matmul takes so many times as long as the exchange, which could then hide.
_LONGER = 1.2
_HEAD = 128  # elements of an attention head
_NEVER = 0xFFFFFFFF  # no last element is this, since it has only 16 bits


def available(arrangement):
    """Whether this JAX can do it: "stream" puts custom calls on collectives' stream."""
    on_stream = report.OVERLAPS[arrangement] == "stream"
    return not on_stream or jax.__version_info__ >= p2p.STREAM_SINCE


@dataclasses.dataclass
class Beside:
    """Work independent of the exchange: `run` on each rank's part of `operands`."""

    name: str
    run: Callable[..., jax.Array]
    operands: tuple[jax.Array, ...]
    facts: dict[str, Any]


def _normal(mesh, seed, shape):
    return transports.normal(mesh, jax.random.key(seed), shape)


def matmul(mesh, size, rows=None, name="matmul"):
    """Multiplies bfloat16 [rows, size] by [size, size]."""
    rows = rows or size
    left = _normal(mesh, 1, (mesh.size * rows, size))
    right = _normal(mesh, 2, (mesh.size * size, size))
    return Beside(name, jnp.dot, (left, right), {"shape": [rows, size, size]})


def fitted_matmul(mesh, size, us, exchange_us):
    """Like `matmul`, which takes `us`, with enough rows for the exchange to hide."""
    rows = int(np.ceil(size * _LONGER * exchange_us / us / 128)) * 128
    return matmul(mesh, size, rows, "matmul_fitted")


def grouped(mesh, case, group_sizes, inner, way):
    """Makes the experts' first grouped matmul, on rows as a dispatch groups them.

    `way` is "ragged_dot" (`jax.lax.ragged_dot`) or "hopper" (the kernels).
    """
    hidden = case.config.hidden_size
    if not experts.available(way, {"hidden": hidden, "inner": inner}):
        raise ValueError(f"{way} is not for this device or these sizes")
    run = experts.grouped_matmul if way == "hopper" else lax.ragged_dot
    rows = _normal(mesh, 3, (case.expert_out.shape[0], hidden))
    weights = _normal(mesh, 4, (case.config.num_experts, hidden, inner))
    shape = [case.expert_out.shape[0] // mesh.size, hidden, inner]
    return Beside(way, run, (rows, weights, group_sizes), {"shape": shape})


def attention(mesh, case):
    """Makes causal attention on one sequence of a rank's tokens, with heads of 128."""
    tokens = case.config.max_tokens_per_rank
    heads = max(1, case.config.hidden_size // _HEAD)
    shape = (mesh.size, tokens, heads, _HEAD)
    operands = tuple(_normal(mesh, seed, shape) for seed in (6, 7, 8))
    # On GPUs XLA's own implementation would write the scores to memory.
    way = "cudnn" if jax.default_backend() == "gpu" else "xla"
    run = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=way
    )
    return Beside("attention", run, operands, {"shape": [*shape[1:]], "way": way})


def elementwise(mesh, megabytes):
    """Reads and writes an array of so many MB: bound by device memory."""
    rows = max(1, megabytes * 10**6 // 2 // 1024)
    array = _normal(mesh, 5, (mesh.size * rows, 1024))

    def run(array):
        return array * jnp.bfloat16(1.5) + jnp.bfloat16(1)

    return Beside("elementwise", run, (array,), {"megabytes": megabytes})


def once_us(mesh, beside):
    """Returns about how long one run of `beside` takes, by the host's clock."""

    def last(operands):
        result = lax.optimization_barrier(beside.run(*operands))
        return loops.last_element(result)[None]

    run = checks.mapped(mesh, last)
    jax.block_until_ready(run(beside.operands))
    start = time.perf_counter()
    jax.block_until_ready(run(beside.operands))
    return (time.perf_counter() - start) * 1e6


# Returns the operation's (whole call, first half, second half, order), where `order`
# puts the (first, rest, shared) of `Transport.operation` in order of the operands.
def _exchange(ep, op):
    if op == "dispatch":
        return (
            functools.partial(jax_ep.dispatch, ep),
            functools.partial(jax_ep.dispatch_async, ep),
            jax_ep.dispatch_wait,
            lambda ids, weights, tokens: (tokens, ids, weights),
        )
    return (
        functools.partial(jax_ep.combine, ep),
        functools.partial(jax_ep.combine_async, ep),
        jax_ep.combine_wait,
        lambda weights, route, rows: (rows, route, weights),
    )


def together(ep, op, arrangement, beside):
    """Returns a function of (operands, beside's operands) that returns both results.

    `beside` may be None, and so may `arrangement`, which stands for the exchange. Then
    its result is None.
    """
    whole, begin, end, _ = _exchange(ep, op)

    def run(operands, others):
        work = (lambda: None) if beside is None else (lambda: beside.run(*others))
        if arrangement is None:
            return None, work()
        if arrangement == "whole":
            return whole(*operands), work()
        pending = begin(*operands)
        other = work()
        if other is not None:
            # The second half comes after the other work.
            pending, other = lax.optimization_barrier((pending, other))
        return end(pending), other

    return run


def operation(transport, op, arrangement, beside):
    """Like `Transport.operation`, with `beside` in each call."""
    base = transport.operation(op)
    *_, order = _exchange(transport.ep, op)
    run = together(transport.ep, op, arrangement, beside)

    def step(first, rest, shared):
        # Tied to the call; otherwise XLA would do the work beside the calls only once.
        first, others = lax.optimization_barrier((first, shared["beside"]))
        result, other = run(order(first, rest, shared["exchange"]), others)
        outputs = []
        if result is not None:
            outputs.append(result.row_offsets if op == "dispatch" else result)
        if other is not None:
            # The barrier keeps XLA from computing only the element that is used.
            # Without an exchange nothing else uses `first`; if XLA dropped it, the
            # barrier above would tie nothing.
            for array in (lax.optimization_barrier(other), first):
                last = loops.last_element(array)
                # This is zero, but XLA cannot know.
                outputs.append((last == shared["never"]).astype(jnp.uint32))
        return outputs

    mesh = transport.case.mesh
    never = np.full(mesh.size, _NEVER, np.uint32)
    shared = {
        "exchange": base.shared,
        "beside": beside.operands if beside else (),
        "never": jax.device_put(never, NamedSharding(mesh, P("ep"))),
    }
    made = dataclasses.replace(base, step=step, shared=shared, target=None)
    if beside is not None and jax.default_backend() == "gpu":
        made.product = _product(mesh, beside)
    return made


def _product(mesh, beside):
    """Returns the shape and dtype of the work's result on a rank."""
    local = [(x.shape[0] // mesh.size, *x.shape[1:]) for x in beside.operands]
    operands = map(jax.ShapeDtypeStruct, local, [x.dtype for x in beside.operands])
    return jax.eval_shape(beside.run, *operands)
