"""Measures the path over jax.lax.ragged_all_to_all; called by p2p_worker.py."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep._cli.bench import checks, loops, ragged, transports

_REPEATS = 3
_UNROLLED = 2  # calls copy counts to the host, so graphs are no help
_TOLERANCE = 0.02  # of the largest output; the sums round in different places


def _exchange():
    on_cpu = jax.default_backend() == "cpu"
    return ragged.reference_exchange if on_cpu else jax.lax.ragged_all_to_all


def _functions(case, updates):
    config = case.config
    options = {"axis": "ep", "exchange": _exchange()}
    dispatch = functools.partial(
        ragged.dispatch,
        experts=config.num_experts,
        rows=config.capacity(case.mesh.size),
        updates=updates,
        **options,
    )
    return dispatch, functools.partial(ragged.combine, **options)


@jax.jit
def _largest_error(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))


def _real_rows(mesh, d, rows):
    """How many of each rank's rows before the end differ from the reference's."""

    def count(expected, row_offsets, rows):
        real = jnp.arange(rows.shape[0]) < row_offsets[-1]
        return jnp.sum(checks.differs(expected, rows) & real, dtype=jnp.int32)[None]

    return checks.mapped(mesh, count)(d.tokens, d.row_offsets, rows)


def _differences(case, reference, dispatched, combined):
    """What differs from jax_ep's results in the first draw; {} if nothing."""
    d, y = reference.dispatched[0], reference.combined[0]
    rows, group_sizes, _ = dispatched
    error = float(_largest_error(combined, y))
    found = {
        "tokens": int(np.asarray(_real_rows(case.mesh, d, rows)).sum()),
        "group_sizes": int(
            (np.asarray(group_sizes) != np.asarray(d.group_sizes)).sum()
        ),
        "y": 0 if error < _TOLERANCE else error,
    }
    return {name: count for name, count in found.items() if count}


def _operations(case, updates, ways):
    dispatch, combine = _functions(case, updates)
    return {
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


def _measure_updates(spec, case, reference, updates, label, emit):
    dispatch, combine = _functions(case, updates)
    jitted = checks.mapped(case.mesh, dispatch)
    results = [jitted(case.tokens, ids) for ids in case.ids]
    ways = [result[2] for result in results]
    first = results[0]
    del results
    back = checks.mapped(case.mesh, combine)(case.expert_out, ways[0], case.weights)
    found = _differences(case, reference, first, back)
    del first, back
    megabytes = case.tokens.nbytes / case.mesh.size * spec["top_k"] / 1e6
    expected_us = 300 + 5 * megabytes
    calls = spec["milliseconds"] * 1e3 / expected_us
    sizes = (_UNROLLED, max(1, math.ceil(calls / _UNROLLED)))
    operations = _operations(case, updates, ways)
    programs = loops.compile_all(
        {
            op: loops.compiling(case.mesh, operation, *sizes, tie="data")
            for op, operation in operations.items()
        }
    )
    for op, program in programs.items():
        timing, checksum = loops.measure(program, _REPEATS)
        row = {
            "transport": "ragged",
            "flags": label,
            "updates": updates,
            "op": op,
            "num_sms": None,
            **case.facts,
            **timing,
        }
        changed = {} if checksum is not None else {"checksum between repeats": 1}
        emit(transports.finish(row, found | changed))


def measure_case(spec, mesh, emit, tokens, routing, defaults):
    """As transports.measure_case, for every kind of update of the specification."""
    case = transports.make_case(mesh, spec, tokens, routing, defaults)
    reference = transports.reference(case)
    for updates, label in spec["ragged"]:
        try:
            _measure_updates(spec, case, reference, updates, label, emit)
        except RuntimeError as error:
            facts = {"transport": "ragged", "flags": label, **case.facts}
            emit({**facts, "error": f"{type(error).__name__}: {error}"})
    reference.ep.close()
