"""Load of the experts over many steps, accumulated on the devices.

Usage::

    load = jax_ep.stats.init(ep)
    ...
    y, aux = jax_ep.moe_ffn(ep, tokens, params)   # or a layer with return_aux=True
    load = jax_ep.stats.update(load, aux)         # a few integer additions, no exchange
    ...
    print(jax_ep.stats.heat_map(load))

If you call `jax_ep.dispatch` yourself, pass its `Dispatched` to `update` instead of
`aux`. `update` takes the arrays of one rank inside shard_map, or global arrays outside.
Inside, make `load` with `init(ep, axes)`, where `axes` are those that tokens are split
over, and give it the spec `P(axes)`. Leave out a tensor-parallel axis, or each row
would count once for each of its ranks.

All functions except `init` also take a stack of layers: arrays with a leading dimension
of layers, as a scan over layers returns them.

A layer with a `jax_ep.placement` counts the rows of each place. Pass its placement to
`summary` or `heat_map`, so that they can map places to experts. Start a new load with
each placement.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep._core import checks, errors, handle, pytrees
from jax_ep._core.handle import EPHandle
from jax_ep._core.types import Dispatched
from jax_ep._layers.moe import MoEAux
from jax_ep._stats import layout as layouts
from jax_ep._stats.layout import Layout
from jax_ep.placement import Placement


@pytrees.register(static=("layout",), records={"layout": Layout})
@dataclasses.dataclass(frozen=True)
class Load:
    """Sums over steps for each rank; the ranks are stacked on dimension 0.

    A stack of layers has leading dimensions before the ranks.

    Attributes:
        rows: uint32 `[ranks, L, 2]`, rows sent to each expert as (low, high) words,
            exact for any number of steps.
        dropped: uint32 `[ranks, 2]`, dropped rows as (low, high) words.
        steps: int32 `[ranks]`, steps counted.
        imbalance: float32 `[ranks]`, sum over steps of the busiest expert's share of
            the batch, times E; a step with equal shares adds 1.
        worst: float32 `[ranks]`, the largest of these values in one step; -1 after a
            step was passed as a `Dispatched`, which does not contain it.
        fullest: int32 `[ranks]`, the most rows that were sent to a rank in one step:
            the `recv_capacity` that would drop none, without padding.
        invalid: uint32 `[ranks, 2]`, ids outside [-1, E) as (low, high) words.
        place: int32 `[ranks]`, each rank's position in the mesh, as the steps reported
            it; -1 before any did, -2 if two steps reported different ones. None if not
            tracked.
        layout: the ranks' positions on the mesh, which determine their experts
            (static); None means one EP group in the order of its ranks.
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
    """Returns a `Load` of zeros, as global arrays.

    Args:
        ep: the layer's handle.
        axis_names: mesh axes that tokens are split over, as in `MoEAux.specs`, without
            a tensor-parallel axis. Use the order of the layer's `spec`, so that no
            data moves and a global `Dispatched`, which does not identify its ranks, is
            counted for the right ones. None means all axes in the mesh's order.

    Raises:
        TypeError: `ep` is not a handle, or `axis_names` are not names.
        ValueError: `axis_names` are not distinct axes of the mesh that include those of
            `ep`.
    """
    layouts.require("init", "ep", ep, EPHandle, "the handle that jax_ep.init returned")
    known = ep.mesh.axis_names
    names = known if axis_names is None else axis_names
    must = (
        f"jax_ep.stats.init: axis_names must be distinct axes of the mesh, {known}, "
        f"that include {ep.axis_names} of ep, got {errors.brief(axis_names)}; leave it "
        "out for all axes"
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
    """Adds a step to a load.

    With a `Dispatched` each rank only knows the load of its own experts. The imbalance
    of the step over all experts would need an exchange, so from then on
    `Summary.mean_imbalance` and `worst_imbalance` are unknown. `Summary.imbalance`,
    which comes from the totals, stays known. The group of a fused shared expert does
    not count.

    Args:
        load: result of `init` or of an earlier `update`.
        aux: the `MoEAux` of a layer, or the `Dispatched` of `jax_ep.dispatch`; of one
            rank if `load` is, else of all ranks. For a stack of layers both are
            stacked.

    Returns:
        The new `Load`; the old one can be donated.

    Raises:
        ValueError: `aux` has other ranks, experts or layers than `load`, is sharded
            differently on a mesh with explicit axes, or, in a shard_map with
            check_vma, is equal along an axis that `load` is split over.
        TypeError: `load` is not a `Load`, or `aux` neither a `MoEAux` nor a
            `Dispatched`.
    """
    layouts.require(
        "update", "load", load, Load, "the Load that jax_ep.stats.init returned"
    )
    layouts.require(
        "update",
        "aux",
        aux,
        (MoEAux, Dispatched),
        "the MoEAux of jax_ep.moe_ffn, or of a jax_ep.flax layer called with "
        "return_aux=True, or the Dispatched of jax_ep.dispatch",
    )
    layouts.require_same_layers(load.steps, aux.num_dropped)
    with jax.named_scope("jax_ep.stats"):
        add = _add_step
        for _ in range(load.steps.ndim - 1):
            add = jax.vmap(add)
        return add(load, _step(load, aux))


class _Step(NamedTuple):
    """The values of one step; `load` is None if not all experts' shares are known."""

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
        else:  # The handle was collected; the size tells whether there is one.
            groups += counts.shape[-1] == ranks * (local + 1)
    if counts.shape[-1] != ranks * groups or ranks != dropped.shape[-1]:
        raise ValueError(
            "jax_ep.stats.update: aux must be for the ranks and experts per rank of "
            f"load, {(ranks, local)}, got {dropped.shape[-1]} ranks with "
            f"{counts.shape[-1]} groups in total; make load with "
            "jax_ep.stats.init(ep, axes) from the layer's ep and the tokens' axes"
        )
    counts = _by_rank(counts, load.rows, groups)[..., groups - local :]
    if isinstance(aux, MoEAux):
        return _Step(counts, dropped, aux.num_invalid, aux.load, aux.place)
    return _Step(counts, dropped, aux.num_invalid, None, _own_place(load))


def _by_rank(counts: jax.Array, rows: jax.Array, groups: int) -> jax.Array:
    """Returns `counts` as `[..., R, groups]`, sharded like `rows` on explicit axes."""
    shape = (*counts.shape[:-1], rows.shape[-3], groups)
    sharding = jax.typeof(rows).sharding
    if not any(sharding.spec):
        return counts.reshape(shape)
    # Left to itself, JAX would shard the groups over trailing axes of size 1.
    spec = jax.P(*sharding.spec[:-1])
    return jnp.reshape(
        counts, shape, out_sharding=jax.NamedSharding(sharding.mesh, spec)
    )


def _own_place(load: Load) -> jax.Array | None:
    """Returns this rank's position, `[..., 1]`, inside shard_map; None outside."""
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
    # With jax_enable_x64 a sum of int32 would be int64.
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
    """Adds counts below 2**31 to `total`, whose last dimension is (low, high)."""
    low = total[..., 0] + counts.astype(jnp.uint32)
    high = total[..., 1] + (low < total[..., 0]).astype(jnp.uint32)
    return jnp.stack([low, high], axis=-1)


@dataclasses.dataclass(frozen=True)
class Summary:
    """A `Load` as numbers on the host.

    Ranks are in the mesh's order, or in the order of `init` if no step reported their
    positions. For a stack of layers every attribute except `expert_ids` has the stack's
    leading dimensions, and scalars are NumPy arrays.

    Attributes:
        steps: int, steps counted.
        rows: int64 `[ranks, L]`, rows sent to each expert of each rank, or to each of
            its places.
        expert_ids: int64 `[ranks, L]`, global ids of those experts. Ranks of different
            EP groups hold the same ones. With the placements of a stack of layers
            `[layers, ranks, L]`.
        expert_rows: int64 `[E]`, rows sent to each expert by its global id, summed over
            the EP groups and the expert's copies.
        dropped: int64 `[ranks]`, dropped rows.
        imbalance: float, the busiest expert's rows over the mean, from `expert_rows`; 0
            without rows.
        rank_imbalance: float, the busiest rank's rows over the mean; 0 without rows.
        mean_imbalance: float, the same ratio within a step, averaged over steps; NaN
            if a step was passed as a `Dispatched`.
        worst_imbalance: float, the largest ratio in a step; NaN in the same case.
        fullest: int, the most rows that were sent to a rank in one step.
        invalid: int64 `[ranks]`, ids outside [-1, E) among a rank's tokens.
    """

    # Any, because the type of a Load does not tell whether these are numbers or arrays.
    steps: Any
    rows: np.ndarray
    expert_ids: np.ndarray
    expert_rows: np.ndarray
    dropped: np.ndarray
    imbalance: Any
    rank_imbalance: Any
    mean_imbalance: Any
    worst_imbalance: Any
    fullest: Any
    invalid: np.ndarray


def summary(load: Load, *, placement: Placement | None = None) -> Summary:
    """Waits for `load` and returns its numbers; cannot be called inside jit.

    In a job of several processes each must call it, because it gathers data from the
    devices of all processes; each gets the same numbers.

    Args:
        load: load of one layer, or of a stack of layers.
        placement: the placement during all these steps; one for all layers, or a stack
            with one for each. None means that places are experts.

    Raises:
        TypeError: `load` is not a `Load`, or `placement` not a `Placement`.
        ValueError: it is called inside a traced function; the ranks were stacked
            differently in different steps, or some counted more than once; `load` does
            not have all ranks; or `placement` has other places or layers.
    """
    return _summary("summary", load, placement)[0]


def _summary(
    function: str, load: Load, placement: Placement | None
) -> tuple[Summary, np.ndarray]:
    """Returns the summary, and rows by place, `[..., P]`, summed over EP groups."""
    what = "the Load that jax_ep.stats.update returned"
    layouts.require(function, "load", load, Load, what)
    if isinstance(load.steps, Tracer):
        raise ValueError(
            f"jax_ep.stats.{function}: load must hold concrete arrays, got those of a "
            f"traced function; return load from there and call {function} outside"
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
    place_rows = np.zeros((*layers, owners.max() + 1, local), np.int64)
    for rank, owner in enumerate(owners):
        place_rows[..., owner, :] += rows[..., rank, :]
    place_rows = place_rows.reshape(*layers, -1)
    expert_ids = owners[:, None] * local + np.arange(local)
    expert_rows = place_rows
    if placement is not None:
        placement = layouts.checked_placement(function, placement, place_rows.shape)
        expert_ids = np.asarray(placement.expert_of)[..., expert_ids].astype(np.int64)
        expert_rows = placement.to_logical(place_rows)

    def busiest(counts: np.ndarray) -> Any:
        mean = np.maximum(counts.mean(axis=-1), np.finfo(np.float64).tiny)
        return plain(counts.max(axis=-1) / mean)

    steps, worst = host.steps[..., 0], host.worst[..., 0].astype(np.float64)
    known = worst >= 0
    found = Summary(
        steps=plain(steps),
        rows=rows,
        expert_ids=expert_ids,
        expert_rows=expert_rows,
        dropped=ordered(host.dropped),
        imbalance=busiest(expert_rows),
        rank_imbalance=busiest(rows.sum(axis=-1)),
        mean_imbalance=plain(
            np.where(known, host.imbalance[..., 0] / np.maximum(steps, 1), np.nan)
        ),
        worst_imbalance=plain(np.where(known, worst, np.nan)),
        fullest=plain(host.fullest.max(axis=-1).astype(np.int64)),
        invalid=ordered(host.invalid),
    )
    return found, place_rows


def heat_map(
    load: Load,
    path: str | os.PathLike[str] | None = None,
    *,
    placement: Placement | None = None,
) -> str:
    """Draws the load of the experts as text, and as a picture if `path` is given.

    Experts are named by their global ids, and their rows are summed over EP groups. As
    with `summary`, each process must call it; pass `path` in only one of them.

    Args:
        load: load of one layer, or of a stack of layers.
        path: a .png, .svg or .pdf file to write; needs matplotlib. Experts are red if
            busier than the mean and blue if less busy, on a scale from 1/4 of the mean
            to 4 times the mean.
        placement: as in `summary`. The map then shows places, in the order of their
            ranks, and the numbers also name the busiest rank.

    Returns:
        Text of at most 80 columns: a map, followed by the numbers. The map has one line
        per rank or per few ranks, and one character per expert. For a stack it has one
        line per layer, and one character per expert, or one for the busiest of a few.
        Darker is busier, and `@` is the busiest of all.

    Raises:
        TypeError, ValueError: for the reasons of `summary`.
        TypeError, ValueError: `path` is no such file name, or its folder cannot be
            written to.
        ImportError: `path` is given and matplotlib is not installed.
    """
    wrong = None if path is None else _unusable(path)
    if wrong is not None and jax.process_count() == 1:
        raise wrong
    view: Any = _view(load, placement)
    if wrong is not None:  # only now, because the other processes wait for this one
        raise wrong
    from jax_ep._stats import picture  # when it is first used
    from jax_ep._stats import view as views

    if path is not None:
        picture.save(view, path)
    return views.text(view)


def _unusable(path: Any) -> Exception | None:
    """Returns why no picture can be written to `path`, or None."""
    from jax_ep._stats import picture

    function, remedy = "stats.heat_map", "name another file, or leave path out"
    if not isinstance(path, str | os.PathLike):
        rule = "path must be a file name"
        return errors.invalid(function, rule, repr(path), remedy, kind=TypeError)
    if problem := picture.problem(os.fsdecode(path)):
        return errors.invalid(function, f"path must be {problem}", repr(path), remedy)
    if importlib.util.find_spec("matplotlib") is None:
        return ImportError(
            "jax_ep.stats.heat_map: path must be None if matplotlib is not "
            f"installed, got {path!r}; run pip install 'jax_ep[demo]'"
        )
    return None


def _view(load: Load, placement: Placement | None = None) -> Any:
    """Sums the load over EP groups, with one leading dimension of layers."""
    from jax_ep._stats.view import View

    found, rows = _summary("heat_map", load, placement)
    places, local = rows.shape[-1], found.rows.shape[-1]
    ranks = places // local
    owners = np.arange(ranks) if load.layout is None else load.layout.owners()

    def of_owners(counts: np.ndarray) -> np.ndarray:
        flat = counts.reshape(-1, len(owners))
        each = [flat[:, owners == rank].sum(axis=1) for rank in range(ranks)]
        return np.stack(each, axis=1)

    experts = found.expert_rows.shape[-1]
    return View(
        rows=rows.reshape(-1, places),
        dropped=of_owners(found.dropped),
        invalid=of_owners(found.invalid),
        stacked=found.rows.ndim > 2,
        replicas=found.rows.shape[-2] // ranks,
        steps=np.ravel(found.steps),
        mean_imbalance=np.ravel(found.mean_imbalance),
        worst_imbalance=np.ravel(found.worst_imbalance),
        fullest=int(np.max(found.fullest)),
        expert_rows=found.expert_rows.reshape(-1, experts) if placement else None,
    )
