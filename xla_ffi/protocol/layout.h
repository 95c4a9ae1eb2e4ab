// The wire layout: where each byte of a message and of a region lies. Sizes in Python and the table
// in docs/protocol.md are derived from this file.
//
// A region is what one rank sends to one other in one call: a header, and then one message per
// slot.
#pragma once

#include <cstdint>

#include "protocol/platform.h"
#include "protocol/region_tag.h"

namespace jax_ep {

// The version of the wire, the tables and the targets. Raise it when any of them changes: it is
// part of the keys of handles, so a program from a persistent cache never meets another version.
inline constexpr int64_t kWireVersion = 3;

// Yields the offset of each field and the running end, so that offsets and sizes cannot disagree.
struct LayoutCursor {
  int64_t end = 0;

  JAX_EP_HOST_DEVICE constexpr int64_t Take(int64_t bytes, int64_t align) {
    const int64_t offset = RoundUp(end, align);
    end = offset + bytes;
    return offset;
  }
};

inline constexpr int64_t kMessageAlignBytes = 16;
// The alignment of messages, so that stores to a peer begin on lines of 128 bytes. Without it a
// long dispatch took a quarter longer.
inline constexpr int64_t kMessageStrideBytes = 128;
inline constexpr int64_t kIndexBytes = 4;   // int32
inline constexpr int64_t kWeightBytes = 4;  // float32
inline constexpr int64_t kTagBytes = sizeof(RegionTag);
inline constexpr int64_t kTagOffset = 0;  // in every region of the collective transport

// Precedes the messages of a first dispatch: what the receiver needs in order to place every row.
struct RegionHeader {
  int64_t tag;            // RegionTag
  int64_t num_slots;      // int32: messages that follow
  int64_t expert_counts;  // int32 [L]: rows for each local expert of the receiver
  int64_t bytes;

  JAX_EP_HOST_DEVICE static constexpr RegionHeader Of(int64_t local_experts) {
    LayoutCursor cursor;
    RegionHeader header{};
    header.tag = cursor.Take(kTagBytes, kIndexBytes);
    header.num_slots = cursor.Take(kIndexBytes, kIndexBytes);
    header.expert_counts = cursor.Take(local_experts * kIndexBytes, kIndexBytes);
    header.bytes = RoundUp(cursor.end, kMessageAlignBytes);
    return header;
  }
};

// A token on its way to one rank, with the places of its rows there. Experts are numbered from the
// receiver's first one, but in windows from expert 0, so that one message serves every destination.
struct DispatchMessage {
  int64_t payload;       // the encoded token
  int64_t scales;        // its scales, if the format has any
  int64_t source_token;  // int32: index of the token at its source
  int64_t expert;        // int32 [K]: in [0, L) for the receiver's experts
  int64_t position;      // int32 [K]: earlier rows of that expert from this source
  int64_t weight;        // float32 [K]: router weights
  int64_t bytes;

  JAX_EP_HOST_DEVICE static constexpr DispatchMessage Of(int64_t payload_bytes, int64_t scale_bytes,
                                                         int64_t top_k) {
    LayoutCursor cursor;
    DispatchMessage message{};
    message.payload = cursor.Take(payload_bytes, kMessageAlignBytes);
    message.scales = cursor.Take(scale_bytes, kMessageAlignBytes);
    message.source_token = cursor.Take(kIndexBytes, kMessageAlignBytes);
    message.expert = cursor.Take(top_k * kIndexBytes, kIndexBytes);
    message.position = cursor.Take(top_k * kIndexBytes, kIndexBytes);
    message.weight = cursor.Take(top_k * kWeightBytes, kWeightBytes);
    message.bytes = RoundUp(cursor.end, kMessageStrideBytes);
    return message;
  }
};

// A token in a cached dispatch: no indices travel. `num_weights` is K, or 0 without weights.
struct DispatchCachedMessage {
  int64_t payload;
  int64_t scales;
  int64_t weight;  // float32 [num_weights]
  int64_t bytes;

  JAX_EP_HOST_DEVICE static constexpr DispatchCachedMessage Of(int64_t payload_bytes,
                                                               int64_t scale_bytes,
                                                               int64_t num_weights) {
    LayoutCursor cursor;
    DispatchCachedMessage message{};
    message.payload = cursor.Take(payload_bytes, kMessageAlignBytes);
    message.scales = cursor.Take(scale_bytes, kMessageAlignBytes);
    message.weight = cursor.Take(num_weights * kWeightBytes, kMessageAlignBytes);
    message.bytes = RoundUp(cursor.end, kMessageStrideBytes);
    return message;
  }
};

// The sum of a slot's rows on its way back. `num_weights` is K if weight gradients travel too, else
// 0.
struct CombineMessage {
  int64_t row;          // combine_dtype [H], or the codes of combine_format
  int64_t scales;       // its scales, if it is quantised
  int64_t weight_grad;  // float32 [num_weights]
  int64_t bytes;

  JAX_EP_HOST_DEVICE static constexpr CombineMessage Of(int64_t row_bytes, int64_t scale_bytes,
                                                        int64_t num_weights) {
    LayoutCursor cursor;
    CombineMessage message{};
    message.row = cursor.Take(row_bytes, kMessageAlignBytes);
    message.scales = cursor.Take(scale_bytes, kWeightBytes);
    message.weight_grad = cursor.Take(num_weights * kWeightBytes, kWeightBytes);
    message.bytes = RoundUp(cursor.end, kMessageStrideBytes);
    return message;
  }
};

// Regions of the collective transport in a cached dispatch and on the way back. Both say which
// slots have a message: routes pass through the caller's program, and where nothing was packed a
// wire buffer holds whatever was in its memory.
struct DispatchCachedRegion {
  int64_t tag;       // RegionTag
  int64_t sent;      // uint8 [n]: whether the slot has a message
  int64_t messages;  // the first one
  int64_t bytes;

  JAX_EP_HOST_DEVICE static constexpr DispatchCachedRegion Of(int64_t tokens,
                                                              int64_t message_bytes) {
    LayoutCursor cursor;
    DispatchCachedRegion region{};
    region.tag = cursor.Take(kTagBytes, kIndexBytes);
    region.sent = cursor.Take(tokens, 1);
    region.messages = cursor.Take(tokens * message_bytes, kMessageStrideBytes);
    region.bytes = cursor.end;
    return region;
  }
};
struct CombineRegion {
  int64_t tag;       // RegionTag
  int64_t num_sums;  // int32: the slots below it have a message
  int64_t messages;  // the first one
  int64_t bytes;

  JAX_EP_HOST_DEVICE static constexpr CombineRegion Of(int64_t slots, int64_t message_bytes) {
    LayoutCursor cursor;
    CombineRegion region{};
    region.tag = cursor.Take(kTagBytes, kIndexBytes);
    region.num_sums = cursor.Take(kIndexBytes, kIndexBytes);
    region.messages = cursor.Take(slots * message_bytes, kMessageStrideBytes);
    region.bytes = cursor.end;
    return region;
  }
};

static_assert(RegionHeader::Of(64).tag == kTagOffset &&
              DispatchCachedRegion::Of(1, 256).tag == kTagOffset &&
              CombineRegion::Of(1, 256).tag == kTagOffset);
static_assert(RegionHeader::Of(64).expert_counts == 12);
static_assert(RegionHeader::Of(64).bytes == 272);
static_assert(DispatchMessage::Of(14336, 0, 8).source_token == 14336);
static_assert(DispatchMessage::Of(14336, 0, 8).bytes == 14336 + 128);
static_assert(DispatchCachedMessage::Of(14336, 0, 0).bytes == 14336);
static_assert(CombineMessage::Of(14336, 0, 8).bytes == 14336 + 128);
static_assert(DispatchCachedRegion::Of(121, 256).messages == 256);
static_assert(CombineRegion::Of(3, 256).bytes == 128 + 3 * 256);

}  // namespace jax_ep
