"""Routes whose arrays were changed: they are checked on use, before any access.

Also run with AddressSanitizer: tests/cc/tampered_test.cc, tests/cc/fuzz/calls_fuzz.cc.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import compare_transports, gpus, helpers

SLACK_S = 30.0  # for compiling
TABLES = ("slot_of", "row_of", "row_slot", "slot_counts")
SENTINEL = 2.0**40
HOSTILE = (helpers.INT_MIN, -2, helpers.INT_MAX, 2**30)


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


@pytest.mark.parametrize("table", ["slot_of", "row_of"])
def test_out_of_range_is_absent(mesh, table: str) -> None:
    """On the collective transport an invalid index counts as -1, bit for bit."""
    config = helpers.make_config()
    with jax_ep.init(mesh, "ep", config, transport="collective") as ep:
        rng = np.random.default_rng(3)
        inputs = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
        d = helpers.run_dispatch(ep, mesh, inputs)
        run = helpers.combine_fn(ep, mesh, P("ep"))
        good = np.array(getattr(d.route, table))
        chosen = rng.random(good.shape) < 0.3
        end = (
            ep.recv_capacity
            if table == "row_of"
            else mesh.size * config.max_tokens_per_rank
        )
        sums = []
        for values in ([-1], [*HOSTILE, end]):
            array = np.where(chosen, rng.choice(values, good.shape), good)
            changed = helpers.put(mesh, [array.astype(np.int32)], P("ep"))
            route = dataclasses.replace(d.route, **{table: changed})
            sums.append(np.asarray(run(d.tokens, route, d.router_weights, None)))
        helpers.assert_bits(sums[1], sums[0])
        whole = np.asarray(run(d.tokens, d.route, d.router_weights, None))
        assert (sums[0] != whole).any()


@pytest.mark.parametrize("reduce", ["rank", "source"])
def test_nothing_of_others_shows(mesh, reduce: str) -> None:
    """With wrong indices in range, no value of another handle is returned.

    Wire buffers are memory that XLA does not initialise, here what `other` has freed.
    """
    config = helpers.make_config(
        dtype="float32", hidden_size=256, max_tokens_per_rank=64, reduce=reduce
    )
    rng = np.random.default_rng(5)
    inputs = helpers.make_inputs(rng, config, mesh.size, fill=helpers.normal)
    spoiled = dataclasses.replace(inputs, tokens=np.full_like(inputs.tokens, SENTINEL))
    with (
        jax_ep.init(mesh, "ep", config, transport="collective") as ep,
        jax_ep.init(mesh, "ep", config, transport="collective") as other,
    ):
        run, theirs = (
            compare_transports.mapped(mesh, there_and_back(handle))
            for handle in (ep, other)
        )
        d, freed = (
            helpers.run_dispatch(handle, mesh, given)
            for handle, given in ((ep, inputs), (other, spoiled))
        )
        for way in changes_in_range(d.route, mesh.size * config.max_tokens_per_rank):
            changed = {
                name: helpers.put(mesh, [table.astype(np.int32)], P("ep"))
                for name, table in way.items()
            }
            route = dataclasses.replace(d.route, **changed)
            for _ in range(3):
                # Their buffers are free again when this call runs.
                jax.block_until_ready(theirs(freed.route, freed.tokens))
                for array in jax.tree.leaves(run(route, d.tokens)):
                    assert np.abs(np.asarray(array)).max() < SENTINEL / 2, list(way)


def changes_in_range(route, slots: int):
    rng = np.random.default_rng(6)
    shapes = {name: getattr(route, name).shape for name in TABLES}
    half = np.array(route.row_of)
    half[::2] = -1
    return (
        {"slot_counts": np.zeros(shapes["slot_counts"])},
        {"slot_of": rng.integers(0, slots, shapes["slot_of"])},
        # Backward: nothing is sent but all is expected, also rows that no slot names.
        {"slot_of": np.full(shapes["slot_of"], -1), "row_of": half},
    )


def there_and_back(ep):
    """A combine of rows, and its backward with the sums as cotangents."""

    def run(route, rows):
        y, pull = jax.vjp(lambda rows: jax_ep.combine(ep, rows, route), rows)
        return y, pull(y)

    return run


def check_outcomes(found: dict) -> None:
    assert len(found) == 20
    for what, ended in found.items():
        assert ended["seconds"] < SLACK_S, what
        message = ended["outcome"]
        if message != "returned":
            # Only the error of a rank that waits in vain is right.
            assert re.search(r"rank \d+\b.*rank \d+\b", message), (what, message)


@pytest.mark.slow
def test_process_survives() -> None:
    if helpers.TRANSPORT != "collective":
        pytest.skip("test_p2p_survives is that of p2p")
    found = gpus.run_worker("tampered_worker.py", timeout=600)
    check_outcomes(found)
    assert all(ended["outcome"] == "returned" for ended in found.values())


@pytest.mark.gpu
def test_p2p_survives() -> None:
    compare_transports.p2p_mesh(2)
    env = {"JAX_EP_TEST_TRANSPORT": "p2p"}
    check_outcomes(gpus.run_worker("tampered_worker.py", timeout=600, **env))
