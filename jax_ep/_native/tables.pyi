# Written by .ci/table_stubs.py.
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar, overload

import jax

Size = tuple[tuple[str, ...], int]
T = TypeVar("T")

@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    dtype: str
    shape: tuple[Size, ...]
    form: str
    given: str | None
    omitted: tuple[Size, ...]
    when: str | None
    other: tuple[Size, ...]
    other_dtype: str
    in_place_of: str | None
    def shape_with(self, flags: Mapping[str, bool]) -> tuple[Size, ...]: ...
    def dtype_with(self, flags: Mapping[str, bool]) -> str: ...

@dataclasses.dataclass(frozen=True)
class Attribute:
    name: str
    type: str
    dim: str | None

@dataclasses.dataclass(frozen=True)
class Table:
    operands: tuple[Row, ...]
    results: tuple[Row, ...]
    attributes: tuple[Attribute, ...]
    packed: bool
    @property
    def from_operands(self) -> frozenset[str]: ...
    @property
    def shown(self) -> frozenset[str]: ...

TABLES: dict[str, Table]

def type_name(target: str) -> str: ...
def pick(kind: type[T], results: Any, **others: Any) -> T: ...
def struct(like: Any, shape: tuple[int, ...], dtype: Any) -> Any: ...
def zeros(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array: ...

class Pack(NamedTuple):
    send: jax.Array
    slot_of: jax.Array
    position: jax.Array
    num_invalid: jax.Array

class PackOperands(TypedDict):
    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    input_scale: jax.Array
    token_scales: NotRequired[jax.Array | None]

class PackAttributes(TypedDict):
    key: int
    site: int
    in_halves: bool
    num_experts: int
    format: str

class Unpack(NamedTuple):
    tokens: jax.Array
    scales: jax.Array | None
    row_offsets: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    expert_ids: jax.Array
    scales_offsets: jax.Array | None
    src_info: jax.Array
    router_weights: jax.Array
    num_dropped: jax.Array
    row_of: jax.Array
    row_slot: jax.Array
    slot_counts: jax.Array
    row_base: jax.Array
    slot_of: jax.Array
    num_invalid: jax.Array

class UnpackOperands(TypedDict):
    recv: jax.Array
    slot_of: jax.Array
    num_invalid: jax.Array

class UnpackAttributes(TypedDict):
    key: int
    expert_alignment: int
    zero_tail: bool
    format: str
    scale_layout: str

class PackCached(NamedTuple):
    send: jax.Array

class PackCachedOperands(TypedDict):
    tokens: jax.Array
    weights: NotRequired[jax.Array | None]
    slot_of: jax.Array

class PackCachedAttributes(TypedDict):
    key: int
    site: int
    format: str

class UnpackCached(NamedTuple):
    rows: jax.Array
    row_weights: jax.Array | None

class UnpackCachedOperands(TypedDict):
    recv: jax.Array
    row_of: jax.Array
    row_slot: jax.Array

class UnpackCachedAttributes(TypedDict):
    key: int
    format: str
    with_weights: bool

class CombinePack(NamedTuple):
    send: jax.Array

class CombinePackOperands(TypedDict):
    expert_out: jax.Array
    router_weights: NotRequired[jax.Array | None]
    weight_grads: NotRequired[jax.Array | None]
    row_of: jax.Array
    slot_counts: jax.Array

class CombinePackAttributes(TypedDict):
    key: int
    site: int
    in_halves: bool
    combine_dtype: str

class CombineUnpack(NamedTuple):
    output: jax.Array
    weight_grads: jax.Array | None

class CombineUnpackOperands(TypedDict):
    recv: jax.Array
    slot_of: jax.Array
    residual: NotRequired[jax.Array | None]
    entry_weights: NotRequired[jax.Array | None]
    shared_rows: NotRequired[jax.Array | None]
    shared_part: NotRequired[jax.Array | None]

class CombineUnpackAttributes(TypedDict):
    key: int
    by_entry: bool
    combine_dtype: str
    with_weight_grads: bool

class Dispatch(NamedTuple):
    tokens: jax.Array
    scales: jax.Array | None
    row_offsets: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    expert_ids: jax.Array
    scales_offsets: jax.Array | None
    src_info: jax.Array
    router_weights: jax.Array
    num_dropped: jax.Array
    row_of: jax.Array
    row_slot: jax.Array
    slot_counts: jax.Array
    slot_of: jax.Array
    num_invalid: jax.Array

class DispatchOperands(TypedDict):
    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    input_scale: jax.Array
    token_scales: NotRequired[jax.Array | None]
    after: jax.Array

class DispatchAttributes(TypedDict):
    key: int
    site: int
    expert_alignment: int
    zero_tail: bool
    format: str
    scale_layout: str

class DispatchCached(NamedTuple):
    rows: jax.Array
    row_weights: jax.Array | None
    done: jax.Array

class DispatchCachedOperands(TypedDict):
    tokens: jax.Array
    weights: NotRequired[jax.Array | None]
    slot_of: jax.Array
    row_of: jax.Array
    row_slot: jax.Array
    after: jax.Array

class DispatchCachedAttributes(TypedDict):
    key: int
    site: int
    zero_tail: bool
    format: str

class Combine(NamedTuple):
    output: jax.Array
    weight_grads: jax.Array | None
    done: jax.Array

class CombineOperands(TypedDict):
    expert_out: jax.Array
    router_weights: NotRequired[jax.Array | None]
    weight_grads: NotRequired[jax.Array | None]
    row_of: jax.Array
    slot_counts: jax.Array
    slot_of: jax.Array
    residual: NotRequired[jax.Array | None]
    entry_weights: NotRequired[jax.Array | None]
    shared_rows: NotRequired[jax.Array | None]
    shared_part: NotRequired[jax.Array | None]
    after: jax.Array

class CombineAttributes(TypedDict):
    key: int
    site: int
    by_entry: bool
    combine_dtype: str

class DispatchSend(NamedTuple):
    pending: jax.Array
    slot_of: jax.Array
    num_invalid: jax.Array

class DispatchSendOperands(TypedDict):
    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    input_scale: jax.Array
    token_scales: NotRequired[jax.Array | None]
    after: jax.Array

class DispatchSendAttributes(TypedDict):
    key: int
    site: int
    ranks: int
    local_experts: int
    format: str

class DispatchPlace(NamedTuple):
    tokens: jax.Array
    scales: jax.Array | None
    row_offsets: jax.Array
    group_sizes: jax.Array
    expert_counts: jax.Array
    expert_ids: jax.Array
    scales_offsets: jax.Array | None
    src_info: jax.Array
    router_weights: jax.Array
    num_dropped: jax.Array
    row_of: jax.Array
    row_slot: jax.Array
    slot_counts: jax.Array

class DispatchPlaceOperands(TypedDict):
    pending: jax.Array
    tokens: NotRequired[jax.Array | None]
    after: jax.Array

class DispatchPlaceAttributes(TypedDict):
    key: int
    expert_alignment: int
    zero_tail: bool
    format: str
    scale_layout: str

class CombineSend(NamedTuple):
    pending: jax.Array
    done: jax.Array

class CombineSendOperands(TypedDict):
    expert_out: jax.Array
    router_weights: NotRequired[jax.Array | None]
    row_of: jax.Array
    slot_counts: jax.Array
    after: jax.Array

class CombineSendAttributes(TypedDict):
    key: int
    site: int
    by_entry: bool
    combine_dtype: str

class CombinePlace(NamedTuple):
    output: jax.Array
    done: jax.Array

class CombinePlaceOperands(TypedDict):
    pending: jax.Array
    slot_of: jax.Array
    residual: NotRequired[jax.Array | None]
    entry_weights: NotRequired[jax.Array | None]
    shared_rows: NotRequired[jax.Array | None]
    shared_part: NotRequired[jax.Array | None]
    after: jax.Array

class CombinePlaceAttributes(TypedDict):
    key: int
    ranks: int
    by_entry: bool
    combine_dtype: str

class DispatchSendAside(NamedTuple):
    results: jax.Array

class DispatchSendAsideOperands(TypedDict):
    tokens: jax.Array
    topk_ids: jax.Array
    router_weights: jax.Array
    input_scale: jax.Array
    token_scales: NotRequired[jax.Array | None]
    after: jax.Array

class DispatchSendAsideAttributes(TypedDict):
    key: int
    site: int
    ranks: int
    local_experts: int
    format: str

class CombineSendAside(NamedTuple):
    results: jax.Array

class CombineSendAsideOperands(TypedDict):
    expert_out: jax.Array
    router_weights: NotRequired[jax.Array | None]
    row_of: jax.Array
    slot_counts: jax.Array
    after: jax.Array

class CombineSendAsideAttributes(TypedDict):
    key: int
    site: int
    by_entry: bool
    combine_dtype: str

class Router(NamedTuple):
    ids: jax.Array
    weights: jax.Array

class RouterOperands(TypedDict):
    logits: jax.Array
    bias: NotRequired[jax.Array | None]

class RouterAttributes(TypedDict):
    score: str
    num_groups: int
    top_groups: int
    best_of_group: int
    least_sum: float
    scale: float

class CombineBack(NamedTuple):
    to_rows: jax.Array
    to_weights: jax.Array

class CombineBackOperands(TypedDict):
    cotangents: jax.Array
    expert_out: jax.Array
    row_weights: jax.Array
    row_slot: jax.Array

class CombineBackAttributes(TypedDict): ...

class QuantizeCotangents(NamedTuple):
    codes: jax.Array
    scales: jax.Array

class QuantizeCotangentsOperands(TypedDict):
    values: jax.Array
    group_sizes: jax.Array

class QuantizeCotangentsAttributes(TypedDict): ...

class DequantizeRows(NamedTuple):
    out: jax.Array

class DequantizeRowsOperands(TypedDict):
    codes: jax.Array
    scales: jax.Array
    group_sizes: jax.Array

class DequantizeRowsAttributes(TypedDict):
    out_dtype: str

class Rows(NamedTuple):
    out: jax.Array

class RowsOperands(TypedDict):
    rows: jax.Array
    matrices: jax.Array
    group_sizes: jax.Array

class RowsAttributes(TypedDict): ...

class RowsTransposed(NamedTuple):
    out: jax.Array

class RowsTransposedOperands(TypedDict):
    rows: jax.Array
    matrices: jax.Array
    group_sizes: jax.Array

class RowsTransposedAttributes(TypedDict): ...

class GateUp(NamedTuple):
    h: jax.Array
    both: jax.Array | None

class GateUpOperands(TypedDict):
    rows: jax.Array
    matrices: jax.Array
    group_sizes: jax.Array

class GateUpAttributes(TypedDict):
    keep: bool

class DownBack(NamedTuple):
    to_both: jax.Array

class DownBackOperands(TypedDict):
    cotangents: jax.Array
    matrices: jax.Array
    both: jax.Array
    group_sizes: jax.Array

class DownBackAttributes(TypedDict): ...

class Outer(NamedTuple):
    out: jax.Array

class OuterOperands(TypedDict):
    left: jax.Array
    right: jax.Array
    group_sizes: jax.Array

class OuterAttributes(TypedDict):
    out_dtype: str

class CodeRows(NamedTuple):
    out: jax.Array

class CodeRowsOperands(TypedDict):
    rows: jax.Array
    row_scales: jax.Array
    matrices: jax.Array
    matrix_scales: jax.Array
    group_sizes: jax.Array

class CodeRowsAttributes(TypedDict):
    turned: bool
    out_dtype: str

class CodeGateUp(NamedTuple):
    h: jax.Array
    h_scales: jax.Array
    both: jax.Array | None

class CodeGateUpOperands(TypedDict):
    rows: jax.Array
    row_scales: jax.Array
    matrices: jax.Array
    matrix_scales: jax.Array
    group_sizes: jax.Array

class CodeGateUpAttributes(TypedDict):
    keep: bool
    out_dtype: str

class CodeDownBack(NamedTuple):
    codes: jax.Array
    code_scales: jax.Array
    to_both: jax.Array

class CodeDownBackOperands(TypedDict):
    cotangents: jax.Array
    cotangent_scales: jax.Array
    matrices: jax.Array
    matrix_scales: jax.Array
    both: jax.Array
    group_sizes: jax.Array

class CodeDownBackAttributes(TypedDict):
    out_dtype: str

class Experts(NamedTuple):
    h: jax.Array
    out: jax.Array

class ExpertsOperands(TypedDict):
    rows: jax.Array
    gate_up: jax.Array
    down: jax.Array
    group_sizes: jax.Array

class ExpertsAttributes(TypedDict): ...

class CodeExperts(NamedTuple):
    h: jax.Array
    h_scales: jax.Array
    out: jax.Array

class CodeExpertsOperands(TypedDict):
    rows: jax.Array
    row_scales: jax.Array
    gate_up: jax.Array
    gate_up_scales: jax.Array
    down: jax.Array
    down_scales: jax.Array
    group_sizes: jax.Array

class CodeExpertsAttributes(TypedDict):
    out_dtype: str

class FourBitRows(NamedTuple):
    out: jax.Array

class FourBitRowsOperands(TypedDict):
    rows: jax.Array
    row_scales: NotRequired[jax.Array | None]
    tiles: jax.Array
    group_sizes: jax.Array

class FourBitRowsAttributes(TypedDict):
    out_dtype: str

class FourBitGateUp(NamedTuple):
    out: jax.Array

class FourBitGateUpOperands(TypedDict):
    rows: jax.Array
    row_scales: NotRequired[jax.Array | None]
    tiles: jax.Array
    group_sizes: jax.Array

class FourBitGateUpAttributes(TypedDict):
    out_dtype: str

class QuantizeMatrices(NamedTuple):
    codes: jax.Array
    scales: jax.Array
    turned: jax.Array | None

class QuantizeMatricesOperands(TypedDict):
    matrices: jax.Array

class QuantizeMatricesAttributes(TypedDict):
    turned: bool

@overload
def call(
    target: Literal["ep_pack"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: PackOperands,
    attributes: PackAttributes,
) -> Pack: ...
@overload
def call(
    target: Literal["ep_unpack"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: UnpackOperands,
    attributes: UnpackAttributes,
) -> Unpack: ...
@overload
def call(
    target: Literal["ep_pack_cached"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: PackCachedOperands,
    attributes: PackCachedAttributes,
) -> PackCached: ...
@overload
def call(
    target: Literal["ep_unpack_cached"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: UnpackCachedOperands,
    attributes: UnpackCachedAttributes,
) -> UnpackCached: ...
@overload
def call(
    target: Literal["ep_combine_pack"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombinePackOperands,
    attributes: CombinePackAttributes,
) -> CombinePack: ...
@overload
def call(
    target: Literal["ep_combine_unpack"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombineUnpackOperands,
    attributes: CombineUnpackAttributes,
) -> CombineUnpack: ...
@overload
def call(
    target: Literal["ep_dispatch"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DispatchOperands,
    attributes: DispatchAttributes,
) -> Dispatch: ...
@overload
def call(
    target: Literal["ep_dispatch_cached"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DispatchCachedOperands,
    attributes: DispatchCachedAttributes,
) -> DispatchCached: ...
@overload
def call(
    target: Literal["ep_combine"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombineOperands,
    attributes: CombineAttributes,
) -> Combine: ...
@overload
def call(
    target: Literal["ep_dispatch_send"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DispatchSendOperands,
    attributes: DispatchSendAttributes,
) -> DispatchSend: ...
@overload
def call(
    target: Literal["ep_dispatch_place"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DispatchPlaceOperands,
    attributes: DispatchPlaceAttributes,
) -> DispatchPlace: ...
@overload
def call(
    target: Literal["ep_combine_send"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombineSendOperands,
    attributes: CombineSendAttributes,
) -> CombineSend: ...
@overload
def call(
    target: Literal["ep_combine_place"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombinePlaceOperands,
    attributes: CombinePlaceAttributes,
) -> CombinePlace: ...
@overload
def call(
    target: Literal["ep_dispatch_send_aside"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DispatchSendAsideOperands,
    attributes: DispatchSendAsideAttributes,
) -> DispatchSendAside: ...
@overload
def call(
    target: Literal["ep_combine_send_aside"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombineSendAsideOperands,
    attributes: CombineSendAsideAttributes,
) -> CombineSendAside: ...
@overload
def call(
    target: Literal["ep_router"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: RouterOperands,
    attributes: RouterAttributes,
) -> Router: ...
@overload
def call(
    target: Literal["ep_combine_back"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CombineBackOperands,
    attributes: CombineBackAttributes,
) -> CombineBack: ...
@overload
def call(
    target: Literal["ep_quantize_cotangents"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: QuantizeCotangentsOperands,
    attributes: QuantizeCotangentsAttributes,
) -> QuantizeCotangents: ...
@overload
def call(
    target: Literal["ep_dequantize_rows"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DequantizeRowsOperands,
    attributes: DequantizeRowsAttributes,
) -> DequantizeRows: ...
@overload
def call(
    target: Literal["ep_rows"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: RowsOperands,
    attributes: RowsAttributes,
) -> Rows: ...
@overload
def call(
    target: Literal["ep_rows_transposed"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: RowsTransposedOperands,
    attributes: RowsTransposedAttributes,
) -> RowsTransposed: ...
@overload
def call(
    target: Literal["ep_gate_up"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: GateUpOperands,
    attributes: GateUpAttributes,
) -> GateUp: ...
@overload
def call(
    target: Literal["ep_down_back"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: DownBackOperands,
    attributes: DownBackAttributes,
) -> DownBack: ...
@overload
def call(
    target: Literal["ep_outer"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: OuterOperands,
    attributes: OuterAttributes,
) -> Outer: ...
@overload
def call(
    target: Literal["ep_code_rows"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CodeRowsOperands,
    attributes: CodeRowsAttributes,
) -> CodeRows: ...
@overload
def call(
    target: Literal["ep_code_gate_up"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CodeGateUpOperands,
    attributes: CodeGateUpAttributes,
) -> CodeGateUp: ...
@overload
def call(
    target: Literal["ep_code_down_back"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CodeDownBackOperands,
    attributes: CodeDownBackAttributes,
) -> CodeDownBack: ...
@overload
def call(
    target: Literal["ep_experts"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: ExpertsOperands,
    attributes: ExpertsAttributes,
) -> Experts: ...
@overload
def call(
    target: Literal["ep_code_experts"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: CodeExpertsOperands,
    attributes: CodeExpertsAttributes,
) -> CodeExperts: ...
@overload
def call(
    target: Literal["ep_four_bit_rows"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: FourBitRowsOperands,
    attributes: FourBitRowsAttributes,
) -> FourBitRows: ...
@overload
def call(
    target: Literal["ep_four_bit_gate_up"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: FourBitGateUpOperands,
    attributes: FourBitGateUpAttributes,
) -> FourBitGateUp: ...
@overload
def call(
    target: Literal["ep_quantize_matrices"],
    like: jax.Array,
    dims: Mapping[str, int],
    operands: QuantizeMatricesOperands,
    attributes: QuantizeMatricesAttributes,
) -> QuantizeMatrices: ...
@overload
def unpack(
    target: Literal["ep_dispatch_send"], results: jax.Array, dims: Mapping[str, int]
) -> DispatchSend: ...
@overload
def unpack(
    target: Literal["ep_combine_send"], results: jax.Array, dims: Mapping[str, int]
) -> CombineSend: ...
