"""The kernel that chooses experts, against the router in plain JAX.

On machines without a GPU a stand-in replaces the kernel and takes its arguments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import router as routers
from jax_ep._core import batching
from jax_ep._native import tables
from jax_ep._ops import router_choice
from jax_ep.router import Router, route
from support import helpers

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROUTERS = {
    "plain": Router(),
    "softmax as is": Router(normalize=False),
    "deepseek v2": Router(num_groups=4, top_groups=2, best_of_group=1, scale=16.0),
    "deepseek v3": Router(score="sigmoid", num_groups=4, top_groups=2, scale=2.5),
    "sigmoid as is": Router(score="sigmoid", normalize=False, scale=np.float32(3)),
    "no limit": Router(score="sigmoid", num_groups=4, top_groups=4),
    "deepseek v4": Router(score="sqrtsoftplus", scale=1.5),
}
BY_NAME = pytest.mark.parametrize("router", ROUTERS.values(), ids=list(ROUTERS))


class _Found(NamedTuple):
    ids: jax.Array
    weights: jax.Array


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of logits with which the kernel was called."""
    made, true_call = [], tables.call

    def call(
        target: Any,
        like: Any,
        dims: Any,
        operands: Any,
        attributes: Any,
        config: Any = None,
    ) -> Any:
        if target == "ep_router":
            made.append(operands["logits"].shape)
        if target != "ep_router" or jax.default_backend() == "gpu":
            return true_call(target, like, dims, operands, attributes, config)
        bias = operands["bias"]
        assert bias is None or bias.dtype == jnp.float32
        given = dict(attributes)
        least = given.pop("least_sum")
        assert least in (0.0, routers._LEAST_SUM)
        one = Router(normalize=least > 0, **given)
        logits = operands["logits"]
        scores = routers._scores(one, logits)
        chosen = routers._chosen(one, dims["K"], scores, logits, bias)
        return _Found(*chosen)

    monkeypatch.setattr(tables, "call", call)
    if jax.default_backend() != "gpu":
        names = frozenset({"ep_router"})
        monkeypatch.setattr(router_choice.ffi, "gpu_target_names", lambda: names)
        monkeypatch.setattr(
            router_choice,
            "on_gpus",
            lambda kernel, plain, *given: batching.in_turn(kernel)(*given),
        )
    return made


def drawn(n: int, experts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = (2 * rng.standard_normal((n, experts))).astype(np.float32)
    return logits, (0.2 * rng.standard_normal(experts)).astype(np.float32)


RANKS = P("ep")


def in_ranks(body: Any, *specs: Any, out: Any = RANKS) -> Any:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out))


def assert_same(found: Any, want: Any) -> None:
    np.testing.assert_array_equal(found.ids, want.ids)
    np.testing.assert_allclose(found.weights, want.weights, rtol=2e-6)
    np.testing.assert_allclose(found.probabilities, want.probabilities, rtol=2e-6)


@pytest.mark.few(6)
@pytest.mark.parametrize("bias_dtype", [None, "float32", "bfloat16"])
@BY_NAME
def test_equals_the_plain_router(
    router: Router, bias_dtype: str | None, calls: Any
) -> None:
    logits, bias = drawn(26, 48)
    mask = np.arange(26) % 5 != 0
    bias = None if bias_dtype is None else jnp.asarray(bias, bias_dtype)
    given = {"bias": bias, "mask": mask}
    want = route(logits, 3, router, **given)
    assert not calls, "outside of shard_map"

    def body(logits: Any, mask: Any, bias: Any) -> Any:
        return route(logits, 3, router, bias=bias, mask=mask)

    run = in_ranks(body, P("ep"), P("ep"), P())
    found = run(np.where(mask[:, None], logits, np.nan), mask, given["bias"])
    assert calls
    assert_same(found, want)


@pytest.mark.few(1)
@BY_NAME
def test_gradients(router: Router, calls: Any) -> None:
    """First and second gradients, and forward mode, equal the plain router's."""
    logits, bias = drawn(6, 16)

    def loss(logits: Any, bias: Any) -> Any:
        found = route(logits, 2, router, bias=bias)
        return jnp.sum(jnp.sin(3 * found.weights)) + jnp.sum(found.probabilities**2)

    def squares(logits: Any, bias: Any) -> Any:
        return jnp.sum(jax.grad(loss)(logits, bias) ** 2)

    def forward(logits: Any, bias: Any) -> Any:
        along = jnp.arange(logits.size, dtype=logits.dtype).reshape(logits.shape)
        return jax.jvp(lambda each: loss(each, bias), (logits,), (along,))[1]

    for make in (jax.grad(loss), jax.grad(squares), forward):
        calls.clear()
        want = jax.jit(make)(logits, bias)
        assert not calls
        found = in_ranks(make, P(), P(), out=P())(logits, bias)
        assert calls
        assert np.any(want)
        largest = float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * largest)


def test_vmap(calls: Any) -> None:
    logits, bias = drawn(12, 16)
    batch = logits.reshape(3, 4, 16)
    run = in_ranks(
        jax.vmap(lambda each, bias: route(each, 2, bias=bias), (0, None)),
        P(),
        P(),
        out=P(),
    )
    found, want = run(batch, bias), route(logits, 2, bias=bias)
    assert set(calls) == {(4, 16)}
    np.testing.assert_array_equal(found.ids.reshape(12, 2), want.ids)
    np.testing.assert_allclose(found.weights.reshape(12, 2), want.weights, rtol=2e-6)


def test_the_platform_decides_when_a_program_is_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a program may be exported for another platform, or for several."""
    names = frozenset({"ep_router"})
    monkeypatch.setattr(router_choice.ffi, "gpu_target_names", lambda: names)
    logits, bias = drawn(12, 16)
    each = jax.vmap(lambda each, bias: route(each, 2, bias=bias), (0, None))
    run = in_ranks(each, P(), P(), out=P())
    traced = run.trace(logits.reshape(3, 4, 16), bias)
    for platforms, calls in ((("cpu",), 0), (("cuda",), 3), (("cpu", "cuda"), 3)):
        text = traced.lower(lowering_platforms=platforms).as_text()
        assert text.count("@ep_router(") == calls, platforms


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("experts", "top_k", "num_groups", "taken"),
    [
        (1024, 32, 32, True),
        (1056, 2, 1, False),
        (64, 33, 1, False),
        (66, 2, 33, False),
    ],
)
def test_what_the_kernel_has_room_for(
    experts: int, top_k: int, num_groups: int, taken: bool, calls: Any
) -> None:
    """Plain JAX does what the kernel would refuse."""
    logits, _ = drawn(4, experts)
    router = Router(num_groups=num_groups, top_groups=max(num_groups - 1, 1))
    want = route(logits, top_k, router)
    found = in_ranks(lambda each: route(each, top_k, router), P("ep"))(logits)
    assert bool(calls) == taken
    assert_same(found, want)


def test_axes_that_are_not_manual(calls: Any) -> None:
    """Not used over axes that are not manual, as XLA could not split the call."""
    mesh = helpers.make_mesh(helpers.fit({"ep": 2, "tp": 1}), kind=AxisType.Auto)
    logits, _ = drawn(8, 16)
    run = jax.shard_map(
        lambda each: route(each, 2),
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
        axis_names={"ep"},
    )
    assert_same(jax.jit(run)(logits), route(logits, 2))
    assert not calls


def test_layers_use_it(calls: Any) -> None:
    mesh = helpers.make_mesh(helpers.some_ranks(2))
    ep = helpers.init(mesh, num_experts=16, top_k=2)
    n, hidden = ep.config.max_tokens_per_rank * mesh.size, ep.config.hidden_size
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.standard_normal((n, hidden)), ep.config.dtype)
    params = {
        "router": jnp.asarray(rng.standard_normal((hidden, 16)), jnp.float32),
        "gate_up": jnp.zeros((16, hidden, 2, 8), ep.config.dtype),
        "down": jnp.zeros((16, 8, hidden), ep.config.dtype),
    }
    program = jax.shard_map(
        lambda tokens, params: jax_ep.moe_ffn(ep, tokens, params)[0],
        mesh=mesh,
        in_specs=(P("ep"), {"router": P(), "gate_up": P("ep"), "down": P("ep")}),
        out_specs=P("ep"),
    )
    jax.block_until_ready(jax.jit(program)(tokens, params))
    assert calls == [(ep.config.max_tokens_per_rank, 16)]


def fits(router: Router, experts: int) -> bool:
    """Whether experts divide into the router's groups, and fill each group's sum."""
    per_group, rest = divmod(experts, router.num_groups)
    limited = router.top_groups < router.num_groups
    return not rest and (not limited or router.best_of_group <= per_group)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [0, 1, 1000])
@pytest.mark.parametrize(
    ("name", "experts"),
    [
        (name, experts)
        for name, router in ROUTERS.items()
        for experts in (1, 8, 32, 100, 256, 1024)
        if fits(router, experts)
    ],
)
def test_kernel(name: str, experts: int, n: int) -> None:
    """Ids of distinct scores, and ties; more tokens than warps."""
    router = ROUTERS[name]
    top_k = min(8, experts // router.num_groups * router.top_groups)
    for logits, bias in (
        drawn(n, experts),
        (np.zeros((n, experts), np.float32), np.zeros(experts, np.float32)),
    ):
        plain = jax.jit(functools.partial(route, top_k=top_k, router=router))
        want = plain(logits, bias=bias)
        found = in_ranks(
            lambda each, bias: route(each, top_k, router, bias=bias),
            P(),
            P(),
            out=P(),
        )(logits, bias)
        same = np.asarray(found.ids) == np.asarray(want.ids)
        # Two scores may be one unit in the last place apart.
        assert same.mean() > 0.999 if n else same.size == 0
        np.testing.assert_allclose(
            np.asarray(found.weights)[same], np.asarray(want.weights)[same], rtol=3e-6
        )


@pytest.mark.gpu
def test_kernel_with_nan_and_infinities() -> None:
    logits, _ = drawn(5, 40)
    logits[0] = np.nan
    logits[1, 7] = np.nan
    logits[2, 9] = np.inf
    logits[3, 3:] = -np.inf
    found = in_ranks(lambda each: route(each, 4), P(), out=P())(logits)
    ids, weights = np.asarray(found.ids), np.asarray(found.weights)
    for row in range(5):
        assert len(set(ids[row])) == 4
        assert ids[row].min() >= 0
        assert ids[row].max() < 40
    assert np.isnan(weights[:3]).all()
    assert set(ids[3][:3]) == {0, 1, 2}
    np.testing.assert_allclose(weights[3:].sum(axis=1), 1, rtol=1e-6)
