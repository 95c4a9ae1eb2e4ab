"""jax_ep.moe_ffn with experts.fp8: layouts, codes made before, training."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from support import helpers
from support.errors import check_form, raises
from support.fp8_experts import cosine, distance
from support.grouped_kernels import either_operations as either_operations
from support.grouped_kernels import fake_kernels as fake_kernels

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, K, H, F, N = 8, 2, 128, 256, 32


def config_of(**changes):
    fields = {
        "num_experts": E,
        "top_k": K,
        "hidden_size": H,
        "max_tokens_per_rank": N,
        "dispatch_format": "fp8_block128",
    }
    return jax_ep.EPConfig(**(fields | helpers.on_nodes() | changes))


def parameters(shared=False):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    found = {
        "router": normal(H, E) / 4,
        "gate_up": normal(E, H, 2, F) / H**0.5,
        "down": normal(E, F, H) / F**0.5,
    }
    if shared:
        found["shared_gate_up"] = normal(H, 2, F) / H**0.5
        found["shared_down"] = normal(F, H) / F**0.5
    return found


def spec_of(name, mesh):
    axes = {"router": (), "shared_gate_up": (None, None, "tp"), "shared_down": ("tp",)}
    axes |= {"gate_up": ("ep", "fsdp", None, "tp"), "down": ("ep", "tp", "fsdp")}
    return P(*(each if each in mesh.axis_names else None for each in axes[name]))


def layer(sizes, *, codes=None, run=experts.fp8, fields=None, **options):
    """A function of (params, x) on global arrays: (y, aux).

    Args:
        sizes: sizes of the mesh's axes "ep", "tp" and "fsdp".
        codes: None quantises in the layer, "beside" before it, and "alone" also removes
            the masters; over "fsdp" shards are quantised, and codes are gathered.
        run: the experts.
        fields: fields of the config.
        options: options of moe_ffn.
    """
    mesh = helpers.make_mesh(sizes)
    count = N * 2 // int(np.prod([n for name, n in sizes.items() if name != "tp"]))
    config = config_of(max_tokens_per_rank=count, **fields or {})
    ep = helpers.make_ep(mesh, config)
    tp = "tp" if "tp" in sizes else None

    def gather(part, axis):
        return jax.lax.all_gather(part, "fsdp", axis=axis, tiled=True)

    def body(params, x):
        params = dict(params)
        masters = params["gate_up"], params["down"]
        made = experts.quantize_weights(*masters, backward=True) if codes else None
        if "fsdp" in sizes:
            params["gate_up"] = gather(masters[0], 1)
            params["down"] = gather(masters[1], 2)
            if made is not None:
                made = experts.QuantizedWeights(
                    gather(made.gate_up, 1),
                    gather(made.gate_up_scales, 1),
                    gather(made.down, 2),
                    gather(made.down_scales, 2),
                )
        if codes == "alone":
            del params["gate_up"], params["down"]
        if made is not None:
            params["experts"] = made
        return jax_ep.moe_ffn(ep, x, params, experts=run, tp_axis=tp, **options)

    tokens = P(tuple(name for name in mesh.axis_names if name != "tp"))

    def whole(params, x):
        return jax.shard_map(
            body,
            mesh=mesh,
            in_specs=({name: spec_of(name, mesh) for name in params}, tokens),
            out_specs=(tokens, jax_ep.MoEAux.specs(tokens[0])),
        )(params, x)

    return whole


def tokens(count=2 * N):
    x = np.random.default_rng(1).standard_normal((count, H))
    return jnp.asarray(x, jnp.bfloat16)


def both_ways(run, params, x):
    """(y, aux) and gradients by name."""

    def loss(params, x):
        y, aux = run(params, x)
        return jnp.mean(jnp.sin(y.astype(jnp.float32))), (y, aux)

    grads, found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)
    return found, {**grads[0], "x": grads[1]}


@functools.cache
def alone_on_two():
    return both_ways(layer({"ep": 2}), parameters(), tokens())


def test_gradients_are_nearly_those_of_bfloat16():
    """Gradients of every parameter, also through the router."""
    (y, aux), grads = alone_on_two()
    plain = layer({"ep": 2}, run=experts.ragged_dot, fields={"dispatch_format": "bf16"})
    (want, wanted_aux), wanted = both_ways(plain, parameters(), tokens())
    np.testing.assert_array_equal(aux.expert_counts, wanted_aux.expert_counts)
    assert 0.01 < distance(y, want) < 0.08
    for name, got in grads.items():
        assert got.dtype == wanted[name].dtype
        assert cosine(got, wanted[name]) > 0.995, name
    ep = helpers.make_ep(helpers.make_mesh(2), config_of())
    load = jax_ep.stats.update(jax_ep.stats.init(ep), aux)
    assert jax_ep.stats.summary(load).rows.sum() == 2 * N * K


@pytest.mark.parametrize(
    ("sizes", "codes"),
    [
        ({"ep": 2, "tp": 2}, None),
        pytest.param({"ep": 2}, "beside", marks=pytest.mark.thorough),
        pytest.param({"fsdp": 2, "ep": 2}, "beside", marks=pytest.mark.thorough),
    ],
)
def test_layouts_agree(sizes, codes):
    """F over tp is summed after combine; shards give the codes of the whole."""
    if "fsdp" in sizes:
        # Shards of 128 rows.
        (y, _), grads = wide(sizes, codes)
        (want, _), wanted = wide({"ep": 2}, None)
    else:
        (y, _), grads = both_ways(layer(sizes, codes=codes), parameters(), tokens())
        (want, _), wanted = alone_on_two()
    assert distance(y, want) < 6e-3
    for name, got in grads.items():
        # Cotangents of parts are quantised separately.
        assert distance(got, wanted[name]) < 0.02, name


def wide(sizes, codes):
    """Like `both_ways`, with twice the width, so that H can be sharded."""
    rng = np.random.default_rng(0)
    params = {
        "router": rng.standard_normal((2 * H, E)) / 4,
        "gate_up": rng.standard_normal((E, 2 * H, 2, F)) / 16,
        "down": rng.standard_normal((E, F, 2 * H)) / 16,
    }
    params = {name: value.astype(np.float32) for name, value in params.items()}
    x = jnp.asarray(rng.standard_normal((2 * N, 2 * H)), jnp.bfloat16)
    run = layer(sizes, codes=codes, fields={"hidden_size": 2 * H})
    return both_ways(run, params, x)


def test_no_gather_of_masters_beside_codes():
    """Over a data axis only codes are gathered; gradients are reduce-scattered."""
    sizes = {"fsdp": 2, "ep": 2}
    helpers.make_mesh(sizes)

    def program(codes):
        run = layer(sizes, codes=codes, fields={"hidden_size": 2 * H})
        shapes = {"router": (2 * H, E), "gate_up": (E, 2 * H, 2, F)}
        shapes["down"] = (E, F, 2 * H)
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32)
            for name, shape in shapes.items()
        }

        def loss(params, x):
            return jnp.mean(run(params, x)[0].astype(jnp.float32))

        x = jax.ShapeDtypeStruct((2 * N, 2 * H), jnp.bfloat16)
        return jax.jit(jax.grad(loss)).lower(params, x).compile().as_text()

    masters = re.compile(rf"f32\[\d*,?{2 * H},2,{F}\]\S* all-gather")
    assert masters.search(program(None))
    assert not masters.search(program("beside"))


@pytest.mark.few(1)
@pytest.mark.usefixtures("either_operations")
def test_codes_alone_and_a_fused_shared_expert():
    fields = {"fused_shared_expert": True}
    params = parameters(shared=True)
    (y, _), grads = both_ways(layer({"ep": 2}, fields=fields), params, tokens())
    (beside, _), others = both_ways(
        layer({"ep": 2}, fields=fields, codes="beside"), params, tokens()
    )
    (alone, _), frozen = both_ways(
        layer({"ep": 2}, fields=fields, codes="alone"), params, tokens()
    )
    assert distance(beside, y) < 1e-3
    assert distance(alone, y) < 1e-3
    for name, got in others.items():
        assert distance(got, grads[name]) < 0.01, name
    for name in ("gate_up", "down"):
        assert not np.any(frozen[name])
    # The shared expert's weights are no codes.
    for name in ("shared_gate_up", "shared_down", "x"):
        assert distance(frozen[name], others[name]) < 0.01, name


@pytest.mark.parametrize("codes", ["beside", "alone"])
def test_default_experts_multiply_codes(codes):
    run, default = (
        jax.jit(layer({"ep": 2}, run=run, codes=codes)) for run in (experts.fp8, None)
    )
    given = parameters(), tokens()
    helpers.assert_bits(default(*given)[0], run(*given)[0])


def test_experts_without_codes_refuse_them():
    run = layer({"ep": 1}, run=experts.ragged_dot, codes="beside")
    with raises() as caught:
        jax.eval_shape(run, parameters(), tokens())
    check_form(caught, "moe_ffn", "quantized", "ragged_dot")


def test_codes_of_another_rank_are_refused():
    made = experts.quantize_weights(parameters()["gate_up"], parameters()["down"])
    mesh = helpers.make_mesh(2)
    ep = helpers.make_ep(mesh, config_of())

    def body(params, x):
        return jax_ep.moe_ffn(ep, x, params, experts=experts.fp8)[0]

    for given, words in (
        (made, ("quantized gate_up", "this rank's experts", "shard dimension 0")),
        (made.gate_up, ("params['experts']", "QuantizedWeights")),
    ):
        params = {"router": parameters()["router"], "experts": given}
        run = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("ep")), out_specs=P("ep"))
        with raises() as caught:
            jax.eval_shape(run, params, tokens())
        check_form(caught, "moe_ffn", *words)


@pytest.mark.slow
def test_training_ends_where_that_in_bfloat16_does():
    """A layer that learns a function from noisy examples, each seen once."""
    rng = np.random.default_rng(3)
    steps = 40
    xs = jnp.asarray(rng.standard_normal((steps, 2 * N, H)), jnp.bfloat16)
    # A function of few directions, for which some thousand examples suffice.
    matrix = rng.standard_normal((H, 4)) @ rng.standard_normal((4, H)) / 2 / H**0.5
    targets = np.tanh(xs.astype(np.float32) @ matrix)
    targets += rng.standard_normal(targets.shape) / 2

    def train(run, name):
        whole = layer({"ep": 2}, run=run, fields={"dispatch_format": name})

        def loss(params, x, target):
            y, aux = whole(params, x)
            error = y.astype(jnp.float32) - target
            return jnp.mean(error**2) + 1e-2 * aux.balance_loss

        def step(state, batch):
            params, first, second, count = state
            value, grads = jax.value_and_grad(loss)(params, *batch)
            first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
            second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g**2, second, grads)

            def moved(p, m, v):  # Adam
                spread = jnp.sqrt(v / (1 - 0.95**count)) + 1e-9
                return p - 6e-3 * m / (1 - 0.9**count) / spread

            params = jax.tree.map(moved, params, first, second)
            return (params, first, second, count + 1), value

        zeros = jax.tree.map(np.zeros_like, parameters())
        run_steps = jax.jit(lambda *args: jax.lax.scan(step, *args)[1])
        state = (parameters(), zeros, zeros, 1.0)
        return np.asarray(run_steps(state, (xs, np.float32(targets))))

    fp8 = train(experts.fp8, "fp8_block128")
    plain = train(experts.ragged_dot, "bf16")
    assert plain[-10:].mean() < 0.85 * plain[:5].mean()
    assert abs(fp8[-10:].mean() / plain[-10:].mean() - 1) < 2.5e-3
