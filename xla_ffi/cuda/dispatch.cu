// Dispatch on the GPU: route, encode and place, for a first call and along a known route.
#include "cuda/groups.cuh"
#include "cuda/launch.h"
#include "cuda/primitives.cuh"
#include "cuda/route.cuh"
#include "cuda/steps.h"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cuda {
namespace {

template <typename Format>
int64_t PayloadBytes(const EpShape& shape) {
  return Format::PayloadBytes(shape.hidden, shape.element_bytes);
}

// ---- Pack ---------------------------------------------------------------------------------------

// One thread of the call: the count, and the first bad id in one store of the whole report.
__device__ void ReportInvalidIds(const PackStep& step, const InvalidIds* of_warps, int warps) {
  InvalidIds invalid;
  for (int warp = 0; warp < warps; ++warp) {
    if (invalid.count == 0) invalid.first_entry = of_warps[warp].first_entry;
    invalid.count += of_warps[warp].count;
  }
  *step.num_invalid = invalid.count;
  if (invalid.count == 0 || step.report == nullptr) return;
  // The host clears it between calls.
  if (*static_cast<const volatile int32_t*>(&step.report->state) != InvalidIdReport::kFree) return;
  const int32_t top_k = static_cast<int32_t>(step.shape.top_k);
  *reinterpret_cast<int4*>(step.report) =
      make_int4(invalid.first_entry / top_k, invalid.first_entry % top_k,
                step.ids[invalid.first_entry], InvalidIdReport::kSet);
}

__global__ void __launch_bounds__(kMaxRouteWarps* kWarpSize)
    RouteKernel(const __grid_constant__ PackStep step, RegionHeader header, int64_t region_bytes) {
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
    *Int32At(region, header.num_slots) = ExclusiveSum(shared.slots, 1, warps);
    if (first_block) ReportInvalidIds(step, shared.invalid, warps);
  }
  __syncthreads();

  AssignRank(shape, walk, step.ids, run, rank, first_block, shared.slots[Warp()], rows,
             {step.slot_of, step.position});
}

// Stores a part of a token to the messages of all its slots; `annotate(message, slot, lane_slot)`
// runs once a message, with all lanes, for what lies beside the payload. Tables come back from the
// caller's program, so a slot out of range is skipped.
template <typename Format, typename MessageAt, typename Annotate>
__device__ void SendToken(const EpShape& shape, const void* tokens, const int32_t* slot_of,
                          int64_t payload_offset, int64_t token, int64_t part, MessageAt message_at,
                          Annotate annotate) {
  static_assert(Format::kPayloadDtype == nullptr, "only a payload that is the token is copied");
  const int lane = Lane();
  int32_t slot = lane < shape.top_k ? slot_of[token * shape.top_k + lane] : -1;
  if (slot < 0 || slot >= shape.slots()) slot = -1;
  const unsigned peers = __match_any_sync(kFullWarp, slot);
  unsigned left = __ballot_sync(kFullWarp, slot >= 0 && (peers & LanesBelow(lane)) == 0);
  if (left == 0) return;
  RowPart row(part, shape.row_bytes());
  row.Load(static_cast<const uint8_t*>(tokens) + token * shape.row_bytes());
  for (; left != 0; left &= left - 1) {
    const int32_t target = FromLowest(left, slot);
    uint8_t* message = message_at(target);
    row.Store(message + payload_offset);
    if (part == 0) annotate(message, target, slot);
  }
}

template <typename Format>
__global__ void __launch_bounds__(kBlockThreads)
    PackKernel(const __grid_constant__ PackStep step, DispatchMessage message, int64_t header_bytes,
               int64_t region_bytes) {
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int lane = Lane();
  ForEachPart(shape.tokens, shape.row_bytes(), [&](int64_t token, int64_t part) {
    const auto message_at = [&](int32_t slot) {
      const uint32_t flat = static_cast<uint32_t>(slot);
      return step.send + (flat / tokens) * region_bytes + header_bytes +
             (flat % tokens) * message.bytes;
    };
    const auto annotate = [&](uint8_t* to, int32_t slot, int32_t lane_slot) {
      if (lane == 0) *Int32At(to, message.source_token) = static_cast<int32_t>(token);
      if (lane >= shape.top_k) return;
      const bool here = lane_slot == slot;
      const int64_t entry = token * shape.top_k + lane;
      Int32At(to, message.expert)[lane] =
          here ? step.ids[entry] % static_cast<int32_t>(shape.local_experts) : -1;
      Int32At(to, message.position)[lane] = here ? step.position[entry] : -1;
      FloatAt(to, message.weight)[lane] = step.weights[entry];
    };
    SendToken<Format>(shape, step.tokens, step.slot_of, message.payload, token, part, message_at,
                      annotate);
  });
}

template <typename Format>
__global__ void __launch_bounds__(kBlockThreads)
    CachedPackKernel(const __grid_constant__ CachedPackStep step, CachedDispatchMessage message) {
  const EpShape& shape = step.shape;
  const int lane = Lane();
  ForEachPart(shape.tokens, shape.row_bytes(), [&](int64_t token, int64_t part) {
    const auto message_at = [&](int32_t slot) { return step.send + slot * message.bytes; };
    const auto annotate = [&](uint8_t* to, int32_t, int32_t) {
      if (lane >= step.num_weights) return;
      FloatAt(to, message.weight)[lane] = step.weights[token * step.num_weights + lane];
    };
    SendToken<Format>(shape, step.tokens, step.slot_of, message.payload, token, part, message_at,
                      annotate);
  });
}

// ---- Unpack -------------------------------------------------------------------------------------

// Block 0 places the groups while the others clear the tables by row.
__global__ void __launch_bounds__(kBlockThreads)
    PrepareKernel(const __grid_constant__ UnpackStep step, RegionHeader header,
                  int64_t region_bytes) {
  if (blockIdx.x == 0) {
    PlaceGroups(step, header, region_bytes);
    return;
  }
  const int64_t thread = static_cast<int64_t>(blockIdx.x - 1) * kBlockThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x - 1) * kBlockThreads;
  const int64_t rows = step.shape.recv_rows;
  ForEachItem(thread, threads, rows * 3, [&](int64_t i) { step.src_info[i] = -1; });
  ForEachItem(thread, threads, rows, [&](int64_t row) {
    step.row_slot[row] = -1;
    step.row_weights[row] = 0.0f;
  });
}

// One thread an entry (source, slot, k): the tables by row and by slot.
__global__ void __launch_bounds__(kBlockThreads)
    ScatterKernel(const __grid_constant__ UnpackStep step, DispatchMessage message,
                  int64_t header_bytes, int64_t region_bytes) {
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const uint32_t top_k = static_cast<uint32_t>(shape.top_k);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kBlockThreads;
  ForEachItem(thread, threads, shape.slots() * shape.top_k, [&](int64_t entry) {
    const uint32_t flat_slot = static_cast<uint32_t>(entry) / top_k;
    const uint32_t k = static_cast<uint32_t>(entry) % top_k;
    const uint32_t source = flat_slot / tokens;
    const int32_t slot = static_cast<int32_t>(flat_slot % tokens);
    int32_t row = -1;
    if (slot < step.slot_counts[source]) {
      const uint8_t* from = step.recv + source * region_bytes + header_bytes + slot * message.bytes;
      const int32_t expert = Int32At(from, message.expert)[k];
      if (expert >= 0 && expert < shape.local_experts) {
        const int64_t base = step.row_base[source * shape.local_experts + expert];
        row = RowOrDropped(base + Int32At(from, message.position)[k], shape.recv_rows);
      }
      if (row >= 0) {
        step.row_slot[row] = static_cast<int32_t>(flat_slot);
        int32_t* info = step.src_info + int64_t{row} * 3;
        info[0] = static_cast<int32_t>(source);
        info[1] = *Int32At(from, message.source_token);
        info[2] = static_cast<int32_t>(k);
        step.row_weights[row] = FloatAt(from, message.weight)[k];
      }
    }
    step.row_of[entry] = row;
  });
}

// Payloads to rows, for both kinds of dispatch. A first call has written the weights already and
// gives num_weights = 0.
struct PlaceStep {
  EpShape shape;
  const uint8_t* messages;  // of source 0
  int64_t region_bytes;     // from one source's messages to the next one's
  int64_t message_bytes;
  int64_t payload;  // offset in a message
  int64_t payload_bytes;
  int64_t weight;  // offset in a message
  int64_t num_weights;
  const int32_t* row_of;        // [R, n, K]
  const int32_t* row_slot;      // [N]
  const int32_t* end_of_zeros;  // rows from here on are left alone; nullptr: none is
  uint8_t* rows;
  float* row_weights;
};

// Items are slots, whose payload is read once for all its rows, then rows that nothing fills.
__global__ void __launch_bounds__(kBlockThreads)
    PlaceKernel(const __grid_constant__ PlaceStep step) {
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int lane = Lane();
  const int64_t slots = shape.slots();
  const int64_t zeros = step.end_of_zeros == nullptr ? shape.recv_rows : *step.end_of_zeros;
  ForEachPart(slots + zeros, step.payload_bytes, [&](int64_t item, int64_t part) {
    RowPart payload(part, step.payload_bytes);
    if (item >= slots) {
      const int64_t row = item - slots;
      if (step.row_slot[row] >= 0) return;
      payload.StoreZeros(step.rows + row * step.payload_bytes);
      if (step.num_weights != 0 && part == 0 && lane == 0) step.row_weights[row] = 0.0f;
      return;
    }
    const int32_t row = lane < shape.top_k
                            ? RowOrDropped(step.row_of[item * shape.top_k + lane], shape.recv_rows)
                            : -1;
    unsigned left = __ballot_sync(kFullWarp, row >= 0);
    if (left == 0) return;
    const uint32_t slot = static_cast<uint32_t>(item);
    const uint8_t* message =
        step.messages + (slot / tokens) * step.region_bytes + (slot % tokens) * step.message_bytes;
    payload.Load(message + step.payload);
    for (; left != 0; left &= left - 1) {
      payload.Store(step.rows + FromLowest(left, row) * step.payload_bytes);
    }
    if (part == 0 && row >= 0 && lane < step.num_weights) {
      step.row_weights[row] = FloatAt(message, step.weight)[lane];
    }
  });
}

cudaError_t LaunchPlace(const PlaceStep& step, cudaStream_t stream) {
  const int64_t items = step.shape.slots() + step.shape.recv_rows;
  if (step.shape.recv_rows == 0) return cudaSuccess;
  return Launch(PlaceKernel, RowGrid(items, step.payload_bytes), kBlockThreads, 0, stream, step);
}

}  // namespace

template <typename Format>
cudaError_t Pack(const PackStep& step, cudaStream_t stream) {
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
  return Launch(PackKernel<Format>, RowGrid(shape.tokens, shape.row_bytes()), kBlockThreads, 0,
                stream, step, message, header.bytes, region_bytes);
}

template <typename Format>
cudaError_t Unpack(const UnpackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const int64_t payload_bytes = PayloadBytes<Format>(shape);
  const auto header = RegionHeader::Of(shape.local_experts);
  const auto message =
      DispatchMessage::Of(payload_bytes, Format::ScaleBytes(shape.hidden), shape.top_k);
  const int64_t region_bytes = header.bytes + shape.tokens * message.bytes;
  const dim3 prepare_grid(shape.recv_rows == 0 ? 1 : 1 + ItemGrid(shape.recv_rows).x);
  cudaError_t error =
      Launch(PrepareKernel, prepare_grid, kBlockThreads, 0, stream, step, header, region_bytes);
  if (error == cudaSuccess && shape.slots() > 0) {
    error = Launch(ScatterKernel, ItemGrid(shape.slots() * shape.top_k), kBlockThreads, 0, stream,
                   step, message, header.bytes, region_bytes);
  }
  if (error != cudaSuccess) return error;
  return LaunchPlace(
      {.shape = shape,
       .messages = step.recv + header.bytes,
       .region_bytes = region_bytes,
       .message_bytes = message.bytes,
       .payload = message.payload,
       .payload_bytes = payload_bytes,
       .weight = message.weight,
       .num_weights = 0,
       .row_of = step.row_of,
       .row_slot = step.row_slot,
       .end_of_zeros = step.zero_tail ? nullptr : step.row_offsets + shape.local_experts,
       .rows = step.rows,
       .row_weights = step.row_weights},
      stream);
}

template <typename Format>
cudaError_t CachedPack(const CachedPackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  if (shape.tokens == 0) return cudaSuccess;
  const auto message = CachedDispatchMessage::Of(
      PayloadBytes<Format>(shape), Format::ScaleBytes(shape.hidden), step.num_weights);
  return Launch(CachedPackKernel<Format>, RowGrid(shape.tokens, shape.row_bytes()), kBlockThreads,
                0, stream, step, message);
}

template <typename Format>
cudaError_t CachedUnpack(const CachedUnpackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const int64_t payload_bytes = PayloadBytes<Format>(shape);
  const auto message =
      CachedDispatchMessage::Of(payload_bytes, Format::ScaleBytes(shape.hidden), step.num_weights);
  return LaunchPlace({.shape = shape,
                      .messages = step.recv,
                      .region_bytes = shape.tokens * message.bytes,
                      .message_bytes = message.bytes,
                      .payload = message.payload,
                      .payload_bytes = payload_bytes,
                      .weight = message.weight,
                      .num_weights = step.num_weights,
                      .row_of = step.row_of,
                      .row_slot = step.row_slot,
                      .end_of_zeros = nullptr,
                      .rows = step.rows,
                      .row_weights = step.row_weights},
                     stream);
}

cudaError_t PreloadDispatchKernels() {
  cudaError_t error = cudaSuccess;
  const auto preload = [&](auto kernel) {
    if (error == cudaSuccess) error = Preload(kernel);
  };
  preload(RouteKernel);
  preload(PrepareKernel);
  preload(ScatterKernel);
  preload(PlaceKernel);
  ForEachFormat([&]<typename Format>(Format) {
    preload(PackKernel<Format>);
    preload(CachedPackKernel<Format>);
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                              \
  template cudaError_t Pack<Format>(const PackStep&, cudaStream_t);             \
  template cudaError_t Unpack<Format>(const UnpackStep&, cudaStream_t);         \
  template cudaError_t CachedPack<Format>(const CachedPackStep&, cudaStream_t); \
  template cudaError_t CachedUnpack<Format>(const CachedUnpackStep&, cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
