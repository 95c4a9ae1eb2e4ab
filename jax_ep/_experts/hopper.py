"""What kernels for Hopper (Pallas) have in common that multiply matrices.

A block of threads runs on each multiprocessor: two warpgroups multiply, each half the
rows of the block's result, and one loads. The tensor cores add up in float32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax

from jax_ep._native import loader

ROWS = 128  # of a block's result
_COLUMNS = (256, 128)  # of it; the first that suits the result's
WARPGROUPS = 2  # that multiply
OWN = ROWS // WARPGROUPS  # rows of a warpgroup's result
SWIZZLED_ROWS = 8  # together in shared memory: where loads of rows may begin
_SWIZZLED_BYTES = 128
_SWIZZLED = 64  # columns together there, of 16 bits
DEPTH = 64  # of both operands in a step
_STEPS = 4  # in flight
_PANEL = 4  # blocks of columns side by side, which share what they read in L2
OUT_COLUMNS = 64  # that go out at a time
OUT_SLOTS = 2  # in shared memory: one fills while another goes out
_MEMORY_REGISTERS = 40  # of a thread that loads


def pallas() -> tuple[Any, Any]:
    """Pallas and what it has for NVIDIA's GPUs; an ImportError where that lacks absl.

    Not imported with this module: JAX does not require absl.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import mosaic_gpu

    return pallas, mosaic_gpu


def load_pallas() -> None:
    """Imports Pallas where its kernels may run, while no program has been compiled.

    The import adds to what newer JAX keeps compiled programs by. Left to the first
    layer, it would have every function that was jitted before compile once more.
    """
    wanted = getattr(jax.config, "jax_platforms", None) or "cuda"  # or any
    if loader.cuda is None or not {"cuda", "gpu"} & set(wanted.split(",")):
        return
    with contextlib.suppress(ImportError, AttributeError):
        pallas()


def multiprocessors() -> int:
    """Of a GPU of this process."""
    return jax.local_devices()[0].core_count


def columns_of_block(columns: int) -> int:
    """Of a block's result, where the whole has a multiple of 128."""
    return next(c for c in _COLUMNS if columns % c == 0)


def panel(blocks: int) -> int:
    """How many of so many blocks of columns run side by side."""
    return math.gcd(blocks, _PANEL)


def swizzled() -> tuple[Any, ...]:
    """How operands lie in shared memory."""
    _, gpu = pallas()
    return gpu.TilingTransform((SWIZZLED_ROWS, _SWIZZLED)), gpu.SwizzleTransform(
        _SWIZZLED_BYTES
    )


def launch(
    kernel: Callable[..., None], shape: tuple[int, ...], dtype: Any, *operands: Any
) -> jax.Array:
    """What `kernel(*operands, out)` leaves, of this shape and dtype.

    It runs with axes "sm" and "warpgroup".
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
    # Pallas counts steps with integers of 32 bits.
    with jax.enable_x64(False):
        return run(*operands)


def pipeline(
    specs: Any,
    steps: Any = None,
    body: Callable[..., Any] = lambda *_: None,
    context: Callable[..., Any] = lambda *_: None,
) -> Any:
    """`steps` of `body`, on what the warpgroup that loads brings by `specs`.

    Args:
        specs: of the operands' blocks, by step.
        steps: a number or a scalar; None: as many as are in flight.
        body: takes (step, *blocks, sums) and returns sums; in warpgroups that multiply.
        context: is given what runs the steps on sums; likewise.
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
    """A matrix in memory, the other way round."""
    # JAX 0.10 has it as a function alone, newer ones as a method.
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return pallas()[1].transpose_ref(ref, (1, 0))
