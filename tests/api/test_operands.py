"""The reader of the tables of operands (`jax_ep/_core/operands.py`)."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep._core import operands
from jax_ep._core.operands import FLOATS, IDS, SUPPORTED, WEIGHTS, Operand

_IDS = Operand("ids", "[n, K]", IDS, "give each token its ids")
_PAIR = Operand("gate_up and down", "[L, H, 2, F] and [L, F, H]", FLOATS, "transpose")


def _checked(table, sizes=None, dtype=None, **given):
    return operands.checked("call", table, given, sizes, dtype)


def _message(*args, kind=ValueError, **given):
    with pytest.raises(kind) as error:
        _checked(*args, **given)
    return str(error.value)


def test_letters_take_their_sizes_from_the_first_operand_that_has_them():
    table = (_IDS, Operand("weights", "[n, K]", WEIGHTS, "pass one per id"))
    ids = np.zeros((3, 2), np.int32)
    arrays = _checked(table, ids=ids, weights=np.ones((3, 2), np.float16))
    assert arrays["weights"].dtype == jnp.float32
    message = _message(table, ids=ids, weights=np.ones((3, 1), np.float32))
    assert message == (
        "jax_ep.call: weights must be [n, K] with n = 3 and K = 2, got (3, 1); "
        "pass one per id"
    )


def test_known_sizes_say_what_they_are():
    message = _message(
        (_IDS,), {"K": (3, "top_k"), "n": 8}, ids=np.zeros((8, 2), np.int32)
    )
    assert "ids must be [n, K] with n = 8 and K = 3 (top_k), got (8, 2)" in message


@pytest.mark.parametrize(
    ("gate_up", "down", "fits"),
    [
        ((4, 8, 2, 6), (4, 6, 8), True),
        ((4, 8, 3, 6), (4, 6, 8), False),
        ((4, 8, 2, 6), (4, 8, 6), False),
        ((4, 8, 12), (4, 6, 8), False),
        ((4, 8, 2, 6), (3, 6, 8), False),
    ],
)
def test_operands_of_one_row_agree_and_are_shown_together(gate_up, down, fits):
    given = {"gate_up": np.zeros(gate_up), "down": np.zeros(down)}
    if fits:
        assert _checked((_PAIR,), **given)["down"].shape == down
        return
    message = _message((_PAIR,), **given)
    assert f"got {gate_up} and {down}; transpose" in message


@pytest.mark.parametrize(
    ("mask", "fits"),
    [((2, 3), True), ((3,), False), ((2, 3, 1), False)],
)
def test_dots_are_the_dimensions_in_front(mask, fits):
    table = (
        Operand("x", "[..., H]", FLOATS),
        Operand("mask", "[...]", operands.ANY, "pass one value per token"),
    )
    given = {"x": np.zeros((2, 3, 8)), "mask": np.zeros(mask, bool)}
    if fits:
        _checked(table, **given)
    else:
        assert "pass one value per token" in _message(table, **given)


def test_an_optional_operand_may_be_none_and_then_is_absent():
    table = (_IDS, Operand("scale", "[n]", FLOATS, optional=True))
    ids = np.zeros((3, 2), np.int32)
    assert set(_checked(table, ids=ids, scale=None)) == {"ids"}
    assert "scale must be [n] with n = 3" in _message(
        table, ids=ids, scale=np.zeros(4, np.float32)
    )
    _message((_IDS,), ids=None, kind=TypeError)


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [("float32", "ids before weights"), ("int16", "ids.astype('int32')")],
)
def test_dtypes_have_remedies_of_their_own(dtype, remedy):
    message = _message((_IDS,), ids=np.zeros((3, 2), dtype), kind=TypeError)
    assert f"ids must be int32, got {dtype}" in message
    assert remedy in message


def test_a_row_takes_the_dtype_of_the_call_or_one_for_each_name():
    table = (Operand("x and y", "[n] and [n]", (FLOATS, "int32")),)
    _checked(table, x=np.zeros(3, np.float32), y=np.zeros(3, np.int32))
    _message(table, x=np.zeros(3, np.int32), y=np.zeros(3, np.int32), kind=TypeError)
    row = (Operand("x", "[n]"),)
    _checked(row, dtype="bfloat16", x=jnp.zeros(3, jnp.bfloat16))
    message = _message(row, dtype="bfloat16", x=jnp.zeros(3), kind=TypeError)
    assert "x must be bfloat16, got float32; cast it with x.astype" in message


def test_codes_in_place_of_values_are_told_apart():
    codes = jnp.zeros((2, 4), jnp.float8_e4m3fn)
    message = _message((Operand("x", "[n, H]", SUPPORTED),), x=codes, kind=TypeError)
    assert "jax_ep.dequantize" in message
