"""Measures host times with one build of jax_ep, in a process of its own.

    python -P benchmarks/calls/host_time_worker.py SPECIFICATION OUTPUT

host_time.py starts it with the build on PYTHONPATH. As that may be an older one, this
file uses only public names of jax_ep, which the older one has as well. It writes a line
of JSON to OUTPUT for what was loaded, and one for each row as soon as it is measured.
"""

import gc
import json
import pathlib
import statistics
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

OPS = ("dispatch", "combine")
_NEVER = -1  # no row offset, and no element of a combine's result, is that small


def files():
    """Returns the files that jax_ep and its native modules were loaded from."""
    native = (
        module.__file__
        for name, module in sorted(sys.modules.items())
        if name.rpartition(".")[2].startswith("_native_")
    )
    return [jax_ep.__file__, *filter(None, native)]


def mapped(mesh, function):
    spec = P("ep")
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )


class Case:
    """A handle, and different operands for each call of a program."""

    def __init__(self, mesh, spec, transport, tokens):
        self.mesh, self.tied = mesh, spec["tied"]
        ranks, rng = mesh.size, np.random.default_rng(spec["seed"])
        rows = ranks * tokens * spec["top_k"]
        config = jax_ep.EPConfig(
            num_experts=spec["experts"],
            top_k=spec["top_k"],
            hidden_size=spec["hidden"],
            max_tokens_per_rank=tokens,
            dtype="bfloat16",
            recv_capacity=rows,
            zero_tail=False,
        )
        self.ep = jax_ep.init(mesh, "ep", config, transport=transport)
        sharding = NamedSharding(mesh, P("ep"))

        def drawn(*shape, dtype=jnp.bfloat16):
            values = rng.standard_normal((ranks * shape[0], *shape[1:]))
            return jax.device_put(jnp.asarray(values, dtype), sharding)

        def ids():
            everyone = (rng.permutation(spec["experts"]) for _ in range(ranks * tokens))
            chosen = np.stack([each[: spec["top_k"]] for each in everyone])
            return jax.device_put(jnp.asarray(chosen, jnp.int32), sharding)

        calls = range(spec["calls"])
        self.tokens = drawn(tokens, spec["hidden"])
        self.weights = drawn(tokens, spec["top_k"], dtype=jnp.float32)
        self.ids = [ids() for _ in calls]
        self.rows = [drawn(rows, spec["hidden"]) for _ in calls]
        self.never = jax.device_put(jnp.full(ranks, _NEVER, jnp.int32), sharding)
        call = mapped(mesh, lambda *args: jax_ep.dispatch(self.ep, *args))
        self.arrived = call(self.tokens, self.ids[0], self.weights)

    def _nothing(self, last, never):
        """Returns a zero that XLA cannot know: what it is added to waits for `last`."""
        return (last == never[0]).astype(jnp.int32) if self.tied else 0

    def program(self, op):
        """Returns a function that makes all calls of a program, and its operands.

        The function returns one small array.
        """
        ep = self.ep

        def dispatch(never, tokens, weights, *ids):
            found, last = [], never[0] - 1
            for each in ids:
                each = each + self._nothing(last, never)
                d = jax_ep.dispatch(ep, tokens, each, weights)
                last = d.row_offsets[-1]
                bits = lax.bitcast_convert_type(d.tokens[0, 0], jnp.uint16)
                # If there are no rows, row 0 is unspecified.
                found.append(d.row_offsets + jnp.where(last > 0, bits, 0))
            return sum(found)

        def combine(never, route, weights, *rows):
            found, last = [], never[0] - 1
            for each in rows:
                nothing = self._nothing(last, never)
                y = jax_ep.combine(ep, each, route, weights + nothing)
                bits = lax.bitcast_convert_type(y, jnp.uint16).astype(jnp.int32)
                found.append(bits)
                last = bits[0, 0]
            return sum(found)

        if op == "dispatch":
            return dispatch, (self.never, self.tokens, self.weights, *self.ids)
        d = self.arrived
        return combine, (self.never, d.route, d.router_weights, *self.rows)

    def close(self):
        self.ep.close()


def timed(run, repeats):
    """Returns each run's time until the program was launched, and until it was done."""
    launched, done = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            result = run()
            launched.append(time.perf_counter() - start)
            jax.block_until_ready(result)
            done.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return launched, done


def measured(case, op, spec):
    """Makes a row of microseconds per call."""
    function, operands = case.program(op)
    run = mapped(case.mesh, function).lower(*operands).compile()
    made = run.as_text().count('custom_call_target="ep_')
    if made < spec["calls"]:
        raise RuntimeError(f"{made} custom calls for {spec['calls']} in a program")
    result = np.asarray(run(*operands))
    times = timed(lambda: run(*operands), spec["repeats"])
    row = {"checksum": zlib.crc32(result.tobytes())}
    for name, each in zip(("launched", "done"), times, strict=True):
        us = [seconds / spec["calls"] * 1e6 for seconds in each]
        row |= {f"{name}_us": statistics.median(us), f"{name}_us_least": min(us)}
    return row


def rows(mesh, spec):
    for transport in spec["transports"]:
        for tokens in spec["tokens"]:
            case = Case(mesh, spec, transport, tokens)
            for op in OPS:
                facts = {"transport": transport, "op": op, "tokens": tokens}
                yield facts | measured(case, op, spec)
            case.close()


def main(arguments=None):
    specification, output = sys.argv[1:] if arguments is None else arguments
    spec = json.loads(specification)
    if spec["platform"] == "cpu" and not spec["here"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", spec["devices"] or 2)
    devices = np.array(jax.devices()[: spec["devices"]])
    mesh = Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    head = {
        "device": devices[0].device_kind,
        "count": mesh.size,
        "jax": jax.__version__,
        "files": files(),
    }
    with pathlib.Path(output).open("a") as out:
        for row in (head, *rows(mesh, spec)):
            out.write(json.dumps(row) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
