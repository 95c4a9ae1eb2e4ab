"""jax_ep.router against a transcription of its docstrings into loops of NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.router import Router, losses, route, update_bias
from support.errors import check_form, raises

pytestmark = pytest.mark.usefixtures("quick_compiles")

N, EXPERTS, TOP_K = 24, 16, 3

ROUTERS = {
    "plain": Router(),
    "softmax as is": Router(normalize=False),
    "scaled": Router(scale=1.5),
    "deepseek v2": Router(
        normalize=False, num_groups=4, top_groups=2, best_of_group=1, scale=16.0
    ),
    "deepseek v3": Router(score="sigmoid", num_groups=4, top_groups=2, scale=2.5),
    "sigmoid as is": Router(score="sigmoid", normalize=False, scale=np.float32(3)),
    "best three": Router(num_groups=4, top_groups=1, best_of_group=3),
    "whole groups": Router(num_groups=2, top_groups=1, best_of_group=8),
    "no limit": Router(score="sigmoid", num_groups=4, top_groups=4),
    "deepseek v4": Router(score="sqrtsoftplus", scale=1.5),
    "sqrtsoftplus as is": Router(score="sqrtsoftplus", normalize=False),
}
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def reference(logits, top_k, router, bias=None, mask=None):
    """(ids, weights, probabilities), token by token in float64."""
    n, experts = logits.shape
    bias = np.zeros(experts) if bias is None else bias
    ids, weights = np.full((n, top_k), -1), np.zeros((n, top_k))
    probabilities = np.zeros((n, experts))
    for token, row in enumerate(np.asarray(logits, np.float64)):
        if router.score == "softmax":
            scores = np.exp(row - row.max())
            scores = scores / scores.sum()
        elif router.score == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        else:
            scores = np.sqrt(np.log1p(np.exp(row)))
        probabilities[token] = scores / scores.sum()
        if mask is not None and not mask[token]:
            continue
        groups = np.split(np.arange(experts), router.num_groups)
        value = [
            sum(sorted((scores + bias)[group])[-router.best_of_group :])
            for group in groups
        ]
        best = sorted(range(len(groups)), key=lambda g: (-value[g], g))
        allowed = np.concatenate([groups[g] for g in best[: router.top_groups]])
        order = sorted(allowed, key=lambda e: (-(scores + bias)[e], e))
        ids[token] = order[:top_k]
        taken = scores[ids[token]]
        if router.normalize is not False and top_k > 1:
            taken = taken / taken.sum()
        weights[token] = taken * router.scale
    return ids, weights, probabilities


def reference_losses(logits, ids, probabilities):
    """(balance_loss, z_loss, load) of the decisions of `reference`."""
    experts, real = logits.shape[1], ids[:, 0] >= 0
    load, mass, z = np.zeros(experts), np.zeros(experts), 0.0
    for token in np.flatnonzero(real):
        for expert in ids[token]:
            load[expert] += 1 / (real.sum() * ids.shape[1])
        mass += probabilities[token] / real.sum()
        z += np.log(np.exp(logits[token].astype(float)).sum()) ** 2 / real.sum()
    return experts * (load * mass).sum(), z, load


def drawn(seed, spread=2.0):
    """Logits, a bias of the size of scores, and a mask."""
    rng = np.random.default_rng(seed)
    logits = (spread * rng.standard_normal((N, EXPERTS))).astype(np.float32)
    bias = (0.2 * rng.standard_normal(EXPERTS)).astype(np.float32)
    return logits, bias, rng.random(N) < 0.7


@pytest.mark.few(3)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_every_field_against_the_transcription(name, biased, masked):
    router = ROUTERS[name]
    for seed in range(3):
        logits, bias, mask = drawn(seed)
        given = {"bias": bias if biased else None, "mask": mask if masked else None}
        found = route(logits, TOP_K, router, **given)
        ids, weights, probabilities = reference(logits, TOP_K, router, **given)
        assert (found.ids.dtype, found.weights.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(found.ids, ids)
        np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
        real = mask if masked else np.ones_like(mask)
        np.testing.assert_allclose(
            found.probabilities[real], probabilities[real], rtol=1e-5
        )
        np.testing.assert_array_equal(found.logits, logits)
        told = losses(found)
        balance, z, load = reference_losses(logits, ids, probabilities)
        np.testing.assert_allclose(told.balance_loss, balance, rtol=1e-5)
        np.testing.assert_allclose(told.z_loss, z, rtol=1e-5)
        np.testing.assert_allclose(told.load, load, rtol=1e-5)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ROUTERS["best three"], Router(num_groups=4, top_groups=1)),
        (ROUTERS["deepseek v2"], Router(num_groups=4, top_groups=2)),
        (ROUTERS["deepseek v3"], Router(score="sigmoid")),
    ],
)
def test_what_the_transcription_can_tell_apart(one, other):
    """Different routers choose differently here, so that tests tell them apart."""
    logits, _, _ = drawn(0)
    a, b = (reference(logits, TOP_K, router)[0] for router in (one, other))
    assert (a != b).any()


@pytest.mark.parametrize("score", SCORES)
def test_equal_scores_go_to_the_lower_expert(score):
    router = Router(score=score, num_groups=4, top_groups=2)
    found = route(np.zeros((2, EXPERTS), np.float32), 3, router)
    np.testing.assert_array_equal(found.ids, [[0, 1, 2]] * 2)


@pytest.mark.parametrize("score", SCORES)
def test_the_bias_chooses_and_weighs_nothing(score):
    """Experts that the bias forces on all tokens have weights from their scores."""
    logits, _, _ = drawn(1)
    bias = np.where(np.isin(np.arange(EXPERTS), (4, 9, 11)), 10, 0).astype(np.float32)
    router = Router(score=score, normalize=False)

    def weigh(logits, bias):
        found = route(logits, TOP_K, router, bias=bias)
        return jnp.sum(found.weights * (1 + jnp.arange(TOP_K))), found

    both = jax.value_and_grad(weigh, argnums=(0, 1), has_aux=True)
    (_, found), (dlogits, dbias) = both(logits, bias)
    assert (np.sort(found.ids, axis=1) == [4, 9, 11]).all()
    score = {
        "softmax": jax.nn.softmax,
        "sigmoid": jax.nn.sigmoid,
        "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    }[score]
    own = np.take_along_axis(np.asarray(score(logits)), np.asarray(found.ids), axis=1)
    np.testing.assert_allclose(found.weights, own, rtol=1e-6)
    assert np.abs(dlogits).max() > 0
    assert not np.asarray(dbias).any()


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_that_all_underflow(normalize, score):
    """Shares of them are those of powers of e, and NaN is nowhere."""
    logits, _, _ = drawn(2)
    logits[5] = -500
    router = Router(score=score, normalize=normalize)

    def weigh(logits):
        found = route(logits, TOP_K, router)
        factor = 1 + jnp.arange(EXPERTS)
        total = jnp.sum(found.weights * factor[:TOP_K])
        return total + jnp.sum(found.probabilities * factor), found

    (_, found), grad = jax.value_and_grad(weigh, has_aux=True)(logits)
    assert np.isfinite(grad).all()
    share = 1 / TOP_K if normalize else 0
    np.testing.assert_allclose(found.weights[5], np.full(TOP_K, share), rtol=1e-6)
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-5)
    # An expert that is masked out gets nothing, even where there is no other.
    outside = route(np.full((1, EXPERTS), -np.inf, np.float32), TOP_K, router)
    assert not np.asarray(outside.weights).any()
    assert not np.asarray(outside.probabilities).any()
    told = losses(found)
    assert np.isfinite([told.balance_loss, told.z_loss]).all()


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("level", [-10.0, -20.0, -25.0, -37.0, -80.0])
def test_small_scores(level, score):
    """Weights and their gradients are as for large ones, however small the sum."""
    logits, _, _ = drawn(3, 0.5)
    logits = np.round(logits * 1024) / np.float32(1024)  # so that sums are exact
    router = Router(score=score)

    def weigh(logits, level):
        found = route(logits + level, TOP_K, router)
        return jnp.sum(found.weights * (1 + jnp.arange(TOP_K))), found

    grad = jax.value_and_grad(weigh, has_aux=True)
    (_, found), slopes = grad(logits, level)
    np.testing.assert_allclose(found.weights.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-5)
    _, want, _ = reference(logits.astype(np.float64) + level, TOP_K, router)
    np.testing.assert_allclose(found.weights, want, rtol=1e-4)
    # The shares of small scores do not depend on the level.
    _, wanted = grad(logits, -25.0)
    if level <= -25:
        np.testing.assert_allclose(slopes, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.few(6)
@pytest.mark.parametrize("n", [0, N])
@pytest.mark.parametrize("name", ROUTERS)
def test_no_token_at_all(name, n):
    """An empty batch, or one of only padding, has losses 0 with gradients 0."""
    logits, bias, _ = drawn(4)

    def total(logits):
        given = {"bias": bias, "mask": np.zeros(n, bool)}
        found = route(logits, TOP_K, ROUTERS[name], **given)
        told = losses(found)
        return told.balance_loss + told.z_loss + found.weights.sum(), (found, told)

    (_, (found, told)), grad = jax.value_and_grad(total, has_aux=True)(logits[:n])
    assert (np.asarray(found.ids) == -1).all()
    for array in (found.weights, told.balance_loss, told.z_loss, told.load, grad):
        assert not np.asarray(array).any()
    assert told.load.shape == (EXPERTS,)


def test_masked_tokens_have_no_weight_and_no_gradient():
    logits, _, mask = drawn(5)

    def total(logits):
        found = route(logits, TOP_K, mask=mask)
        told = losses(found)
        return jnp.sum(jnp.sin(found.weights)) + told.balance_loss + told.z_loss, found

    (_, found), grad = jax.value_and_grad(total, has_aux=True)(logits)
    assert 0 < mask.sum() < N
    np.testing.assert_array_equal(np.any(np.asarray(found.weights), axis=1), mask)
    np.testing.assert_array_equal(np.any(np.asarray(grad), axis=1), mask)


@pytest.mark.parametrize("score", SCORES)
def test_masked_tokens_may_be_nan(score):
    """NaN in masked tokens, as from attention rows without keys, affects nothing."""
    logits, _, mask = drawn(6)

    def total(logits):
        found = route(logits, TOP_K, Router(score=score), mask=mask)
        told = losses(found)
        return jnp.sum(jnp.sin(found.weights)) + told.balance_loss + told.z_loss, told

    grad = jax.value_and_grad(total, has_aux=True)
    want = grad(logits)
    got = grad(np.where(mask[:, None], logits, np.nan))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalize", [True, False])
def test_ids_that_were_chosen_elsewhere(score, normalize):
    """Given the ids it would choose, route returns the same, with its gradients."""
    logits, bias, mask = drawn(7)
    router = Router(score=score, normalize=normalize, scale=1.5)

    def weigh(logits, topk_ids):
        given = {"bias": bias, "mask": mask, "topk_ids": topk_ids}
        found = route(logits, TOP_K, router, **given)
        return jnp.sum(found.weights * (1 + jnp.arange(TOP_K))), found

    both = jax.value_and_grad(weigh, has_aux=True)
    (_, want), slopes = both(logits, None)
    (_, found), own = both(logits, want.ids)
    for ours, theirs in zip(
        *map(jax.tree.leaves, ((found, own), (want, slopes))), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_ids_of_no_expert():
    """They have no weight, and what is left is normalised."""
    logits, _, _ = drawn(8)
    ids = np.tile(np.array([3, -1, EXPERTS], np.int32), (N, 1))
    ids[0] = -1

    def weigh(logits):
        found = route(logits, 3, topk_ids=ids)
        return jnp.sum(jnp.sin(found.weights)), found

    (_, found), slopes = jax.value_and_grad(weigh, has_aux=True)(logits)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.weights[1:], [[1, 0, 0]] * (N - 1), rtol=1e-6)
    assert not np.asarray(found.weights[0]).any()
    assert np.isfinite(slopes).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ROUTERS)
def test_dimensions_in_front(name):
    """Tokens in any number of dimensions are chosen like those in one."""
    logits, bias, mask = drawn(9)
    front = (2, N // 4, 2)
    given = {"bias": bias, "mask": mask}
    flat = route(logits, TOP_K, ROUTERS[name], **given)
    given["mask"] = mask.reshape(front)
    found = route(logits.reshape(*front, EXPERTS), TOP_K, ROUTERS[name], **given)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, flat)), strict=True):
        # XLA sums scores in the order that it chooses for a shape.
        np.testing.assert_allclose(ours, theirs.reshape(*front, -1), rtol=1e-6)
    told = map(jax.tree.leaves, (losses(found), losses(flat)))
    for ours, theirs in zip(*told, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("load", "steps"),
    [
        ([0.5, 0.25, 0.25, 0.0], [-1, 0, 0, 1]),
        ([0.7, 0.1, 0.1, 0.1], [-1, 1, 1, 1]),
        ([0.0, 0.3, 0.3, 0.4], [1, -1, -1, -1]),
        ([0.25] * 4, [0, 0, 0, 0]),
    ],
)
def test_update_bias_is_towards_the_mean(load, steps):
    bias = np.array([0.5, -0.5, 0.0, 2.0], np.float32)
    found = update_bias(jnp.asarray(bias), jnp.asarray(load, jnp.float32), 0.125)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, bias + 0.125 * np.array(steps))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (np.ones(8, np.float32), "load must be [..., E] with E = 4, got (8,)"),
        (np.ones((2, 4), np.float32), "load must be [..., E] with E = 4"),
        ([0.25] * 4, "load must be an array"),
    ],
)
def test_update_bias_wants_a_load_of_its_experts(load, words):
    with raises() as caught:
        update_bias(jnp.zeros(4), load)
    check_form(caught, "router.update_bias", words)


def test_a_scale_keeps_the_dtype_of_weights():
    logits, _, _ = drawn(6)
    with jax.enable_x64(True):
        found = route(logits, TOP_K, Router(scale=np.float64(2.0)))
        assert found.weights.dtype == np.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "2"}, "scale a finite number"),
        ({"scale": float("nan")}, "nan"),
        ({"scale": -float("inf")}, "-inf"),
        ({"scale": None}, "None"),
        ({"normalize": "no"}, "normalize must be a bool"),
        ({"normalize": 1}, "normalize must be a bool"),
    ],
)
def test_wrong_fields(options, words):
    with raises() as caught:
        Router(**options)
    check_form(caught, "router.Router", words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2.0,), "top_k must be an int from 1 to num_experts, 16"),
        (("2",), "top_k must be an int"),
        ((0,), "top_k must be an int"),
        ((2, "softmax"), "router must be a jax_ep.router.Router"),
        ((2, ""), "router must be a jax_ep.router.Router"),
        ((2, Router), "router must be a jax_ep.router.Router"),
    ],
)
def test_wrong_arguments(arguments, words):
    with raises() as caught:
        route(np.zeros((2, EXPERTS), np.float32), *arguments)
    check_form(caught, "router.route", words)


def test_losses_are_of_a_routing():
    with raises() as caught:
        losses(3)
    check_form(caught, "router.losses", "routing must be a jax_ep.router.Routing")


def test_ints_of_numpy_are_numbers_of_experts():
    logits, _, _ = drawn(7)
    found, want = route(logits, np.int64(2)), route(logits, 2)
    np.testing.assert_array_equal(found.ids, want.ids)
