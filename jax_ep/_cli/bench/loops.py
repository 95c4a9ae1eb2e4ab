"""Programs that call one operation many times, compiled, checked and timed.

A program is a loop around a body of unrolled calls, which XLA captures in a CUDA graph
if it can. Each call waits for the one before it. There are two ways to express that:

* "barrier": an optimization barrier ties a call's ids to the outputs of the previous
  call. XLA's GPU compiler drops barriers once everything is scheduled, so nothing runs
  between two calls.
* "data": a value that is always zero, which XLA cannot know, is added to the ids. This
  costs one small kernel per call. It serves operations that are slow anyway, and XLA's
  CPU compiler, which drops barriers so early that it merges calls.

A program returns a checksum over its calls' outputs.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_ep._cli.bench import checks
from jax_ep._native import loader

_COMPILER_THREADS = 8
_NEVER = 0xFFFFFFFF  # no call has this checksum, because elements are cut to 16 bits


@dataclasses.dataclass
class Operation:
    """One operation on one rank's arrays, to be called in turn with several draws.

    Attributes:
        step: a function of (first, rest, shared) that returns the arrays that must be
            computed.
        draws: pairs (first, rest) of global arrays; `first` ties the calls.
        shared: global arrays, the same for every call.
        target: a custom call that the compiled program must have once per call.
        product: shape and dtype of an array that the program must make once per call.
    """

    step: Callable[..., list[jax.Array]]
    draws: list[tuple[jax.Array, Any]]
    shared: Any
    target: str | None = None
    product: jax.ShapeDtypeStruct | None = None


@dataclasses.dataclass
class Program:
    """A compiled program of `calls` calls, and facts about it."""

    run: Callable[[], jax.Array]
    calls: int
    unrolled: int
    iterations: int
    tie: str
    opcodes: dict[str, int]


def last_element(array: jax.Array) -> jax.Array:
    """Returns the lowest 16 bits of the last element, as uint32."""
    last = array.reshape(-1)[-1]
    bits = lax.bitcast_convert_type(last, f"uint{8 * last.dtype.itemsize}")
    return bits.astype(jnp.uint32) & jnp.uint32(0xFFFF)


def _checksum(arrays: Sequence[jax.Array]) -> Any:
    return sum(last_element(array) for array in arrays)


def _add_nothing(array: jax.Array, outputs: Any, never: jax.Array) -> jax.Array:
    hit = (_checksum(outputs) == never).astype(array.dtype)
    return array + hit


def _body(
    operation: Operation,
    unrolled: int,
    tie: str,
    draws: Any,
    shared: Any,
    never: jax.Array,
    total: jax.Array,
) -> Any:
    # Jitted, so that all calls share one trace.
    step = jax.jit(operation.step)
    outputs: Any = [total]
    parts = []
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


def trace(
    mesh: Mesh, operation: Operation, unrolled: int, iterations: int, tie: str
) -> tuple[Any, Any]:
    """Returns the lowered program and its arguments."""

    def program(draws: Any, shared: Any, never: Any) -> Any:
        def body(_: Any, total: Any) -> Any:
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


def _opcodes(text: str) -> dict[str, int]:
    names = "fusion|copy|copy-start|custom-call|call|call-start|while|all-to-all"
    names += "|all-to-all-start|async-start"
    found = re.findall(rf" ({names})\(", text)
    return {name: found.count(name) for name in dict.fromkeys(found)}


_TYPES = {"bfloat16": "bf16", "float32": "f32"}
_WORK = re.compile(r"^\s*(?:ROOT )?%?\S+ = (.*?) (?:fusion|custom-call)\(")


def times_made(text: str, product: jax.ShapeDtypeStruct) -> int:
    """Counts the fusions and custom calls of a program that make such an array.

    The order of dimensions does not matter, since some kernels transpose.
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


def compiling(
    mesh: Mesh,
    operation: Operation,
    unrolled: int,
    iterations: int,
    tie: str = "barrier",
) -> Callable[[], Program]:
    """Returns a function that compiles a program, so that several compile in parallel.

    It uses the other tie if XLA has merged or moved calls.
    """
    lowered, arguments = trace(mesh, operation, unrolled, iterations, tie)

    def finish() -> Program:
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


def compile_all(finishers: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Compiles in parallel; returns each program, or its exception, by key.

    `raised` raises such an exception, so that it only affects one program.
    """

    def finish(function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # of one program of many
            return error

    with concurrent.futures.ThreadPoolExecutor(_COMPILER_THREADS) as pool:
        return dict(zip(finishers, pool.map(finish, finishers.values()), strict=True))


def raised(program: Any) -> Any:
    """Returns `program`; if it is an exception, raises it."""
    if isinstance(program, Exception):
        raise program
    return program


@functools.cache
def last_elements(mesh: Mesh) -> Callable[..., Any]:
    """Returns a function: `last_element` of every rank's part of a global array."""
    return checks.mapped(mesh, lambda array: last_element(array)[None])


def expected_checksum(program: Program, last: Sequence[Any]) -> np.ndarray:
    """Returns what `program` must return on every rank.

    `last` has the `last_elements` of each draw.
    """
    sums = [np.asarray(each, np.uint64) for each in last]
    total = sum(sums[call % len(sums)] for call in range(program.unrolled))
    return np.asarray(total * program.iterations).astype(np.uint32)


def sizes(spec: dict[str, Any], unrolled: int, us: float) -> tuple[int, int]:
    """Returns calls per loop body, and iterations, for calls that take `us` each.

    The program takes the specification's milliseconds, so that its start is negligible.
    `unrolled` is the default number of calls in the body.
    """
    unrolled = spec["unrolled"] or unrolled
    return unrolled, max(1, math.ceil(spec["milliseconds"] * 1e3 / us / unrolled))


def _launches() -> tuple[int, int]:
    """Returns this process's (captured, not captured) calls; replays do not count.

    Returns zeros if there is no module for GPUs, or an older one.
    """
    count = getattr(loader.cuda, "launch_counts", None)
    return count() if count else (0, 0)


def spread(unit: str, times: Sequence[float]) -> dict[str, float]:
    """Returns median, least and most of repeats, under keys that begin with `unit`."""
    return {
        unit: statistics.median(times),
        f"{unit}_least": min(times),
        f"{unit}_most": max(times),
        "repeats": len(times),
    }


def measure(
    program: Program, repeats: int, last: Sequence[Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns microseconds per call, and what is wrong with the checksum, or {}.

    Args:
        program: the program, which runs once more than `repeats`.
        repeats: how often to time it.
        last: each draw's `last_elements`, which determine the checksum. Without them
            the first and the last run only have to agree.
    """
    before = _launches()
    checksum = np.asarray(jax.block_until_ready(program.run()))
    times, result = [], checksum
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(program.run())
        times.append((time.perf_counter() - start) / program.calls * 1e6)
    right = np.array_equal(checksum, np.asarray(result))
    if last is not None:
        right = right and np.array_equal(checksum, expected_checksum(program, last))
    captured, streamed = (
        now - then for now, then in zip(_launches(), before, strict=True)
    )
    return {
        "captured": captured,
        "streamed": streamed,
        **spread("us", times),
        "calls": program.calls,
        "unrolled": program.unrolled,
        "tie": program.tie,
    }, ({} if right else {"checksum of the timed calls": 1})
