"""One process of test_tampered.py: routes with wrong indices; the last line is JSON.

Whatever the tables hold, every call returns or ends with the error of a failed wait,
and unrelated handles always give right answers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time

import jax_ep

# isort: split
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from support import compare_transports, helpers

jax.config.update("jax_num_cpu_devices", 4)

TIMEOUT_S = float(os.environ.get("JAX_EP_TEST_TIMEOUT_S", "1"))
TABLES = ("slot_of", "row_of", "row_slot", "slot_counts")
VALUES = {
    "least": helpers.INT_MIN,
    "most": helpers.INT_MAX,
    "minus_two": -2,
    "end": None,  # one past the last valid index
    "other": "other",  # a valid index of another row
}
FIELDS = {"max_tokens_per_rank": 16, "hidden_size": 64, "timeout_s": TIMEOUT_S}


class Layer:
    def __init__(self, mesh):
        self.mesh = mesh
        self.ep = helpers.init(mesh, **FIELDS)
        self.inputs = helpers.make_inputs(
            np.random.default_rng(1), self.ep.config, mesh.size, fill=helpers.normal
        )
        self.operands = [helpers.put(mesh, part) for part in vars(self.inputs).values()]
        self.dispatch = compare_transports.mapped(
            mesh, functools.partial(jax_ep.dispatch, self.ep)
        )
        self.d = jax.block_until_ready(self.dispatch(*self.operands))
        self.there_and_back = compare_transports.mapped(mesh, self.layer)

    def layer(self, route, rows, weights):
        """Combine, and its backward along the route."""

        def run(rows, weights):
            return jax_ep.combine(self.ep, rows, route, weights)

        y, pull = jax.vjp(run, rows, weights)
        return y, pull(y)

    def check(self):
        helpers.assert_dispatched(
            self.ep.config, self.dispatch(*self.operands), self.inputs
        )

    def tampered(self, table, value):
        """The route with about a quarter of a table's entries changed."""
        array = np.array(getattr(self.d.route, table))
        if value is None:
            ranks, n = self.mesh.size, self.ep.config.max_tokens_per_rank
            ends = {"row_of": self.ep.recv_capacity, "slot_counts": n + 1}
            value = ends.get(table, ranks * n)
        rng = np.random.default_rng(2)
        chosen = rng.random(array.shape) < 0.25
        wrong = rng.permutation(array.ravel()).reshape(array.shape)
        array = np.where(chosen, wrong if value == "other" else value, array)
        changed = helpers.put(self.mesh, [array.astype(np.int32)], P("ep"))
        return dataclasses.replace(self.d.route, **{table: changed})


def main() -> dict:
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    other, layer = Layer(mesh), Layer(mesh)
    found = {}
    for table in TABLES:
        for name, value in VALUES.items():
            route = layer.tampered(table, value)
            start = time.monotonic()
            outcome = "returned"
            try:
                d = layer.d
                jax.block_until_ready(
                    layer.there_and_back(route, d.tokens, d.router_weights)
                )
                layer.ep.check()
            except jax.errors.JaxRuntimeError as error:
                outcome = str(error)
            seconds = time.monotonic() - start
            found[f"{table} {name}"] = {"outcome": outcome, "seconds": seconds}
            if outcome != "returned":
                layer.ep.close()
                layer = Layer(mesh)
            layer.check()
            other.check()
    assert other.ep.check() is None
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
