"""Any order of init, dispatch, combine, gradients, check, close over several handles.

A hypothesis state machine against a model in NumPy: the results of handles, what closed
ones must refuse, which routes fit which handles, what check() reports. There are few
operand sets and configs, so that programs compile once and many steps run.
"""

from __future__ import annotations

import collections
import functools
import gc
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, oracle

CONFIGS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "float32", "expert_alignment": 4, "recv_capacity": 40},
)
ROUTINGS = ("random", "invalid", "none", ("full", "none", "one:5", "duplicates"))
SETS = len(ROUTINGS)
MOST_HANDLES = 4

# Handles outlive examples, since programs are compiled for them: an example opens new
# ones only for handles that earlier examples have closed.
_pool: dict[int, list[Any]] = {index: [] for index in range(len(CONFIGS))}


@functools.cache
def the_mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


@functools.cache
def operand_set(config_index: int, which: int):
    """Operands, and the results that dispatch and combine must give."""
    mesh = the_mesh()
    config = helpers.make_config(**CONFIGS[config_index])
    routing = ROUTINGS[which]
    if not isinstance(routing, str):
        routing = routing[: mesh.size]
    inputs = helpers.make_inputs(
        np.random.default_rng(which),
        config,
        mesh.size,
        routing=routing,
        fill=helpers.normal,
    )
    outputs = oracle.dispatch(config, inputs.tokens, inputs.ids, inputs.weights)
    sums = oracle.combine(
        config,
        inputs.ids,
        [o.tokens for o in outputs],
        [o.router_weights for o in outputs],
    )
    on_devices = [helpers.put(mesh, part) for part in vars(inputs).values()]
    return inputs, on_devices, np.concatenate(sums)


# Counts of steps that had an effect, over all examples.
_reached: collections.Counter[str] = collections.Counter()


class Handle:
    """A handle, and its state in the model."""

    def __init__(self, config_index: int):
        self.config_index = config_index
        pool = _pool[config_index]
        changes = CONFIGS[config_index]
        self.ep = pool.pop() if pool else helpers.init(the_mesh(), **changes)
        self.open = True
        self.reported = False  # invalid ids since the last check
        self.results: list[tuple[int, Any]] = []  # (operand set, Dispatched)

    def dispatch(self, which: int) -> Any:
        run = helpers.dispatch_fn(self.ep, the_mesh(), P("ep"))
        return run(*operand_set(self.config_index, which)[1])

    def combine(self, d: Any) -> Any:
        run = helpers.combine_fn(self.ep, the_mesh(), P("ep"))
        return run(d.tokens, d.route, d.router_weights, None)


@functools.cache
def grad_fn(ep: Any) -> Any:
    def back(x: Any, ids: Any, w: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            d = jax_ep.dispatch(ep, x, ids, w)
            return jax_ep.combine(ep, d.tokens, d.route, d.router_weights)

        y, pull = jax.vjp(layer, x, w)
        return pull(y)

    run = jax.shard_map(back, mesh=the_mesh(), in_specs=P("ep"), out_specs=P("ep"))
    return jax.jit(run)


@functools.cache
def gradients(config_index: int, which: int) -> Any:
    """Gradients on a separate handle, which nothing else uses."""
    ep = helpers.make_ep(the_mesh(), helpers.make_config(**CONFIGS[config_index]))
    _, args, _ = operand_set(config_index, which)
    return jax.tree.map(np.asarray, grad_fn(ep)(*args))


class Handles(stateful.RuleBasedStateMachine):
    """Steps on up to MOST_HANDLES handles, closed ones among them."""

    def __init__(self):
        super().__init__()
        self.handles: list[Handle] = []
        self.in_flight: list[tuple[Handle, int, Any]] = []

    def has_open(self) -> bool:
        return self.pick(0) is not None

    def has_closed(self) -> bool:
        return self.pick(0, is_open=False) is not None

    def has_results(self) -> bool:
        return any(handle.open and handle.results for handle in self.handles)

    def pick(self, index: int, *, is_open: bool = True) -> Any:
        found = [h for h in self.handles if h.open == is_open]
        return found[index % len(found)] if found else None

    @stateful.initialize(which=st.integers(0, SETS - 1))
    def begin(self, which):
        for config_index in range(len(CONFIGS)):
            self.init(config_index)
            self.dispatch(config_index, which)

    @stateful.precondition(lambda self: len(self.handles) < MOST_HANDLES)
    @stateful.rule(config_index=st.integers(0, len(CONFIGS) - 1))
    def init(self, config_index):
        handle = Handle(config_index)
        assert all(handle.ep != other.ep for other in self.handles)
        self.handles.append(handle)
        _reached["init"] += 1

    @stateful.precondition(lambda self: self.has_open())
    @stateful.rule(index=st.integers(0, 9), which=st.integers(0, SETS - 1))
    def dispatch(self, index, which):
        handle = self.pick(index)
        d = handle.dispatch(which)
        inputs = operand_set(handle.config_index, which)[0]
        helpers.assert_dispatched(handle.ep.config, d, inputs)
        handle.results.append((which, d))
        _reached["dispatch"] += 1
        handle.reported |= bool(np.asarray(d.num_invalid).any())

    @stateful.precondition(lambda self: self.has_open())
    @stateful.rule(index=st.integers(0, 9), which=st.integers(0, SETS - 1))
    def start(self, index, which):
        """Starts a dispatch, which `finish` checks later."""
        handle = self.pick(index)
        self.in_flight.append((handle, which, handle.dispatch(which)))

    @stateful.precondition(lambda self: self.in_flight)
    @stateful.rule()
    def finish(self):
        """Checks dispatches in the order of their starts, also after a close."""
        for handle, which, d in self.in_flight:
            inputs = operand_set(handle.config_index, which)[0]
            helpers.assert_dispatched(handle.ep.config, d, inputs)
            handle.reported |= bool(np.asarray(d.num_invalid).any())
        self.in_flight.clear()

    @stateful.precondition(lambda self: self.has_results())
    @stateful.rule(index=st.integers(0, 9), result=st.integers(0, 9))
    def combine(self, index, result):
        """Combines along any earlier dispatch of the handle, also after newer ones."""
        found = [h for h in self.handles if h.open and h.results]
        handle = found[index % len(found)]
        which, d = handle.results[result % len(handle.results)]
        wanted = operand_set(handle.config_index, which)[2]
        helpers.assert_sums(np.asarray(handle.combine(d)), wanted)
        _reached["combine of an old route"] += d is not handle.results[-1][1]

    @stateful.precondition(lambda self: self.has_open())
    @stateful.rule(index=st.integers(0, 9), which=st.integers(0, SETS - 1))
    def grad(self, index, which):
        handle = self.pick(index)
        inputs, args, _ = operand_set(handle.config_index, which)
        found = jax.tree.map(np.asarray, grad_fn(handle.ep)(*args))
        jax.tree.map(helpers.assert_bits, found, gradients(handle.config_index, which))
        experts = handle.ep.config.num_experts
        handle.reported |= any(((i < -1) | (i >= experts)).any() for i in inputs.ids)
        _reached["grad"] += 1

    @stateful.precondition(lambda self: self.has_results())
    @stateful.rule(index=st.integers(0, 9), other=st.integers(0, 9))
    def combine_another_handles_route(self, index, other):
        owners = [h for h in self.handles if h.results]
        handle, owner = self.pick(index), owners[other % len(owners)]
        if owner is handle:
            return
        d = owner.results[-1][1]
        with pytest.raises(ValueError, match=r"jax_ep\.combine: .*(N|route)"):
            handle.combine(d)
        _reached["another's route"] += 1

    @stateful.precondition(lambda self: self.has_open())
    @stateful.rule(index=st.integers(0, 9))
    def check(self, index):
        self.finish()
        handle = self.pick(index)
        if handle.reported:
            with pytest.raises(jax_ep.InvalidIdError):
                handle.ep.check()
            handle.reported = False
            _reached["report"] += 1
        assert handle.ep.check() is None

    @stateful.precondition(lambda self: self.has_open())
    @stateful.rule(index=st.integers(0, 9), again=st.booleans())
    def close(self, index, again):
        handle = self.pick(index)
        if handle.ep.transport != "collective":
            self.finish()
        handle.ep.close()
        if again:
            handle.ep.close()
        handle.open = False

    @stateful.precondition(lambda self: self.has_closed())
    @stateful.rule(index=st.integers(0, 9), which=st.integers(0, SETS - 1))
    def use_closed(self, index, which):
        handle = self.pick(index, is_open=False)
        with pytest.raises(ValueError, match="closed"):
            handle.ep.check()
        trace = helpers.dispatch_fn.__wrapped__(handle.ep, the_mesh(), P("ep"))
        args = operand_set(handle.config_index, which)[1]
        with pytest.raises(ValueError, match=r"jax_ep\.dispatch: .*closed"):
            trace(*args)
        _reached["closed"] += 1

    @stateful.precondition(lambda self: self.has_closed())
    @stateful.rule(index=st.integers(0, 9), collect=st.booleans())
    def drop(self, index, collect):
        """Drops a handle, perhaps with calls in flight."""
        handle = self.pick(index, is_open=False)
        self.handles.remove(handle)
        if collect:
            gc.collect()

    def teardown(self):
        self.finish()
        for handle in self.handles:
            if handle.open:
                if handle.reported:
                    with pytest.raises(jax_ep.InvalidIdError):
                        handle.ep.check()
                    _reached["report"] += 1
                assert handle.ep.check() is None
                _pool[handle.config_index].append(handle.ep)


@pytest.mark.slow
def test_any_order_of_steps() -> None:
    settings = hypothesis.settings(
        max_examples=15,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        stateful.run_state_machine_as_test(Handles, settings=settings)
    finally:
        for pool in _pool.values():
            while pool:
                pool.pop().close()
    wanted = {"init", "dispatch", "combine of an old route", "grad", "another's route"}
    wanted |= {"report", "closed"}
    assert all(_reached[what] > 0 for what in wanted), _reached
