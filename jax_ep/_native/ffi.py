"""The custom-call targets of the native modules: registering and calling them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jax_ep._native.loader import cpu as native
from jax_ep._native.loader import cuda as native_cuda
from jax_ep._native.loader import plugin_problem
from jax_ep._native.plugins import wanted_extra


def _targets() -> Iterator[tuple[str, str, Any]]:
    """Yields (name, platform, handler) for all targets and platforms of this build."""
    for platform, module in (("cpu", native), ("CUDA", native_cuda)):
        if module is not None:
            for name, handler in module.targets().items():
                yield name, platform, handler


def register() -> None:
    """Registers every target on every platform that this build serves."""
    for name, platform, handler in _targets():
        jax.ffi.register_ffi_target(name, handler, platform=platform)


def target_names() -> tuple[str, ...]:
    """The names of all targets, sorted."""
    return tuple(sorted({name for name, _, _ in _targets()}))


def gpu_target_names() -> frozenset[str]:
    """The names of the targets on GPUs; none if no CUDA module is installed."""
    return frozenset() if native_cuda is None else frozenset(native_cuda.targets())


def native_for(platform: str) -> ModuleType:
    """The native module that serves devices of `platform` ("cpu" or "gpu").

    Raises:
        ValueError: this build does not serve that platform.
    """
    if platform == "cpu":
        return native
    if platform in ("gpu", "cuda") and native_cuda is not None:
        return native_cuda
    remedy = "use a mesh of CPU or NVIDIA GPU devices"
    if platform in ("gpu", "cuda"):
        remedy = plugin_problem or (
            f'no CUDA module is installed; run pip install "jax_ep[{wanted_extra()}]", '
            "or put nvcc on PATH or in CUDA_HOME and reinstall jax_ep from source"
        )
    raise ValueError(
        "jax_ep.init: the mesh's devices must be of a platform that this build serves, "
        f"got {platform!r}; {remedy}"
    )


def call(
    target: str,
    results: Sequence[Any],
    *operands: jax.Array,
    has_side_effect: bool = False,
    vmap_method: str | None = None,
    input_output_aliases: dict[int, int] | None = None,
    **attributes: int | float | bool | str,
) -> list[jax.Array]:
    """Calls a target; handlers read Python ints as int64 and floats as float32."""
    kinds = {int: np.int64, float: np.float32}
    attrs = {
        name: kinds[type(value)](value) if type(value) in kinds else value
        for name, value in attributes.items()
    }
    function = jax.ffi.ffi_call(
        target,
        tuple(results),
        has_side_effect=has_side_effect,
        vmap_method=vmap_method,
        input_output_aliases=input_output_aliases,
    )
    arrays = list(function(*operands, **attrs))
    # XLA:GPU fuses what is written to a slice of a larger array (a scan's residuals)
    # with that write. It does so even for a call with other users, which would then run
    # twice. The barrier prevents that.
    full = [i for i, array in enumerate(arrays) if array.size]
    passed = jax.lax.optimization_barrier(tuple(arrays[i] for i in full))
    for i, array in zip(full, passed, strict=True):
        arrays[i] = array
    return arrays


def call_on_stream(
    target: str, result: Any, *operands: jax.Array, **attributes: Any
) -> jax.Array:
    """Runs `call` on XLA's stream for collectives, beside work that does not need it.

    There is only one result, because XLA treats taking several apart as work on that
    stream too, which has to wait for the call at once. Do not split the result before
    it is needed, either: XLA would split it, and so wait, at once.
    """
    # Older JAX has another function of this name.
    compute_on: Any = importlib.import_module("jax.experimental.compute_on").compute_on

    def run(*operands: jax.Array) -> jax.Array:
        (array,) = call(target, (result,), *operands, **attributes)
        return array

    on_stream = compute_on(
        run,
        compute_type="gpu_stream:collective",
        out_memory_spaces=jax.memory.Space.Device,
    )
    return on_stream(*operands)
