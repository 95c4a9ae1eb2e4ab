"""A layer passes its arguments besides sizes to moe_ffn, with equal results."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router
from support import helpers, moe_dense, moe_ffn
from support.errors import check_form, raises

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import BATCH, fields, inputs, nnx_layer

pytestmark = pytest.mark.usefixtures("quick_compiles")


def thrice(rows, gate_up, down, group_sizes):
    """Experts that differ from all others."""
    return 3 * rows


# The layers' arguments, and those of moe_ffn and of the config that they become.
ARGUMENTS = {
    "capacity_factor": (
        {"capacity_factor": 0.25, "max_tokens_per_rank": 256},
        {},
        {"capacity_factor": 0.25},
    ),
    "options": (
        {"config_options": {"recv_capacity": 24, "expert_alignment": 4}},
        {},
        {"recv_capacity": 24, "expert_alignment": 4},
    ),
    "fused": (
        {
            "config_options": {"fused_shared_expert": True},
            "shared_intermediate_size": moe_dense.INNER,
        },
        {},
        {"fused_shared_expert": True},
    ),
    "format": (
        {"dispatch_format": "mxfp8", "hidden_size": 64},
        {},
        {"dispatch_format": "mxfp8", "hidden_size": 64},
    ),
    "experts": ({"experts": thrice}, {"experts": thrice}, {}),
    "router": ({"router": Router(normalize=False, scale=2.0)}, {}, {}),
    "activation": (
        {"activation": moe_dense.clipped},
        {"activation": moe_dense.clipped},
        {},
    ),
}


def params_for(layer_fields):
    """Parameters of the sizes in the layer's fields."""
    rng = np.random.default_rng(3)
    hidden, inner = layer_fields["hidden_size"], layer_fields["intermediate_size"]
    shared = layer_fields["shared_intermediate_size"]
    shapes = {
        "router": (hidden, moe_dense.EXPERTS),
        "gate_up": (moe_dense.EXPERTS, hidden, 2, inner),
        "down": (moe_dense.EXPERTS, inner, hidden),
        "shared_gate_up": (hidden, 2, shared),
        "shared_down": (shared, hidden),
    }
    return {
        name: (rng.standard_normal(shape) / 4).astype(np.float32)
        for name, shape in shapes.items()
    }


def call(kind, mesh, params, x, mask, changes):
    """(y, aux) of the layer, and the handle that it uses."""
    if kind == "nnx":
        layer = nnx_layer(mesh, params, **changes)
        return layer(x, mask=mask, return_aux=True), layer.ep
    layer = jax_ep.flax.linen.MoE(**fields(mesh, **changes))
    names = {"router_kernel": "router"}
    made = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
    values = {name: params[names.get(name, name)] for name in made}
    run = jax.jit(lambda v: layer.apply({"params": v}, x, mask=mask, return_aux=True))
    alone = nnx_layer(mesh, params, **changes)  # equal sizes give the same handle
    return run(values), alone.ep


def given(changes):
    """Mesh, parameters, x and mask for a layer with `changes`."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    layer_fields = fields(mesh, **changes)
    most, hidden = layer_fields["max_tokens_per_rank"], layer_fields["hidden_size"]
    rng = np.random.default_rng(4)
    shape = (BATCH, most * mesh.size // BATCH)
    x = rng.standard_normal((*shape, hidden)).astype(np.float32)
    return mesh, params_for(layer_fields), x, rng.random(shape) < 0.8


@functools.cache
def function(name):
    """Config, y and aux of moe_ffn with the arguments `name`."""
    changes, options, in_config = ARGUMENTS[name]
    mesh, params, x, mask = given(changes)
    most = mask.size // mesh.size
    config = moe_ffn.config(max_tokens_per_rank=most, **in_config)
    ep = helpers.make_ep(mesh, config)
    router = changes.get("router", Router())
    run = moe_ffn.expert_parallel(mesh, ep, params, router, **options)
    return config, *jax.jit(run)(params, x.reshape(-1, x.shape[-1]), mask.reshape(-1))


@functools.cache
def plain(kind, sizes):
    """y of the layer that gets only its sizes."""
    changes = dict(sizes)
    return np.asarray(call(kind, *given(changes), changes)[0][0])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_reach_the_function(name, kind):
    changes, _, _ = ARGUMENTS[name]
    (y, aux), ep = call(kind, *given(changes), changes)
    config, want, want_aux = function(name)
    assert ep.config == config
    np.testing.assert_array_equal(np.asarray(y).reshape(want.shape), want)
    # NNX's layer is not jitted here, so its losses may be summed in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), aux, want_aux)
    if name in ("capacity_factor", "options"):
        assert int(aux.num_dropped.sum()) > 0
    # The argument matters: without it the layer gives something else.
    sizes = ("hidden_size", "shared_intermediate_size", "max_tokens_per_rank")
    other = plain(kind, tuple((key, changes[key]) for key in changes if key in sizes))
    assert name == "fused" or (other != np.asarray(y)).any()


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_dtype_of_parameters(kind):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    told = fields(mesh, param_dtype="bfloat16")
    if kind == "nnx":
        state = nnx.state(jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0)), nnx.Param)
    else:
        layer = jax_ep.flax.linen.MoE(**told)
        state = jax.eval_shape(layer.init, jax.random.key(0), inputs())["params"]
    leaves = jax.tree.leaves(state)
    assert len(leaves) == 5
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "config_options": {"fused_shared_expert": True},
                "shared_intermediate_size": None,
            },
            "shared_intermediate_size must be intermediate_size",
        ),
        (
            {"config_options": {"fused_shared_expert": True}},
            "must be intermediate_size",
        ),
        ({"config_options": {"reduce": "none"}}, 'reduce="rank"'),
        ({"config_options": {"skip_a2a": True}}, "skip_a2a"),
    ],
)
def test_configs_that_no_layer_serves(changes, words):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    with raises() as caught:
        jax_ep.flax.MoE(**fields(mesh, **changes), rngs=nnx.Rngs(0))
    check_form(caught, "flax.MoE", words)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "spec", "same"),
    [
        ("nnx", P("dp", "ep", None), P("dp", "ep")),
        ("nnx", P(("dp", "ep"), None), P(("dp", "ep"))),
        ("nnx", P(None, ("dp", "ep"), None), P(None, ("dp", "ep"))),
        ("linen", P("dp", "ep", None), P("dp", "ep")),
    ],
    ids=str,
)
def test_a_spec_may_say_that_hidden_is_whole(kind, spec, same):
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    params = moe_dense.params()
    (y, aux), (want, want_aux) = (
        call(kind, mesh, params, inputs(), None, {"spec": each})[0]
        for each in (spec, same)
    )
    assert y.sharding == want.sharding
    jax.tree.map(np.testing.assert_array_equal, (y, aux), (want, want_aux))


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_bias_is_float32_whatever_jax_is_told(kind):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    told = fields(mesh, router_bias=True)
    with jax.enable_x64(True):
        if kind == "nnx":
            bias = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0)).router_bias[...]
        else:
            layer = jax_ep.flax.linen.MoE(**told)
            made = jax.eval_shape(layer.init, jax.random.key(0), inputs())
            bias = made["router_state"]["bias"]
    assert (bias.dtype, bias.shape) == (np.float32, (moe_dense.EXPERTS,))
