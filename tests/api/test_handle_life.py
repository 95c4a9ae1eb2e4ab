"""Lifetimes of handles: fork, pickling, garbage collection, exit of the process.

What could end the session runs in handle_life_worker.py.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import re
import signal
import sys
import weakref

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_ep import sharded
from support import helpers
from support.errors import check_form, check_state
from support.launch import command, environment, run_to_end

TIMEOUT_S = 500


@pytest.fixture
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


# What C++, glibc or Python prints when Python before 3.14 ends a daemon thread in the
# middle of C++, as it does when the interpreter exits during a call of any jitted
# function. Nothing is printed if a jaxlib destructor then misses the thread's Python
# state. Programs without jax_ep end in the same way.
ENDED_THREAD = (
    "terminate called without an active exception",
    "FATAL: exception not rethrown",
    "Fatal Python error: PyThreadState_Get: the function must be called with the GIL",
)


def worker(scenario: str, *, may_end_threads: bool = False) -> list[str]:
    """The lines that the scenario prints; it must succeed within its time limit."""
    env = environment(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if helpers.TRANSPORT == "collective":
        env["JAX_PLATFORMS"] = "cpu"
    done = run_to_end(
        command("handle_life_worker.py", scenario), env=env, timeout=TIMEOUT_S
    )
    said = done.stderr.strip()
    killed = done.returncode in (-signal.SIGABRT, -signal.SIGSEGV)
    ended = killed and (not said or said.startswith(ENDED_THREAD))
    if may_end_threads and ended and sys.version_info < (3, 14):
        return done.stdout.splitlines()
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()


def test_no_second_one(mesh) -> None:
    with helpers.init(mesh) as ep:
        with pytest.raises(TypeError) as caught:
            pickle.dumps(ep)
        assert "EPHandle cannot be pickled" in str(caught.value)
        assert "pickle ep.config and call jax_ep.init" in str(caught.value)
        assert copy.copy(ep) is ep
        assert copy.deepcopy({"ep": ep})["ep"] is ep
        inputs = helpers.make_inputs(np.random.default_rng(0), ep.config, mesh.size)
        helpers.assert_dispatched(
            ep.config, helpers.run_dispatch(ep, mesh, inputs), inputs
        )


def test_config_and_results_pickle(mesh) -> None:
    """An unpickled config makes the same handle, and unpickled results can be used."""
    with helpers.init(mesh) as ep:
        assert pickle.loads(pickle.dumps(ep.config)) == ep.config
        inputs = helpers.make_inputs(
            np.random.default_rng(0), ep.config, mesh.size, fill=helpers.normal
        )
        d = helpers.run_dispatch(ep, mesh, inputs)
        again = pickle.loads(pickle.dumps(d))
        helpers.assert_dispatched(ep.config, again, inputs)
        run = helpers.combine_fn(ep, mesh, P("ep"))
        route = dataclasses.replace(
            again.route,
            **{
                name: helpers.put(mesh, [np.asarray(getattr(again.route, name))])
                for name in ("slot_of", "row_of", "row_slot", "slot_counts")
            },
        )
        rows = helpers.put(mesh, [np.asarray(again.tokens)])
        helpers.assert_bits(
            run(rows, route, None, None), np.asarray(run(d.tokens, d.route, None, None))
        )


@pytest.mark.slow
def test_forked_child() -> None:
    """A forked child's copies and its init raise errors; the parent's handles work."""
    lines = worker("fork")
    child = [line for line in lines if line.startswith("child: ")]
    assert len(child) == 4, lines
    for line in child:
        assert "forked" in line, line
    assert "child left" in lines
    assert lines[-1] == "parent right"


@pytest.mark.slow
def test_forked_child_of_a_process_without_handles() -> None:
    """The fork itself is recorded, as no init ran before it."""
    child, parent = worker("fork_early")
    assert re.match("child: jax_ep.init: .*forked from process", child), child
    assert parent == "parent right"


@pytest.mark.slow
def test_collected_in_any_order() -> None:
    assert worker("collect")[-1] == "right"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end", "thread", "error", "closing"])
def test_exit_with_calls_in_flight(how: str) -> None:
    """The interpreter exits while calls run: no hang, no crash, the right status."""
    assert worker(f"exit_{how}", may_end_threads=how == "thread")[-1] == "leaving"


@pytest.mark.parametrize("changes", [{}, {"key": 7}])
def test_no_twins(mesh, changes: dict) -> None:
    """A second handle of the same group is refused, as it could close the first's."""
    with helpers.init(mesh) as ep:
        with pytest.raises(TypeError) as caught:
            dataclasses.replace(ep, **changes)
        check_state(caught, "EPHandle", "replace", "jax_ep.init")
        with pytest.raises(TypeError) as caught:
            type(ep)(**{f.name: getattr(ep, f.name) for f in dataclasses.fields(ep)})
        check_state(caught, "EPHandle", "jax_ep.init")
        inputs = helpers.make_inputs(np.random.default_rng(0), ep.config, mesh.size)
        d = helpers.run_dispatch(ep, mesh, inputs)
        helpers.assert_dispatched(ep.config, d, inputs)


def test_attributes_stay(mesh) -> None:
    with helpers.init(mesh) as ep:
        names = [f.name for f in dataclasses.fields(ep) if f.name[0] != "_"]
        assert {"key", "config", "transport", "recv_capacity"} <= set(names)
        for name in (*names, "new"):
            with pytest.raises(AttributeError) as caught:
                setattr(ep, name, 7)
            check_form(caught, "EPHandle", name)
        for array in (ep.dev_ptrs, ep.my_rank):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 7
        with pytest.raises(AttributeError) as caught:
            del ep.key
        check_form(caught, "EPHandle", "key")


def test_closed_handle_of_eager_calls_is_collected(mesh) -> None:
    """Its eager programs belong to it, although JAX caches what they trace to."""
    ep = helpers.init(mesh)
    inputs = helpers.make_inputs(np.random.default_rng(0), ep.config, mesh.size)
    operands = [helpers.put(mesh, part) for part in vars(inputs).values()]
    d = sharded.dispatch(ep, *operands)
    sharded.combine(ep, d.tokens, d.route, d.router_weights)
    found = weakref.ref(ep)
    ep.close()
    del ep
    gc.collect()
    assert found() is None
