// Encoding and decoding blocks of a format within a warp. A lane holds one or two 16-byte vectors
// of elements; a block lies in one lane or in neighbouring ones, which find its largest element by
// shuffles.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "formats/element_type.h"
#include "formats/token_format.h"

namespace jax_ep::cuda {

// The codes of kCount elements of a row, and how many lanes share their scale. `vector` counts
// groups of kCount elements from the start of the row.
template <typename Format, int kCount>
struct CodedVector {
  using Code = typename Format::Code;
  static constexpr int kBytes = kCount * Code::kBits / 8;
  static constexpr int kLanes = static_cast<int>(Format::kBlock) / kCount;
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4 || kBytes == 2);
  static_assert(kLanes <= kWarpSize && (kLanes & (kLanes - 1)) == 0);

  uint32_t words[(kBytes + 3) / 4];

  __device__ void Load(const uint8_t* payload, int64_t vector) {
    const uint8_t* from = payload + vector * kBytes;
    if constexpr (kBytes == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (kBytes == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1] = v.y;
    } else if constexpr (kBytes == 4) {
      words[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
      words[0] = *reinterpret_cast<const uint16_t*>(from);
    }
  }
  __device__ void Store(uint8_t* payload, int64_t vector) const {
    uint8_t* to = payload + vector * kBytes;
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kBytes == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else if constexpr (kBytes == 4) {
      *reinterpret_cast<uint32_t*>(to) = words[0];
    } else {
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[0]);
    }
  }
  __device__ float Get(int i) const {
    const int bit = i * Code::kBits;
    return Code::Decode((words[bit / 32] >> (bit % 32)) & ((1u << Code::kBits) - 1));
  }
  __device__ void Decode(float (&values)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int bit = i * Code::kBits;
      Code::DecodeTwo(words[bit / 32] >> (bit % 32), values[i], values[i + 1]);
    }
  }
};

// kCount elements as codes and a scale.
template <typename Format, int kCount>
struct EncodedVector {
  using Codes = CodedVector<Format, kCount>;

  Codes codes;
  typename Format::Scale scale;

  // Called by the whole warp, whose lanes hold consecutive vectors of a row, starting with a whole
  // block. Lanes past the row's end may hold anything: no block crosses it.
  __device__ static EncodedVector Of(const float (&values)[kCount], float input_scale) {
    uint32_t amax_bits = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      amax_bits = max(amax_bits, FloatBits(values[i]) & 0x7FFFFFFFu);
    }
    return Of<2>(values, amax_bits, input_scale);
  }
  // The same. For 16-bit elements one correction makes the quotient exact;
  // tests/cc/quantized_test.cc tries them all.
  template <typename Element>
  __device__ static EncodedVector Of(const Elements<Element, kCount>& elements, float input_scale) {
    float values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = elements.Get(i);
    return Of<sizeof(Element) == 2 ? 1 : 2>(values, elements.AmaxBits(), input_scale);
  }

  // The first lane of each block stores its scale.
  __device__ void Store(uint8_t* payload, uint8_t* scales, int64_t vector) const {
    codes.Store(payload, vector);
    if (vector % Codes::kLanes != 0) return;
    reinterpret_cast<typename Format::Scale*>(scales)[vector / Codes::kLanes] = scale;
  }

 private:
  // `amax_bits` covers this lane's values.
  template <int kCorrections>
  __device__ static EncodedVector Of(const float (&values)[kCount], uint32_t amax_bits,
                                     float input_scale) {
#pragma unroll
    for (int by = 1; by < Codes::kLanes; by *= 2) {
      amax_bits = max(amax_bits, __shfl_xor_sync(kFullWarp, amax_bits, by));
    }
    EncodedVector encoded{};
    encoded.scale = Format::ScaleOf(amax_bits, input_scale);
    const float factor = Format::FactorOf(encoded.scale, input_scale);
    const auto scaled = [&] {
      if constexpr (Format::kDivides) {
        return DividerBy<kCorrections>(factor);
      } else {
        return [factor](float value) { return Multiply(value, factor); };
      }
    }();
    float of[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) of[i] = scaled(values[i]);
    // A NaN or an infinity among the elements makes the factor NaN; an infinite factor would turn
    // zeros into NaN.
    const bool numbers = fabsf(factor) < INFINITY;
    using Code = typename Format::Code;
    constexpr int kWordCodes = Min(32 / Code::kBits, kCount);
#pragma unroll
    for (int i = 0; i < kCount; i += kWordCodes) {
      encoded.codes.words[i / kWordCodes] = Code::template EncodeWord<kWordCodes>(of + i, numbers);
    }
    return encoded;
  }
};

// kCount elements to be restored from codes and a scale.
template <typename Format, int kCount>
struct DecodedVector {
  using Codes = CodedVector<Format, kCount>;

  Codes codes;
  float scale;

  __device__ void Load(const uint8_t* payload, const uint8_t* scales, int64_t vector) {
    codes.Load(payload, vector);
    const auto* stored = reinterpret_cast<const typename Format::Scale*>(scales);
    scale = Format::ScaleValue(stored[vector / Codes::kLanes]);
  }
  __device__ float Get(int i, float input_scale = 1.0f) const {
    return Format::Restored(codes.Get(i), scale, input_scale);
  }
  __device__ void Restore(float (&values)[kCount], float input_scale = 1.0f) const {
    codes.Decode(values);
#pragma unroll
    for (float& value : values) value = Format::Restored(value, scale, input_scale);
  }
};

// ---- Parts of rows, as RowPart ------------------------------------------------------------------

// A part that is sent unchanged.
class PlainPart {
 public:
  static constexpr bool kTakesInputScale = false;

  __device__ PlainPart(int64_t part, int64_t row_bytes) : row_(part, row_bytes) {}
  __device__ void Load(const uint8_t* row, float) { row_.Load(row); }
  __device__ void Store(uint8_t* payload, uint8_t*) const { row_.Store(payload); }

 private:
  RowPart row_;
};

// A part that is sent as codes and scales. `row_bytes` is the size of a row of elements.
template <typename Format, typename Element>
class EncodedPart {
 public:
  static constexpr bool kTakesInputScale = Format::kTakesInputScale;

  __device__ EncodedPart(int64_t part, int64_t row_bytes)
      : first_(part * kPartVectors + Lane()), end_(row_bytes / kVectorBytes) {}

  // Called by the whole warp.
  __device__ void Load(const uint8_t* row, float input_scale) {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      Elements<Element, kCount> elements{};
      if (Index(i) < end_) elements.Load(row + Index(i) * kVectorBytes);
      vectors_[i] = EncodedVector<Format, kCount>::Of(elements, input_scale);
    }
  }
  __device__ void Store(uint8_t* payload, uint8_t* scales) const {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (Index(i) < end_) vectors_[i].Store(payload, scales, Index(i));
    }
  }

 private:
  static constexpr int kCount = kLaneElements<Element>;
  __device__ int64_t Index(int i) const { return first_ + i * kWarpSize; }

  int64_t first_;
  int64_t end_;
  EncodedVector<Format, kCount> vectors_[kVectorsPerLane];
};

// A part of a message that is copied to rows unchanged.
class PlacedPart {
 public:
  __device__ PlacedPart(int64_t part, int64_t row_bytes) : row_(part, row_bytes) {}
  __device__ void Load(const uint8_t* payload, const uint8_t*, float) { row_.Load(payload); }
  __device__ void Store(uint8_t* row) const { row_.Store(row); }

 private:
  RowPart row_;
};

// A part of a message that is decoded into rows of elements.
template <typename Format, typename Element>
class DecodedPart {
 public:
  __device__ DecodedPart(int64_t part, int64_t row_bytes)
      : first_(part * kPartVectors + Lane()), end_(row_bytes / kVectorBytes) {}

  __device__ void Load(const uint8_t* payload, const uint8_t* scales, float input_scale) {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (Index(i) >= end_) continue;
      DecodedVector<Format, kCount> decoded;
      decoded.Load(payload, scales, Index(i));
      float values[kCount];
      decoded.Restore(values, input_scale);
      vectors_[i] = Elements<Element, kCount>::Round(values);
    }
  }
  __device__ void Store(uint8_t* row) const {
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (Index(i) < end_) vectors_[i].Store(row + Index(i) * kVectorBytes);
    }
  }

 private:
  static constexpr int kCount = kLaneElements<Element>;
  __device__ int64_t Index(int i) const { return first_ + i * kWarpSize; }

  int64_t first_;
  int64_t end_;
  Elements<Element, kCount> vectors_[kVectorsPerLane];
};

template <typename T>
struct TypeTag {
  using type = T;
};

// VisitSentPart calls visit(TypeTag<Part>{}) with the part type in which a format sends elements,
// VisitPlacedPart with the one that turns a message into elements.
template <typename Format, typename Visit>
auto VisitSentPart(ElementType element, Visit&& visit) {
  if constexpr (QuantizedFormat<Format>) {
    return VisitElement(element, [&]<typename Element>(Element) {
      return visit(TypeTag<EncodedPart<Format, Element>>{});
    });
  } else {
    static_cast<void>(element);
    return visit(TypeTag<PlainPart>{});
  }
}
template <typename Format, typename Visit>
auto VisitPlacedPart(ElementType element, Visit&& visit) {
  if constexpr (QuantizedFormat<Format>) {
    return VisitElement(element, [&]<typename Element>(Element) {
      return visit(TypeTag<DecodedPart<Format, Element>>{});
    });
  } else {
    static_cast<void>(element);
    return visit(TypeTag<PlacedPart>{});
  }
}

}  // namespace jax_ep::cuda
