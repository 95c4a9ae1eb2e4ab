"""What init says about an N that is too large or too small for balanced routing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import jax_ep
from jax_ep._setup import capacity
from support import helpers

T = 128


def config(**changes):
    fields = {"num_experts": 64, "top_k": 2, "max_tokens_per_rank": T}
    return helpers.make_config(**fields | changes)


SHORT = {
    "shared": {"capacity_factor": 1.0, "fused_shared_expert": True},
    "aligned": {"capacity_factor": 1.25, "expert_alignment": 128},
    "both": {
        "capacity_factor": 1.5,
        "fused_shared_expert": True,
        "expert_alignment": 64,
    },
    "few_tokens": {
        "capacity_factor": 2.0,
        "expert_alignment": 128,
        "max_tokens_per_rank": 4,
    },
    "below_one": {"capacity_factor": 0.5},
    "below_one_aligned": {"capacity_factor": 0.5, "expert_alignment": 128},
    "rows": {"recv_capacity": 255},
    "rows_shared": {"recv_capacity": 256, "fused_shared_expert": True},
    "rows_aligned": {"recv_capacity": 256, "expert_alignment": 128},
}
WIDE = {
    "plain": {"capacity_factor": 1.0},
    "shared": {"capacity_factor": 1.5, "fused_shared_expert": True},
    "aligned": {"capacity_factor": 1.0, "expert_alignment": 4},
    "worst_case": {"expert_alignment": 128},
    "rows": {"recv_capacity": 256},
    "rows_shared": {"recv_capacity": 384, "fused_shared_expert": True},
    # 127 rows for 12 experts per rank.
    "uneven": {"capacity_factor": 1.0, "num_experts": 96, "top_k": 1}
    | {"max_tokens_per_rank": 127},
}


def balanced_drops(ep, mesh):
    """How many rows are dropped if all experts get equally many."""
    shape = (mesh.size * ep.config.max_tokens_per_rank, ep.config.top_k)
    count, experts = np.prod(shape), ep.config.num_experts
    # Every expert in turn, or evenly spaced ones if there are fewer entries.
    ids = np.arange(count, dtype=np.int32) * max(1, experts // count) % experts
    tokens = np.ones((shape[0], ep.config.hidden_size), ep.config.dtype)
    d = jax_ep.sharded.dispatch(ep, tokens, ids.reshape(shape).astype(np.int32))
    return int(np.sum(d.num_dropped))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SHORT)
def test_options_that_leave_too_little_are_told(name) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(8))
    fields = SHORT[name]
    told = capacity.shortfall(config(**fields), mesh.size)
    assert told is not None
    with pytest.warns(UserWarning, match="gives N") as caught:
        ep = helpers.make_ep.__wrapped__(mesh, config(**fields))
    (said,) = [str(each.message) for each in caught]
    assert said == f"jax_ep.init: {told}"
    assert balanced_drops(ep, mesh) > 0
    # The remedy in the message works.
    rows = int(told.partition("recv_capacity=")[2].split()[0])
    assert rows % 128 == 0
    remedy = {**fields, "capacity_factor": None, "recv_capacity": rows}
    assert balanced_drops(helpers.make_ep(mesh, config(**remedy)), mesh) == 0


@pytest.mark.parametrize("name", WIDE)
def test_others_are_not(name) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        helpers.make_ep.__wrapped__(mesh, config(**WIDE[name])).close()
    assert capacity.shortfall(config(**WIDE[name]), mesh.size) is None


@pytest.mark.parametrize(("rows", "told"), [(144, False), (143, True)])
def test_no_exchange_needs_a_share_alone(rows, told) -> None:
    """16 rows for each of 9 groups, one of which is the shared expert's."""
    fields = {"skip_a2a": True, "expert_alignment": 16, "fused_shared_expert": True}
    found = capacity.shortfall(config(**fields, recv_capacity=rows), 8)
    assert (found is not None) == told


def test_what_options_take_is_told_apart() -> None:
    plain, shared = (
        capacity.shortfall(config(recv_capacity=9, fused_shared_expert=fused), 8)
        for fused in (False, True)
    )
    assert plain == (
        "recv_capacity gives N = 9, but even balanced routing needs 256, and rows past "
        "N are dropped; set recv_capacity=256 or more"
    )
    assert shared is not None
    assert "needs 256, plus 128 for fused_shared_expert, and rows past N" in shared
