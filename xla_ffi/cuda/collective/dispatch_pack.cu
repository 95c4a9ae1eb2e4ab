// Packing on the collective transport: routing and encoding for a first dispatch, encoding alone
// for a cached one.
#include "cuda/collective/mixed_calls.cuh"
#include "cuda/collective/route.cuh"
#include "cuda/collective/steps.h"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/quantize.cuh"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cuda {
namespace {

// Called by one thread of the call. Writes the count, and the first bad id in one store of the
// whole report.
__device__ void ReportInvalidIds(const DispatchPackStep& step, const InvalidIds* of_warps,
                                 int warps) {
  InvalidIds invalid;
  for (int warp = 0; warp < warps; ++warp) {
    if (invalid.count == 0) invalid.first_entry = of_warps[warp].first_entry;
    invalid.count += of_warps[warp].count;
  }
  *step.num_invalid = invalid.count;
  if (invalid.count == 0 || step.report == nullptr) return;
  // Keep an earlier report: the host clears it between calls.
  if (*static_cast<const volatile int32_t*>(&step.report->state) != InvalidIdReport::kFree) return;
  const int32_t top_k = static_cast<int32_t>(step.shape.top_k);
  *reinterpret_cast<int4*>(step.report) =
      make_int4(invalid.first_entry / top_k, invalid.first_entry % top_k,
                step.ids[invalid.first_entry], InvalidIdReport::kSet);
}

__global__ void __launch_bounds__(kMaxRouteWarps* kWarpSize)
    RouteKernel(const __grid_constant__ DispatchPackStep step, RegionHeader header,
                int64_t region_bytes) {
  extern __shared__ int32_t route_memory[];
  const EpShape& shape = step.shape;
  const int64_t local_experts = shape.local_experts;
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const int32_t rank = static_cast<int32_t>(blockIdx.x);
  const bool first_block = blockIdx.x == 0;
  const RouteShared shared(route_memory, warps, local_experts);
  for (int64_t i = threadIdx.x; i < warps * local_experts; i += blockDim.x) shared.rows[i] = 0;
  __syncthreads();

  const TokenWalk walk(static_cast<int32_t>(shape.top_k));
  const TokenRun run = RunOf(walk, shape.tokens, Warp(), warps);
  int32_t* rows = shared.rows + Warp() * local_experts;
  const RankCounts counts = CountRank(shape, walk, step.ids, run, rank, rows);
  if (Lane() == 0) {
    shared.slots[Warp()] = counts.slots;
    shared.invalid[Warp()] = counts.invalid;
  }
  __syncthreads();

  uint8_t* region = step.send + rank * region_bytes;
  for (int64_t expert = threadIdx.x; expert < local_experts; expert += blockDim.x) {
    Int32At(region, header.expert_counts)[expert] =
        ExclusiveSum(shared.rows + expert, local_experts, warps);
  }
  if (threadIdx.x == 0) {
    WriteTag(region, step.tag);
    *Int32At(region, header.num_slots) = ExclusiveSum(shared.slots, 1, warps);
    if (first_block) ReportInvalidIds(step, shared.invalid, warps);
  }
  __syncthreads();

  AssignRank(shape, walk, step.ids, run, rank, first_block, shared.slots[Warp()], rows,
             {step.slot_of, step.position});
}

// Encodes a part of a token, a row of `row_bytes`, once and stores it to the messages of all its
// slots. `annotate(message, slot, lane_slot)` runs once per message in all lanes and writes what
// lies beside the payload and the scales. The tables have passed through the caller's program, so
// slots that are out of range are skipped.
template <typename Part, typename Message, typename MessageAt, typename Annotate>
__device__ void SendToken(const EpShape& shape, const void* tokens, int64_t row_bytes,
                          const int32_t* slot_of, const Message& layout, float input_scale,
                          int64_t token, int64_t part, MessageAt message_at, Annotate annotate) {
  const int lane = Lane();
  int32_t slot = lane < shape.top_k ? slot_of[token * shape.top_k + lane] : -1;
  if (slot < 0 || slot >= shape.slots()) slot = -1;
  const unsigned peers = __match_any_sync(kFullWarp, slot);
  unsigned left = __ballot_sync(kFullWarp, slot >= 0 && (peers & LanesBelow(lane)) == 0);
  if (left == 0) return;
  Part row(part, row_bytes);
  row.Load(static_cast<const uint8_t*>(tokens) + token * row_bytes, input_scale);
  for (; left != 0; left &= left - 1) {
    const int32_t target = FromLowest(left, slot);
    uint8_t* message = message_at(target);
    row.Store(message + layout.payload, message + layout.scales);
    if (part == 0) annotate(message, target, slot);
  }
}

// Writes the messages of all tokens, rows of `row_bytes`. `add_scales(message, token)` runs once
// per message in all lanes, for scales that come with the tokens.
template <typename Part, typename AddScales>
__device__ __forceinline__ void PackTokens(const DispatchPackStep& step, int64_t row_bytes,
                                           const DispatchMessage& message, int64_t header_bytes,
                                           int64_t region_bytes, AddScales add_scales) {
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int lane = Lane();
  const float input_scale = Part::kTakesInputScale ? *step.input_scale : kNoInputScale;
  ForEachPart(shape.tokens, row_bytes, [&](int64_t token, int64_t part) {
    const auto message_at = [&](int32_t slot) {
      const uint32_t flat = static_cast<uint32_t>(slot);
      return step.send + (flat / tokens) * region_bytes + header_bytes +
             (flat % tokens) * message.bytes;
    };
    const auto annotate = [&](uint8_t* to, int32_t slot, int32_t lane_slot) {
      add_scales(to, token);
      if (lane == 0) *Int32At(to, message.source_token) = static_cast<int32_t>(token);
      if (lane >= shape.top_k) return;
      const bool here = lane_slot == slot;
      const int64_t entry = token * shape.top_k + lane;
      Int32At(to, message.expert)[lane] =
          here ? step.ids[entry] % static_cast<int32_t>(shape.local_experts) : -1;
      Int32At(to, message.position)[lane] = here ? step.position[entry] : -1;
      FloatAt(to, message.weight)[lane] = step.weights[entry];
    };
    SendToken<Part>(shape, step.tokens, row_bytes, step.slot_of, message, input_scale, token, part,
                    message_at, annotate);
  });
}

template <typename Part>
__global__ void __launch_bounds__(kBlockThreads)
    DispatchPackKernel(const __grid_constant__ DispatchPackStep step, DispatchMessage message,
                       int64_t header_bytes, int64_t region_bytes) {
  PackTokens<Part>(step, step.shape.row_bytes(), message, header_bytes, region_bytes,
                   [](uint8_t*, int64_t) {});
}

// Tokens that come as codes and scales, whatever the format.
__global__ void __launch_bounds__(kBlockThreads)
    DispatchPackCodesKernel(const __grid_constant__ DispatchPackStep step, DispatchMessage message,
                            int64_t header_bytes, int64_t region_bytes, int64_t code_bytes,
                            int64_t scale_bytes) {
  const auto copy = [&]<typename Unit>(uint8_t* to, const uint8_t* from, Unit) {
    for (int64_t i = Lane(); i < scale_bytes / static_cast<int64_t>(sizeof(Unit)); i += kWarpSize) {
      reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
    }
  };
  PackTokens<PlainPart>(
      step, code_bytes, message, header_bytes, region_bytes, [&](uint8_t* to, int64_t token) {
        const uint8_t* from = step.token_scales + token * scale_bytes;
        to += message.scales;
        scale_bytes % kVectorBytes == 0 ? copy(to, from, uint4{}) : copy(to, from, uint8_t{});
      });
}

template <typename Part>
__global__ void __launch_bounds__(kBlockThreads)
    DispatchCachedPackKernel(const __grid_constant__ DispatchCachedPackStep step,
                             DispatchCachedRegion region, DispatchCachedMessage message) {
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int lane = Lane();
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    ForEachItem(threadIdx.x, kBlockThreads, shape.ranks,
                [&](int64_t rank) { WriteTag(step.send + rank * region.bytes, step.tag); });
  }
  ForEachPart(shape.tokens, shape.row_bytes(), [&](int64_t token, int64_t part) {
    const auto region_of = [&](int32_t slot) {
      return step.send + (static_cast<uint32_t>(slot) / tokens) * region.bytes;
    };
    const auto message_at = [&](int32_t slot) {
      return region_of(slot) + region.messages +
             (static_cast<uint32_t>(slot) % tokens) * message.bytes;
    };
    const auto annotate = [&](uint8_t* to, int32_t slot, int32_t) {
      if (lane == 0) region_of(slot)[region.sent + static_cast<uint32_t>(slot) % tokens] = 1;
      if (lane >= step.num_weights) return;
      FloatAt(to, message.weight)[lane] = step.weights[token * step.num_weights + lane];
    };
    SendToken<Part>(shape, step.tokens, shape.row_bytes(), step.slot_of, message,
                    kRouteInputScale<Part>, token, part, message_at, annotate);
  });
}

}  // namespace

template <typename Format>
cudaError_t DispatchPack(const DispatchPackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const auto header = RegionHeader::Of(shape.local_experts);
  const auto message = DispatchMessage::Of(PayloadBytes<Format>(shape),
                                           Format::ScaleBytes(shape.hidden), shape.top_k);
  const int64_t region_bytes = header.bytes + shape.tokens * message.bytes;
  const int64_t warps = RouteWarps(shape);
  const cudaError_t error = Launch(
      RouteKernel, dim3(static_cast<unsigned>(shape.ranks)), static_cast<int>(warps * kWarpSize),
      static_cast<size_t>(warps * RouteShared::BytesPerWarp(shape.local_experts)), stream, step,
      header, region_bytes);
  if (error != cudaSuccess || shape.tokens == 0) return error;
  if (step.token_scales != nullptr) {
    const int64_t code_bytes = PayloadBytes<Format>(shape);
    return Launch(DispatchPackCodesKernel, RowGrid(shape.tokens, code_bytes), kBlockThreads, 0,
                  stream, step, message, header.bytes, region_bytes, code_bytes,
                  Format::ScaleBytes(shape.hidden));
  }
  return VisitSentPart<Format>(step.element, [&]<typename Part>(TypeTag<Part>) {
    return Launch(DispatchPackKernel<Part>, RowGrid(shape.tokens, shape.row_bytes()), kBlockThreads,
                  0, stream, step, message, header.bytes, region_bytes);
  });
}

template <typename Format>
cudaError_t DispatchCachedPack(const DispatchCachedPackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const auto message = DispatchCachedMessage::Of(
      PayloadBytes<Format>(shape), Format::ScaleBytes(shape.hidden), step.num_weights);
  const auto region = DispatchCachedRegion::Of(shape.tokens, message.bytes);
  const cudaError_t error =
      shape.tokens == 0
          ? cudaSuccess
          : cudaMemset2DAsync(step.send + region.sent, static_cast<size_t>(region.bytes), 0,
                              static_cast<size_t>(shape.tokens), static_cast<size_t>(shape.ranks),
                              stream);
  if (error != cudaSuccess) return error;
  return VisitSentPart<Format>(step.element, [&]<typename Part>(TypeTag<Part>) {
    // Also without tokens, because the regions' tags must be written.
    return Launch(DispatchCachedPackKernel<Part>, SomeRowGrid(shape.tokens, shape.row_bytes()),
                  kBlockThreads, 0, stream, step, region, message);
  });
}

cudaError_t PreloadDispatchPackKernels() {
  cudaError_t error = cudaSuccess;
  const auto preload = [&](auto kernel) {
    if (error == cudaSuccess) error = Preload(kernel);
  };
  preload(RouteKernel);
  preload(DispatchPackCodesKernel);
  ForEachFormat([&]<typename Format>(Format) {
    for (const ElementType element : kElementTypes) {
      VisitSentPart<Format>(element, [&]<typename Part>(TypeTag<Part>) {
        preload(DispatchPackKernel<Part>);
        preload(DispatchCachedPackKernel<Part>);
      });
    }
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                  \
  template cudaError_t DispatchPack<Format>(const DispatchPackStep&, cudaStream_t); \
  template cudaError_t DispatchCachedPack<Format>(const DispatchCachedPackStep&, cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
