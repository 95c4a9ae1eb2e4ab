"""Grouped matmuls for Hopper on CPUs: interpreted, or as NumPy would do them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

try:
    from jax.experimental.pallas import mosaic_gpu
except ImportError:  # it imports absl, which JAX does not require
    mosaic_gpu = None

from jax_ep import experts
from jax_ep._experts import grouped, hopper

_TILE = 64  # rows that the kernel for matrices loads at once


def of_rows(rows: Any, matrices: Any, sizes: Any, transposed: bool) -> Any:
    """Where there is no group nothing is written, NaN for that."""
    wide = matrices.astype(np.float32)
    wide = wide.swapaxes(1, 2) if transposed else wide
    out = np.full((len(rows), wide.shape[2]), np.nan, np.float32)
    for matrix, size, end in zip(wide, sizes, np.cumsum(sizes), strict=True):
        out[end - size : end] = rows[end - size : end].astype(np.float32) @ matrix
    return out.astype(rows.dtype)


def _of_matrices(rows: Any, others: Any, sizes: Any) -> Any:
    """Whole tiles, of which rows of others count 0 times."""
    out = []
    for size, end in zip(sizes, np.cumsum(sizes), strict=True):
        first = (end - size) // _TILE * _TILE
        at = np.arange(first, min(-(-end // _TILE) * _TILE, len(rows)))
        own = ((at >= end - size) & (at < end) & (size > 0))[:, None]
        left, right = (each[at].astype(np.float32) for each in (rows, others))
        out.append((left * own).T @ right)
    return np.stack(out).astype(rows.dtype)


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `mosaic` take this for a Hopper GPU, to lower for one or to interpret."""
    monkeypatch.setattr(hopper, "multiprocessors", lambda: 3)
    monkeypatch.setattr(experts, "mosaic_obstacle", lambda *_: None)


def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has `mosaic` run by these; skips on GPUs, which may have the kernels.

    Returns a list that gets the name of each one that a trace takes.
    """
    if jax.default_backend() != "cpu":
        pytest.skip("the kernels may be real here")
    monkeypatch.setattr(experts, "mosaic_obstacle", lambda *_: None)
    monkeypatch.setattr(experts, "ragged_dot_is_dense", lambda *_: True)
    taken: list[str] = []
    monkeypatch.setattr(grouped, "kernels", lambda: _Seen(_kernels(), taken))
    return taken


class _Seen(dict):
    def __init__(self, kernels: dict[str, Any], taken: list[str]) -> None:
        super().__init__(kernels)
        self.taken = taken

    def __getitem__(self, name: str) -> Any:
        self.taken.append(name)
        return super().__getitem__(name)


def _kernels() -> dict[str, Callable[..., jax.Array]]:
    """As of the true ones, the types of these results do not say that they vary."""

    def rows_kernel(rows, matrices, *, group_sizes, transpose_rhs=False, **_):
        columns = matrices.shape[1 if transpose_rhs else 2]
        result = jax.ShapeDtypeStruct((rows.shape[0], columns), rows.dtype)
        run = functools.partial(of_rows, transposed=transpose_rhs)
        return jax.pure_callback(run, result, rows, matrices, group_sizes)

    def matrices_kernel(rows, others, *, group_sizes, **_):
        shape = (group_sizes.shape[0], rows.shape[1], others.shape[1])
        result = jax.ShapeDtypeStruct(shape, rows.dtype)
        return jax.pure_callback(_of_matrices, result, rows, others, group_sizes)

    return {"rows": rows_kernel, "weights": matrices_kernel}


H, F = 128, 128  # of tests' matrices
needs_kernels = pytest.mark.skipif(mosaic_gpu is None, reason="needs absl-py")
needs_interpreter = pytest.mark.skipif(
    jax.default_backend() != "cpu"
    or not hasattr(mosaic_gpu, "force_gpu_interpret_mode"),
    reason="needs absl-py, a CPU and a JAX that interprets its kernels for GPUs",
)


def skip_without_mosaic():
    obstacle = experts.mosaic_obstacle(H, F)
    if obstacle is not None:
        pytest.skip(f"needs {obstacle}")
