"""Errors of jax_ep.flax.MoE and jax_ep.flax.linen.MoE for unusable arguments."""

from __future__ import annotations

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from support import helpers, moe_dense
from support.errors import check_form, check_state, raises

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from jax_ep.experts import Padded
from jax_ep.router import Router
from support.flax_layers import fields

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Unhashable:
    """Like a dataclass that is not frozen."""

    __hash__ = None

    def __call__(self, first, *others):
        return first


WRONG = {
    "mesh": ({"mesh": None}, "mesh must be"),
    "mesh_name": ({"mesh": "ep"}, "mesh must be a jax.sharding.Mesh, got 'ep'"),
    "axis": ({"axis_name": "zz"}, "axis_name must name"),
    "no_axis": ({"axis_name": None}, "axis_name must name"),
    "experts": ({"num_experts": 7}, "num_experts must be a multiple"),
    "options": ({"config_options": {"zz": 1}}, "config_options must .*; correct the"),
    "option": (
        {"config_options": {"recv_capacty": 1}},
        "config_options must .*; did you mean recv_capacity",
    ),
    "list": (
        {"config_options": [*range(99)]},
        r"config_options .* [\[(]0, 1, 2, \.\.\.[\])];",
    ),
    "transport": ({"transport": "pigeon"}, "transport must be one of"),
    "width": ({"hidden_size": 7}, r"hidden_size must make .*\(raised by jax_ep.EPConf"),
    "words": ({"top_k": "2"}, "top_k must be an int, got '2'"),
    "own_field": ({"config_options": {"top_k": 1}}, "config_options must be a mapping"),
    "dtype": ({"dtype": "zz"}, "dtype must be one of"),
    "param_dtype": ({"param_dtype": "int32"}, "param_dtype must be a floating dtype"),
    "no_param_dtype": ({"param_dtype": "zz"}, "param_dtype must be a floating dtype"),
    "spec": ({"spec": "ep"}, "spec must be a jax.sharding.PartitionSpec"),
    "spec_of_no_axis": ({"spec": P("q", "ep")}, r"spec must shard .* each once"),
    "spec_twice": ({"spec": P(("ep", "ep"))}, r"spec must shard .* each once"),
    "spec_without_ep": ({"spec": P(None, None, None)}, "spec must shard .* include"),
    "unconstrained": (
        {"spec": P(P.UNCONSTRAINED, "ep")},
        r"spec must have axes .* with P.UNCONSTRAINED; leave",
    ),
    "numpy": (
        {"intermediate_size": np.int64(8)},
        r"intermediate_size must be an int .*8.*int\(\)",
    ),
    "shared_numpy": (
        {"shared_intermediate_size": np.int64(8)},
        "shared_intermediate_size must be an int",
    ),
    "unhashable": ({"experts": Unhashable()}, "experts must be hashable"),
    "activation": ({"activation": 3}, "activation must be a function"),
    "unhashable_activation": (
        {"activation": Unhashable()},
        "activation must be hashable",
    ),
    "expert_bias": ({"expert_bias": 1}, "expert_bias must be a bool"),
    "gated": ({"gated_shared_expert": 1}, "gated_shared_expert must be a bool"),
    "gate_of_none": (
        {"gated_shared_expert": True, "shared_intermediate_size": None},
        "gated_shared_expert needs shared_intermediate_size, .*None; pass the size",
    ),
    "gate_of_fused": (
        {
            "gated_shared_expert": True,
            "shared_intermediate_size": moe_dense.INNER,
            "config_options": {"fused_shared_expert": True},
        },
        "gated_shared_expert needs .* no fused_shared_expert",
    ),
    "no_router": ({"router": ""}, "router must be a jax_ep.router.Router or"),
    "router_class": ({"router": Router}, "router must be a function, got the class"),
    "unhashable_router": ({"router": Unhashable()}, "router must be hashable"),
    "router": ({"router": 3}, "router must be a jax_ep.router.Router"),
    "bias": ({"router_bias": np.zeros(16)}, "router_bias must be a bool or one of"),
    "bias_name": (
        {"router_bias": "logit"},
        r"router_bias must be a bool or one of \['logits', 'both'\], got 'logit'",
    ),
    "top_k": ({"top_k": 17}, "top_k must be at most num_experts, 16"),
    "groups": ({"router": Router(num_groups=3)}, "num_groups must divide"),
    "function": ({"experts": 3}, "experts must be a function"),
    "class": ({"experts": Padded}, "experts must be a function, got the class"),
    "of_gate": (
        {"activation": jax.nn.silu},
        r"activation must be a function of \(gate, up\), got silu",
    ),
    "of_rows": (
        {"experts": lambda rows, weights: rows},
        r"experts must be a function of \(rows, gate_up, down, group_sizes\)",
    ),
    "of_more": (
        {"router": lambda logits, *, num_experts: 0},
        r"router must be .* \['tokens', .*, got <lambda>\(logits, \*, num_experts\)",
    ),
    "of_more_rows": (
        {"experts": lambda rows, gate_up, down, group_sizes, *, zz: rows},
        r"experts must be .* keywords among \['gate_bias', .*\*, zz\); give",
    ),
    "of_nothing": ({"router": lambda: 0}, r"router must be a function of \(logits\)"),
    "handle": ({"ep": 3}, "ep must be the handle that jax_ep.init returned"),
}


@pytest.mark.parametrize("name", WRONG)
def test_both_say_what_a_layer_needs(name):
    """Errors come before any use, so that no error of another library shows."""
    changes, words = WRONG[name]
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    if name == "experts" and mesh.shape["ep"] == 1:
        pytest.skip("one rank takes any number of experts")
    given = {**fields(mesh), **changes}
    x = jnp.ones((8, 4, 16))
    for where, make in (
        ("flax.MoE", lambda: jax_ep.flax.MoE(**given, rngs=nnx.Rngs(0))),
        (
            "flax.linen.MoE",
            lambda: jax_ep.flax.linen.MoE(**given).init(jax.random.key(0), x),
        ),
    ):
        with raises() as caught:
            make()
        assert re.match(rf"jax_ep\.{where}: .*{words}", str(caught.value))
        assert ", got " in str(caught.value)


def test_misspelt_arguments():
    mesh = helpers.make_mesh(1)
    given = fields(mesh)
    del given["num_experts"]
    for where, make in (
        ("flax.MoE", lambda: jax_ep.flax.MoE(**given, num_expert=8, rngs=nnx.Rngs(0))),
        ("flax.linen.MoE", lambda: jax_ep.flax.linen.MoE(**given, num_expert=8)),
    ):
        with raises() as caught:
            make()
        check_form(caught, where, "got num_expert; did you mean num_experts?")


def test_arguments_that_are_no_arrays():
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    with raises() as caught:
        jax_ep.flax.MoE(**fields(mesh), rngs=3)
    check_form(caught, "flax.MoE", "rngs must be an nnx.Rngs")
    layer = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))
    x = jnp.ones((8, 4, 16))
    for given, mask, words in (
        (None, None, "x must be an array"),
        (x.astype(int), None, "x must have a floating dtype"),
        (x, 3, "mask must be an array"),
        (x, jnp.ones((8, 4)), "mask must be bool"),
        (x, jnp.ones(8, bool), "mask must be [...] with ... = (8, 4)"),
    ):
        with raises() as caught:
            layer(given, mask=mask)
        check_form(caught, "flax.MoE", words)


def test_parameters_without_values_are_named():
    """Like those from `jax.eval_shape` of init, which may be passed to a trace."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    layer, x = jax_ep.flax.linen.MoE(**fields(mesh)), jnp.ones((8, 4, 16))
    init = jax.random.key(0), x
    shapes = jax.eval_shape(lambda *given: nn.unbox(layer.init(*given)), *init)
    with raises() as caught:
        layer.apply(shapes, x)
    check_form(caught, "flax.linen.MoE", "must be an array with values")
    y = jax.eval_shape(layer.apply, shapes, x)
    assert y.shape == x.shape
    made = nnx.eval_shape(lambda: jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0)))
    with raises() as caught:
        made(x)
    check_form(caught, "flax.MoE", "must be an array with values")
    assert nnx.eval_shape(lambda layer: layer(x), made).shape == x.shape


@pytest.mark.parametrize("explicit", ["dp", "ep"])
def test_axes_of_two_kinds_are_refused(explicit):
    """Flax places no parameters on such a mesh."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    kinds = [
        AxisType.Explicit if name == explicit else AxisType.Auto
        for name in mesh.axis_names
    ]
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(kinds))
    for make in (
        lambda: jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0)),
        lambda: jax_ep.flax.linen.MoE(**fields(mesh)).init(
            jax.random.key(0), jnp.ones((8, 4, 16))
        ),
    ):
        with raises() as caught:
            make()
        assert "mesh must have axes of one kind" in str(caught.value)


def test_errors_of_a_ranks_call_name_the_layer():
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    layer = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))
    with raises() as caught:
        layer(jnp.ones((8, 4, 16)), input_scale=jnp.ones(()))
    check_form(caught, "flax.MoE", "input_scale", "(raised by jax_ep.dispatch for")


@pytest.mark.parametrize("manual", [("dp", "ep"), ("dp",)], ids="-".join)
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_layer_inside_shard_map_names_what_is_for_it(kind, manual):
    """Whatever the size of a rank's x, and before parameters are read."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    if kind == "nnx":
        layer, where = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0)), "flax.MoE"
        call = layer
    else:
        layer, where = jax_ep.flax.linen.MoE(**fields(mesh)), "flax.linen.MoE"
        values = nn.unbox(layer.init(jax.random.key(0), jnp.ones((8, 4, 16))))
        part = jax.tree.map(lambda value: value[:1], values)  # a rank's, which Linen
        call = functools.partial(layer.apply, part)  # compares with the whole's shape
    run = jax.shard_map(
        call, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), axis_names={*manual}
    )
    for batch in (8, mesh.shape["dp"]):
        with raises() as caught:
            jax.eval_shape(jax.jit(run), jnp.ones((batch, 4, 16)))
        words = "inside jax.shard_map", f"{manual}", "call jax_ep.moe_ffn there"
        check_form(caught, where, *words)


def test_a_closed_layer_says_how_to_go_on():
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    layer = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))
    layer.ep.close()
    with raises() as caught:
        layer(jnp.ones((8, 4, 16)))
    check_state(
        caught, "flax.MoE", "closed", "make the jax_ep.flax layer that holds it"
    )
    again = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))
    assert jnp.isfinite(again(jnp.ones((8, 4, 16)))).all()


def test_layers_can_be_copied():
    """Layers can be copied, for example to average parameters."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    layer = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))
    other, x = copy.deepcopy(layer), jnp.ones((8, 4, 16))
    assert other.ep is layer.ep
    other.router[...] = jnp.zeros_like(other.router[...])
    assert (layer(x) != other(x)).any()
