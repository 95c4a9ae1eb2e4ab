"""EPConfig: the sizes and options of one expert-parallel layer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ep._core import calls, errors, formats
from jax_ep._core.arrays import dtype_of
from jax_ep._core.literals import (
    DTYPES,
    OVERLAPS,
    REDUCES,
    SCALE_LAYOUTS,
    Dtype,
    Format,
    Overlap,
    Reduce,
    ScaleLayout,
    WireFormat,
)
from jax_ep._native.loader import cpu as native

MAX_PENDING_CALLS = 2
MAX_TIMEOUT_S = 1e6
CAPACITY_MULTIPLE = 128


def _require(holds: bool, rule: str, value: Any, remedy: str) -> None:
    errors.require(holds, "EPConfig", rule, errors.brief(value), remedy)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    bound = f"in [{low}, {high}]" if high is not None else f"at least {low}"
    # Not isinstance: a bool is an int, too.
    if type(value) is not int:
        raise errors.invalid(
            "EPConfig",
            f"{name} must be an int",
            f"{errors.brief(value)} of type {type(value).__name__}",
            "convert it with int()",
            kind=TypeError,
        )
    _require(
        value >= low and (high is None or value <= high),
        f"{name} must be {bound}",
        value,
        "pass a value within these bounds",
    )


class _Field:
    """A field whose attribute has another type than its argument.

    Type checkers read the argument's type from `__set__` and the attribute's type from
    `__get__`.
    """

    def __set_name__(self, owner: type[EPConfig], name: str) -> None:
        """Remembers the field's name in `vars(config)`."""
        self._name = name


class DtypeName(_Field):
    """A field that takes a dtype and keeps its name."""

    def __get__(self, config: EPConfig | None, owner: type[EPConfig]) -> Dtype:
        """Returns the name, or on the class the default, as `dataclasses` expects."""
        return "bfloat16" if config is None else vars(config)[self._name]

    def __set__(self, config: EPConfig, value: DTypeLike) -> None:
        """Stores the name; only `__init__` gets here, as the dataclass is frozen."""
        vars(config)[self._name] = _dtype_name(self._name, value)


class DtypeNameOrNone(_Field):
    """A field that takes a dtype or None, and keeps the dtype's name."""

    def __get__(self, config: EPConfig | None, owner: type[EPConfig]) -> Dtype | None:
        """Returns the name or None, like `DtypeName.__get__`."""
        return None if config is None else vars(config)[self._name]

    def __set__(self, config: EPConfig, value: DTypeLike | None) -> None:
        """Stores the name or None, like `DtypeName.__set__`."""
        name = None if value is None else _dtype_name(self._name, value)
        vars(config)[self._name] = name


@calls.explained_class("EPConfig")
@dataclasses.dataclass(frozen=True, kw_only=True)
class EPConfig:
    """Sizes and options of one expert-parallel layer; frozen, hashable, validated.

    Attributes:
        num_experts: E, experts of the whole group; a multiple of the group's ranks.
        top_k: K, experts per token; at most 32.
        hidden_size: H, elements per token; a token must be a multiple of 16 bytes.
        max_tokens_per_rank: T, the most tokens that a rank passes to one call.
        dtype: dtype of tokens and expert outputs: bfloat16, float16 or float32. Takes
            anything that `jax.numpy.dtype` takes, and keeps its name.
        dispatch_format: token format on the wire, one of `jax_ep.formats.names()`;
            "bf16" sends tokens unchanged.
        combine_dtype: dtype of the rows that combine sends; None means `dtype`.
        combine_format: format of the rows that combine sends, one of
            `jax_ep.formats.wire_names()` ("fp8_block128"); None sends `combine_dtype`.
        grad_format: format of the rows that the backward pass sends, one of the same
            names; None does not quantise them.
        reduce: where combine sums the rows of a token: "rank" (each expert rank sums
            its own before sending), "source" (the source rank sums all), or "none".
        recv_capacity: N, output rows per rank; not together with `capacity_factor`.
        capacity_factor: sets N = round_up(ceil(capacity_factor * T * K), 128). With
            neither option, N is the worst case for distinct ids.
        expert_alignment: the length of each group is padded to a multiple of this.
        scale_layout: "rows", "tiled_128x4" or "columns".
        zero_tail: whether rows past the last group are set to zero.
        fused_shared_expert: whether group 0 holds the rows of a shared expert.
        skip_a2a: whether every rank holds the same tokens, so nothing is exchanged.
        allreduce_world_size: W, number of ranks that split the shared expert with
            `skip_a2a`: those with equal `rank // W`, which hold the same tokens. It
            must divide R, or be R without `skip_a2a`; None means R.
        pending_calls: how many dispatches, and how many combines, may be pending at
            once: 0, 1 or 2. None means 0, or 1 if `overlap` is "copy" or "stream".
            `dispatch_async` and `combine_async` need at least 1. Each takes room in
            the windows of a GPU transport.
        overlap: what moves the data of `dispatch_async` and `combine_async` on a GPU
            transport. "sm": its kernels. "stream": its kernels, those of the first
            halves on XLA's stream for collectives (from jax 0.11.1 on). "copy": XLA's
            all-to-all, on copy engines if XLA's flag requests them, and with XLA's time
            limits for a missing rank.
        num_sms: how many SMs the kernels of a GPU transport use; None chooses by shape.
        ranks_per_node: simulates nodes of this many ranks in tests; None detects the
            real nodes.
        timeout_s: limit on every wait of p2p and shmem, in seconds.

    Raises:
        ValueError, TypeError: a field is not as described above.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: DtypeName = DtypeName()
    dispatch_format: Format = "bf16"
    combine_dtype: DtypeNameOrNone = DtypeNameOrNone()
    combine_format: WireFormat | None = None
    grad_format: WireFormat | None = None
    reduce: Reduce = "rank"
    recv_capacity: int | None = None
    capacity_factor: float | None = None
    expert_alignment: int = 1
    scale_layout: ScaleLayout = "rows"
    zero_tail: bool = True
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    allreduce_world_size: int | None = None
    pending_calls: int | None = None
    overlap: Overlap = "sm"
    num_sms: int | None = None
    ranks_per_node: int | None = None
    timeout_s: float = 100.0

    def __post_init__(self) -> None:
        """Validates every field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            # NumPy scalars are common as sizes; calls' attributes need Python numbers.
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())
        self._check_sizes()
        self._check_options()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Validates the content of a pickle, which may have been changed."""
        type(self).__init__(self, **state)

    def _check_sizes(self) -> None:
        _require_int("num_experts", self.num_experts, 1, native.MAX_EXPERTS)
        _require_int("top_k", self.top_k, 1, native.MAX_TOP_K)
        _require(
            self.top_k <= self.num_experts,
            f"top_k must be at most num_experts, {self.num_experts}",
            self.top_k,
            "lower top_k or raise num_experts",
        )
        _require_int("hidden_size", self.hidden_size, 1, native.MAX_HIDDEN)
        limit = native.MAX_INDEX
        _require_int("max_tokens_per_rank", self.max_tokens_per_rank, 1, limit)
        _require_int("expert_alignment", self.expert_alignment, 1, limit)
        if self.pending_calls is not None:
            _require_int("pending_calls", self.pending_calls, 0, MAX_PENDING_CALLS)
        for name in ("allreduce_world_size", "num_sms", "ranks_per_node"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        row_bytes = self.hidden_size * self.element_bytes
        _require(
            row_bytes % native.ROW_ALIGN_BYTES == 0,
            f"hidden_size must make a token of {self.dtype} a multiple of "
            f"{native.ROW_ALIGN_BYTES} bytes",
            self.hidden_size,
            f"use a multiple of {native.ROW_ALIGN_BYTES // self.element_bytes}",
        )
        _require(
            self.recv_capacity is None or self.capacity_factor is None,
            "recv_capacity and capacity_factor must not both be given",
            (self.recv_capacity, self.capacity_factor),
            "give only one of them",
        )
        if self.recv_capacity is not None:
            _require_int("recv_capacity", self.recv_capacity, 1, native.MAX_INDEX)
        if self.capacity_factor is not None:
            _require(
                _is_number(self.capacity_factor) and 0 < self.capacity_factor <= limit,
                f"capacity_factor must be a positive number of at most {limit}",
                self.capacity_factor,
                "1.25 is a common choice",
            )
        _require(
            _is_number(self.timeout_s) and 0 < self.timeout_s <= MAX_TIMEOUT_S,
            f"timeout_s must be a positive number of at most {MAX_TIMEOUT_S:g} seconds",
            self.timeout_s,
            "the default is 100.0",
        )

    def _check_options(self) -> None:
        names = formats.names()
        _require(
            errors.is_one_of(self.dispatch_format, names),
            f"dispatch_format must be one of {list(names)}",
            self.dispatch_format,
            '"bf16" sends tokens unchanged',
        )
        for name, allowed in (
            ("reduce", REDUCES),
            ("scale_layout", SCALE_LAYOUTS),
            ("overlap", OVERLAPS),
            ("combine_format", (None, *formats.wire_names())),
            ("grad_format", (None, *formats.wire_names())),
        ):
            value = getattr(self, name)
            _require(
                errors.is_one_of(value, allowed),
                f"{name} must be one of {list(allowed)}",
                value,
                f"the default is {allowed[0]!r}",
            )
        self._check_formats()
        for name in ("zero_tail", "fused_shared_expert", "skip_a2a"):
            value = getattr(self, name)
            _require(
                isinstance(value, bool),
                f"{name} must be a bool",
                value,
                "pass True or False",
            )
        _require(
            not self.fused_shared_expert or self.top_k < native.MAX_TOP_K,
            f"top_k must be at most {native.MAX_TOP_K - 1} with fused_shared_expert",
            self.top_k,
            "compute the shared expert outside of the dispatch",
        )
        unsent = {"combine_dtype": self.dtype, "overlap": "sm"}
        for name in ("combine_format", "grad_format", *unsent):
            _require(
                not self.skip_a2a or getattr(self, name) in (None, unsent.get(name)),
                f"{name} must be {unsent.get(name)} with skip_a2a",
                getattr(self, name),
                "leave it out, as skip_a2a sends nothing",
            )
        _require(
            not (self.reduce == "none" and self.fused_shared_expert),
            'reduce="none" must not be used with fused_shared_expert',
            (self.reduce, self.fused_shared_expert),
            'use reduce="rank" or "source"',
        )

    def _check_formats(self) -> None:
        for name in (self.dispatch_format, self.combine_format, self.grad_format):
            if name is None or not formats.is_quantized(name):
                continue
            block = formats.block(name)
            _require(
                self.hidden_size % block == 0,
                f"hidden_size must be a multiple of {name}'s block of {block}",
                self.hidden_size,
                "pad the hidden dimension or take another format",
            )
            payload, _ = native.encoded_bytes(
                name, self.hidden_size, self.element_bytes
            )
            _require(
                payload % native.ROW_ALIGN_BYTES == 0,
                f"hidden_size must make a token in {name} a multiple of "
                f"{native.ROW_ALIGN_BYTES} bytes",
                self.hidden_size,
                "pad the hidden dimension or take another format",
            )
        _require(
            self.combine_format is None or self.combine_dtype is None,
            "combine_format and combine_dtype must not both be given",
            (self.combine_format, self.combine_dtype),
            "leave combine_dtype out, as the format decides what is sent",
        )
        if self.scale_layout == "rows":
            return
        columns = self.scale_layout == "columns"
        has_layout = formats.columns_of_scales if columns else formats.tiles_scales
        allowed = [name for name in formats.names() if has_layout(name)]
        _require(
            self.dispatch_format in allowed,
            f'scale_layout="{self.scale_layout}" must have one of {allowed} as '
            "dispatch_format",
            self.dispatch_format,
            'use one of them, or scale_layout="rows"',
        )
        if columns:
            return
        multiple = 4 * formats.block(self.dispatch_format)
        _require(
            self.hidden_size % multiple == 0,
            f"hidden_size must be a multiple of {multiple} with scale_layout="
            f'"{self.scale_layout}"',
            self.hidden_size,
            'pad the hidden dimension or use scale_layout="rows"',
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of `dtype`."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def wire_dtype(self) -> Dtype:
        """Dtype of the rows that combine sends, before any format."""
        return self.combine_dtype or self.dtype

    @property
    def combine_wire(self) -> str:
        """Dtype or format in which combine sends rows."""
        return self.combine_format or self.wire_dtype

    @property
    def column_multiple(self) -> int:
        """Rows of combine and along a route have a multiple of this many columns."""
        wires = (self.combine_format, self.grad_format)
        blocks = [formats.block(name) for name in wires if name is not None]
        return math.lcm(native.ROW_ALIGN_BYTES // self.element_bytes, *blocks)

    @property
    def most_pending(self) -> int:
        """How many calls of one kind may be pending at once."""
        if self.pending_calls is not None:
            return self.pending_calls
        return 0 if self.overlap == "sm" else 1

    @property
    def grad_wire(self) -> str:
        """Dtype or format in which the backward pass sends rows to be summed."""
        return self.grad_format or self.dtype

    @property
    def grad_wire_format(self) -> Format:
        """Format in which a cached dispatch of the backward pass sends tokens."""
        return self.grad_format or "bf16"

    def capacity(self, ep_size: int) -> int:
        """Returns N, the output rows per rank in a group of `ep_size` ranks."""
        if self.recv_capacity is not None:
            return self.recv_capacity
        tokens, top_k = self.max_tokens_per_rank, self.top_k
        if self.capacity_factor is not None:
            rows = math.ceil(self.capacity_factor * tokens * top_k)
            return -(-rows // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
        local_experts = self.num_experts // ep_size
        groups = local_experts + (1 if self.fused_shared_expert else 0)
        sources = 1 if self.skip_a2a else ep_size
        rows = sources * tokens * min(top_k, local_experts)
        rows += groups * (self.expert_alignment - 1)
        return rows + (tokens if self.fused_shared_expert else 0)


def _dtype_name(field: str, value: Any) -> Dtype:
    found = dtype_of(value)
    name = found and found.name
    remedy = (
        "cast tokens to one of these"
        if field == "dtype"
        else "leave it out to use dtype"
    )
    _require(name in DTYPES, f"{field} must be one of {list(DTYPES)}", value, remedy)
    return cast(Dtype, name)
