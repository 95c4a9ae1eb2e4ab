// Tokens on their way into messages and out of them, in any format. Used by dispatch.cc.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/quantize.h"
#include "cpu/rows.h"
#include "formats/element_type.h"
#include "formats/token_format.h"
#include "protocol/shape.h"

namespace jax_ep::cpu {

// Encodes tokens and copies them to messages. A quantised token is made once, in a buffer of the
// thread that stays in its cache, and copied from there to each of its messages. `stride` is the
// distance from the payload to the scales in all of them.
template <typename Format>
class Encoder {
 public:
  Encoder(const EpShape& shape, int64_t stride)
      : shape_(shape), stride_(stride), bytes_(PayloadBytes<Format>(shape)) {
    if constexpr (QuantizedFormat<Format>) {
      bytes_ = stride_ + Format::ScaleBytes(shape.hidden);
      made_.resize(static_cast<size_t>(bytes_));
    }
  }

  void Make(const void* tokens, ElementType element, int64_t token, float input_scale) {
    from_ = static_cast<const uint8_t*>(tokens) + token * shape_.row_bytes();
    if constexpr (QuantizedFormat<Format>) {
      VisitElement(element, [&]<typename Element>(Element) {
        QuantizeRow(Format{}, reinterpret_cast<const Element*>(from_), shape_.hidden, input_scale,
                    made_.data(), made_.data() + stride_);
      });
      from_ = made_.data();
    } else {
      static_cast<void>(element), static_cast<void>(input_scale);
    }
  }
  // Takes a token that comes as codes and scales.
  void Take(const void* codes, const uint8_t* scales, int64_t token) {
    bytes_ = PayloadBytes<Format>(shape_);
    scale_bytes_ = Format::ScaleBytes(shape_.hidden);
    from_ = static_cast<const uint8_t*>(codes) + token * bytes_;
    scales_ = scales + token * scale_bytes_;
  }
  // Copies the last token that was made or taken. One that travels unchanged is read where it lies.
  void CopyTo(uint8_t* payload, bool streaming) const {
    CopyRow(payload, from_, bytes_, streaming);
    if (scales_ != nullptr) {
      std::memcpy(payload + stride_, scales_, static_cast<size_t>(scale_bytes_));
    }
  }

 private:
  EpShape shape_;
  int64_t stride_;
  int64_t bytes_;
  int64_t scale_bytes_ = 0;
  const uint8_t* from_ = nullptr;
  const uint8_t* scales_ = nullptr;  // only of a token that was taken
  std::vector<uint8_t> made_;
};

// Returns a message's token: where it lies or, decoded, in `to`.
template <typename Format>
const uint8_t* Decoded(const EpShape& shape, ElementType element, const uint8_t* payload,
                       const uint8_t* scales, uint8_t* to) {
  if constexpr (!QuantizedFormat<Format>) {
    static_cast<void>(shape), static_cast<void>(element), static_cast<void>(scales);
    static_cast<void>(to);
    return payload;
  } else {
    VisitElement(element, [&]<typename Element>(Element) {
      DequantizeRow(Format{}, payload, scales, shape.hidden, kNoInputScale,
                    reinterpret_cast<Element*>(to));
    });
    return to;
  }
}

}  // namespace jax_ep::cpu
