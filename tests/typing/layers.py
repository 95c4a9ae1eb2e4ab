"""A user's program with Flax layers; like training.py it is checked and run."""

# pyright: strict, reportUnknownMemberType=false

from __future__ import annotations

from typing import assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

import jax_ep
import jax_ep.flax
import jax_ep.flax.linen

HIDDEN = 128


def route(logits: jax.Array, *, top_k: int) -> tuple[jax.Array, jax.Array]:
    """A routing function."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    return ids, weights


def gelu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """An activation."""
    return jax.nn.gelu(gate) * up


class Block(nnx.Module):
    """A residual layer."""

    def __init__(self, mesh: Mesh, rngs: nnx.Rngs) -> None:
        """Makes the layer over axis "ep"."""
        self.moe = jax_ep.flax.MoE(
            mesh=mesh,
            axis_name="ep",
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_experts=8,
            top_k=2,
            max_tokens_per_rank=16,
            rngs=rngs,
            dtype=jnp.bfloat16,
            param_dtype=jnp.float32,
            dispatch_format="mxfp8",
            router_bias="logits",
            experts=jax_ep.experts.Padded(largest=64),
            transport="collective",
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Without losses."""
        return x + assert_type(self.moe(x), jax.Array)

    def with_aux(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """With the loss that balances the experts."""
        y, aux = self.moe(x, return_aux=True)
        assert_type(y, jax.Array)
        assert_type(aux, jax_ep.MoEAux)
        return x + y, aux.balance_loss

    def either(
        self, x: jax.Array, aux: bool
    ) -> jax.Array | tuple[jax.Array, jax_ep.MoEAux]:
        """What is known at run time alone."""
        return self.moe(x, return_aux=aux)

    def experts(self) -> jax.Array:
        """A parameter that every layer has."""
        return self.moe.gate_up.get_value()


class LinenBlock(nn.Module):
    """The same in Linen."""

    mesh: Mesh

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """With the loss."""
        moe = jax_ep.flax.linen.MoE(
            mesh=self.mesh,
            axis_name="ep",
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_experts=8,
            top_k=2,
            max_tokens_per_rank=16,
            dtype=jnp.bfloat16,
            transport="collective",
            router=route,
            activation=gelu,
            expert_bias=True,
        )
        y, aux = moe(x, return_aux=True)
        assert_type(y, jax.Array)
        assert_type(aux, jax_ep.MoEAux)
        return x + assert_type(moe(x), jax.Array) + y, aux.balance_loss


def main() -> None:
    """Calls both over the first two devices."""
    mesh = jax.make_mesh(
        (2,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    x = jnp.ones((32, HIDDEN), jnp.bfloat16)
    block = Block(mesh, nnx.Rngs(0))
    y, loss = block.with_aux(x)
    assert block.experts().shape == (8, HIDDEN, 2, 32)
    assert jnp.array_equal(y, block(x))
    assert isinstance(block.either(x, True), tuple)
    host = np.ones((32, HIDDEN), np.float32)
    assert block.moe(host, mask=np.ones(32, np.bool_)).dtype == jnp.bfloat16
    linen = LinenBlock(mesh)
    applied = linen.apply(linen.init(jax.random.key(0), x), x)
    assert [leaf.shape for leaf in jax.tree.leaves(applied)] == [y.shape, loss.shape]


if __name__ == "__main__":
    main()
