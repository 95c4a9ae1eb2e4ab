"""Times each of the three steps of a call in halves with overlap="copy".

Packing and placing are kernels on the stream of everything else, so they stay exposed;
only the copies between them can hide.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._cli.bench import checks, loops
from jax_ep._ops import combine as combining
from jax_ep._ops import dispatch as dispatching
from jax_ep._transport import by_name
from jax_ep._transport.base import Wire

_COLLECTIVE = by_name("collective")

_TARGETS = {
    ("dispatch", "pack"): "ep_dispatch_pack",
    ("dispatch", "place"): "ep_dispatch_unpack",
    ("combine", "pack"): "ep_combine_pack",
    ("combine", "place"): "ep_combine_unpack",
}


def _pack(ep, op, *inputs):
    """Returns what is sent, and what placing needs besides what arrives."""
    if op == "dispatch":
        args = dispatching._checked(
            "dispatch", ep, *inputs, input_scale=None, token_scales=None
        )
        send, *rest = _COLLECTIVE.dispatch_pack(ep, args, in_halves=False)
        return send, tuple(rest)
    args = combining.CombineArgs(*inputs, residual=None)
    sent, wire = combining._inputs(ep, args)
    send = _COLLECTIVE.combine_pack(ep, sent, wire, in_halves=False)
    return send, (sent.sums,)


def _place(ep, op, arrived, rest, like):
    if op == "dispatch":
        scale = jnp.ones((1,), jnp.float32)
        sent, _ = _COLLECTIVE.dispatch_recv(ep, (arrived, *rest), like, ())
        return dispatching._dispatched(ep, like, scale, sent)
    wire = Wire(ep.config.combine_wire, by_entry=False)
    (sums,) = rest
    return _COLLECTIVE.combine_recv(ep, arrived, sums, like, wire, ())[0]


def _word(array):
    """Returns each rank's first word; the rest of a message may be unspecified."""
    return lax.optimization_barrier(array)[0, :1]


class Parts:
    """The steps of one operation, on every draw of a transport's case."""

    def __init__(self, transport, op):
        self.transport, self.op = transport, op
        ep, case = transport.ep, transport.case
        mapped = functools.partial(checks.mapped, case.mesh)
        pack = mapped(functools.partial(_pack, ep, op))
        self.like = case.tokens if op == "dispatch" else case.expert_out
        draws = range(len(case.ids))
        packed = [pack(*transport.inputs(op, draw)) for draw in draws]
        self.sent = [send for send, _ in packed]
        self.rest = [rest for _, rest in packed]
        copies = mapped(functools.partial(_COLLECTIVE.exchange, ep))
        self.arrived = [copies(send) for send in self.sent]
        place = mapped(functools.partial(_place, ep, op))
        self.results = [
            place(arrived, rest, self.like)
            for arrived, rest in zip(self.arrived, self.rest, strict=True)
        ]

    def differences(self, other):
        """Returns how results of the three steps differ from another transport's."""
        found, case = {}, self.transport.case
        if self.op == "dispatch":
            for a, b in zip(self.results, other.dispatched, strict=True):
                found |= checks.dispatched(case.mesh, case.config, a, b)
        else:
            for a, b in zip(self.results, other.combined, strict=True):
                found |= checks.combined(a, b)
        return found

    def operation(self, part):
        """Returns the operation that does `part` alone, on every draw in turn."""
        ep, op, case = self.transport.ep, self.op, self.transport.case
        target = _TARGETS.get((op, part))
        make = functools.partial(loops.Operation, target=target)
        if part == "copies":
            return make(
                step=lambda send, rest, shared: [_word(_COLLECTIVE.exchange(ep, send))],
                draws=[(send, ()) for send in self.sent],
                shared=(),
            )
        if part == "place":
            return make(step=self._placed, draws=self._arrivals(), shared=self.like)
        if op == "dispatch":
            return make(
                step=lambda ids, weights, tokens: [
                    _word(_pack(ep, op, tokens, ids, weights)[0])
                ],
                draws=[(ids, case.weights) for ids in case.ids],
                shared=case.tokens,
            )
        inputs = [self.transport.inputs(op, draw) for draw in range(len(case.ids))]
        return make(
            step=lambda weights, route, rows: [
                _word(_pack(ep, op, rows, route, weights)[0])
            ],
            draws=[(weights, route) for _, route, weights in inputs],
            shared=case.expert_out,
        )

    def _arrivals(self):
        return list(zip(self.arrived, self.rest, strict=True))

    def _placed(self, arrived, rest, like):
        result = _place(self.transport.ep, self.op, arrived, rest, like)
        return [result.row_offsets if self.op == "dispatch" else result]

    def compiling(self, part, unrolled, iterations):
        """Like `loops.compiling`; it also checks that the program has all copies."""
        mesh = self.transport.case.mesh
        # XLA's CPU compiler would merge the copies of calls that only a barrier ties.
        by_data = part == "copies" and jax.default_backend() == "cpu"
        finish = loops.compiling(
            mesh,
            self.operation(part),
            unrolled,
            iterations,
            "data" if by_data else "barrier",
        )

        def counted():
            program = finish()
            count = program.opcodes.get
            # The all-to-all of an async-start is in another computation.
            found = count("all-to-all", 0) + count("all-to-all-start", 0)
            found = max(found, count("async-start", 0))
            if part == "copies" and found < unrolled:
                raise RuntimeError(f"{found} all-to-alls for {unrolled} calls")
            return program

        return counted

    def last(self, part):
        """Returns the last elements of what `operation` returns, for each draw."""
        mesh = self.transport.case.mesh
        if part == "place":
            arrays = [
                result.row_offsets if self.op == "dispatch" else result
                for result in self.results
            ]
        else:
            arrays = self.sent if part == "pack" else self.arrived
            arrays = map(checks.mapped(mesh, _word), arrays)
        return [loops.last_elements(mesh)(array) for array in arrays]
