"""Times two micro-batches, the exchange of one under the experts of the other."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import jax_ep
from benchmarks.layers import experts as layer_experts
from benchmarks.overlap import report
from jax_ep._cli.bench import checks, loops, transports

NAME = report.TWO_BATCHES
_UNROLLED = 2
_EXPECTED_US = 12_000
# Relative to the largest element: matmuls in another program may sum in another order.
_TOLERANCE = 0.03


def _layer(ep, experts, tokens, ids, weights):
    d = jax_ep.dispatch(ep, tokens, ids, weights)
    rows = experts(d.tokens, d.group_sizes)
    return jax_ep.combine(ep, rows, d.route, d.router_weights)


def one_after_the_other(eps, experts, first, second):
    """Returns both batches' sums, computed by whole calls of one handle."""
    one = _layer(eps[0], experts, *first)
    # The second begins when the first has ended, as in a layer with twice the tokens.
    one, second = lax.optimization_barrier((one, second))
    return one, _layer(eps[0], experts, *second)


def in_turns(eps, experts, first, second):
    """Returns the same; each batch has a handle and hides under the other's work."""
    begin = [functools.partial(jax_ep.dispatch_async, ep) for ep in eps]
    back = [functools.partial(jax_ep.combine_async, ep) for ep in eps]
    d = jax_ep.dispatch_wait(begin[0](*first))
    pending = begin[1](*second)
    rows = experts(d.tokens, d.group_sizes)
    pending, rows = lax.optimization_barrier((pending, rows))
    e = jax_ep.dispatch_wait(pending)
    pending = back[0](rows, d.route, d.router_weights)
    rows = experts(e.tokens, e.group_sizes)
    pending, rows = lax.optimization_barrier((pending, rows))
    one = jax_ep.combine_wait(pending)
    two = jax_ep.combine_wait(back[1](rows, e.route, e.router_weights))
    return one, two


class Batches:
    """Two handles of a transport's case, and the results of the first program."""

    def __init__(self, transport, spec):
        self.case, self.spec = transport.case, spec
        hidden, inner = self.case.config.hidden_size, spec["inner"]
        self.other = jax_ep.init(
            self.case.mesh, "ep", transport.ep.config, transport=transport.name
        )
        self.eps = (transport.ep, self.other)
        sizes = {"hidden": hidden, "inner": inner}
        self.way = "hopper" if layer_experts.available("hopper", sizes) else "matmul"
        # Elsewhere a matmul of all rows by one matrix stands in for the experts.
        each = 1 if self.way == "matmul" else self.eps[0].local_experts
        count = self.case.mesh.size * each
        make = functools.partial(transports.normal, self.case.mesh)
        self.params = (
            make(jax.random.key(8), (count, hidden, inner), scale=hidden**-0.5),
            make(jax.random.key(9), (count, inner, hidden), scale=inner**-0.5),
        )
        self.wanted = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.other.close()

    def _experts(self, params, rows, group_sizes):
        if self.way == "hopper":
            multiply = layer_experts.grouped_matmul
            inside = jax.nn.silu(multiply(rows, params[0], group_sizes))
            # Rows past the last group are unspecified.
            real = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
            return multiply(jnp.where(real[:, None], inside, 0), params[1], group_sizes)
        return jax.nn.silu(rows @ params[0][0]) @ params[1][0]

    def _both(self, form, tokens, ids, weights, params):
        experts = functools.partial(self._experts, params)
        batches = [(tokens, each, weights) for each in ids]
        if form is None:
            return one_after_the_other(self.eps, experts, *batches)
        return in_turns(self.eps, experts, *batches)

    def measure(self, form):
        """Returns the row of the arrangement `form`; None is one after the other."""
        case, run = self.case, functools.partial(self._both, form)
        once = checks.mapped(case.mesh, run)
        sums = once(case.tokens, tuple(case.ids[:2]), case.weights, self.params)
        if self.wanted is None:
            self.wanted = sums
        error = max(map(checks.largest_error, sums, self.wanted))
        ids = [tuple(pair) for pair in zip(case.ids[::2], case.ids[1::2], strict=True)]
        operation = loops.Operation(
            step=lambda weights, ids, shared: list(
                run(shared[0], ids, weights, shared[1])
            ),
            draws=[(case.weights, pair) for pair in ids],
            shared=(case.tokens, self.params),
        )
        sizes = loops.sizes(
            self.spec | {"unrolled": _UNROLLED}, _UNROLLED, _EXPECTED_US
        )
        program = loops.compiling(case.mesh, operation, *sizes, tie="data")()
        timing, different = loops.measure(program, self.spec["repeats"])
        for ep in self.eps:
            ep.check()
        if error > _TOLERANCE:
            different["y"] = error
        facts = {"experts": self.way, "largest_error": error}
        return {
            **timing,
            "facts": facts,
            "differences": different,
            "wrong": bool(different),
        }
