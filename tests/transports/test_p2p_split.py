"""Transport p2p: calls in halves at real sizes, also never ended or ended twice.

The semantics tests of halves (test_split*.py) run with JAX_EP_TEST_TRANSPORT=p2p.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from jax_ep._setup import init
from support import compare_transports, helpers
from support.p2p_calls import halves, pipelined, whole

pytestmark = pytest.mark.gpu

# One region for whole calls (T > 512), and two.
TURNS = pytest.mark.parametrize("tokens", [600, 64], ids=["one", "two"])


def config(tokens: int, **changes: Any) -> Any:
    fields = {"max_tokens_per_rank": tokens, "hidden_size": 64, "top_k": 4}
    return helpers.make_config(**(fields | helpers.HALVES | changes))


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "copied": {"overlap": "copy"},
    "stream": {"overlap": "stream"},
    "few_blocks": {"num_sms": 3},
    "wide": {"hidden_size": 7168, "num_experts": 64, "top_k": 8},
    "long_rows": {"hidden_size": 70_000, "max_tokens_per_rank": 32},
    "float32": {"dtype": "float32", "combine_dtype": "bfloat16"},
    "aligned": {"expert_alignment": 32, "recv_capacity": 700},
    "fp8": {
        "hidden_size": 1024,
        "dispatch_format": "fp8_block128",
        "combine_format": "fp8_block128",
    },
    "fp8_copied": {
        "hidden_size": 1024,
        "dispatch_format": "fp8_block128",
        "overlap": "copy",
    },
    "fp8_stream": {
        "hidden_size": 1024,
        "dispatch_format": "fp8_block128",
        "combine_format": "fp8_block128",
        "overlap": "stream",
    },
    "mxfp8_tiled": {
        "hidden_size": 1024,
        "dispatch_format": "mxfp8",
        "scale_layout": "tiled_128x4",
    },
    "mxfp4": {"hidden_size": 1024, "dispatch_format": "mxfp4"},
    "nvfp4": {"hidden_size": 1024, "dispatch_format": "nvfp4"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits(shape: str) -> None:
    """The same as whole calls over windows and as XLA's exchange, for any n."""
    made = config(1000, **SHAPES[shape])
    with compare_transports.Pair(compare_transports.p2p_mesh(), made) as pair:
        runs = [
            compare_transports.mapped(pair.mesh, functools.partial(body, ep))
            for body, ep in (
                (halves, pair.p2p),
                (whole, pair.p2p),
                (whole, pair.collective),
            )
        ]
        few = list(SHAPES).index(shape) % 2
        for n in (few, 9, 30, 513, 1000):
            if n > made.max_tokens_per_rank:
                continue
            for routing in ("random", "duplicates", ("none", "full", "one:3", "full")):
                o = pair.operands(n, n, routing)
                results = [run(o) for run in runs]
                for other in results[1:]:
                    compare_transports.assert_same(results[0], other, f"{n} {routing}")


def pulled(ep: Any, o: compare_transports.Operands) -> Any:
    """The sums of a layer in halves, and its gradients."""

    def run(x: Any, weights: Any, residual: Any) -> Any:
        d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, o.ids, weights))
        return jax_ep.combine_wait(
            jax_ep.combine_async(
                ep, d.tokens * 2, d.route, d.router_weights, residual=residual
            )
        )

    y, pull = jax.vjp(run, o.dy, o.weights, o.residual)
    return y, pull(y)


@pytest.mark.parametrize("overlap", ["sm", "copy", "stream"])
@pytest.mark.parametrize("tokens", [7, 600])
def test_same_gradients(tokens: int, overlap: str) -> None:
    """All backward calls use the windows, with a route from either kind of halves."""
    made = config(tokens, overlap=overlap, recv_capacity=2 * tokens)
    with compare_transports.Pair(compare_transports.p2p_mesh(), made) as pair:
        fast, plain = (
            compare_transports.mapped(pair.mesh, functools.partial(pulled, ep))
            for ep in (pair.p2p, pair.collective)
        )
        for routing in ("random", "duplicates"):
            o = pair.operands(tokens, tokens, routing)
            compare_transports.assert_same(fast(o), plain(o), routing)


def looped(ep: Any, o: compare_transports.Operands) -> Any:
    """Three layers in a scan, whose halves the backward pass repeats."""

    @jax.checkpoint
    def step(x: Any, _: None) -> Any:
        d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, o.ids, o.weights))
        return jax_ep.combine_wait(jax_ep.combine_async(ep, d.tokens, d.route)), None

    y, pull = jax.vjp(lambda x: jax.lax.scan(step, x, None, length=3)[0], o.dy)
    return y, pull(y)


@pytest.mark.parametrize("overlap", ["sm", "copy", "stream"])
def test_loops(overlap: str) -> None:
    made = config(600, overlap=overlap, recv_capacity=1200)
    with compare_transports.Pair(compare_transports.p2p_mesh(), made) as pair:
        fast, plain = (
            compare_transports.mapped(pair.mesh, functools.partial(looped, ep))
            for ep in (pair.p2p, pair.collective)
        )
        o = pair.operands(5, 600)
        compare_transports.assert_same(fast(o), plain(o))


@TURNS
@pytest.mark.parametrize(
    ("overlap", "first_epoch"), [("sm", None), ("sm", 2**64 - 3), ("stream", None)]
)
def test_in_flight(tokens: int, overlap: str, first_epoch: Any, monkeypatch) -> None:
    monkeypatch.setattr(init, "_FIRST_EPOCH", first_epoch)
    with compare_transports.Pair(
        compare_transports.p2p_mesh(), config(tokens, overlap=overlap)
    ) as pair:
        fast, plain = (
            compare_transports.mapped(pair.mesh, functools.partial(pipelined, ep))
            for ep in (pair.p2p, pair.collective)
        )
        sets = [pair.operands(seed, tokens) for seed in range(4)]
        wanted = [plain(o) for o in sets]
        results = [fast(sets[i % 4]) for i in range(100)]
        for i, result in enumerate(results):
            compare_transports.assert_same(result, wanted[i % 4], f"program {i}")


@TURNS
def test_across_programs(tokens: int) -> None:
    """Pendings leave their program; each ends after the next one has begun."""
    with compare_transports.Pair(compare_transports.p2p_mesh(), config(tokens)) as pair:
        ep, mesh = pair.p2p, pair.mesh

        def begin(o: Any) -> Any:
            return jax_ep.dispatch_async(ep, o.dy, o.ids, o.weights)

        start = compare_transports.mapped(mesh, begin)
        end = compare_transports.mapped(mesh, jax_ep.dispatch_wait)
        plain = compare_transports.mapped(
            mesh, lambda o: jax_ep.dispatch(pair.collective, o.dy, o.ids, o.weights)
        )
        sets = [pair.operands(seed, tokens) for seed in range(6)]
        before = start(sets[0])
        for now, after in zip(sets, [*sets[1:], sets[0]], strict=True):
            following = start(after)
            compare_transports.assert_same(end(before), plain(now))
            before = following


@TURNS
def test_dropped_calls_hold_up_nothing(tokens: int) -> None:
    with compare_transports.Pair(compare_transports.p2p_mesh(), config(tokens)) as pair:

        def drop(o: Any) -> Any:
            pendings = [
                jax_ep.dispatch_async(pair.p2p, o.dy, o.ids, o.weights)
                for _ in range(2)
            ]
            d = jax_ep.dispatch(pair.p2p, o.dy, o.ids, o.weights)
            # Keeps the first halves, which are never ended.
            return d.tokens, [pending.held for pending in pendings]

        start = compare_transports.mapped(pair.mesh, drop)
        run, plain = (
            compare_transports.mapped(pair.mesh, functools.partial(halves, ep))
            for ep in (pair.p2p, pair.collective)
        )
        o = pair.operands(1, tokens)
        wanted = plain(o)
        for _ in range(5):
            start(o)
            compare_transports.assert_same(run(o), wanted)


@pytest.mark.parametrize("how", ["twice", "given up"])
def test_ended_when_not_pending(how: str) -> None:
    """A named error, after which other handles still work."""
    mesh = compare_transports.p2p_mesh()
    with compare_transports.Pair(mesh, config(64)) as pair:
        start = compare_transports.mapped(
            mesh, lambda o: jax_ep.dispatch_async(pair.p2p, o.dy, o.ids, o.weights)
        )
        end = compare_transports.mapped(mesh, jax_ep.dispatch_wait)
        o = pair.operands(2, 64)
        pending = start(o)
        if how == "twice":
            jax.block_until_ready(end(pending))
        else:
            jax.block_until_ready([start(o), start(o)])
        # A rank that launches after another has noticed raises at once.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            d = jax.block_until_ready(end(pending))
            assert bool(jnp.all(jnp.isnan(d.tokens.astype(jnp.float32))))
            assert bool(jnp.all(d.src_info == -1))
            assert not bool(jnp.any(d.expert_counts))
        with pytest.raises(
            jax.errors.JaxRuntimeError,
            match=r"rank \d was to end dispatch call epoch \d+, which was not pending",
        ):
            pair.p2p.check()
        # A new program, as one that ran before may be replayed as a graph, without
        # calling handlers.
        again = compare_transports.mapped(
            mesh, lambda o: jax_ep.dispatch(pair.p2p, o.dy, o.ids, o.weights)
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match="was not pending"):
            jax.block_until_ready(again(o))
    with compare_transports.Pair(mesh, config(64)) as pair:
        run, plain = (
            compare_transports.mapped(mesh, functools.partial(halves, ep))
            for ep in (pair.p2p, pair.collective)
        )
        o = pair.operands(3, 64)
        compare_transports.assert_same(run(o), plain(o))
