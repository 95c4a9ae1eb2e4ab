"""Measures dispatch and combine over `jax.lax.ragged_all_to_all`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep._cli.bench import checks, loops, process, ragged, transports

_REPEATS = 3
_UNROLLED = 2  # calls copy counts to the host, so graphs do not help
_TOLERANCE = 0.02  # relative to the largest output; sums round in different places


def _functions(
    case: transports.Case, updates: str
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    options = {"axis": "ep", "exchange": ragged.exchange_here()}
    dispatch = functools.partial(
        ragged.dispatch,
        experts=case.config.num_experts,
        rows=case.config.capacity(case.mesh.size),
        updates=updates,
        **options,
    )
    return dispatch, functools.partial(ragged.combine, **options)


def _real_rows(mesh: Mesh, d: Any, rows: jax.Array) -> Any:
    """Counts, per rank, the rows in groups that differ from the reference's."""

    def count(expected: Any, row_offsets: Any, rows: Any) -> Any:
        real = jnp.arange(rows.shape[0]) < row_offsets[-1]
        return jnp.sum(checks.differs(expected, rows) & real, dtype=jnp.int32)[None]

    return checks.mapped(mesh, count)(d.tokens, d.row_offsets, rows)


def _differences(
    case: transports.Case,
    reference: transports.Transport,
    rows: jax.Array,
    group_sizes: jax.Array,
    y: jax.Array,
) -> dict[str, Any]:
    """Counts what differs from jax_ep's results in the first draw; {} if nothing."""
    d = reference.dispatched[0]
    error = checks.largest_error(y, reference.combined[0])
    found = {
        "tokens": int(np.asarray(_real_rows(case.mesh, d, rows)).sum()),
        "group_sizes": int(
            (np.asarray(group_sizes) != np.asarray(d.group_sizes)).sum()
        ),
        "y": 0 if error < _TOLERANCE else error,
    }
    return {name: count for name, count in found.items() if count}


def _measure_updates(
    spec: dict[str, Any],
    case: transports.Case,
    reference: transports.Transport,
    updates: str,
    label: str,
    emit: process.Emit,
) -> None:
    dispatch, combine = _functions(case, updates)
    jitted = checks.mapped(case.mesh, dispatch)
    results = [jitted(case.tokens, ids) for ids in case.ids]
    ways = [result[2] for result in results]
    rows, group_sizes, way = results[0]
    del results
    y = checks.mapped(case.mesh, combine)(case.expert_out, way, case.weights)
    found = _differences(case, reference, rows, group_sizes, y)
    del rows, group_sizes, y
    operations = {
        "dispatch": loops.Operation(
            step=lambda ids, _, tokens: list(dispatch(tokens, ids)[:2]),
            draws=[(ids, ()) for ids in case.ids],
            shared=case.tokens,
        ),
        "combine": loops.Operation(
            step=lambda weights, way, rows: [combine(rows, way, weights)],
            draws=[(case.weights, way) for way in ways],
            shared=case.expert_out,
        ),
    }
    megabytes = case.tokens.nbytes / case.mesh.size * spec["top_k"] / 1e6
    # The specification's `unrolled` is for jax_ep's calls, so it is replaced.
    sizes = loops.sizes(spec | {"unrolled": _UNROLLED}, _UNROLLED, 300 + 5 * megabytes)
    programs = loops.compile_all(
        {
            op: loops.compiling(case.mesh, operation, *sizes, tie="data")
            for op, operation in operations.items()
        }
    )
    for op, program in programs.items():
        timing, changed = loops.measure(loops.raised(program), _REPEATS)
        row = {
            "transport": "ragged",
            "flags": label,
            "updates": updates,
            "op": op,
            "num_sms": None,
            **case.facts,
            **timing,
        }
        emit(transports.finish(row, found | changed))


def measure_case(
    spec: dict[str, Any],
    mesh: Mesh,
    emit: process.Emit,
    tokens: int,
    routing: str,
    defaults: bool,
) -> None:
    """Like `transports.measure_case`, for every kind of update in the specification."""
    case = transports.make_case(mesh, spec, tokens, routing, defaults)
    reference = transports.reference(case)
    for updates, label in spec["ragged"]:
        try:
            _measure_updates(spec, case, reference, updates, label, emit)
        except RuntimeError as error:
            facts = {"transport": "ragged", "flags": label, **case.facts}
            emit({**facts, "error": process.error_text(error)})
    reference.ep.close()
