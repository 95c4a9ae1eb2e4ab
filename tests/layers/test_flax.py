"""jax_ep.flax: NNX and Linen layers equal to the dense formula; optax, Orbax."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router
from support import helpers, moe_dense

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import dense_grads, fields, inputs, nnx_layer, wave
from support.launch import run_to_end

pytestmark = pytest.mark.usefixtures("quick_compiles")

MESHES = {
    "ep": {"ep": 4},
    "dp x ep": {"dp": 2, "ep": 4},
    "dp x ep x tp": {"dp": 2, "ep": 2, "tp": 2},
}
DEEPSEEK = Router(score="sigmoid", num_groups=4, top_groups=2, scale=2.5)


def close(actual, expected, name="", atol=1e-3):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=name)
    assert np.abs(np.asarray(expected)).max() > 10 * atol, name


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Auto) for name in MESHES), ("dp x ep x tp", AxisType.Explicit)],
    ids=str,
)
def test_nnx_against_the_dense_formula(name, kind):
    sizes = MESHES[name]
    mesh = helpers.make_mesh(helpers.fit(sizes), kind=kind)
    router = DEEPSEEK if "dp" in sizes else Router()
    params = moe_dense.params(bias="dp" in sizes, logit_bias=True)
    x = inputs()
    (want_y, want_loss), want = dense_grads(params, x, router)

    def loss(layer, x):
        y, aux = layer(x, return_aux=True)
        return wave(y) + 3 * aux.balance_loss + aux.z_loss, y

    argnums = (nnx.DiffState(0, nnx.Param), 1)
    with jax.set_mesh(mesh):
        layer = nnx_layer(mesh, params, router=router)
        grad = nnx.value_and_grad(loss, argnums=argnums, has_aux=True)
        (total, y), (got, got_x) = nnx.jit(grad)(layer, x)
    close(y, want_y, "y", 1e-4)
    np.testing.assert_allclose(total, want_loss, rtol=1e-5)
    close(got_x, want[1], "x")
    assert set(got) == set(params) - {"router_bias"}
    for name in got:
        close(got[name][...], want[0][name], name)
        ours = getattr(layer, name)[...].sharding
        assert got[name][...].sharding.is_equivalent_to(ours, want[0][name].ndim)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, AxisType.Explicit if "tp" in name else AxisType.Auto) for name in MESHES],
    ids=str,
)
def test_linen_against_the_dense_formula(name, kind):
    sizes = MESHES[name]
    mesh = helpers.make_mesh(helpers.fit(sizes), kind=kind)
    params = moe_dense.params(seed=1, bias=True, logit_bias=True)
    x = inputs(1)
    (want_y, want_loss), want = dense_grads(params, x, DEEPSEEK)
    layer = jax_ep.flax.linen.MoE(**fields(mesh), router=DEEPSEEK, router_bias="both")
    with jax.set_mesh(mesh):
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        down = nn.unbox(variables)["params"]["down"]
    specs = nn.get_partition_spec(variables)["params"]
    tp = "tp" if "tp" in sizes else None
    assert specs["gate_up"] == P("ep", None, None, tp)
    assert specs["down"] == down.sharding.spec == P("ep", tp, None)
    names = {"router_kernel": "router"}
    values = {n: params[names.get(n, n)] for n in variables["params"]}
    state = {"router_state": {"bias": params["router_bias"]}}

    def loss(values, x):
        y, sown = layer.apply({"params": values, **state}, x, mutable=["losses"])
        (balance,), (z,) = (sown["losses"][n] for n in ("balance_loss", "z_loss"))
        return wave(y) + 3 * balance + z, y

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    with jax.set_mesh(mesh):
        (total, y), (got, got_x) = jax.jit(grad)(values, x)
    close(y, want_y, "y", 1e-4)
    np.testing.assert_allclose(total, want_loss, rtol=1e-5)
    close(got_x, want[1], "x")
    for name in values:
        close(got[name], want[0][names.get(name, name)], name)


def test_both_start_alike_from_shapes_and_any_mesh():
    sizes = {"ep": 4}, {"ep": 2, "tp": 2}
    one, two = (helpers.make_mesh(helpers.fit(each)) for each in sizes)
    a, b = (jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(7)) for mesh in (one, two))
    for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down"):
        value = np.asarray(getattr(a, name)[...])
        np.testing.assert_array_equal(value, getattr(b, name)[...])
        fan_in = value.shape[-2] if "gate_up" not in name else moe_dense.HIDDEN
        np.testing.assert_allclose(value.std(), fan_in**-0.5, rtol=0.15)
    layer = jax_ep.flax.linen.MoE(**fields(one))
    made = nn.unbox(jax.jit(layer.init)(jax.random.key(0), inputs()))["params"]
    shapes = {name: array.shape for name, array in made.items()}
    wanted = {name: array.shape for name, array in moe_dense.params().items()}
    wanted["router_kernel"] = wanted.pop("router")
    assert shapes == wanted


def test_spec_over_two_dimensions_and_a_mask():
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    params = moe_dense.params(shared=False)
    x = inputs()
    mask = np.random.default_rng(0).random(x.shape[:2]) < 0.6
    options = {"shared_intermediate_size": None}
    plain = nnx_layer(mesh, params, **options)
    other = nnx_layer(mesh, params, spec=P("dp", "ep"), **options)
    want = np.asarray(plain(x)) * mask[..., None]
    got, aux = other(x, mask=mask, return_aux=True)
    close(got, want, atol=1e-5)
    assert int(aux.expert_counts.sum()) == mask.sum() * moe_dense.TOP_K
    assert got.sharding.spec == P("dp", "ep")


def test_layers_of_equal_sizes_share_a_handle_and_ones_own_serves():
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    make = functools.partial(jax_ep.flax.MoE, rngs=nnx.Rngs(0))
    a, b = make(**fields(mesh)), make(**fields(mesh))
    assert a.ep is b.ep
    with jax_ep.init(mesh, "ep", a.ep.config, transport=helpers.TRANSPORT) as own:
        c = make(**fields(mesh), ep=own)
        assert c.ep is own
        assert nnx.clone(c).ep is own
        c(inputs())
    with pytest.raises(
        ValueError, match=r"config must equal that of the layer, top_k=2, got top_k=3;"
    ):
        make(**fields(mesh, top_k=2), ep=own)


def test_bf16_and_remat():
    mesh = helpers.make_mesh(helpers.some_ranks(4))
    layer = jax_ep.flax.MoE(**fields(mesh, dtype="bfloat16"), rngs=nnx.Rngs(0))
    x = inputs()
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    want = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(0))(x)
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=0.1)

    def loss(layer, x):
        return wave(layer(x).astype(jnp.float32))

    policy = jax_ep.save_route
    remat = nnx.remat(loss, policy=policy)
    grads, again = (nnx.jit(nnx.grad(f))(layer, x) for f in (loss, remat))
    for name in ("router", "gate_up", "down"):
        np.testing.assert_allclose(
            again[name][...], grads[name][...], rtol=0.05, atol=0.1
        )


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({}, (8, 4, 8), r"x must be \[..., hidden_size\]"),
        ({}, (0, 4, 16), "x must have tokens"),
        ({"spec": P("dp", "ep")}, (4, 0, 16), "x must have tokens"),
        ({"max_tokens_per_rank": 1}, (5, 1, 16), "max_tokens_per_rank = 1 tokens"),
        ({"spec": P("dp")}, (8, 4, 16), "spec must shard"),
        ({"spec": P(None, None, "ep")}, (8, 4, 16), "spec must shard"),
        ({"spec": P("dp", "ep", None, None)}, (8, 4, 16), "spec must shard"),
        ({"spec": P(("ep", "ep"))}, (8, 4, 16), "spec must shard .* each once"),
        ({"tp_axis_name": "ep"}, (8, 4, 16), "tp_axis_name must be"),
        (
            {"tp_axis_name": "dp", "intermediate_size": 7},
            (8, 4, 16),
            "intermediate_size must be an int and a positive multiple of 2",
        ),
    ],
)
def test_errors(changes, shape, message):
    mesh = helpers.make_mesh({"dp": 2, "ep": 2})
    with pytest.raises(ValueError, match=rf"^jax_ep.flax.MoE: .*{message}.*got"):
        jax_ep.flax.MoE(**fields(mesh, **changes), rngs=nnx.Rngs(0))(jnp.ones(shape))


def in_a_process(program):
    """What a program prints that ends well."""
    run = run_to_end([sys.executable, "-c", program])
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_flax_is_imported_by_jax_ep_flax_alone():
    said = in_a_process("""
import sys
import jax_ep
assert not {"flax", "optax", "orbax"} & set(sys.modules)
sys.modules["flax"] = None
try:
    import jax_ep.flax
except ImportError as error:
    print(error)
try:
    jax_ep.flax
except ImportError as error:
    print(error)
""")
    assert said.count("pip install 'jax_ep[flax]'") == 2


def test_modules_of_flax_need_no_import_of_their_own():
    said = in_a_process("""
import jax_ep
print(jax_ep.flax.MoE.__name__, jax_ep.flax.linen.MoE.__name__)
for module in (jax_ep, jax_ep.flax):
    try:
        module.misspelt
    except AttributeError as error:
        print(error)
""")
    assert said.splitlines() == [
        "MoE MoE",
        "module 'jax_ep' has no attribute 'misspelt'",
        "module 'jax_ep.flax' has no attribute 'misspelt'",
    ]


def test_an_equal_layer_compiles_nothing(caplog):
    """Models have many; each parameter is drawn by a program that they share."""
    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))
    own = {**fields(mesh), "expert_bias": True}
    rngs = nnx.Rngs(0)
    first = jax_ep.flax.MoE(**own, rngs=rngs)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        second = jax_ep.flax.MoE(**own, rngs=rngs)
        assert not [text for text in caplog.messages if "Compiling" in text]
        jnp.ones(7) * np.arange(7)
    assert any("Compiling" in text for text in caplog.messages)
    assert np.any(first.gate_up[...] != second.gate_up[...])
