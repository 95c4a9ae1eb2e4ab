"""apply_experts: bits equal to those of its parts, what it accepts and refuses."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import pickle
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import EPConfig
from jax_ep._layers import apply
from support import helpers, moe, options, remat
from support.errors import check_form, raises
from support.launch import run_to_end

pytestmark = pytest.mark.usefixtures("quick_compiles")
RANKS, EXPERTS, TOP_K, HIDDEN, N = 4, 8, 2, 128, 6
HERE: dict[str, Any] = {
    "num_experts": EXPERTS,
    "axis_name": "ep",
    "transport": helpers.TRANSPORT,
    **helpers.on_nodes(),
}


# In another program XLA may round computations around the calls differently.
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(RANKS)


@functools.cache
def operands(mesh: Any, *, n: int = N, dtype: str = "float32") -> Any:
    """Tokens, ids, weights and experts of all ranks."""
    rng = np.random.default_rng(n)
    tokens = rng.standard_normal((RANKS * n, HIDDEN)).astype(jnp.dtype(dtype))
    ids = np.argsort(rng.random((RANKS * n, EXPERTS)))[:, :TOP_K].astype(np.int32)
    weights = rng.random((RANKS * n, TOP_K)).astype(np.float32)
    params = rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)) / HIDDEN**0.5
    arrays = (tokens, ids, weights, params.astype(jnp.dtype(dtype)))
    return tuple(helpers.put(mesh, [each]) for each in arrays)


def tanh_of(params: Any) -> Any:
    def fn(rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
        scale = 1 + expert_of_row[:, None].astype(rows.dtype)
        return jnp.tanh(jax.lax.ragged_dot(rows, params, group_sizes)) * scale

    return fn


def on_ranks(mesh: Any, body: Any, **changes: Any) -> Any:
    return jax.shard_map(
        body, mesh=mesh, **({"in_specs": P("ep"), "out_specs": P("ep")} | changes)
    )


def layer(own: Any, **changes: Any) -> Any:
    """apply_experts of all ranks on global arrays."""

    def body(x: Any, ids: Any, weights: Any, params: Any) -> Any:
        given = {"mesh": own} | HERE | changes
        return jax_ep.apply_experts(tanh_of(params), x, ids, weights, **given)

    return on_ranks(own, body)


@functools.cache
def by_hand(mesh: Any, *, dtype: str = "float32", n: int = N, **changes: Any) -> Any:
    """The same layer made of dispatch and combine."""
    config = helpers.make_config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=n,
        dtype=dtype,
        **changes,
    )
    ep = helpers.make_ep(mesh, config)

    def body(x: Any, ids: Any, weights: Any, params: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids, weights)
        rows = tanh_of(params)(
            jax_ep.dequantize(d), d.group_sizes, jax_ep.expert_of_row(d)
        )
        factors = weights if config.reduce == "source" else d.router_weights
        return jax_ep.combine(ep, rows, d.route, factors), d.num_dropped

    return jax.jit(on_ranks(mesh, body))


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "source": options.SOURCE,
    "capacity": {"capacity_factor": 1.0, "expert_alignment": 8},
    "cut": {"recv_capacity": 9},
    "mxfp8": {"dispatch_format": "mxfp8", "zero_tail": False},
    "nvfp4": {"dispatch_format": "nvfp4", "grad_format": "fp8_block128"},
    "combine_format": {"combine_format": "fp8_block128"},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_bits(mesh: Any, name: str) -> None:
    """Results and derivatives have the bits of dispatch, fn and combine."""
    changes = CONFIGS[name]
    whole = layer(mesh, return_dropped=True, **changes)
    parts = by_hand(mesh, **changes)
    x, ids, weights, params = operands(mesh)

    def run(f: Any) -> Any:
        def total(x: Any, weights: Any, params: Any) -> Any:
            y, dropped = f(x, ids, weights, params)
            return jnp.sum(jnp.sin(y)), (y, dropped)

        return jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(x, weights, params)

    found, wanted = run(whole), run(parts)
    jax.tree.map(helpers.assert_bits, found, wanted)
    assert bool(np.any(found[1][1])) == (name == "cut")


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (3, 1, 2), (0,), (2, 0)])
def test_leading_dimensions(mesh: Any, leading: tuple[int, ...]) -> None:
    n = int(np.prod(leading, dtype=int))
    x, ids, weights, params = operands(mesh, n=n or 1)

    def body(x: Any, ids: Any, weights: Any, params: Any) -> Any:
        given = (x, ids, weights)
        parts = [a[:n].reshape(*leading, a.shape[1]) for a in given]
        y = jax_ep.apply_experts(tanh_of(params), *parts, mesh=mesh, **HERE)
        assert y.shape == (*leading, HIDDEN)
        return jnp.zeros_like(x).at[:n].set(y.reshape(-1, HIDDEN))

    y = jax.jit(on_ranks(mesh, body))(x, ids, weights, params)
    if n:
        wanted, _ = by_hand(mesh, n=n)(x, ids, weights, params)
        assert_close(y, wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(mesh: Any, dtype: str) -> None:
    """Tokens of each dtype; weights of any dtype, with gradients in the same."""
    x, ids, weights, params = operands(mesh, dtype=dtype)
    narrow = weights.astype(dtype)
    run = layer(mesh)
    found, grad = jax.jit(
        jax.value_and_grad(lambda w: jnp.sum(run(x, ids, w, params), dtype=jnp.float32))
    )(narrow)
    wanted, _ = by_hand(mesh, dtype=dtype)(x, ids, narrow.astype("float32"), params)
    np.testing.assert_allclose(found, np.sum(wanted, dtype=np.float32), rtol=1e-5)
    assert grad.dtype == dtype
    assert np.any(np.asarray(grad, np.float32))


def test_shared_expert(mesh: Any) -> None:
    """Group 0 holds the rank's own tokens."""
    x, ids, weights, params = operands(mesh)

    def body(x: Any, ids: Any, weights: Any, params: Any) -> Any:
        def fn(rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
            assert group_sizes.shape == (EXPERTS // RANKS + 1,)
            own = tanh_of(params)(rows, group_sizes[1:] * 0, expert_of_row * 0)
            return jnp.where(expert_of_row[:, None] == 0, 3 * rows, 0 * own)

        return jax_ep.apply_experts(
            fn, x, ids, weights, mesh=mesh, fused_shared_expert=True, **HERE
        )

    y = jax.jit(on_ranks(mesh, body))(x, ids, weights, params)
    np.testing.assert_allclose(y, 3 * x, rtol=1e-6)


def test_batch_sizes_have_handles_of_their_own(mesh: Any) -> None:
    """Two sizes make two handles, and calling again makes none."""
    run = jax.jit(layer(mesh, timeout_s=77.0))
    for _ in range(2):
        for n in (2, 5):
            given = operands(mesh, n=n)
            wanted, _ = by_hand(mesh, n=n)(*given)
            assert_close(run(*given), wanted)
    shared = [e for e in handles() if e.config.timeout_s == 77.0]
    assert sorted(e.config.max_tokens_per_rank for e in shared) == [2, 5]


def handles() -> list[Any]:
    from jax_ep._core import handle

    return list(handle._handles.values())


def test_mesh_of_the_context(mesh: Any) -> None:
    given = operands(mesh)
    wanted, _ = by_hand(mesh)(*given)
    with jax.set_mesh(mesh):
        assert_close(jax.jit(layer(mesh, mesh=None))(*given), wanted)
    explicit = helpers.make_mesh(RANKS, kind=AxisType.Explicit)
    with jax.set_mesh(explicit):
        given = [jax.device_put(a, jax.NamedSharding(explicit, P("ep"))) for a in given]
        assert_close(jax.jit(layer(explicit, mesh=None))(*given), wanted)


def test_without_check_vma_and_without_jit(mesh: Any) -> None:
    given = operands(mesh)

    def body(x: Any, ids: Any, weights: Any, params: Any) -> Any:
        return jax_ep.apply_experts(tanh_of(params), x, ids, weights, mesh=mesh, **HERE)

    wanted, _ = by_hand(mesh)(*given)
    assert_close(jax.jit(on_ranks(mesh, body, check_vma=False))(*given), wanted)
    y = on_ranks(mesh, body)(*given)
    assert_close(y, wanted)


def test_vmap(mesh: Any) -> None:
    x, ids, weights, params = operands(mesh, n=2 * N)
    batch = [a.reshape(RANKS, 2, N, -1).swapaxes(0, 1) for a in (x, ids, weights)]
    batch = [a.reshape(2, RANKS * N, -1) for a in batch]

    def body(x: Any, ids: Any, weights: Any, params: Any) -> Any:
        def fn(rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
            scale = 1 + expert_of_row[:, None].astype(rows.dtype)
            # JAX cannot vmap ragged_dot with weights that the batch shares.
            return jnp.tanh(moe.gathered_dot(rows, params, group_sizes)) * scale

        def one(*each: Any) -> Any:
            return jax_ep.apply_experts(fn, *each, mesh=mesh, **HERE)

        return jax.vmap(one)(x, ids, weights)

    spec = P(None, "ep")
    run = on_ranks(mesh, body, in_specs=(spec, spec, spec, P("ep")), out_specs=spec)
    y = jax.jit(run)(*batch, params)
    one = by_hand(mesh)
    for entry in range(2):
        wanted, _ = one(*(a[entry] for a in batch), params)
        assert_close(y[entry], wanted)


@pytest.mark.parametrize("policy", ["nothing", "save_route"])
def test_remat(mesh: Any, policy: str) -> None:
    """With names saved, a rematerialised layer exchanges nothing twice."""
    x, ids, weights, params = operands(mesh)
    run = layer(mesh)

    def total(keep: Any, x: Any) -> Any:
        kept = jax.checkpoint(lambda x: run(x, ids, weights, params), policy=keep)
        y, _ = jax.lax.scan(lambda x, _: (kept(x), None), x, length=2)
        return jnp.sum(jnp.sin(y))

    keep = jax_ep.save_route if policy == "save_route" else None
    # Both exchanges and their transposes; if recomputed, the dispatch once more.
    made = remat.exchanges(jax.grad(functools.partial(total, keep)), x)
    assert made == (4 if keep else 5)


def test_gradient_accumulation(mesh: Any) -> None:
    """Gradients of a scan over micro-batches add up to the gradient of the sum."""
    x, ids, weights, params = operands(mesh, n=2 * N)
    small = layer(mesh)

    def split(a: Any) -> Any:
        parts = a.reshape(RANKS, 2, N, -1).swapaxes(0, 1)
        return parts.reshape(2, RANKS * N, -1)

    def grad(f: Any, *batch: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(jnp.sin(f(*batch, p))))(params)

    @jax.jit
    def accumulated(x: Any, ids: Any, weights: Any) -> Any:
        def add(total: Any, batch: Any) -> Any:
            return total + grad(small, *batch), None

        batches = tuple(map(split, (x, ids, weights)))
        return jax.lax.scan(add, jnp.zeros_like(params), batches)[0]

    whole = jax.jit(functools.partial(grad, layer(mesh)))(x, ids, weights)
    assert_close(accumulated(x, ids, weights), whole)


def test_ahead_of_time(mesh: Any) -> None:
    given = operands(mesh)
    run = layer(mesh)
    shapes = jax.eval_shape(run, *given)
    assert (shapes.shape, shapes.dtype) == (given[0].shape, given[0].dtype)
    wanted = jax.jit(run)(*given)
    assert_close(jax.jit(run).lower(*given).compile()(*given), wanted)


def test_exported(mesh: Any) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    from jax import export

    given = operands(mesh)
    run = jax.jit(layer(mesh))
    checks = [
        export.DisabledSafetyCheck.custom_call(name)
        for name in jax_ep.custom_call_targets
    ]
    blob = export.export(run, disabled_checks=checks)(*given).serialize(vjp_order=1)
    loaded = export.deserialize(blob)
    assert_close(jax.jit(loaded.call)(*given), run(*given))

    def grad(f: Any) -> Any:
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, *given[1:])))))(given[0])

    assert_close(grad(loaded.call), grad(run))


# Makes the handle of a compiled program, then loads the program.
LOADER = """
import pathlib, pickle, sys
import jax_ep, jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
folder = pathlib.Path(sys.argv[1])
config, program = pickle.loads((folder / "program").read_bytes())
devices = jax.devices()[:4]
mesh = Mesh(np.array(devices), ("ep",), axis_types=(AxisType.Auto,))
jax_ep.shared_handle(mesh, "ep", config, "collective")
step = serialize_executable.deserialize_and_load(*program, execution_devices=devices)
arguments = np.load(folder / "arguments.npz").values()
placed = [jax.device_put(a, NamedSharding(mesh, P("ep"))) for a in arguments]
np.save(folder / "result.npy", step(*placed))
"""


def test_an_executable_runs_in_another_process(mesh: Any, tmp_path: Any) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("the other process would need the GPUs of this one")
    given = operands(mesh)
    compiled = jax.jit(layer(mesh)).lower(*given).compile()
    config = helpers.make_config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=N,
        dtype="float32",
    )
    program = serialize_executable.serialize(compiled)
    (tmp_path / "program").write_bytes(pickle.dumps((config, program)))
    np.savez(tmp_path / "arguments.npz", *map(np.asarray, given))
    package = pathlib.Path(jax_ep.__file__).parent.parent
    done = run_to_end(
        [sys.executable, "-c", LOADER, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    helpers.assert_bits(np.load(tmp_path / "result.npy"), compiled(*given))


@pytest.mark.parametrize("check_vma", [True, False])
def test_bad_ids_are_counted(check_vma: bool) -> None:
    """They count as -1: their part of a sum is missing, and others keep theirs."""
    mesh = helpers.make_mesh({"tp": 2, "ep": 2})
    asked = {"return_dropped": True, "return_invalid": True, "recv_capacity": 20}

    def body(x: Any, ids: Any, w: Any) -> Any:
        def fn(rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
            return jnp.where(jax.lax.axis_index("tp") == 0, rows, 0)

        given = HERE | asked | {"mesh": mesh, "scatter_axis": "tp"}
        y, dropped, invalid = jax_ep.apply_experts(fn, x, ids, w, **given)
        alone = given | {"return_dropped": False}
        assert len(jax_ep.apply_experts(fn, x, ids, w, **alone)) == 2
        return y, dropped, invalid

    outs = (P("ep", "tp"), P("ep"), P("ep"))
    run = on_ranks(mesh, body, out_specs=outs, check_vma=check_vma)
    x = np.random.default_rng(8).standard_normal((2 * N, HIDDEN), np.float32)
    ids = np.tile(np.array([0, 5], np.int32), (2 * N, 1))
    ids[0], ids[1, 1], ids[N] = (EXPERTS, -2), helpers.INT_MAX, (-1, 0)
    weights = np.ones(ids.shape, np.float32)
    y, dropped, invalid = jax.jit(run)(x, ids, weights)
    valid = ((ids >= 0) & (ids < EXPERTS)).sum(1, keepdims=True)
    np.testing.assert_allclose(y, x * valid, rtol=1e-6)
    np.testing.assert_array_equal(invalid, [3, 0])
    np.testing.assert_array_equal(dropped, [0, 0])
    # The shared handle of the same sizes tells the first of them.
    config = helpers.make_config(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        max_tokens_per_rank=N,
        dtype="float32",
        recv_capacity=20,
    )
    ep = jax_ep.shared_handle(mesh, "ep", config, HERE["transport"])
    with pytest.raises((ValueError, RuntimeError), match="token 0"):
        ep.check()


@pytest.mark.parametrize("check_vma", [True, False])
def test_scattered_sums_are_rounded_once(check_vma: bool) -> None:
    """bfloat16 can hold the sum, 1 + 2^-7, but not the partial sum 1 + 2^-8."""
    mesh = helpers.make_mesh({"tp": 2, "ep": 2})
    changes = {"scatter_axis": "tp", "return_dropped": True}

    def body(x: Any, ids: Any, w: Any) -> Any:
        def fn(rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
            first = jax.lax.axis_index("tp") == 0
            part = jnp.where(first, 1 + 2.0**-8, 2.0**-8)
            return rows.astype(jnp.float32) * part

        return jax_ep.apply_experts(fn, x, ids, w, mesh=mesh, **HERE, **changes)

    run = on_ranks(
        mesh,
        body,
        out_specs=(P("ep", "tp"), P("ep")),
        check_vma=check_vma,
    )
    x = jnp.ones((2 * N, HIDDEN), jnp.bfloat16)
    ids = jnp.zeros((2 * N, 1), jnp.int32)
    w = jnp.ones((2 * N, 1))
    y, dropped = jax.jit(run)(x, ids, w)
    helpers.assert_bits(y, np.full(x.shape, 1 + 2.0**-7, jnp.bfloat16))
    assert dropped.shape == (2,)
    back = jax.jit(jax.grad(lambda x: jnp.sum(run(x, ids, w)[0], dtype="f4")))
    # Columns of cotangents are gathered in their own dtype, not widened.
    text = back.lower(x).as_text()
    gathers = [line for line in text.splitlines() if "all_gather" in line]
    assert len(gathers) == 1
    assert "xf32>" not in gathers[0]
    grad = back(x)
    assert grad.dtype == x.dtype
    np.testing.assert_allclose(grad.astype("f4"), 1 + 2.0**-7, rtol=2.0**-7)


@dataclasses.dataclass
class Wrong:
    """A call with one mistake, and the words in its error."""

    words: tuple[str, ...]
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    fn: Any = None
    shapes: dict[str, Any] = dataclasses.field(default_factory=dict)


WRONG = {
    "fn": Wrong(("fn", "function"), fn=3),
    "fn_two": Wrong(
        ("(rows, group_sizes, expert_of_row), got <lambda>(rows, sizes); wrap it",),
        fn=lambda rows, sizes: rows,
    ),
    "fn_four": Wrong(
        ("got <lambda>(params, rows, sizes, expert); give its other", "or bind them"),
        fn=lambda params, rows, sizes, expert: rows,
    ),
    "fn_keyword": Wrong(
        ("got <lambda>(rows, sizes, expert, *, act); give its other",),
        fn=lambda rows, sizes, expert, *, act: rows,
    ),
    "fn_auto": Wrong(("got auto(rows, gate_up, down,",), fn=jax_ep.experts.auto),
    "fn_class": Wrong(("fn", "the class Padded"), fn=jax_ep.experts.Padded),
    "fn_shape": Wrong(("fn must return", "(1, 128)"), fn=lambda r, g, e: r[:1]),
    "fn_none": Wrong(("fn must return", "NoneType"), fn=lambda r, g, e: None),
    "fn_dtype": Wrong(
        ("fn must return float32", "bfloat16", "astype"),
        fn=lambda r, g, e: r.astype("bfloat16"),
    ),
    "tokens_dtype": Wrong(("tokens", "int32"), shapes={"tokens": ((N, 128), "int32")}),
    "tokens_scalar": Wrong(("tokens", "()"), shapes={"tokens": ((), "float32")}),
    "ids_dtype": Wrong(("topk_ids", "int32"), shapes={"ids": ((N, 2), "float32")}),
    "ids_rows": Wrong(("topk_ids", "(5, 2)"), shapes={"ids": ((5, 2), "int32")}),
    "ids_none": Wrong(("topk_ids", "(6, 0)"), shapes={"ids": ((N, 0), "int32")}),
    "weights": Wrong(("router_weights", "(6, 3)"), shapes={"w": ((N, 3), "float32")}),
    "weights_int": Wrong(("router_weights", "int32"), shapes={"w": ((N, 2), "int32")}),
    "axis": Wrong(("axis_name", "3"), {"axis_name": 3}),
    "axis_unknown": Wrong(("axes ('dp',)", "shard_map"), {"axis_name": "dp"}),
    "axis_empty": Wrong(("axis_name", "()"), {"axis_name": ()}),
    "no_mesh": Wrong(("mesh", "None", "pass mesh="), {"mesh": None}),
    "not_a_mesh": Wrong(("mesh", "'ep'"), {"mesh": "ep"}),
    "scatter_own_axis": Wrong(("scatter_axis", "'ep'"), {"scatter_axis": "ep"}),
    "scatter_unknown": Wrong(("scatter_axis", "'tp'"), {"scatter_axis": "tp"}),
    "sizes": Wrong(("top_k", "topk_ids determines"), {"top_k": 2}),
    "dtype": Wrong(("dtype", "determines"), {"dtype": "float32"}),
    "hidden": Wrong(("hidden_size", "determines"), {"hidden_size": 128}),
    "most": Wrong(("max_tokens_per_rank",), {"max_tokens_per_rank": 8}),
    "misspelt": Wrong(
        ("EPConfig", "capacity_fraction=1.0; did you mean capacity_factor?"),
        {"capacity_fraction": 1.0},
    ),
    "unlike": Wrong(("of ['capacity_factor',", "correct the name"), {"zz": 1}),
    "transport": Wrong(("transport", "'pigeon'"), {"transport": "pigeon"}),
    "value": Wrong(("capacity_factor", "-1"), {"capacity_factor": -1.0}),
    "format": Wrong(("dispatch_format", "fp7"), {"dispatch_format": "fp7"}),
    "skip_a2a": Wrong(("skip_a2a", "own"), {"skip_a2a": True}),
    "none": Wrong(("reduce", "'none'"), {"reduce": "none"}),
    "overlap": Wrong(("overlap", "pending"), {"overlap": "copy"}),
    "pending": Wrong(("pending_calls", "pending"), {"pending_calls": 1}),
    "tiled": Wrong(("scale_layout", "dequantised"), {"scale_layout": "tiled_128x4"}),
    "input_scale": Wrong(("input_scale",), {"input_scale": jnp.ones(3)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(mesh: Any, name: str) -> None:
    wrong = WRONG[name]
    shapes = {
        "tokens": ((N, HIDDEN), "float32"),
        "ids": ((N, TOP_K), "int32"),
        "w": ((N, TOP_K), "float32"),
    } | wrong.shapes

    def body() -> Any:
        arrays = [jnp.zeros(*each) for each in shapes.values()]
        given = {"mesh": mesh} | HERE | wrong.changes
        fn = wrong.fn or (lambda rows, group_sizes, expert_of_row: rows)
        return jax_ep.apply_experts(fn, *arrays, **given)

    with raises() as caught:
        jax.eval_shape(on_ranks(mesh, body, in_specs=()))
    check_form(caught, "apply_experts", *wrong.words)


@pytest.mark.parametrize("name", ["apply_experts", "sharded.apply_experts"])
def test_options_that_must_be_the_default_may_be_given(name: str) -> None:
    """So that one dictionary of options serves EPConfig and apply_experts."""
    options = {"skip_a2a": False, "allreduce_world_size": None, "overlap": "sm"}
    options |= {"pending_calls": 0, "scale_layout": "rows", "reduce": "rank"}
    sizes = {"max_tokens_per_rank": 4, "top_k": 2, "hidden_size": 8, "num_experts": 4}
    config = apply.config_of(name, sizes, options | {"zero_tail": True})
    assert config == EPConfig(**sizes, pending_calls=0, zero_tail=True)


def test_refused_outside_and_for_another_mesh(mesh: Any) -> None:
    x, ids, weights, params = operands(mesh)
    with raises() as caught:
        jax_ep.apply_experts(tanh_of(params), x, ids, weights, mesh=mesh, **HERE)
    check_form(caught, "apply_experts", "sharded.apply_experts")
    other = helpers.make_mesh({"dp": 1, "ep": RANKS})
    with raises() as caught:
        jax.eval_shape(layer(mesh, mesh=other), x, ids, weights, params)
    check_form(caught, "apply_experts", "enclosing", "'dp': 1")


def test_columns_that_cannot_be_scattered() -> None:
    mesh = helpers.make_mesh({"tp": 2, "ep": 2})
    changes = {"scatter_axis": "tp", "combine_format": "fp8_block128"}

    def body() -> Any:
        x, w = jnp.zeros((N, HIDDEN)), jnp.zeros((N, TOP_K))
        ids = jnp.zeros((N, TOP_K), jnp.int32)
        return jax_ep.apply_experts(
            lambda rows, *_: rows, x, ids, w, mesh=mesh, **HERE, **changes
        )

    with raises() as caught:
        jax.eval_shape(on_ranks(mesh, body, in_specs=()))
    check_form(caught, "apply_experts", "hidden_size", "multiple of 256", "psum")
