"""Tests, on any devices, what comparisons of transports over windows rely on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import compare_transports, format_values, helpers, oracle, quantizer


def test_empty_operands_are_made_on_the_ranks() -> None:
    """XLA of jax 0.11.2 cannot take both empty and other operands over GPUs."""
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    ranks = mesh.size
    operands = {
        "none": jnp.zeros((0, 3), jnp.int8),
        "narrow": jnp.zeros((2 * ranks, 0), jnp.bfloat16),
        "full": jnp.arange(2.0 * ranks),
        "absent": None,
    }
    seen = []

    def body(local):
        seen.append(
            {name: (a.shape, a.dtype) for name, a in local.items() if a is not None}
        )
        return jax.tree.map(lambda a: a + 1, local)

    run = compare_transports.mapped(mesh, body)
    (call,) = jax.make_jaxpr(run)(operands).eqns
    (ranked,) = call.params["jaxpr"].eqns
    assert ranked.primitive.name == "shard_map"
    assert [v.aval.shape for v in ranked.invars] == [(2 * ranks,)]
    got = run(operands)
    assert seen[-1] == {
        "none": ((0, 3), jnp.int8),
        "narrow": ((2, 0), jnp.bfloat16),
        "full": ((2,), jnp.float32),
    }
    assert got["absent"] is None
    for name in ("none", "narrow", "full"):
        assert (got[name].shape, got[name].dtype) == (
            operands[name].shape,
            operands[name].dtype,
        )
    np.testing.assert_array_equal(got["full"], np.arange(2.0 * ranks) + 1)


@pytest.mark.parametrize("where", ["host", "device"])
def test_tokens_reach_every_code(where: str) -> None:
    """Every second row has many codes, some special; the others are random bits."""
    shape, rng = (64, 1024), np.random.default_rng(1)
    for dtype in oracle.DTYPES if where == "host" else ["float16"]:
        if where == "host":
            x = format_values.rows(rng, shape, oracle.DTYPES[dtype])
        else:
            x = np.asarray(
                jax.jit(format_values.draw, static_argnums=(1, 2))(
                    jnp.uint32(1), shape, dtype
                )
            )
        wide = x.astype(np.float32)
        bad = (~np.isfinite(wide)).any(axis=1)
        for name in quantizer.BLOCKS:
            codes, _ = quantizer.quantize(x, name)
            codes = codes.view(np.uint8)
            four_bits = name in quantizer.FOUR_BITS
            codes = (quantizer.unpacked(codes) & 7) if four_bits else codes & 0x7F
            fine = (codes > 0) & (codes < codes.max())
            by_row = np.sort(fine.mean(axis=1))
            assert (by_row[32:] > 0.4).all()
            assert len(np.unique(codes)) >= (8 if four_bits else 120)
        assert bad.sum() > 40  # every row of bits, and some of numbers
        least = jnp.finfo(dtype).smallest_normal
        quiet = np.abs(wide) < float(least)
        runs = np.split(quiet, 8, axis=1)
        assert any(run.all() for run in np.concatenate(runs))
        assert (quiet & (wide != 0)).any()
