"""A process of test_gpu: one compiled layer called 400 times with changing routing.

Its environment asks XLA for CUDA graphs from one node up, so that the custom calls are
captured and replayed. With the argument "close" the handle is closed before them.
"""

import sys

import helpers
import jax
import numpy as np

import jax_ep

SETS = 8


def main():
    ranks = helpers.some_ranks(4)
    mesh = helpers.make_mesh(ranks)
    config = helpers.make_config(max_tokens_per_rank=32, top_k=4, hidden_size=64)
    ep = jax_ep.init(mesh, "ep", config)

    def layer(tokens, ids, weights):
        d = jax_ep.dispatch(ep, tokens, ids, weights)
        rows = jax.nn.silu(d.tokens) * 2 + d.tokens
        y = jax_ep.combine(ep, rows, d.route, d.router_weights)
        return y, d.src_info, d.num_dropped

    spec = jax.P("ep")
    fn = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec))
    rng = np.random.default_rng(3)
    operands = []
    for _ in range(SETS):
        inputs = helpers.make_inputs(rng, config, ranks, fill=helpers.normal)
        parts = (inputs.tokens, inputs.ids, inputs.weights)
        operands.append([helpers.put(mesh, part) for part in parts])
    first = [jax.tree.map(np.asarray, fn(*each)) for each in operands]
    if "close" in sys.argv:
        ep.close()
    bad = 0
    for call in range(400):
        again = fn(*operands[call % SETS])
        if call % 20 < SETS:
            pairs = zip(again, first[call % SETS], strict=True)
            bad += any((np.asarray(a) != f).any() for a, f in pairs)
    print("bad", bad)


if __name__ == "__main__":
    main()
