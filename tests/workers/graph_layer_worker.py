"""A process of test_graph_layer: one MoE step runs many times, with new routing each.

    graph_layer_worker.py whole|halves|copied|stream TOKENS CALLS

The step draws its own routing from a counter that it carries, so that each call has
other ids in the same buffers: only the device can tell a replayed graph which call it
is. All numbers are small integers and weights are multiples of 1/4, so that sums are
exact in any order and precision. Each step compares itself with the dense formula. At
random times the host does so too, with NumPy, and checks the steps' counts.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_ep
from support import gpus, helpers

EXPERTS, TOP_K, HIDDEN = 24, 4, 64
MASKED = 0.1  # the share of ids that are -1
CHECKS = 40  # how often the host checks in a run, on average


def draw(counter: jax.Array, ranks: int, tokens: int) -> jax.Array:
    """A call's ids, int32 [ranks, tokens, K]: distinct in each token, some are -1."""
    key = jax.random.fold_in(jax.random.key(0), counter[0])
    key, masks = jax.random.split(key)
    scores = jax.random.uniform(key, (ranks, tokens, EXPERTS))
    ids = jax.lax.top_k(scores, TOP_K)[1].astype(jnp.int32)
    return jnp.where(jax.random.uniform(masks, ids.shape) < MASKED, -1, ids)


def layer(ep: Any, form: str, x: Any, ids: Any, weights: Any, params: Any) -> Any:
    """Rows per expert, and the sums of all experts and of one that all tokens share."""
    if form == "whole":
        d = jax_ep.dispatch(ep, x, ids, weights)
        shared = x @ params[0]
    else:
        pending = jax_ep.dispatch_async(ep, x, ids, weights)
        shared = x @ params[0]
        d = jax_ep.dispatch_wait(pending)
    rank, local = jax.lax.axis_index("ep"), EXPERTS // ep.ep_size
    own = jax.lax.dynamic_slice_in_dim(params, rank * local, local)
    rows = jax.lax.ragged_dot(d.tokens, own, d.group_sizes)
    if form == "whole":
        y = jax_ep.combine(ep, rows, d.route, d.router_weights)
    else:
        pending = jax_ep.combine_async(ep, rows, d.route, d.router_weights)
        shared = shared * 2
        y = jax_ep.combine_wait(pending)
    return d.expert_counts, y, shared if form == "whole" else shared / 2


def dense(numpy: Any, x: Any, ids: Any, weights: Any, params: Any) -> Any:
    """The sums that `layer` returns, computed with `jax.numpy` or NumPy."""
    every = numpy.einsum("nh,ehf->nef", x, params)
    rows = numpy.take_along_axis(every, numpy.maximum(ids, 0)[:, :, None], axis=1)
    kept = numpy.where(ids < 0, 0, weights)
    return (rows * kept[:, :, None]).sum(axis=1) + every[:, 0]


def program(ep: Any, form: str, tokens: int, mesh: Any) -> Any:
    """(counter, wrong, x, weights, params) -> the first two, ids, counts, sums."""

    def step(counter: Any, wrong: Any, x: Any, weights: Any, params: Any) -> Any:
        # Each rank draws all ids, as a collective would cut the graph in two.
        all_ids = draw(counter, mesh.size, tokens)
        ids = all_ids[jax.lax.axis_index("ep")]
        counts, y, shared = layer(ep, form, x, ids, weights, params)
        y = y + shared
        wanted = dense(jnp, x, ids, weights, params)
        local = EXPERTS // ep.ep_size
        own = jnp.arange(local) + jax.lax.axis_index("ep") * local
        lost = counts != (all_ids.reshape(-1, 1) == own).sum(axis=0)
        wrong = wrong + (y != wanted).sum() + lost.sum()
        return counter + 1, wrong, ids, counts, y

    own, all_ranks = jax.P("ep"), jax.P()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(own, own, own, own, all_ranks),
        out_specs=own,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def check(config: Any, parts: Any, given: Any) -> int:
    """How many entries of a call's results differ from NumPy's."""
    ids, counts, y = map(np.asarray, parts)
    wanted = np.bincount(ids[ids >= 0], minlength=EXPERTS)
    return int(
        (y != dense(np, given[0], ids, *given[1:])).sum() + (counts != wanted).sum()
    )


def main(form: str, tokens: int, calls: int) -> dict[str, Any]:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    fields: dict[str, Any] = {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "hidden_size": HIDDEN,
    }
    fields |= {"max_tokens_per_rank": tokens, "dtype": "float32"}
    overlap = {"copied": "copy", "stream": "stream"}.get(form, "sm")
    ep = helpers.init(mesh, **fields, pending_calls=1, overlap=overlap)
    rng = np.random.default_rng(calls + tokens)
    n = mesh.size * tokens
    given = (
        rng.integers(-4, 5, (n, HIDDEN)).astype(np.float32),
        rng.integers(1, 5, (n, TOP_K)).astype(np.float32) / 4,
        rng.integers(-1, 2, (EXPERTS, HIDDEN, HIDDEN)).astype(np.float32),
    )
    placed = [
        helpers.put(mesh, [array], spec)
        for array, spec in zip(given, (jax.P("ep"), jax.P("ep"), jax.P()), strict=True)
    ]
    run = program(ep, form, tokens, mesh)
    zeros = [np.zeros(1, np.int32)] * mesh.size
    counter, wrong = helpers.put(mesh, zeros), helpers.put(mesh, zeros)
    found: dict[str, Any] = {"transport": ep.transport, "calls": calls}
    seen, checks, by_host = set(), 0, 0
    for call in range(calls):
        counter, wrong, *parts = run(counter, wrong, *placed)
        if call in (0, calls - 1) or rng.random() < CHECKS / calls:
            by_host += check(ep.config, parts, given)
            seen.add(np.asarray(parts[0]).tobytes())
            checks += 1
    ep.check()
    found |= {"wrong": int(np.asarray(wrong).sum()), "wrong_by_host": by_host}
    found["launches"] = gpus.launches()
    found |= {"counted": int(np.asarray(counter).min()), "checks": checks}
    ep.close()
    return found | {"routings": len(seen)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
