"""Custom calls by name: how the native tables order operands and attributes."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep._native import ffi, tables
from jax_ep._native.loader import cpu as native
from support import helpers, quantizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
N_TOKENS, TOP_K, HIDDEN, RANKS, GROUPS, ROWS = 5, 2, 256, 4, 3, 41
CONFIG = helpers.make_config(expert_alignment=3)
# What calls of routed dispatches take from it.
OPTIONS = {"expert_alignment": 3, "zero_tail": True, "scale_layout": "rows"}


def int32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


def float32(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def tokens(rows: int = N_TOKENS) -> jax.Array:
    return jnp.zeros((rows, HIDDEN), jnp.bfloat16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records calls without running: target, results, operands, attributes, aliases."""
    made = []

    def record(target, results, *operands, input_output_aliases=None, **attributes):
        types = [f"{each.dtype}{list(each.shape)}" for each in results]
        given = [f"{each.dtype}{list(each.shape)}" for each in operands]
        made.append((target, types, given, attributes, input_output_aliases))
        return [jnp.zeros(each.shape, each.dtype) for each in results]

    monkeypatch.setattr(ffi, "call", record)
    monkeypatch.setattr(
        ffi,
        "call_on_stream",
        lambda target, result, *operands, **given: record(
            target, [result], *operands, **given
        )[0],
    )
    return made


def test_every_target_has_a_table() -> None:
    own = set(tables.TABLES) | {"ep_init"}
    assert set(native.targets()) <= own
    assert set(ffi.target_names()) <= own
    for target, table in tables.TABLES.items():
        for names in (table.operands, table.results, table.attributes):
            assert len({each.name for each in names}) == len(names), target
    assert native.PENDING_INTS == 4  # as in the tables of halves below


def test_fingerprints_are_those_of_the_tables() -> None:
    made = runpy.run_path(str(ROOT / ".ci" / "fingerprints.py"))
    text = made["fingerprints"]()
    assert made["EXPECTED"].read_text() == text, "run .ci/fingerprints.py"


def test_omitted_operands_have_placeholders(calls: list[Any]) -> None:
    given = {
        "expert_out": tokens(ROWS),
        "router_weights": None,
        "row_of": int32(RANKS, N_TOKENS, TOP_K),
        "slot_counts": int32(RANKS),
        "slot_of": int32(N_TOKENS, TOP_K),
        "residual": tokens(),
        "after": int32(1),
    }
    attributes = {"key": 7, "site": 9, "by_entry": False, "combine_dtype": "float32"}
    attributes["gradients"] = False
    got = tables.call("ep_combine", tokens(ROWS), {}, given, attributes)
    assert got._fields == ("output", "weight_grads", "done")
    assert got.output.shape == (N_TOKENS, HIDDEN)
    assert got.weight_grads is None
    assert calls == [
        (
            "ep_combine",
            ["bfloat16[5, 256]", "float32[5, 0]", "int32[1]"],
            [
                "bfloat16[41, 256]",
                "float32[0]",
                "int32[4]",
                "float32[0]",
                "int32[4, 5, 2]",
                "int32[5, 2]",
                "bfloat16[5, 256]",
                "float32[0, 2]",
                "bfloat16[0, 256]",
                "int32[0]",
                "int32[1]",
            ],
            attributes,
            None,
        )
    ]
    more = given | {
        "weight_grads": float32(ROWS),
        "shared_rows": tokens(ROWS),
        "shared_part": int32(2),
    }
    got = tables.call("ep_combine", tokens(ROWS), {}, more, attributes)
    assert got.weight_grads.shape == (N_TOKENS, TOP_K)
    _, results, operands, _, _ = calls[-1]
    assert results[1] == "float32[5, 2]"
    assert operands[3] == "float32[41]"
    assert operands[8:10] == ["bfloat16[41, 256]", "int32[2]"]


@pytest.mark.parametrize(
    ("changes", "dtype", "columns", "scales", "offsets"),
    [
        ({"format": "bf16"}, "bfloat16", HIDDEN, "uint8[0]", 0),
        ({"format": "nvfp4"}, "uint8", HIDDEN // 2, "float8_e4m3fn[41, 16]", 0),
        (
            {"format": "mxfp8", "scale_layout": "tiled_128x4"},
            "float8_e4m3fn",
            HIDDEN,
            "float8_e8m0fnu[4, 2, 32, 4, 4]",
            GROUPS,
        ),
    ],
)
def test_results_of_a_format(
    changes: dict[str, str],
    dtype: str,
    columns: int,
    scales: str,
    offsets: int,
    calls: list[Any],
) -> None:
    plain = changes["format"] == "bf16"
    got = tables.call(
        "ep_dispatch_recv",
        tokens(),
        {"n": N_TOKENS, "K": TOP_K, "R": RANKS, "G": GROUPS, "N": ROWS},
        {
            "pending": int32(1, 4),
            "tokens": tokens() if plain else None,
            "after": int32(1),
        },
        {"key": 7} | changes,
        CONFIG,
    )
    assert (got.scales is None) == plain
    assert (got.scales_offsets is None) == (offsets == 0)
    _, results, operands, *_ = calls[-1]
    assert operands[1] == f"bfloat16[{N_TOKENS if plain else 0}, 256]"
    assert results[:2] == [f"{dtype}[41, {columns}]", scales]
    assert results[2:8] == [
        "int32[4]",
        "int32[3]",
        "int32[3]",
        "int32[3]",
        f"int32[{offsets}]",
        "int32[41, 3]",
    ]


@pytest.mark.parametrize("coded", [False, True])
def test_an_operand_of_two_types(coded: bool, calls: list[Any]) -> None:
    codes = jnp.zeros((N_TOKENS, HIDDEN // 2), jnp.uint8)
    scales = jnp.zeros((N_TOKENS, HIDDEN // 16), jnp.float8_e4m3fn)
    given = {
        "tokens": codes if coded else tokens(),
        "topk_ids": int32(N_TOKENS, TOP_K),
        "router_weights": float32(N_TOKENS, TOP_K),
        "input_scale": float32(1),
        "token_scales": scales if coded else None,
        "after": int32(1),
    }
    attributes = {"key": 7, "site": 9, "ranks": RANKS, "local_experts": GROUPS}
    attributes["format"] = "nvfp4"
    tables.call("ep_dispatch_send", tokens(), {}, given, attributes, CONFIG)
    ((_, _, operands, made, _),) = calls
    assert operands[0] == ("uint8[5, 128]" if coded else "bfloat16[5, 256]")
    assert operands[4] == ("float8_e4m3fn[5, 16]" if coded else "float8_e4m3fn[0]")
    assert made == attributes | OPTIONS | {"coded": coded}


def test_an_omitted_operand_may_be_of_another_call(calls: list[Any]) -> None:
    given = {
        "expert_out": tokens(ROWS),
        "weight_grads": None,
        "row_of": int32(RANKS, N_TOKENS, TOP_K),
        "slot_counts": int32(RANKS),
        "after": int32(1),
    }
    attributes = {"key": 7, "site": 9, "by_entry": False, "combine_dtype": "float32"}
    attributes["gradients"] = True
    tables.call("ep_combine_send", tokens(ROWS), {}, given, attributes)
    ((_, _, operands, made, _),) = calls
    assert len(operands) == 5
    assert made == attributes


def test_packed_results(calls: list[Any]) -> None:
    given = {
        "tokens": tokens(),
        "topk_ids": int32(N_TOKENS, TOP_K),
        "router_weights": float32(N_TOKENS, TOP_K),
        "input_scale": float32(1),
        "after": int32(1),
    }
    attributes = {"key": 7, "site": 9, "ranks": RANKS, "local_experts": GROUPS}
    (packed,) = tables.call(
        "ep_dispatch_send_on_stream",
        tokens(),
        {},
        given,
        attributes | {"format": "bf16"},
        CONFIG,
    )
    assert packed.shape == (1, 4 + N_TOKENS * TOP_K + 1)
    numbers = jnp.arange(packed.size).reshape(1, -1)
    dims = {"n": N_TOKENS, "K": TOP_K}
    got = tables.unpack("ep_dispatch_send", numbers, dims)
    assert got.pending.tolist() == [[0, 1, 2, 3]]
    assert got.slot_of.tolist() == np.arange(4, 14).reshape(5, 2).tolist()
    assert got.num_invalid.tolist() == [14]


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ({"rows": int32(1)}, {}, "ep_dispatch_cached_pack: wrong operands, ['rows']"),
        ({"tokens": None}, {}, "operands without, ['tokens']"),
        ({}, {"zero_tail": True}, "attributes, ['zero_tail']"),
        ({}, {"site": None}, "attributes, ['site']"),
    ],
)
def test_mistakes_of_callers(
    operands: dict[str, Any],
    attributes: dict[str, Any],
    message: str,
    calls: list[Any],
) -> None:
    given = {"tokens": tokens(), "slot_of": int32(N_TOKENS, TOP_K)} | operands
    attributes = {"key": 7, "site": 9, "format": "bf16"} | attributes
    attributes = {name: value for name, value in attributes.items() if value}
    with pytest.raises(TypeError) as error:
        tables.call(
            "ep_dispatch_cached_pack", tokens(), {"R": 1, "W": 4}, given, attributes
        )
    assert message in str(error.value)
    assert not calls


def test_calls_run() -> None:
    """One rank's dispatch and combine run, with all operands by name."""
    name, rng = "fp8_block128_e8m0", np.random.default_rng(1)
    x = rng.standard_normal((N_TOKENS, HIDDEN), np.float32)
    ids = rng.permutation(np.arange(N_TOKENS * TOP_K, dtype=np.int32) % GROUPS)
    ids = ids.reshape(N_TOKENS, TOP_K)
    weights = jnp.ones((N_TOKENS, TOP_K))
    words = native.dispatch_region_bytes(name, HIDDEN, 4, N_TOKENS, TOP_K, GROUPS) // 4
    sent = tables.call(
        "ep_dispatch_pack",
        jnp.asarray(x),
        {"R": 1, "W": words},
        {
            "tokens": jnp.asarray(x),
            "topk_ids": jnp.asarray(ids),
            "router_weights": weights,
            "input_scale": jnp.ones(1),
        },
        {"key": 7, "site": 9, "in_halves": False, "num_experts": GROUPS}
        | {"format": name},
        CONFIG,
    )
    got = tables.call(
        "ep_dispatch_unpack",
        jnp.asarray(x),
        {"G": GROUPS, "N": ROWS},
        {
            "recv": sent.send,
            "slot_of": sent.slot_of,
            "num_invalid": sent.num_invalid,
        },
        {"key": 7, "expert_alignment": 1, "format": name},
        CONFIG,
    )
    source = got.src_info[: N_TOKENS * TOP_K, 1]
    codes, scales = quantizer.quantize(x, name)
    assert got.group_sizes.tolist() == np.bincount(ids.ravel()).tolist()
    assert got.tokens[: len(source)].tobytes() == codes[source].tobytes()
    assert got.scales[: len(source)].tobytes() == scales[source].tobytes()
