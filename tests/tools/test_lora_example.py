"""examples/lora.py: gradients are those of W + A B, and only adapters train."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import ROOT, helpers
from support.pages import python_blocks

pytest.importorskip("optax")
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def lora(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("lora")


def adapted(layer, own):
    """The matrices W + A B of gate, up and down, W being the values of the codes."""
    gate_up, down = layer["experts"].dequantized()
    gate, up = (
        gate_up[:, :, side] + own[name][0] @ own[name][1]
        for side, name in enumerate(("gate", "up"))
    )
    a, b = own["result"]
    return gate, up, down + down @ a @ b


def dense(lora, adapters, frozen, tokens):
    """The layers, with every expert for every token."""
    for own, layer in zip(adapters, frozen, strict=True):
        rows = lora.normalise(tokens)
        routing = jax_ep.router.route(rows @ layer["router"], lora.TOP_K)
        chosen = jax.nn.one_hot(routing.ids, layer["router"].shape[1])
        weights = jnp.einsum("nk,nke->ne", routing.weights, chosen)
        gate, up, down = adapted(layer, own)
        inner = jax.nn.silu(jnp.einsum("nh,ehf->nef", rows, gate))
        inner = inner * jnp.einsum("nh,ehf->nef", rows, up)
        tokens = tokens + jnp.einsum("nef,efh,ne->nh", inner, down, weights)
    return tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("weights", "exactly", "closely"),
    [("mxfp4", 1e-5, 5e-3), ("fp8_block128", 0.02, 0.1)],
)
def test_gradients_are_those_of_the_sums(lora, weights, exactly, closely):
    """docs/fp8.md says what is rounded.

    The backward pass has gate and up in bfloat16. With eight bits, rows and cotangents
    are codes as well.
    """
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    experts = 2 * mesh.size
    keys = jax.random.split(jax.random.key(3), 4)
    frozen = lora.make_frozen(mesh, keys[0], experts, weights)
    adapters = lora.make_adapters(mesh, keys[1], experts, 3, True, size=0.5)
    shape = 16 * mesh.size, lora.HIDDEN
    tokens, target = (jax.random.normal(key, shape) for key in keys[2:])

    def plain(adapters, tokens):
        return jnp.mean(jnp.square(dense(lora, adapters, frozen, tokens) - target))

    want = jax.jit(jax.value_and_grad(plain, (0, 1)))(adapters, tokens)
    sizes = {"num_experts": experts, "hidden_size": lora.HIDDEN, "top_k": lora.TOP_K}
    more = {"dtype": "float32", "dispatch_format": lora.DISPATCH[weights]}
    with helpers.init(mesh, **sizes, max_tokens_per_rank=16, **more) as ep:

        def own(adapters, tokens):
            return lora.loss(ep, adapters, frozen, tokens, target)

        found = jax.jit(jax.value_and_grad(own, (0, 1)))(adapters, tokens)
    np.testing.assert_allclose(found[0], want[0], rtol=exactly)
    for each, wanted in zip(*map(jax.tree.leaves, (found[1], want[1])), strict=True):
        assert np.linalg.norm(wanted) > 0
        off = np.linalg.norm(each - wanted) / np.linalg.norm(wanted)
        assert off < closely


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["--on-result"], 32),
        pytest.param(["--weights", "fp8_block128"], 128, marks=pytest.mark.slow),
    ],
)
def test_it_trains(lora, monkeypatch, capsys, words, size):
    changes = {"LAYERS": 1, "HIDDEN": size, "INNER": size, "TOKENS": 32}
    for name, value in changes.items():
        monkeypatch.setattr(lora, name, value)
    words = [*words, "--rank", "2", "--steps", "60", "--rate", "0.05"]
    assert lora.main(words) == 0
    assert "codes and routers are the same" in capsys.readouterr().out


def test_adapters_start_without_effect(lora):
    """B is zero at first, and so is the gradient of A."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    experts = 2 * mesh.size
    frozen = lora.make_frozen(mesh, jax.random.key(0), experts, "mxfp4")[:1]
    adapters = lora.make_adapters(mesh, jax.random.key(1), experts, 2, False)[:1]
    tokens = jax.random.normal(jax.random.key(2), (8 * mesh.size, lora.HIDDEN))
    sizes = {"num_experts": experts, "hidden_size": lora.HIDDEN, "top_k": lora.TOP_K}
    with helpers.init(mesh, **sizes, max_tokens_per_rank=8, dtype="float32") as ep:
        grad = jax.jit(jax.grad(functools.partial(lora.loss, ep)))
        (grads,) = grad(adapters, frozen, tokens, 0.0)
    for a, b in grads.values():
        assert not np.any(a)
        assert np.all(np.any(b, axis=(1, 2)))


def test_the_recipe_of_the_page_has_biases_and_an_activation():
    """docs/models.md: it gives what W + A B gives, in the experts of gpt-oss, too."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    count, hidden, inner, top_k = 2 * mesh.size, 64, 32, 2
    keys = iter(jax.random.split(jax.random.key(5), 12))

    def draw(*shape, size=None):
        return jax.random.normal(next(keys), shape) * (size or shape[-2] ** -0.5)

    tokens = draw(8 * mesh.size, hidden, size=1)
    params = {
        "router": draw(hidden, count),
        "gate": draw(count, hidden, inner),
        "up": draw(count, hidden, inner),
        "down": draw(count, inner, hidden),
    }
    biases = {
        "gate_bias": draw(count, inner),
        "up_bias": draw(count, inner),
        "down_bias": draw(count, hidden),
    }
    pairs = {
        name: (draw(count, hidden, 3), draw(count, 3, inner)) for name in ("gate", "up")
    }
    activation = jax_ep.experts.swiglu_clamped(alpha=1.702, limit=7.0)
    sizes = {"num_experts": count, "hidden_size": hidden, "top_k": top_k}
    with helpers.init(mesh, **sizes, max_tokens_per_rank=8, dtype="float32") as ep:
        names = {"jax": jax, "jnp": jnp, "jax_ep": jax_ep, "P": P, "ep": ep}
        names |= {"params": params, "tokens": tokens}
        exec(python_blocks("docs/models.md", "with_lora")[0], names)
        codes = names["codes"]
        run = jax.jit(functools.partial(names["tuned"], ep, activation=activation))
        experts = {"experts": codes} | biases
        found = run(pairs, {"router": params["router"]}, experts, tokens)
    for a, b in names["grads"].values():
        assert not np.any(a)
        assert np.any(b)
    gate_up, down = codes.dequantized()
    routing = jax_ep.router.route(tokens @ params["router"], top_k)
    chosen = jax.nn.one_hot(routing.ids, count)
    sides = [
        jnp.einsum("nh,ehf->nef", tokens, gate_up[:, :, side] + a @ b)
        + biases[f"{name}_bias"]
        for side, (name, (a, b)) in enumerate(pairs.items())
    ]
    y = jnp.einsum("nef,efh->neh", activation(*sides), down) + biases["down_bias"]
    want = jnp.einsum("nk,nke,neh->nh", routing.weights, chosen, y)
    np.testing.assert_allclose(found, want, atol=2e-5 * np.abs(want).max())
