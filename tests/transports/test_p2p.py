"""Transport p2p gives the bits of collective: many shapes, routings and options.

The semantics tests, run with JAX_EP_TEST_TRANSPORT=p2p, compare with the oracle. These
tests have the shapes at which kernels change their behaviour.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jax_ep
from support import compare_transports, helpers, moe, oracle, shapes
from support.shapes import CUT, LONG, ROUTINGS, Case

pytestmark = pytest.mark.gpu


def _dtype_cases() -> list[Case]:
    return [
        Case(f"{dtype}_as_{wire}", {"dtype": dtype, "combine_dtype": wire})
        for dtype in oracle.DTYPES
        for wire in oracle.DTYPES
    ]


def _hidden_cases() -> list[Case]:
    # 16 bytes per row; slightly more than a piece of a combine; rows that exceed a
    # stage of shared memory: 80 KB, or 160 KB in float32.
    cases = []
    for dtype, hiddens in (
        ("bfloat16", (8, 16, 2048 + 8, 7168, 40000)),
        ("float32", (4, 2048 + 4, 40000)),
    ):
        for hidden in hiddens:
            config = {"hidden_size": hidden, "dtype": dtype, "max_tokens_per_rank": 24}
            cases.append(Case(f"{dtype}_hidden{hidden}", config, (None, 5)))
    return cases


CASES = [
    Case("routings", routings=ROUTINGS),
    Case("routings_aligned", {"expert_alignment": 8}, (None, 3), ROUTINGS),
    Case("routings_cut", {"recv_capacity": 13}, (None, 3), ROUTINGS, drops=True),
    *_dtype_cases(),
    *_hidden_cases(),
    *[
        Case(f"top{k}", {"top_k": k, "num_experts": 64}, routings=("full", "random"))
        for k in (1, 3, 8, 32)
    ],
    Case(
        "one_expert_a_rank",
        {"num_experts": 4, "top_k": 4},
        routings=("duplicates", "one:3"),
    ),
    Case(
        "experts2048",
        {"num_experts": 2048, "top_k": 8, "max_tokens_per_rank": 130},
        routings=("full", "one:2047"),
    ),
    # One region (T > 512) and two; the counts at which the chunk size changes.
    Case("depth1", LONG, (1, 2, 7, 128, 513, 1024), ("random",)),
    Case("depth2", LONG | {"max_tokens_per_rank": 512}, (1, 128, 511, 512)),
    Case(
        "largest_chunks",
        LONG
        | {"max_tokens_per_rank": 8192, "capacity_factor": 1.25, "hidden_size": 64},
        (8192, 4097),
        ("full", "duplicates"),
    ),
    Case(
        "model",
        {
            "max_tokens_per_rank": 4096,
            "hidden_size": 7168,
            "top_k": 8,
            "num_experts": 256,
            "capacity_factor": 1.25,
            "zero_tail": False,
        },
        (4096, 1000),
        ("full",),
    ),
    Case("capacity1", {"recv_capacity": 1}, routings=("full", "one:9"), drops=True),
    Case(
        "aligned_cut",
        LONG | CUT,
        (1024, 513),
        drops=True,
    ),
    Case("aligned128", LONG | {"expert_alignment": 128}, (1024, 3)),
    Case("free_tail", {"zero_tail": False}, (None, 1), ROUTINGS),
    Case(
        "free_tail_aligned",
        LONG | {"zero_tail": False, "expert_alignment": 8, "capacity_factor": 1.25},
        (1024, 7),
    ),
    Case("no_weights", LONG, (1024, 7), weighted=False),
    Case("no_residual", LONG, (1024, 7), residual=False),
    Case("nothing_but_rows", weighted=False, residual=False, routings=ROUTINGS),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_of_collective(case: Case) -> None:
    shapes.compare(case)


@pytest.mark.parametrize("num_sms", [1, 2, 5, 32, 132])
def test_bits_of_any_number_of_sms(num_sms: int) -> None:
    config = helpers.make_config(num_sms=num_sms, **LONG)
    with compare_transports.Pair(compare_transports.p2p_mesh(), config) as pair:
        for n in (1024, 1):
            pair.compare(pair.operands(n, n), f"n {n}")


def test_more_sms_than_there_are() -> None:
    mesh = compare_transports.p2p_mesh()
    config = helpers.make_config(num_sms=10**6)
    with pytest.raises(ValueError, match=r"jax_ep\.init: num_sms must .*1000000"):
        jax_ep.init(mesh, "ep", config, transport="p2p")


def test_groups_side_by_side() -> None:
    """Two independent groups on one mesh, over each of its axes."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    compare_transports.p2p_mesh(4)
    for axis in ("ep", "dp"):
        with compare_transports.Pair(mesh, helpers.make_config(**LONG), axis) as pair:
            for seed in range(4):
                pair.compare(pair.operands(seed, 700))


@pytest.mark.parametrize("order", [(1, 0), (3, 1, 2, 0)])
def test_ranks_are_places_in_the_mesh(order) -> None:
    compare_transports.p2p_mesh(len(order))
    mesh = helpers.make_mesh(len(order), order=order)
    with compare_transports.Pair(mesh, helpers.make_config(top_k=8)) as pair:
        pair.compare(pair.operands(1, 8))


def test_backward_reuses_the_route() -> None:
    """Forward: one dispatch, one combine. Backward: both along the route, as it is.

    `ep_combine_back` scales rows on their own rank.
    """
    mesh = compare_transports.p2p_mesh()
    with jax_ep.init(mesh, "ep", helpers.make_config(), transport="p2p") as ep:
        x = jnp.ones((8 * mesh.size, 16), jnp.bfloat16)
        ids = jnp.zeros((8 * mesh.size, 3), jnp.int32)
        w = jnp.ones((8 * mesh.size, 3), jnp.float32)
        p = jnp.ones((24, 16, 16), jnp.bfloat16)
        loss = moe.loss(mesh, functools.partial(moe.layer, ep))
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, w, p, ids).compile()
        targets = re.findall(r'custom_call_target="(ep_\w+)"', text.as_text())
        assert sorted(targets) == [
            "ep_combine",
            "ep_combine",
            "ep_combine_back",
            "ep_dispatch",
            "ep_dispatch_cached",
        ]


def test_not_over_cpus() -> None:
    devices = np.array(jax.devices("cpu")[:2])
    mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match='transport="p2p" must have GPUs, got CPU'):
        jax_ep.init(mesh, "ep", helpers.make_config(), transport="p2p")
    with jax_ep.init(mesh, "ep", helpers.make_config()) as ep:
        assert ep.transport == "collective"
