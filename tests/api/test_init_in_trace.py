"""jax_ep.init during a trace: it runs at once, outside; shared handles; Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._core import threads
from support import helpers


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.some_ranks(2))


init = helpers.init


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]


def checked_for_leaks(f):
    def run(x):
        with jax.checking_leaks():
            return jax.jit(f)(x)

    return run


def guarded(f):
    def run(x):
        with jax.transfer_guard("disallow"):
            return jax.jit(f)(x)

    return run


TRANSFORMS = {
    "jit": jax.jit,
    "grad": jax.grad,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, x])).sum(),
    "scan": scanned,
    "remat": jax.checkpoint,
    "eval_shape": lambda f: lambda x: jax.eval_shape(f, x),
    "checking_leaks": checked_for_leaks,
    "transfer_guard": guarded,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_init_under_transformations(mesh, name):
    made = []

    def traced(x):
        made.append(init(mesh))
        return 2 * x

    TRANSFORMS[name](traced)(jnp.float32(1))
    with made[0] as ep:
        assert ep.my_rank.tolist() == list(range(mesh.size))
        tokens = jnp.ones((8 * mesh.size, ep.config.hidden_size), ep.config.dtype)
        ids = jnp.zeros((len(tokens), ep.config.top_k), jnp.int32)
        assert jax_ep.sharded.dispatch(ep, tokens, ids).tokens.shape[1:] == (16,)


def test_init_inside_shard_map(mesh):
    """Called inside a trace, init gives a handle of the mesh, not of the trace."""
    made = []

    def body(x, ids):
        made.append(init(mesh))
        d = jax_ep.dispatch(made[-1], x, ids)
        return jax_ep.combine(made[-1], d.tokens, d.route)

    x = jnp.ones((8 * mesh.size, 16), jnp.bfloat16)
    ids = jnp.tile(jnp.arange(3, dtype=jnp.int32), (len(x), 1))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(x, ids), np.float32), 3)
    for ep in made:
        ep.close()


def test_mesh_of_set_mesh_inside_jit(mesh):
    made = []

    @jax.jit
    def traced(x):
        made.append(init(None))
        return x

    with jax.set_mesh(mesh):
        traced(1.0)
    with made[0] as ep:
        assert ep.mesh == mesh
    with pytest.raises(ValueError, match="mesh=None needs a mesh set by"):
        jax.jit(lambda x: init(None))(1.0)


def test_errors_come_from_inside_a_trace(mesh):
    """Errors are the same as outside of a trace."""

    def traced(x):
        init(mesh, num_experts=mesh.size + 1, top_k=1)
        return x

    if mesh.size > 1:
        with pytest.raises(ValueError, match="must be a multiple of the group's ranks"):
            jax.jit(traced)(1.0)
    with pytest.raises(TypeError, match=r"config must be a jax_ep.EPConfig"):
        jax.jit(lambda x: jax_ep.init(mesh, "ep", 3))(1.0)


def test_shared_handle(mesh):
    """Equal arguments get one handle, whoever requests it, in a trace or not."""
    config = helpers.make_config(expert_alignment=2)

    def shared(**changes):
        given = {"mesh": mesh, "axis_name": "ep", "config": config}
        given |= {"transport": helpers.TRANSPORT} | changes
        return jax_ep.shared_handle(**given)

    made = []

    @jax.jit
    def traced(x):
        made.append(shared())
        return x

    traced(1.0), traced(np.ones(2))
    ep = shared(axis_name=("ep",))
    assert made == [ep, ep]
    with jax.set_mesh(mesh):
        assert shared(mesh=None) is ep
    other = shared(config=helpers.make_config(expert_alignment=3))
    assert other is not ep
    ep.close()
    again = shared()
    assert again is not ep
    assert not again.closed
    jax_ep.close_shared_handles()
    assert again.closed
    assert other.closed
    with shared() as new:
        assert new not in (ep, again)
    with pytest.raises(TypeError, match=r"config must be a jax_ep.EPConfig"):
        shared(config=None)
    with pytest.raises(ValueError, match="axis_name must name"):
        shared(axis_name="zz")


def interrupt_soon(before) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        before.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


@pytest.fixture
def interrupts():
    """Enables Ctrl-C, which a shell may ignore for tests in the background."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_interrupt_gets_through(interrupts):
    """An interrupt also reaches waiting code, which can then tell other processes."""
    begun, told = threading.Event(), []

    def waits() -> None:
        end = time.monotonic() + 60
        try:
            begun.set()
            while time.monotonic() < end:
                time.sleep(0.05)
        except KeyboardInterrupt:
            told.append("interrupted")
            raise

    interrupt_soon(begun)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threads.untraced(waits)
    assert told == ["interrupted"]
    assert time.monotonic() - start < 30


def test_interrupt_of_what_does_not_listen(interrupts, monkeypatch):
    """A C call that goes on does not block the caller."""
    monkeypatch.setattr(threads, "_GRACE_S", 0.2)
    begun, end = threading.Event(), threading.Event()

    def waits() -> None:
        begun.set()
        end.wait(60)

    interrupt_soon(begun)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        threads.untraced(waits)
    assert time.monotonic() - start < 30
    end.set()
