// The native module jax_ep._native_cpu: CPU targets, and the sizes and formats that Python asks
// for.
#include <nanobind/stl/pair.h>

#include <string>
#include <utility>

#include "ffi/cpu_handlers.h"
#include "ffi/module_common.h"
#include "ffi/window_arguments.h"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/router_step.h"
#include "protocol/scale_tiles.h"
#include "protocol/shape.h"

namespace nb = nanobind;

namespace jax_ep::ffi_layer {
namespace {

nb::list Formats() {
  nb::list formats;
  ForEachFormat([&](auto f) {
    using Format = decltype(f);
    const auto or_none = [](const char* name) -> nb::object {
      return name == nullptr ? nb::object(nb::none()) : nb::object(nb::str(name));
    };
    nb::dict format;
    format["name"] = Format::kName;
    format["block"] = Format::kBlock;
    format["payload_dtype"] = or_none(Format::kPayloadDtype);
    format["scale_dtype"] = or_none(Format::kScaleDtype);
    format["takes_input_scale"] = Format::kTakesInputScale;
    format["tiles_scales"] = kTilesScales<Format>;
    format["columns_of_scales"] = kColumnsOfScales<Format>;
    format["is_wire_format"] = kIsWireFormat<Format>;
    formats.append(format);
  });
  return formats;
}

// Bytes of an encoded token: (payload, scales).
std::pair<int64_t, int64_t> Encoded(const std::string& format, int64_t hidden,
                                    int64_t element_bytes) {
  std::pair<int64_t, int64_t> bytes{-1, -1};
  VisitFormat(format, [&](auto f) {
    using Format = decltype(f);
    bytes = {Format::PayloadBytes(hidden, element_bytes), Format::ScaleBytes(hidden)};
  });
  if (bytes.first < 0) throw nb::value_error(("unknown format " + format).c_str());
  return bytes;
}

// Rows (structure, field, type, offset) of the layout table, for one size.
nb::list LayoutTable(const std::string& format, int64_t hidden, int64_t element_bytes,
                     int64_t top_k, int64_t local_experts) {
  const auto [payload, scales] = Encoded(format, hidden, element_bytes);
  nb::list table;
  const auto add = [&](const char* structure, const char* field, const char* type, int64_t offset) {
    table.append(nb::make_tuple(structure, field, type, offset));
  };
  const auto header = RegionHeader::Of(local_experts);
  add("RegionHeader", "tag", "uint32 [2]", header.tag);
  add("RegionHeader", "num_slots", "int32", header.num_slots);
  add("RegionHeader", "expert_counts", "int32 [L]", header.expert_counts);
  add("RegionHeader", "bytes", "", header.bytes);
  const auto dispatch = DispatchMessage::Of(payload, scales, top_k);
  add("DispatchMessage", "payload", "format", dispatch.payload);
  add("DispatchMessage", "scales", "format", dispatch.scales);
  add("DispatchMessage", "source_token", "int32", dispatch.source_token);
  add("DispatchMessage", "expert", "int32 [K]", dispatch.expert);
  add("DispatchMessage", "position", "int32 [K]", dispatch.position);
  add("DispatchMessage", "weight", "float32 [K]", dispatch.weight);
  add("DispatchMessage", "bytes", "", dispatch.bytes);
  const auto cached = DispatchCachedMessage::Of(payload, scales, top_k);
  add("DispatchCachedMessage", "payload", "format", cached.payload);
  add("DispatchCachedMessage", "scales", "format", cached.scales);
  add("DispatchCachedMessage", "weight", "float32 [K]", cached.weight);
  add("DispatchCachedMessage", "bytes", "", cached.bytes);
  const auto combine = CombineMessage::Of(hidden * element_bytes, 0, top_k);
  add("CombineMessage", "row", "combine_dtype [H]", combine.row);
  add("CombineMessage", "scales", "combine_format", combine.scales);
  add("CombineMessage", "weight_grad", "float32 [K]", combine.weight_grad);
  add("CombineMessage", "bytes", "", combine.bytes);
  return table;
}

NB_MODULE(_native_cpu, m) {
  m.doc() = "CPU handlers of jax_ep, and the sizes that its Python side asks for.";
  DefineCommon(m, CpuTargets());
  m.attr("FFI_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("WIRE_VERSION") = kWireVersion;
  m.attr("MAX_TOP_K") = kMaxTopK;
  m.attr("MAX_EXPERTS") = kMaxExperts;
  m.attr("MAX_INDEX") = kMaxIndex;
  m.attr("MAX_HIDDEN") = kMaxHidden;
  m.attr("ROW_ALIGN_BYTES") = kRowAlignBytes;
  m.attr("FP8_LEAST_AMAX") = BitsFloat(Fp8Block128Format::kLeastAmax);
  m.attr("FP8_LEAST_AMAX_OF_GRADIENTS") = BitsFloat(Fp8Block128Format::kLeastAmaxOfGradients);
  m.attr("MAX_WINDOW_RANKS") = kMaxWindowRanks;
  m.attr("MAX_WINDOW_HIDDEN") = kMaxWindowHidden;
  m.attr("MAX_ENCODED_HIDDEN") = kMaxEncodedHidden;
  m.attr("PENDING_INTS") = kPendingInts;
  m.attr("MAX_ROUTER_EXPERTS") = kMaxRouterExperts;
  m.attr("MAX_ROUTER_CHOSEN") = kMaxRouterChosen;
  m.attr("MAX_ROUTER_GROUPS") = kMaxRouterGroups;
  m.def("formats", &Formats, "The registry of token formats.");
  m.def(
      "dispatch_region_bytes",
      [](const std::string& format, int64_t hidden, int64_t element_bytes, int64_t tokens,
         int64_t top_k, int64_t local_experts) {
        const auto [payload, scales] = Encoded(format, hidden, element_bytes);
        return RegionHeader::Of(local_experts).bytes +
               tokens * DispatchMessage::Of(payload, scales, top_k).bytes;
      },
      nb::arg("format"), nb::arg("hidden"), nb::arg("element_bytes"), nb::arg("tokens"),
      nb::arg("top_k"), nb::arg("local_experts"), "Bytes of one region of a first dispatch.");
  m.def(
      "dispatch_cached_region_bytes",
      [](const std::string& format, int64_t hidden, int64_t element_bytes, int64_t tokens,
         int64_t num_weights) {
        const auto [payload, scales] = Encoded(format, hidden, element_bytes);
        const int64_t message = DispatchCachedMessage::Of(payload, scales, num_weights).bytes;
        return DispatchCachedRegion::Of(tokens, message).bytes;
      },
      nb::arg("format"), nb::arg("hidden"), nb::arg("element_bytes"), nb::arg("tokens"),
      nb::arg("num_weights"), "Bytes of one region of a dispatch along a known route.");
  m.def(
      "combine_region_bytes",
      [](const std::string& format, int64_t hidden, int64_t element_bytes, int64_t tokens,
         int64_t num_weights) {
        const auto [row, scales] = Encoded(format, hidden, element_bytes);
        const int64_t message = CombineMessage::Of(row, scales, num_weights).bytes;
        return CombineRegion::Of(tokens, message).bytes;
      },
      nb::arg("format"), nb::arg("hidden"), nb::arg("element_bytes"), nb::arg("tokens"),
      nb::arg("num_weights"), "Bytes of one region of a combine.");
  m.def(
      "window_bytes",
      [](const nb::dict& config, bool internode, std::pair<int64_t, int64_t> bundled) {
        return GivenWindowBytes(WindowSizesFrom(config), internode, bundled.first, bundled.second);
      },
      nb::arg("config"), nb::arg("internode") = false, nb::arg("bundled") = std::pair(0, 0),
      "Bytes of a rank's window of transports p2p and shmem, of a group that need not be here. "
      "`internode`: with what reaches ranks on other nodes, `bundled`: the number of nodes and of "
      "ranks "
      "in each, where dispatches are bundled.");
  m.def("encoded_bytes", &Encoded, nb::arg("format"), nb::arg("hidden"), nb::arg("element_bytes"),
        "Bytes of an encoded token: (payload, scales).");
  m.def(
      "scale_tiles",
      [](int64_t rows, int64_t groups, int64_t columns) {
        const auto tiles = ScaleTiles::Of(rows, groups, columns);
        return std::pair(tiles.tiles, tiles.column_words);
      },
      nb::arg("rows"), nb::arg("groups"), nb::arg("columns"),
      "Sizes (tiles, column words) of tiled scales.");
  m.def("scale_line", &ScaleLine, nb::arg("rows"), "Length of a line of scales in columns.");
  m.def("layout_table", &LayoutTable, nb::arg("format"), nb::arg("hidden"),
        nb::arg("element_bytes"), nb::arg("top_k"), nb::arg("local_experts"),
        "(structure, field, type, offset) of every field of the wire, for docs/protocol.md.");
}

}  // namespace
}  // namespace jax_ep::ffi_layer
