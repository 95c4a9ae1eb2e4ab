"""Rows past the groups are not cleared if a layer's experts never see them."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import experts
from jax_ep._experts import (
    devices,
    interface,
)
from jax_ep._transport import base
from jax_ep._transport.collective import Collective
from support import grouped_kernels, helpers
from support.call_order import p2p_handle
from support.grouped_kernels import F, H
from support.grouped_kernels import fake_kernels as fake_kernels

pytestmark = pytest.mark.usefixtures("quick_compiles")

N, E, K = 8, 4, 2
FIELDS: dict[str, Any] = {
    "hidden_size": H,
    "max_tokens_per_rank": N,
    "num_experts": E,
    "top_k": K,
    "dtype": "bfloat16",
}


class Poisoned(Collective):
    """Fills rows past the groups with NaN if they need not be cleared."""

    def __init__(self) -> None:
        self.poisoned: list[str] = []

    def dispatch(self, ep: Any, inputs: Any, zero_tail: Any, after: Any) -> Any:
        arrived, done = super().dispatch(ep, inputs, zero_tail, after)
        if zero_tail:
            return arrived, done
        self.poisoned.append("dispatch")
        tail = jnp.arange(ep.recv_capacity) >= arrived.row_offsets[-1]
        return arrived._replace(
            tokens=with_nan(arrived.tokens, tail),
            scales=None if arrived.scales is None else with_nan(arrived.scales, tail),
        ), done

    def dispatch_cached(
        self, ep: Any, route: Any, x: Any, w: Any, wire: Any, zero_tail: Any, after: Any
    ) -> Any:
        (rows, weights), done = super().dispatch_cached(
            ep, route, x, w, wire, zero_tail, after
        )
        if not zero_tail:
            self.poisoned.append("cached")
            rows = with_nan(rows, route.row_slot < 0)
        return (rows, weights), done


def with_nan(rows: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(where[:, None], jnp.asarray(jnp.nan, rows.dtype), rows)


def parameters(rng: np.random.Generator) -> dict[str, jax.Array]:
    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * 0.1, jnp.bfloat16)

    return {
        "router": normal(H, E),
        "gate_up": normal(E, H, 2, F),
        "down": normal(E, F, H),
        "down_bias": normal(E, H),
    }


SPECS = {
    "router": P(),
    "gate_up": P("ep"),
    "down": P("ep"),
    "down_bias": P("ep"),
}


def both_ways(mesh: Any, ep: Any, **options: Any) -> Any:
    """A layer's results and gradients."""

    def layer(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            return jax_ep.moe_ffn(ep, x, params, **options)[0]

        return jax.shard_map(
            body, mesh=mesh, in_specs=(SPECS, P("ep")), out_specs=P("ep")
        )(params, x)

    def run(params: Any, x: Any) -> Any:
        y, back = jax.vjp(layer, params, x)
        return y, back(jnp.cos(y))

    return jax.jit(run)


def clipped(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.clip(gate, -1, 1) * up


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["auto", "hopper", "fp8"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [({}, {}), ({"fused_shared_expert": True}, {}), ({}, {"activation": clipped})],
)
def test_what_is_left_changes_nothing(
    name, fields, options, fake_kernels, monkeypatch
) -> None:
    mesh = helpers.make_mesh(2)
    rng = np.random.default_rng(0)
    params = parameters(rng)
    specs = dict(SPECS)
    if fields:
        params |= {
            "shared_gate_up": params["gate_up"][0],
            "shared_down": params["down"][0],
        }
        specs |= {"shared_gate_up": P(), "shared_down": P()}
    monkeypatch.setitem(globals(), "SPECS", specs)
    x = jnp.asarray(rng.standard_normal((2 * N, H)), jnp.bfloat16)
    if name == "fp8":
        fields = fields | {"dispatch_format": "fp8_block128"}
    run = None if name == "auto" else getattr(experts, name)
    results = []
    poisoned = Poisoned()
    for transport in (Collective(), poisoned):
        monkeypatch.setitem(base._registry, "collective", transport)
        config = helpers.make_config(**FIELDS | fields)
        with jax_ep.init(mesh, "ep", config, "collective") as ep:
            results.append(both_ways(mesh, ep, experts=run, **options)(params, x))
    assert {"dispatch", "cached"} == set(poisoned.poisoned)
    want, found = map(jax.tree.leaves, results)
    for a, b in zip(found, want, strict=True):
        assert np.asarray(b, np.float32).any()
        helpers.assert_bits(a, b)


def cleared(text: str) -> dict[str, bool]:
    """For each dispatch of a program, whether it clears rows past the groups."""
    found = re.findall(r"@(ep_dispatch\w*)\(.*?zero_tail = (true|false)", text)
    return {target: value == "true" for target, value in found}


ALL = {"ep_dispatch": True, "ep_dispatch_cached": True}
NONE = dict.fromkeys(ALL, False)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "fields", "hopper", "want"),
    [
        ({}, {}, True, NONE),
        ({}, {}, False, ALL),
        ({"experts": experts.fp8}, {}, False, NONE),
        ({"experts": experts.ragged_dot}, {}, True, ALL),
        ({"experts": experts.Padded(8)}, {}, True, ALL),
        ({"activation": clipped}, {}, True, NONE),
        # Padding between groups, which a route cannot tell from the tail.
        ({}, {"expert_alignment": 8}, True, NONE | {"ep_dispatch_cached": True}),
        # Cotangents are zero there, whatever the config says about rows.
        ({}, {"zero_tail": False}, False, ALL | {"ep_dispatch": False}),
    ],
)
def test_who_asks_for_zeros(options, fields, hopper, want, monkeypatch) -> None:
    if jax.default_backend() != "cpu":
        # A handle of the collective transport lowers like one of p2p, on devices
        # without Hopper kernels.
        pytest.skip("imagines p2p on CPU devices")
    if hopper:
        grouped_kernels.pretend(monkeypatch)
    assert (devices.device_obstacle() is None) == hopper
    mesh = helpers.make_mesh(2)
    ep = p2p_handle(mesh, **FIELDS | fields)
    x = jax.ShapeDtypeStruct((2 * N, H), jnp.bfloat16)
    params = jax.eval_shape(lambda: parameters(np.random.default_rng(0)))
    text = both_ways(mesh, ep, **options).lower(params, x).as_text()
    assert cleared(text) == want


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hopper", "fp8"])
def test_windows_leave_what_memory_held(name, monkeypatch) -> None:
    """Real kernels in memory that held NaN give the same as with cleared rows."""
    grouped_kernels.skip_without_hopper()
    mesh = helpers.make_mesh(jax.device_count())
    rng = np.random.default_rng(0)
    experts_of_all = E * mesh.size
    params = {
        key: value if key == "router" else jnp.concatenate([value] * mesh.size)
        for key, value in parameters(rng).items()
    }
    params["router"] = jnp.asarray(
        rng.standard_normal((H, experts_of_all)), jnp.bfloat16
    )
    x = jnp.asarray(rng.standard_normal((mesh.size * N, H)), jnp.bfloat16)
    fields = FIELDS | {"num_experts": experts_of_all, "recv_capacity": 64 * N * K}
    if name == "fp8":
        fields["dispatch_format"] = "fp8_block128"
    ep = helpers.make_ep(mesh, helpers.make_config(**fields))

    def run() -> Any:
        held = [
            jax.device_put(np.full((64 * N * K, H), np.nan, np.float32), device)
            for device in mesh.devices.flat
            for _ in range(8)
        ]
        jax.block_until_ready(held)
        del held
        return jax.tree.leaves(
            both_ways(mesh, ep, experts=getattr(experts, name))(params, x)
        )

    found = run()
    kind = type(getattr(experts, name))
    monkeypatch.setattr(kind, "reads_tail", lambda *_: True)
    for a, b in zip(found, run(), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.isfinite(b).all()
        # XLA fuses the two programs differently: they differ by a few bfloat16 units.
        np.testing.assert_allclose(a, b, rtol=2**-5, atol=2**-7 * np.abs(b).max())


def test_other_functions_see_them() -> None:
    """Also functions that wrap one of the library's, as they may read the rows."""
    case = interface.Case(jax.devices()[0], "bfloat16")

    def reads_tail(run: Any) -> bool:
        return interface.of(run).reads_tail(case)

    assert reads_tail(lambda *args: experts.fp8(*args))
    assert not reads_tail(experts.fp8)
    assert not reads_tail(functools.partial(experts.fp8, activation=clipped))
    assert reads_tail(functools.partial(experts.fp8, down_bias=0))
