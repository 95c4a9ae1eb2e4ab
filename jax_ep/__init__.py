"""jax_ep: expert-parallel dispatch and combine for mixture-of-experts in JAX."""

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

from jax_ep import experts, formats, placement, router
from jax_ep._core.config import EPConfig
from jax_ep._core.handle import EPHandle, InvalidIdError
from jax_ep._core.types import Dispatched, Route
from jax_ep._layers.apply import apply_experts
from jax_ep._layers.moe import MoEAux, moe_ffn
from jax_ep._native import ffi
from jax_ep._ops.combine import combine, combine_async, combine_wait
from jax_ep._ops.dequantize import dequantize
from jax_ep._ops.dispatch import dispatch, dispatch_async, dispatch_wait
from jax_ep._ops.expert_of_row import expert_of_row
from jax_ep._ops.pending import Pending
from jax_ep._ops.remat import save_route
from jax_ep._setup import runtime
from jax_ep._setup.init import init
from jax_ep._setup.shared import close_shared_handles, shared_handle

if TYPE_CHECKING:
    from jax_ep import checkpoints as checkpoints
    from jax_ep import flax as flax
    from jax_ep import sharded as sharded
    from jax_ep import stats as stats

__all__ = [
    "Dispatched",
    "EPConfig",
    "EPHandle",
    "InvalidIdError",
    "MoEAux",
    "Pending",
    "Route",
    "apply_experts",
    "checkpoints",
    "close_shared_handles",
    "combine",
    "combine_async",
    "combine_wait",
    "custom_call_targets",
    "dequantize",
    "dispatch",
    "dispatch_async",
    "dispatch_wait",
    "expert_of_row",
    "experts",
    "formats",
    "init",
    "moe_ffn",
    "placement",
    "router",
    "save_route",
    "sharded",
    "shared_handle",
    "stats",
]

#: The names of the custom calls that jax_ep puts into programs. `jax.export` refuses
#: them unless its `disabled_checks` list them (docs/sharp_bits.md).
custom_call_targets: tuple[str, ...] = ffi.target_names()

runtime.make_room()
ffi.register()


# Type checkers would take any name for an attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a module when it is first used.

        Flax may not be installed, and most processes need none of the others.
        """
        if name in ("checkpoints", "flax", "sharded", "stats"):
            return importlib.import_module(f"jax_ep.{name}")
        raise AttributeError(f"module 'jax_ep' has no attribute {name!r}")
