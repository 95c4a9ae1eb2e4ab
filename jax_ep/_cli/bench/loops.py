"""Programs that call one operation many times, compiled, checked and timed.

A program is a loop around a body of unrolled calls, which XLA captures in a CUDA graph
where it can. Each call waits for the one before it. Two ways to say so:

* "barrier": an optimization barrier ties a call's ids to the outputs of the call
  before. XLA's GPU compiler drops barriers when everything is scheduled, so nothing
  runs between two calls.
* "data": a value that is always zero, but not to XLA, is added to the ids: one more
  small kernel a call. For operations that are slow anyway, and for XLA's CPU compiler,
  which drops barriers so early that it merges calls.

What comes back is a checksum over the calls' outputs.
"""

import concurrent.futures
import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ep._cli.bench import checks
from jax_ep._native import loader

COMPILER_THREADS = 8
_NEVER = 0xFFFFFFFF  # no checksum of one call: their elements have at most 16 bits


@dataclasses.dataclass
class Operation:
    """One operation on a rank's arrays, to be called in turn with several draws.

    `step(first, rest, shared)` returns arrays: all that must be computed. `draws` are
    its (first, rest) pairs, global arrays; `first` is the array that ties calls.
    `target` is the custom call to find once a call in the compiled program, or None;
    `product` an array of which something must make one in every call, or None.
    """

    step: Callable[..., list[jax.Array]]
    draws: list[tuple[jax.Array, Any]]
    shared: Any
    target: str | None = None
    product: jax.ShapeDtypeStruct | None = None


@dataclasses.dataclass
class Program:
    """A compiled program of `calls` calls and what it is made of."""

    run: Callable[[], jax.Array]
    calls: int
    unrolled: int
    iterations: int
    tie: str
    opcodes: dict[str, int]


def last_element(array):
    """The bits of the last element as uint32, cut to 16."""
    last = array.reshape(-1)[-1]
    bits = lax.bitcast_convert_type(last, f"uint{8 * last.dtype.itemsize}")
    return bits.astype(jnp.uint32) & jnp.uint32(0xFFFF)


def _checksum(arrays):
    return sum(last_element(array) for array in arrays)


def _add_nothing(array, outputs, never):
    hit = (_checksum(outputs) == never).astype(array.dtype)
    return array + hit


def _body(operation, unrolled, tie, draws, shared, never, total):
    # One trace for all calls.
    step = jax.jit(operation.step)
    outputs, parts = [total], []
    for call in range(unrolled):
        first, rest = draws[call % len(draws)]
        if tie == "barrier":
            first, outputs = lax.optimization_barrier((first, outputs))
        elif call > 0:
            first = _add_nothing(first, outputs, never)
        else:
            first = first + (total == never).astype(first.dtype)
        parts.append(outputs[0] if call == 0 else _checksum(outputs))
        outputs = step(first, rest, shared)
    return sum(parts) + _checksum(outputs)


def trace(mesh, operation, unrolled, iterations, tie):
    """The program, lowered, and its arguments."""

    def program(draws, shared, never):
        def body(_, total):
            return _body(operation, unrolled, tie, draws, shared, never[0], total)

        return lax.fori_loop(0, iterations, body, jnp.uint32(0))[None]

    mapped = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=(P("ep"), P("ep"), P()),
        out_specs=P("ep"),
        check_vma=False,
    )
    never = jnp.full((1,), _NEVER, jnp.uint32)
    arguments = (operation.draws, operation.shared, never)
    return jax.jit(mapped).lower(*arguments), arguments


def _opcodes(text):
    names = "fusion|copy|copy-start|custom-call|call|call-start|while|all-to-all"
    names += "|all-to-all-start|async-start"
    found = re.findall(rf" ({names})\(", text)
    return {name: found.count(name) for name in dict.fromkeys(found)}


_TYPES = {"bfloat16": "bf16", "float32": "f32"}
_WORK = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.*?) (?:fusion|custom-call)\(")


def times_made(text, product):
    """How many instructions that do work have such an array among their results.

    In any order of dimensions: some kernels transpose.
    """
    sizes = sorted(size for size in product.shape if size > 1)
    name, count = _TYPES[str(product.dtype)], 0
    for made in filter(None, map(_WORK.match, text.splitlines())):
        shapes = re.findall(rf"\b{name}\[([\d,]+)\]", made[1])
        found = (
            sorted(int(n) for n in shape.split(",") if n != "1") for shape in shapes
        )
        count += sizes in found
    return count


def compiling(mesh, operation, unrolled, iterations, tie="barrier"):
    """A function that compiles a program, so that several can at the same time.

    Takes the other tie where XLA merged or moved calls.
    """
    lowered, arguments = trace(mesh, operation, unrolled, iterations, tie)

    def finish():
        executable = lowered.compile()
        text = executable.as_text()
        if operation.target is not None:
            calls = text.count(f'custom_call_target="{operation.target}"')
            if calls != unrolled and tie == "barrier":
                return compiling(mesh, operation, unrolled, iterations, "data")()
            if calls != unrolled:
                raise RuntimeError(
                    f"{calls} calls of {operation.target} for {unrolled} in a program"
                )
        if operation.product is not None:
            made = times_made(text, operation.product)
            if made < unrolled:
                raise RuntimeError(
                    f"XLA does the work of {unrolled} calls {made} times"
                )
        return Program(
            run=lambda: executable(*arguments),
            calls=unrolled * iterations,
            unrolled=unrolled,
            iterations=iterations,
            tie=tie,
            opcodes=_opcodes(text),
        )

    return finish


def compile_all(finishers):
    """Finishes all of a dict of compilations at the same time."""
    with concurrent.futures.ThreadPoolExecutor(COMPILER_THREADS) as pool:
        futures = {name: pool.submit(finish) for name, finish in finishers.items()}
        return {name: future.result() for name, future in futures.items()}


@functools.cache
def last_elements(mesh):
    """`last_element` of every rank's part of a global array."""
    return checks.mapped(mesh, lambda array: last_element(array)[None])


def expected_checksum(program, last):
    """What `program` returns on every rank; `last` has each draw's `last_elements`."""
    sums = [np.asarray(each, np.uint64) for each in last]
    total = sum(sums[call % len(sums)] for call in range(program.unrolled))
    return (total * program.iterations).astype(np.uint32)


def launches():
    """(captured, not captured) calls of this process so far; replays do not count.

    Zeros where there is no module for GPUs, or an older one.
    """
    count = getattr(loader.cuda, "launch_counts", None)
    return count() if count else (0, 0)


def measure(program, repeats):
    """Microseconds a call: median, least and most of the repeats; and the checksum."""
    before = launches()
    checksum = np.asarray(jax.block_until_ready(program.run()))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(program.run())
        times.append((time.perf_counter() - start) / program.calls * 1e6)
    same = np.array_equal(checksum, np.asarray(result))
    captured, streamed = (
        now - then for now, then in zip(launches(), before, strict=True)
    )
    return {
        "captured": captured,
        "streamed": streamed,
        "us": statistics.median(times),
        "us_least": min(times),
        "us_most": max(times),
        "repeats": repeats,
        "calls": program.calls,
        "unrolled": program.unrolled,
        "tie": program.tie,
        "opcodes": program.opcodes,
    }, (checksum if same else None)
