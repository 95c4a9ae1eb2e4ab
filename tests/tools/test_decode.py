"""examples/decode.py: its loop with a cache equals the model on whole sequences."""

from __future__ import annotations

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import ROOT, helpers

STEPS, N = 5, 3


def whole(decode, params, inputs):
    """Logits and experts of `inputs` `[n, steps]`, without a cache, densely."""
    x, chosen = params["embed"][inputs], []
    n, steps, hidden = x.shape
    for block in params["blocks"]:
        qkv = decode.normalise(x) @ block["qkv"]
        qkv = qkv.reshape(n, steps, 3, decode.HEADS, hidden // decode.HEADS)
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        x = x + mixed.reshape(x.shape) @ block["out"]
        moe, rows = block["moe"], decode.normalise(x)
        shares = jax.nn.softmax(rows @ moe["router"])
        best, ids = jax.lax.top_k(shares, decode.TOP_K)
        chosen.append(ids)
        weights = jax.nn.one_hot(ids, shares.shape[-1]) * best[..., None]
        weights = weights.sum(2) / best.sum(-1, keepdims=True)
        both = jnp.einsum("nsh,ehcf->nsecf", rows, moe["gate_up"])
        inner = jax.nn.silu(both[:, :, :, 0]) * both[:, :, :, 1]
        x = x + jnp.einsum("nsef,efh,nse->nsh", inner, moe["down"], weights)
    return decode.normalise(x) @ params["head"], jnp.stack(chosen, 2)


@pytest.fixture
def decode(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("decode")


@pytest.mark.slow
def test_the_loop_equals_whole_sequences(decode):
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    found, logits, experts, _ = decode.run(mesh, "bf16", STEPS, N)
    params = decode.make_params(jax.random.key(0), 4 * mesh.size)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), params)
    prompt = jax.random.randint(jax.random.key(1), (len(found),), 0, decode.BYTES)
    inputs = np.column_stack([prompt, found[:, :-1]])
    dense = jax.jit(whole, static_argnums=0)(decode, wide, inputs)
    want, chosen = map(np.asarray, dense)
    assert np.array_equal(found, logits.argmax(-1))
    assert experts.shape == chosen.shape == (*found.shape, decode.BLOCKS, decode.TOP_K)
    assert (np.sort(experts) == np.sort(chosen)).all((-1, -2)).mean() >= 0.75
    off = np.abs(logits - want).max(-1) / np.abs(want).max()
    # bfloat16 sometimes changes the outcome of a router's near tie.
    assert np.median(off) < 0.05
    assert (off < 0.1).mean(axis=0).min() >= 0.75


def test_what_moved_and_what_went_elsewhere_are_told_apart(decode):
    logits = np.array([[[1.0, -4.0], [2.0, 0.0]], [[0.0, 1.0], [5.0, 5.0]]])
    experts = np.array([[[[0, 1], [2, 3]]] * 2] * 2)
    others, other_experts = logits.copy(), experts.copy()
    others[0, 0] = 1.0, -3.0
    others[0, 1] = 2.1, 0.0
    others[1, 1] = 5.0, 1.0
    other_experts[1, 1, 1] = 2, 4  # in one block, one of two
    other_experts[0, 1, 0] = 1, 0  # the same in another order
    found = decode.compare(logits, experts, others, other_experts)
    np.testing.assert_allclose(found[0], [[0.25, 0.05], [0, 0.8]])
    np.testing.assert_array_equal(found[1], [[False, False], [False, True]])
    _, *lines = decode.describe(*found)
    assert [line.split()[0] for line in lines] == ["4", "3", "1"]
    for line, numbers in zip(
        lines, ("15.0% 80.0%", "5.0% 25.0%", "80.0% 80.0%"), strict=True
    ):
        assert re.findall(r"[\d.]+%", line) == numbers.split()
    *_, none = decode.describe(*decode.compare(logits, experts, others, experts))
    assert none.split()[0] == "0"
    assert "%" not in none
