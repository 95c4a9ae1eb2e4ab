// Fuzz target: the custom calls of the CPU, from XLA's buffers to the last row. Operands have the
// shapes of a call, or nearly so, and any contents: ids, messages, counts, routes. Calls that a
// decoder passes run on buffers of exactly the given sizes, so that AddressSanitizer sees the first
// byte that is read or written outside.
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cpu/mixed_calls.h"
#include "ffi/cpu_handlers.cc"  // its Start, which no header shows
#include "ffi_calls.h"
#include "fuzz/calls_fuzz.h"
#include "fuzz/input.h"

namespace jax_ep::ffi_layer {
namespace {

struct FuzzSizes {
  int64_t R, L, n, K, H, N;
  ffi::DataType dtype;
  int64_t element_bytes;
  std::string format;
  int64_t payload, scale, columns, scales;  // of a token: bytes, bytes, and elements of each
  ffi::DataType payload_dtype, scale_dtype;
  bool quantized;

  explicit FuzzSizes(FuzzInput& input) {
    static constexpr int64_t kHidden[] = {8, 16, 32, 64, 128, 256, 512, 640};
    static constexpr ffi::DataType kTypes[] = {ffi::F32, ffi::BF16, ffi::F16};
    R = input.In(1, 5);
    L = input.In(1, 5);
    n = input.In(0, 7);
    K = input.In(1, 5);
    H = kHidden[input.In(0, 7)];
    N = input.In(0, 60);
    dtype = kTypes[input.In(0, 2)];
    element_bytes = dtype == ffi::F32 ? 4 : 2;
    format = kFormatNames[input.Byte() % std::size(kFormatNames)];
    Checker check("");
    Encoding encoding = Encoding::Of(check, format);
    encoding.Size(check, H, element_bytes);
    payload = encoding.payload_bytes;
    scale = encoding.scale_bytes;
    columns = encoding.payload_columns;
    scales = encoding.scales;
    quantized = encoding.quantized;
    payload_dtype = quantized ? encoding.payload_dtype : dtype;
    scale_dtype = quantized ? encoding.scale_dtype : ffi::U8;
  }
  int64_t Bound() const { return R * n * K + 2; }
  std::vector<int64_t> Wire(int64_t bytes) const { return {R, bytes / kWireWordBytes}; }
};

CustomCall MakeCall(DispatchPackCall*, const FuzzSizes& s, FuzzInput&) {
  CustomCall call;
  const bool coded = s.quantized && s.N % 4 == 3;  // N is otherwise unused here
  coded ? call.Add("tokens", s.payload_dtype, {s.n, s.columns})
        : call.Add("tokens", s.dtype, {s.n, s.H});
  call.Add("topk_ids", ffi::S32, {s.n, s.K});
  call.Add("router_weights", ffi::F32, {s.n, s.K});
  call.Add("input_scale", ffi::F32, {1});
  call.Add("token_scales", s.scale_dtype,
           coded ? std::vector<int64_t>{s.n, s.scales} : std::vector<int64_t>{0});
  call.Add("-> send", ffi::U32,
           s.Wire(RegionHeader::Of(s.L).bytes +
                  s.n * DispatchMessage::Of(s.payload, s.scale, s.K).bytes));
  call.Add("-> slot_of", ffi::S32, {s.n, s.K});
  call.Add("-> position", ffi::S32, {s.n, s.K});
  call.Add("-> num_invalid", ffi::S32, {1});
  call.attributes = {{"key", int64_t{7}},
                     {"site", int64_t{5}},
                     {"in_halves", false},
                     {"num_experts", s.R * s.L},
                     {"coded", coded},
                     {"format", s.format},
                     {"expert_alignment", int64_t{1}},
                     {"zero_tail", true},
                     {"scale_layout", std::string("rows")}};
  return call;
}

CustomCall MakeCall(DispatchUnpackCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  const bool tiled = s.quantized && s.scales % kTileColumns == 0 && input.Flag();
  call.Add("recv", ffi::U32,
           s.Wire(RegionHeader::Of(s.L).bytes +
                  s.n * DispatchMessage::Of(s.payload, s.scale, s.K).bytes));
  call.Add("slot_of", ffi::S32, {s.n, s.K});
  call.Add("num_invalid", ffi::S32, {1});
  call.Add("-> tokens", s.payload_dtype, {s.N, s.columns});
  const auto tiles = ScaleTiles::Of(s.N, s.L, s.scales);
  // R and n do not affect `columns` otherwise.
  const bool columns = s.format == Fp8Block128Format::kName && (s.R + s.n) % 3 == 2;
  call.Add("-> scales", s.scale_dtype,
           !s.quantized ? std::vector<int64_t>{0}
           : tiled      ? std::vector<int64_t>{tiles.tiles, tiles.column_words, 32, 4, 4}
           : columns    ? std::vector<int64_t>{s.scales, ScaleLine(s.N)}
                        : std::vector<int64_t>{s.N, s.scales});
  call.Add("-> row_offsets", ffi::S32, {s.L + 1});
  for (const char* name : {"-> group_sizes", "-> expert_counts", "-> expert_ids"}) {
    call.Add(name, ffi::S32, {s.L});
  }
  call.Add("-> scales_offsets", ffi::S32, {tiled ? s.L : 0});
  call.Add("-> src_info", ffi::S32, {s.N, 3});
  call.Add("-> router_weights", ffi::F32, {s.N});
  call.Add("-> num_dropped", ffi::S32, {1});
  call.Add("-> row_of", ffi::S32, {s.R, s.n, s.K});
  call.Add("-> row_slot", ffi::S32, {s.N});
  call.Add("-> slot_counts", ffi::S32, {s.R});
  call.Add("-> row_base", ffi::S32, {s.R, s.L});
  call.aliases = {{1, call.operands.size()}, {2, call.operands.size() + 1}};
  call.Add("-> slot_of", ffi::S32, {s.n, s.K});
  call.Add("-> num_invalid", ffi::S32, {1});
  const int64_t alignment = input.Flag() ? 1 : input.In(1, 130);
  call.attributes = {{"key", int64_t{7}},
                     {"format", s.format},
                     {"expert_alignment", alignment},
                     {"zero_tail", input.Flag()},
                     {"scale_layout", std::string(tiled     ? "tiled_128x4"
                                                  : columns ? "columns"
                                                            : "rows")}};
  return call;
}

int64_t CachedBytes(const FuzzSizes& s, int64_t weights) {
  const auto message = DispatchCachedMessage::Of(s.payload, s.scale, weights);
  return DispatchCachedRegion::Of(s.n, message.bytes).bytes;
}

CustomCall MakeCall(DispatchCachedPackCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  const int64_t weights = input.Flag() ? s.K : 0;
  call.Add("tokens", s.dtype, {s.n, s.H});
  call.Add("router_weights", ffi::F32, {s.n, weights});
  call.Add("slot_of", ffi::S32, {s.n, s.K});
  call.Add("-> send", ffi::U32, s.Wire(CachedBytes(s, weights)));
  call.attributes = {{"key", int64_t{7}}, {"site", int64_t{5}}, {"format", s.format}};
  return call;
}

CustomCall MakeCall(DispatchCachedUnpackCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  const bool weighted = s.N > 0 && input.Flag();
  const int64_t weights = weighted ? s.K : 0;
  call.Add("recv", ffi::U32, s.Wire(CachedBytes(s, weights)));
  call.Add("row_of", ffi::S32, {s.R, s.n, s.K});
  call.Add("row_slot", ffi::S32, {s.N});
  call.Add("-> rows", s.dtype, {s.N, s.H});
  call.Add("-> router_weights", ffi::F32, {weighted ? s.N : 0});
  call.attributes = {{"key", int64_t{7}}, {"format", s.format}};
  return call;
}

// Name and bytes of a combine's message.
std::pair<std::string, int64_t> Sums(const FuzzSizes& s, int64_t weights, FuzzInput& input) {
  static constexpr const char* kNames[] = {"float32", "bfloat16", "float16", CombineFormat::kName};
  const int64_t kind = input.In(0, s.H % CombineFormat::kBlock == 0 ? 3 : 2);
  const auto wire = kind == 0 || kind == 3 ? ElementType::kFloat32
                    : kind == 1            ? ElementType::kBFloat16
                                           : ElementType::kFloat16;
  return {kNames[kind], CombineMessageOf(s.H, wire, kind == 3, weights).bytes};
}

CustomCall MakeCall(CombinePackCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  const bool weighted = input.Flag(), grads = s.N > 0 && input.Flag();
  const auto [wire, message] = Sums(s, grads ? s.K : 0, input);
  call.Add("expert_out", s.dtype, {s.N, s.H});
  call.Add("router_weights", ffi::F32, {weighted ? s.N : 0});
  call.Add("slot_counts", ffi::S32, {s.R});
  call.Add("weight_grads", ffi::F32, {grads ? s.N : 0});
  call.Add("row_of", ffi::S32, {s.R, s.n, s.K});
  call.Add("-> send", ffi::U32, s.Wire(CombineRegion::Of(s.n, message).bytes));
  call.attributes = {{"key", int64_t{7}},     {"site", int64_t{5}}, {"in_halves", false},
                     {"combine_dtype", wire}, {"gradients", false}, {"by_entry", false}};
  return call;
}

CustomCall MakeCall(CombineUnpackCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  const bool residual = input.Flag(), by_entry = input.Flag(), shared = input.Flag();
  const bool weighted = by_entry && input.Flag();
  const int64_t weights = by_entry || input.Flag() ? 0 : s.K;
  const auto [wire, message] = Sums(s, weights, input);
  call.Add("recv", ffi::U32, s.Wire(CombineRegion::Of(s.n * (by_entry ? s.K : 1), message).bytes));
  call.Add("slot_of", ffi::S32, {s.n, s.K});
  call.Add("residual", s.dtype, {residual ? s.n : 0, s.H});
  call.Add("entry_weights", ffi::F32, {weighted ? s.n : 0, s.K});
  call.Add("shared_rows", s.dtype, {shared ? s.N : 0, s.H});
  call.Add("shared_part", ffi::S32, {shared ? 2 : 0});
  call.Add("-> output", s.dtype, {s.n, s.H});
  call.Add("-> weight_grads", ffi::F32, {s.n, weights});
  call.attributes = {
      {"key", int64_t{7}}, {"combine_dtype", wire}, {"gradients", false}, {"by_entry", by_entry}};
  return call;
}

CustomCall MakeCall(QuantizeCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  call.Add("tokens", s.dtype, {s.n, s.H});
  call.Add("input_scale", ffi::F32, {input.Flag() ? 1 : s.n});
  call.Add("-> payload", s.payload_dtype, {s.n, s.columns});
  call.Add("-> scales", s.scale_dtype, {s.n, s.scales});
  call.attributes = {{"format", s.format}};
  return call;
}

CustomCall MakeCall(DequantizeCall*, const FuzzSizes& s, FuzzInput& input) {
  CustomCall call;
  call.Add("payload", s.payload_dtype, {s.n, s.columns});
  call.Add("scales", s.scale_dtype, {s.n, s.scales});
  call.Add("input_scale", ffi::F32, {input.Flag() ? 1 : s.n});
  call.Add("-> tokens", s.dtype, {s.n, s.H});
  call.attributes = {{"format", s.format}};
  return call;
}

// Changes sizes, ranks, dtypes and attributes.
void Change(FuzzInput& input, CustomCall& call) {
  static constexpr ffi::DataType kTypes[] = {ffi::PRED, ffi::S32, ffi::U8,       ffi::U32,
                                             ffi::F32,  ffi::F16, ffi::BF16,     ffi::F64,
                                             ffi::S64,  ffi::U64, ffi::F8E4M3FN, ffi::F8E8M0FNU};
  for (int64_t changes = input.In(0, 7) - 4; changes > 0; --changes) {
    Operand& operand = call.operands[input.Byte() % call.operands.size()];
    const Operand before = operand;
    switch (input.In(0, 4)) {
      case 0:
        if (operand.dims.empty()) break;
        operand.dims[input.Byte() % operand.dims.size()] = std::max<int64_t>(input.AnyInt(), 0);
        break;
      case 1:
        operand.dims.push_back(input.In(0, 2));
        break;
      case 2:
        if (!operand.dims.empty()) operand.dims.pop_back();
        break;
      case 3:
        operand.dtype = kTypes[input.In(0, 11)];
        break;
      default: {
        Attribute& attribute = call.attributes[input.Byte() % call.attributes.size()].second;
        if (auto* number = std::get_if<int64_t>(&attribute)) *number = input.AnyInt();
        if (auto* flag = std::get_if<bool>(&attribute)) *flag = !*flag;
        static constexpr const char* kWords[] = {"", "rows", "bf16", "nvfp4", "float32", "mxfp8"};
        if (auto* word = std::get_if<std::string>(&attribute)) *word = kWords[input.In(0, 5)];
      }
    }
    if (BytesOf(operand) < 0) operand = before;
  }
}

// Tables that later calls read must be in range, whatever the input was.
void CheckIndices(const int32_t* values, int64_t count, int64_t low, int64_t end) {
  for (int64_t i = 0; i < count; ++i) FUZZ_CHECK(values[i] >= low && values[i] < end);
}
template <typename Step>
void CheckTables(const Step&) {}
void CheckTables(const DispatchPackStep& step) {
  const EpShape& shape = step.shape;
  CheckIndices(step.slot_of, shape.tokens * shape.top_k, -1, shape.slots());
}
void CheckTables(const DispatchUnpackStep& step) {
  const EpShape& shape = step.shape;
  CheckIndices(step.row_of, shape.slots() * shape.top_k, -1, shape.recv_rows);
  CheckIndices(step.row_slot, shape.recv_rows, -1, shape.slots());
  CheckIndices(step.slot_counts, shape.ranks, 0, shape.tokens + 1);
  CheckIndices(step.row_offsets, shape.local_experts + 1, 0, shape.recv_rows + 1);
  CheckIndices(step.group_sizes, shape.local_experts, 0, shape.recv_rows + 1);
}

// Lets a result share the memory of an operand of its type, as a program may request from XLA: the
// `choice`th such pair, 0 for none. Returns how many pairs it has seen.
template <typename Decoded>
int64_t Alias(CustomCall& call, int64_t choice) {
  const auto shared = [&](size_t from, size_t to) {
    return std::ranges::any_of(
        call.aliases, [&](const auto& pair) { return pair.first == from || pair.second == to; });
  };
  int64_t pairs = 0;
  for (size_t to = kSize<Decoded::kOperands>; to < call.operands.size(); ++to) {
    for (size_t from = 0; from < kSize<Decoded::kOperands>; ++from) {
      if (!call.operands[from].SameType(call.operands[to]) || shared(from, to)) continue;
      if (++pairs != choice) continue;
      call.aliases.emplace_back(from, to);
      return pairs;
    }
  }
  return pairs;
}

// Makes the regions come from one call; otherwise nothing of them would be read.
template <typename Step>
void EqualiseTags(const Step& step, const CustomCall& call) {
  if constexpr (requires { step.check; }) {
    const int64_t bytes = call.operands[0].dims[1] * kWireWordBytes;
    auto* recv = const_cast<uint8_t*>(step.recv);
    for (int64_t rank = 0; rank < step.shape.ranks; ++rank) {
      cpu::WriteTag(recv + rank * bytes, RegionTag{});
    }
  }
}

template <typename Decoded>
int64_t RunCall(FuzzInput& input, const How& how) {
  const FuzzSizes sizes(input);
  CustomCall call = MakeCall(static_cast<Decoded*>(nullptr), sizes, input);
  Change(input, call);
  const int64_t pairs = Alias<Decoded>(call, how.alias);
  Arguments arguments(call, [&](const Buffer& buffer) { input.Fill(buffer, sizes.Bound()); });
  Decoded decoded;
  const std::optional<ffi::Error> error = arguments.DecodeTo(decoded);
  if (!error) return pairs;
  if (error->failure()) {
    FUZZ_CHECK(!error->message().empty());
    return pairs;
  }
  if (!arguments.small()) return pairs;
  if (!how.mixed) EqualiseTags(decoded.step, call);
  const cpu::RowTask task = Start(decoded, 0);
  FUZZ_CHECK(task.items >= 0 && task.bytes >= 0);
  // In any order: from a place in the middle, then the rest.
  const int64_t cut = task.items == 0 ? 0 : input.Take<uint16_t>() % (task.items + 1);
  if (cut < task.items) task.run(cut, task.items);
  if (cut > 0) task.run(0, cut);
  CheckTables(decoded.step);
  return pairs;
}

}  // namespace

int64_t RunNumbered(FuzzInput& input, int64_t number, const How& how) {
  switch (number) {
    case 0:
      return RunCall<DispatchPackCall>(input, how);
    case 1:
      return RunCall<DispatchUnpackCall>(input, how);
    case 2:
      return RunCall<DispatchCachedPackCall>(input, how);
    case 3:
      return RunCall<DispatchCachedUnpackCall>(input, how);
    case 4:
      return RunCall<CombinePackCall>(input, how);
    case 5:
      return RunCall<CombineUnpackCall>(input, how);
    case 6:
      return RunCall<QuantizeCall>(input, how);
    default:
      return RunCall<DequantizeCall>(input, how);
  }
}

}  // namespace jax_ep::ffi_layer

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace jax_ep::ffi_layer;
  jax_ep::FuzzInput input(data, size);
  const uint8_t first = input.Byte();
  // Of the 32 ways, half share no memory, and an eighth mix up calls.
  const int64_t way = first / 8;
  RunNumbered(input, first % 8, {way < 16 ? 0 : way % 4 + 1, way % 8 == 7});
  return 0;
}
