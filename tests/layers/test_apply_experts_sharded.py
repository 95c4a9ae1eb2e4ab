"""sharded.apply_experts: a layer shaped like MaxText's, without a shard_map."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, maxtext
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")
MODES: dict[str, dict[str, Any]] = {
    "data": {},
    "fsdp": {"fsdp_axis": "fsdp"},
    "two_fsdp": {"fsdp_axis": ("data", "fsdp")},
    "tensor": {"fsdp_axis": "fsdp", "scatter_axis": "tensor"},
    "summed": {"fsdp_axis": "fsdp"},
    "context": {"spec": P(("data", "fsdp", "expert"), "context")},
}
SIZES: dict[str, dict[str, int]] = {
    "data": {"data": 2, "expert": 4},
    "fsdp": {"fsdp": 2, "expert": 4},
    "two_fsdp": {"data": 2, "fsdp": 2, "expert": 2},
    "tensor": {"fsdp": 2, "tensor": 2, "expert": 2},
    "summed": {"fsdp": 2, "tensor": 2, "expert": 2},
    "context": {"context": 2, "expert": 4},
}
SPLIT = {"tensor", "summed"}  # modes that split matrices over "tensor"
# Only MaxText's axes that are larger than 1, and those that a mode names.
AXES = ("data", "fsdp", "context", "tensor", "expert")


def make_mesh(mode: str, kind: AxisType = AxisType.Auto) -> Any:
    return helpers.make_mesh({a: SIZES[mode].get(a, 1) for a in AXES}, kind=kind)


def swiglu(params: Any, rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
    dot = functools.partial(jax.lax.ragged_dot, group_sizes=group_sizes)
    bias = {n: p[expert_of_row] for n, p in params.items() if n.endswith("bias")}
    gate = dot(rows, params["wi_0"]) + bias["wi_0_bias"]
    up = dot(rows, params["wi_1"]) + bias["wi_1_bias"]
    return dot(jax.nn.silu(gate) * up, params["wo"])


def swiglu_summed(params: Any, rows: Any, *others: Any) -> Any:
    return jax.lax.psum(swiglu(params, rows, *others), "tensor")


def layer(own: Any, mode: str, **changes: Any) -> Any:
    """A function of global inputs and parameters: y, and the drops if requested."""
    split = mode in SPLIT
    fn = swiglu_summed if mode == "summed" else swiglu

    def run(inputs: Any, params: Any) -> Any:
        experts = {n: p for n, p in params.items() if n != "gate"}
        ids, weights = maxtext.route(inputs, params["gate"])
        given = MODES[mode] | {"transport": helpers.TRANSPORT} | helpers.on_nodes()
        if split:
            given["param_specs"] = {name: maxtext.SPECS[name] for name in experts}
        given |= {"num_experts": 8, "axis_name": "expert", "mesh": own} | changes
        return jax_ep.sharded.apply_experts(fn, experts, inputs, ids, weights, **given)

    return run


def loss(y: Any) -> Any:
    at = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)
    return jnp.mean(jnp.sin(y + at))


def host() -> Any:
    params = maxtext.make_params(biases=True)
    del params["wo_bias"]
    return maxtext.make_inputs(), params


@functools.cache
def wanted() -> Any:
    """y and the gradients of the dense formula."""

    def total(*args: Any) -> Any:
        y = maxtext.dense(*args)
        return loss(y), y

    grads, y = jax.jit(jax.grad(total, (0, 1), has_aux=True))(*host())
    return y, grads


close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("mode", MODES)
def test_layer(mode: str) -> None:
    mesh = make_mesh(mode)
    run = layer(mesh, mode)

    def total(*args: Any) -> Any:
        y = run(*args)
        return loss(y), y

    grads, y = jax.jit(jax.grad(total, (0, 1), has_aux=True))(*host())
    dense, dense_grads = wanted()
    close(y, dense)
    jax.tree.map(close, grads, dense_grads)


@pytest.mark.parametrize("mode", ["fsdp", "tensor"])
def test_stages(mode: str) -> None:
    """A vmap over the stages of a pipeline; each is on its part of the mesh."""
    sizes = {"stage": 2, "expert": 2, "tensor" if mode == "tensor" else "fsdp": 2}
    run = jax.vmap(layer(maxtext.make_mesh(**sizes), mode), spmd_axis_name="stage")
    inputs, params = host()
    both = jax.tree.map(lambda a: np.stack([a, a]), params)

    def total(inputs: Any, params: Any) -> Any:
        y = run(inputs, params)
        return loss(y[0]) + 2 * loss(y[1]), y

    grads, y = jax.jit(jax.grad(total, (0, 1), has_aux=True))(
        np.stack([inputs, inputs]), both
    )
    dense, dense_grads = wanted()
    for stage in range(2):
        close(y[stage], dense)
        own = jax.tree.map(lambda a, i=stage: a[i] / (1 + i), grads)
        jax.tree.map(close, own, dense_grads)


@pytest.mark.parametrize("mode", ["fsdp", "tensor"])
def test_explicit_axes_and_eager_calls(mode: str) -> None:
    mesh = make_mesh(mode, AxisType.Explicit)
    run = layer(mesh, mode, mesh=None, return_dropped=True)
    with jax.set_mesh(mesh):
        y, dropped = run(*host())
    close(y, wanted()[0])
    assert y.sharding.spec[-1] == ("tensor" if mode == "tensor" else None)
    assert dropped.shape == (4 if mode == "tensor" else 8,)


def test_drops() -> None:
    mesh = make_mesh("data")
    inputs, params = host()
    ids, _ = maxtext.route(inputs, params["gate"])
    config = helpers.make_config(num_experts=8, top_k=2, recv_capacity=12)
    kept = maxtext.kept_rows(maxtext.make_mesh(data=2, expert=4), ids, config)
    run = layer(mesh, "data", recv_capacity=12, return_dropped=True)
    y, dropped = jax.jit(run)(inputs, params)
    close(y, maxtext.dense(inputs, params, kept))
    assert dropped.shape == (8,)
    assert np.sum(dropped) == np.sum(kept == 0) > 0


def test_bad_ids_are_counted_by_rank() -> None:
    mesh = make_mesh("fsdp")
    inputs, params = host()
    ids, weights = map(np.array, maxtext.route(inputs, params["gate"]))
    ids[0, 0, 0], ids[-1] = 8, -7
    own = {n: p for n, p in params.items() if n != "gate"}
    y, dropped, invalid = jax_ep.sharded.apply_experts(
        swiglu,
        own,
        inputs,
        ids,
        weights,
        num_experts=8,
        axis_name="expert",
        mesh=mesh,
        fsdp_axis="fsdp",
        transport=helpers.TRANSPORT,
        return_dropped=True,
        return_invalid=True,
        **helpers.on_nodes(),
    )
    bad = (ids < -1) | (ids >= 8)
    np.testing.assert_array_equal(invalid, bad.reshape(8, -1).sum(1))
    assert not np.any(dropped)
    np.testing.assert_array_equal(np.any(y, axis=-1), (~bad).any(-1))


def test_errors_in_fn_name_what_it_called() -> None:
    """Not apply_experts, which was called rightly."""
    mesh = make_mesh("data")
    inputs, params = host()
    ids, weights = maxtext.route(inputs, params["gate"])

    def fn(own: Any, rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
        return jax_ep.experts.fp8(rows, own["wi_0"], own["wo"], group_sizes)

    with raises() as caught:
        jax_ep.sharded.apply_experts(
            fn,
            {name: params[name] for name in ("wi_0", "wo")},
            inputs,
            ids,
            weights,
            num_experts=8,
            axis_name="expert",
            mesh=mesh,
            transport=helpers.TRANSPORT,
        )
    check_form(caught, "experts.fp8", "jax_ep.experts.auto")


def test_eager_calls_compile_once() -> None:
    mesh = make_mesh("data")
    run = layer(mesh, "data")
    run(*host())
    traced: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_dot", lambda *a, **k: traced.append(a))
        run(*host())
    assert not traced


def test_closures_over_tracers_are_not_kept() -> None:
    """Neither closures over tracers nor functions made per call stay cached."""
    mesh = make_mesh("data")
    inputs, params = host()
    ids, weights = maxtext.route(inputs, params["gate"])

    @jax.jit
    def scaled(factor: Any, inputs: Any) -> Any:
        return jax_ep.sharded.apply_experts(
            lambda own, rows, *_: rows * factor,
            {},
            inputs,
            ids,
            weights,
            num_experts=8,
            axis_name="expert",
            mesh=mesh,
            transport=helpers.TRANSPORT,
        )

    with jax.checking_leaks():
        y = scaled(np.float32(3), inputs)
    close(y, 3 * inputs, atol=1e-5)


def test_shared_expert_has_a_spec_of_its_own() -> None:
    """The shared expert's parameters are not per expert; specs may be a prefix."""
    mesh = make_mesh("data")
    inputs, params = host()
    ids, weights = maxtext.route(inputs, params["gate"])

    def fn(given: Any, rows: Any, group_sizes: Any, expert_of_row: Any) -> Any:
        assert given["routed"]["wo"].shape[0] == 2
        assert given["scale"].shape == (maxtext.EMB,)
        own = given["routed"]["wo"][:, 0][jnp.maximum(expert_of_row - 1, 0)]
        first = (expert_of_row == 0)[:, None]
        return jnp.where(first, rows * given["scale"], own)

    y = jax_ep.sharded.apply_experts(
        fn,
        {"routed": {"wo": params["wo"]}, "scale": np.full(maxtext.EMB, 2, "f4")},
        inputs,
        ids,
        weights,
        num_experts=8,
        axis_name="expert",
        mesh=mesh,
        param_specs={"routed": P("expert"), "scale": P()},
        fused_shared_expert=True,
        transport=helpers.TRANSPORT,
    )
    rows = np.asarray(params["wo"])[:, 0][np.asarray(ids)]
    close(y, 2 * inputs + np.einsum("bsk,bskh->bsh", weights, rows), atol=1e-5)


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mesh": ({"mesh": None}, ("mesh", "None")),
    "transport": ({"transport": "pigeon"}, ("transport", "(raised by jax_ep.init)")),
    "axis": ({"axis_name": "ep"}, ("axis_name", "'ep'")),
    "fsdp_of_the_group": ({"fsdp_axis": "expert"}, ("fsdp_axis", "'expert'")),
    "fsdp_twice": ({"fsdp_axis": ("fsdp", "fsdp")}, ("fsdp_axis",)),
    "scatter": ({"scatter_axis": "expert"}, ("scatter_axis", "'expert'")),
    "spec": ({"spec": P("data")}, ("spec", "'expert'")),
    "spec_type": ({"spec": "expert"}, ("spec", "'expert'")),
    "spec_long": ({"spec": P("expert", None, "data")}, ("spec", "2 leading")),
    "spec_uneven": ({"spec": P("data", ("expert", "fsdp"))}, ("divide", "4 for 8")),
    "specs_structure": ({"param_specs": {"wi": P()}}, ("param_specs", "structure")),
    "specs_axis": ({"param_specs": P("ep")}, ("params['wi_0']", "P('ep'")),
    "specs_long": (
        {"param_specs": P("expert", None, "data")},
        ("params['wi_0_bias']", "at most 2"),
    ),
    "specs_order": (
        {"param_specs": P(("fsdp", "expert")), "fsdp_axis": "fsdp"},
        ("fsdp_axis", "last"),
    ),
    "experts": ({"num_experts": 16}, ("params['wi_0']", "num_experts = 16")),
    "sizes": ({"max_tokens_per_rank": 3}, ("max_tokens_per_rank", "determines")),
    "per_rank": ({"input_scale": np.ones(3, "f4")}, ("input_scale", "one rank")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    changes, words = WRONG[name]
    mesh = helpers.make_mesh({"data": 1, "fsdp": 2, "expert": 4})
    with raises() as caught:
        jax.eval_shape(layer(mesh, "data", **changes), *host())
    check_form(caught, "sharded.apply_experts", *words)


def test_rows_that_differ_along_an_axis() -> None:
    """Partial sums that are never added are refused."""
    mesh = make_mesh("tensor")
    with raises() as caught:
        jax.eval_shape(layer(mesh, "tensor", scatter_axis=None), *host())
    check_form(caught, "sharded.apply_experts", "['tensor']", "scatter_axis='tensor'")


def test_refused_inside_shard_map() -> None:
    mesh = helpers.make_mesh({"expert": helpers.some_ranks(4)})
    run = layer(mesh, "data")
    inside = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
    with raises() as caught:
        jax.eval_shape(inside, *host())
    check_form(caught, "sharded.apply_experts", "jax_ep.apply_experts there")
