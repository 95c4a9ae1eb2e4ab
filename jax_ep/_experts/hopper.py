"""The common parts of the Pallas matmul kernels for Hopper.

One thread block runs on each multiprocessor. Two of its warpgroups multiply, each for
half of the rows of a result block, and a third one loads. Tensor cores accumulate in
float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax

from jax_ep._native import loader

ROWS = 128  # rows of a result block
_COLUMNS = (256, 128)  # columns of a result block; the first that divides the result's
WARPGROUPS = 2  # warpgroups that multiply
OWN = ROWS // WARPGROUPS  # rows of a result block per warpgroup
SWIZZLED_ROWS = 8  # rows of a swizzle tile; loads start at a multiple of it
_SWIZZLED_BYTES = 128
_SWIZZLED = 64  # 16-bit columns of a swizzle tile
DEPTH = 64  # size of a pipeline step along the contracted dimension
_STEPS = 4  # pipeline steps in flight
_PANEL = 4  # column blocks that run side by side and share rows in the L2 cache
OUT_COLUMNS = 64  # columns per store
OUT_SLOTS = 2  # store buffers: one fills while the other is copied out
_MEMORY_REGISTERS = 40  # registers per thread of the warpgroup that loads


def pallas() -> tuple[Any, Any]:
    """Returns Pallas and its module for NVIDIA GPUs.

    They are imported on first use, because JAX does not require absl, which they need.

    Raises:
        ImportError: absl is not installed.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    return pallas, mosaic_gpu


def load_pallas() -> None:
    """Imports Pallas if its kernels may run, before any program is compiled.

    In newer JAX the import changes the key of the jit cache. If the first layer
    imported it, every function jitted before would compile again.
    """
    wanted = getattr(jax.config, "jax_platforms", None) or "cuda"  # None means any
    if loader.cuda is None or not {"cuda", "gpu"} & set(wanted.split(",")):
        return
    with contextlib.suppress(ImportError, AttributeError):
        pallas()


def multiprocessors() -> int:
    """Returns the number of multiprocessors of a GPU of this process."""
    return jax.local_devices()[0].core_count


def columns_of_block(columns: int) -> int:
    """Returns the columns of a result block; `columns` is a multiple of 128."""
    return next(c for c in _COLUMNS if columns % c == 0)


def panel(blocks: int) -> int:
    """Returns how many of `blocks` column blocks run side by side."""
    return math.gcd(blocks, _PANEL)


def swizzled() -> tuple[Any, ...]:
    """Returns the transforms for operands in shared memory."""
    _, gpu = pallas()
    return gpu.TilingTransform((SWIZZLED_ROWS, _SWIZZLED)), gpu.SwizzleTransform(
        _SWIZZLED_BYTES
    )


def launch(
    kernel: Callable[..., None], shape: tuple[int, ...], dtype: Any, *operands: Any
) -> jax.Array:
    """Runs `kernel(*operands, out)`; returns `out` with this shape and dtype.

    The grid has axes "sm", one block per multiprocessor, and "warpgroup".
    """
    _, gpu = pallas()
    run = gpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(multiprocessors(),),
        grid_names=("sm",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Warpgroup
        ),
    )
    # Pallas counts pipeline steps in int32, which x64 mode would widen.
    with jax.enable_x64(False):
        return run(*operands)


def pipeline(
    specs: Any,
    steps: Any = None,
    body: Callable[..., Any] = lambda *_: None,
    context: Callable[..., Any] = lambda *_: None,
) -> Any:
    """Makes a pipeline of `steps` steps, loaded by one warpgroup for the others.

    Args:
        specs: block specs of the operands, indexed by step.
        steps: int or scalar; None means as many as are in flight.
        body: takes (step, *blocks, sums) and returns sums; runs in the warpgroups that
            multiply.
        context: called there with a function that runs all steps on given sums.
    """
    _, gpu = pallas()
    return gpu.emit_pipeline_warp_specialized(
        body,
        grid=(_STEPS if steps is None else steps,),
        in_specs=specs,
        memory_registers=_MEMORY_REGISTERS,
        max_concurrent_steps=_STEPS,
        wg_axis="warpgroup",
        num_compute_wgs=WARPGROUPS,
        compute_context=context,
    )


def transposed(ref: Any) -> Any:
    """Returns a transposed view of a matrix in memory."""
    # JAX 0.10 only has a function, newer versions a method.
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return pallas()[1].transpose_ref(ref, (1, 0))
