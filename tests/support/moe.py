"""A small mixture-of-experts layer, expert-parallel and dense, for gradient tests."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers

ATOL = 2e-4  # for float32 gradients against the dense formula


@dataclasses.dataclass
class Setup:
    """A handle, and all ranks' operands as NumPy arrays."""

    mesh: Mesh
    ep: Any
    tokens: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    params: np.ndarray

    def global_arrays(self) -> tuple[jax.Array, ...]:
        """tokens, ids, weights, params, sharded on dim 0."""
        parts = self.tokens, self.ids, self.weights, self.params
        return tuple(helpers.put(self.mesh, [part]) for part in parts)


def setup(seed: int = 0, ranks: int | None = None, **changes: Any) -> Setup:
    """A float32 layer, by default over up to four devices."""
    mesh = helpers.make_mesh(ranks or helpers.some_ranks(4))
    config = helpers.make_config(**({"dtype": "float32"} | changes))
    ep = helpers.make_ep(mesh, config)
    rng = np.random.default_rng(seed)
    inputs = helpers.make_inputs(rng, config, ep.ep_size, fill=helpers.normal)
    assert inputs.weights is not None
    hidden = config.hidden_size
    params = helpers.normal(rng, (config.num_experts, hidden, hidden), np.float32)
    return Setup(
        mesh,
        ep,
        np.concatenate(inputs.tokens),
        np.concatenate(inputs.ids),
        np.concatenate(inputs.weights),
        (params / np.sqrt(hidden)).astype(inputs.tokens[0].dtype),
    )


def gathered_dot(rows: Any, params: Any, group_sizes: Any) -> Any:
    """jax.lax.ragged_dot in operations that have derivatives of every order."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
    chosen = jax.nn.one_hot(group, params.shape[0], dtype=rows.dtype)
    return jnp.einsum("ng,nh,ghf->nf", chosen, rows, params)


def layer(
    ep: Any, x: Any, ids: Any, weights: Any, params: Any, dot: Any = jax.lax.ragged_dot
) -> Any:
    """The layer on one rank, inside shard_map; params are the rank's experts."""
    d = jax_ep.dispatch(ep, x, ids, weights)
    rows = jnp.tanh(dot(d.tokens, params, d.group_sizes))
    row_weights = None if weights is None else d.router_weights
    return jax_ep.combine(ep, rows, d.route, router_weights=row_weights, residual=x)


def dense(x: Any, ids: Any, weights: Any, params: Any) -> Any:
    """The same layer on whole arrays, every expert on every token; -1 is no expert."""
    rows = jnp.tanh(jnp.einsum("th,ehf->tef", x, params))
    chosen = jax.nn.one_hot(ids, params.shape[0], dtype=x.dtype)
    if weights is not None:
        chosen = chosen * weights[..., None]
    return x + jnp.einsum("tke,tef->tf", chosen, rows)


def sharded(mesh: Mesh, fn: Callable[..., Any], *, check_vma: bool = True, **specs):
    """`fn` under shard_map, everything split on dim 0 unless `specs` say otherwise."""
    spec = P(tuple(mesh.axis_names))
    specs = {"in_specs": spec, "out_specs": spec} | specs
    return jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)


def wave(y: Any) -> Any:
    """A scalar whose cotangent differs from element to element."""
    y = y.astype(jnp.float32)
    return jnp.sum(jnp.sin(y) * (1 + jnp.arange(y.shape[-1]) / 8))


def loss(mesh: Mesh, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`wave` of the sharded layer, as a function of (tokens, weights, params, ids)."""
    run = sharded(mesh, fn, **options)
    return lambda x, w, p, ids: wave(run(x, ids, w, p))


def dense_loss(x: Any, w: Any, p: Any, ids: Any) -> Any:
    """What `loss` must equal."""
    return wave(dense(x, ids, w, p))


def assert_close(actual: Any, expected: Any, atol: float = ATOL) -> None:
    """Leaves are equal within `atol`, and none is trivially zero."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for got, want in pairs:
        got, want = helpers.float32(got), helpers.float32(want)
        assert np.max(np.abs(want)) > 10 * atol
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def check(s: Setup, fn: Callable[..., Any], reference: Callable[..., Any]) -> None:
    """`fn` and `reference` of (x, w, p, ids) have equal values and gradients."""
    x, ids, w, p = s.global_arrays()
    grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    actual = jax.jit(grad(fn))(x, w, p, ids)
    expected = jax.jit(grad(reference))(s.tokens, s.weights, s.params, s.ids)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=ATOL)
    assert_close(actual[1], expected[1])


# Matches one exchange in the text of a compiled program.
_EXCHANGE = {
    "collective": r" all-to-all(?:-start)?\(",
    "p2p": r'custom_call_target="ep_(?:dispatch|combine)(?:_cached|_send)?"',
}
_EXCHANGE["shmem"] = _EXCHANGE["p2p"]


def exchanges(compiled: Any) -> int:
    """How many exchanges a compiled program has."""
    return len(re.findall(_EXCHANGE[helpers.TRANSPORT], compiled.as_text()))


def region_words(compiled: Any) -> list[int]:
    """The uint32s that a rank sends another in each exchange of "collective"."""
    lines = re.findall(r"= (.*) all-to-all(?:-start)?\(", compiled.as_text())
    return [int(re.findall(r"u32\[(?:\d+,)*(\d+)\]", line)[0]) for line in lines]
