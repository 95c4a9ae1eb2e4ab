"""What jax_ep needs of JAX and of XLA's FFI; each failure says what to do about it."""

from __future__ import annotations

import functools
import inspect
import operator
import pathlib
import re
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import jaxlib
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._core import traces
from jax_ep._core.varying import varying
from jax_ep._native import ffi
from support import ROOT, helpers

# The functions that are called, with their keywords, and where.
CALLED: dict[str, tuple[tuple[str, ...], str]] = {
    "jax.shard_map": (
        ("mesh", "in_specs", "out_specs", "axis_names", "check_vma"),
        "jax_ep/_setup/init.py, jax_ep/sharded.py and every user's program",
    ),
    "jax.ffi.ffi_call": (
        ("target_name", "result_shape_dtypes", "has_side_effect", "vmap_method"),
        "jax_ep/_native/ffi.py",
    ),
    "jax.ffi.register_ffi_target": (
        ("name", "fn", "platform"),
        "jax_ep/_native/ffi.py",
    ),
    "jax.lax.all_to_all": (
        ("x", "axis_name", "split_axis", "concat_axis", "tiled"),
        "jax_ep/_transport/collective.py",
    ),
    "jax.lax.pcast": (("axis_name", "to"), "jax_ep/_core/varying.py"),
    "jax.lax.axis_size": (("axis_name",), "jax_ep/_core/checks.py"),
    "jax.sharding.get_abstract_mesh": ((), "jax_ep/_core/checks.py"),
    "jax.sharding.get_mesh": ((), "jax_ep/_setup/init.py"),
    "jax.set_mesh": (("mesh",), "jax_ep/_setup/init.py"),
    "jax.typeof": ((), "jax_ep/_native/tables.py"),
    "jax.custom_batching.custom_vmap": (("fun",), "jax_ep/_ops/ordering.py"),
    "jax.lax.ragged_dot": (("lhs", "rhs", "group_sizes"), "jax_ep/experts.py"),
    "jax.checkpoint_policies.save_only_these_names": ((), "jax_ep/_ops/remat.py"),
    "jax.tree_util.register_dataclass": (
        ("data_fields", "meta_fields"),
        "jax_ep/_core/types.py",
    ),
    "jax._src.core.take_current_trace": ((), "jax_ep/_core/traces.py"),
    "jax._src.core.get_axis_env": ((), "jax_ep/_core/traces.py"),
}
HOW = (
    "change the call there for this JAX, keep the old form for jax {oldest}, and run "
    "the suite on both (`.ci/run newest readme`); until then bound `jax` above in "
    "pyproject.toml's dependencies"
)


def oldest_jax() -> str:
    """The oldest supported JAX, from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r'"jax>=([\d.]+)"', text)
    assert match
    return match[1]


def require_callable(name: str) -> None:
    keywords, where = CALLED[name]
    how = HOW.format(oldest=oldest_jax())
    head = f"jax {jax.__version__} has another {name} than {where} calls"
    try:
        function = operator.attrgetter(name.removeprefix("jax."))(jax)
    except AttributeError:
        pytest.fail(f"{head}: it is gone; {how}")
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [word for word in keywords if word not in parameters]
    if missing:
        pytest.fail(f"{head}: it takes no {', '.join(missing)}; {how}")


@pytest.mark.parametrize("name", CALLED)
def test_jax_has_what_is_called(name: str) -> None:
    require_callable(name)


def test_a_change_of_jax_is_told(monkeypatch) -> None:
    """The test above fails with a remedy if a function changes or disappears."""

    def other(f: Any, mesh: Any, in_specs: Any, out_specs: Any, check_rep: bool) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(jax, "shard_map", other)
    with pytest.raises(pytest.fail.Exception, match="axis_names, check_vma; change"):
        require_callable("jax.shard_map")
    monkeypatch.delattr(jax.ffi, "ffi_call")
    with pytest.raises(pytest.fail.Exception, match="it is gone; change the call"):
        require_callable("jax.ffi.ffi_call")


def version_of_running_ffi() -> tuple[int, int]:
    """The FFI version in the headers of the installed jaxlib."""
    include = pathlib.Path(jaxlib.__file__).parent / "include"
    text = (include / "xla" / "ffi" / "api" / "c_api.h").read_text()
    words = {
        word: int(number)
        for word, number in re.findall(r"define XLA_FFI_API_(M\w+) (\d+)", text)
    }
    return words["MAJOR"], words["MINOR"]


def test_ffi_is_one_that_this_build_runs_on() -> None:
    """XLA serves extensions of its own major version and of older minor ones."""
    built, running = ffi.native.FFI_VERSION, version_of_running_ffi()
    assert running[0] == built[0], (
        f"jaxlib {jaxlib.__version__} has XLA FFI {running}, the native module was "
        f"built for {built}: build it against this jaxlib (raise the pins of jaxlib in "
        "pyproject.toml) and raise the oldest supported jax with it"
    )
    assert built[1] <= running[1], (
        f"the native module was built for XLA FFI {built}, jaxlib "
        f"{jaxlib.__version__} has {running}: build against the oldest supported "
        "jaxlib, as pyproject.toml's build-system does, with build isolation"
    )


def test_wheel_is_built_for_the_oldest_ffi() -> None:
    """The build pins the oldest supported jaxlib."""
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"jaxlib=={oldest_jax()}"' in text, (
        "pyproject.toml must build against the oldest jaxlib of its dependencies"
    )
    assert f'"jaxlib>={oldest_jax()}"' in text


def test_types_inside_shard_map() -> None:
    """Custom calls' results get their types, and operands vary over the same axes."""
    mesh = helpers.make_mesh(2)
    how = HOW.format(oldest=oldest_jax())

    def body(x: Any) -> Any:
        kind = jax.typeof(x).update(shape=(5,), dtype=jnp.dtype("int32"))
        assert (kind.shape, kind.dtype) == ((5,), jnp.int32), how
        axes = kind.manual_axis_type.varying
        assert axes == {"ep"}, f"types no longer say over what they vary; {how}"
        one = jax.lax.pcast(jnp.ones(3), ("ep",), to="varying")
        assert varying(one) == {"ep"}, f"pcast makes another type; {how}"
        assert dict(jax.sharding.get_abstract_mesh().shape) == {"ep": 2}, how
        return x + one.astype(x.dtype)

    run = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    jax.eval_shape(run, jax.ShapeDtypeStruct((6,), jnp.float32))


def test_store_of_jax_distributed() -> None:
    """The private names that jax_ep/_peers/rendezvous.py uses exist."""
    from jax._src import distributed
    from jaxlib import _jax

    how = (
        "inits of several processes meet there: find its successor for "
        "jax_ep/_peers/rendezvous.py"
    )
    state = getattr(distributed, "global_state", None)
    assert hasattr(state, "client"), f"jax.distributed's global_state is gone; {how}"
    client = getattr(_jax, "DistributedRuntimeClient", None)
    used = set(re.findall(r"\bs\.(\w+)\(", _source("_peers/rendezvous.py")))
    assert len(used) == 5
    for name in used:
        assert callable(getattr(client, name, None)), f"{name} is gone; {how}"


def _source(name: str) -> str:
    return (pathlib.Path(jax_ep.__file__).parent / name).read_text()


def test_backend_can_be_asked_whether_it_started() -> None:
    """A private name; without it `import jax_ep` still works."""
    from jax._src import xla_bridge

    found = getattr(xla_bridge, "backends_are_initialized", None)
    assert found is not None, (
        "jax._src.xla_bridge.backends_are_initialized is gone: jax_ep/_setup/runtime.py"
        " then takes the backend as not started and cannot warn; find its successor"
    )
    jax.devices()
    assert functools.partial(found)() is True


def test_start_of_the_cpu_backend_can_be_wrapped() -> None:
    """A private name; without it `jax_ep.init` warns if there are too few threads."""
    from jax._src import xla_bridge

    registered = getattr(xla_bridge, "_backend_factories", {}).get("cpu")
    assert hasattr(registered, "factory"), (
        "jax._src.xla_bridge._backend_factories is gone: jax_ep/_setup/runtime.py then "
        "gives XLA no more threads than cores; find its successor"
    )


def test_batches_are_seen() -> None:
    """The private names with which jax_ep/_core/traces.py detects a vmap work."""
    found = []

    def body(x: jax.Array, y: jax.Array) -> jax.Array:
        found.append((traces.batch_size(x), traces.batch_size(y)))
        found.append((traces.unbatched(x), traces.unbatched(y) is None))
        assert traces.current_trace() is around
        found.append(traces.spmd_axis_names())
        return x + y

    around = traces.current_trace()
    x, y = jnp.zeros(()), jnp.zeros(3)
    jax.vmap(body, (None, 0), spmd_axis_name="stage")(x, y)
    assert found[0] == (1, 3)
    assert found[1][1]
    assert traces.unbatched(x) is x
    assert found[2] == {"stage"}
