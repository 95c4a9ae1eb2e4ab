"""jax_ep.flax's layers with tokens of every format on the wire."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jax_ep
from support import helpers

pytest.importorskip("flax", reason="needs pip install 'jax_ep[flax]'")

from flax import nnx

import jax_ep.flax
import jax_ep.flax.linen
from support.flax_layers import BATCH, LENGTH, fields

pytestmark = pytest.mark.usefixtures("quick_compiles")

HIDDEN = 128


def run(name, x, input_scale=None, kind="nnx"):
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    options = fields(mesh, hidden_size=HIDDEN, dispatch_format=name)
    options["shared_intermediate_size"] = None
    if kind == "nnx":
        layer = jax_ep.flax.MoE(**options, rngs=nnx.Rngs(0))
        return np.asarray(layer(x, input_scale=input_scale))
    linen = jax_ep.flax.linen.MoE(**options)
    variables = jax.jit(linen.init)(jax.random.key(0), x)
    return np.asarray(linen.apply(variables, x, input_scale=input_scale))


def tokens():
    rng = np.random.default_rng(0)
    return rng.standard_normal((BATCH, LENGTH, HIDDEN)).astype(np.float32)


def error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.fixture(scope="module")
def plain(quick_compiles):
    return run("bf16", tokens())


@pytest.mark.parametrize("name", jax_ep.formats.names())
def test_every_format(name, plain):
    found = error(run(name, tokens()), plain)
    low, high = (0, 1e-6) if name == "bf16" else (1e-3, 0.3)
    assert low <= found < high


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_a_global_scale_carries_small_tokens(kind):
    x = tokens() / 2**13  # nvfp4's block scales, in e4m3, end at 2**-9
    want = run("bf16", x, kind=kind)
    scaled = run("nvfp4", x, np.float32(2**13), kind)
    assert error(scaled, want) < 0.3
    assert not run("nvfp4", x, kind=kind).any()
