"""The expert layer in pjit style: `jax_ep.sharded` on global arrays.

    python examples/train.py --layer sharded

All arrays are global under one `jax.jit`. Only the matmuls, whose group sizes differ
from rank to rank, are in a `jax.shard_map`.
"""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
import jax_ep.flax


class ShardedMoE(jax_ep.flax.MoE):
    """A layer with the parameters of `jax_ep.flax.MoE`, spelled out on global arrays.

    It only has a softmax top-k router and routed experts.
    """

    def __call__(self, x, *, return_aux=True):
        ep, mesh = self.ep, self.ep.mesh
        tokens = x.reshape(-1, x.shape[-1])
        tokens = jax.lax.with_sharding_constraint(
            tokens, NamedSharding(mesh, P(mesh.axis_names))
        )
        routing = jax_ep.router.route(tokens @ self.router[...], ep.config.top_k)
        d = jax_ep.sharded.dispatch(ep, tokens, routing.ids, routing.weights)
        rows = jax.shard_map(
            experts,
            mesh=mesh,
            in_specs=(P(mesh.axis_names), P("ep"), P("ep"), P(mesh.axis_names)),
            out_specs=P(mesh.axis_names),
        )(d.tokens, self.gate_up[...], self.down[...], d.group_sizes)
        y = jax_ep.sharded.combine(ep, rows, d.route, d.router_weights)
        losses = jax_ep.router.losses(routing)
        aux = jax_ep.MoEAux(
            losses.balance_loss,
            losses.z_loss,
            losses.load,
            d.expert_counts,
            d.num_dropped,
            d.num_invalid,
        )
        return y.reshape(x.shape), aux


def experts(rows, gate_up, down, group_sizes):
    """Runs the SwiGLU experts of one rank."""
    wide = gate_up.reshape(*gate_up.shape[:2], -1)
    both = jax.lax.ragged_dot(rows, wide, group_sizes)
    gate, up = jax.numpy.split(both, 2, axis=-1)
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, group_sizes)
