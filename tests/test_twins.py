"""`twins.mapped`, which tests over windows run through, on any devices."""

from __future__ import annotations

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import twins


def test_empty_operands_are_made_on_the_ranks() -> None:
    """Beside others XLA of jax 0.11.2 takes none into a shard_map over GPUs."""
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

    run = twins.mapped(mesh, body)
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
