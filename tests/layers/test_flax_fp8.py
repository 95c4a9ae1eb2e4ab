"""jax_ep.flax's layers with experts.fp8: shards, codes beside weights or alone."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from jax_ep._experts import (
    devices,
)
from support import helpers
from support.errors import check_form, check_state, raises
from support.fp8_experts import cosine, distance
from support.grouped_kernels import either_operations as either_operations
from support.grouped_kernels import fake_kernels as fake_kernels

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import linen as nn
from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import BATCH, LENGTH, parts
from support.flax_layers import fields as small_fields

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, H, F = 4, 256, 256
FP8 = {"experts": experts.fp8, "dispatch_format": "fp8_block128"}


def fields(mesh, **changes):
    sizes = {
        "hidden_size": H,
        "intermediate_size": F,
        "num_experts": E,
        "top_k": 2,
        "shared_intermediate_size": 128,
        "dtype": "bfloat16",
        "fsdp_axis_name": "fsdp" if "fsdp" in mesh.axis_names else None,
    }
    return small_fields(mesh, **sizes | changes)


def inputs():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, H)), jnp.bfloat16)


def total(y, aux):
    return jnp.mean(jnp.sin(y.astype(jnp.float32))) + 1e-2 * aux.balance_loss


def nnx_program(mesh, **changes):
    """A jittable function of (parameters, x, quantized, placement), and parameters."""
    layer = jax_ep.flax.MoE(**fields(mesh, **changes), rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)

    def run(params, x, **options):
        own = nnx.State({name: nnx.Param(value) for name, value in params.items()})
        return nnx.merge(definition, own)(x, return_aux=True, **options)

    def quantize(params, **options):
        own = nnx.State({name: nnx.Param(value) for name, value in params.items()})
        return nnx.merge(definition, own).quantize_weights(**options)

    return run, quantize, nnx.to_pure_dict(state)


def linen_program(mesh, **changes):
    layer = jax_ep.flax.linen.MoE(**fields(mesh, **changes))
    _, _, params = nnx_program(mesh, **changes)  # the same values

    def renamed(params):
        names = {"router": "router_kernel"}
        return {names.get(name, name): value for name, value in params.items()}

    def run(params, x, **options):
        variables = {"params": renamed(params)}
        return layer.apply(variables, x, return_aux=True, **options)

    def quantize(params, **options):
        return layer.quantize_weights(renamed(params), **options)

    return run, quantize, params


def grads(program, codes=False, placement=None):
    """(y, aux), and gradients by name, with those of x."""
    run, quantize, params = program

    def loss(params, x, made, placement):
        options = {} if made is None else {"quantized": made}
        y, aux = run(params, x, placement=placement, **options)
        return total(y, aux), (y, aux)

    @jax.jit
    def both(params, x, placement):
        made = quantize(params, backward=True) if codes else None
        return jax.grad(loss, (0, 1), has_aux=True)(params, x, made, placement)

    (found, to_x), results = both(params, inputs(), placement)
    return results, found | {"x": to_x}


@functools.cache
def alone(num_experts=E):
    mesh = helpers.make_mesh({"ep": 2})
    return grads(nnx_program(mesh, num_experts=num_experts, **FP8))


def agree(found, wanted):
    (y, aux), gradients = found
    (want, wanted_aux), others = wanted
    assert distance(y, want) < 6e-3
    np.testing.assert_array_equal(aux.load, wanted_aux.load)
    for name, got in gradients.items():
        assert got.dtype == others[name].dtype
        # Cotangents of parts are quantised separately.
        assert distance(got, others[name]) < 0.02, name


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "sizes", "codes", "changes"),
    [
        ("nnx", {"fsdp": 2, "ep": 2, "tp": 2}, True, {}),
        ("nnx", {"fsdp": 2, "ep": 2}, False, {"num_experts": 2}),
        ("linen", {"fsdp": 2, "ep": 2}, True, {"num_experts": 2}),
        ("linen", {"ep": 2, "tp": 2}, False, {}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("either_operations")
def test_layouts_and_codes_beside_weights_agree(kind, sizes, codes, changes):
    """Shards of experts or of H; codes made in the call or beforehand."""
    program = {"nnx": nnx_program, "linen": linen_program}[kind]
    mesh = helpers.make_mesh(sizes)
    agree(grads(program(mesh, **FP8, **changes), codes), alone(**changes))


def test_gradients_are_nearly_those_of_bfloat16():
    (y, aux), found = alone()
    mesh = helpers.make_mesh({"ep": 2})
    (want, _), wanted = grads(nnx_program(mesh))
    assert 0.01 < distance(y, want) < 0.08
    assert set(found) >= {"shared_gate_up", "router", "x"}
    for name, got in found.items():
        assert cosine(got, wanted[name]) > 0.995, name
    ep = jax_ep.flax.MoE(**fields(mesh, **FP8), rngs=nnx.Rngs(0)).ep
    load = jax_ep.stats.update(jax_ep.stats.init(ep), aux)
    assert jax_ep.stats.summary(load).rows.sum() == 2 * BATCH * LENGTH


def test_gradients_of_weights_in_fp8():
    """A partial is known as fp8: its codes cross the data axis, too."""
    own = functools.partial(experts.fp8, wgrad="fp8")
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 2})
    changes = FP8 | {"experts": own, "num_experts": 2}
    (y, _), found = grads(nnx_program(mesh, **changes), codes=True)
    (want, _), wanted = alone(num_experts=2)
    assert distance(y, want) < 6e-3
    for name, got in found.items():
        assert cosine(got, wanted[name]) > 0.998, name
    assert distance(found["gate_up"], wanted["gate_up"]) > 0.01


@pytest.mark.parametrize(("kind", "codes"), [("nnx", False), ("linen", True)])
def test_codes_cross_the_data_axis_and_weights_do_not(kind, codes):
    """One byte per parameter is gathered; gradients are reduce-scattered in float32."""
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 2})
    program = {"nnx": nnx_program, "linen": linen_program}[kind]
    changes = {"num_experts": 2, "shared_intermediate_size": None}
    run, quantize, params = program(mesh, **FP8, **changes)

    def loss(params, x):
        made = {"quantized": quantize(params, backward=True)} if codes else {}
        return total(*run(params, x, **made))

    text = jax.jit(jax.grad(loss)).lower(params, inputs()).compile().as_text()
    found = re.findall(r"= (.*?) all-gather(?:-start)?\(", text)
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", " ".join(found))
    sizes = {}
    for dtype, shape in shapes:
        count = int(np.prod([int(n) for n in shape.split(",") if n]))
        sizes.setdefault(dtype, []).append(count)
    # Over the two ranks of the axis, only codes have the size of a weight.
    assert {2 * H * F, H * F} <= set(sizes["u8"])
    others = [n for dtype, all_n in sizes.items() if dtype != "u8" for n in all_n]
    assert max(others) < H * F / 2
    scattered = " ".join(re.findall(r"= (.*?) reduce-scatter(?:-start)?\(", text))
    for shape in ((1, H // 2, 2, F), (1, F, H // 2)):
        assert f"f32[{','.join(map(str, shape))}]" in scattered


@pytest.mark.few(1)
@pytest.mark.usefixtures("either_operations")
def test_a_placement_moves_codes():
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 2})
    placed = jax_ep.placement.balance([1, 9, 2, 3], 8, ep_size=2)
    program = nnx_program(mesh, num_slots=8, **FP8)
    agree(grads(program, placement=placed), alone())
    run, _, params = program
    text = jax.jit(lambda p, x: run(p, x, placement=placed)[0])
    text = text.lower(params, inputs()).compile().as_text()
    gathered = " ".join(re.findall(r"= (.*?) all-gather(?:-start)?\(", text))
    assert re.search(rf"u8\[\d+,{H},2,{F}\]", gathered)
    assert not re.search(rf"(f32|bf16)\[\d+,{H},2,{F}\]", gathered)


def test_explicit_axes_and_a_pipeline():
    mesh = helpers.make_mesh({"ep": 2}, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        found = grads(nnx_program(mesh, **FP8), codes=True)
    agree(found, alone())
    staged = helpers.make_mesh({"stage": 2, "ep": 2})
    run, _, params = nnx_program(staged, spec=P("ep"), **FP8)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    x = jnp.stack([inputs(), -inputs()])
    y = jax.jit(jax.vmap(lambda p, x: run(p, x)[0], spmd_axis_name="stage"))(both, x)
    assert distance(y[0], alone()[0][0]) < 6e-3
    assert distance(y[1], y[0]) > 0.1


def test_remat_repeats_neither_exchanges_nor_products(monkeypatch):
    """save_route and `jax_ep_gate_up` keep what the backward pass needs."""
    for name in ("device_obstacle", "portable_obstacle"):
        monkeypatch.setattr(devices, name, lambda *_: "as on a CPU")
    mesh = helpers.make_mesh({"ep": 2})
    run, _, params = nnx_program(mesh, shared_intermediate_size=None, **FP8)

    def loss(params, x):
        return total(*run(params, x))

    def counts(function):
        program = jax.make_jaxpr(jax.grad(function))(params, inputs()).jaxpr
        # On CPUs a grouped matmul is a loop.
        products = count(program, "ragged_dot") + count(program, "while")
        return [count(program, "all_to_all"), products]

    names = jax.checkpoint_policies.save_only_these_names("jax_ep_gate_up")
    policy = jax.checkpoint_policies.save_from_both_policies(jax_ep.save_route, names)
    plain, all_again = counts(loss), counts(jax.checkpoint(loss))
    routed = counts(jax.checkpoint(loss, policy=jax_ep.save_route))
    kept = counts(jax.checkpoint(loss, policy=policy))
    assert [plain[1], all_again[1], routed[1], kept[1]] == [6, 8, 8, 7]
    if helpers.TRANSPORT == "collective":
        assert [plain[0], all_again[0], routed[0], kept[0]] == [4, 6, 4, 4]
    want = jax.jit(jax.grad(loss))(params, inputs())
    found = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy)))(params, inputs())
    for name in ("gate_up", "down", "router"):
        assert distance(found[name], want[name]) < 5e-3, name


def count(jaxpr, name):
    """Counts equations, nested ones too, whose primitive's name begins with `name`."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name.startswith(name)
        for each in jax.tree.leaves(equation.params):
            inner = getattr(each, "jaxpr", each)
            found += count(inner, name) if hasattr(inner, "eqns") else 0
    return found


def dequantised(layer, form):
    """A layer in bfloat16 with the dequantised codes as weights."""
    from jax_ep._experts import quantized

    codes = layer.quantize_weights(form)
    other = nnx.clone(layer)
    for name in ("gate_up", "down"):
        value = quantized.dequantize(codes, name)
        variable = getattr(other, name)
        variable[...] = jax.device_put(value, variable[...].sharding)
    return other


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["fp8_block128", "mxfp4"])
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_codes_alone(kind, form):
    """A converted layer equals one made with codes; only the rest are Params."""
    mesh = helpers.make_mesh({"fsdp": 2, "ep": 2})
    told = fields(mesh, num_experts=2)
    layer = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0))
    x = inputs()
    want = dequantised(layer, form)(x)
    names = ("gate_up", "gate_up_scales", "down", "down_scales")
    if kind == "nnx":
        codes = layer.quantized(form)
        fresh = jax_ep.flax.MoE(**told, weights_format=form, rngs=nnx.Rngs(0))
        jax.tree.map(
            np.testing.assert_array_equal,
            *(
                jax.tree.map(bits, nnx.to_pure_dict(nnx.state(each)))
                for each in (codes, fresh)
            ),
        )
        y = codes(x)
        kept = nnx.to_pure_dict(nnx.state(codes, nnx.Param))
        held = {name: getattr(codes, name)[...] for name in names}
        assert layer.gate_up[...].dtype == jnp.float32  # unchanged
        spec = nnx.get_partition_spec(nnx.state(codes))["down_scales"].get_value()
    else:
        linen = jax_ep.flax.linen.MoE(**told)
        state = nnx.to_pure_dict(nnx.state(layer))
        state["router_kernel"] = state.pop("router")
        codes, variables = linen.quantized({"params": state}, form)
        made = jax.jit(codes.init)(jax.random.key(0), x)
        shapes, wanted = (
            {name: (leaf.shape, leaf.dtype) for name, leaf in each["codes"].items()}
            for each in (nn.unbox(made), variables)
        )
        assert shapes == wanted
        assert bits(nn.unbox(made)["codes"]["gate_up"]).any()
        y = jax.jit(codes.apply)(variables, x)
        kept, held = variables["params"], variables["codes"]
        spec = nn.get_partition_spec(made)["codes"]["down_scales"]
    assert set(kept) == {*state_names(kind), "shared_gate_up", "shared_down"}
    assert set(held) == set(names)
    assert spec == P("ep", None, "fsdp")
    code = jnp.uint8 if form == "mxfp4" else jnp.float8_e4m3fn
    assert held["gate_up"].dtype == code
    # With 4-bit codes rows of a bf16 dispatch stay bfloat16; otherwise quantised.
    assert distance(y, want) < (0.01 if form == "mxfp4" else 0.06)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("nnx", "mxfp4"),
        ("linen", "fp8_block128"),
        pytest.param("nnx", "fp8_block128", marks=pytest.mark.thorough),
        pytest.param("linen", "mxfp4", marks=pytest.mark.thorough),
    ],
)
def test_prepared_codes(kind, form, fake_kernels):
    """They have what kernels read, so that a call with them makes no codes again."""
    mesh = helpers.make_mesh({"ep": 2, "tp": 2})
    told = fields(mesh, **FP8)
    layer = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0))
    x = inputs()
    if kind == "nnx":
        serving = layer.quantized(form)
        codes, call = serving.prepared(), serving
    else:
        linen = jax_ep.flax.linen.MoE(**told)
        state = nnx.to_pure_dict(nnx.state(layer))
        state["router_kernel"] = state.pop("router")
        serving, variables = linen.quantized({"params": state}, form)
        codes = serving.prepared(variables)
        call = functools.partial(serving.apply, variables)
    assert codes.gate_up_transposed is not None
    assert codes.down_transposed is not None
    y = call(x, quantized=codes)
    assert distance(y, call(x)) < 6e-3
    own = codes.canonical()
    assert distance(y, call(x, quantized=own)) < 6e-3
    text = str(jax.make_jaxpr(lambda x, c: call(x, quantized=c))(x, codes))
    whole = str(jax.make_jaxpr(lambda x, c: call(x, quantized=c))(x, own))
    assert text.count("transpose") < whole.count("transpose")


def state_names(kind):
    return ["router" if kind == "nnx" else "router_kernel"]


def bits(array):
    if array.dtype.itemsize > 1:
        return np.asarray(array)
    return np.asarray(jax.lax.bitcast_convert_type(array, jnp.uint8))


@pytest.mark.parametrize(
    "form", [pytest.param("fp8_block128", marks=pytest.mark.thorough), "mxfp4"]
)
def test_a_checkpoint_of_codes_on_another_mesh(tmp_path, form):
    pytest.importorskip("orbax.checkpoint")
    from orbax import checkpoint

    mesh = helpers.make_mesh({"ep": 4})
    trained = jax_ep.flax.MoE(**fields(mesh), rngs=nnx.Rngs(3)).quantized(form)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "codes", nnx.to_pure_dict(nnx.state(trained)))
    other = helpers.make_mesh({"fsdp": 2, "ep": 2})
    make = functools.partial(jax_ep.flax.MoE, **fields(other), weights_format=form)
    layer = make(rngs=nnx.Rngs(0))
    state = nnx.state(layer)
    like = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
        nnx.to_pure_dict(state),
    )
    with checkpoint.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "codes", like))
    nnx.update(layer, state)
    assert parts(layer.gate_up[...])[0] == 1
    np.testing.assert_array_equal(bits(layer.down[...]), bits(trained.down[...]))
    assert distance(layer(inputs()), trained(inputs())) < 6e-3


def test_quantising_again_compiles_nothing():
    layer = jax_ep.flax.MoE(**fields(helpers.make_mesh({"ep": 2})), rngs=nnx.Rngs(0))
    first = layer.quantize_weights()
    assert first.gate_up.sharding.is_equivalent_to(layer.gate_up[...].sharding, 4)
    compiled = []

    def note(name, *_, **__):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        layer.quantize_weights()
        assert compiled == []
        layer.quantize_weights("mxfp4")
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        (
            {"ep": 2, "tp": 2},
            {"intermediate_size": 384},
            "multiple of 128 on each of 2 tensor-parallel ranks for "
            "jax_ep.experts.fp8, got 384, which is 192 per rank",
        ),
        (
            {"ep": 2},
            {"hidden_size": 192, "dispatch_format": "bf16"},
            "hidden_size must be a multiple of 128",
        ),
        (
            {"ep": 2, "tp": 2},
            {
                "intermediate_size": 96,
                "dispatch_format": "bf16",
                "weights_format": "mxfp4",
            },
            "multiple of 32 on each of 2 tensor-parallel ranks",
        ),
        (
            {"fsdp": 2, "ep": 2},
            {"num_experts": 2, "hidden_size": 384, "intermediate_size": 384},
            "divides 1 or 384 or 384, dimensions of a rank's part of gate_up, H and F "
            "into multiples of 128, got 'fsdp' of size 2",
        ),
        ({"ep": 2}, {"weights_format": "fp4"}, "weights_format must be None or one of"),
    ],
    ids=str,
)
def test_sizes_that_have_no_codes(sizes, changes, words):
    told = fields(helpers.make_mesh(sizes), **FP8 | changes)
    x = jnp.ones((8, told["hidden_size"]))
    for make, where in (
        (lambda: jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0)), "flax.MoE"),
        (
            lambda: jax_ep.flax.linen.MoE(**told).init(jax.random.key(0), x),
            "flax.linen.MoE",
        ),
    ):
        with raises() as caught:
            make()
        check_form(caught, where, words)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_codes_of_four_bits_of_other_sizes(kind):
    """Multiples of 32 are enough for "mxfp4" with rows in bfloat16."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    told = small_fields(mesh, hidden_size=96, intermediate_size=32, dtype="bfloat16")
    x = jnp.ones((4, 4, 96), jnp.bfloat16)
    if kind == "nnx":
        layer = jax_ep.flax.MoE(**told, rngs=nnx.Rngs(0))
        fresh = jax_ep.flax.MoE(**told, weights_format="mxfp4", rngs=nnx.Rngs(0))
        made, wanted = (
            nnx.to_pure_dict(nnx.state(each))
            for each in (fresh, layer.quantized("mxfp4"))
        )
        y, want = fresh(x), layer.quantized("mxfp4")(x)
    else:
        layer = jax_ep.flax.linen.MoE(**told)
        codes, wanted = layer.quantized(layer.init(jax.random.key(0), x), "mxfp4")
        fresh = jax_ep.flax.linen.MoE(**told, weights_format="mxfp4")
        made = nn.unbox(fresh.init(jax.random.key(0), x))
        y, want = fresh.apply(wanted, x), codes.apply(wanted, x)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, wanted)
    np.testing.assert_array_equal(y, want)


def test_linen_says_which_variables_it_needs():
    mesh = helpers.make_mesh({"ep": 2})
    layer = jax_ep.flax.linen.MoE(**fields(mesh))
    variables = layer.init(jax.random.key(0), inputs())
    for method, given, words in (
        ("quantized", variables["params"], "pass all variables of this layer"),
        ("quantize_weights", variables, "pass variables['params'] of this layer"),
    ):
        with raises() as caught:
            getattr(layer, method)(given)
        check_form(caught, f"flax.linen.MoE.{method}", words)


def test_default_experts_multiply_codes():
    mesh = helpers.make_mesh({"ep": 2})
    layer, default = (
        jax_ep.flax.MoE(**fields(mesh, **options), rngs=nnx.Rngs(0))
        for options in (FP8, {**FP8, "experts": None})
    )
    codes = layer.quantize_weights()
    helpers.assert_bits(
        default(inputs(), quantized=codes), layer(inputs(), quantized=codes)
    )


def test_misused_codes():
    mesh = helpers.make_mesh({"ep": 2})
    layer = jax_ep.flax.MoE(**fields(mesh, **FP8), rngs=nnx.Rngs(0))
    codes = layer.quantize_weights()
    half = jax.tree.map(lambda leaf: leaf[:2], codes)
    alone, four = layer.quantized(), layer.quantize_weights("mxfp4")
    for call, words in (
        (lambda: layer(inputs(), quantized=codes.gate_up), "quantized must be"),
        (lambda: layer(inputs(), quantized=half), "codes of (2, 256, 2, 256)"),
        (lambda: alone(inputs(), quantized=four), "weights_format 'fp8_block128'"),
    ):
        with raises() as caught:
            call()
        check_form(caught, "flax.MoE", words)
    with raises() as caught:
        alone.quantize_weights()
    check_state(caught, "flax.MoE", "holds codes already")
    with raises() as caught:
        layer.prepared()
    check_state(caught, "flax.MoE", "holds no codes")
