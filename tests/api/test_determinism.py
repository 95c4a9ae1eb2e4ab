"""The same inputs give the same bytes, however late each rank is."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import compare_transports, helpers

CONFIGS = {
    "plain": {},
    "drops": {"recv_capacity": 30, "expert_alignment": 4, "combine_dtype": "float32"},
    "fp8": {
        "hidden_size": 128,
        "dispatch_format": "fp8_block128",
        "combine_format": "fp8_block128",
        "grad_format": "fp8_block128",
    },
    "nvfp4": {"hidden_size": 64, "dispatch_format": "nvfp4"},
}


def program(ep: Any, mesh: Any, gpu: bool) -> Any:
    """All results of a layer; `delays` says how much work each rank does before it."""

    def late(x: Any, trips: Any) -> Any:
        size = 512 if gpu else 48
        a = jax.lax.fori_loop(
            0, trips, lambda _, a: jnp.tanh(a @ a), jnp.full((size, size), 1e-3)
        )
        return jnp.where(jnp.isnan(a[0, 0]), jnp.zeros_like(x), x)

    def body(x: Any, ids: Any, w: Any, delays: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            d = jax_ep.dispatch(ep, late(x, delays[0, 0]), ids, w)
            rows = d.tokens if d.scales is None else jax_ep.dequantize(d)
            rows = late(rows, delays[0, 1])
            return jax_ep.combine(ep, rows, d.route, d.router_weights), d

        y, pull, d = jax.vjp(layer, x, w, has_aux=True)
        return y, d, pull(late(y, delays[0, 2]))

    run = jax.shard_map(
        body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
    )
    return jax.jit(run)


def check_same_bytes(mesh: Any, changes: dict[str, Any], times: int, gpu: bool) -> None:
    with helpers.init(mesh, **changes) as ep:
        run = program(ep, mesh, gpu)
        rng = np.random.default_rng(7)
        inputs = helpers.make_inputs(
            rng, ep.config, mesh.size, routing="duplicates", fill=helpers.normal
        )
        operands = [helpers.put(mesh, part) for part in vars(inputs).values()]

        def results(longest: int) -> Any:
            # Half of the ranks are not delayed, the others by any number of products.
            trips = rng.integers(-longest, longest + 1, (mesh.size, 3)).clip(0)
            return run(*operands, helpers.put(mesh, [trips.astype(np.int32)]))

        def noise() -> None:
            # Host threads are delayed as well.
            choose = random.Random(8)
            while not stop.wait(choose.random() / 300):
                time.sleep(choose.random() / 1000)
                sum(range(20000))

        stop = threading.Event()
        thread = threading.Thread(target=noise)
        thread.start()
        try:
            first = jax.block_until_ready(results(0))
            waiting = []
            for _ in range(times):
                waiting.append(results(40))
                if len(waiting) == 4:
                    compare_transports.assert_same(waiting.pop(0), first)
            for result in waiting:
                compare_transports.assert_same(result, first)
        finally:
            stop.set()
            thread.join()
        assert ep.check() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bytes(name: str) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    check_same_bytes(mesh, CONFIGS[name], 40, jax.default_backend() == "gpu")


@pytest.mark.slow
def test_same_bytes_a_thousand_times() -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    gpu = jax.default_backend() == "gpu"
    changes = {"max_tokens_per_rank": 512, "hidden_size": 1024} if gpu else {}
    check_same_bytes(mesh, changes, 1000, gpu)
