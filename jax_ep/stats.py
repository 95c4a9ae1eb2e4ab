"""Load of the experts over many steps, accumulated on the devices.

Around and in a step::

    load = jax_ep.stats.init(ep)
    ...
    y, aux = jax_ep.moe_ffn(ep, tokens, params)   # or a layer with return_aux=True
    load = jax_ep.stats.update(load, aux)         # a few integer additions, no exchange
    ...
    print(jax_ep.stats.heat_map(load))

`update` takes a `Dispatched` in place of `aux` where you call `jax_ep.dispatch`
yourself. It takes the arrays of one rank inside shard_map, or global ones outside of
it. Inside, give `load` the spec of the tokens' dimension, `P(axes)` of the axes that
tokens are split over, and make it with `init(ep, axes)`: with a tensor-parallel axis
among them each row would count once for each of its ranks.

All functions but `init` take a stack of layers, too: arrays with a leading dimension
of layers, as a scan over layers reports them.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep._core import checks, handle
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched
from jax_ep._layers.moe import MoEAux
from jax_ep._stats import layout as layouts
from jax_ep._stats import picture
from jax_ep._stats import view as _load_view
from jax_ep._stats.layout import Layout


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "rows",
        "dropped",
        "steps",
        "imbalance",
        "worst",
        "fullest",
        "invalid",
        "place",
    ),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class Load:
    """Sums over steps, by rank; ranks stack on dimension 0.

    A stack of layers has leading dimensions before the ranks.

    Attributes:
        rows: uint32 `[ranks, L, 2]`, rows sent to each expert as (low, high) words:
            exact for any number of steps.
        dropped: uint32 `[ranks, 2]`, rows lost to N, likewise.
        steps: int32 `[ranks]`.
        imbalance: float32 `[ranks]`, sum over steps of the busiest expert's share of
            the batch, times E: 1 per step where all are equal.
        worst: float32 `[ranks]`, the greatest of them; -1 once a step was given as a
            `Dispatched`, which does not tell them.
        fullest: int32 `[ranks]`, most rows that a rank was sent in a step: what
            `recv_capacity` must hold to drop none.
        invalid: uint32 `[ranks, 2]`, ids outside [-1, E), as `dropped`.
        place: int32 `[ranks]`, where each rank stands in the mesh's order, as the steps
            said; -1 before they do, -2 where two said different things. None where
            nobody keeps track.
        layout: how the ranks lie on the mesh, which tells who holds which experts
            (static); None is one EP group in the order of its ranks.
    """

    rows: jax.Array
    dropped: jax.Array
    steps: jax.Array
    imbalance: jax.Array
    worst: jax.Array
    fullest: jax.Array
    invalid: jax.Array
    place: jax.Array | None = None
    layout: Layout | None = None


def init(ep: EPHandle, axis_names: str | Sequence[str] | None = None) -> Load:
    """Zeros, as global arrays.

    Args:
        ep: the layer's handle.
        axis_names: mesh axes that tokens are split over, as of `MoEAux.specs`: without
            a tensor-parallel axis, and in the order of the layer's `spec`, so that
            nothing has to move and a global `Dispatched`, which does not name its
            ranks, is counted for the right ones. None is all axes in the mesh's order.

    Raises:
        TypeError: `ep` is no handle, or `axis_names` are no names.
        ValueError: `axis_names` are not axes of the mesh, once each, with those of
            `ep`.
    """
    layouts.require("init", "ep", ep, EPHandle, "what jax_ep.init returned")
    known = ep.mesh.axis_names
    names = known if axis_names is None else axis_names
    must = (
        f"jax_ep.stats.init: axis_names must be axes of the mesh, {known}, once each "
        f"and with {ep.axis_names} of ep, got {axis_names!r}; leave it out for all"
    )
    if not isinstance(names, str) and not (
        isinstance(names, Sequence) and all(isinstance(name, str) for name in names)
    ):
        raise TypeError(must)
    axes = (names,) if isinstance(names, str) else tuple(names)
    once = len(set(axes)) == len(axes)
    if not (once and set(ep.axis_names) <= set(axes) <= set(known)):
        raise ValueError(must)
    ordered = tuple(axis for axis in known if axis in axes)
    sizes = tuple(ep.mesh.shape[axis] for axis in ordered)
    ranks = math.prod(sizes)
    sharding = NamedSharding(ep.mesh, PartitionSpec(axes))

    def make() -> Load:
        return Load(
            rows=jnp.zeros((ranks, ep.local_experts, 2), jnp.uint32),
            dropped=jnp.zeros((ranks, 2), jnp.uint32),
            steps=jnp.zeros(ranks, jnp.int32),
            imbalance=jnp.zeros(ranks, jnp.float32),
            worst=jnp.zeros(ranks, jnp.float32),
            fullest=jnp.zeros(ranks, jnp.int32),
            invalid=jnp.zeros((ranks, 2), jnp.uint32),
            place=jnp.full(ranks, -1, jnp.int32),
            layout=Layout(ordered, sizes, axes, ep.axis_names),
        )

    return jax.jit(make, out_shardings=sharding)()


def update(load: Load, aux: MoEAux | Dispatched) -> Load:
    """Adds a step.

    A `Dispatched` tells each rank about its own experts only. The step's imbalance
    over all experts would take an exchange, so `Summary.mean_imbalance` and
    `worst_imbalance` are unknown from then on; `Summary.imbalance`, that of the totals,
    is always there. The group of a fused shared expert does not count.

    Args:
        load: of `init` or an earlier step.
        aux: what the layer reported, or what `jax_ep.dispatch` returned: of one rank
            where `load` is, else of all ranks. For a stack of layers both are stacked.

    Returns:
        The new `Load`; the old one can be donated.

    Raises:
        ValueError: `aux` is of other ranks, experts or layers than `load`, lies
            otherwise on a mesh with explicit axes, or, where shard_map has check_vma,
            is equal along an axis that `load` is split over.
        TypeError: `load` is no `Load`, or `aux` neither `MoEAux` nor `Dispatched`.
    """
    layouts.require("update", "load", load, Load, "what jax_ep.stats.init returned")
    layouts.require(
        "update",
        "aux",
        aux,
        (MoEAux, Dispatched),
        "the MoEAux of a layer, which jax_ep.moe_ffn returns and layers of jax_ep.flax "
        "do with return_aux=True, or the Dispatched of jax_ep.dispatch",
    )
    layouts.require_same_layers(load.steps, aux.num_dropped)
    with jax.named_scope("jax_ep.stats"):
        add = _add_step
        for _ in range(load.steps.ndim - 1):
            add = jax.vmap(add)
        return add(load, _step(load, aux))


class _Step(NamedTuple):
    """What a step adds; `load` is None where the shares of all experts are unknown."""

    counts: jax.Array
    dropped: jax.Array
    invalid: jax.Array
    load: jax.Array | None
    place: jax.Array | None


def _step(load: Load, aux: MoEAux | Dispatched) -> _Step:
    counts, dropped = aux.expert_counts, aux.num_dropped
    ranks, local = load.rows.shape[-3:-1]
    groups = local
    if isinstance(aux, Dispatched):
        ep = handle.find(aux.route.key)
        if ep:
            groups += ep.config.fused_shared_expert
        else:  # Collected; only the size is left to tell a shared expert by.
            groups += counts.shape[-1] == ranks * (local + 1)
    if counts.shape[-1] != ranks * groups or ranks != dropped.shape[-1]:
        raise ValueError(
            "jax_ep.stats.update: aux must be of the ranks and experts of load, "
            f"{(ranks, local)}, got {dropped.shape[-1]} ranks with "
            f"{counts.shape[-1]} groups of rows in all; make load with "
            "jax_ep.stats.init(ep) of the layer's ep and the tokens' axes"
        )
    counts = _by_rank(counts, load.rows, groups)[..., groups - local :]
    if isinstance(aux, MoEAux):
        return _Step(counts, dropped, aux.num_invalid, aux.load, aux.place)
    return _Step(counts, dropped, aux.num_invalid, None, _own_place(load))


def _by_rank(counts: jax.Array, rows: jax.Array, groups: int) -> jax.Array:
    """`counts` as `[..., R, groups]`, sharded like `rows` over explicit axes."""
    shape = (*counts.shape[:-1], rows.shape[-3], groups)
    sharding = jax.typeof(rows).sharding
    if not any(sharding.spec):
        return counts.reshape(shape)
    # By itself JAX would give trailing axes of size 1 to the dimension of groups.
    spec = jax.P(*sharding.spec[:-1])
    return jnp.reshape(
        counts, shape, out_sharding=jax.NamedSharding(sharding.mesh, spec)
    )


def _own_place(load: Load) -> jax.Array | None:
    """`[..., 1]` inside shard_map, where this rank is; None outside."""
    names = load.layout.names if load.layout else ()
    names = tuple(name for name in names if checks.in_scope((name,)))
    if not names:
        return None
    return jnp.broadcast_to(jax.lax.axis_index(names), load.steps.shape)


def _add_step(load: Load, step: _Step) -> Load:
    layouts.require_alike(load.steps, step.dropped)
    if step.load is None:
        imbalance, worst = load.imbalance, jnp.minimum(load.worst, -1)
    else:
        shared = step.load.size * jnp.max(step.load)
        imbalance = load.imbalance + shared
        worst = jnp.where(load.worst < 0, load.worst, jnp.maximum(load.worst, shared))
    # Of its own dtype: with jax_enable_x64 sums of int32 are int64.
    sent = jnp.sum(step.counts, axis=1, dtype=jnp.int32)
    return Load(
        rows=_add(load.rows, step.counts),
        dropped=_add(load.dropped, step.dropped),
        steps=load.steps + 1,
        imbalance=imbalance,
        worst=worst,
        fullest=jnp.maximum(load.fullest, sent),
        invalid=_add(load.invalid, step.invalid),
        place=_same_place(load.place, step.place),
        layout=load.layout,
    )


def _same_place(place: jax.Array | None, given: jax.Array | None) -> jax.Array | None:
    if place is None or given is None:
        return place
    return jnp.where((place == -1) | (place == given), given, -2)


def _add(total: jax.Array, counts: jax.Array) -> jax.Array:
    """`total` in two words, plus counts below 2**31."""
    low = total[..., 0] + counts.astype(jnp.uint32)
    high = total[..., 1] + (low < total[..., 0]).astype(jnp.uint32)
    return jnp.stack([low, high], axis=-1)


@dataclasses.dataclass(frozen=True)
class Summary:
    """A `Load` in numbers of the host.

    Ranks are in the mesh's order; of steps that did not name them, in the order of
    `init`. Of a stack of layers every attribute but `expert_ids` has the stack's
    leading dimensions, and those without a shape here are NumPy arrays.

    Attributes:
        steps: int, steps counted.
        rows: int64 `[ranks, L]`, rows sent to each expert of each rank.
        expert_ids: int64 `[ranks, L]`, global ids of those experts. Ranks of different
            EP groups hold the same ones.
        expert_rows: int64 `[E]`, rows sent to each expert by its global id, summed over
            the EP groups.
        dropped: int64 `[ranks]`, rows lost to N.
        imbalance: float, the busiest expert's rows over the mean, of the totals in
            `expert_rows`; 0 without rows.
        mean_imbalance: float, the same within a step, mean of the steps; NaN where a
            step was given as a `Dispatched`.
        worst_imbalance: float, the greatest of a step, or NaN likewise.
        fullest: int, most rows that a rank was sent in a step.
        invalid: int64 `[ranks]`, ids outside [-1, E) among a rank's tokens.
    """

    # Any: whether they are numbers or arrays cannot be told from the type of a load.
    steps: Any
    rows: np.ndarray
    expert_ids: np.ndarray
    expert_rows: np.ndarray
    dropped: np.ndarray
    imbalance: Any
    mean_imbalance: Any
    worst_imbalance: Any
    fullest: Any
    invalid: np.ndarray


def summary(load: Load) -> Summary:
    """Waits for `load` and returns its numbers; not inside jit.

    In a job of several processes each of them must call it, as it gathers what is on
    devices of the others, and each gets the same numbers.

    Args:
        load: of one layer, or of a stack of layers.

    Raises:
        TypeError: `load` is no `Load`.
        ValueError: inside a traced function; or the steps told that ranks of one were
            not those of another, or that some were counted more than once; or `load`
            does not have all ranks.
    """
    return _summary("summary", load)


def _summary(function: str, load: Load) -> Summary:
    layouts.require(function, "load", load, Load, "what jax_ep.stats.update returned")
    if isinstance(load.steps, Tracer):
        raise ValueError(
            f"jax_ep.stats.{function}: load must hold arrays, got those of a traced "
            "function; return it from there and call this outside"
        )
    host: Any = jax.device_get(layouts.gathered(load))
    *layers, ranks, local = np.shape(host.rows)[:-1]
    places = np.full((*layers, ranks), -1) if host.place is None else host.place
    orders = [
        layouts.order(function, place, load.layout)
        for place in places.reshape(-1, ranks)
    ]
    order = np.reshape(orders, (*layers, ranks))

    def whole(words: np.ndarray) -> np.ndarray:
        return words[..., 0].astype(np.int64) + (words[..., 1].astype(np.int64) << 32)

    def ordered(words: np.ndarray) -> np.ndarray:
        counts = whole(words)
        at = order.reshape(order.shape + (1,) * (counts.ndim - order.ndim))
        return np.take_along_axis(counts, at, axis=len(layers))

    def plain(value: Any) -> Any:
        return value if layers else value.item()

    owners = np.arange(ranks) if load.layout is None else load.layout.owners()
    rows = ordered(host.rows)
    expert_rows = np.zeros((*layers, owners.max() + 1, local), np.int64)
    for rank, owner in enumerate(owners):
        expert_rows[..., owner, :] += rows[..., rank, :]
    expert_rows = expert_rows.reshape(*layers, -1)
    mean = np.maximum(expert_rows.mean(axis=-1), np.finfo(np.float64).tiny)
    steps, worst = host.steps[..., 0], host.worst[..., 0].astype(np.float64)
    known = worst >= 0
    return Summary(
        steps=plain(steps),
        rows=rows,
        expert_ids=owners[:, None] * local + np.arange(local),
        expert_rows=expert_rows,
        dropped=ordered(host.dropped),
        imbalance=plain(expert_rows.max(axis=-1) / mean),
        mean_imbalance=plain(
            np.where(known, host.imbalance[..., 0] / np.maximum(steps, 1), np.nan)
        ),
        worst_imbalance=plain(np.where(known, worst, np.nan)),
        fullest=plain(host.fullest.max(axis=-1).astype(np.int64)),
        invalid=ordered(host.invalid),
    )


def heat_map(load: Load, path: str | os.PathLike[str] | None = None) -> str:
    """The load of the experts as text, and as a picture where `path` is given.

    Experts have their global ids, and their rows are summed over EP groups that hold
    the same ones.

    Args:
        load: what was accumulated, of one layer or of a stack of layers.
        path: a .png, .svg or .pdf to write; needs matplotlib. Red experts are busier
            than the mean and blue ones less busy, on one scale from 1/4 to 4 times.

    Returns:
        At most 80 columns. A line for each rank or few ranks, a character for each of
        its experts; of a stack a line for each layer, a character for one expert or the
        busiest of a few. Darker is busier, `@` the busiest of all. Then the numbers.
        Each process must call it, as `summary`; give `path` in one of them.

    Raises:
        TypeError, ValueError: as `summary`.
        ImportError: `path` is given and matplotlib is not installed.
    """
    view = _view(load)
    if path is not None:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError as error:
            raise ImportError(
                "jax_ep.stats.heat_map: path must be None without matplotlib, got "
                f"{path!r}; run pip install 'jax_ep[demo]'"
            ) from error
        picture.save(view, path)
    return _load_view.text(view)


def _view(load: Load) -> _load_view.View:
    """By global expert id and rank of the EP group, with a dimension of layers."""
    found = _summary("heat_map", load)
    experts, local = found.expert_rows.shape[-1], found.rows.shape[-1]
    owners = found.expert_ids[:, 0] // local

    def of_owners(counts: np.ndarray) -> np.ndarray:
        flat = counts.reshape(-1, len(owners))
        each = [flat[:, owners == rank].sum(axis=1) for rank in range(experts // local)]
        return np.stack(each, axis=1)

    return _load_view.View(
        rows=found.expert_rows.reshape(-1, experts),
        dropped=of_owners(found.dropped),
        invalid=of_owners(found.invalid),
        stacked=found.rows.ndim > 2,
        replicas=found.rows.shape[-2] * local // experts,
        steps=np.ravel(found.steps),
        mean_imbalance=np.ravel(found.mean_imbalance),
        worst_imbalance=np.ravel(found.worst_imbalance),
        fullest=int(np.max(found.fullest)),
    )
