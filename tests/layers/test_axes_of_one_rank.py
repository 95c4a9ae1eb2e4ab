"""Layers over meshes with axes of one rank, which JAX may leave out of types.

MaxText sets `jax_remove_size_one_mesh_axis_from_type`; JAX's default is False.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router, route
from support import flax_layers, helpers, moe_dense, moe_ffn
from support.flax_layers import nnx

pytestmark = pytest.mark.usefixtures("quick_compiles")
AXES = ("data", "fsdp", "expert", "tensor")
TOKENS = P(("data", "fsdp", "expert"))
SPLIT = {
    "gate_up": P("expert", "fsdp", None, "tensor"),
    "down": P("expert", "tensor", "fsdp"),
}
FLAG = "jax_remove_size_one_mesh_axis_from_type"
# Matches how many ranks a gather or scatter of a jaxpr is over.
RANKS = re.compile(r"\b(?:all_gather\w*|reduce_scatter)\[.*?axis_size=(\d+)", re.DOTALL)


@pytest.fixture(params=[False, True], ids=["in types", "not in types"])
def flag(request: pytest.FixtureRequest) -> Iterator[None]:
    before = getattr(jax.config, FLAG)
    jax.config.update(FLAG, request.param)
    yield
    jax.config.update(FLAG, before)


def parameters() -> Any:
    return moe_dense.params(shared=False)


def tokens() -> Any:
    return flax_layers.inputs().reshape(-1, moe_dense.HIDDEN)


def matmuls(own: Any, rows: Any, sizes: Any, expert_of_row: Any) -> Any:
    dot = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    gate, up = (dot(rows, own["gate_up"][:, :, i]) for i in (0, 1))
    return dot(jax.nn.silu(gate) * up, own["down"])


def chosen(params: Any, x: Any) -> Any:
    found = route(x @ params["router"], moe_dense.TOP_K)
    return found.ids, found.weights


def options(mesh: Any) -> dict[str, Any]:
    given = {"num_experts": moe_dense.EXPERTS, "mesh": mesh, "axis_name": "expert"}
    given |= {"scatter_axis": "tensor", "transport": helpers.TRANSPORT}
    return given | helpers.on_nodes()


def of_nnx(mesh: Any, params: Any, x: Any) -> Any:
    told = {"axis_name": "expert", "fsdp_axis_name": "fsdp", "tp_axis_name": "tensor"}
    told |= {"shared_intermediate_size": None, "router": Router()}
    layer = jax_ep.flax.MoE(**flax_layers.fields(mesh, **told), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    for name, value in params.items():
        state[name].set_value(value)
    return nnx.merge(graph, state)(x)


def of_moe_ffn(mesh: Any, params: Any, x: Any) -> Any:
    ranks = mesh.size // mesh.shape["tensor"]
    config = moe_ffn.config(max_tokens_per_rank=len(x) // ranks)
    ep = jax_ep.shared_handle(mesh, "expert", config, helpers.TRANSPORT)
    specs = {"gate_up": P("expert", None, None, "tensor"), "router": P()}
    run = jax.shard_map(
        lambda params, x: jax_ep.moe_ffn(ep, x, params, tp_axis="tensor")[0],
        mesh=mesh,
        in_specs=(specs | {"down": P("expert", "tensor")}, TOKENS),
        out_specs=TOKENS,
    )
    return run(params, x)


def of_apply_experts(mesh: Any, params: Any, x: Any) -> Any:
    specs = {"gate_up": P("expert", None, None, "tensor")}
    specs |= {"down": P("expert", "tensor")}

    def body(own: Any, *given: Any) -> Any:
        fn = functools.partial(matmuls, own)
        return jax_ep.apply_experts(fn, *given, **options(mesh))

    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, TOKENS, TOKENS, TOKENS),
        out_specs=P(*TOKENS, "tensor"),
    )
    return run({name: params[name] for name in specs}, x, *chosen(params, x))


def of_sharded(mesh: Any, params: Any, x: Any) -> Any:
    own = {name: params[name] for name in SPLIT}
    given = options(mesh) | {"param_specs": SPLIT, "fsdp_axis": "fsdp"}
    return jax_ep.sharded.apply_experts(matmuls, own, x, *chosen(params, x), **given)


LAYERS: dict[str, Callable[..., Any]] = {
    "nnx": of_nnx,
    "moe_ffn": of_moe_ffn,
    "apply_experts": of_apply_experts,
    "sharded.apply_experts": of_sharded,
}
BY_LAYER = pytest.mark.parametrize("name", LAYERS)


def gradient(name: str, sizes: dict[str, int]) -> Any:
    mesh = helpers.make_mesh({axis: sizes.get(axis, 1) for axis in AXES})

    def loss(params: Any, x: Any) -> Any:
        return flax_layers.wave(LAYERS[name](mesh, params, x))

    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"fsdp": 2, "tensor": 2},
        *(
            pytest.param(sizes, marks=pytest.mark.thorough)
            for sizes in (
                {"fsdp": 2, "expert": 2},
                {"tensor": 2, "expert": 2},
                {"data": 2, "fsdp": 2, "expert": 2},
                {"fsdp": 2, "tensor": 2, "expert": 2},
            )
        ),
    ],
    ids=lambda sizes: " x ".join(f"{k} {v}" for k, v in sizes.items()) or "one rank",
)
@BY_LAYER
def test_no_gather_or_scatter_is_over_one_rank(
    name: str, sizes: dict[str, int], flag: None
) -> None:
    traced = gradient(name, sizes).trace(parameters(), tokens())
    found = {int(ranks) for ranks in RANKS.findall(str(traced.jaxpr))}
    assert 1 not in found
    if "tensor" in sizes:  # which all of them scatter over
        assert 2 in found


@functools.cache
def dense() -> Any:
    params, x = parameters(), tokens()
    scores = moe_dense.scores(params, x, Router())
    wanted = moe_dense.chosen_experts(scores, Router(), None, moe_dense.TOP_K)

    def loss(params: Any, x: Any) -> Any:
        return flax_layers.wave(moe_dense.layer(params, x, wanted, Router())[0])

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, x)


@pytest.mark.few(2)
@BY_LAYER
def test_values_and_gradients(name: str, flag: None) -> None:
    found = gradient(name, {"expert": 2})(parameters(), tokens())
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3),
        found,
        dense(),
    )
