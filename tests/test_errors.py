"""Bad input while tracing: what is raised, what it says, and that all else goes on."""

from __future__ import annotations

import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.usefixtures("others_go_on")

# jax_ep.dispatch: <what must hold>, got <value>; <remedy of at least three words>
FORM = re.compile(
    r"(?P<where>jax_ep\.[\w.]+): (?P<rule>\S.+?), got (?P<value>\S.*?)"
    r"[.;:,)\n]\s+(?P<remedy>(?:\S+\s+){2,}\S+)",
    re.DOTALL,
)
RANKS = 2
KEEP = -1  # A dimension that stays as it was.


def check_form(caught: Any, where: str, *words: str) -> None:
    """The message has the contract's form, names the function and holds `words`."""
    message = str(caught.value)
    match = FORM.fullmatch(message)
    assert match, message
    assert match["where"] == f"jax_ep.{where}"
    for word in words:
        assert word in message, message


def raises() -> Any:
    """The two exceptions of the contract."""
    return pytest.raises((ValueError, TypeError))


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(RANKS))


CONFIGS = {
    "top_k_zero": ({"top_k": 0}, "top_k", "0"),
    "top_k_above_32": ({"top_k": 33, "num_experts": 64}, "top_k", "33"),
    "experts_zero": ({"num_experts": 0}, "num_experts", "0"),
    "experts_above_2048": ({"num_experts": 4096}, "num_experts", "4096"),
    "tokens_negative": ({"max_tokens_per_rank": -1}, "max_tokens_per_rank", "-1"),
    "hidden_zero": ({"hidden_size": 0}, "hidden_size", "0"),
    "hidden_not_16_bytes": ({"hidden_size": 12}, "hidden_size", "12", "16"),
    "hidden_not_16_bytes_f32": ({"hidden_size": 6, "dtype": "float32"}, "6", "16"),
    "dtype": ({"dtype": "int8"}, "dtype", "int8", "bfloat16", "float16", "float32"),
    "combine_dtype": ({"combine_dtype": "float64"}, "combine_dtype", "float64"),
    "dispatch_format": ({"dispatch_format": "fp7"}, "dispatch_format", "fp7", "bf16"),
    "combine_format": ({"combine_format": "fp7"}, "combine_format", "fp7"),
    "grad_format": ({"grad_format": "fp7"}, "grad_format", "fp7"),
    "reduce": ({"reduce": "tree"}, "reduce", "tree", "rank", "source", "none"),
    "scale_layout": ({"scale_layout": "wavy"}, "scale_layout", "wavy", "rows"),
    "alignment_zero": ({"expert_alignment": 0}, "expert_alignment", "0"),
    "recv_capacity_zero": ({"recv_capacity": 0}, "recv_capacity", "0"),
    "capacity_factor_zero": ({"capacity_factor": 0.0}, "capacity_factor", "0.0"),
    "timeout_zero": ({"timeout_s": 0.0}, "timeout_s", "0.0"),
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
    "allreduce_size_alone": (
        {"allreduce_world_size": 2},
        "allreduce_world_size",
        "skip_a2a",
    ),
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
    "none_with_shared": (
        {"reduce": "none", "fused_shared_expert": True},
        "reduce",
        "fused_shared_expert",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(mesh, name: str) -> None:
    """Seen by EPConfig itself, or at the latest by init."""
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
    """CPU devices, also where there are GPUs as well."""
    devices = np.array(jax.devices("cpu")[:RANKS])
    mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    with raises() as caught:
        jax_ep.init(mesh, "ep", helpers.make_config(), transport=transport)
    check_form(caught, "init", transport, "collective")


def test_init_config_type(mesh) -> None:
    with raises() as caught:
        jax_ep.init(mesh, "ep", {"num_experts": 8})
    check_form(caught, "init", "EPConfig", "dict")


def operands(ep, n: int = 8) -> dict[str, jax.ShapeDtypeStruct]:
    """Abstract operands of both calls on one rank."""
    config, make = ep.config, jax.ShapeDtypeStruct
    return {
        "tokens": make((n, config.hidden_size), config.dtype),
        "topk_ids": make((n, config.top_k), "int32"),
        "router_weights": make((n, config.top_k), "float32"),
        "expert_out": make((ep.recv_capacity, config.hidden_size), config.dtype),
        "row_weights": make((ep.recv_capacity,), "float32"),
        "residual": make((n, config.hidden_size), config.dtype),
    }


def trace(mesh, fn, arrays: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Traces `fn` of per-rank arrays by name; nothing runs."""

    def body():
        return fn(**{k: jnp.zeros(a.shape, a.dtype) for k, a in arrays.items()})

    run = jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("ep"))
    jax.eval_shape(run)


def dispatch_of(ep):
    def dispatch(tokens, topk_ids, router_weights, **_):
        return jax_ep.dispatch(ep, tokens, topk_ids, router_weights)

    return dispatch


def combine_of(ep):
    def combine(expert_out, row_weights, residual, tokens, topk_ids, **_):
        d = jax_ep.dispatch(ep, tokens, topk_ids)
        return jax_ep.combine(
            ep, expert_out, d.route, router_weights=row_weights, residual=residual
        )

    return combine


DISPATCH = {
    "n_above_T": ({"tokens": (9, 16), "topk_ids": (9, 3), "router_weights": (9, 3)},
                  "max_tokens_per_rank", "9", "8"),
    "H": ({"tokens": (8, 32)}, "hidden_size", "32", "16"),
    "K": ({"topk_ids": (8, 2), "router_weights": (8, 2)}, "top_k", "2", "3"),
    "tokens_rank": ({"tokens": (8, 2, 16)}, "tokens", "(8, 2, 16)"),
    "ids_rank": ({"topk_ids": (8,)}, "topk_ids", "(8,)"),
    "ids_rows": ({"topk_ids": (7, 3)}, "topk_ids", "7"),
    "weights_shape": ({"router_weights": (8, 2)}, "router_weights", "(8, 2)"),
    "tokens_dtype": ({"tokens": "float32"}, "tokens", "bfloat16", "float32"),
    "tokens_integer": ({"tokens": "int32"}, "tokens", "bfloat16", "int32"),
    "ids_float": ({"topk_ids": "float32"}, "topk_ids", "int32", "float32"),
    "ids_unsigned": ({"topk_ids": "uint32"}, "topk_ids", "int32", "uint32"),
    "ids_short": ({"topk_ids": "int16"}, "topk_ids", "int32", "int16"),
    "weights_dtype": ({"router_weights": "bfloat16"}, "router_weights", "float32"),
}  # fmt: skip
COMBINE = {
    "N": ({"expert_out": (7, 16)}, "expert_out", "7"),
    "H": ({"expert_out": (KEEP, 8)}, "expert_out", "8", "16"),
    "rows_dtype": ({"expert_out": "float32"}, "expert_out", "bfloat16", "float32"),
    "weights_shape": ({"row_weights": (8, 3)}, "router_weights", "(8, 3)"),
    "weights_dtype": ({"row_weights": "bfloat16"}, "router_weights", "float32"),
    "residual_shape": ({"residual": (7, 16)}, "residual", "(7, 16)"),
    "residual_dtype": ({"residual": "float32"}, "residual", "bfloat16", "float32"),
}


def changed(ep, changes: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The operands with other shapes (tuples) or dtypes (words)."""
    arrays = operands(ep)
    for name, change in changes.items():
        old = arrays[name]
        shape = old.shape if isinstance(change, str) else change
        if KEEP in shape:
            shape = tuple(
                o if s == KEEP else s for s, o in zip(shape, old.shape, strict=True)
            )
        dtype = change if isinstance(change, str) else old.dtype
        arrays[name] = jax.ShapeDtypeStruct(shape, dtype)
    return arrays


@pytest.mark.parametrize("name", DISPATCH)
def test_dispatch_operand(mesh, ep, name: str) -> None:
    changes, *words = DISPATCH[name]
    with raises() as caught:
        trace(mesh, dispatch_of(ep), changed(ep, changes))
    check_form(caught, "dispatch", *words)


@pytest.mark.parametrize("name", COMBINE)
def test_combine_operand(mesh, ep, name: str) -> None:
    changes, *words = COMBINE[name]
    with raises() as caught:
        trace(mesh, combine_of(ep), changed(ep, changes))
    check_form(caught, "combine", *words)


def test_good_operands_trace(mesh, ep) -> None:
    """What the two tables above change is otherwise accepted."""
    trace(mesh, dispatch_of(ep), operands(ep))
    trace(mesh, combine_of(ep), operands(ep))
