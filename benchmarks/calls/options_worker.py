"""Measures the options for options_cost.py, in a process of its own.

    python -m benchmarks.calls.options_worker SPECIFICATION OUTPUT

Each option has one handle over the transport and one over collective, whose results are
the reference.
"""

import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
from jax import lax

import jax_ep
from benchmarks.calls import options_report
from jax_ep._cli.bench import checks, loops, process, transports

_CONFIGS = {
    "source": {"reduce": "source"},
    "none": {"reduce": "none"},
    "shared": {"fused_shared_expert": True},
    "local": {"skip_a2a": True},
    "halves": {"pending_calls": 1},
    options_report.FIRST_HALF: {"pending_calls": 1},
}
_IN_HALVES = ("halves", options_report.FIRST_HALF)
_NO_WORD = 0x5EED  # no half leaves a buffer that begins with it, but XLA cannot know


def _dispatch(ep, name, tokens, ids, weights):
    if name not in _IN_HALVES:
        return jax_ep.dispatch(ep, tokens, ids, weights)
    pending = jax_ep.dispatch_async(ep, tokens, ids, weights)
    if name == options_report.FIRST_HALF:
        return pending
    return jax_ep.dispatch_wait(pending)


def _combine(ep, name, rows, route, row_weights, weights, tokens):
    by_mode = {"rank": row_weights, "source": weights, "none": None}
    given = by_mode[ep.config.reduce]
    if name in _IN_HALVES:
        pending = jax_ep.combine_async(ep, rows, route, given)
        if name == options_report.FIRST_HALF:
            return pending
        return jax_ep.combine_wait(pending)
    residual = tokens if name == "residual" else None
    y = jax_ep.combine(ep, rows, route, given, residual=residual)
    if name == "local":
        return lax.psum(y, "ep")
    return y + tokens if name == "added" else y


def _target(ep, op, name):
    """Returns the custom call that a program contains once per call."""
    if ep.transport != "p2p" or ep.config.skip_a2a:
        return "ep_dispatch_pack" if op == "dispatch" else "ep_combine_pack"
    return f"ep_{op}_send" if name in _IN_HALVES else f"ep_{op}"


class Option:
    """One option at one T: handles, inputs and right results."""

    def __init__(self, case, spec, name, num_sms):
        self.case, self.name = case, name
        config = dataclasses.replace(case.config, **_CONFIGS.get(name, {}))
        if config.fused_shared_expert:
            rows = config.recv_capacity + config.max_tokens_per_rank
            config = dataclasses.replace(config, recv_capacity=rows)
        init = functools.partial(jax_ep.init, case.mesh, "ep")
        self.other = init(config, transport="collective")
        config = dataclasses.replace(config, num_sms=num_sms)
        self.ep = init(config, transport=spec["transport"])
        shape = (case.mesh.size * self.ep.recv_capacity, config.hidden_size)
        key = jax.random.key(spec["seed"])
        self.rows = transports.normal(case.mesh, key, shape)
        # Each handle's dispatches by draw: its combines take their routes.
        self.arrived, self.wanted = (
            [
                self._mapped("dispatch", options_report.PLAIN, ep)(
                    *self.inputs("dispatch", draw)
                )
                for draw in range(len(case.ids))
            ]
            for ep in (self.ep, self.other)
        )

    def _mapped(self, op, name, ep):
        call = functools.partial(_CALLS[op], ep, name)
        return checks.mapped(self.case.mesh, call)

    def close(self):
        self.ep.close()
        self.other.close()

    def inputs(self, op, draw, arrived=None):
        case = self.case
        if op == "dispatch":
            return case.tokens, case.ids[draw], case.weights
        d = (arrived or self.arrived)[draw]
        return self.rows, d.route, d.router_weights, case.weights, case.tokens

    def differences(self, op):
        """Returns how the call's results differ from collective's, over all draws."""
        # A first half alone returns nothing to compare, so the whole call is compared.
        in_halves = self.name in _IN_HALVES
        call = self._mapped(op, "halves" if in_halves else self.name, self.ep)
        plainly = options_report.PLAIN if in_halves else self.name
        right, found = self._mapped(op, plainly, self.other), {}
        for draw in range(len(self.case.ids)):
            a = call(*self.inputs(op, draw))
            b = right(*self.inputs(op, draw, self.wanted))
            if op == "dispatch":
                found |= checks.dispatched(self.case.mesh, self.ep.config, a, b)
            else:
                found |= checks.combined(a, b)
        return found

    def _outputs(self, op, result):
        if self.name == options_report.FIRST_HALF:
            word = jax.tree.leaves(result.held)[0].reshape(-1)[:1]
            return [(word == _NO_WORD).astype(jnp.uint32)]
        return [result.row_offsets if op == "dispatch" else result]

    def operation(self, op):
        """Returns the calls to time, tied to each other by ids or by `slot_counts`."""
        call = functools.partial(_CALLS[op], self.ep, self.name)
        draws = [self.inputs(op, draw) for draw in range(len(self.case.ids))]
        target = _target(self.ep, op, self.name)
        make = functools.partial(loops.Operation, target=target)
        if op == "dispatch":
            return make(
                step=lambda ids, weights, tokens: self._outputs(
                    op, call(tokens, ids, weights)
                ),
                draws=[(ids, weights) for _, ids, weights in draws],
                shared=self.case.tokens,
            )

        def step(slot_counts, rest, shared):
            route = dataclasses.replace(rest[0], slot_counts=slot_counts)
            rows, *others = shared
            return self._outputs(op, call(rows, route, rest[1], *others))

        return make(
            step=step,
            draws=[(route.slot_counts, (route, w)) for _, route, w, *_ in draws],
            shared=(self.rows, self.case.weights, self.case.tokens),
        )

    def last(self, op):
        """Returns the last elements of what the timed calls return, for each draw."""
        made = self.operation(op)
        run = checks.mapped(self.case.mesh, lambda *args: made.step(*args)[0])
        results = (run(first, rest, made.shared) for first, rest in made.draws)
        return [loops.last_elements(self.case.mesh)(result) for result in results]


_CALLS = {"dispatch": _dispatch, "combine": _combine}


def _sizes(spec, case, name):
    """Returns how many calls a loop's body has, and how many iterations it makes."""
    rows = case.config.top_k if name in ("source", "none") else 1
    us = 10 + 1.2 * rows * case.facts["bytes"] / transports.GUESSED_GB_S / 1e3
    return loops.sizes(spec, transports.unrolled(case.facts["tokens"]), us)


def measure(spec, case, emit, name, num_sms):
    """Measures one option and emits its rows."""
    ops = [op for op in transports.OPS if options_report.measured(op, name)]
    facts = {"option": name, "num_sms": num_sms, "tokens": case.facts["tokens"]}
    if process.late(spec):
        for op in ops:
            emit({**facts, "op": op, "error": process.NO_TIME})
        return
    option = None
    try:
        option = Option(case, spec, name, num_sms)
        while ops:
            emit({**facts, "op": ops[0], **_measured(spec, option, ops[0])})
            ops.pop(0)
    except Exception as error:  # of one option of many
        for op in ops:
            emit({**facts, "op": op, "error": process.error_text(error)})
    finally:
        if option is not None:
            option.close()
    gc.collect()


def _measured(spec, option, op):
    found = option.differences(op)
    sizes = _sizes(spec, option.case, option.name)
    program = loops.compiling(option.case.mesh, option.operation(op), *sizes)()
    timing, wrong = loops.measure(program, spec["repeats"], option.last(op))
    option.ep.check()
    return {**timing, "differences": found | wrong, "wrong": bool(found | wrong)}


def run(spec, mesh, emit):
    """Measures all options at every T."""
    for tokens in spec["tokens"]:
        case = transports.make_case(mesh, spec, tokens, "uniform", defaults=False)
        for name in (options_report.PLAIN, *spec["options"]):
            half = name == options_report.FIRST_HALF
            for num_sms in [None, *(spec["num_sms"] if half else ())]:
                measure(spec, case, emit, name, num_sms)


def main(arguments=None):
    spec, output = process.given(arguments)
    mesh = process.ep_mesh(spec["devices"])
    with process.reporting(output, options_report.line, mesh) as emit:
        run(spec, mesh, emit)


if __name__ == "__main__":
    main()
