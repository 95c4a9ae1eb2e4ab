"""The demo's loss, over a mesh or on one device, and its optimiser Adam."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._cli.demo import dense, model, moe
from jax_ep._cli.demo.model import Params, Sizes

AXIS = "ep"
PEAK_RATE = 4e-3
WARMUP_STEPS = 20
_BETA1, _BETA2, _EPSILON = 0.9, 0.98, 1e-8


class State(NamedTuple):
    """Parameters, Adam's first and second moments, and the number of steps done."""

    params: Params
    first: Params
    second: Params
    step: Any


class Metrics(NamedTuple):
    """Metrics of one batch.

    Attributes:
        loss: cross-entropy in nats per byte, without the balance loss.
        grad_norms: `[arrays]`, norm of each parameter array's gradient.
        stats: statistics `[layers, ...]`.
    """

    loss: Any
    grad_norms: Any
    stats: moe.LayerStats


LossFn = Callable[
    [Params, jax.Array], tuple[jax.Array, tuple[jax.Array, moe.LayerStats]]
]


def expert_parallel_loss(ep: jax_ep.EPHandle, sizes: Sizes, specs: Params) -> LossFn:
    """Returns the loss of global arrays over the mesh of `ep`.

    Sequences and experts are both split over the axis (data and expert parallel).
    """

    def per_rank(params: Params, text: jax.Array) -> Any:
        layer = functools.partial(moe.layer, ep)
        loss, balance, stats = model.loss(params, text, sizes, layer)
        loss = jax.lax.pmean(loss, AXIS)
        return loss + model.BALANCE_WEIGHT * balance, (loss, stats)

    # Gradients are taken outside of shard_map, so that replicated parameters get the
    # sum over all ranks, and each rank's experts their own gradients.
    return jax.shard_map(
        per_rank,
        mesh=ep.mesh,
        in_specs=(specs, P(AXIS)),
        out_specs=(P(), (P(), P(None, AXIS))),
    )


def dense_loss(sizes: Sizes, ranks: int, capacity: int) -> LossFn:
    """Returns the same loss on one device, without jax_ep."""

    def whole(params: Params, text: jax.Array) -> Any:
        layer = functools.partial(dense.layer, sizes.top_k, ranks, capacity)
        loss, balance, stats = model.loss(params, text, sizes, layer)
        return loss + model.BALANCE_WEIGHT * balance, (loss, stats)

    return whole


def adam_step(
    loss_fn: LossFn, total_steps: int, state: State, text: jax.Array
) -> tuple[State, Metrics]:
    """Does one step of Adam; the rate warms up, then decays to a tenth by a cosine."""
    (_, (loss, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
        state.params, text
    )
    norms = [jnp.sqrt(jnp.sum(g * g)) for g in jax.tree.leaves(grads)]
    step = state.step + 1
    rate = PEAK_RATE * (0.55 + 0.45 * jnp.cos(jnp.pi * step / total_steps))
    rate *= jnp.minimum(1.0, step / WARMUP_STEPS)
    rate *= jnp.sqrt(1 - _BETA2**step) / (1 - _BETA1**step)
    first = jax.tree.map(lambda m, g: _BETA1 * m + (1 - _BETA1) * g, state.first, grads)
    second = jax.tree.map(
        lambda v, g: _BETA2 * v + (1 - _BETA2) * g * g, state.second, grads
    )
    rate = rate.astype(jnp.float32)  # with jax_enable_x64 it is float64
    params = jax.tree.map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + _EPSILON),
        state.params,
        first,
        second,
    )
    state = State(params, first, second, step)
    return state, Metrics(loss, jnp.stack(norms), stats)


class Trainer:
    """A model in training: its state on the devices and its compiled step."""

    def __init__(
        self,
        loss_fn: LossFn,
        params: Params,
        param_shardings: Params,
        scalar_sharding: Sharding,
        text_sharding: Sharding,
        text: np.ndarray,
        total_steps: int,
    ) -> None:
        """Places the parameters and compiles for batches like `text`."""
        self._loss_fn = loss_fn
        self._text_sharding = text_sharding
        zeros = jax.tree.map(np.zeros_like, params)
        state = State(params, zeros, zeros, np.int32(0))
        shardings = State(
            param_shardings, param_shardings, param_shardings, scalar_sharding
        )
        self._state = jax.device_put(state, shardings)
        # The new state has the shardings of the old one, so one compilation serves all
        # steps, and the donated buffers are updated in place.
        step = jax.jit(
            functools.partial(adam_step, loss_fn, total_steps),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        self._step = step.lower(self._state, self._place(text)).compile()
        self._evaluate = jax.jit(lambda params, text: loss_fn(params, text)[1][0])

    def step(self, text: np.ndarray) -> Metrics:
        """Trains on one batch; waits for it and returns its metrics as NumPy."""
        self._state, metrics = self._step(self._state, self._place(text))
        return jax.device_get(metrics)

    def evaluate(self, batches: Iterable[np.ndarray]) -> float:
        """Returns the mean loss over batches, without training on them."""
        losses = [
            self._evaluate(self._state.params, self._place(text)) for text in batches
        ]
        return float(np.mean(jax.device_get(losses)))

    def _place(self, text: np.ndarray) -> jax.Array:
        return jax.device_put(text, self._text_sharding)


def expert_parallel_trainer(
    ep: jax_ep.EPHandle, sizes: Sizes, params: Params, text: np.ndarray, steps: int
) -> Trainer:
    """Makes a trainer over the mesh of `ep`."""
    specs = model.param_specs(params, AXIS)
    placed = functools.partial(NamedSharding, ep.mesh)
    return Trainer(
        expert_parallel_loss(ep, sizes, specs),
        params,
        jax.tree.map(placed, specs),
        placed(P()),
        placed(P(AXIS)),
        text,
        steps,
    )


def dense_trainer(
    ep: jax_ep.EPHandle, sizes: Sizes, params: Params, text: np.ndarray, steps: int
) -> Trainer:
    """Makes a trainer on the mesh's first device, with the sizes of `ep`."""
    device = jax.sharding.SingleDeviceSharding(ep.mesh.devices.flat[0])
    return Trainer(
        dense_loss(sizes, ep.ep_size, ep.recv_capacity),
        params,
        jax.tree.map(lambda _: device, params),
        device,
        device,
        text,
        steps,
    )
