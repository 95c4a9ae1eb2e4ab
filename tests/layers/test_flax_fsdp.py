"""Weights of jax_ep.flax's layers that are sharded over a data axis, too."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers
from support.errors import check_form, raises

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import fields, inputs, parts, wave

pytestmark = pytest.mark.usefixtures("quick_compiles")

AXES = {"fsdp": 2, "ep": 2, "tp": 2}
WEIGHTS = ("router", "gate_up", "down", "shared_gate_up", "shared_down")


def loss(layer, x):
    y, aux = layer(x, return_aux=True)
    return wave(y.astype(jnp.float32)) + 3 * aux.balance_loss + aux.z_loss


def graph(layer):
    """A jitted function of (state, x), which lowers without NNX, and the state."""
    definition, state, rest = nnx.split(layer, nnx.Param, ...)

    def grad(state, x):
        return jax.grad(lambda s: loss(nnx.merge(definition, s, rest), x))(state)

    return jax.jit(grad), state


def test_one_gather_and_one_reduce_scatter_per_weight():
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 4})
    told = {"fsdp_axis_name": "fsdp", "dtype": "bfloat16"}
    layer = jax_ep.flax.MoE(**fields(mesh, **told), rngs=nnx.Rngs(0))
    grad, state = graph(layer)
    lowered = grad.lower(state, inputs())
    text = lowered.as_text()
    count = len(WEIGHTS)
    # Experts are gathered in bfloat16, and float32 comes back.
    kinds = re.findall(r'"stablehlo.all_gather".*-> tensor<.*x(\w+)>', text)
    assert sorted(kinds) == ["bf16"] * (count - 1) + ["f32"]
    assert text.count('"stablehlo.reduce_scatter"') == count
    compiled = lowered.compile().as_text()
    if helpers.TRANSPORT == "collective":
        assert text.count('"stablehlo.all_to_all"') == 4
        assert len(re.findall(r" all-to-all(?:-start)?\(", compiled)) == 4
    for name in ("all-gather", "reduce-scatter"):
        found = re.findall(rf" {name}(?:-start)?\(", compiled)
        assert len(found) == count, name
    smallest = min(np.prod(parts(getattr(layer, name)[...])) for name in WEIGHTS)
    reduced = re.findall(r"= (.*) all-reduce(?:-start)?\(", compiled)
    assert reduced  # by the losses
    for shape in re.findall(r"\[([\d,]*)\]", " ".join(reduced)):
        assert np.prod([int(each) for each in shape.split(",") if each]) < smallest


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize(
    ("changes", "gate_up", "down"),
    [
        ({}, (("ep", "fsdp"), None, None, "tp"), (("ep", "fsdp"), "tp", None)),
        (
            {"num_experts": 2},
            ("ep", "fsdp", None, "tp"),
            ("ep", ("tp", "fsdp"), None),
        ),
        (
            {"num_experts": 2, "intermediate_size": 6},
            ("ep", "fsdp", None, "tp"),
            ("ep", "tp", "fsdp"),
        ),
        (
            {"num_experts": 2, "hidden_size": 12, "dtype": "float32"},
            ("ep", None, None, ("tp", "fsdp")),
            ("ep", ("tp", "fsdp"), None),
        ),
    ],
    ids=["experts", "H and F", "H", "F"],
)
def test_the_first_dimension_that_the_axis_divides(kind, changes, gate_up, down):
    """Values, names and shapes equal those of a layer without the axis."""
    alone = {"fsdp": 8, "ep": 1, "tp": 1}
    mesh = helpers.make_mesh(alone if "hidden_size" in changes else AXES)
    told = fields(mesh, top_k=1, shared_intermediate_size=8, **changes)

    def make(**more):
        if kind == "nnx":
            layer = jax_ep.flax.MoE(**told, **more, rngs=nnx.Rngs(0))
            return nnx.to_pure_dict(nnx.state(layer))
        layer = jax_ep.flax.linen.MoE(**told, **more)
        x = jnp.ones((8, 1, told["hidden_size"]))
        return nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))["params"]

    found, plain = make(fsdp_axis_name="fsdp"), make()
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert found["gate_up"].sharding.spec == P(*gate_up)
    assert found["down"].sharding.spec == P(*down)
    assert np.prod(parts(found["shared_down"])) * mesh.size == found["shared_down"].size


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [({"num_experts": 2}, AxisType.Auto), ({"hidden_size": 24}, AxisType.Explicit)],
    ids=str,
)
def test_gradients_of_other_dimensions(sizes, axes):
    """The sum over a third axis adds shards."""
    mesh = helpers.make_mesh({"dp": 2, "fsdp": 2, "ep": 2}, kind=axes)
    told = fields(mesh, top_k=2, shared_intermediate_size=6, **sizes)
    x = jnp.tile(inputs(), (1, 1, 2))[..., : told["hidden_size"]]
    plain = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0))
    layer = jax_ep.flax.MoE(**told, fsdp_axis_name="fsdp", rngs=nnx.Rngs(0))
    found, wanted = (nnx.jit(nnx.grad(loss))(each, x) for each in (layer, plain))
    for name in WEIGHTS:
        want = np.asarray(wanted[name][...])
        limit = np.abs(want).max()
        assert limit > 1e-2
        np.testing.assert_allclose(found[name][...], want, atol=1e-5 * limit)
    grad, state = graph(layer)
    text = grad.lower(state, x).compile().as_text()
    reduced = " ".join(re.findall(r"= (.*) all-reduce(?:-start)?\(", text))
    for name in WEIGHTS:
        value = getattr(layer, name)[...]
        local, shard = (parts(each) for each in (getattr(plain, name)[...], value))
        assert local != shard
        assert f"[{','.join(map(str, local))}]" not in reduced, name
    if axes == AxisType.Explicit:
        return
    with jax.set_mesh(helpers.make_mesh({"a": 8})):
        again = nnx.jit(nnx.grad(loss))(layer, x)
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.to_pure_dict, (again, found)))


def test_remat_gathers_again_unless_told_to_save():
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 2})
    layer = jax_ep.flax.MoE(**fields(mesh, fsdp_axis_name="fsdp"), rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    x = inputs()

    def gathers(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def run(state):
            return loss(nnx.merge(definition, state), x)

        text = jax.jit(jax.grad(jax.checkpoint(run, policy=policy))).lower(state)
        return text.as_text().count('"stablehlo.all_gather"')

    exchanges = ("jax_ep_route", "jax_ep_rows", "jax_ep_out")
    assert gathers(*exchanges) == 2 * len(WEIGHTS)
    assert gathers(*exchanges, "jax_ep_weights") == len(WEIGHTS)


def test_linen_scan_and_remat():
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 4})
    x = inputs()

    def run(**more):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                layer = jax_ep.flax.linen.MoE(**fields(mesh, **more), name="moe")
                return x + layer(x), None

        stack = nn.scan(
            nn.remat(Block, policy=jax_ep.save_route, prevent_cse=False),
            variable_axes={"params": 0, "losses": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: None},
        )()
        params = jax.jit(stack.init)(jax.random.key(0), x, None)["params"]

        def loss(params):
            return wave(stack.apply({"params": params}, x, None)[0])

        return jax.jit(jax.grad(loss))(params)["moe"]

    found, wanted = run(fsdp_axis_name="fsdp"), run()
    assert found["down"].names == (None, ("ep", "fsdp"), None, None)
    for name, want in nn.unbox(wanted).items():
        got = nn.unbox(found)[name]
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp_axis_name": "zz"}, "fsdp_axis_name must be an axis of the mesh"),
        ({"fsdp_axis_name": 3}, "fsdp_axis_name must be an axis of the mesh"),
        ({"fsdp_axis_name": ("fsdp",)}, "fsdp_axis_name must be an axis of the mesh"),
        ({"fsdp_axis_name": "ep"}, "outside of ('ep', 'tp')"),
        ({"fsdp_axis_name": "tp"}, "outside of ('ep', 'tp')"),
        ({"spec": P("ep")}, "an axis that spec splits tokens over"),
        (
            {"num_experts": 2, "hidden_size": 12, "intermediate_size": 10},
            "size divides 2 or 12 or 10, dimensions of a rank's part of gate_up",
        ),
    ],
)
def test_axes_that_cannot_serve(changes, words):
    alone = {"fsdp": 8, "ep": 1, "tp": 1}
    mesh = helpers.make_mesh(alone if "hidden_size" in changes else AXES)
    options = {"fsdp_axis_name": "fsdp", "top_k": 1, "dtype": "float32", **changes}
    for make, where in (
        (lambda told: jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0)), "flax.MoE"),
        (
            lambda told: jax_ep.flax.linen.MoE(**told).init(
                jax.random.key(0), jnp.ones((8, told["hidden_size"]))
            ),
            "flax.linen.MoE",
        ),
    ):
        with raises() as caught:
            make(fields(mesh, **options))
        check_form(caught, where, words)
