"""Scenarios of p2p_worker.py: ranks that come late, raise, swap calls, or close.

As in faults.py one rank's call is a program of its device alone.
"""

from __future__ import annotations

import functools
import time

import jax
import numpy as np

from support import helpers
from support.faults import TIMEOUT_S, Faulty, combine, dispatch, is_nothing, outcome

# Between a rank's coming and the others' time limit.
MARGIN_S = 0.3
INSIDE_S = 0.3  # until a call that was started waits for its peer


def started(run):
    """The call's results, unless the host has heard of the end of an earlier one."""
    try:
        return [run()]
    except jax.errors.JaxRuntimeError:
        return []


def late(after_s, mesh):
    """Rank 1 comes within rank 0's time limit: nobody notices."""
    faulty = Faulty(mesh)
    runs = [faulty.alone(dispatch, rank, *faulty.args) for rank in range(2)]
    results = [runs[0]()]
    time.sleep(after_s)
    results.append(runs[1]())
    jax.block_until_ready(results)
    for rank, result in enumerate(results):
        want = jax.tree.leaves(faulty.of(rank, faulty.first))
        for got, wanted in zip(jax.tree.leaves(result), want, strict=True):
            helpers.assert_bits(got, np.asarray(wanted))
    return {"right": True, "check": faulty.ep.check()}


def late_over(mesh):
    """Rank 1 comes just after rank 0 has given up: its call is refused or empty."""
    faulty, other = Faulty(mesh), Faulty(mesh)
    runs = [faulty.alone(dispatch, rank, *faulty.args) for rank in range(2)]
    start = time.monotonic()
    results = [runs[0]()]
    time.sleep(TIMEOUT_S + MARGIN_S)
    results += started(runs[1])
    return outcome(faulty, other, results, start)


def raises(mesh):
    """Rank 1's program raises before its call."""
    faulty, other = Faulty(mesh), Faulty(mesh)

    def fail(x):
        raise RuntimeError("raised before the call")

    def broken(ep, x, ids, w):
        x = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return dispatch(ep, x, ids, w)

    first = faulty.alone(dispatch, 0, *faulty.args)
    second = faulty.alone(broken, 1, *faulty.args)
    start = time.monotonic()
    results, raised = [first()], "nothing was raised"
    try:
        jax.block_until_ready(second())
    except Exception as error:
        raised = str(error)
    return outcome(faulty, other, results, start) | {"raised": raised}


def swapped(mesh):
    """One rank dispatches and then combines, the other one combines first."""
    faulty, other = Faulty(mesh), Faulty(mesh)
    d = faulty.first
    calls = ((dispatch, *faulty.args), (combine, d.route, d.tokens, d.router_weights))
    orders = [
        [faulty.alone(call[0], rank, *call[1:]) for call in calls[:: 1 - 2 * rank]]
        for rank in range(2)
    ]
    start = time.monotonic()
    results = [order[0]() for order in orders]
    for order in orders:
        results += started(order[1])
    return outcome(faulty, other, results, start)


def handles(mesh):
    """The ranks call handles of different configs: each misses the other one there."""
    faulty, second, other = Faulty(mesh), Faulty(mesh, top_k=2), Faulty(mesh)
    runs = [
        one.alone(dispatch, rank, *one.args)
        for rank, one in enumerate((faulty, second))
    ]
    start = time.monotonic()
    results = [run() for run in runs]
    found = outcome(faulty, other, results[:1], start)
    return found | {
        "second_nothing": is_nothing(jax.block_until_ready(results[1])),
        "second": second.complaints(),
        "second_recovers": second.recovers(),
    }


def closing(mesh):
    """A handle is closed while rank 0 waits inside of a call for rank 1."""
    faulty, other = Faulty(mesh), Faulty(mesh)
    run = faulty.alone(dispatch, 0, *faulty.args)
    start = time.monotonic()
    result = run()
    time.sleep(INSIDE_S)
    faulty.ep.close()
    closed_s = time.monotonic() - start
    try:
        jax.block_until_ready(faulty.run(*faulty.args))
        error = "nothing was raised"
    except jax.errors.JaxRuntimeError as raised:
        error = str(raised)
    return {
        "closed_s": closed_s,
        "nothing": is_nothing(jax.block_until_ready(result)),
        "error": error,
        "other_goes_on": [other.run(*other.args) is not None, other.ep.check()],
        "recovers": faulty.recovers(),
    }


ALL = {
    "late": functools.partial(late, TIMEOUT_S / 2),
    "late_under": functools.partial(late, TIMEOUT_S - MARGIN_S),
    **{f.__name__: f for f in (late_over, raises, swapped, handles, closing)},
}
