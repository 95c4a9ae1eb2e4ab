// A token format as decoders of custom calls see it.
#pragma once

#include <string>
#include <string_view>

#include "ffi/checker.h"
#include "formats/registry.h"

namespace jax_ep::ffi_layer {

// Never defined, so that a format whose dtype has no line below does not compile.
ffi::DataType NoSuchDtype();

consteval ffi::DataType DataTypeOf(std::string_view name) {
  if (name == "float32") return ffi::F32;
  if (name == "float8_e4m3fn") return ffi::F8E4M3FN;
  if (name == "float8_e8m0fnu") return ffi::F8E8M0FNU;
  if (name == "uint8") return ffi::U8;
  return NoSuchDtype();
}

struct Encoding {
  // The same for every token of the format.
  bool quantized = false;
  bool tiles = false;    // its scales may lie in tiles
  bool columns = false;  // its scales may lie in columns
  int64_t block = 1;
  int64_t code_bits = 8;  // only if quantised, as are the dtypes
  ffi::DataType payload_dtype{};
  ffi::DataType scale_dtype{};
  int64_t (*payload_bytes_of)(int64_t hidden, int64_t element_bytes) = nullptr;
  int64_t (*scale_bytes_of)(int64_t hidden) = nullptr;
  // Of one token; set by Size.
  int64_t payload_bytes = 0;
  int64_t scale_bytes = 0;
  int64_t scales = 0;
  int64_t payload_columns = 0;

  static Encoding Of(Checker& check, std::string_view format) {
    Encoding encoding;
    const bool known = VisitFormat(format, [&]<typename Format>(Format) {
      encoding.block = Format::kBlock;
      encoding.payload_bytes_of = &Format::PayloadBytes;
      encoding.scale_bytes_of = &Format::ScaleBytes;
      if constexpr (QuantizedFormat<Format>) {
        encoding.quantized = true;
        encoding.tiles = kTilesScales<Format>;
        encoding.columns = kColumnsOfScales<Format>;
        encoding.code_bits = Format::Code::kBits;
        encoding.payload_dtype = DataTypeOf(Format::kPayloadDtype);
        encoding.scale_dtype = DataTypeOf(Format::kScaleDtype);
      }
    });
    if (!known) check.Fail("unknown format " + std::string(format));
    return encoding;
  }

  // Returns H for a payload of that many columns, or more than kMaxHidden if there are too many.
  int64_t HiddenOf(int64_t columns) const {
    return quantized ? Min(columns, kMaxHidden + 1) * 8 / code_bits : columns;
  }

  void Size(Checker& check, int64_t hidden, int64_t element_bytes) {
    if (hidden % block != 0) {
      check.Fail("hidden_size must be a multiple of the format's block of " +
                 std::to_string(block) + ", got " + std::to_string(hidden));
    }
    payload_bytes = payload_bytes_of(hidden, element_bytes);
    scale_bytes = scale_bytes_of(hidden);
    scales = quantized ? hidden / block : 0;
    payload_columns = quantized ? payload_bytes : hidden;
    if (payload_bytes % kRowAlignBytes != 0) {
      check.Fail("an encoded token must be a multiple of 16 bytes, got " +
                 std::to_string(payload_bytes));
    }
  }
};

}  // namespace jax_ep::ffi_layer
