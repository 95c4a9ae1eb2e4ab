"""Options that single model families need, against a dense formula of their own.

Experts without a gate, another activation of the shared expert, weights on the experts'
input, experts that are the identity, ids that were chosen elsewhere; `routing` and
`residual` of the Flax layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.router import Router
from support import helpers, moe_dense
from support.errors import raises
from support.moe_ffn import N, config, param_specs

pytestmark = pytest.mark.usefixtures("quick_compiles")

HIDDEN, EXPERTS = moe_dense.HIDDEN, moe_dense.EXPERTS


def relu_squared(up):
    return jnp.square(jax.nn.relu(up))


def clamped(gate, up):
    return jax.nn.silu(jnp.minimum(gate, 1.0)) * jnp.clip(up, -1.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer: what its params are made with, and the options of `moe_ffn`."""

    options: dict[str, Any]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    router: Router = dataclasses.field(default_factory=Router)
    top_k: int = moe_dense.TOP_K
    ids: bool = False

    @property
    def gated(self):
        return self.options.get("activation") is not relu_squared

    @property
    def identity(self):
        return self.options.get("num_identity_experts", 0)

    def made(self):
        """The params of all experts."""
        params = moe_dense.params(**self.params)
        if self.identity:
            more = moe_dense.params(1, experts=EXPERTS + self.identity, **self.params)
            for name in ("router", "router_bias"):
                params[name] = more[name]
        if not self.gated:
            for name in ("gate_up", "shared_gate_up"):
                params[name] = params[name][..., 1:, :]
            params.pop("gate_bias", None)
        return params

    def given_ids(self, count):
        """Ids from elsewhere, some of no expert, or None."""
        if not self.ids:
            return None
        rng = np.random.default_rng(5)
        order = rng.random((count, EXPERTS + 1)).argsort(axis=1)[:, : self.top_k]
        return np.where(order == EXPERTS, -1, order).astype(np.int32)


CASES = {
    "no gate": Case(
        {"activation": relu_squared},
        {"expert_bias": True, "bias": True},
        Router(score="sigmoid", scale=2.5),
    ),
    "shared activation": Case(
        {"activation": clamped, "shared_activation": jax_ep.experts.geglu},
        {"shared_gate": True},
    ),
    "weights on inputs": Case(
        {"apply_router_weight_on_input": True},
        router=Router(score="sigmoid", normalize=False),
        top_k=1,
    ),
    "identity": Case(
        {"num_identity_experts": 7},
        {"bias": True, "shared": False},
        Router(normalize=False, scale=3),
    ),
    "given ids": Case({}, router=Router(score="sqrtsoftplus", scale=1.5), ids=True),
}
BY_NAME = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


# The ranks divide the tokens, and they do not, so that the layer adds some.
BY_KIND = pytest.mark.parametrize(
    ("kind", "shape"), [("nnx", (8, 4)), ("linen", (3, 3))]
)


def choices(case, params, x, mask):
    """Ids `[n, K]` by NumPy, constants of the formula; -1 for padding."""
    ids = case.given_ids(len(x))
    if ids is None:
        wanted = np.asarray(scores(case, x @ params["router"]), np.float64)
        wanted = wanted + params.get("router_bias", 0)
        ids = np.argsort(-wanted, axis=1, kind="stable")[:, : case.top_k]
    return np.where(mask[:, None], ids, -1)


def scores(case, logits):
    return {
        "softmax": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
        "sqrtsoftplus": lambda logits: jnp.sqrt(jax.nn.softplus(logits)),
    }[case.router.score](logits)


def formula(case, params, x, ids, residual):
    """Each token's experts one after the other, all experts for all tokens."""
    activation = case.options.get("activation", moe_dense.swiglu)
    of_shared = case.options.get("shared_activation", activation)
    there = ids >= 0
    weights = jnp.take_along_axis(scores(case, x @ params["router"]), ids, axis=1)
    weights = jnp.where(there, weights, 0)
    if case.router.normalize is None:
        total = jnp.sum(weights, 1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1)
    weights = weights * case.router.scale
    results = []
    for k in range(case.top_k):
        weight = weights[:, k : k + 1]
        on_input = case.options.get("apply_router_weight_on_input", False)
        rows = x * weight if on_input else x
        at = np.clip(ids[:, k], 0, EXPERTS - 1)
        sides = jnp.einsum("nh,nhcf->cnf", rows, params["gate_up"][at])
        sides = list(sides)
        if "up_bias" in params:
            sides[-1] = sides[-1] + params["up_bias"][at]
        y = jnp.einsum("nf,nfh->nh", activation(*sides), params["down"][at])
        if "down_bias" in params:
            y = y + params["down_bias"][at]
        y = jnp.where(ids[:, k : k + 1] >= EXPERTS, x, y)
        results.append(y if on_input else y * weight)
        results[-1] = jnp.where(there[:, k : k + 1], results[-1], 0)
    y = sum(results) + residual
    if "shared_down" in params:
        sides = jnp.einsum("nh,hcs->cns", x, params["shared_gate_up"])
        shared = of_shared(*sides) @ params["shared_down"]
        if "shared_expert_gate" in params:
            shared = shared * jax.nn.sigmoid(x @ params["shared_expert_gate"])
        y = y + shared
    return y


def wanted(case, params, x, mask, residual):
    """((loss, y), gradients of params and x) by the formula."""
    flat, mask = x.reshape(-1, HIDDEN), mask.reshape(-1)
    ids = choices(case, params, flat, mask)

    def loss(params, flat):
        y = formula(case, params, flat, ids, residual.reshape(-1, HIDDEN))
        return jnp.sum(jnp.sin(y)), y

    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    with jax.default_matmul_precision("highest"):
        (value, y), (of_params, of_x) = found(params, flat)
    return (value, y.reshape(x.shape)), (of_params, of_x.reshape(x.shape))


def assert_equal(found, want):
    (_, y), grads = found
    (_, want_y), want_grads = want
    scale = np.abs(want_y).max()
    np.testing.assert_allclose(y, want_y, rtol=0, atol=1e-5 * scale)
    names = [*want_grads[0], "x"]
    assert set(grads[0]) == set(want_grads[0])
    both = ({**grads[0], "x": grads[1]}, {**want_grads[0], "x": want_grads[1]})
    for name in names:
        ours, theirs = (np.asarray(each[name]) for each in both)
        limit = np.abs(theirs).max()
        assert name == "router_bias" or limit > 1e-2, name
        atol = 2e-5 * max(limit, 1e-3)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=name)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "axes",
    [
        {"ep": 2, "tp": 2},
        pytest.param({"ep": 4}, marks=pytest.mark.thorough),
        pytest.param({"dp": 2, "ep": 2}, marks=pytest.mark.thorough),
    ],
)
@BY_NAME
def test_moe_ffn(axes, case):
    mesh = helpers.make_mesh(helpers.fit(axes))
    ep = helpers.make_ep(mesh, config(top_k=case.top_k))
    params, tp = case.made(), "tp" if "tp" in mesh.axis_names else None
    tokens = P(tuple(name for name in mesh.axis_names if name != "tp"))
    rng = np.random.default_rng(1)
    n = N * mesh.size // mesh.shape.get("tp", 1)
    x, residual = rng.standard_normal((2, n, HIDDEN)).astype(np.float32)
    mask = rng.random(n) < 0.8

    def body(params, x, mask, residual, ids):
        own = {"router": case.router, "mask": mask, "residual": residual}
        own |= {"topk_ids": ids, "tp_axis": tp, **case.options}
        return jax_ep.moe_ffn(ep, x, params, **own)

    specs = (param_specs(params, tp), tokens, tokens, tokens, tokens)
    out = (tokens, jax_ep.MoEAux.specs(tokens[0]))
    run = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)
    ids = case.given_ids(n)

    def loss(params, x):
        y, aux = run(params, x, mask, residual, ids)
        return jnp.sum(jnp.sin(y)), (y, aux)

    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, (y, aux)), grads = found(params, x)
    assert not np.any(aux.num_dropped)
    assert not np.any(aux.num_invalid)
    assert aux.load.shape == (EXPERTS + case.identity,)
    assert_equal(((value, y), grads), wanted(case, params, x, mask, residual))
    if case.identity:
        chosen = choices(case, params, x, mask)
        assert (chosen >= EXPERTS).any()
        count = ((chosen >= 0) & (chosen < EXPERTS)).sum()
        # Each of the tensor axis' ranks has the same counts.
        assert np.sum(aux.expert_counts) == count


@pytest.mark.few(2)
@BY_KIND
@BY_NAME
def test_flax_layers(kind, case, shape):
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    from flax import linen as nn
    from flax import nnx

    import jax_ep.flax.linen
    from support.flax_layers import fields, nnx_layer, router_biases

    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2, "tp": 2}))
    params = case.made()
    how = {"router": case.router, "top_k": case.top_k, "fsdp_axis_name": "dp"}
    how |= {"expert_bias": "down_bias" in params, "router_bias": router_biases(params)}
    how |= {"gated_shared_expert": "shared_expert_gate" in params, **case.options}
    how |= {"gated_linear_unit": case.gated}
    if "shared_down" not in params:
        how["shared_intermediate_size"] = None
    rng = np.random.default_rng(2)
    x, residual = rng.standard_normal((2, *shape, HIDDEN)).astype(np.float32)
    mask = rng.random(shape) < 0.8
    ids = case.given_ids(x.size // HIDDEN)
    ids = None if ids is None else ids.reshape(*shape, -1)
    called = {"mask": mask, "residual": residual, "topk_ids": ids}
    if kind == "nnx":
        layer = nnx_layer(mesh, params, **how)
        names = [name for name in params if name != "router_bias"]
        assert {n: getattr(layer, n)[...].shape for n in params} == {
            name: value.shape for name, value in params.items()
        }

        @nnx.jit
        def run(layer, x):
            def loss(layer, x):
                y = layer(x, **called)
                return jnp.sum(jnp.sin(y)), y

            return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

        found, (grads, of_x) = run(layer, x)
        grads = {name: grads[name][...] for name in names}
    else:
        layer = jax_ep.flax.linen.MoE(**fields(mesh, **how))
        given = dict(params)
        given["router_kernel"] = given.pop("router")
        state = {"params": given}
        if "router_bias" in params:
            state["router_state"] = {"bias": given.pop("router_bias")}
        made = nn.unbox(jax.jit(layer.init)(jax.random.key(0), x))
        assert shapes_of(made) == shapes_of(state)

        def loss(params, x):
            y = layer.apply({**state, "params": params}, x, **called)
            return jnp.sum(jnp.sin(y)), y

        found, (grads, of_x) = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        )(given, x)
        grads["router"] = grads.pop("router_kernel")
    want, (want_grads, want_x) = wanted(case, params, x, mask, residual)
    want_grads.pop("router_bias", None)
    assert_equal((found, (grads, of_x)), (want, (want_grads, want_x)))


def shapes_of(tree):
    return jax.tree.map(lambda leaf: leaf.shape, tree)


@BY_KIND
def test_a_layer_without_a_router(kind, shape):
    """`routing` from another input, as in Gemma 4, and its own loss."""
    pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")
    from flax import nnx

    import jax_ep.flax.linen
    from support.flax_layers import fields, nnx_layer

    mesh = helpers.make_mesh(helpers.fit({"dp": 2, "ep": 2, "tp": 2}))
    params = moe_dense.params(shared=False)
    own = params.pop("router")
    case = CASES["given ids"]
    rng = np.random.default_rng(3)
    x, other = rng.standard_normal((2, *shape, HIDDEN)).astype(np.float32)
    how = {"router": False, "shared_intermediate_size": None}
    if kind == "nnx":
        layer = nnx_layer(mesh, params, **how)
        assert layer.router is None

        def call(params, x, **options):
            del params
            return layer(x, return_aux=True, **options)
    else:
        layer = jax_ep.flax.linen.MoE(**fields(mesh, **how))

        def call(params, x, **options):
            return layer.apply({"params": params}, x, return_aux=True, **options)

    def loss(own, x, other):
        found = jax_ep.router.route(other @ own, case.top_k, case.router)
        found = dataclasses.replace(found, loss=jnp.sum(found.probabilities**2))
        y, aux = call(params, x, routing=found)
        return jnp.sum(jnp.sin(y)) + aux.balance_loss, (y, aux, found)

    def dense(own, x, other):
        found = jax_ep.router.route(other @ own, case.top_k, case.router)
        chosen = jnp.sum(jax.nn.one_hot(found.ids, EXPERTS), -2) > 0
        weights = jnp.where(chosen, scores(case, other @ own), 0)
        weights = case.router.scale * weights / jnp.sum(weights, -1, keepdims=True)
        sides = jnp.einsum("bnh,ehcf->cbnef", x, params["gate_up"])
        h = moe_dense.swiglu(*sides)
        y = jnp.einsum("bne,bnef,efh->bnh", weights, h, params["down"])
        return jnp.sum(jnp.sin(y)) + jnp.sum(found.probabilities**2), y

    with jax.default_matmul_precision("highest"):
        every = (0, 1, 2)
        of_formula = jax.jit(jax.value_and_grad(dense, every, has_aux=True))
        want, wanted_grads = of_formula(own, x, other)
    of_layer = jax.jit(jax.value_and_grad(loss, every, has_aux=True))
    (value, (y, aux, found)), grads = of_layer(own, x, other)
    if kind == "nnx":
        assert "router" not in nnx.state(layer)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)
    np.testing.assert_allclose(y, want[1], rtol=0, atol=1e-5)
    for ours, theirs in zip(grads, wanted_grads, strict=True):
        limit = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * limit)
    np.testing.assert_allclose(aux.balance_loss, jnp.sum(found.probabilities**2), 1e-6)
    np.testing.assert_allclose(aux.load.sum(), 1, rtol=1e-6)
    with raises() as caught:
        call(params, x)
    assert "has no router (router=False), and calls need routing" in str(caught.value)


def ranks(**changes):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    return helpers.make_ep(mesh, config(**changes))


@pytest.mark.parametrize(
    ("case", "config_changes", "options", "words"),
    [
        ("no gate", {}, {"activation": None}, "experts without a gate have no default"),
        (
            "no gate",
            {},
            {"activation": clamped},
            "activation must be a function of (up",
        ),
        (
            "no gate",
            {},
            {"experts": jax_ep.experts.fp8},
            "experts must take a gate_up without a gate",
        ),
        (
            "identity",
            {},
            {"shared_activation": clamped},
            "shared_activation needs a shared expert",
        ),
        ("weights on inputs", {"top_k": 2}, {}, "needs top_k=1"),
        (
            "given ids",
            {},
            {"router": lambda logits: None},
            "router must be a jax_ep.router.Router with topk_ids",
        ),
        ("given ids", {"top_k": 2}, {}, "topk_ids must be [n, K] with n = 8 and K = 2"),
        ("identity", {}, {"num_identity_experts": -1}, "must be an int of at least 0"),
        ("identity", {}, {"num_identity_experts": 6}, "[E] with E = 22, got (23,)"),
    ],
)
def test_errors(case, config_changes, options, words):
    case = CASES[case]
    ep = ranks(**{"top_k": case.top_k, **config_changes})
    params, x = case.made(), np.zeros((N * ep.mesh.size, HIDDEN), np.float32)
    given = {"router": case.router, **case.options, **options}

    def body(params, x, ids):
        return jax_ep.moe_ffn(ep, x, params, topk_ids=ids, **given)

    specs = param_specs(params, None), P("ep"), P("ep")
    out = (P("ep"), jax_ep.MoEAux.specs("ep"))
    run = jax.shard_map(body, mesh=ep.mesh, in_specs=specs, out_specs=out)
    with raises() as caught:
        jax.jit(run)(params, x, case.given_ids(len(x)))
    message = str(caught.value)
    assert words in message
    assert message.startswith("jax_ep.moe_ffn: ")
