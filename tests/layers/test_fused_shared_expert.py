"""A fused shared expert in moe_ffn: group 0 is multiplied apart from the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from jax_ep._layers import expert_rows
from jax_ep.router import Router
from support import helpers, moe_dense
from support.moe_ffn import config, expert_parallel

pytestmark = pytest.mark.usefixtures("quick_compiles")

E, H, F, T = 8, 128, 128, 24


def parameters(biased):
    sizes = {"experts": E, "hidden": H, "inner": F, "shared_inner": F}
    return moe_dense.params(expert_bias=biased, **sizes)


def layer(run, fields, params):
    """A function of (params, tokens, mask) on global arrays, and its handle."""
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    sizes = {"num_experts": E, "hidden_size": H, "max_tokens_per_rank": T}
    given = {"fused_shared_expert": True, "dtype": "bfloat16", "top_k": 2} | fields
    ep = helpers.make_ep(mesh, config(**sizes, **given))
    return expert_parallel(mesh, ep, params, Router(), experts=run), ep


def as_ones_own(run):
    """`run` as a function that the layer does not know, which gets all groups."""

    def own(*args, **options):
        return run(*args, **options)

    known = getattr(run, "takes_dispatched", False)
    return experts.takes_dispatched(own) if known else own


CASES = {
    "ragged_dot": (experts.ragged_dot, {}, False),
    "biases": (experts.ragged_dot, {"dtype": "float32"}, True),
    "padded": (experts.Padded(32), {"expert_alignment": 7}, True),
    "auto": (None, {"dispatch_format": "mxfp8", "scale_layout": "tiled_128x4"}, False),
    "dropped": (experts.ragged_dot, {"recv_capacity": 40}, False),
    "nothing_else": (experts.ragged_dot, {"recv_capacity": 12}, False),
    "fp8": (experts.fp8, {"dispatch_format": "fp8_block128"}, True),
    "fp8_columns": (
        experts.fp8,
        {
            "dispatch_format": "fp8_block128",
            "scale_layout": "columns",
            "expert_alignment": 8,
        },
        False,
    ),
    "fp8_plain": (experts.fp8, {}, False),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_grouped_matmul(name):
    """For fewer tokens than T, some of them masked: results, drops and gradients."""
    run, fields, biased = CASES[name]
    params = parameters(biased)
    ones_own = as_ones_own(run or experts.auto)
    found = []
    for each in (run, ones_own):
        mapped, ep = layer(each, fields, params)
        n = 19 * ep.ep_size
        x = np.random.default_rng(1).standard_normal((n, H))
        x = jnp.asarray(x, ep.config.dtype)
        mask = np.arange(n) % 5 != 0

        def loss(params, x, mapped=mapped, mask=mask):
            y, aux = mapped(params, x, mask)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, aux.num_dropped)

        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, outs), grads = jax.jit(grad)(params, x)
        found.append((outs, grads))
    assert bool(np.asarray(found[0][0][1]).any()) == ("recv_capacity" in fields)
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        got, want = (np.asarray(value, np.float32) for value in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("name", ["ragged_dot", "padded", "fp8", "fp8_columns"])
def test_weights_are_not_copied(name):
    """No array has the matrices of all local experts and of the shared one."""
    run, fields, biased = CASES[name]
    params = parameters(biased)

    def found(run):
        mapped, ep = layer(run, fields, params)
        n, groups = T * ep.ep_size, E // ep.ep_size + 1
        given = jnp.zeros((n, H), ep.config.dtype), jnp.ones(n, bool)
        text = str(jax.make_jaxpr(mapped)(params, *given))
        return [f"[{groups},{shape}]" in text for shape in (f"{H},2,{F}", f"{F},{H}")]

    assert not any(found(run))
    assert all(found(as_ones_own(run)))


def test_no_call_without_rows():
    """If the shared expert's rows leave no room, the others are not called at all."""
    run, fields, biased = CASES["nothing_else"]
    params = parameters(biased)
    mapped, ep = layer(run, fields, params)
    n = T * ep.ep_size
    given = jnp.zeros((n, H), ep.config.dtype), jnp.ones(n, bool)
    text = str(jax.make_jaxpr(mapped)(params, *given))
    # Gate and up of the shared expert together, and down.
    assert text.count("name=_matmul") == 2


def test_a_part_of_a_dispatch_is_consistent():
    """Functions that take a whole `Dispatched` find all of its arrays fit together."""
    ep = helpers.make_ep(
        helpers.make_mesh(1),
        config(
            num_experts=E,
            hidden_size=H,
            max_tokens_per_rank=T,
            dtype="bfloat16",
            dispatch_format="fp8_block128",
            fused_shared_expert=True,
            expert_alignment=5,
        ),
    )
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.standard_normal((19, H)), jnp.bfloat16)
    ids = rng.permuted(np.tile(np.arange(E), (19, 1)), axis=1)[:, :3]
    weights = jnp.ones((19, 3))

    def both(tokens, ids, weights):
        d = jax_ep.dispatch(ep, tokens, ids, weights)
        split = expert_rows._split(d, 19, 5)
        return d, [expert_rows._part(d, *each) for each in split]

    mapped = jax.shard_map(both, mesh=ep.mesh, in_specs=P("ep"), out_specs=P("ep"))
    d, parts = jax.jit(mapped)(tokens, ids.astype(np.int32), weights)
    assert [part.group_sizes.shape for part in parts] == [(1,), (E,)]
    by_row = ("tokens", "scales", "src_info", "router_weights", "grad_port")
    for name in (*by_row, "group_sizes", "expert_counts", "expert_ids"):
        joined = jnp.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(d, name))
    for part in parts:
        offsets = np.asarray(part.row_offsets)
        assert offsets[0] == 0
        np.testing.assert_array_equal(np.diff(offsets), part.group_sizes)
    assert parts[0].row_offsets[1] == len(parts[0].tokens) == 20
