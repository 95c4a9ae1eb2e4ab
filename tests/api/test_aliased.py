"""XLA writes a route over its own ids, as `input_output_aliases` requests.

tests/cc/aliased_test.cc has every call, under AddressSanitizer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep
from jax_ep._native import ffi

RANKS, LOCAL_EXPERTS, TOKENS, TOP_K, HIDDEN = 3, 2, 40, 4, 16
EXPERTS = RANKS * LOCAL_EXPERTS


def route(ids: np.ndarray, aliases: dict[int, int] | None) -> list[np.ndarray]:
    """slot_of, position and num_invalid of ep_dispatch_pack."""
    bytes_ = ffi.native.dispatch_region_bytes(
        "bf16", HIDDEN, 4, TOKENS, TOP_K, LOCAL_EXPERTS
    )
    table = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    results = (
        jax.ShapeDtypeStruct((RANKS, bytes_ // 4), jnp.uint32),
        table,
        table,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )

    def call(ids):
        return ffi.call(
            "ep_dispatch_pack",
            results,
            jnp.ones((TOKENS, HIDDEN), jnp.float32),
            ids,
            jnp.ones(ids.shape, jnp.float32),
            jnp.ones(1, jnp.float32),
            jnp.ones(0, jnp.uint8),
            input_output_aliases=aliases,
            key=0,
            site=0,
            in_halves=False,
            num_experts=EXPERTS,
            coded=False,
            format="bf16",
            expert_alignment=1,
            zero_tail=False,
            scale_layout="rows",
        )[1:]

    return [np.asarray(array) for array in jax.jit(call)(ids)]


@pytest.mark.parametrize("result", [1, 2], ids=["slot_of", "position"])
@pytest.mark.parametrize("kind", ["valid", "invalid"])
def test_route_over_its_ids(result: int, kind: str) -> None:
    assert jax_ep.__doc__  # its import has registered the targets
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, EXPERTS, (TOKENS, TOP_K), np.int32)
    if kind == "invalid":
        wild = np.array([-(2**31), -2, EXPERTS, 10**6, 2**31 - 1], np.int32)
        ids = np.where(rng.random(ids.shape) < 0.5, rng.choice(wild, ids.shape), ids)
    found, expected = route(ids, {1: result}), route(ids, None)
    if jax.default_backend() == "cpu":
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        return
    # Blocks read ids that others have overwritten: any route in range is right.
    slot_of, position, num_invalid = found
    assert slot_of.min() >= -1
    assert position.min() >= -1
    assert 0 <= num_invalid[0] <= ids.size
