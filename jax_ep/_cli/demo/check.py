"""Compares the demo's expert-parallel steps with the same steps computed densely."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jax_ep._cli.demo.train import Metrics

CHECKED_STEPS = 20
# Sums in another order differ by about 1e-6. If that flips a near tie of the router,
# one token goes to another expert, and the loss of a step changes by up to 1e-4.
LOSS_TOLERANCE = 1e-3
# Relative, per parameter array. Adam would hide a gradient of a wrong scale.
NORM_TOLERANCE = 2e-2


@dataclasses.dataclass(frozen=True)
class Check:
    """Largest differences between the two runs, and the rows that each dropped.

    `norm_difference` is the largest relative one of gradient norms, over all parameter
    arrays.
    """

    steps: int
    loss_difference: float
    norm_difference: float
    dropped: int
    dense_dropped: int

    @property
    def passed(self) -> bool:
        """Whether both differences are within tolerance; False for NaN."""
        return (
            self.loss_difference <= LOSS_TOLERANCE
            and self.norm_difference <= NORM_TOLERANCE
        )


def compare(actual: Sequence[Metrics], dense: Sequence[Metrics]) -> Check:
    """Compares two runs of the same number of steps."""
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
