"""jax_ep: expert-parallel dispatch and combine for mixture-of-experts in JAX."""

__version__ = "0.1.0"

from jax_ep import _ffi, _hopper, _runtime, experts, formats, router, sharded, stats
from jax_ep._api import combine, dequantize, dispatch
from jax_ep._config import EPConfig
from jax_ep._handle import EPHandle, InvalidIdError
from jax_ep._init import init
from jax_ep._moe import MoEAux, moe_ffn
from jax_ep._names import save_route
from jax_ep._pending import Pending
from jax_ep._shared import close_shared_handles, shared_handle
from jax_ep._split import combine_async, combine_wait, dispatch_async, dispatch_wait
from jax_ep._types import Dispatched, Route

__all__ = [
    "Dispatched",
    "EPConfig",
    "EPHandle",
    "InvalidIdError",
    "MoEAux",
    "Pending",
    "Route",
    "close_shared_handles",
    "combine",
    "combine_async",
    "combine_wait",
    "custom_call_targets",
    "dequantize",
    "dispatch",
    "dispatch_async",
    "dispatch_wait",
    "experts",
    "formats",
    "init",
    "moe_ffn",
    "router",
    "save_route",
    "sharded",
    "shared_handle",
    "stats",
]

#: The names of the custom calls that jax_ep puts into programs. `jax.export` refuses
#: them unless its `disabled_checks` list them (docs/sharp_bits.md).
custom_call_targets: tuple[str, ...] = _ffi.target_names()

_runtime.make_room()
_ffi.register()
_hopper.load_pallas()
