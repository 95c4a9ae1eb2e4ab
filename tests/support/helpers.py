"""What the semantics tests share: meshes, inputs, runs of all ranks, bitwise checks.

Arrays of all ranks are lists in mesh order; on devices they are stacked on dim 0. All
of it also works if only some of the ranks belong to this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from support import oracle

TRANSPORT = os.environ.get("JAX_EP_TEST_TRANSPORT", "collective")
# Whether multiprocess_plugin.py runs the tests in several processes at once.
IN_PROCESSES = "JAX_EP_TEST_PROCESSES" in os.environ
# Fields of a config whose handle runs calls in halves.
HALVES = {"pending_calls": 2}
# Ranks per forced node of transport shmem.
NODE = os.environ.get("JAX_EP_TEST_RANKS_PER_NODE")
NO_EXPERT, INT_MIN, INT_MAX = -1, -(2**31), 2**31 - 1


def make_mesh(
    ranks: int | Mapping[str, int],
    *,
    kind: AxisType = AxisType.Auto,
    order: Sequence[int] | None = None,
) -> Mesh:
    """A mesh over the first devices; skips the test where there are too few.

    Args:
      ranks: size of the only axis "ep", or sizes by axis name.
      kind: type of every axis.
      order: order of the devices in the mesh, default ascending.
    """
    sizes = {"ep": ranks} if isinstance(ranks, int) else dict(ranks)
    count = int(np.prod(list(sizes.values())))
    found = jax.devices()
    if len(found) < count:
        pytest.skip(f"needs {count} devices, {len(found)} {found[0].platform} found")
    if IN_PROCESSES and len(found) != count:
        # Each process must have a part in each program.
        pytest.skip(f"of {count} devices, all {len(found)} of the processes needed")
    devices = np.array(found[:count])[list(order) if order else slice(None)]
    shape = tuple(sizes.values())
    return Mesh(devices.reshape(shape), tuple(sizes), axis_types=(kind,) * len(sizes))


def some_ranks(limit: int) -> int:
    """The largest of 1, 2, 4, 8 that is at most `limit` and has devices."""
    return max(r for r in (1, 2, 4, 8) if r <= min(limit, jax.device_count()))


def launching(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """What threads hold while they launch programs: on CPUs a lock.

    XLA may otherwise start a program on only some devices (docs/sharp_bits.md, "CPU
    devices"). Programs that have been launched still run side by side.
    """
    on_cpus = mesh.devices.flat[0].platform == "cpu"
    return threading.Lock() if on_cpus else contextlib.nullcontext()


def fit(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a mesh by axis name, the largest halved until the devices suffice."""
    fitted = dict(sizes)
    while np.prod(list(fitted.values())) > jax.device_count():
        largest = max(fitted, key=lambda name: fitted[name])
        fitted[largest] //= 2
    return fitted


def make_config(**changes: Any) -> jax_ep.EPConfig:
    """A small valid configuration with some fields changed."""
    fields: dict[str, Any] = {
        "num_experts": 24,
        "top_k": 3,
        "hidden_size": 16,
        "max_tokens_per_rank": 8,
    }
    return jax_ep.EPConfig(**(fields | on_nodes() | changes))


def on_nodes() -> dict[str, int]:
    """The field of a configuration that forces nodes, if the suite runs with any."""
    return {"ranks_per_node": int(NODE)} if NODE else {}


def init(mesh: Mesh, **changes: Any) -> Any:
    """A handle over axis "ep" of `mesh` that no other test shares."""
    return make_ep.__wrapped__(mesh, make_config(**changes))


@functools.cache
def make_ep(mesh: Mesh, config: jax_ep.EPConfig, axis: Any = "ep") -> Any:
    """A handle that tests with equal arguments share, together with its programs."""
    if TRANSPORT == "shmem" and config.skip_a2a:
        pytest.skip("shmem has no skip_a2a")  # test_errors.py sees it refused
    return jax_ep.init(mesh, axis, config, transport=TRANSPORT)


@dataclasses.dataclass
class Inputs:
    """One call's operands, a list entry for each rank."""

    tokens: list[np.ndarray]
    ids: list[np.ndarray]
    weights: list[np.ndarray] | None

    def pick(self, positions: Iterable[int]) -> Inputs:
        """The operands of the ranks at `positions`."""
        at = list(positions)
        return Inputs(
            [self.tokens[i] for i in at],
            [self.ids[i] for i in at],
            None if self.weights is None else [self.weights[i] for i in at],
        )


def any_bits(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    """Random bit patterns: NaNs with payloads, denormals, infinities, both zeros."""
    dtype = np.dtype(dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    info = np.iinfo(unsigned)
    return rng.integers(0, info.max, shape, unsigned, endpoint=True).view(dtype)


def normal(rng: np.random.Generator, shape: Any, dtype: Any, spread: int = 0):
    """Normal numbers, scaled by powers of two up to 2**spread both ways."""
    values = rng.standard_normal(shape)
    if spread:
        values = values * 2.0 ** rng.integers(-spread, spread, shape)
    return values.astype(np.float32).astype(dtype)


def make_ids(rng: np.random.Generator, config: Any, n: int, routing: str = "random"):
    """int32 [n, K] of one rank.

    Args:
      rng: source of randomness.
      config: the handle's configuration.
      n: tokens.
      routing: "random" (distinct experts, some -1), "full" (distinct), "duplicates",
        "invalid" (also ids outside [-1, E)), "none" (all -1), or
        "one:<expert>" (everything to that expert).
    """
    experts, shape = config.num_experts, (n, config.top_k)
    if routing == "none":
        return np.full(shape, NO_EXPERT, np.int32)
    if routing.startswith("one:"):
        return np.full(shape, int(routing[4:]), np.int32)
    if routing == "duplicates":
        return rng.integers(-1, experts, shape, np.int32)
    if routing == "invalid":
        pool = [*range(-1, experts), -2, experts, experts + 7, INT_MIN, INT_MAX]
        return rng.choice(np.array(pool, np.int32), shape)
    order = np.argsort(rng.random((n, experts)), axis=1)[:, : config.top_k]
    order = np.pad(order, ((0, 0), (0, shape[1] - order.shape[1])), constant_values=-1)
    if routing == "random":
        order = np.where(rng.random(shape) < 0.2, NO_EXPERT, order)
    return order.astype(np.int32)


def make_inputs(
    rng: np.random.Generator,
    config: Any,
    ranks: int,
    *,
    n: int | None = None,
    routing: str | Sequence[str] = "random",
    weighted: bool = True,
    fill: Callable[..., np.ndarray] = any_bits,
) -> Inputs:
    """Operands of all ranks; `routing` is one word or one for each rank."""
    n = config.max_tokens_per_rank if n is None else n
    words = [routing] * ranks if isinstance(routing, str) else list(routing)
    dtype, hidden = oracle.DTYPES[config.dtype], config.hidden_size
    tokens = [fill(rng, (n, hidden), dtype) for _ in words]
    ids = [make_ids(rng, config, n, word) for word in words]
    weights = [normal(rng, i.shape, np.float32) for i in ids] if weighted else None
    return Inputs(tokens, ids, weights)


def put(mesh: Mesh, ranks: Sequence[np.ndarray] | None, spec: P | None = None) -> Any:
    """The ranks' arrays stacked on dim 0, sharded over the mesh; None stays None."""
    if ranks is None:
        return None
    whole = np.concatenate(ranks)
    spec = P(tuple(mesh.axis_names)) if spec is None else spec
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def unstack(array: jax.Array, parts: int) -> dict[int, np.ndarray]:
    """Each part of dim 0 that this process holds, by its position."""
    size = array.shape[0] // parts
    if array.is_fully_addressable or IN_PROCESSES:
        return dict(enumerate(np.asarray(array).reshape(parts, size, *array.shape[1:])))
    assert size, "an empty array of several processes has no positions"
    shards = array.addressable_shards
    return {(s.index[0].start or 0) // size: np.asarray(s.data) for s in shards}


@functools.cache
def dispatch_fn(ep: Any, mesh: Mesh, spec: P, check_vma: bool = True) -> Any:
    """Compiled dispatch of all ranks, from global operands to a global Dispatched."""

    def dispatch(tokens: Any, ids: Any, weights: Any) -> Any:
        return jax_ep.dispatch(ep, tokens, ids, weights)

    return jax.jit(
        jax.shard_map(
            dispatch, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
    )


@functools.cache
def combine_fn(ep: Any, mesh: Mesh, spec: P, check_vma: bool = True) -> Any:
    """Compiled combine of all ranks on global operands."""

    def combine(rows: Any, route: Any, weights: Any, residual: Any) -> Any:
        return jax_ep.combine(
            ep, rows, route, router_weights=weights, residual=residual
        )

    return jax.jit(
        jax.shard_map(
            combine, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
    )


def run_dispatch(ep: Any, mesh: Mesh, inputs: Inputs, spec: P | None = None) -> Any:
    """Dispatch on all ranks; the result is a Dispatched of global arrays."""
    spec = P(tuple(mesh.axis_names)) if spec is None else spec
    operands = [
        put(mesh, part, spec) for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    return jax.block_until_ready(dispatch_fn(ep, mesh, spec)(*operands))


def run_combine(
    ep: Any,
    mesh: Mesh,
    route: Any,
    rows: Sequence[np.ndarray],
    weights: Sequence[np.ndarray] | None = None,
    residual: Sequence[np.ndarray] | None = None,
    spec: P | None = None,
) -> dict[int, np.ndarray]:
    """Combine on all ranks; returns each y by its rank's position."""
    spec = P(tuple(mesh.axis_names)) if spec is None else spec
    operands = (
        put(mesh, rows, spec),
        route,
        *(put(mesh, part, spec) for part in (weights, residual)),
    )
    return unstack(combine_fn(ep, mesh, spec)(*operands), len(rows))


def in_one_program(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles each call as a whole; arguments that are no arrays are constants.

    Outside of jit, every operation of JAX is compiled by itself.
    """

    def run(*given: Any) -> Any:
        leaves, tree = jax.tree.flatten(given)
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def program(arrays: list[jax.Array]) -> Any:
            whole = leaves.copy()
            for place, array in zip(places, arrays, strict=True):
                whole[place] = array
            return function(*jax.tree.unflatten(tree, whole))

        return jax.jit(program)([leaves[place] for place in places])

    return run


def assert_bits(actual: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Equal dtype, shape and bits: also the payloads of NaNs and the signs of zeros."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    view = f"uint{8 * actual.dtype.itemsize}"
    bits = [np.ascontiguousarray(a).view(view) for a in (actual, expected)]
    np.testing.assert_array_equal(*bits, err_msg=what)


def assert_sums(actual: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Equal bits, except that a NaN made by arithmetic may have any payload."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan, what)
    zero = np.zeros((), expected.dtype)
    assert_bits(np.where(nan, zero, actual), np.where(nan, zero, expected), what)


def assert_dispatched(
    config: Any, d: Any, inputs: Inputs, groups: Sequence[Sequence[int]] | None = None
) -> None:
    """Every output of dispatch equals the oracle's, bit for bit.

    Args:
      config: the handle's configuration.
      d: the global Dispatched.
      inputs: its operands.
      groups: positions of each independent EP group in rank order, default one group.
    """
    count = len(inputs.tokens)
    assert d.scales is None
    assert d.grad_port is None
    fields = {name: unstack(getattr(d, name), count) for name in oracle.FIELDS}
    for group in groups or [range(count)]:
        part = inputs.pick(group)
        expected = oracle.dispatch(config, part.tokens, part.ids, part.weights)
        for rank, position in enumerate(group):
            for name in oracle.FIELDS:
                if position not in fields[name]:
                    continue
                actual, wanted = fields[name][position], getattr(expected[rank], name)
                if name in oracle.ROW_FIELDS and not config.zero_tail:
                    end = expected[rank].row_offsets[-1]
                    assert actual.shape == wanted.shape
                    actual, wanted = actual[:end], wanted[:end]
                assert_bits(actual, wanted, f"{name} of position {position}")


def poisoned(outputs: Sequence[Any], rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`rows` [N, ...] of each rank with NaN in padding rows and past the last group."""
    result = [np.array(r) for r in rows]
    for output, array in zip(outputs, result, strict=True):
        array[output.src_info[:, 0] < 0] = np.nan
    return result


def float32(tree: Any) -> Any:
    """Every leaf as float32, for comparisons with tolerance."""
    return jax.tree.map(lambda x: np.asarray(jnp.asarray(x, jnp.float32)), tree)
