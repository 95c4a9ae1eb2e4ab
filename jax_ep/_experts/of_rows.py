"""Experts on rows: SwiGLU, or another activation, between two grouped matmuls."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep._core import calls, errors, operands
from jax_ep._core.literals import DTYPES
from jax_ep._core.operands import Operand
from jax_ep._core.types import Dispatched
from jax_ep._experts import (
    activations,
    biases,
    devices,
    fused,
    grouped,
    kernels,
    operations,
    orders,
)
from jax_ep._experts.activations import Activation
from jax_ep._experts.interface import Case, Experts
from jax_ep._experts.kernels import GateUp
from jax_ep._experts.quantized import QuantizedWeights
from jax_ep._ops.expert_of_row import group_of_row

_ITEMSIZE = 2  # of the dtypes that `hopper` takes
# The kinds of devices, and dtypes, of which `auto` has warned in this process.
_told: set[tuple[str, str]] = set()
# The values of `jax.default_matmul_precision` that round float32.
_ROUNDED = (None, "default", "fastest", "tensorfloat32", "bfloat16")

# For who calls them as `jax_ep.experts.fp8` is called.
_OF_ROWS = (
    "pass d.tokens, or jax_ep.dequantize(d), and d.group_sizes; only "
    "jax_ep.experts.fp8 takes a whole d"
)


class Operands(NamedTuple):
    """The rows `[N, H]`, the matrices in any floating dtype, and the group sizes."""

    rows: jax.Array
    gate_up: GateUp
    down: jax.Array
    group_sizes: jax.Array


class Options(NamedTuple):
    """The optional keywords of experts, and their effect on rows."""

    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None
    activation: Any = None
    gated: bool = True

    def activate(
        self,
        gate_up_rows: GateUp,
        group_sizes: jax.Array,
        has_token: jax.Array,
        products: grouped.Products,
    ) -> jax.Array:
        """Returns the rows that `down` multiplies, from gate and up without biases.

        Args:
            gate_up_rows: `[N, 2 * F]`, or a pair of gate and up `[N, F]`; without a
                gate up `[N, F]`.
            group_sizes: int32 `[L]`.
            has_token: bool `[N]`, False for rows that hold no token.
            products: what sums the gradients of biases.
        """
        given = self.gate_bias, self.up_bias
        if not self.gated:
            up: Any = gate_up_rows
            if self.up_bias is not None:
                up = biases.add(up, self.up_bias, group_sizes, products)
            of_up = self.activation
            return activations.apply(lambda _, up: of_up(up), up, up, has_token)
        if isinstance(gate_up_rows, tuple):
            gate, up = (
                side if bias is None else biases.add(side, bias, group_sizes, products)
                for side, bias in zip(gate_up_rows, given, strict=True)
            )
        else:
            if given != (None, None):
                shape = group_sizes.shape[0], gate_up_rows.shape[1] // 2
                bias = biases.joined(*given, shape)
                gate_up_rows = biases.add(gate_up_rows, bias, group_sizes, products)
            gate, up = jnp.split(gate_up_rows, 2, axis=-1)
        if self.activation is None:
            return jax.nn.silu(gate) * up
        return activations.apply(self.activation, gate, up, has_token)

    def of_kernels(self) -> kernels.Biases:
        """Returns the biases as kernels take them."""
        down = self.down_bias
        return kernels.Biases(
            biases.of_kernels(self.gate_bias, self.up_bias),
            None if down is None else jnp.asarray(down).astype(jnp.float32),
        )

    def finish(
        self, rows: jax.Array, group_sizes: jax.Array, products: grouped.Products
    ) -> jax.Array:
        """Returns the result of the experts, from the product with `down`."""
        if self.down_bias is None:
            return rows
        return biases.add(rows, jnp.asarray(self.down_bias), group_sizes, products)


class OfRows(Experts):
    """Experts on rows `[N, H]`, in the dtype of the rows.

    Attributes:
        kinds: the dtypes that rows may have, in words.
    """

    kinds: str = "bfloat16, float16 or float32"
    takes_pair = True
    splits_by_group = True
    casts_weights = True

    @calls.explained(lambda self: f"experts.{self.name}", _OF_ROWS)
    def __call__(
        self,
        rows: jax.Array,
        gate_up: GateUp,
        down: jax.Array,
        group_sizes: jax.Array,
        *,
        gate_bias: jax.Array | None = None,
        up_bias: jax.Array | None = None,
        down_bias: jax.Array | None = None,
        activation: Activation | None = None,
        device: Any = None,
    ) -> jax.Array:
        """Applies the experts.

        Args:
            rows: `[N, H]`, grouped by expert. Rows past the last group may hold
                anything.
            gate_up: `[L, H, 2, F]`, gate first, or a pair of gate and up `[L, H, F]`,
                which are not copied.
            down: `[L, F, H]`.
            group_sizes: int32 `[L]`, rows of each group.
            gate_bias: `[L, F]`, or None.
            up_bias: `[L, F]`, or None.
            down_bias: `[L, H]`, or None.
            activation: a function of (gate, up) `[N, F]`; None means
                `silu(gate) * up`.
            device: the `jax.Device` to run on; None means this process's first.

        Returns:
            `[N, H]` in the dtype of the rows. Rows past the last group are unspecified.

        Raises:
            ValueError, TypeError: while tracing, if shapes are not as described above,
                if the rows do not have a floating dtype of 16 bits or more, for example
                because they are the codes of a quantised dispatch, or if these experts
                cannot run here.
        """
        function = f"experts.{self.name}"
        given = Operands(rows, gate_up, down, group_sizes)
        gated = orders.is_gated(gate_up)
        options = Options(gate_bias, up_bias, down_bias, activation, gated)
        _require_operands(function, self.kinds, given, options)
        if isinstance(gate_up, list):
            given = given._replace(gate_up=tuple(gate_up))
        device = device or jax.local_devices()[0]
        case = Case(device, rows.dtype.name)
        obstacle = self.obstacle(case)
        if obstacle is not None:
            raise ValueError(
                f"jax_ep.{function}: must have {obstacle}; use "
                "jax_ep.experts.Padded or leave experts out"
            )
        return self.apply(case, given, options)

    def on(self, device: Any) -> Any:
        """Returns a partial with this device."""
        return functools.partial(self, device=device)

    def apply(self, case: Case, given: Operands, options: Options) -> jax.Array:
        """Applies the experts, as two matmuls, to operands that have been checked."""
        products = self.products(case)
        rows, gate_up, down, group_sizes = given
        gate_up, down = _wide(rows, gate_up, down)

        def multiply(matrices: jax.Array) -> jax.Array:
            return grouped.matmul(rows, matrices, group_sizes, products)

        gate_up_rows = jax.tree.map(multiply, gate_up)
        has_token = operations.rows_in_groups(group_sizes, rows.shape[0])
        h = options.activate(gate_up_rows, group_sizes, has_token, products)
        out = grouped.matmul(h, down, group_sizes, products)
        return options.finish(out, group_sizes, products)

    def products(self, case: Case) -> grouped.Products:
        """Returns what multiplies."""
        raise NotImplementedError


class RaggedDot(OfRows):
    """Experts by `jax.lax.ragged_dot`, on any device and for any sizes.

    If XLA has no grouped matmul for a GPU, it multiplies every row by the matrices of
    all local experts, which is L times the arithmetic; `ragged_dot_is_dense` says
    whether it does. On CPUs it is a loop over tiles of rows, each of one group.
    """

    name = "ragged_dot"

    def products(self, case: Case) -> grouped.Products:
        return grouped.everywhere(device=case.device)


class Hopper(OfRows):
    """Experts by grouped matmuls for Hopper GPUs, in bfloat16 and float16.

    Biases, SwiGLU and the activations of `jax_ep.experts`, and their derivatives, are
    part of the matmuls; other activations run between them. Derivatives of any order
    work. Columns that are not
    multiples of 8 are padded, which copies rows and weights. `hopper_obstacle` says why
    they do not run.
    """

    name = "hopper"
    kinds = "bfloat16 or float16"

    def obstacle(self, case: Case) -> str | None:
        if jnp.dtype(case.dtype).itemsize != _ITEMSIZE:
            return f"rows in {self.kinds}, got {case.dtype}"
        return devices.device_obstacle(case.device)

    def reads_tail(self, case: Case) -> bool:
        del case
        return False

    def products(self, case: Case) -> grouped.Products:
        del case
        return grouped.HOPPER

    def apply(self, case: Case, given: Operands, options: Options) -> jax.Array:
        products: Any = self.products(case)
        activation = activations.of_kernels(options.activation)
        if activation is None or not options.gated:
            return super().apply(case, given, options)
        return fused.apply(*given, options.of_kernels(), activation, products)


class Portable(Hopper):
    """Experts by grouped matmuls for GPUs of compute capability 8.0 and newer.

    They take bfloat16, float16 and float32, which is multiplied as
    `jax.default_matmul_precision` says: rounded to TF32 by default, and with "high" or
    "highest" as the sum of three products of TF32, whose error is at most 2^-20 of the
    product of the magnitudes. All else is as in `hopper`. On CPUs they are those of
    `ragged_dot`.
    """

    name = "portable"
    kinds = "bfloat16, float16 or float32"

    def obstacle(self, case: Case) -> str | None:
        if case.dtype not in DTYPES:
            return f"rows in {self.kinds}, got {case.dtype}"
        if case.device.platform == "cpu":
            return None
        return devices.portable_obstacle(case.device)

    def reads_tail(self, case: Case) -> bool:
        return case.device.platform == "cpu"

    def products(self, case: Case) -> grouped.Products:
        if case.device.platform == "cpu":
            return grouped.everywhere(device=case.device)
        exact = grouped.default_precision() not in _ROUNDED
        return grouped.portable(case.dtype == "float32" and exact)

    def apply(self, case: Case, given: Operands, options: Options) -> jax.Array:
        if case.device.platform == "cpu":
            return OfRows.apply(self, case, given, options)
        return super().apply(case, given, options)


class Auto(OfRows):
    """`hopper` where it runs, else `portable`, else `ragged_dot`."""

    name = "auto"

    def reads_tail(self, case: Case) -> bool:
        return first(case).reads_tail(case)

    def products(self, case: Case) -> grouped.Products:
        return first(case).products(case)

    def apply(self, case: Case, given: Operands, options: Options) -> jax.Array:
        lack = shortfall(case)
        told = case.device.device_kind, case.dtype
        if lack is not None and told not in _told:
            _told.add(told)
            warnings.warn(f"jax_ep.experts.auto: {lack}", RuntimeWarning, stacklevel=4)
        return first(case).apply(case, given, options)


IN_ORDER: tuple[OfRows, ...] = (Hopper(), Portable(), RaggedDot())


def first(case: Case) -> OfRows:
    """Returns the first implementation that runs; the last one always does."""
    return next(each for each in IN_ORDER if each.obstacle(case) is None)


def shortfall(case: Case) -> str | None:
    """Returns what is slow about `auto` on a GPU and what to do, or None."""
    found = first(case)
    if case.device.platform == "cpu" or found.name != RaggedDot.name:
        return None
    why = "; ".join(f"{name} must have {lack}" for name, lack in reasons(case).items())
    return (
        f"experts in {case.dtype} must run by kernels to be fast, got "
        f"jax.lax.ragged_dot, which may multiply each row by all local experts: {why}; "
        "use a dtype and a GPU that they take, or jax_ep.experts.Padded(largest)"
    )


def reasons(case: Case) -> dict[str, str]:
    """Returns why implementations before `first` do not run, by name."""
    found = {}
    for each in IN_ORDER:
        obstacle = each.obstacle(case)
        if obstacle is None:
            break
        found[each.name] = obstacle
    return found


@dataclasses.dataclass(frozen=True)
class Padded(OfRows):
    """Pads every group to `largest` rows and applies experts with batched matmuls.

    Arithmetic and memory are those of `L * largest` rows, whatever the routing. Rows of
    a group beyond `largest` are dropped: their results are zeros without gradients.
    Compare `largest` with `aux.expert_counts.max()`; with a fused shared expert, group
    0 has all n tokens of the rank.

    Attributes:
        largest: the most rows that a group may have; multiples of 128 suit GPUs.

    Raises:
        ValueError: `largest` is not a positive int.
    """

    largest: int

    def __post_init__(self) -> None:
        """Checks `largest`."""
        if type(self.largest) is not int or self.largest < 1:
            raise ValueError(
                "jax_ep.experts.Padded: largest must be a positive int, got "
                f"{errors.brief(self.largest)}; start with 1.25 * T * K * R / E, "
                "rounded up"
            )

    name = "Padded"

    def __repr__(self) -> str:
        """The expression that makes it."""
        return f"jax_ep.experts.Padded(largest={self.largest})"

    def products(self, case: Case) -> grouped.Products:
        return grouped.everywhere(device=case.device)

    def apply(self, case: Case, given: Operands, options: Options) -> jax.Array:
        rows, gate_up, down, group_sizes = given
        groups, _, hidden = down.shape
        gate_up, down = _wide(rows, gate_up, down)
        row, filled, at, kept = _places(group_sizes, rows.shape[0], self.largest)
        padded = _gather(rows, row, at, kept)
        padded = jnp.where(filled[:, None], padded, 0)
        padded = padded.reshape(groups, self.largest, hidden)
        even = jnp.full(groups, self.largest, jnp.int32)
        products = self.products(case)

        def multiply(matrices: jax.Array) -> jax.Array:
            found = jnp.einsum("lnh,lhf->lnf", padded, matrices)
            return found.reshape(-1, found.shape[-1])

        gate_up_rows = jax.tree.map(multiply, gate_up)
        h = options.activate(gate_up_rows, even, filled, products)
        # Places without a row hold what an activation made of another expert's row.
        h = jnp.where(filled[:, None], h, 0).reshape(groups, self.largest, -1)
        out = jnp.einsum("lnf,lfh->lnh", h, down).reshape(-1, hidden)
        out = options.finish(out, even, products)
        return jnp.where(kept[:, None], _gather(out, at, row, filled), 0)


def _require_operands(
    function: str,
    kinds: str,
    given: Operands,
    options: Options,
) -> None:
    if isinstance(given.rows, Dispatched):
        raise errors.invalid(
            function,
            "rows must be an array",
            "a whole Dispatched",
            _OF_ROWS,
            operand="rows",
            kind=TypeError,
        )
    if isinstance(given.gate_up, QuantizedWeights):
        raise errors.invalid(
            function,
            "gate_up must be an array",
            "a QuantizedWeights",
            "pass experts=jax_ep.experts.fp8, which multiplies codes",
            operand="gate_up",
            kind=TypeError,
        )
    rows = Operand(
        "rows and group_sizes",
        "[N, H] and [L]",
        (operands.WIDE_FLOATS._replace(words=kinds), "int32"),
        "pass those of the dispatch",
    )
    of_experts = given._asdict() | options._asdict()
    matrices = orders.MATRICES
    if not options.gated:
        matrices = orders.UNGATED
        errors.require(
            options.activation is not None and options.gate_bias is None,
            function,
            "experts without a gate need activation, a function of up, and take no "
            "gate_bias",
            f"activation={errors.brief(options.activation)}",
            "pass activation=, or a gate_up of [L, H, 2, F]",
        )
    if orders.is_pair(given.gate_up):
        matrices = orders.PAIR
        of_experts["gate"], of_experts["up"] = given.gate_up
    operands.checked(function, (rows, matrices, *_BIASES), of_experts)


_BIASES = tuple(
    Operand(name, shape, operands.FLOATS, "pass those of the matrices", optional=True)
    for name, shape in (
        ("gate_bias", "[L, F]"),
        ("up_bias", "[L, F]"),
        ("down_bias", "[L, H]"),
    )
)


def _wide(
    rows: jax.Array, gate_up: GateUp, down: jax.Array
) -> tuple[GateUp, jax.Array]:
    """Returns the matrices in the dtype of rows, gate and up side by side or apart."""

    def cast(matrices: jax.Array) -> jax.Array:
        cast = matrices.astype(rows.dtype)
        return cast.reshape(*cast.shape[:2], -1)

    return jax.tree.map(cast, gate_up), cast(down)


def _places(group_sizes: jax.Array, count: int, largest: int) -> tuple[jax.Array, ...]:
    """Maps padded places to rows and back.

    Returns:
        For each padded place its row, and whether it has one; for each row its padded
        place, and whether it has one.
    """
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    place = jnp.arange(largest, dtype=jnp.int32)
    row = jnp.minimum(starts[:, None] + place[None, :], count - 1)
    filled = place[None, :] < group_sizes[:, None]
    index = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(group_of_row(ends, count), group_sizes.size - 1)
    within = index - starts[group]
    at = group * largest + jnp.clip(within, 0, largest - 1)
    kept = (within < largest) & (index < ends[-1])
    return row.reshape(-1), filled.reshape(-1), at, kept


@jax.custom_vjp
def _gather(x: jax.Array, at: jax.Array, back: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns `x[at]`, with a derivative that is a gather, too.

    Row i of x occurs in the result at `back[i]` alone if `kept[i]`, and else nowhere,
    so no scatter of rows is needed, which would be slow on GPUs.
    """
    del back, kept
    return x[at]


def _gather_forward(x: Any, at: Any, back: Any, kept: Any) -> Any:
    return x[at], (back, kept)


def _gather_backward(saved: Any, cotangent: Any) -> Any:
    back, kept = saved
    return jnp.where(kept[:, None], cotangent[back], 0), None, None, None


_gather.defvjp(_gather_forward, _gather_backward)
