"""The handle: attributes, identity, keys, closing, collection, persistent cache."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import json
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._native import ffi
from jax_ep._setup import init
from support import gpus, helpers, oracle
from support.launch import command, environment, run_to_end


@pytest.fixture
def mesh():
    return helpers.make_mesh(helpers.some_ranks(4))


def compiled(ep, mesh):
    """A jitted dispatch that no other test shares."""
    body = functools.partial(jax_ep.dispatch, ep)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def operands(ep, mesh, seed=0):
    inputs = helpers.make_inputs(np.random.default_rng(seed), ep.config, mesh.size)
    parts = inputs.tokens, inputs.ids, inputs.weights
    return inputs, [helpers.put(mesh, part) for part in parts]


def route_key(ep, mesh) -> int:
    """The content key, as the route carries it."""
    return jax.eval_shape(compiled(ep, mesh), *operands(ep, mesh)[1]).route.key


def test_attributes(mesh) -> None:
    with helpers.init(mesh, expert_alignment=4) as ep:
        local = len(mesh.local_devices)
        assert ep.transport == helpers.TRANSPORT
        assert ep.ep_size == mesh.size
        assert ep.config == helpers.make_config(expert_alignment=4)
        assert ep.recv_capacity == oracle.capacity(ep.config, mesh.size)
        assert isinstance(ep.dev_ptrs, np.ndarray)
        assert ep.dev_ptrs.dtype == np.uint64
        assert ep.dev_ptrs.shape == (local, 2, 3)
        if ep.transport == "collective":
            # This transport does not have its own buffers.
            assert ep.buffer_bytes == 0
            assert not ep.dev_ptrs.any()
        else:
            config = ep.config
            row = config.hidden_size * config.element_bytes
            # Room for the rows of every source, for dispatch and for combine.
            assert ep.buffer_bytes > 2 * ep.ep_size * config.max_tokens_per_rank * row
            recv = ep.dev_ptrs[..., 1]
            assert recv.all()
            assert len(set(recv.flat)) == recv.size
        assert ep.my_rank.dtype == np.int32
        np.testing.assert_array_equal(ep.my_rank, np.arange(local))
        assert ep.check() is None


def test_auto_transport(mesh) -> None:
    with jax_ep.init(mesh, "ep", helpers.make_config()) as ep:
        reachable = gpus.why_no_p2p(mesh.devices.flat) is None
        assert ep.transport == ("p2p" if reachable else "collective")


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        ("ep", [0, 1, 2, 3, 0, 1, 2, 3]),
        ("dp", [0, 0, 0, 0, 1, 1, 1, 1]),
        (("dp", "ep"), range(8)),
        (("ep", "dp"), [0, 2, 4, 6, 1, 3, 5, 7]),
    ],
)
def test_my_rank(axis, expected) -> None:
    """my_rank has the local devices' ranks in the mesh's order."""
    mesh = helpers.make_mesh({"dp": 2, "ep": 4}, order=range(7, -1, -1))
    ep = helpers.make_ep(mesh, helpers.make_config(), axis)
    np.testing.assert_array_equal(ep.my_rank, list(expected))


def test_config_is_frozen_and_hashable() -> None:
    config = helpers.make_config()
    assert config == helpers.make_config()
    assert len({config, helpers.make_config(), helpers.make_config(top_k=2)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 5  # type: ignore[misc]  # that it cannot be set is the test
    assert dataclasses.replace(config, top_k=5).top_k == 5
    sizes = {"top_k": 2, "capacity_factor": 1.5, "zero_tail": False}
    numpys = {name: np.array(size)[()] for name, size in sizes.items()}
    assert repr(helpers.make_config(**numpys)) == repr(helpers.make_config(**sizes))
    defaults = {
        "dtype": "bfloat16",
        "dispatch_format": "bf16",
        "combine_dtype": None,
        "combine_format": None,
        "grad_format": None,
        "reduce": "rank",
        "recv_capacity": None,
        "capacity_factor": None,
        "expert_alignment": 1,
        "scale_layout": "rows",
        "zero_tail": True,
        "fused_shared_expert": False,
        "skip_a2a": False,
        "allreduce_world_size": None,
        "pending_calls": None,
        "overlap": "sm",
        "num_sms": None,
        "ranks_per_node": None,
        "timeout_s": 100.0,
    }
    assert {name: getattr(config, name) for name in defaults} == defaults


def test_identity(mesh) -> None:
    """Handles of equal content are different, hashable and static."""
    first, second = helpers.init(mesh), helpers.init(mesh)
    assert first != second
    assert len({first, second, first}) == 2
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(ep, *args):
        traced.append(ep)
        return compiled(ep, mesh)(*args).num_invalid

    for ep in (first, second, first):
        run(ep, *operands(ep, mesh)[1]).block_until_ready()
    assert traced == [first, second]


def test_keys(mesh) -> None:
    """Keys of equal content differ by instance, and those of other content anyway."""
    other_mesh = helpers.make_mesh(
        mesh.size, order=[*range(1, mesh.size), 0] if mesh.size > 1 else None
    )
    made = [
        (mesh, {}),
        (mesh, {}),
        (mesh, {"timeout_s": 5.0}),
        (mesh, {"zero_tail": False}),
        (other_mesh, {}),
    ]
    eps = [(helpers.init(m, **changes), m) for m, changes in made]
    keys = [route_key(ep, m) for ep, m in eps]
    assert len(set(keys)) == len(keys)
    assert [route_key(ep, m) for ep, m in eps] == keys
    # A closed handle's instance number is not reused.
    eps[0][0].close()
    assert route_key(helpers.init(mesh), mesh) not in keys


def test_two_handles_of_equal_content(mesh) -> None:
    """Both give right results, interleaved in one program and in several."""
    first, second = helpers.init(mesh, top_k=2), helpers.init(mesh, top_k=2)
    inputs, args = operands(first, mesh, 1)
    others, more = operands(second, mesh, 2)

    def both(x, ids, w, x2, ids2, w2):
        return (
            jax_ep.dispatch(first, x, ids, w),
            jax_ep.dispatch(second, x2, ids2, w2),
            jax_ep.dispatch(first, x2, ids2, w2),
        )

    run = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    for _ in range(3):
        a, b, c = run(*args, *more)
        helpers.assert_dispatched(first.config, a, inputs)
        helpers.assert_dispatched(first.config, b, others)
        helpers.assert_dispatched(first.config, c, others)


def test_close(mesh) -> None:
    ep = helpers.init(mesh)
    run = compiled(ep, mesh)
    inputs, args = operands(ep, mesh)
    helpers.assert_dispatched(ep.config, run(*args), inputs)
    ep.close()
    ep.close()
    if ep.transport == "collective":
        # The compiled program contains all that it needs.
        helpers.assert_dispatched(ep.config, run(*args), inputs)
    else:
        # On every rank, so that none waits, and every time, not only once.
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
                jax.block_until_ready(run(*args))
    with pytest.raises(ValueError, match=r"jax_ep\.dispatch: .*closed"):
        compiled(ep, mesh)(*args)


def test_close_stops_combine(mesh) -> None:
    ep = helpers.init(mesh)
    d = compiled(ep, mesh)(*operands(ep, mesh)[1])
    ep.close()
    with pytest.raises(ValueError, match=r"jax_ep\.combine: .*closed"):
        helpers.combine_fn(ep, mesh, P("ep"))(d.tokens, d.route, None, None)


def test_context_manager(mesh) -> None:
    with helpers.init(mesh) as ep:
        inputs, args = operands(ep, mesh)
        helpers.assert_dispatched(ep.config, compiled(ep, mesh)(*args), inputs)
    with pytest.raises(ValueError, match="closed"):
        compiled(ep, mesh)(*args)
    error = RuntimeError("from the body")
    with pytest.raises(RuntimeError, match="from the body"), helpers.init(mesh):
        raise error


def test_closing_one_leaves_its_twin(mesh) -> None:
    first, second = helpers.init(mesh), helpers.init(mesh)
    first.close()
    inputs, args = operands(second, mesh)
    helpers.assert_dispatched(second.config, compiled(second, mesh)(*args), inputs)


def test_unused_handle_is_collected(mesh) -> None:
    ep = helpers.init(mesh, hidden_size=24)
    seen = weakref.ref(ep)
    del ep
    gc.collect()
    assert seen() is None


def test_large_default_capacity_warns(mesh) -> None:
    """For over 1 GB of rows init names the size before it is allocated."""
    config = helpers.make_config(
        num_experts=64, top_k=32, hidden_size=7168, max_tokens_per_rank=8192
    )
    with pytest.warns(UserWarning, match=r"jax_ep\.init: .*GB"):
        jax_ep.init(mesh, "ep", config, transport="collective").close()


def worker(*args: str, env: dict[str, str] | None = None) -> dict:
    """Runs handle_worker.py in a process of its own; its last line is JSON."""
    # This process may hold most of the GPUs' memory.
    platform = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if helpers.TRANSPORT == "collective":
        platform["JAX_PLATFORMS"] = "cpu"
    done = run_to_end(
        command("handle_worker.py", *args), env=environment(**platform | (env or {}))
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_persistent_cache_of_another_version(mesh, monkeypatch) -> None:
    """Programs of another version have another key, so that none is found."""
    changes = {"timeout_s": 98.5}  # used only here, as this reuses keys
    config, texts = helpers.make_config(**changes), []
    for version in (ffi.native.WIRE_VERSION, ffi.native.WIRE_VERSION + 1):
        monkeypatch.setattr(ffi.native, "WIRE_VERSION", version)
        monkeypatch.setattr(init, "_instances", collections.Counter())
        with helpers.init(mesh, **changes) as ep:
            inputs = helpers.make_inputs(np.random.default_rng(0), config, mesh.size)
            operands = [helpers.put(mesh, part) for part in vars(inputs).values()]
            lowered = helpers.dispatch_fn(ep, mesh, P("ep")).lower(*operands)
            texts.append(lowered.as_text())
            assert str(ep.key) in texts[-1]
    assert texts[0] != texts[1]


@pytest.mark.slow
def test_persistent_cache(tmp_path) -> None:
    """A program from the cache uses a group of its own content, or is not found."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    first, second = worker("plain", env=env), worker("plain", env=env)
    assert first["key"] == second["key"]
    assert first["right"]
    assert second["right"]
    assert first["hits"] == 0
    assert second["hits"] > 0
    # Other handles are opened first, so that all counters and addresses differ.
    shifted = worker("shifted", env=env)
    assert shifted["right"]
    assert shifted["key"] == first["key"]
    assert shifted["hits"] > 0
    # A second handle of that content has another key, so nothing of the first is hit.
    twin = worker("twin", env=env)
    assert twin["right"]
    assert twin["key"] != first["key"]
    # A config of equal shapes has different programs in the same cache.
    other = worker("other", env=env)
    assert other["right"]
    assert other["key"] not in (first["key"], twin["key"])
    assert other["hits"] < second["hits"]
    assert worker("other", env=env)["hits"] == second["hits"]


@pytest.mark.slow
def test_used_handle_is_collected() -> None:
    assert worker("collect")["collected"]
