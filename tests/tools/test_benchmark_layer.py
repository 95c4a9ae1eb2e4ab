"""The basis of benchmarks/layers/layer.py: layers agree, and errors are noticed."""

from __future__ import annotations

import functools
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from benchmarks.layers import cases as layer_cases
from benchmarks.layers import experts as layer_experts
from benchmarks.layers import kinds as layer_kinds
from benchmarks.layers import report as layer_report
from benchmarks.layers import worker as layer_worker
from jax_ep._cli.bench import checks
from jax_ep._cli.bench.transports import normal
from support import helpers
from support.layer_rows import timing

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("quick_compiles")]

SIZES = {"hidden": 32, "inner": 16, "experts": 16, "top_k": 3, "tokens": 8}
WIDE = SIZES | {"hidden": 128, "inner": 128, "experts": 4, "top_k": 2}  # for fp8


@pytest.fixture(scope="module")
def case():
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    return layer_cases.make_case(mesh, SIZES, seed=5)


@pytest.fixture(scope="module")
def wide():
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    return layer_cases.make_case(mesh, WIDE, seed=5)


def results(case, layer, *operands):
    """The layer's results with all gradients."""
    run = layer_cases.compiling(case, layer, *operands)["both"]()
    return run(case.tokens[0])


@functools.cache
def sparse(name="ragged_dot"):
    return layer_experts.make(name, 128)


def handle(case, **changes):
    sizes = case.sizes
    config = jax_ep.EPConfig(
        num_experts=sizes["experts"],
        top_k=sizes["top_k"],
        hidden_size=sizes["hidden"],
        max_tokens_per_rank=sizes["tokens"],
        recv_capacity=case.capacity,
        **changes,
    )
    return jax_ep.init(case.mesh, "ep", config, transport=helpers.TRANSPORT)


@pytest.fixture(scope="module")
def ours(case):
    with handle(case) as ep:
        yield results(case, layer_kinds.ours(ep, sparse()))


def dense_formula(case):
    """y and gradients in float32, with every expert on every token, on one device."""
    sizes = case.sizes

    def formula(tokens, params):
        routing = layer_kinds.route(tokens, params["router"], sizes["top_k"])
        chosen = jax.nn.one_hot(routing.ids, sizes["experts"])
        weights = jnp.einsum("nke,nk->ne", chosen, routing.weights)
        both = jnp.einsum("nh,ehcf->necf", tokens, params["gate_up"])
        rows = jax.nn.silu(both[:, :, 0]) * both[:, :, 1] * weights[..., None]
        return jnp.einsum("nef,efh->nh", rows, params["down"])

    def alone(x):
        return jnp.asarray(np.asarray(x), jnp.float32)

    y, back = jax.vjp(formula, *jax.tree.map(alone, (case.tokens[0], case.params)))
    none = jnp.zeros(len(y), bool)
    return (y, none), back(alone(case.cotangent))


def test_ours_is_the_dense_formula(case, ours):
    assert max(layer_cases.errors(ours, dense_formula(case)).values()) < 0.03


def test_experts_in_fp8_are_the_dense_formula(wide):
    """Results are right with the weights' codes as an operand, and not with others."""
    codes = layer_cases.quantizing(wide)()
    halved = jax.tree.map(lambda x: x / 2 if x.dtype == jnp.float32 else x, codes)
    wanted, tolerance = dense_formula(wide), layer_cases.TOLERANCES["fp8_block128"]
    with handle(wide, dispatch_format="fp8_block128") as ep:
        layer = layer_kinds.coded(ep)
        errors = layer_cases.errors(results(wide, layer, codes), wanted)
        assert errors.keys() >= {"y", "d tokens", "d router", "d gate_up", "d down"}
        assert 0.001 < max(errors.values()) < tolerance
        wrong = layer_cases.errors(results(wide, layer, halved), wanted)
        assert wrong["y"] > tolerance
        # A program may be called with other operands than it was compiled with.
        run = layer_cases.compiling(wide, layer, halved)["both"]()
        again = layer_cases.errors(run(wide.tokens[0], codes), wanted)
        assert again == pytest.approx(errors)


def test_experts_in_fp8_alone_are_those_in_bfloat16(wide):
    shape = (wide.mesh.size * wide.capacity, WIDE["hidden"])
    counts = layer_cases.group_sizes(wide)
    keep = checks.mapped(wide.mesh, layer_worker._zeros_past_the_end)
    rows = keep(normal(wide.mesh, jax.random.key(0), shape), counts)
    quantize = functools.partial(jax_ep.formats.quantize, format="fp8_block128")
    codes = checks.mapped(wide.mesh, quantize)(rows)
    found = []
    for layer, *operands in (
        (layer_kinds.alone_coded(WIDE), codes, layer_cases.quantizing(wide)()),
        (layer_kinds.alone(WIDE, sparse()),),
    ):
        (out, weights), grads = results(wide, layer, rows, counts, *operands)
        rest = keep(grads[2], counts), grads[1]
        none = jnp.zeros(len(out), bool)
        found.append(((keep(out, counts), none), rest))
        assert weights.shape == (wide.mesh.size * WIDE["tokens"], WIDE["top_k"])
    errors = layer_cases.errors(*found)
    assert 0.001 < max(errors.values()) < layer_cases.TOLERANCES["fp8_block128"]


@pytest.mark.parametrize("microbatches", layer_cases.MICROBATCHES)
def test_a_step_makes_codes_once(microbatches):
    """A step's time includes all its calls; without codes it consists only of calls."""
    made, seen = iter(range(100)), []

    def run(tokens, *codes):
        time.sleep(0.001)
        seen.append((tokens, *codes))
        return jnp.zeros(1)

    case = types.SimpleNamespace(tokens=["a", "b"])
    how = (microbatches, 0, 3)
    found = layer_cases.measure_step(case, run, lambda: next(made), *how)
    # Two to warm up, and those of each repeat.
    assert [codes for _, codes in seen] == [
        step for step in range(2 + 3 * 2) for _ in range(microbatches)
    ]
    assert {tokens for tokens, _ in seen[-2:]} == {"a", "b"}
    assert (found["steps"], found["repeats"]) == (2, 3)
    assert microbatches <= found["ms_least"] <= found["ms"]
    seen.clear()
    layer_cases.measure_step(case, run, None, *how)
    assert {len(each) for each in seen} == {1}


@pytest.mark.parametrize("factor", [8, 0.5])
def test_dense_layer_equals_ours_but_for_what_it_drops(case, ours, factor, monkeypatch):
    monkeypatch.setattr(layer_kinds, "CAPACITY_FACTOR", factor)
    assert layer_kinds.slots(SIZES) == (16 if factor == 8 else 8)
    if factor < 1:
        monkeypatch.setattr(layer_kinds, "slots", lambda sizes: 1)
    found = results(case, layer_kinds.over_dense(SIZES))
    errors = layer_cases.errors(found, ours)
    dropped = np.asarray(found[0][1])
    # Per-token results are compared for tokens without dropped rows.
    assert max(errors["y"], errors["d tokens"]) < 0.03
    if factor == 8:
        assert not dropped.any()
        assert max(errors.values()) < 0.03
    else:
        assert 0 < dropped.sum() < dropped.size
        assert set(errors) == {"y", "d tokens"}


def test_padded_experts_equal_ragged_dot(case, ours):
    rows = normal(
        case.mesh,
        jax.random.key(0),
        (case.mesh.size * case.capacity, SIZES["hidden"]),
    )
    counts = layer_cases.group_sizes(case)
    assert int(counts.sum()) == case.mesh.size * SIZES["tokens"] * SIZES["top_k"]
    local = SIZES["experts"] // case.mesh.size
    end = np.asarray(counts).reshape(-1, local).sum(1)
    real = np.arange(case.capacity) < end[:, None]
    rows = rows * real.reshape(-1, 1).astype(rows.dtype)
    found = []
    for name in ("padded", "ragged_dot"):
        single = layer_kinds.alone(SIZES, sparse(name))
        program = layer_cases.compiling(case, single, rows, counts)["both"]()
        (out, weights), grads = program(case.tokens[0])
        out, rows_grad = (
            np.asarray(x, np.float32) * real.reshape(-1, 1) for x in (out, grads[2])
        )
        found.append((out, weights, rows_grad, grads[1]))
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        want = np.asarray(want, np.float32)
        error = np.abs(np.asarray(got, np.float32) - want).max()
        assert error < 0.03 * np.abs(want).max()


@pytest.mark.parametrize(("slow", "passes"), [(2, 2), (10, 1)])
def test_the_fastest_way_of_multiplying_is_taken(case, slow, passes, monkeypatch):
    """A hopelessly slow way is timed only in the forward pass."""
    rows, ms = [], {"padded": slow, "ragged_dot": 1.0}
    spec = {"matmul": {"mid": ["padded", "ragged_dot"]}, "take": None, "deadline": 0}
    worker = layer_worker.Worker(
        spec | {"milliseconds": 0, "repeats": 1}, case, "mid", rows.append
    )
    order = iter([*ms, *(["padded"] if passes == 2 else []), "ragged_dot"])
    monkeypatch.setattr(
        layer_cases, "measure", lambda *_: timing(ms[next(order)] * 1.0)
    )
    assert worker.choose_matmul() == "ragged_dot"
    assert worker.experts_ms["ragged_dot"] == {"forward": 1.0, "both": 1.0}
    assert sum(r["matmul"] == "padded" for r in rows) == passes
    assert all(0 <= max(r["errors"].values()) < 0.03 for r in rows)
    assert not any(r["wrong"] for r in rows)
    assert all("experts" in layer_report.line(r) for r in rows)


def test_errors_are_seen(ours):
    (y, dropped), (tokens, params) = ours
    wrong = np.array(params["down"])
    wrong[-1, 0, 0] += np.abs(wrong).max()
    found = layer_cases.errors(((y, dropped), (tokens, params | {"down": wrong})), ours)
    assert found.pop("d down") > 0.5
    assert max(found.values()) == 0
    # Rows that both drop do not prevent a comparison.
    fewer = dropped.at[0].set(True)
    same = ((y, fewer), (tokens, params))
    assert layer_cases.errors(same, same).keys() > found.keys()
    broken = ((y.at[0, 0].set(jnp.nan), dropped), (tokens, params))
    assert layer_cases.errors(broken, ours)["y"] == np.inf


@pytest.mark.gpu
@pytest.mark.parametrize("group_sizes", [[100, 0, 130, 282], [0, 5, 0, 500]])
def test_hopper_equals_ragged_dot(group_sizes):
    sizes = {"hidden": 256, "inner": 128}
    assert layer_experts.available("padded", sizes)
    if not layer_experts.available("hopper", sizes):
        pytest.skip("needs compute capability 9.0")
    keys = jax.random.split(jax.random.key(0), 4)
    real = jnp.arange(512)[:, None] < sum(group_sizes)

    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16) / shape[1] ** 0.5

    rows = jnp.where(real, 16 * normal(keys[0], 512, 256), 0)
    gate_up, down = normal(keys[1], 4, 256, 2, 128), normal(keys[2], 4, 128, 256)
    cotangent = jnp.where(real, normal(keys[3], 512, 256), 0)
    counts = jnp.array(group_sizes, jnp.int32)
    found = []
    for name in ("hopper", "ragged_dot"):

        def run(rows, gate_up, down, name=name):
            return layer_experts.make(name, 512)(rows, gate_up, down, counts)

        out, back = jax.jit(lambda *args, run=run: jax.vjp(run, *args))(
            rows, gate_up, down
        )
        to_rows, *to_weights = jax.jit(lambda f, ct: f(ct))(back, cotangent)
        masked = [jnp.where(real, each, 0) for each in (out, to_rows)]
        found.append([*masked, *to_weights])
    for got, want in zip(*found, strict=True):
        want = np.asarray(want, np.float32)
        error = np.abs(np.asarray(got, np.float32) - want).max()
        assert error < 0.03 * np.abs(want).max()
