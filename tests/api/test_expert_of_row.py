"""expert_of_row: the group of every row, and arguments that are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, options, oracle
from support.errors import check_form, raises

RANKS = 4
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "aligned": {"expert_alignment": 4},
    "cut": {"recv_capacity": 13, "expert_alignment": 4},
    "one_row": {"recv_capacity": 1},
    "one_group": {"num_experts": 4},
    "shared": options.FUSED,
    "local": options.SKIP,
}


def wanted(config: Any, ids: list[np.ndarray]) -> np.ndarray:
    groups = []
    for placement in oracle.place(config, ids):
        sizes = np.diff(placement.row_offsets)
        own = np.repeat(np.arange(len(sizes)), sizes)
        past = np.full(placement.capacity - len(own), len(sizes) - 1)
        groups += [own, past]
    return np.concatenate(groups).astype(np.int32)


@pytest.mark.few(3)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_groups(name: str, check_vma: bool) -> None:
    mesh, config = helpers.make_mesh(RANKS), helpers.make_config(**SHAPES[name])
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(0)

    def body(tokens, ids):
        return jax_ep.expert_of_row(jax_ep.dispatch(ep, tokens, ids))

    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
            check_vma=check_vma,
        )
    )
    for routing in ("random", "one:3", "none"):
        inputs = options.make_inputs(rng, config, RANKS, routing=routing)
        found = run(*(helpers.put(mesh, o) for o in (inputs.tokens, inputs.ids)))
        helpers.assert_bits(found, wanted(config, inputs.ids))


def test_under_vmap() -> None:
    mesh, config = helpers.make_mesh(RANKS), helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(1)
    inputs = [helpers.make_inputs(rng, config, RANKS) for _ in range(2)]

    def body(tokens, ids):
        return jax.vmap(
            lambda x, i: jax_ep.expert_of_row(jax_ep.dispatch(ep, x, i)),
            in_axes=1,
            out_axes=1,
        )(tokens, ids)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    tokens, ids = (
        jnp.stack([helpers.put(mesh, getattr(i, name)) for i in inputs], axis=1)
        for name in ("tokens", "ids")
    )
    found = run(tokens, ids)
    for batch, each in enumerate(inputs):
        helpers.assert_bits(found[:, batch], wanted(config, each.ids))


def test_what_is_refused() -> None:
    mesh, config = helpers.make_mesh(RANKS), helpers.make_config()
    ep = helpers.make_ep(mesh, config)
    inputs = helpers.make_inputs(np.random.default_rng(2), config, RANKS)
    d = helpers.run_dispatch(ep, mesh, inputs)
    with raises() as caught:
        jax_ep.expert_of_row(d)
    check_form(caught, "expert_of_row", "one rank", "4 ranks", "jax.shard_map")
    with raises() as caught:
        jax_ep.expert_of_row(dataclasses.asdict(d))  # pyright: ignore
    check_form(caught, "expert_of_row", "Dispatched", "dict")
