"""Operands of a wrong shape or dtype: what tracing raises, and what it says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("others_go_on")
RANKS = 2
KEEP = -1  # A dimension that stays as it was.


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(RANKS))


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
    "ids_float": ({"topk_ids": "float32"}, "topk_ids", "int32", "ids before weights"),
    "ids_unsigned": ({"topk_ids": "uint32"}, "topk_ids", "int32", "uint32"),
    "ids_short": ({"topk_ids": "int16"}, "topk_ids", "int32", "int16"),
    "weights_dtype": ({"router_weights": "int32"}, "router_weights", "float32"),
}  # fmt: skip
COMBINE = {
    "N": ({"expert_out": (7, 16)}, "expert_out", "7"),
    "H": ({"expert_out": (KEEP, 24)}, "expert_out", "24", "16"),
    "rows_rank": ({"expert_out": (KEEP,)}, "expert_out", "[N, columns]"),
    "rows_dtype": ({"expert_out": "float32"}, "expert_out", "bfloat16", "float32",
                   "cast it with expert_out.astype('bfloat16')"),
    "rows_of_codes": ({"expert_out": "float8_e4m3fn"}, "expert_out", "bfloat16",
                      "float8_e4m3fn", "quantised", "pass jax_ep.dequantize(d)"),
    "rows_of_packed_codes": ({"expert_out": "uint8"}, "expert_out", "bfloat16",
                             "uint8", "quantised", "pass jax_ep.dequantize(d)"),
    "weights_shape": ({"row_weights": (8, 3)}, "router_weights", "(8, 3)"),
    "weights_dtype": ({"row_weights": "int32"}, "router_weights", "float32"),
    "residual_shape": ({"residual": (7, 16)}, "residual", "(7, 16)"),
    "residual_dtype": ({"residual": "float32"}, "residual", "bfloat16", "float32"),
}  # fmt: skip


def changed(ep, changes: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The operands with other shapes (tuples) or dtypes (words)."""
    arrays = operands(ep)
    for name, change in changes.items():
        old = arrays[name]
        shape = old.shape if isinstance(change, str) else change
        if KEEP in shape:
            shape = tuple(
                o if s == KEEP else s for s, o in zip(shape, old.shape, strict=False)
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


ROUTES = [
    ("slot_of", lambda table: table[:, :2], "(8, 2)"),
    ("row_of", lambda table: table[:, :-1], "pass d.route unchanged"),
    ("row_slot", lambda table: table[:-1], "pass d.route unchanged"),
    ("slot_counts", lambda table: table[None], "pass d.route unchanged"),
    ("slot_of", lambda table: table.astype("uint32"), "uint32"),
    ("row_of", lambda table: table.astype("int16"), "int16"),
    ("row_slot", lambda table: table.astype("int8"), "int8"),
    ("slot_counts", lambda table: table.astype("float32"), "float32"),
]


@pytest.mark.parametrize(("table", "change", "words"), ROUTES)
def test_combine_of_a_changed_route(mesh, ep, table: str, change, words: str) -> None:
    def combine(expert_out, tokens, topk_ids, **_):
        route = jax_ep.dispatch(ep, tokens, topk_ids).route
        changed = change(getattr(route, table))
        route = dataclasses.replace(route, **{table: changed})
        return jax_ep.combine(ep, expert_out, route)

    with raises() as caught:
        trace(mesh, combine, operands(ep))
    check_form(caught, "combine", f"route.{table} must", words)


def test_good_operands_trace(mesh, ep) -> None:
    """The operands that the two tables above change are otherwise accepted."""
    trace(mesh, dispatch_of(ep), operands(ep))
    trace(mesh, combine_of(ep), operands(ep))
