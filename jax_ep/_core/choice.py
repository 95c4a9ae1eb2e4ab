"""Whether a router can choose K of E experts; for `jax_ep.router` and the layers."""

from __future__ import annotations

import numbers
import warnings
from typing import TYPE_CHECKING

from jax_ep._core import errors

if TYPE_CHECKING:
    from jax_ep.router import Router


def check_choice(function: str, router: Router, experts: int, top_k: int) -> None:
    """Raises unless `router` can choose `top_k` of `experts` experts."""
    errors.require(
        isinstance(top_k, numbers.Integral) and 1 <= top_k <= experts,
        function,
        f"top_k must be an int from 1 to num_experts, {experts}",
        errors.brief(top_k),
        "pass a value within these bounds",
    )
    groups = router.num_groups
    size = experts // groups
    errors.require(
        experts % groups == 0 and size * router.top_groups >= top_k,
        function,
        "num_groups must divide the experts and top_groups must hold top_k experts",
        f"{experts} experts in {errors.brief(groups)} groups, top "
        f"{errors.brief(router.top_groups)}, top_k {top_k}",
        "change num_groups or top_groups",
    )
    errors.require(
        groups == 1 or router.best_of_group <= size,
        function,
        f"best_of_group must be at most {size}, the experts per group",
        router.best_of_group,
        "pass a smaller value",
    )
    if top_k == 1 and router.normalize:
        warnings.warn(
            f"jax_ep.{function}: Router(normalize=True) makes every weight 1 if top_k "
            "is 1, so the task does not train the router; leave normalize out",
            UserWarning,
            stacklevel=3,
        )
