"""Measures jax_ep's transports, one case at a time.

A case is one number of tokens and one routing, drawn several times. Before and after
timing, every transport's results are compared bit for bit with the collective
transport's.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli.bench import checks, loops, process, routings

OPS = ("dispatch", "combine")
CODES = ", codes"  # suffix of the format if tokens were quantised before the call
GUESSED_GB_S = 300  # guess of the wire's speed, to size programs
_SMALL_TOKENS = 512  # with fewer, calls are so short that the loop's overhead shows


def unrolled(tokens: int) -> int:
    """Returns the number of calls in the body of a program's loop."""
    return 64 if tokens < _SMALL_TOKENS else 16


@dataclasses.dataclass
class Case:
    """The inputs of one number of tokens and one routing, on all ranks."""

    mesh: Mesh
    config: jax_ep.EPConfig
    tokens: jax.Array
    ids: list[jax.Array]
    weights: jax.Array
    expert_out: jax.Array
    facts: dict[str, Any]  # entries of every row of this case
    wires: dict[str, dict[str, Any]]  # by measured operation: format, and bytes in it
    scales: jax.Array | None = None  # scales of tokens that are quantised already


def normal(
    mesh: Mesh,
    key: jax.Array,
    shape: tuple[int, ...],
    dtype: Any = jnp.bfloat16,
    spec: P | None = None,
    scale: float = 1.0,
) -> jax.Array:
    """Draws a sharded array of random numbers; by default stacked on dim 0."""
    spec = P("ep") if spec is None else spec
    make = jax.jit(
        lambda key: jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype),
        out_shardings=NamedSharding(mesh, spec),
    )
    return make(key)


def _row_bytes(name: Any, hidden: int, dtype: str) -> int:
    """Returns the bytes of a token in a format: payload and scales."""
    columns = jax_ep.formats.columns(name, hidden)
    payload = columns * jax_ep.formats.payload_dtype(name, dtype).itemsize
    scale = jax_ep.formats.scale_dtype(name)
    if scale is None:
        return payload
    return payload + hidden // jax_ep.formats.block(name) * scale.itemsize


def make_case(
    mesh: Mesh, spec: dict[str, Any], tokens: int, routing: str, defaults: bool
) -> Case:
    """Makes a case whose N fits; with `defaults`, the default N and a zeroed tail."""
    ranks, hidden, dtype = mesh.size, spec["hidden"], jnp.dtype(spec["dtype"])
    experts, top_k = spec["experts"], spec["top_k"]
    draws = routings.draw_ids(spec["seed"], ranks * tokens, top_k, experts, routing)
    options: dict[str, Any] = {}
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

    def wire(name: str | None) -> dict[str, Any]:
        name = name or "bf16"
        row_bytes = _row_bytes(name, hidden, dtype.name)
        cost = routings.wire(draws, ranks, experts, row_bytes, spec["peak_gb_s"])
        return {"format": name, **cost}

    formats = {"dispatch": config.dispatch_format, "combine": config.combine_format}
    sent = normal(mesh, keys[0], (ranks * tokens, hidden), dtype)
    wires, scales = {op: wire(formats[op]) for op in spec.get("ops", OPS)}, None
    if spec.get("coded"):
        name = config.dispatch_format
        quantize = functools.partial(jax_ep.formats.quantize, format=name)
        sent, scales = checks.mapped(mesh, quantize)(sent)
        wires["dispatch"]["format"] += CODES

    return Case(
        mesh=mesh,
        config=config,
        tokens=sent,
        ids=[jax.device_put(ids, sharding) for ids in draws],
        weights=normal(mesh, keys[1], (ranks * tokens, top_k), jnp.float32),
        expert_out=normal(mesh, keys[2], (ranks * rows, hidden), dtype),
        facts={
            "tokens": tokens,
            "routing": routing,
            "recv_capacity": rows,
            "zero_tail": config.zero_tail,
            **wire("bf16"),
        },
        wires=wires,
        scales=scales,
    )


class Transport:
    """A handle for one case, with its results for each draw of the routing."""

    def __init__(self, case: Case, name: Any, num_sms: int | None = None) -> None:
        """Opens the handle."""
        self.case, self.name, self.num_sms = case, name, num_sms
        config = dataclasses.replace(case.config, num_sms=num_sms)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the worst case is large
            self.ep = jax_ep.init(case.mesh, "ep", config, transport=name)
        self.calls: dict[str, Any] = {}
        self.dispatched: list[Any] = []
        self.combined: list[Any] = []

    def inputs(self, op: str, draw: int) -> tuple[Any, ...]:
        """Returns a call's operands."""
        case = self.case
        if op == "dispatch":
            given = case.tokens, case.ids[draw], case.weights
            return given if case.scales is None else (*given, case.scales)
        d = self.dispatched[draw]
        return case.expert_out, d.route, d.router_weights

    def compiling(self, op: str) -> Callable[[], Any]:
        """Returns a function that compiles the call that `run` makes."""
        make = getattr(checks, f"call_{op}")
        lowered = make(self.case.mesh, self.ep).lower(*self.inputs(op, 0))
        return lambda: self.calls.setdefault(op, lowered.compile())

    def run(self, op: str) -> None:
        """Calls the operation on all draws and keeps the results."""
        draws = range(len(self.case.ids))
        results = [self.calls[op](*self.inputs(op, draw)) for draw in draws]
        jax.block_until_ready(results)
        setattr(self, "dispatched" if op == "dispatch" else "combined", results)

    def call_all(self) -> None:
        """Runs all operations on every draw."""
        for op in self.case.wires:
            self.compiling(op)()
            self.run(op)

    def operation(self, op: str) -> loops.Operation:
        """Returns the operation's calls, for a program."""
        ep, case = self.ep, self.case
        if op == "dispatch":
            coded = case.scales is not None

            def dispatch(ids: Any, weights: Any, sent: Any) -> list[jax.Array]:
                tokens, scales = sent if coded else (sent, None)
                d = jax_ep.dispatch(ep, tokens, ids, weights, token_scales=scales)
                return [d.row_offsets]

            return loops.Operation(
                step=dispatch,
                draws=[(ids, case.weights) for ids in case.ids],
                shared=(case.tokens, case.scales) if coded else case.tokens,
                target="ep_dispatch_pack"
                if self.name == "collective"
                else "ep_dispatch",
            )
        return loops.Operation(
            step=lambda weights, route, rows: [
                jax_ep.combine(ep, rows, route, weights)
            ],
            draws=[(d.router_weights, d.route) for d in self.dispatched],
            shared=case.expert_out,
            target="ep_combine_pack" if self.name == "collective" else "ep_combine",
        )

    def outputs(self, op: str) -> list[Any]:
        """Returns what the step of `operation` returns for each draw."""
        if op == "dispatch":
            return [d.row_offsets for d in self.dispatched]
        return self.combined

    def last(self, op: str) -> list[Any]:
        """Returns `last_elements` of each draw's output."""
        return [loops.last_elements(self.case.mesh)(each) for each in self.outputs(op)]

    def differences(self, other: Transport) -> dict[str, int]:
        """Returns what differs from another transport in any draw; {} if nothing."""
        found: dict[str, int] = {}
        case = self.case
        for a, b in zip(self.dispatched, other.dispatched, strict=True):
            found |= checks.dispatched(case.mesh, case.config, a, b)
        if "combine" in case.wires:
            for a, b in zip(self.combined, other.combined, strict=True):
                found |= checks.combined(a, b)
        return found


def finish(row: dict[str, Any], differences: dict[str, Any]) -> dict[str, Any]:
    """Adds to a timed row what follows from its time and from the comparisons."""
    row |= {
        "gb_s": row["bytes"] / row["us"] / 1e3,
        "of_peak": row["floor_us"] / row["us"] if row["floor_us"] else None,
        "wrong": bool(differences),
        "differences": differences,
    }
    return row


def measure_transport(
    spec: dict[str, Any],
    case: Case,
    other: Transport,
    name: str,
    num_sms: int | None,
) -> list[dict[str, Any]]:
    """Compares a transport with another, times it, compares again; returns its rows."""
    transport = other if name == other.name else Transport(case, name, num_sms)
    try:
        if transport is not other:
            transport.call_all()
        found = transport.differences(other)
        wire_us = (
            max(wire["bytes"] for wire in case.wires.values()) / GUESSED_GB_S / 1e3
        )
        us = 10 + 1.2 * wire_us if name == "p2p" else 120 + 2 * wire_us
        sizes = loops.sizes(spec, unrolled(case.facts["tokens"]), us)
        finishers = {
            op: loops.compiling(case.mesh, transport.operation(op), *sizes)
            for op in case.wires
        }
        rows = []
        for op, program in loops.compile_all(finishers).items():
            timing, wrong = loops.measure(
                loops.raised(program), spec["repeats"], other.last(op)
            )
            facts = {"transport": name, "op": op, "num_sms": num_sms}
            rows.append(({**facts, **case.facts, **case.wires[op], **timing}, wrong))
        if transport is not other:
            for op in case.wires:
                transport.run(op)
            found |= transport.differences(other)
            transport.ep.check()
    finally:
        if transport is not other:
            transport.ep.close()
    return [finish(row, found | wrong) for row, wrong in rows]


def reference(case: Case) -> Transport:
    """Runs the collective transport, with which all others are compared."""
    transport = Transport(case, "collective")
    transport.call_all()
    dropped = sum(int(np.asarray(d.num_dropped).sum()) for d in transport.dispatched)
    if dropped:
        raise RuntimeError(f"{dropped} rows do not fit, so the bytes are wrong")
    return transport


def measure_case(
    spec: dict[str, Any],
    mesh: Mesh,
    emit: process.Emit,
    tokens: int,
    routing: str,
    defaults: bool,
) -> None:
    """Measures the specification's transports on one case."""
    case = make_case(mesh, spec, tokens, routing, defaults)
    other = reference(case)
    for name in spec["transports"]:
        for num_sms in spec["num_sms"] if name == "p2p" and not defaults else [None]:
            try:
                rows = measure_transport(spec, case, other, name, num_sms)
            except (RuntimeError, ValueError) as error:
                facts = {"transport": name, "num_sms": num_sms, **case.facts}
                facts["format"] = case.wires["dispatch"]["format"]
                rows = [{**facts, "error": process.error_text(error)}]
            for row in rows:
                emit(row)
    other.ep.close()
