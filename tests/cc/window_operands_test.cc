// Tests of the decoders of the window transports: a call as Python makes it passes. A call in which
// any operand has another size, rank or dtype, or any attribute another value, is refused with a
// message, by the decoder or against the group's windows. Each Made lists what may differ.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "ffi/window_sizes.h"
#include "window_made.h"

namespace jax_ep::ffi_layer {
namespace {

constexpr ffi::DataType kTypes[] = {ffi::S32, ffi::U32,      ffi::F32,       ffi::F16, ffi::U8,
                                    ffi::S64, ffi::F8E4M3FN, ffi::F8E8M0FNU, ffi::F64, ffi::PRED};

WindowSizes SizesFor(const Variant& v) {
  const WindowConfig config{.format = v.format,
                            .hidden = H,
                            .element_bytes = 2,
                            .wire_element_bytes = 4,
                            .tokens = n,
                            .dispatch_tokens = n,
                            .combine_tokens = v.by_entry ? n * K : n,
                            .top_k = K,
                            .ranks = R,
                            .local_experts = L,
                            .pending_calls = 2};
  WindowSizes sizes{};
  CHECK(SizesOf(config, sizes));
  return sizes;
}

// "" if the call passes, or why it does not. `see` is called with the decoded call.
template <typename Call>
std::string Refusal(const CustomCall& made, const WindowSizes& sizes,
                    const std::function<void(const Call&)>& see = nullptr) {
  Arguments arguments(made, [](const Buffer&) {});
  Call call;
  std::optional<ffi::Error> error = arguments.DecodeTo(call);
  if (!error) return "XLA";
  if (error->success()) error = Fits(call, sizes, WindowLayout::Of(sizes));
  if (error->success()) {
    if (see) see(call);
    return "";
  }
  CHECK(error->message().starts_with(std::string(Call::kTarget) + ": "));
  return error->message();
}

bool IsFree(const Made& made, const std::string& operand, size_t dim, bool larger) {
  if (operand == "after") return larger;
  if (operand == "pending" && dim == 1) return larger;
  for (const Free& free : made.free) {
    if (free.operand == operand && free.dim == dim) return free.larger || !larger;
  }
  return false;
}

template <typename Call>
class Trial {
 public:
  explicit Trial(const Variant& variant)
      : made_(Make(static_cast<Call*>(nullptr), variant)), sizes_(SizesFor(variant)) {
    name_ = std::string(Call::kTarget) + " " + variant.format + " " + variant.wire +
            (variant.tiled ? " tiled" : "") + (variant.columns ? " columns" : "") +
            (variant.coded ? " coded" : "") + (variant.weighted ? " weighted" : "") +
            (variant.weight_grads ? " weight_grads" : "") + (variant.residual ? " residual" : "") +
            (variant.by_entry ? " by_entry" : "") + (variant.shared ? " shared" : "");
  }

  void Run() {
    Passes(made_.call, sizes_, "as it is");
    for (size_t i = 0; i < made_.call.operands.size(); ++i) {
      Operands(i);
    }
    Attributes();
    Windows();
  }

 private:
  void Case(const std::string& what) const { CurrentCase() = name_ + ": " + what; }
  void Passes(const CustomCall& call, const WindowSizes& sizes, const std::string& what) const {
    const std::string refusal = Refusal<Call>(call, sizes);
    Case(what + ", refused by " + refusal);
    CHECK(refusal.empty());
  }
  void Refuses(const CustomCall& call, const WindowSizes& sizes, const std::string& what) const {
    Case(what);
    CHECK(!Refusal<Call>(call, sizes).empty());
  }
  void Changed(size_t i, bool free, const Operand& operand, const std::string& what) const {
    CustomCall call = made_.call;
    call.operands[i] = operand;
    const std::string text = "operand " + operand.name + " " + what;
    free ? Passes(call, sizes_, text) : Refuses(call, sizes_, text);
  }

  void Operands(size_t i) const {
    const Operand own = made_.call.operands[i];
    for (size_t d = 0; d < own.dims.size(); ++d) {
      for (const int64_t by : {int64_t{-1}, int64_t{1}, int64_t{1} << 33}) {
        Operand operand = own;
        operand.dims[d] += by;
        if (operand.dims[d] < 0 || BytesOf(operand) < 0) continue;
        // int32 indices cannot reach that many rows.
        const bool free = IsFree(made_, own.name, d, by > 0) && (by <= 1 || own.name == "after");
        const bool longer = own.name == "pending" && d == 1 && by > 1;
        Changed(i, free || longer, operand,
                "dimension " + std::to_string(d) + " " + std::to_string(by));
      }
    }
    Operand operand = own;
    operand.dims.push_back(1);
    Changed(i, own.name == "after", operand, "with one dimension more");
    operand = own;
    operand.dims.pop_back();
    Changed(i, own.name == "after", operand, "with one dimension less");
    for (const ffi::DataType dtype : kTypes) {
      if (dtype == own.dtype) continue;
      operand = own;
      operand.dtype = dtype;
      // Without scales nothing is read or written through this operand.
      if (own.dims == std::vector<int64_t>{0} && own.dtype == ffi::U8) continue;
      const auto& others = made_.dtypes;
      const bool free = (own.name == "tokens" || (own.name == "expert_out" && !others.empty())) &&
                        std::ranges::find(others, dtype) != others.end();
      Changed(i, free, operand, "of dtype " + std::to_string(static_cast<int>(dtype)));
    }
  }

  // Key and site may be any numbers, an alignment any positive one.
  void Attributes() const {
    for (size_t i = 0; i < made_.call.attributes.size(); ++i) {
      CustomCall call = made_.call;
      auto& [name, value] = call.attributes[i];
      const std::string text = "attribute " + name;
      if (auto* flag = std::get_if<bool>(&value)) {
        *flag = !*flag;
        made_.flags.contains(name) ? Passes(call, sizes_, text) : Refuses(call, sizes_, text);
      } else if (auto* word = std::get_if<std::string>(&value)) {
        for (const char* other : {"", "rows2", "bf161", "float8"}) {
          *word = other;
          Refuses(call, sizes_, text + " " + other);
        }
      } else if (name != "key" && name != "site") {
        for (const int64_t other : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
          value = other;
          Refuses(call, sizes_, text + " " + std::to_string(other));
        }
      }
    }
  }

  // Groups whose windows are smaller or different.
  void Windows() const {
    constexpr bool kRouted = std::is_base_of_v<RoutedWindowCall, Call>;
    constexpr bool kDispatch = kRouted || std::is_same_v<Call, DispatchCachedCall>;
    constexpr bool kHalf = !std::is_same_v<Call, DispatchCall> &&
                           !std::is_same_v<Call, DispatchCachedCall> &&
                           !std::is_same_v<Call, CombineCall>;
    const auto other = [&](const std::string& what, int64_t WindowSizes::* size, int64_t by,
                           bool refused) {
      WindowSizes sizes = sizes_;
      sizes.*size += by;
      refused ? Refuses(made_.call, sizes, what) : Passes(made_.call, sizes, what);
    };
    other("a rank less", &WindowSizes::ranks, -1, true);
    other("a rank more", &WindowSizes::ranks, 1, true);
    other("an expert less", &WindowSizes::local_experts, -1, kRouted);
    other("an expert more", &WindowSizes::local_experts, 1, kRouted);
    other("a smaller H", &WindowSizes::hidden, -8, true);
    other("a larger H", &WindowSizes::hidden, 8, false);
    const bool one_by_one = SumsAlone();
    other("a smaller K", &WindowSizes::top_k, -1, !one_by_one);
    other("fewer tokens", kDispatch ? &WindowSizes::dispatch_tokens : &WindowSizes::combine_tokens,
          -1, true);
    other("tokens of the other kind",
          kDispatch ? &WindowSizes::combine_tokens : &WindowSizes::dispatch_tokens, -1, false);
    other("no room for pending ones", &WindowSizes::depth, 1 - sizes_.depth, kHalf);
  }
  // Whether the call sends rows of one entry each, so that it does not show K.
  bool SumsAlone() const {
    if constexpr (std::is_base_of_v<CombineSendCall, Call>) {
      return std::get<bool>(made_.call.AttributeOf("by_entry"));
    }
    return false;
  }

  Made made_;
  WindowSizes sizes_;
  std::string name_;
};

template <typename Call>
void Try(const std::vector<Variant>& variants) {
  for (const Variant& variant : variants) Trial<Call>(variant).Run();
}

// Options that no kernel has together are refused.
void OptionsAgree() {
  const Variant v{.weight_grads = true, .by_entry = true};
  const Made made = Make(static_cast<CombineCall*>(nullptr), v);
  CurrentCase() = "ep_combine by_entry with weight_grads";
  CHECK(!Refusal<CombineCall>(made.call, SizesFor(v)).empty());
}

// A send half on XLA's other stream has one array that holds just what the other target has in
// several results.
void OneArrayHoldsAll() {
  const Variant v;
  int found = 0;
  Refusal<DispatchSendOnStreamCall>(Make(static_cast<DispatchSendOnStreamCall*>(nullptr), v).call,
                                    SizesFor(v), [&](const DispatchSendOnStreamCall& call) {
                                      const auto* all =
                                          reinterpret_cast<const int32_t*>(call.pending);
                                      CHECK(call.step.slot_of == all + kPendingInts);
                                      CHECK(call.step.num_invalid == call.step.slot_of + n * K);
                                      ++found;
                                    });
  Refusal<CombineSendOnStreamCall>(
      Make(static_cast<CombineSendOnStreamCall*>(nullptr), v).call, SizesFor(v),
      [&](const CombineSendOnStreamCall& call) {
        CHECK(call.step.done == reinterpret_cast<const int32_t*>(call.pending) + kPendingInts);
        ++found;
      });
  CHECK(found == 2);
}

void Run() {
  const std::vector<Variant> formats = {{},
                                        {.format = "fp8_block128"},
                                        {.format = "fp8_block128", .columns = true},
                                        {.format = "mxfp8", .tiled = true},
                                        {.format = "nvfp4"},
                                        {.format = "nvfp4", .tiled = true}};
  std::vector<Variant> sent = formats;
  sent.push_back({.format = "fp8_block128", .coded = true});
  sent.push_back({.format = "nvfp4", .tiled = true, .coded = true});
  Try<DispatchCall>(sent);
  Try<DispatchSendCall>(sent);
  Try<DispatchSendOnStreamCall>(sent);
  Try<DispatchRecvCall>(formats);
  Try<DispatchCachedCall>({{}, {.weighted = true}, {.format = "fp8_block128"}});
  const std::vector<Variant> sums = {{},
                                     {.weighted = true},
                                     {.residual = true, .wire = "float32"},
                                     {.wire = "fp8_block128"},
                                     {.shared = true},
                                     {.weighted = true, .by_entry = true},
                                     {.by_entry = true, .wire = "float16"}};
  Try<CombineCall>(sums);
  Try<CombineCall>({{.weight_grads = true}, {.weighted = true, .weight_grads = true}});
  Try<CombineSendCall>(sums);
  Try<CombineSendOnStreamCall>(sums);
  Try<CombineRecvCall>(sums);
  OptionsAgree();
  OneArrayHoldsAll();
}

}  // namespace
}  // namespace jax_ep::ffi_layer

int main() {
  jax_ep::ffi_layer::Run();
  std::puts("window_operands_test: all good");
}
