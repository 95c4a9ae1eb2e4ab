"""Load of the experts over many steps, accumulated on the devices.

Around and in a step::

    load = jax_ep.stats.init(ep)
    ...
    y, aux = jax_ep.moe_ffn(ep, tokens, params)   # or a layer with return_aux=True
    load = jax_ep.stats.update(load, aux)         # a few integer additions, no exchange
    ...
    print(jax_ep.stats.heat_map(load))

`update` takes a rank's arrays inside shard_map or global ones outside of it. Inside,
give `load` the spec of the tokens' dimension, `P(axes)` of the axes that tokens are
split over, and make it with `init(ep, axes)`: with a tensor-parallel axis among them
each row would count once for each of its ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jax_ep import _load_checks
from jax_ep._handle import EPHandle
from jax_ep._moe import MoEAux

_SHADES = " .:-=+*#%@"


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
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Load:
    """Sums over steps, by rank; ranks stack on dimension 0.

    Attributes:
        rows: uint32 `[ranks, L, 2]`, rows sent to each expert as (low, high) words:
            exact for any number of steps.
        dropped: uint32 `[ranks, 2]`, rows lost to N, likewise.
        steps: int32 `[ranks]`.
        imbalance: float32 `[ranks]`, sum over steps of the busiest expert's share of
            the batch, times E: 1 a step where all are equal.
        worst: float32 `[ranks]`, the greatest of them.
        fullest: int32 `[ranks]`, most rows that a rank was sent in a step: what
            `recv_capacity` must hold to drop none.
        invalid: uint32 `[ranks, 2]`, ids outside [-1, E), as `dropped`.
        place: int32 `[ranks]`, where each rank stands in the mesh's order, as the steps
            said; -1 before they do, -2 where two said different things.
    """

    rows: jax.Array
    dropped: jax.Array
    steps: jax.Array
    imbalance: jax.Array
    worst: jax.Array
    fullest: jax.Array
    invalid: jax.Array
    place: jax.Array


def init(ep: EPHandle, axis_names: str | Sequence[str] | None = None) -> Load:
    """Zeros, as global arrays.

    Args:
        ep: the layer's handle.
        axis_names: mesh axes that tokens are split over, as of `MoEAux.specs`: without
            a tensor-parallel axis, and best in the order of the layer's `spec`, so that
            nothing has to move; None is all axes in the mesh's order.

    Raises:
        TypeError: `ep` is no handle, or `axis_names` are no names.
        ValueError: `axis_names` are not axes of the mesh, once each, with those of
            `ep`.
    """
    _load_checks.require("init", "ep", ep, EPHandle, "what jax_ep.init returned")
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
    ranks = math.prod(ep.mesh.shape[axis] for axis in axes)
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
        )

    return jax.jit(make, out_shardings=sharding)()


def update(load: Load, aux: MoEAux) -> Load:
    """Adds a step.

    Args:
        load: of `init` or an earlier step.
        aux: what the layer reported: of one rank where `load` is, else of all ranks.

    Returns:
        The new `Load`; the old one can be donated.

    Raises:
        ValueError: `aux` is of other ranks or experts than `load`, lies otherwise on a
            mesh with explicit axes, or, where shard_map has check_vma, is equal along
            an axis that `load` is split over; or one of them is of a stack of layers.
        TypeError: `load` is no `Load`, or `aux` no `MoEAux`.
    """
    _load_checks.require(
        "update", "load", load, Load, "what jax_ep.stats.init returned"
    )
    _load_checks.require(
        "update",
        "aux",
        aux,
        MoEAux,
        "the MoEAux of a layer, which jax_ep.moe_ffn returns and layers of jax_ep.flax "
        "do with return_aux=True",
    )
    remedy = "for layers of a scan take jax.vmap(jax_ep.stats.update) of both stacks"
    for name, ranks in (("load", load.steps), ("aux", aux.num_dropped)):
        _load_checks.require_one_layer("update", name, ranks, remedy)
    _load_checks.require_alike(load.steps, aux.num_dropped)
    with jax.named_scope("jax_ep.stats"):
        local = load.rows.shape[1]
        ranks = aux.num_dropped.shape[0]
        if aux.expert_counts.size != ranks * local or ranks != load.steps.shape[0]:
            raise ValueError(
                "jax_ep.stats.update: aux must be of the ranks and experts of load, "
                f"{load.rows.shape[:2]}, got {ranks} ranks with "
                f"{aux.expert_counts.size} experts in all; make load with "
                "jax_ep.stats.init(ep) of the layer's ep and the tokens' axes"
            )
        counts = aux.expert_counts.reshape(ranks, local)
        imbalance = aux.load.size * jnp.max(aux.load)
        return Load(
            rows=_add(load.rows, counts),
            dropped=_add(load.dropped, aux.num_dropped),
            steps=load.steps + 1,
            imbalance=load.imbalance + imbalance,
            worst=jnp.maximum(load.worst, imbalance),
            # Of its own dtype: with jax_enable_x64 sums of int32 are int64.
            fullest=jnp.maximum(load.fullest, jnp.sum(counts, axis=1, dtype=jnp.int32)),
            invalid=_add(load.invalid, aux.num_invalid),
            place=_same_place(load.place, aux.place),
        )


def _same_place(place: jax.Array, given: jax.Array | None) -> jax.Array:
    if given is None:
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

    Ranks are in the mesh's order; of a `MoEAux` without `place`, as they were stacked.

    Attributes:
        steps: steps counted.
        rows: int64 `[ranks, L]`, rows sent to each expert.
        dropped: int64 `[ranks]`, rows lost to N.
        mean_imbalance: the busiest expert's rows over the mean, mean of the steps.
        worst_imbalance: the greatest of them.
        fullest: most rows that a rank was sent in a step.
        invalid: int64 `[ranks]`, ids outside [-1, E) among a rank's tokens.
    """

    steps: int
    rows: np.ndarray
    dropped: np.ndarray
    mean_imbalance: float
    worst_imbalance: float
    fullest: int
    invalid: np.ndarray


def summary(load: Load) -> Summary:
    """Waits for `load` and returns its numbers; not inside jit.

    In a job of several processes each of them must call it, as it gathers what is on
    devices of the others, and each gets the same numbers.

    Raises:
        TypeError: `load` is no `Load`.
        ValueError: inside a traced function; or the steps told that ranks of one were
            not those of another, or that some were counted more than once; or `load` is
            of a stack of layers.
    """
    return _summary("summary", load)


def _summary(function: str, load: Load) -> Summary:
    _load_checks.require(
        function, "load", load, Load, "what jax_ep.stats.update returned"
    )
    if isinstance(load.steps, Tracer):
        raise ValueError(
            f"jax_ep.stats.{function}: load must hold arrays, got those of a traced "
            "function; return it from there and call this outside"
        )
    remedy = "take one, as jax.tree.map(lambda leaf: leaf[0], load) does"
    _load_checks.require_one_layer(function, "load", load.steps, remedy)
    host: Any = jax.device_get(_load_checks.gathered(load))
    order = _load_checks.order(function, host.place)

    def whole(words: np.ndarray) -> np.ndarray:
        return words[..., 0].astype(np.int64) + (words[..., 1].astype(np.int64) << 32)

    steps = int(host.steps[0])
    return Summary(
        steps=steps,
        rows=whole(host.rows[order]),
        dropped=whole(host.dropped[order]),
        mean_imbalance=float(host.imbalance[0]) / max(steps, 1),
        worst_imbalance=float(host.worst[0]),
        fullest=int(host.fullest.max()),
        invalid=whole(host.invalid[order]),
    )


def heat_map(load: Load, path: str | None = None) -> str:
    """The load of the experts as text, and as a picture where `path` is given.

    Args:
        load: what was accumulated.
        path: a .png, .svg or .pdf to write; needs matplotlib.

    Returns:
        A line for each rank, a character for each of its experts: darker is busier, `@`
        the busiest of all; then the numbers. Each process must call it, as `summary`;
        give `path` in one of them.

    Raises:
        TypeError, ValueError: as `summary`.
        ImportError: `path` is given and matplotlib is not installed.
    """
    found = _summary("heat_map", load)
    if path is not None:
        _draw(found, path)
    top = max(int(found.rows.max()), 1)
    lines = [f"rows by rank and expert, @ = {top:,}"]
    for rank, rows in enumerate(found.rows):
        shades = "".join(_SHADES[-(-int(n) * (len(_SHADES) - 1) // top)] for n in rows)
        lost = f", {found.dropped[rank]:,} dropped" if found.dropped[rank] else ""
        if found.invalid[rank]:
            lost += f", {found.invalid[rank]:,} invalid ids"
        lines.append(f"rank {rank:<3} |{shades}| {int(rows.sum()):,}{lost}")
    lines.append(
        f"{found.steps:,} steps; busiest expert {found.mean_imbalance:.2f} x mean, at "
        f"worst {found.worst_imbalance:.2f}; fullest rank {found.fullest:,} rows a step"
    )
    return "\n".join(lines)


def _draw(found: Summary, path: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "jax_ep.stats.heat_map: path must be None without matplotlib, got "
            f"{path!r}; run pip install 'jax_ep[demo]'"
        ) from error
    ranks, local = found.rows.shape
    figure = Figure(figsize=(3 + 0.25 * local, 1.6 + 0.3 * ranks), layout="constrained")
    axes: Any = figure.subplots()
    image = axes.imshow(found.rows / max(found.steps, 1), aspect="auto", cmap="viridis")
    axes.set(xlabel="expert of the rank", ylabel="rank", yticks=range(ranks))
    axes.set_title(f"rows a step, {found.steps:,} steps")
    figure.colorbar(image)
    figure.savefig(path)
