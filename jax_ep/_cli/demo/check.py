"""The demo's check: expert-parallel steps against the same steps computed densely."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_ep._cli.demo.train import Metrics

CHECKED_STEPS = 20
# Rounding leaves about 1e-6, for sums are taken in another order; where it turns a
# router's near tie, one token goes elsewhere and a step's loss moves by up to 1e-4.
LOSS_TOLERANCE = 1e-3
# Relative, for each parameter array: Adam forgives a gradient of the wrong scale.
NORM_TOLERANCE = 2e-2


@dataclasses.dataclass(frozen=True)
class Check:
    """Largest differences between the two courses, and rows that each dropped.

    `norm_difference` is of the gradients' norms, relative, over all parameter arrays.
    """

    steps: int
    loss_difference: float
    norm_difference: float
    dropped: int
    dense_dropped: int

    @property
    def passed(self) -> bool:
        """Whether both differences are within tolerance; a NaN is not."""
        return (
            self.loss_difference <= LOSS_TOLERANCE
            and self.norm_difference <= NORM_TOLERANCE
        )


def compare(actual: Sequence[Metrics], dense: Sequence[Metrics]) -> Check:
    """Compares equally many steps."""
    losses, norms = (
        np.array([[getattr(step, name) for step in run] for run in (actual, dense)])
        for name in ("loss", "grad_norms")
    )
    dropped = [
        sum(int(step.stats.num_dropped.sum()) for step in run)
        for run in (actual, dense)
    ]
    return Check(
        steps=len(dense),
        loss_difference=float(np.max(np.abs(losses[0] - losses[1]))),
        norm_difference=float(np.max(np.abs(norms[0] - norms[1]) / norms[1])),
        dropped=dropped[0],
        dense_dropped=dropped[1],
    )
