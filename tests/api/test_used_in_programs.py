"""Problems from others' programs, each in a small program."""

from __future__ import annotations

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router, route
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

N, HIDDEN, EXPERTS = 8, 16, 24


@pytest.fixture(scope="module")
def mesh():
    return helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2}))


def params(seed: int = 0) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {
        "router": (HIDDEN, EXPERTS),
        "gate_up": (EXPERTS, HIDDEN, 2, 32),
        "down": (EXPERTS, 32, HIDDEN),
    }
    named = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) / 4 for (name, shape), key in named}


SPECS = {"router": P(), "gate_up": P("ep"), "down": P("ep")}


def tokens_of(mesh, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (N * mesh.size, HIDDEN))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*every mesh axis should be manual")
def test_partly_manual_layer(mesh):
    """With `axis_names={"ep"}` losses are over the manual axes."""
    ep = helpers.make_ep(mesh, helpers.make_config(dtype="float32", top_k=2))
    x = tokens_of(mesh)[: N * mesh.shape["ep"]]

    def layer(params, x):
        return jax_ep.moe_ffn(ep, x, params)

    def run(**options):
        mapped = jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=(SPECS, P("ep")),
            out_specs=(P("ep"), jax_ep.MoEAux.specs("ep")),
            **options,
        )

        def loss(params, x):
            y, aux = mapped(params, x)
            return (y**2).sum() + aux.balance_loss + aux.z_loss, aux

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params(), x)

    (partly, aux), grads = run(axis_names={"ep"}, check_vma=False)
    (wholly, want), all_grads = run(check_vma=False)
    np.testing.assert_allclose(partly, wholly, rtol=1e-5)
    np.testing.assert_allclose(aux.load, want.load, rtol=1e-6)
    assert jax.tree.all(jax.tree.map(lambda g: bool(jnp.any(g)), grads))
    del all_grads  # of replicated tokens, without check_vma: sums over "dp" too
    if mesh.shape["dp"] > 1:
        layer = lambda params, x: jax_ep.moe_ffn(  # noqa: E731
            ep, x, params, batch_axes=("dp", "ep")
        )
        with pytest.raises(ValueError, match="batch_axes must be a sequence of manual"):
            run(axis_names={"ep"}, check_vma=False)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("reduce", ["rank", "source"])
def test_narrow_router_weights(mesh, dtype, reduce):
    """Bit for bit like the same weights in float32; gradients are in their dtype."""
    config = helpers.make_config(dtype="float32", reduce=reduce, pending_calls=1)
    ep = helpers.make_ep(mesh, config)
    x = tokens_of(mesh)
    rng = np.random.default_rng(2)
    ids = jnp.asarray(rng.integers(0, EXPERTS, (len(x), 3)), jnp.int32)
    narrow = jnp.asarray(rng.random(ids.shape), dtype)

    def whole(x, ids, weights):
        d = jax_ep.dispatch(ep, x, ids, weights)
        return jax_ep.combine(ep, d.tokens, d.route, home(d, weights))

    def halves(x, ids, weights):
        d = jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, ids, weights))
        back = jax_ep.combine_async(ep, d.tokens, d.route, home(d, weights))
        return jax_ep.combine_wait(back)

    def home(d, weights):
        # A narrow copy of the weights that came with the rows, too.
        return weights if reduce == "source" else d.router_weights.astype(weights.dtype)

    def run(body, weights):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=P(("dp", "ep")), out_specs=P(("dp", "ep"))
        )

        def loss(weights):
            y = mapped(x, ids, weights)
            return (y**2).sum(), y

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)

    for body in (whole, halves):
        (_, y), grad = run(body, narrow)
        (_, want), wide = run(body, narrow.astype(jnp.float32))
        np.testing.assert_array_equal(y, want)
        assert grad.dtype == narrow.dtype
        np.testing.assert_allclose(grad.astype(jnp.float32), wide, rtol=0.02, atol=0.02)


def test_weights_that_are_no_narrower_float(mesh):
    ep = helpers.make_ep(mesh, helpers.make_config(dtype="float32"))
    x = tokens_of(mesh)
    for dtype in (np.int32, np.bool_):
        weights = np.ones((len(x), 3), dtype)
        with pytest.raises(TypeError, match="router_weights must be float32, got"):
            jax_ep.sharded.dispatch(ep, x, np.zeros((len(x), 3), np.int32), weights)


def router_gradient(mesh, top_k: int, router: Router | None) -> np.ndarray:
    config = helpers.make_config(dtype="float32", top_k=top_k)
    layer = jax.shard_map(
        lambda params, x: jax_ep.moe_ffn(
            helpers.make_ep(mesh, config), x, params, router=router
        )[0],
        mesh=mesh,
        in_specs=(SPECS, P(("dp", "ep"))),
        out_specs=P(("dp", "ep")),
    )
    x = tokens_of(mesh)
    grads = jax.jit(jax.grad(lambda p: ((layer(p, x) - x) ** 2).mean()))(params())
    return np.abs(np.asarray(grads["router"])).max()


@pytest.mark.slow
def test_single_expert_trains_its_router(mesh):
    """Its weight is a probability; normalised it would be 1 for any router."""
    one, two = (router_gradient(mesh, top_k, None) for top_k in (1, 2))
    assert one > 0.1 * two > 0
    with pytest.warns(UserWarning, match="the task does not train the router"):
        forced = router_gradient(mesh, 1, Router(normalize=True))
    assert forced < 1e-5 * one
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = jax.random.normal(jax.random.key(3), (5, EXPERTS))
        plain = route(logits, 1).weights
        probabilities = jax.nn.softmax(logits).max(axis=-1, keepdims=True)
        np.testing.assert_allclose(plain, probabilities, rtol=1e-6)
        np.testing.assert_allclose(route(logits, 2).weights.sum(axis=-1), 1, rtol=1e-6)
        loose = route(logits, 2, Router(normalize=False)).weights.sum(axis=-1)
        assert (loose < 1).all()


def test_forward_mode_names_the_remedy(mesh):
    """Not jitted, as JAX's own error for jitted code names one of its classes."""
    ep = helpers.make_ep(mesh, helpers.make_config(dtype="float32", pending_calls=1))
    x, ids = tokens_of(mesh), jnp.zeros((N * mesh.size, 3), jnp.int32)

    def dispatched(x, ids):
        return jax_ep.dispatch(ep, x, ids).tokens

    def begun(x, ids):
        return jax_ep.dispatch_wait(jax_ep.dispatch_async(ep, x, ids)).tokens

    for name, body in (("dispatch", dispatched), ("dispatch_async", begun)):
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=P(("dp", "ep")), out_specs=P(("dp", "ep"))
        )
        words = rf"jax_ep.{name}: must be differentiated in reverse .*use jax.grad"
        with pytest.raises(TypeError, match=words):
            jax.jvp(lambda x, run=mapped: run(x, ids), (x,), (x,))


def test_too_many_tokens_of_moe_ffn_are_its_own_error(mesh):
    ep = helpers.make_ep(mesh, helpers.make_config(dtype="float32", top_k=2))
    layer = jax.shard_map(
        lambda params, x: jax_ep.moe_ffn(ep, x, params)[0],
        mesh=mesh,
        in_specs=(SPECS, P(("dp", "ep"))),
        out_specs=P(("dp", "ep")),
    )
    x = jnp.ones(((N + 1) * mesh.size, HIDDEN))
    with pytest.raises(ValueError, match=rf"jax_ep.moe_ffn: tokens .* = {N} per rank"):
        jax.eval_shape(layer, params(), x)
    with pytest.raises(TypeError, match=r"jax_ep.moe_ffn: tokens must be float32"):
        jax.eval_shape(layer, params(), x[: N * mesh.size].astype(jnp.bfloat16))


def layers(mesh):
    flax = pytest.importorskip("jax_ep.flax", exc_type=ImportError)
    from flax import nnx

    import jax_ep.flax.linen

    size = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_experts": EXPERTS}
    size |= {"mesh": mesh, "axis_name": "ep", "top_k": 2, "max_tokens_per_rank": N}
    yield flax.MoE(**size, dtype="float32", rngs=nnx.Rngs(0))
    yield jax_ep.flax.linen.MoE(**size, dtype="float32")


def test_pickling_a_layer_names_the_remedy(mesh):
    for layer in layers(mesh):
        with pytest.raises(TypeError, match=r"MoE cannot be pickled.*make the layer"):
            pickle.dumps(layer)
        copied = copy.deepcopy(layer)
        assert type(copied) is type(layer)
        assert copied is not layer


def test_too_many_tokens_of_a_layer_are_its_own_error(mesh):
    """The error has the whole array's sizes, and what to make the layer with."""
    x = jnp.ones((3 * N * mesh.size, HIDDEN))
    for layer in layers(mesh):
        call = layer if hasattr(layer, "ep") and layer.ep is not None else None
        run = call or (lambda x, made=layer: made.init(jax.random.key(0), x))
        words = rf"max_tokens_per_rank = {N} tokens per rank, got {3 * N} on each"
        with pytest.raises(ValueError, match=words):
            run(x)
