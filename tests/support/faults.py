"""Scenarios of p2p_worker.py in which something goes wrong.

Ranks are missing or late, raise, close, or make another call than the others.

A call by one rank alone is a program of one device outside of shard_map: a handler
finds its rank by its device. jax_ep's own functions would refuse to trace it, so these
scenarios call the layer below them.
"""

from __future__ import annotations

import functools
import gc
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from jax_ep import formats
from jax_ep._ops import combine as combining
from jax_ep._ops import dispatch as dispatching
from jax_ep._ops.cached import dispatch_cached
from jax_ep._transport.base import DispatchInputs
from support import compare_transports, gpus, helpers

TIMEOUT_S = 2.0
# The time between a late rank's call and the end of the others' time limit.
MARGIN_S = 0.3
INSIDE_S = 0.3  # after which a started call waits for its peer
FIELDS = {"timeout_s": TIMEOUT_S, "max_tokens_per_rank": 64, "hidden_size": 64}


def dispatch(ep, x, ids, w):
    scale = formats.global_scale("dispatch", "bf16", x, None)
    given = dispatching._Given(weights=True, scales=False)
    return dispatching._DISPATCH(ep, DispatchInputs(x, ids, w, scale), static=given)


def combine(ep, route, rows, w):
    args = combining.CombineArgs(rows, route, w, None)
    return combining._COMBINE(ep, args, static=combining.How())


def cached(ep, route, x, w):
    return dispatch_cached(ep, route, x, w)


def reduced(ep, x, ids, w):
    """A dispatch followed by one of XLA's collectives."""
    d = jax_ep.dispatch(ep, x, ids, w)
    return jax.lax.psum(d.expert_counts, "ep")[None]


class Faulty:
    """A handle of two ranks with a short time limit, and both ranks' operands."""

    def __init__(self, mesh, **changes):
        self.mesh, self.traced = mesh, {}
        self.ep = helpers.init(mesh, **(FIELDS | changes))
        made = helpers.make_inputs(
            np.random.default_rng(1),
            self.ep.config,
            mesh.size,
            n=64,
            routing="full",
            fill=helpers.normal,
        )
        self.inputs = made
        self.args = [helpers.put(mesh, part) for part in vars(made).values()]
        self.run = compare_transports.mapped(
            mesh, functools.partial(jax_ep.dispatch, self.ep)
        )
        self.first = jax.block_until_ready(self.run(*self.args))
        self.reduce = compare_transports.mapped(
            mesh, functools.partial(reduced, self.ep)
        )
        jax.block_until_ready(self.reduce(*self.args))
        helpers.assert_dispatched(self.ep.config, self.first, made)

    def of(self, rank, tree):
        """One rank's part of global arrays, on its device."""
        device = self.mesh.devices.flat[rank]

        def pick(array):
            (data,) = (s.data for s in array.addressable_shards if s.device == device)
            return data

        return jax.tree.map(pick, tree)

    def alone(self, call, rank, *args):
        """One rank's `call`, already compiled, as compiling may outlast the limit."""
        args = self.of(rank, args)
        # Traced once for both ranks, like a program of all ranks.
        if call not in self.traced:
            self.traced[call] = jax.jit(functools.partial(call, self.ep))
        return functools.partial(self.traced[call].lower(*args).compile(), *args)

    def complaints(self):
        """What the next calls and check() raise, twice: the handle stays dead.

        A rank that raised alone would leave the others in the psum, until XLA aborts
        the process.
        """
        found = []
        acts = (
            lambda: self.run(*self.args),
            lambda: self.reduce(*self.args),
            self.ep.check,
        )
        for _ in range(2):
            for act in acts:
                try:
                    jax.block_until_ready(act())
                    found.append("nothing was raised")
                except jax.errors.JaxRuntimeError as error:
                    found.append(str(error))
        return found

    def recovers(self):
        """After close(), a new handle gives right answers."""
        self.ep.close()
        Faulty(self.mesh).ep.close()
        return True


def is_nothing(results):
    """True for what a call that gave up returns: floats NaN, ids -1, counts 0.

    Otherwise a description of the first leaf that is different.
    """
    zeros = ("row_offsets", "group_sizes", "expert_counts", "num_dropped")
    for path, leaf in jax.tree.leaves_with_path(results):
        name = jax.tree_util.keystr(path)
        leaf = np.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            good = np.isnan(leaf.astype(np.float32)).all()
        elif any(zero in name for zero in zeros) or "slot_counts" in name:
            good = not leaf.any()
        elif any(
            part in name for part in ("src_info", "slot_of", "row_of", "row_slot")
        ):
            good = (leaf == -1).all()
        else:
            continue
        if not good:
            return f"{name} {leaf.flat[:4]}"
    return True


def outcome(faulty, other, results, start):
    """What a fault has led to, for the test to check."""
    nothing = []
    for index, result in enumerate(results):
        try:
            nothing.append(is_nothing(jax.block_until_ready(result)))
        except jax.errors.JaxRuntimeError:
            # This call was enqueued after the host learned that the first had ended.
            assert index, "the first call ends without an error of its own"
    return {
        "seconds_waited": time.monotonic() - start,
        "nothing": nothing,
        "complaints": faulty.complaints(),
        "other_goes_on": [other.run(*other.args) is not None, other.ep.check()],
        "recovers": faulty.recovers(),
    }


def missing(which, mesh):
    """Rank 0 calls several times; rank 1 never does."""
    faulty, other = Faulty(mesh), Faulty(mesh)
    d = faulty.first
    x, _, w = faulty.args
    call = {
        "dispatch": (dispatch, *faulty.args),
        "combine": (combine, d.route, d.tokens, d.router_weights),
        "cached": (cached, d.route, x, w),
    }[which]
    run = faulty.alone(call[0], 0, *call[1:])
    start = time.monotonic()
    results = []
    for _ in range(10):
        try:
            results.append(run())
        except jax.errors.JaxRuntimeError:
            break  # the handler saw the end of an earlier call
    return outcome(faulty, other, results, start)


def combine_elsewhere(ep, route, rows, w):
    # The same call from another line: only the line differs.
    args = combining.CombineArgs(rows, route, w, None)
    return combining._COMBINE(ep, args, static=combining.How())


def differs(how, mesh):
    """The ranks' calls differ in one respect.

    In n, with many or few tokens; in the kind of dispatch; or in the line of code.
    """
    faulty, other = Faulty(mesh), Faulty(mesh)
    d = faulty.first
    x, _, w = faulty.args

    def part(n):
        return lambda ep, x, ids, w: dispatch(ep, x[:n], ids[:n], w[:n])

    sums = (d.route, d.tokens, d.router_weights)
    calls = {
        "tokens": ((dispatch, *faulty.args), (part(33), *faulty.args)),
        "few_tokens": ((part(4), *faulty.args), (part(5), *faulty.args)),
        "kind": ((dispatch, *faulty.args), (cached, d.route, x, w)),
        "line": ((combine, *sums), (combine_elsewhere, *sums)),
    }[how]
    runs = [faulty.alone(call[0], rank, *call[1:]) for rank, call in enumerate(calls)]
    start = time.monotonic()
    return outcome(faulty, other, [run() for run in runs], start)


def giant(mesh):
    """A window larger than any GPU: the error names its size, and no memory is lost."""
    config = helpers.make_config(
        max_tokens_per_rank=2**22,
        hidden_size=16384,
        recv_capacity=1024,
    )
    helpers.init(mesh).close()
    before = [gpus.free_bytes(d.local_hardware_id) for d in mesh.devices.flat]
    try:
        jax_ep.init(mesh, "ep", config, transport=helpers.TRANSPORT).close()
        message = "nothing was raised"
    except (RuntimeError, ValueError, MemoryError) as error:
        message = str(error)
    after = [gpus.free_bytes(d.local_hardware_id) for d in mesh.devices.flat]
    return {
        "message": message,
        "lost": max(b - a for b, a in zip(before, after, strict=True)),
        "needed": 2 * 2**22 * 16384 * 2 * mesh.size,
        "right_afterwards": Faulty(mesh).recovers(),
    }


def flat(mesh):
    """Windows exist only while their handle is open, in 30 cycles."""
    ordinals = [device.local_hardware_id for device in mesh.devices.flat]
    free, opened = [], 0
    for cycle in range(33):
        ep = helpers.init(mesh, max_tokens_per_rank=4096, hidden_size=4096, top_k=8)
        before = min(map(gpus.free_bytes, ordinals))
        if cycle % 10 == 0:
            x = jnp.ones((8 * mesh.size, 4096), jnp.bfloat16)
            ids = jnp.zeros((8 * mesh.size, 8), jnp.int32)
            jax.block_until_ready(jax_ep.sharded.dispatch(ep, x, ids).tokens)
        opened, size = opened + 1, ep.buffer_bytes
        if cycle % 2:
            ep.close()
        else:
            # Compiled programs hold their handle.
            jax.clear_caches()
        del ep
        gc.collect()
        free.append([gpus.free_bytes(ordinal) for ordinal in ordinals])
        held = min(free[-1]) - before
    return {
        "opened": opened,
        "buffer_bytes": size,
        "held": held,
        "lost": max(a - b for a, b in zip(free[2], free[-1], strict=True)),
    }


def sizes(mesh):
    """The GPU memory that windows of several sizes take, and what their handles say."""
    ordinals = [device.local_hardware_id for device in mesh.devices.flat]
    shapes = ((8, 128, 2), (512, 2048, 4), (4096, 4096, 8))
    found = []
    # The first round also allocates what stays: programs and XLA's own pool.
    for tokens, hidden, top_k in shapes * 2:
        before = [gpus.free_bytes(ordinal) for ordinal in ordinals]
        ep = helpers.init(
            mesh, max_tokens_per_rank=tokens, hidden_size=hidden, top_k=top_k
        )
        left = [gpus.free_bytes(ordinal) for ordinal in ordinals]
        taken = max(a - b for a, b in zip(before, left, strict=True))
        found.append([ep.buffer_bytes, taken])
        ep.close()
    return {"found": found[len(shapes) :]}


def started(run):
    """The call's results; none if the host knows that an earlier call has failed."""
    try:
        return [run()]
    except jax.errors.JaxRuntimeError:
        return []


def late(after_s, mesh):
    """Rank 1 is late, but within rank 0's time limit: results are right."""
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
    """Rank 1 calls just after rank 0 gave up: its call is refused or empty."""
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
    """One rank dispatches and then combines; the other combines first."""
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
    """The ranks call handles of different configs: each waits for the other in vain."""
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
    **{f"missing_{w}": functools.partial(missing, w)
       for w in ("dispatch", "combine", "cached")},
    **{f"differs_{how}": functools.partial(differs, how)
       for how in ("tokens", "few_tokens", "kind", "line")},
    "giant": giant,
    "flat": flat,
    "sizes": sizes,
    "late": functools.partial(late, TIMEOUT_S / 2),
    "late_under": functools.partial(late, TIMEOUT_S - MARGIN_S),
    **{f.__name__: f for f in (late_over, raises, swapped, handles, closing)},
}  # fmt: skip
