"""Transport p2p: every option at real sizes, whole and in halves, against collective.

The semantics tests of options (test_options*.py) run with JAX_EP_TEST_TRANSPORT=p2p.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_ep
from support import compare_transports, helpers, options
from support.p2p_calls import results

pytestmark = pytest.mark.gpu


SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 2048, "num_experts": 64, "top_k": 8},
    "odd": {"hidden_size": 1032, "top_k": 5, "expert_alignment": 16},
    "one": {"top_k": 1},
    "cut": {"recv_capacity": 900},
    "float32": {"dtype": "float32", "combine_dtype": "bfloat16"},
    "coded": {
        "hidden_size": 1024,
        "dispatch_format": "mxfp8",
        "combine_format": "fp8_block128",
        "grad_format": "fp8_block128",
    },
    "copied": {"overlap": "copy"},
    "stream": {"overlap": "stream"},
    "coded_copied": {
        "hidden_size": 1024,
        "dispatch_format": "fp8_block128",
        "combine_format": "fp8_block128",
        "overlap": "copy",
    },
}


def _cases() -> list[tuple[str, str, int]]:
    """Each mode in half of the shapes, and with one of the small numbers of tokens."""
    few = (0, 1, 2, 7, 128)
    return [
        (mode, shape, few[(i + j) % len(few)])
        for i, mode in enumerate(options.MODES)
        for j, shape in enumerate(SHAPES)
        if j == 0 or (i + j) % 2 == 0
    ]


@pytest.mark.parametrize(("mode", "shape", "few"), _cases())
def test_same_as_collective(mode: str, shape: str, few: int) -> None:
    changes = {"max_tokens_per_rank": 600, "hidden_size": 64} | SHAPES[shape]
    changes = helpers.HALVES | options.changes(mode, changes)
    config = helpers.make_config(**changes)
    with compare_transports.Pair(compare_transports.p2p_mesh(), config) as pair:
        assert pair.p2p.transport == "p2p"
        plain, whole, split = (
            compare_transports.mapped(pair.mesh, functools.partial(results, ep, calls))
            for ep, calls in (
                (pair.collective, options.WHOLE),
                (pair.p2p, options.WHOLE),
                (pair.p2p, options.SPLIT),
            )
        )
        for n in (few, 600):
            for routing in ("random", ("none", "full", "duplicates", "one:3")):
                o = pair.operands(n, n, routing)
                wanted = plain(o)
                for run, what in ((whole, "whole"), (split, "split")):
                    actual = run(o)
                    where = f"{what} {n} {routing}"
                    compare_transports.assert_same(
                        actual["exact"], wanted["exact"], where
                    )
                    if wanted["near"] is not None:
                        compare_transports.assert_near(actual["near"], wanted["near"])


def narrow(columns: int, calls: Any, ep: Any, o: Any) -> dict[str, Any]:
    """A combine of the first columns of rows, and its backward pass."""
    dispatch, combine = calls
    d = dispatch(ep, o.dy, o.ids, o.weights)
    weights = {"rank": o.row_weights, "source": o.weights, "none": None}

    def back(rows: Any, weights: Any) -> Any:
        return combine(ep, rows, d.route, weights)

    y, pull = jax.vjp(back, o.rows[:, :columns], weights[ep.config.reduce])
    d_rows, d_weights = pull(y)
    return {"exact": (y, d_rows), "near": d_weights}


@pytest.mark.parametrize("columns", [8, 1032])
@pytest.mark.parametrize("mode", ["rank", "source", "none", "shared"])
def test_fewer_columns(mode: str, columns: int) -> None:
    """Rows are narrower than those for which the windows were made."""
    changes = {"max_tokens_per_rank": 600, "hidden_size": 2048}
    changes |= helpers.HALVES | options.MODES.get(mode, {})
    config = helpers.make_config(**changes)
    with compare_transports.Pair(compare_transports.p2p_mesh(), config) as pair:
        plain, whole, split = (
            compare_transports.mapped(
                pair.mesh, functools.partial(narrow, columns, calls, ep)
            )
            for ep, calls in (
                (pair.collective, options.WHOLE),
                (pair.p2p, options.WHOLE),
                (pair.p2p, options.SPLIT),
            )
        )
        for n in (7, 600):
            o = pair.operands(n, n)
            wanted = plain(o)
            for run, what in ((whole, "whole"), (split, "split")):
                actual = run(o)
                compare_transports.assert_same(
                    actual["exact"], wanted["exact"], f"{what} {n}"
                )
                if wanted["near"] is not None:
                    compare_transports.assert_near(actual["near"], wanted["near"])


@pytest.mark.parametrize("mode", ["source", "none", "shared_source"])
def test_rows_without_a_place(mode: str) -> None:
    """A dropped row counts as zero, and with a weight that is not finite as NaN."""
    changes = {"max_tokens_per_rank": 64, "hidden_size": 64, "recv_capacity": 70}
    config = helpers.make_config(**(changes | options.MODES[mode]))
    with compare_transports.Pair(compare_transports.p2p_mesh(), config) as pair:

        def run(ep: Any, o: Any) -> Any:
            d = jax_ep.dispatch(ep, o.dy, o.ids)
            weights = None
            if ep.config.reduce == "source":
                weights = jnp.where(o.weights > 1, jnp.inf, o.weights)
            return d, jax_ep.combine(ep, o.rows, d.route, weights)

        fast, plain = (
            compare_transports.mapped(pair.mesh, functools.partial(run, ep))
            for ep in (pair.p2p, pair.collective)
        )
        o = pair.operands(1, 64, "full")
        wanted = plain(o)
        assert bool(jnp.any(wanted[0].num_dropped > 0))
        # Old contents of windows are not taken for a row.
        for seed in (2, 3):
            fast(pair.operands(seed, 64, "full"))
        compare_transports.assert_same(fast(o), wanted)
