"""Bad input while tracing: the error, its message, and that everything else works."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jax_ep
from jax_ep._core.errors import told_of
from support import helpers
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("others_go_on")

RANKS = 2


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(RANKS))


CONFIGS = {
    "top_k_zero": ({"top_k": 0}, "top_k", "0"),
    "top_k_above_num_experts": ({"top_k": 25}, "top_k", "25", "num_experts, 24"),
    "top_k_above_32": ({"top_k": 33, "num_experts": 64}, "top_k", "33"),
    "experts_zero": ({"num_experts": 0}, "num_experts", "0"),
    "experts_above_2048": ({"num_experts": 4096}, "num_experts", "4096"),
    "tokens_negative": ({"max_tokens_per_rank": -1}, "max_tokens_per_rank", "-1"),
    "hidden_zero": ({"hidden_size": 0}, "hidden_size", "0"),
    "hidden_giant": ({"hidden_size": 2**26 + 8}, "hidden_size", "67108872", "67108864"),
    "hidden_not_16_bytes": ({"hidden_size": 12}, "hidden_size", "12", "16"),
    "hidden_not_16_bytes_f32": ({"hidden_size": 6, "dtype": "float32"}, "6", "16"),
    "dtype": ({"dtype": "int8"}, "dtype", "int8", "bfloat16", "float16", "float32"),
    "combine_dtype": ({"combine_dtype": "float64"}, "combine_dtype", "float64"),
    "dispatch_format": ({"dispatch_format": "fp7"}, "dispatch_format", "fp7", "bf16"),
    "combine_format": ({"combine_format": "fp7"}, "combine_format", "fp7"),
    "grad_format": ({"grad_format": "fp7"}, "grad_format", "fp7"),
    "reduce": ({"reduce": "tree"}, "reduce", "tree", "rank", "source", "none"),
    "scale_layout": ({"scale_layout": "wavy"}, "scale_layout", "wavy", "rows"),
    "overlap": ({"overlap": "dma"}, "overlap", "dma", "sm"),
    "alignment_zero": ({"expert_alignment": 0}, "expert_alignment", "0"),
    "recv_capacity_zero": ({"recv_capacity": 0}, "recv_capacity", "0"),
    "capacity_factor_zero": ({"capacity_factor": 0.0}, "capacity_factor", "0.0"),
    "timeout_zero": ({"timeout_s": 0.0}, "timeout_s", "0.0"),
    "too_many_pending_calls": ({"pending_calls": 3}, "pending_calls", "3", "2"),
    # Options that exclude each other.
    "two_capacities": (
        {"recv_capacity": 9, "capacity_factor": 1.0},
        "recv_capacity",
        "capacity_factor",
    ),
    "hidden_not_a_block": (
        {"hidden_size": 192, "dispatch_format": "fp8_block128"},
        "hidden_size",
        "192",
        "128",
    ),
    "hidden_not_16_bytes_of_codes": (
        {"hidden_size": 48, "dispatch_format": "nvfp4"},
        "hidden_size",
        "48",
        "nvfp4",
    ),
    "combine_not_a_block": (
        {"hidden_size": 192, "combine_format": "fp8_block128"},
        "hidden_size",
        "192",
    ),
    "grad_not_a_block": (
        {"hidden_size": 192, "grad_format": "fp8_block128"},
        "hidden_size",
        "192",
    ),
    "two_wires": (
        {
            "hidden_size": 128,
            "combine_format": "fp8_block128",
            "combine_dtype": "float32",
        },
        "combine_format",
        "combine_dtype",
    ),
    "tiled_float_scales": (
        {
            "hidden_size": 512,
            "dispatch_format": "fp8_block128",
            "scale_layout": "tiled_128x4",
        },
        "scale_layout",
        "fp8_block128",
    ),
    "tiled_width": (
        {
            "hidden_size": 64,
            "dispatch_format": "mxfp8",
            "scale_layout": "tiled_128x4",
        },
        "hidden_size",
        "64",
        "128",
    ),
    "columns_of_bytes": (
        {
            "hidden_size": 256,
            "dispatch_format": "fp8_block128_e8m0",
            "scale_layout": "columns",
        },
        "scale_layout",
        "['fp8_block128']",
        "fp8_block128_e8m0",
    ),
    "tiled_without_scales": ({"scale_layout": "tiled_128x4"}, "scale_layout", "rows"),
    "shared_entry_too_many": (
        {"top_k": 32, "num_experts": 64, "fused_shared_expert": True},
        "top_k",
        "31",
        "fused_shared_expert",
    ),
    "shared_experts_too_many": (
        {"num_experts": 2048, "fused_shared_expert": True},
        "num_experts",
        "2048",
        "fused_shared_expert",
    ),
    "allreduce_size_alone": ({"allreduce_world_size": 7}, "allreduce_world_size", "7"),
    "allreduce_size_of_others": (
        {"allreduce_world_size": 7, "skip_a2a": True},
        "allreduce_world_size",
        "7",
    ),
    "local_sums_quantised": (
        {"hidden_size": 128, "skip_a2a": True, "combine_format": "fp8_block128"},
        "combine_format",
        "skip_a2a",
    ),
    "local_gradients_quantised": (
        {"hidden_size": 128, "skip_a2a": True, "grad_format": "fp8_block128"},
        "grad_format",
        "skip_a2a",
    ),
    "local_sums_narrowed": (
        {"dtype": "float32", "skip_a2a": True, "combine_dtype": "bfloat16"},
        "combine_dtype must be float32",
        "skip_a2a",
        "'bfloat16'",
    ),
    "local_rows_on_a_stream": (
        {"skip_a2a": True, "overlap": "stream"},
        "overlap must be sm",
        "skip_a2a",
    ),
    "local_rows_copied": (
        {"skip_a2a": True, "overlap": "copy"},
        "overlap must be sm",
        "skip_a2a",
    ),
    "none_with_shared": (
        {"reduce": "none", "fused_shared_expert": True},
        "reduce",
        "fused_shared_expert",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(mesh, name: str) -> None:
    """EPConfig itself, or at the latest init, notices the error."""
    changes, *words = CONFIGS[name]
    with raises() as caught:
        jax_ep.init(mesh, "ep", helpers.make_config(**changes))
    where = "init" if str(caught.value).startswith("jax_ep.init") else "EPConfig"
    check_form(caught, where, *words)


@pytest.mark.parametrize("changes", [{"top_k": 2.0}, {"num_experts": "24"}], ids=str)
def test_config_types(changes) -> None:
    with raises() as caught:
        helpers.make_config(**changes)
    check_form(caught, "EPConfig", *changes)


def test_errors_of_others_keep_their_words() -> None:
    """Also errors of a user's function in a layer, even if they look like jax_ep's."""
    words = "jax_ep.mine: not ours; leave it"
    with pytest.raises(ValueError, match=f"^{words}$"), told_of("flax.MoE"):
        raise ValueError(words)


def test_init_experts_not_divisible() -> None:
    mesh = helpers.make_mesh(2)
    with raises() as caught:
        jax_ep.init(mesh, "ep", helpers.make_config(num_experts=9))
    check_form(caught, "init", "num_experts", "9", "2")


def test_init_no_such_axis(mesh) -> None:
    for axis in ("model", ("ep", "model")):
        with raises() as caught:
            jax_ep.init(mesh, axis, helpers.make_config())
        check_form(caught, "init", "model", "ep")


def test_init_axis_twice(mesh) -> None:
    with raises() as caught:
        jax_ep.init(mesh, ("ep", "ep"), helpers.make_config())
    check_form(caught, "init", "ep")


def test_init_no_mesh() -> None:
    with raises() as caught:
        jax_ep.init(None, "ep", helpers.make_config())
    check_form(caught, "init", "mesh")


def test_init_unknown_transport(mesh) -> None:
    with raises() as caught:
        jax_ep.init(mesh, "ep", helpers.make_config(), transport="pigeon")
    check_form(caught, "init", "transport", "pigeon", "collective")


@pytest.mark.parametrize("transport", ["p2p", "shmem"])
def test_init_transport_without_gpu(transport: str) -> None:
    """CPU devices are refused, even if there are GPUs as well."""
    devices = np.array(jax.devices("cpu")[:RANKS])
    mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    with raises() as caught:
        jax_ep.init(mesh, "ep", helpers.make_config(), transport=transport)
    check_form(caught, "init", transport, "collective")


def test_init_shmem_that_exchanges_nothing(mesh) -> None:
    with raises() as caught:
        config = helpers.make_config(skip_a2a=True)
        jax_ep.init(mesh, "ep", config, transport="shmem")
    check_form(caught, "init", 'transport="shmem"', "skip_a2a=False", '"auto"')


def test_init_config_type(mesh) -> None:
    with raises() as caught:
        jax_ep.init(mesh, "ep", {"num_experts": 8})
    check_form(caught, "init", "EPConfig", "dict")
