"""Transport p2p: one micro-batch's exchange overlaps with another's work, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import jax_ep
from benchmarks.overlap import batches as overlap_batches
from support import compare_transports, helpers

pytestmark = pytest.mark.gpu


def doubled(rows: Any, group_sizes: Any) -> Any:
    """Experts whose results and gradients have the same bits in every program."""
    return rows * 2


def results(layers: Callable[..., Any], first: Any, second: Any) -> dict[str, Any]:
    """Both batches' sums, and gradients.

    The cotangents depend on the sums, so that data dependence orders the calls of a
    handle, also backward.
    """

    def run(x: Any, w: Any, z: Any, v: Any) -> Any:
        return layers(doubled, (x, first.ids, w), (z, second.ids, v))

    given = first.dy, first.weights, second.dy, second.weights
    sums, pull = jax.vjp(run, *given)
    dx, dw, dz, dv = pull(sums)
    return {"exact": (sums, dx, dz), "near": (dw, dv)}


# One region for whole calls (T > 512), and two.
@pytest.mark.parametrize("tokens", [600, 64])
@pytest.mark.parametrize("overlap", ["sm", "copy", "stream"])
def test_in_turns(tokens: int, overlap: str) -> None:
    """100 calls in flight give the same as two successive layers over collective."""
    fields = {"max_tokens_per_rank": tokens, "hidden_size": 1024, "top_k": 4}
    config = helpers.make_config(**fields, overlap=overlap, pending_calls=1)
    mesh = compare_transports.p2p_mesh()
    with (
        compare_transports.Pair(mesh, config) as pair,
        jax_ep.init(mesh, "ep", config, transport="p2p") as other,
    ):

        def fast(*batches: Any) -> Any:
            eps = pair.p2p, other
            return results(lambda *args: overlap_batches.in_turns(eps, *args), *batches)

        def plain(*batches: Any) -> Any:
            eps = (pair.collective,)
            return results(
                lambda *args: overlap_batches.one_after_the_other(eps, *args), *batches
            )

        run, right = (compare_transports.mapped(mesh, body) for body in (fast, plain))
        sets = [
            (pair.operands(seed, tokens), pair.operands(seed + 9, tokens, "duplicates"))
            for seed in range(4)
        ]
        wanted = [right(*batches) for batches in sets]
        found = [run(*sets[call % 4]) for call in range(100)]
        for call, result in enumerate(found):
            compare_transports.assert_same(
                result["exact"], wanted[call % 4]["exact"], f"call {call}"
            )
        for got, want in zip(found[-1]["near"], wanted[99 % 4]["near"], strict=True):
            compare_transports.assert_near(got, want)
        for ep in (pair.p2p, other):
            ep.check()
