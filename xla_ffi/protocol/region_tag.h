// A tag that says which call of which handle has packed a region of the collective transport. XLA
// pairs up whatever exchanges its processes run, so ranks whose programs differ may get each
// other's data. Their regions then have different tags, which every rank of the exchange sees.
#pragma once

#include <cstdint>

#include "protocol/platform.h"

namespace jax_ep {

enum class CallOp : uint32_t { kNone, kDispatch, kDispatchCached, kCombine };
inline constexpr uint32_t kCallOpMask = 3;

// Comes first in every region, whatever the op, so that regions of different ops can be compared.
struct RegionTag {
  uint32_t handle = 0;  // digest of the key
  // Digest of the other arguments of Of; the lowest bits are the op itself.
  uint32_t call = 0;

  // `site` is a digest of the user's line. The receive half of a call does not know it and does not
  // need it: the rank's own region is among those that arrive, and tags are compared with each
  // other.
  static constexpr RegionTag Of(int64_t key, CallOp op, bool in_halves, int64_t site,
                                int64_t region_bytes) {
    // The highest of a site's 64 bits is never set.
    uint64_t digest = Mix(static_cast<uint64_t>(site) << 1 | (in_halves ? 1 : 0));
    digest = Mix(digest ^ static_cast<uint64_t>(region_bytes));
    return {static_cast<uint32_t>(Mix(static_cast<uint64_t>(key))),
            (static_cast<uint32_t>(digest) & ~kCallOpMask) | static_cast<uint32_t>(op)};
  }
  JAX_EP_HOST_DEVICE constexpr CallOp op() const { return static_cast<CallOp>(call & kCallOpMask); }
  JAX_EP_HOST_DEVICE constexpr bool operator==(const RegionTag& other) const {
    return handle == other.handle && call == other.call;
  }

 private:
  // The finaliser of MurmurHash3: every bit of the input affects the upper half of the result.
  static constexpr uint64_t Mix(uint64_t bits) {
    bits = (bits ^ (bits >> 33)) * 0xFF51AFD7ED558CCDu;
    bits = (bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53u;
    return bits ^ (bits >> 33);
  }
};
static_assert(sizeof(RegionTag) == 8 && alignof(RegionTag) == 4);

}  // namespace jax_ep
