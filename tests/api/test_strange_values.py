"""Values that cannot be compared, hashed or written: the errors are the usual ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep import experts, formats, placement, router
from support import helpers

GIANT = 10**5000  # Python writes ints of up to 4,300 digits


class Mute:
    """Has no words and no order, and so no hash."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no order")


STRANGE: dict[str, Any] = {
    "giant": GIANT,
    "-giant": -GIANT,
    "list of a giant": [GIANT],
    "list": [1],
    "numpy": np.zeros(2),
    "names": np.array(["bf16", "rank"]),
    "objects": np.array([None, 1], object),
    "jax": jnp.zeros(2),
    "surrogate": "\udc80",
    "mute": Mute(),
}
SIZES: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "hidden_size": 128,
    "max_tokens_per_rank": 8,
}


def check_refused(call: Any, **given: Any) -> None:
    """Raises an error of ours, or accepts the value."""
    try:
        call(**given)
    except (ValueError, TypeError) as error:
        words = str(error)
        assert words.startswith("jax_ep."), (given.keys(), words)
        assert ", got " in words, words
        assert "; " in words, words


@pytest.mark.parametrize("name", STRANGE)
def test_fields(name: str) -> None:
    kinds: list[tuple[Any, Any]] = [(jax_ep.EPConfig, SIZES), (router.Router, {})]
    for kind, given in kinds:
        for field in dataclasses.fields(kind):
            check_refused(kind, **given | {field.name: STRANGE[name]})


@pytest.mark.parametrize("name", STRANGE)
def test_arguments(name: str) -> None:
    value = STRANGE[name]
    mesh, config = helpers.make_mesh(1), jax_ep.EPConfig(**SIZES)
    given: dict[str, Any]
    for call in (jax_ep.init, jax_ep.shared_handle):
        given = {"mesh": mesh, "axis_name": "ep", "config": config}
        for argument in (*given, "transport"):
            check_refused(call, **given | {argument: value})
        check_refused(call, **given | {"axis_name": [value]})
    x = jnp.zeros((2, 256), jnp.bfloat16)
    check_refused(formats.quantize, tokens=x, format=value)
    codes, scales = formats.quantize(x, "fp8_block128")
    given = {"tokens": codes, "scales": scales, "format": "fp8_block128"}
    for argument in ("format", "dtype", "scale_layout"):
        check_refused(formats.dequantize, **given | {argument: value})
    pair = {"gate_up": jnp.zeros((2, 128, 256)), "down": jnp.zeros((2, 128, 128))}
    check_refused(experts.quantize_weights, **pair, format=value)
    check_refused(experts.Padded, largest=value)
    check_refused(placement.balance, load=value, num_slots=4, ep_size=2)
    check_refused(placement.balance, load=np.ones(4), num_slots=4, ep_size=value)
    check_refused(router.route, logits=jnp.zeros((4, 8)), top_k=value)


@pytest.mark.parametrize("name", STRANGE)
def test_arguments_of_layers(name: str) -> None:
    mesh = helpers.make_mesh(1)
    given = SIZES | {"mesh": mesh, "axis_name": "ep", "intermediate_size": 128}
    for argument in (
        *given,
        "tp_axis_name",
        "fsdp_axis_name",
        "weights_format",
        "param_dtype",
        "num_slots",
        "shared_intermediate_size",
        "config_options",
        "transport",
    ):
        pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
        check_refused(jax_ep.flax.MoE, rngs=None, **given | {argument: STRANGE[name]})


def test_groups_beyond_words() -> None:
    strange: list[dict[str, Any]] = [
        {"num_groups": GIANT},
        {"num_groups": 2, "best_of_group": GIANT},
    ]
    for many in strange:
        with pytest.raises(ValueError, match=r"jax_ep\.router\.route: .*of \d+ bits"):
            router.route(jnp.zeros((4, 8)), 2, router.Router(top_groups=1, **many))
