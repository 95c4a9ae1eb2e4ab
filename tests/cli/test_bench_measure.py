"""What `jax-ep bench` measures: bytes, JAX's own path, whether results are right."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep._cli.bench import checks as p2p_check
from jax_ep._cli.bench import loops as p2p_programs
from jax_ep._cli.bench import ragged
from jax_ep._cli.bench import routings as p2p_cases
from jax_ep._cli.bench import transports as p2p_transports
from support import helpers

pytestmark = pytest.mark.thorough

EXPERTS, TOP_K, HIDDEN = 16, 3, 16
SPEC = {
    "hidden": HIDDEN,
    "dtype": "bfloat16",
    "format": "bf16",
    "combine_format": None,
    "experts": EXPERTS,
    "top_k": TOP_K,
    "seed": 11,
    "repeats": 3,
    "milliseconds": 0.2,
    "unrolled": 4,
    "peak_gb_s": 100.0,
}


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


@pytest.fixture(scope="module")
def case(mesh):
    return p2p_transports.make_case(mesh, SPEC, 6, "uniform", defaults=False)


@pytest.fixture
def other(case):
    transport = p2p_transports.reference(case)
    yield transport
    transport.ep.close()


def draws(routing, tokens=2048, seed=3, count=2):
    return p2p_cases.draw_ids(seed, tokens, TOP_K, EXPERTS, routing, count)


@pytest.mark.parametrize("routing", p2p_cases.ROUTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_are_those_of_the_busiest_rank(routing, ranks):
    ids = draws(routing)[0]
    sent, received, rows = np.zeros((3, ranks), int)
    tokens = len(ids) // ranks
    for token, experts in enumerate(ids.tolist()):
        source = token // tokens
        owners = [expert // (EXPERTS // ranks) for expert in experts]
        for rank in set(owners) - {source}:
            sent[source] += 1
            received[rank] += 1
        for rank in owners:
            rows[rank] += 1
    busiest = max(sent.max(), received.max())
    assert p2p_cases.remote_rows(ids, ranks, EXPERTS) == busiest
    assert p2p_cases.most_rows(ids, ranks, EXPERTS) == rows.max()
    wire = p2p_cases.wire([ids], ranks, EXPERTS, 32, 100.0)
    assert wire["bytes"] == busiest * 32
    assert wire["floor_us"] == pytest.approx(busiest * 32 / 1e5)


def dense_rows(ids, tokens, ranks):
    """Every rank's rows, by expert, source, token and k in order, and group sizes."""
    local = EXPERTS // ranks
    flat = ids.reshape(-1)
    rows = [tokens[np.flatnonzero(flat == e) // TOP_K] for e in range(EXPERTS)]
    sizes = [len(each) for each in rows]
    by_rank = [
        np.concatenate(rows[rank * local : (rank + 1) * local]) for rank in range(ranks)
    ]
    return by_rank, np.array(sizes)


@pytest.mark.parametrize("updates", ragged.UPDATES)
def test_ragged_path_equals_the_dense_formula(mesh, updates):
    rng = np.random.default_rng(5)
    ranks, n = mesh.size, 7
    tokens = rng.standard_normal((ranks * n, HIDDEN)).astype(np.float32)
    weights = rng.standard_normal((ranks * n, TOP_K)).astype(np.float32)
    capacity = ranks * n * TOP_K + 5
    scale = rng.standard_normal(EXPERTS).astype(np.float32)

    def layer(tokens, ids, weights, scale):
        rows, sizes, way = ragged.dispatch(
            tokens,
            ids,
            axis="ep",
            experts=EXPERTS,
            rows=capacity,
            updates=updates,
            exchange=ragged.reference_exchange,
        )
        expert = jnp.repeat(scale, sizes, total_repeat_length=capacity)
        y = ragged.combine(
            rows * expert[:, None],
            way,
            weights,
            axis="ep",
            exchange=ragged.reference_exchange,
        )
        return rows, sizes, y

    spec = P("ep")
    run = jax.shard_map(
        layer, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    run = jax.jit(run)
    for experts_used in (EXPERTS, 3):
        shape = (ranks * n, experts_used)
        ids = np.argsort(rng.random(shape))[:, :TOP_K].astype(np.int32)
        rows, sizes, y = map(np.asarray, run(tokens, ids, weights, scale))
        expected_rows, expected_sizes = dense_rows(ids, tokens, ranks)
        np.testing.assert_array_equal(sizes, expected_sizes)
        rows = rows.reshape(ranks, capacity, HIDDEN)
        for found, expected in zip(rows, expected_rows, strict=True):
            np.testing.assert_array_equal(found[: len(expected)], expected)
        expected_y = np.einsum("tk,tk,th->th", weights, scale[ids], tokens)
        np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)


def test_measured_transport_is_right_and_says_so(case, other):
    rows = p2p_transports.measure_transport(SPEC, case, other, "collective", None)
    assert [row["op"] for row in rows] == ["dispatch", "combine"]
    for row in rows:
        assert row["wrong"] is False
        assert row["differences"] == {}
        assert row["calls"] % SPEC["unrolled"] == 0
        assert 0 < row["us_least"] <= row["us"] <= row["us_most"]
        assert row["gb_s"] == row["bytes"] / row["us"] / 1e3
        # A single rank sends nothing.
        assert row["of_peak"] == (row["floor_us"] / row["us"] or None)


def altered(array, entry):
    """`array` with one bit of one entry flipped."""
    host = np.array(array)
    host.reshape(-1).view(f"u{host.dtype.itemsize}")[entry] ^= 1
    return jax.device_put(host, array.sharding)


def test_wrong_results_of_a_measured_transport_are_seen(case, other):
    other.name = "altered"  # so that a second handle is measured and compared
    other.combined[1] = altered(other.combined[1], -1)
    other.dispatched[2] = dataclasses.replace(
        other.dispatched[2], tokens=altered(other.dispatched[2].tokens, 0)
    )
    rows = p2p_transports.measure_transport(SPEC, case, other, "collective", None)
    dispatch, combine = rows
    assert dispatch["wrong"] is combine["wrong"] is True
    assert dispatch["differences"] == {"tokens": 1, "y": 1}
    assert combine["differences"] == {
        "tokens": 1,
        "y": 1,
        "checksum of the timed calls": 1,
    }


@pytest.mark.parametrize("field", ["row_offsets", "src_info", "router_weights"])
def test_comparison_sees_one_bit(mesh, case, other, field):
    d = other.dispatched[0]
    changed = dataclasses.replace(d, **{field: altered(getattr(d, field), 0)})
    found = p2p_check.dispatched(mesh, case.config, d, changed)
    assert found == {field: 1}


@pytest.mark.parametrize("field", ["slot_of", "row_of", "row_slot", "slot_counts"])
def test_comparison_sees_one_bit_of_the_route(mesh, case, other, field):
    d = other.dispatched[0]
    route = dataclasses.replace(d.route, **{field: altered(getattr(d.route, field), 0)})
    found = p2p_check.dispatched(
        mesh, case.config, d, dataclasses.replace(d, route=route)
    )
    assert found == {field: 1}


@pytest.mark.parametrize("tie", ["data", "barrier"])
def test_a_program_makes_every_call_with_its_own_draw(mesh, tie):
    ranks = mesh.size
    seen = []

    def note(value):
        seen.append(int(value))

    def step(first, rest, shared):
        jax.debug.callback(note, first[0], ordered=False)
        return [first + shared.astype(first.dtype)]

    sharded = functools.partial(
        jax.device_put, device=jax.sharding.NamedSharding(mesh, P("ep"))
    )
    values = [sharded(np.full(ranks, 10 * draw, np.int32)) for draw in range(1, 4)]
    operation = p2p_programs.Operation(
        step, [(value, ()) for value in values], sharded(np.full(ranks, 7, np.int32))
    )
    program = p2p_programs.compiling(mesh, operation, 5, 3, tie)()
    checksum = np.asarray(program.run())
    jax.effects_barrier()
    assert program.calls == 15
    assert sorted(seen) == sorted([10, 20, 30, 10, 20] * 3 * ranks)
    last = [p2p_programs.last_elements(mesh)(value + 7) for value in values]
    np.testing.assert_array_equal(
        checksum, p2p_programs.expected_checksum(program, last)
    )
    np.testing.assert_array_equal(checksum, 3 * (17 + 27 + 37 + 17 + 27))
