"""Measures jax_ep's transports: one case at a time, for p2p_worker.py.

A case is one number of tokens and one routing, drawn several times. Every transport's
results are compared with the collective transport's, bit for bit, before and after.
"""

import dataclasses
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli.bench import checks, loops, routings

_SMALL_TOKENS = 512  # below, calls are so short that the loop around them shows
_GUESSED_GB_S = 300
_OPS = ("dispatch", "combine")


@dataclasses.dataclass
class Case:
    """The inputs of one number of tokens and one routing, on all ranks."""

    mesh: Mesh
    config: jax_ep.EPConfig
    tokens: jax.Array
    ids: list[jax.Array]
    weights: jax.Array
    expert_out: jax.Array
    facts: dict  # of every row of this case
    wires: dict[str, dict]  # each measured operation's format, and bytes in it


def _normal(mesh, key, shape, dtype):
    make = jax.jit(
        lambda key: jax.random.normal(key, shape, dtype),
        out_shardings=NamedSharding(mesh, P("ep")),
    )
    return make(key)


def _row_bytes(name, hidden, dtype):
    """Payload and scales of a token in a format."""
    columns = jax_ep.formats.columns(name, hidden)
    payload = columns * jax_ep.formats.payload_dtype(name, dtype).itemsize
    scale = jax_ep.formats.scale_dtype(name)
    if scale is None:
        return payload
    return payload + hidden // jax_ep.formats.block(name) * scale.itemsize


def make_case(mesh, spec, tokens, routing, defaults):
    """A case with room for its rows; with `defaults` for the worst case, cleared."""
    ranks, hidden, dtype = mesh.size, spec["hidden"], jnp.dtype(spec["dtype"])
    experts, top_k = spec["experts"], spec["top_k"]
    draws = routings.draw_ids(spec["seed"], ranks * tokens, top_k, experts, routing)
    options = {}
    if not defaults:
        rows = routings.recv_capacity(draws, ranks, tokens, top_k, experts, routing)
        options = {"recv_capacity": rows, "zero_tail": False}
    config = jax_ep.EPConfig(
        num_experts=experts,
        top_k=top_k,
        hidden_size=hidden,
        max_tokens_per_rank=tokens,
        dtype=dtype.name,
        dispatch_format=spec["format"],
        combine_format=spec["combine_format"],
        timeout_s=20.0,
        **options,
    )
    rows = config.capacity(ranks)
    keys = jax.random.split(jax.random.key(spec["seed"] + tokens), 3)
    sharding = NamedSharding(mesh, P("ep"))

    def wire(name):
        name = name or "bf16"
        row_bytes = _row_bytes(name, hidden, dtype.name)
        bytes_us = routings.wire(draws, ranks, experts, row_bytes, spec["peak_gb_s"])
        return {"format": name, **bytes_us}

    formats = {"dispatch": config.dispatch_format, "combine": config.combine_format}

    return Case(
        mesh=mesh,
        config=config,
        tokens=_normal(mesh, keys[0], (ranks * tokens, hidden), dtype),
        ids=[jax.device_put(ids, sharding) for ids in draws],
        weights=_normal(mesh, keys[1], (ranks * tokens, top_k), jnp.float32),
        expert_out=_normal(mesh, keys[2], (ranks * rows, hidden), dtype),
        facts={
            "tokens": tokens,
            "routing": routing,
            "recv_capacity": rows,
            "zero_tail": config.zero_tail,
            **wire("bf16"),
        },
        wires={op: wire(formats[op]) for op in spec.get("ops", _OPS)},
    )


class Transport:
    """A handle of one case, with what it returns for each draw of routing."""

    def __init__(self, case, name, num_sms=None):
        self.case, self.name, self.num_sms = case, name, num_sms
        config = dataclasses.replace(case.config, num_sms=num_sms)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the worst case is large
            self.ep = jax_ep.init(case.mesh, "ep", config, transport=name)
        self.calls = {}

    def inputs(self, op, draw):
        case = self.case
        if op == "dispatch":
            return case.tokens, case.ids[draw], case.weights
        d = self.dispatched[draw]
        return case.expert_out, d.route, d.router_weights

    def compiling(self, op):
        make = getattr(checks, f"call_{op}")
        lowered = make(self.case.mesh, self.ep).lower(*self.inputs(op, 0))
        return lambda: self.calls.setdefault(op, lowered.compile())

    def run(self, op):
        draws = range(len(self.case.ids))
        results = [self.calls[op](*self.inputs(op, draw)) for draw in draws]
        jax.block_until_ready(results)
        setattr(self, "dispatched" if op == "dispatch" else "combined", results)

    def operation(self, op):
        ep, case = self.ep, self.case
        if op == "dispatch":
            return loops.Operation(
                step=lambda ids, weights, tokens: [
                    jax_ep.dispatch(ep, tokens, ids, weights).row_offsets
                ],
                draws=[(ids, case.weights) for ids in case.ids],
                shared=case.tokens,
                target="ep_pack" if self.name == "collective" else "ep_dispatch",
            )
        return loops.Operation(
            step=lambda weights, route, rows: [
                jax_ep.combine(ep, rows, route, weights)
            ],
            draws=[(d.router_weights, d.route) for d in self.dispatched],
            shared=case.expert_out,
            target="ep_combine_pack" if self.name == "collective" else "ep_combine",
        )

    def outputs(self, op):
        if op == "dispatch":
            return [d.row_offsets for d in self.dispatched]
        return self.combined

    def differences(self, other):
        """What differs from another transport in any draw; {} if nothing."""
        found = {}
        case = self.case
        for a, b in zip(self.dispatched, other.dispatched, strict=True):
            found |= checks.dispatched(case.mesh, case.config, a, b)
        if "combine" in case.wires:
            for a, b in zip(self.combined, other.combined, strict=True):
                found |= checks.combined(a, b)
        return found


def _sizes(spec, case, expected_us):
    """Calls in a loop's body, and iterations, that the loop's cost does not show."""
    small = case.facts["tokens"] < _SMALL_TOKENS
    unrolled = spec["unrolled"] or (64 if small else 16)
    milliseconds = spec["milliseconds"]
    return unrolled, max(1, math.ceil(milliseconds * 1e3 / expected_us / unrolled))


def finish(row, differences):
    """A timed row with what follows from its time and from the comparisons."""
    row |= {
        "gb_s": row["bytes"] / row["us"] / 1e3,
        "of_peak": row["floor_us"] / row["us"] if row["floor_us"] else None,
        "wrong": bool(differences),
        "differences": differences,
    }
    return row


def _timed(spec, transport, other, programs, op):
    """The row of an operation whose program is compiled."""
    timing, checksum = loops.measure(programs[op], spec["repeats"])
    sums = [
        loops.last_elements(transport.case.mesh)(array) for array in other.outputs(op)
    ]
    wanted = loops.expected_checksum(programs[op], sums)
    right = checksum is not None and np.array_equal(checksum, wanted)
    return {
        "transport": transport.name,
        "op": op,
        "num_sms": transport.num_sms,
        **transport.case.facts,
        **transport.case.wires[op],
        **timing,
        "differences": {} if right else {"checksum of the timed calls": 1},
    }


def measure_transport(spec, case, other, name, num_sms):
    """The rows of one transport: compared with another, timed, compared again."""
    transport = other if name == other.name else Transport(case, name, num_sms)
    try:
        if transport is not other:
            call_all(transport)
        found = transport.differences(other)
        ops = tuple(case.wires)
        wire_us = max(case.wires[op]["bytes"] for op in ops) / _GUESSED_GB_S / 1e3
        expected_us = 10 + 1.2 * wire_us if name == "p2p" else 120 + 2 * wire_us
        sizes = _sizes(spec, case, expected_us)
        programs = loops.compile_all(
            {
                op: loops.compiling(case.mesh, transport.operation(op), *sizes)
                for op in ops
            }
        )
        rows = [_timed(spec, transport, other, programs, op) for op in ops]
        if transport is not other:
            for op in ops:
                transport.run(op)
            found |= transport.differences(other)
            transport.ep.check()
    finally:
        if transport is not other:
            transport.ep.close()
    return [finish(row, found | row["differences"]) for row in rows]


def call_all(transport):
    """Runs both operations on every draw."""
    for op in transport.case.wires:
        loops.compile_all({op: transport.compiling(op)})
        transport.run(op)


def reference(case):
    """The collective transport: what everything else is compared with."""
    transport = Transport(case, "collective")
    call_all(transport)
    dropped = sum(int(np.asarray(d.num_dropped).sum()) for d in transport.dispatched)
    if dropped:
        raise RuntimeError(f"{dropped} rows do not fit, so the bytes are wrong")
    return transport


def measure_case(spec, mesh, emit, tokens, routing, defaults):
    """Measures the specification's transports on one case."""
    case = make_case(mesh, spec, tokens, routing, defaults)
    other = reference(case)
    for name in spec["transports"]:
        for num_sms in spec["num_sms"] if name == "p2p" and not defaults else [None]:
            try:
                rows = measure_transport(spec, case, other, name, num_sms)
            except (RuntimeError, ValueError) as error:
                facts = {"transport": name, "num_sms": num_sms, **case.facts}
                facts["format"] = case.config.dispatch_format
                rows = [{**facts, "error": f"{type(error).__name__}: {error}"}]
            for row in rows:
                emit(row)
    other.ep.close()
