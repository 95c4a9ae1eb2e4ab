"""What the options refuse, and how init handles them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from support import helpers, options, oracle
from support.errors import check_form, raises


def trace(ep: Any, mesh: Any, **given: Any) -> None:
    """Traces a dispatch and a combine of 4 tokens per rank with these keywords."""
    config = ep.config

    def body(x: Any, ids: Any) -> Any:
        d = jax_ep.dispatch(ep, x, ids)
        return jax_ep.combine(ep, d.tokens, d.route, **given)

    x = jnp.zeros((4 * mesh.size, config.hidden_size), config.dtype)
    ids = jnp.zeros((4 * mesh.size, config.top_k), jnp.int32)
    jax.eval_shape(
        jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), x, ids
    )


def array(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, oracle.DTYPES[dtype])


@pytest.mark.parametrize(
    ("mode", "given", "words"),
    [
        ("none", {"router_weights": array(96)}, ("router_weights", "none")),
        ("none", {"residual": array(4, 16, dtype="bfloat16")}, ("residual", "none")),
        ("local", {"residual": array(4, 16, dtype="bfloat16")}, ("residual", "psum")),
        ("local_none", {"router_weights": array(96)}, ("router_weights", "none")),
        (
            "source",
            {"router_weights": array(96)},
            ("router_weights", "[n, K] with n = 4", "96"),
        ),
        ("source", {"router_weights": np.zeros((4, 3), np.int32)}, ("float32",)),
        ("shared", {"router_weights": array(4, 3)}, ("router_weights", "(4, 3)")),
    ],
)
def test_combine(mode: str, given: Any, words: Any) -> None:
    mesh = helpers.make_mesh(2)
    ep = helpers.make_ep(mesh, helpers.make_config(**options.MODES[mode]))
    with raises() as caught:
        trace(ep, mesh, **given)
    check_form(caught, "combine", *words)


@pytest.mark.parametrize("alignment", [1, 8])
def test_default_capacity(alignment: int) -> None:
    """T = 8 tokens, K = 3, and L = 12 or 1 experts on each of 2 or 24 ranks."""
    for ranks, fewest in ((2, 3), (24, 1)):
        local, padding = 24 // ranks, alignment - 1
        plain = ranks * 8 * fewest + local * padding
        alone = 8 * fewest + local * padding
        for changes, rows in (
            ({}, plain),
            (options.SOURCE, plain),
            (options.NONE, plain),
            (options.FUSED, plain + padding + 8),
            (options.SKIP, alone),
            (options.SKIP | options.FUSED, alone + padding + 8),
        ):
            config = helpers.make_config(expert_alignment=alignment, **changes)
            assert config.capacity(ranks) == rows


def test_sizes_of_a_handle() -> None:
    mesh = helpers.make_mesh(4)
    for mode, groups, ranks in (
        ("shared", 7, 4),
        ("local", 6, 1),
        ("local_shared", 7, 1),
    ):
        changes = options.MODES[mode]
        changes = changes | {"allreduce_world_size": 4}
        ep = helpers.make_ep(mesh, helpers.make_config(**changes))
        assert (ep.groups, ep.route_ranks, ep.local_experts) == (groups, ranks, 6)
        # Without an exchange there are no windows.
        windows = helpers.TRANSPORT == "p2p" and ranks > 1
        assert (ep.buffer_bytes > 0) == windows


def test_skip_a2a_exchanges_nothing() -> None:
    mesh = helpers.make_mesh(2)
    for mode in ("local", "local_source", "local_shared"):
        ep = helpers.make_ep(mesh, helpers.make_config(**options.MODES[mode]))

        def loss(x: Any, ids: Any, ep: Any = ep) -> Any:
            d = jax_ep.dispatch(ep, x, ids)
            y = jax_ep.combine(ep, d.tokens, d.route)
            return jnp.sum(y.astype(jnp.float32))[None]

        def grad(x: Any, ids: Any, loss: Any = loss) -> Any:
            run = jax.shard_map(loss, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
            return jax.grad(lambda x: jnp.sum(run(x, ids)))(x)

        x = jnp.zeros((8, 16), jnp.bfloat16)
        ids = jnp.zeros((8, 3), jnp.int32)
        text = jax.jit(grad).lower(x, ids).compile().as_text()
        assert "ep_dispatch_pack" in text
        assert "all-to-all" not in text
