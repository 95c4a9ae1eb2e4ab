"""Transport p2p: any order of calls, many in flight, epochs that wrap, threads.

What could hang runs in its own process, p2p_worker.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep._setup import init
from support import compare_transports, gpus, helpers

pytestmark = pytest.mark.gpu

# One region per source (T > 512), and two.
DEPTHS = pytest.mark.parametrize("tokens", [600, 64], ids=["depth1", "depth2"])


def config(tokens: int, **changes):
    fields = {"max_tokens_per_rank": tokens, "hidden_size": 64, "top_k": 4}
    return helpers.make_config(**(fields | changes))


def layer(ep, o):
    """Rows, sums and counts of one layer; E depends on the rows that arrived."""
    d = jax_ep.dispatch(ep, o.dy, o.ids, o.weights)
    y = jax_ep.combine(ep, d.tokens * 2, d.route, d.router_weights, residual=o.dy)
    return d.tokens, d.src_info, d.expert_counts, y


def programs(pair, body):
    """`body(ep, ...)` compiled for p2p and for collective."""
    return [
        compare_transports.mapped(pair.mesh, functools.partial(body, ep))
        for ep in (pair.p2p, pair.collective)
    ]


@DEPTHS
def test_many_in_flight(tokens: int) -> None:
    """250 dispatch-combine pairs are enqueued before the first result is read."""
    with compare_transports.Pair(compare_transports.p2p_mesh(), config(tokens)) as pair:
        fast, plain = programs(pair, layer)
        sets = [pair.operands(seed, tokens) for seed in range(5)]
        wanted = [plain(o) for o in sets]
        results = [fast(sets[i % 5]) for i in range(250)]
        for i, result in enumerate(results):
            compare_transports.assert_same(result, wanted[i % 5], f"call {i}")


def test_handles_interleaved() -> None:
    """Calls alternate between different handles and a twin, with many in flight."""
    mesh = compare_transports.p2p_mesh()
    with (
        compare_transports.Pair(mesh, config(600)) as a,
        compare_transports.Pair(
            mesh, config(64, dtype="float32", expert_alignment=8)
        ) as b,
        compare_transports.Pair(mesh, config(600)) as again,
    ):
        made = []
        for seed, pair in enumerate((a, b, again, b)):
            fast, plain = programs(pair, layer)
            operands = pair.operands(seed, pair.p2p.config.max_tokens_per_rank - seed)
            made.append((fast, operands, plain(operands)))
        results = [[fast(operands) for fast, operands, _ in made] for _ in range(40)]
        for i, round_ in enumerate(results):
            for result, (_, _, wanted) in zip(round_, made, strict=True):
                compare_transports.assert_same(result, wanted, f"round {i}")


def ddcc(ep, o, p):
    """Two dispatches, then their combines: the older route's come last, and twice."""
    first = jax_ep.dispatch(ep, o.dy, o.ids, o.weights)
    second = jax_ep.dispatch(ep, p.dy, p.ids, p.weights)
    y_second = jax_ep.combine(ep, second.tokens, second.route, second.router_weights)
    y_first = jax_ep.combine(ep, first.tokens, first.route, first.router_weights)
    # A third dispatch, and the first route once more after it.
    third = jax_ep.dispatch(ep, y_second, p.ids, p.weights)
    again = jax_ep.combine(ep, first.tokens * 2, first.route)
    y_third = jax_ep.combine(ep, third.tokens, third.route, third.router_weights)
    return y_first, y_second, y_third, again


def looped(ep, o):
    """A scan over rematerialised layers, and its gradient."""

    @jax.checkpoint
    def step(x, scale):
        d = jax_ep.dispatch(ep, x, o.ids, o.weights * scale)
        rows = jnp.where(d.src_info[:, :1] >= 0, d.tokens / 2, 0)
        y = jax_ep.combine(ep, rows, d.route, d.router_weights)
        return (y / 4).astype(x.dtype), None

    def loss(x):
        y, _ = jax.lax.scan(step, x, jnp.arange(1.0, 6.0, dtype=jnp.float32))
        return jnp.sum(y.astype(jnp.float32) * o.residual.astype(jnp.float32)), y

    (_, y), dx = jax.value_and_grad(loss, has_aux=True)(o.dy)
    return y, dx


@DEPTHS
def test_order_dispatch_dispatch_combine_combine(tokens: int) -> None:
    with compare_transports.Pair(compare_transports.p2p_mesh(), config(tokens)) as pair:
        fast, plain = programs(pair, ddcc)
        sets = [(pair.operands(s, tokens), pair.operands(s + 9, 5)) for s in range(3)]
        wanted = [plain(*o) for o in sets]
        for i, result in enumerate([fast(*sets[i % 3]) for i in range(30)]):
            compare_transports.assert_same(result, wanted[i % 3], f"call {i}")


@DEPTHS
def test_scan_over_rematerialised_layers(tokens: int) -> None:
    with compare_transports.Pair(compare_transports.p2p_mesh(), config(tokens)) as pair:
        fast, plain = programs(pair, looped)
        operands = pair.operands(7, tokens)
        wanted = plain(operands)
        for result in [fast(operands) for _ in range(10)]:
            compare_transports.assert_same(result, wanted)


@DEPTHS
@pytest.mark.parametrize("bits", [32, 63, 64])
def test_epochs_wrap(bits: int, tokens: int, monkeypatch) -> None:
    """Calls whose epochs pass 2**32, 2**63 and 2**64; each call adds one."""
    monkeypatch.setattr(init, "_FIRST_EPOCH", 2**bits - 5)
    with compare_transports.Pair(compare_transports.p2p_mesh(), config(tokens)) as pair:
        fast, plain = programs(pair, layer)
        sets = [pair.operands(seed, tokens - seed) for seed in range(3)]
        wanted = [plain(o) for o in sets]
        for i, result in enumerate([fast(sets[i % 3]) for i in range(24)]):
            compare_transports.assert_same(result, wanted[i % 3], f"call {i}")


@pytest.mark.parametrize("preload", ["true", "false"], ids=["pool", "no_pool"])
@pytest.mark.parametrize("what", ["collectives", "compiling", "threads"])
def test_beside_other_work(what: str, preload: str) -> None:
    """With XLA's memory pool, and with allocations while kernels wait for peers."""
    compare_transports.p2p_mesh()
    result = gpus.run_worker(
        "p2p_worker.py",
        what,
        timeout=600,
        XLA_PYTHON_CLIENT_PREALLOCATE=preload,
        XLA_PYTHON_CLIENT_MEM_FRACTION=".1",
    )
    assert result["wrong"] == 0
    assert result["calls"] >= 100
    assert result["others"] >= 5
