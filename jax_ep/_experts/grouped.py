"""Grouped matmuls with derivatives and a vmap rule, by XLA or by kernels.

A NaN or Inf stays in the group it is in, whatever the implementation.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jax_ep._core import batching
from jax_ep._core.varying import vary_alike, varying
from jax_ep._experts import kernels
from jax_ep._ops.expert_of_row import group_of_row

_HIGHEST = jax.lax.Precision.HIGHEST


def matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, products: Products
) -> Any:
    """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`.

    Rows past the last group and their cotangents may hold anything, even NaN; their
    results are unspecified.
    """
    return matmul_to(rows, weights, group_sizes, products, False, rows.dtype)


def matmul_to(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    products: Products,
    transposed: bool,
    dtype: Any,
) -> Any:
    """Does the same with weights of any dtype, to a result of `dtype`.

    `transposed` weights are `[L, B, A]`.
    """
    given = varied(rows, weights.astype(rows.dtype), group_sizes)
    return _matmul(*given, products, transposed, jnp.dtype(dtype))


def everywhere(precision: Any = None, device: Any = None) -> Products:
    """Returns the implementation for devices without kernels.

    Args:
        precision: of products; None means the one that is set when this is called.
        device: the `jax.Device` to run on; None means this process's first.
    """
    if precision is None:
        precision = default_precision()
    device = device or jax.local_devices()[0]
    return Tiles(precision) if device.platform == "cpu" else Ragged(precision)


def default_precision() -> Any:
    """Returns `jax.default_matmul_precision`."""
    # getattr, because type checkers do not know the fields of JAX's config.
    return getattr(jax.config, "jax_default_matmul_precision", None)


def varied(*given: Any) -> Any:
    """Casts arrays to vary over the same mesh axes, as custom calls need."""
    axes = sorted(frozenset().union(*map(varying, jax.tree.leaves(given))))
    return vary_alike(axes, frozenset(), *given)


class Products(Protocol):
    """An implementation of the matmuls, without derivatives; hashable."""

    def fprop(self, rows: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`, of this or a wider dtype."""

    def dgrad(self, cotangents: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        """Multiplies `[N, B]` by the transposed `[L, A, B]` to `[N, A]`, likewise."""

    def wgrad(self, rows: Any, cotangents: Any, sizes: Any, dtype: Any) -> Any:
        """Sums outer products of `[N, A]` and `[N, B]` over groups, to `[L, A, B]`."""

    def sums(self, values: Any, sizes: Any) -> Any:
        """Sums the rows `[N, F]` of each group to `[L, F]`, with derivatives.

        Rows past the groups may hold anything. The result is float32, or float64 if
        the values are.
        """


class OfKernels(NamedTuple):
    """Kernels, which also have biases and the activation inside matmuls.

    `Products` of columns that are not aligned are padded; the other methods take
    aligned ones.
    """

    own: kernels.Kernels

    def fprop(self, rows: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        given = aligned(rows, 1), aligned(weights, 1, 2), sizes
        run, out = self._of(rows, dtype)
        return cut(run.fprop(*given, dtype=out), weights.shape[2]).astype(dtype)

    def dgrad(self, cotangents: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        given = aligned(cotangents, 1), aligned(weights, 1, 2), sizes
        run, out = self._of(cotangents, dtype)
        return cut(run.dgrad(*given, dtype=out), weights.shape[1]).astype(dtype)

    def wgrad(self, rows: Any, cotangents: Any, sizes: Any, dtype: Any) -> Any:
        # The kernels write either the operands' dtype or the float32 sums.
        out = dtype if dtype == rows.dtype else jnp.float32
        given = aligned(rows, 1), aligned(cotangents, 1), sizes
        found = self.own.wgrad(*given, out)
        found = found if found.shape[1] == rows.shape[1] else found[:, : rows.shape[1]]
        return cut(found, cotangents.shape[1]).astype(dtype)

    def sums(self, values: Any, sizes: Any) -> Any:
        # Products with ones round float32 values unless they are exact.
        exact = OfKernels(kernels.portable(True)) if self.own.sums else self
        return _sums_of_products(values, sizes, exact, kernels.ALIGNED)

    def gate_up(
        self, rows: Any, matrices: Any, sizes: Any, bias: Any, activation: Any
    ) -> Any:
        """Applies gate, up and the activation, and keeps gate and up."""
        return self.own.gate_up(rows, matrices, sizes, True, bias, activation)

    def down(self, rows: Any, matrices: Any, sizes: Any, bias: Any) -> Any:
        """Multiplies by down and adds its bias."""
        return self.own.fprop(rows, matrices, sizes, bias)

    def down_dgrad(
        self, cotangents: Any, down: Any, gate_up_rows: Any, sizes: Any, activation: Any
    ) -> Any:
        """Computes the backward pass of down and the activation."""
        given = cotangents, down, gate_up_rows, sizes
        return self.own.down_dgrad(*given, activation)

    def dgrad_of_both(self, cotangents: Any, gate: Any, up: Any, sizes: Any) -> Any:
        """Adds those of gate by its matrices to those of up by its matrices."""
        return self.own.dgrad(cotangents, gate, sizes, up=up)

    def wgrad_of_side(
        self, rows: Any, cotangents: Any, sizes: Any, dtype: Any, side: int
    ) -> Any:
        """`wgrad` with one side of cotangents `[N, 2, B]`."""
        out = dtype if dtype == rows.dtype else jnp.float32
        return self.own.wgrad(rows, cotangents, sizes, out, side).astype(dtype)

    def experts(
        self,
        rows: Any,
        gate_up: Any,
        down: Any,
        sizes: Any,
        biases: kernels.Biases,
        activation: kernels.Activation,
    ) -> Any:
        """Applies both matmuls, with nothing kept for a derivative."""
        paired = kernels.is_paired(rows.shape[0], sizes.shape[0])
        if self.own == kernels.HOPPER and paired:
            return kernels.experts(rows, gate_up, down, sizes, biases, activation)
        given = rows, gate_up, sizes, False, biases.gate_up, activation
        h, _ = self.own.gate_up(*given)
        return self.own.fprop(h, down, sizes, biases.down)

    def _of(self, rows: Any, dtype: Any) -> tuple[kernels.Kernels, Any]:
        """Returns kernels for results of a dtype, and the dtype that they write."""
        if dtype == rows.dtype:
            return self.own, None
        return self.own if self.own.sums else kernels.portable(False), jnp.float32


HOPPER = OfKernels(kernels.HOPPER)


def portable(exact: bool) -> OfKernels:
    """Returns the kernels for GPUs of compute capability 8.0 and newer."""
    return OfKernels(kernels.portable(exact))


def aligned(array: Any, *axes: int) -> Any:
    """Pads axes with zeros to what kernels take, multiples of `kernels.ALIGNED`."""
    missing = {axis: -array.shape[axis] % kernels.ALIGNED for axis in axes}
    if not any(missing.values()):
        return array
    return jnp.pad(array, [(0, missing.get(axis, 0)) for axis in range(array.ndim)])


def cut(array: Any, columns: int) -> Any:
    """Returns the first columns, without a copy if these are all."""
    return array if array.shape[-1] == columns else array[..., :columns]


class Ragged(NamedTuple):
    """XLA's ragged_dot. It may multiply all rows by all matrices, some of them by 0."""

    precision: Any

    def fprop(self, rows: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        return self._matmul(rows, weights, sizes, dtype, False)

    def dgrad(self, cotangents: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        return self._matmul(cotangents, weights, sizes, dtype, True)

    def wgrad(self, rows: Any, cotangents: Any, sizes: Any, dtype: Any) -> Any:
        wide = rows.dtype
        sums = self._general(rows, cotangents, sizes, ((0,), (0,)), [], wide)
        return sums.astype(dtype)

    def sums(self, values: Any, sizes: Any) -> Any:
        group = _groups(sizes, values.shape[0])[:, None]
        own = group == jnp.arange(sizes.shape[0], dtype=jnp.int32)
        finite = jnp.isfinite(values) | (group == sizes.shape[0])

        def product(values: Any) -> Any:
            # Products with 0 and 1 are exact unless the values themselves are rounded.
            rounds = values.dtype.itemsize > 2
            return jax.lax.dot_general(
                own.astype(values.dtype),
                jnp.where(group < sizes.shape[0], values, 0),
                (((0,), (0,)), ((), ())),
                precision=_HIGHEST if rounds else jax.lax.Precision.DEFAULT,
                preferred_element_type=_wide(values),
            )

        total = product(jnp.where(finite, values, 0))
        return jnp.where(product((~finite).astype(jnp.bfloat16)) > 0, jnp.nan, total)

    def _matmul(
        self, rows: Any, weights: Any, sizes: Any, dtype: Any, transposed: bool
    ) -> Any:
        # 0 * NaN is NaN, so matrices with one are left out, and their rows set to NaN.
        finite = jnp.all(jnp.isfinite(weights), axis=(1, 2))
        weights = jnp.where(finite[:, None, None], weights, 0)
        if transposed:
            out = self._general(rows, weights, sizes, ((1,), (2,)), [0], dtype)
        else:
            out = jax.lax.ragged_dot(
                rows,
                weights,
                sizes,
                precision=self.precision,
                preferred_element_type=dtype,
            )
        group = jnp.minimum(_groups(sizes, rows.shape[0]), weights.shape[0] - 1)
        return jnp.where(finite[group][:, None], out, jnp.nan)

    def _general(
        self,
        a: Any,
        b: Any,
        sizes: Any,
        contracting: Any,
        groups: list[int],
        dtype: Any,
    ) -> Any:
        dimensions = jax.lax.RaggedDotDimensionNumbers(
            (contracting, ((), ())), [0], groups
        )
        return jax.lax.ragged_dot_general(
            a,
            b,
            sizes,
            dimensions,
            precision=self.precision,
            preferred_element_type=dtype,
        )


class Tiles(NamedTuple):
    """A loop over tiles of rows, each of one group: on CPUs, where loops cost little.

    Its time follows the rows that the groups hold, not the room for them.
    """

    precision: Any

    def fprop(self, rows: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        return self._matmul(rows, weights, sizes, dtype, False)

    def dgrad(self, cotangents: Any, weights: Any, sizes: Any, dtype: Any) -> Any:
        return self._matmul(cotangents, weights, sizes, dtype, True)

    def wgrad(self, rows: Any, cotangents: Any, sizes: Any, dtype: Any) -> Any:
        wide = _wide(rows)
        tile = _tile(rows, sizes)
        contracting = (((0,), (0,)), ((), ()))
        padded = _padded(tile, rows.astype(wide), cotangents.astype(wide))
        within = jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)

        def step(at: Any, group: Any, end: Any, out: Any) -> Any:
            own = within < end - at
            x, y = (jnp.where(own, _slice(each, at, tile), 0) for each in padded)
            product = jax.lax.dot_general(x, y, contracting, precision=self.precision)
            total = jax.lax.dynamic_index_in_dim(out, group, 0, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(out, total + product, group, 0)

        shape = (sizes.shape[0], rows.shape[1], cotangents.shape[1])
        out = _over_tiles(step, rows, sizes, tile, jnp.zeros(shape, wide))
        return out.astype(dtype)

    def sums(self, values: Any, sizes: Any) -> Any:
        return _sums_of_products(values, sizes, Tiles(_HIGHEST), 1)

    def _matmul(
        self, rows: Any, weights: Any, sizes: Any, dtype: Any, transposed: bool
    ) -> Any:
        # Converted once: XLA would convert all of an array in each step of the loop.
        wide, matrices = rows.astype(_wide(rows)), weights.astype(_wide(rows))
        columns = weights.shape[1 if transposed else 2]
        tile = _tile(rows, sizes)
        contracting = (((1,), (1 if transposed else 0,)), ((), ()))

        def step(at: Any, group: Any, end: Any, out: Any) -> Any:
            del end
            matrix = jax.lax.dynamic_index_in_dim(matrices, group, 0, keepdims=False)
            product = jax.lax.dot_general(
                _slice(padded, at, tile), matrix, contracting, precision=self.precision
            )
            # What it writes past the end of its group, the next group overwrites.
            return jax.lax.dynamic_update_slice_in_dim(out, product, at, 0)

        (padded,) = _padded(tile, wide)
        shape = (padded.shape[0], columns)
        out = _over_tiles(step, rows, sizes, tile, jnp.zeros(shape, wide.dtype))
        return out[: rows.shape[0]].astype(dtype)


def _sums_of_products(values: Any, sizes: Any, products: Products, columns: int) -> Any:
    """Sums rows by `wgrad`, with `columns` columns of ones as its rows."""
    ones = jnp.ones((values.shape[0], columns), values.dtype)
    given = varied(ones, values, sizes)
    found: Any = wgrad(*given, products, jnp.dtype(_wide(values)))
    return found[:, 0]


def _tile(rows: Any, sizes: Any) -> int:
    """Returns the number of rows per tile: about those of a group, if all are full."""
    per_group = -(-rows.shape[0] // sizes.shape[0])
    return min(128, max(16, 1 << (per_group - 1).bit_length()))


def _padded(tile: int, *arrays: Any) -> list[Any]:
    """Returns arrays with a tile of zeros behind the last row."""
    return [jnp.pad(array, ((0, tile), (0, 0))) for array in arrays]


def _slice(array: Any, at: Any, tile: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, at, tile, 0)


def _over_tiles(step: Any, rows: Any, sizes: Any, tile: int, out: Any) -> Any:
    """Calls `out = step(first row, group, end of the group, out)` for each tile."""
    # Wrong sizes must not make the loop endless.
    ends = jnp.clip(jnp.cumsum(sizes), 0, rows.shape[0])

    def body(state: Any) -> Any:
        group, at, out = state
        end = ends[group]
        out = step(at, group, end, out)
        last = at + tile >= end
        return jnp.where(last, group + 1, group), jnp.where(last, end, at + tile), out

    zero = jnp.int32(0)
    start = _varies_as(rows, (zero, zero, out))
    return jax.lax.while_loop(lambda state: state[0] < sizes.shape[0], body, start)[2]


def _wide(values: Any) -> Any:
    """Returns the dtype of sums: float32, or float64 for values of it."""
    return jnp.promote_types(values.dtype, jnp.float32)


def _groups(sizes: Any, count: int) -> Any:
    return group_of_row(jnp.cumsum(sizes), count)


def fprop(rows: Any, weights: Any, sizes: Any, products: Products) -> Any:
    """Multiplies `[N, A]` by `[L, A, B]` to `[N, B]`; operands vary alike."""
    return _matmul(rows, weights, sizes, products, False, rows.dtype)


def dgrad(cotangents: Any, weights: Any, sizes: Any, products: Products) -> Any:
    """Multiplies `[N, B]` by the transposed `[L, A, B]`, to `[N, A]`."""
    return _matmul(cotangents, weights, sizes, products, True, cotangents.dtype)


# The derivatives of these matmuls consist of the same ones, so derivatives of any order
# work.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _matmul(
    rows: Any,
    weights: Any,
    sizes: Any,
    products: Products,
    transposed: bool,
    dtype: Any,
) -> Any:
    def multiply(rows: Any, weights: Any, sizes: Any) -> Any:
        run = products.dgrad if transposed else products.fprop
        return _varies_as(rows, run(rows, weights, sizes, dtype))

    return batching.in_turn(multiply)(rows, weights, sizes)


def _matmul_forward(
    rows: Any,
    weights: Any,
    sizes: Any,
    products: Products,
    transposed: bool,
    dtype: Any,
) -> Any:
    kept = (rows, weights, sizes)
    return _matmul(*kept, products, transposed, dtype), kept


def _matmul_backward(
    products: Products, transposed: bool, dtype: Any, kept: Any, cotangent: Any
) -> Any:
    del dtype
    rows, weights, sizes = kept
    cotangent = cotangent.astype(rows.dtype)
    pair = (cotangent, rows) if transposed else (rows, cotangent)
    run = fprop if transposed else dgrad
    to_rows = run(cotangent, weights, sizes, products)
    return to_rows, wgrad(*pair, sizes, products, weights.dtype), None


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def wgrad(
    rows: Any, cotangents: Any, sizes: Any, products: Products, dtype: Any
) -> Any:
    """Sums outer products of `[N, A]` and `[N, B]` over each group, to `[L, A, B]`.

    The result has dtype `dtype`, to which the sums are rounded once.
    """

    def multiply(rows: Any, cotangents: Any, sizes: Any) -> Any:
        return _varies_as(rows, products.wgrad(rows, cotangents, sizes, dtype))

    return batching.in_turn(multiply)(rows, cotangents, sizes)


def _wgrad_forward(
    rows: Any, cotangents: Any, sizes: Any, products: Products, dtype: Any
) -> Any:
    kept = (rows, cotangents, sizes)
    return wgrad(*kept, products, dtype), kept


def _wgrad_backward(products: Products, dtype: Any, kept: Any, cotangent: Any) -> Any:
    del dtype
    rows, cotangents, sizes = kept
    matrices = cotangent.astype(rows.dtype)
    to_rows = dgrad(cotangents, matrices, sizes, products)
    return to_rows, fprop(rows, matrices, sizes, products), None


wgrad.defvjp(_wgrad_forward, _wgrad_backward)


def _varies_as(like: Any, result: Any) -> Any:
    """Marks arrays as varying over the axes of `like`, for check_vma."""
    axes = varying(like)
    return vary_alike(sorted(axes), axes, result)[0]
