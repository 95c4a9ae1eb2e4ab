"""A process of test_mixed_calls.py: processes make different calls in one exchange.

Arguments: those of multiprocess_worker.py, then the transport. Process 0 makes one call
of a pair and all others make the other one. Both have regions of the same size, as XLA
would reject different ones.
"""

from __future__ import annotations

import re
import sys

import jax_ep

# isort: split
import jax
import numpy as np
import pytest

from support import compare_transports, helpers
from workers.multiprocess_worker import start

# With these, regions are as long in a dispatch as in a combine: 128 bytes of header,
# and 128 bytes per message.
FIELDS = {"top_k": 1, "hidden_size": 16, "dtype": "float32", "combine_dtype": "float32"}
LOCAL_EXPERTS = 28
NONE_OF = {  # results that are neither NaN nor -1 if a call gives up
    "row_offsets": 0,
    "group_sizes": 0,
    "expert_counts": 0,
    "num_dropped": 0,
    "num_invalid": 0,
    "slot_counts": 0,
}


def calls(ep, mesh, operands, route, rows):
    """Functions by name that run a call of each kind, each from a line of its own."""
    tokens, ids, weights = operands

    def halves(x, i, w):
        return jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, i, w))

    def elsewhere(x, i, w):
        return jax_ep.dispatch(ep, x, i, w)

    def combine(rows, route):
        return jax_ep.combine(ep, rows, route)

    def combine_halves(rows, route):
        return jax_ep.combine_wait(jax_ep.combine_async(ep, rows, route))

    def cached(rows, route):
        # The combine is linear, so that only its derivative stays in the program: a
        # dispatch along the route.
        y, pull = jax.vjp(lambda rows: jax_ep.combine(ep, rows, route), rows)
        return pull(jax.numpy.ones_like(y))[0]

    def mapped(call, *operands):
        return lambda: compare_transports.mapped(mesh, call)(*operands)

    return {
        "dispatch": lambda: helpers.dispatch_fn(ep, mesh, compare_transports.P("ep"))(
            *operands
        ),
        "dispatch elsewhere": mapped(elsewhere, tokens, ids, weights),
        "dispatch in halves": mapped(halves, tokens, ids, weights),
        "combine": mapped(combine, rows, route),
        "combine in halves": mapped(combine_halves, rows, route),
        "cached dispatch": mapped(cached, rows, route),
    }


def check_nothing(results) -> None:
    """Floats are NaN, ids -1, counts and offsets 0."""
    for path, leaf in jax.tree.leaves_with_path(results):
        name = jax.tree_util.keystr(path[-1:]).lstrip(".")
        for shard in leaf.addressable_shards:
            value = np.asarray(shard.data)
            if np.issubdtype(value.dtype, np.floating):
                assert np.isnan(value).all(), (name, value)
            else:
                assert (value == NONE_OF.get(name, -1)).all(), (name, value)


def check_told(ep, ranks, others, here: str, there: str) -> None:
    """The error names a rank of this process, one of the others', and both calls."""
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        ep.check()
    message = str(raised.value)
    found = re.search(
        r"rank (\d+) \(.* in a (.*) of this handle \(key 0x[0-9a-f]+\) while rank "
        r"(\d+) was in (.*); .* same calls in the same order on every process",
        message,
    )
    assert found, message
    rank, own, source, other = found.groups()
    assert int(rank) in ranks, message
    assert int(source) == min(others), message
    assert own.startswith(here), message
    assert other.startswith(there), message
    assert ep.check() is None  # the error was cleared


def main(port: str, processes: str, process: str, devices: str, transport: str) -> None:
    start(port, int(processes), int(process), devices)
    size, me = jax.device_count(), jax.process_index()
    mesh = helpers.make_mesh(size)
    experts = {"num_experts": LOCAL_EXPERTS * size}
    copy = {} if transport == "collective" else {"overlap": "copy"}
    config = helpers.make_config(**FIELDS, **experts, **copy, **helpers.HALVES)
    inputs = helpers.make_inputs(
        np.random.default_rng(8), config, size, fill=helpers.normal
    )
    spec = compare_transports.P("ep")
    operands = [
        helpers.put(mesh, part, spec)
        for part in (inputs.tokens, inputs.ids, inputs.weights)
    ]
    handles = [jax_ep.init(mesh, "ep", config, transport=transport) for _ in range(2)]
    made = []
    for ep in handles:
        d = helpers.run_dispatch(ep, mesh, inputs)
        helpers.assert_dispatched(config, d, inputs)
        made.append(calls(ep, mesh, operands, d.route, d.tokens))
    own = [r for r, d in enumerate(mesh.devices.flat) if d.process_index == me]
    first = [r for r, d in enumerate(mesh.devices.flat) if d.process_index == 0]
    rest = [rank for rank in range(size) if rank not in first]
    this_one = "another call of this handle, a "
    # The handle and the call that process 0 and that the others run.
    pairs = [
        ((0, "dispatch in halves"), (1, "dispatch in halves")),
        ((1, "combine in halves"), (0, "combine in halves")),
        ((0, "dispatch in halves"), (0, "combine in halves")),
    ]
    if transport == "collective":
        pairs += [
            ((0, "dispatch"), (1, "dispatch")),
            ((0, "dispatch"), (0, "dispatch elsewhere")),
            ((0, "dispatch"), (0, "dispatch in halves")),
            ((0, "combine"), (0, "dispatch")),
            ((0, "combine"), (1, "combine")),
            ((0, "cached dispatch"), (1, "cached dispatch")),
        ]
    for pair in pairs:
        mine, theirs = pair if me == 0 else pair[::-1]
        handle, name = mine
        check_nothing(jax.block_until_ready(made[handle][name]()))
        here, other = (
            call.removesuffix(" in halves").removesuffix(" elsewhere")
            for _, call in (mine, theirs)
        )
        same = handle == theirs[0]
        check_told(
            handles[handle],
            own,
            rest if me == 0 else first,
            here,
            f"{this_one}{other}" if same else f"a {other}",
        )
        # A call that all processes make together is right.
        for ep in handles:
            d = helpers.run_dispatch(ep, mesh, inputs)
            helpers.assert_dispatched(config, d, inputs)
            assert ep.check() is None
    if transport == "collective":
        # Programs outlive their handles, and still give empty results.
        run = made[int(me == 0)]["dispatch"]
        for ep in handles:
            ep.close()
        check_nothing(jax.block_until_ready(run()))
    print("right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
