"""Whether a layer's experts read the rows past the groups; if not, they stay uncleared.

With capacity for the worst case, most rows of a large EP group lie past the groups, and
clearing them would take as long as the exchange.
"""

from __future__ import annotations

import functools
from typing import Any

from jax_ep import experts
from jax_ep._core.handle import EPHandle


def seen(ep: EPHandle, run: Any, intermediate_size: int) -> bool:
    """Whether results or gradients of `run` may depend on rows past the groups.

    Args:
        ep: the handle of the layer.
        run: the layer's experts, or None.
        intermediate_size: F per rank.
    """
    if isinstance(run, functools.partial):
        run = run.func
    if run is experts.fp8:
        return False
    if run is experts.hopper:
        return False
    if run not in (None, experts.auto):
        return True
    config, device = ep.config, ep.mesh.local_devices[0]
    sizes = (config.hidden_size, intermediate_size)
    return not experts.auto_is_hopper(config.dtype, *sizes, device)
