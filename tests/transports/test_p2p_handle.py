"""The Python side of p2p: its handle, types and call sites; needs no GPU.

Device memory is faked, on CPU devices.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._native import ffi, loader
from jax_ep._setup import init
from jax_ep._transport import select
from support import helpers, options
from support.launch import environment, run_to_end


@pytest.fixture
def opened(monkeypatch):
    """init's calls of the native module, and the failures that the module reports."""
    record = types.SimpleNamespace(opened=[], closed=[], failures=[])

    def open_windows(key, groups, config, **options):
        (ordinals,) = groups
        ffi.native.open_group(key, ordinals, list(range(len(ordinals))))
        record.opened.append((groups, config, options))
        return 4096

    def close_group(key):
        record.closed.append(key)
        ffi.native.close_group(key)

    names = ("open_group", "take_invalid_ids", "take_mixed_calls", "pool_threads")
    module = types.SimpleNamespace(
        FIRST_EPOCH=1,
        ELSEWHERE=-1,
        open_windows=open_windows,
        close_group=close_group,
        wait_failures=lambda key: record.failures,
        **{name: getattr(ffi.native, name) for name in names},
    )
    monkeypatch.setattr(ffi, "native_cuda", module)
    monkeypatch.setattr(ffi, "native_for", lambda platform: module)
    monkeypatch.setattr(select, "choose", lambda *args: "p2p")
    return record


@pytest.fixture
def mesh():
    if jax.default_backend() != "cpu":
        # p2p's native module is replaced; on GPUs test_p2p*.py runs the real one.
        pytest.skip("fakes windows on CPU devices")
    return helpers.make_mesh(4)


def test_init_opens_windows(mesh, opened, monkeypatch) -> None:
    with helpers.init(mesh, num_sms=3, timeout_s=2.5) as ep:
        assert ep.transport == "p2p"
        assert ep.buffer_bytes == 4096
    monkeypatch.setattr(init, "_FIRST_EPOCH", 2**64 - 3)
    ep = helpers.init(mesh)
    ep.close()
    ep.close()
    assert len(opened.closed) == 2
    groups, config, _ = opened.opened[0]
    assert groups == [[0, 1, 2, 3]]
    assert config == {
        "format": "bf16",
        "hidden": 16,
        "element_bytes": 2,
        "wire_element_bytes": 2,
        "tokens": 8,
        "dispatch_tokens": 8,
        "combine_tokens": 8,
        "top_k": 3,
        "ranks": 4,
        "local_experts": 6,
        "pending_calls": 0,
    }
    options = [options for _, _, options in opened.opened]
    assert options == [
        {"timeout_s": 2.5, "num_sms": 3, "first_epoch": 1, "by_fabric": False},
        {
            "timeout_s": 100.0,
            "num_sms": 0,
            "first_epoch": 2**64 - 3,
            "by_fabric": False,
        },
    ]


# What windows have room for with T = 8 tokens, K = 3, L = 6 experts.
ROOM = {
    "source": (8, 24, 3, 6),
    "none": (24, 24, 3, 6),
    "shared": (8, 8, 4, 7),
    "shared_source": (8, 24, 4, 7),
}


@pytest.mark.parametrize("mode", options.MODES)
def test_windows_of_options(mesh, opened, mode: str) -> None:
    with helpers.init(mesh, **options.MODES[mode], pending_calls=1) as ep:
        assert ep.transport == "p2p"
        assert ep.buffer_bytes == (4096 if mode in ROOM else 0)
    # With skip_a2a there are no windows.
    fields = ("dispatch_tokens", "combine_tokens", "top_k", "local_experts")
    room = [tuple(config[f] for f in fields) for _, config, _ in opened.opened]
    assert room == ([ROOM[mode]] if mode in ROOM else [])
    assert all(config["pending_calls"] == 1 for _, config, _ in opened.opened)


def test_calls_that_xla_exchanges_need_no_windows(mesh, opened) -> None:
    helpers.init(mesh, overlap="copy", pending_calls=2).close()
    ((_, config, _),) = opened.opened
    assert config["pending_calls"] == 0


def test_check_raises_while_poisoned(mesh, opened) -> None:
    ep = helpers.init(mesh)
    ep.check()
    opened.failures += [(1, "ep is poisoned: rank 1"), (2, "ep is poisoned: rank 2")]
    for _ in range(2):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"jax_ep\.check: .*rank 1$"
        ):
            ep.check()
    ep.close()
    with pytest.raises(ValueError, match="closed"):
        ep.check()


def everything(ep: Any, x: Any, ids: Any, w: Any, skip: Any) -> Any:
    """Every call of a transport, with and without optional operands."""

    def run(x: Any, w: Any, skip: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids, w)
        y = jax_ep.combine(ep, d.tokens, d.route, d.router_weights, residual=skip)
        return y + jax_ep.combine(ep, d.tokens, d.route), d

    y, pull, d = jax.vjp(run, x, w, skip, has_aux=True)
    return y, d, pull(y)


def mapped(ep: Any, mesh: Any) -> Any:
    body = functools.partial(everything, ep)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_types_are_those_of_collective(mesh, opened, monkeypatch, dtype: str) -> None:
    config = helpers.make_config(dtype=dtype, combine_dtype="float16")
    p2p = jax_ep.init(mesh, "ep", config)
    monkeypatch.undo()
    collective = jax_ep.init(mesh, "ep", config, transport="collective")
    args = (
        jnp.ones((20, 16), dtype),
        jnp.zeros((20, 3), jnp.int32),
        jnp.ones((20, 3), jnp.float32),
        jnp.ones((20, 16), dtype),
    )
    shapes = [
        jax.tree.leaves(jax.eval_shape(mapped(ep, mesh), *args))
        for ep in (p2p, collective)
    ]
    assert shapes[0] == shapes[1]
    text = mapped(p2p, mesh).lower(*args).as_text()
    targets = re.findall(r"custom_call @(ep_\w+)", text)
    assert set(targets) == {"ep_dispatch", "ep_dispatch_cached", "ep_combine"}


def sites() -> list[str]:
    """The sites of two dispatches on different lines, and of the first one again."""
    mesh = helpers.make_mesh(1)
    ep = jax_ep.init(mesh, "ep", helpers.make_config(), transport="collective")
    vars(ep)["transport"] = "p2p"

    def one(x: Any, ids: Any) -> Any:
        return jax_ep.dispatch(ep, x, ids)

    def other(x: Any, ids: Any) -> Any:
        return jax_ep.dispatch(ep, x, ids)

    def site(body: Any) -> str:
        run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        args = jnp.ones((8, 16), jnp.bfloat16), jnp.zeros((8, 3), jnp.int32)
        text = jax.jit(run).lower(*args).as_text()
        (found,) = re.findall(r"site = (\d+) : i64", text)
        return found

    return [site(one), site(other), site(one)]


def test_site_is_the_users_line() -> None:
    """So mixed-up calls are detected; equal in processes with other hash seeds."""
    one, other, again = sites()
    assert one == again != other
    done = run_to_end(
        [
            sys.executable,
            "-c",
            "import conftest, test_p2p_handle as t; print(t.sites())",
        ],
        env=environment(PYTHONHASHSEED="7", JAX_PLATFORMS="cpu"),
        cwd=pathlib.Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == str([one, other, again])


def test_cuda_stub_names_what_the_module_has() -> None:
    cuda = loader.cuda
    if cuda is None:
        pytest.skip("this installation has no CUDA module")
    stub = pathlib.Path(jax_ep.__file__).with_name("_native_cuda.pyi").read_text()
    declared = set(re.findall(r"^(?:def |class )?(\w+)(?:\(|:)", stub, re.MULTILINE))
    assert declared == {name for name in dir(cuda) if not name.startswith("_")}
