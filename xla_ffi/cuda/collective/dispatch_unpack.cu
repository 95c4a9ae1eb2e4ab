// Unpacking on the collective transport: moves messages to rows and, for a first dispatch, builds
// the expert rank's tables.
#include "cuda/collective/mixed_calls.cuh"
#include "cuda/collective/steps.h"
#include "cuda/common/groups.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/primitives.cuh"
#include "cuda/common/quantize.cuh"
#include "formats/registry.h"
#include "protocol/layout.h"
#include "protocol/routing.h"

namespace jax_ep::cuda {
namespace {

// Computes where the scales of each group start. Called by the whole team, after a barrier that
// follows the writes of row_offsets and group_sizes.
__device__ void PlaceTilesOfGroups(const Team& team, const DispatchUnpackStep& step,
                                   int64_t* totals) {
  const int64_t groups = step.shape.local_experts;
  const int64_t length = DivideUp(groups, team.threads);
  const int64_t begin = Min(team.thread * length, groups);
  const int64_t end = Min(begin + length, groups);
  int64_t tiles = 0;
  for (int64_t group = begin; group < end; ++group) tiles += TilesOfGroup(step.group_sizes[group]);
  int64_t first_tile = ExclusiveSum(team, tiles, totals);
  for (int64_t group = begin; group < end; ++group) {
    // Another thread writes row_offsets[0], and no barrier has come since.
    const int32_t offset = group == 0 ? 0 : step.row_offsets[group];
    step.scales_offsets[group] = ScalesOffset(static_cast<int32_t>(first_tile), offset);
    first_tile += TilesOfGroup(step.group_sizes[group]);
  }
}

// Called by one block: the counts of all sources determine the place of every row.
__device__ void PlaceGroups(const DispatchUnpackStep& step, const RegionHeader& header,
                            int64_t region_bytes) {
  __shared__ unsigned long long all_dropped;  // zeroed before the barrier in ExclusiveSum
  __shared__ int64_t totals[kWarpsPerBlock];
  if (threadIdx.x == 0) all_dropped = 0;
  const EpShape& shape = step.shape;
  // A source cannot have more rows than entries. Clamping keeps corrupt counts from moving a group
  // out of [0, N].
  const int64_t entries = shape.tokens * shape.top_k;
  const auto count_of = [&](int64_t source, int64_t expert) -> int64_t {
    const int64_t count = Int32At(step.recv + source * region_bytes, header.expert_counts)[expert];
    return count < 0 ? 0 : Min(count, entries);
  };
  int64_t dropped = 0;
  const Team block{threadIdx.x, blockDim.x, 0};
  ForEachGroup(block, shape, totals, count_of, [&](int64_t expert, int64_t start, int64_t rows) {
    int64_t base = start;
    for (int64_t source = 0; source < shape.ranks; ++source) {
      step.row_base[source * shape.local_experts + expert] =
          static_cast<int32_t>(Min(base, kMaxIndex));
      base += count_of(source, expert);
    }
    const int64_t next = NextGroupStart(start, rows, shape.expert_alignment);
    const int32_t offset = static_cast<int32_t>(Min(start, shape.recv_rows));
    const int32_t next_offset = static_cast<int32_t>(Min(next, shape.recv_rows));
    dropped += DroppedRows(start, rows, shape.recv_rows);
    step.expert_counts[expert] = static_cast<int32_t>(rows);
    step.expert_ids[expert] = static_cast<int32_t>(expert);
    step.row_offsets[expert + 1] = next_offset;
    step.group_sizes[expert] = next_offset - offset;
  });
  // Integers, so the order of the additions does not matter.
  atomicAdd(&all_dropped, static_cast<unsigned long long>(dropped));
  for (int64_t source = threadIdx.x; source < shape.ranks; source += kBlockThreads) {
    const int32_t num_slots = *Int32At(step.recv + source * region_bytes, header.num_slots);
    const int32_t tokens = static_cast<int32_t>(shape.tokens);
    step.slot_counts[source] = num_slots < 0 ? 0 : Min(num_slots, tokens);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    step.row_offsets[0] = 0;
    *step.num_dropped = static_cast<int32_t>(all_dropped);
  }
  if (step.scale_layout == ScaleLayout::kTiled128x4) PlaceTilesOfGroups(block, step, totals);
}

// Called by the whole block when the sources were in different calls: empties the groups and what
// the pack has counted. The expert id of -1 tells the later kernels of the call.
__device__ void PlaceNoGroups(const DispatchUnpackStep& step) {
  const EpShape& shape = step.shape;
  const int64_t experts = shape.local_experts;
  FillWords(step.expert_ids, experts, kNoValue);
  FillWords(step.row_offsets, experts + 1, 0);
  FillWords(step.group_sizes, experts, 0);
  FillWords(step.expert_counts, experts, 0);
  if (step.scale_layout == ScaleLayout::kTiled128x4) FillWords(step.scales_offsets, experts, 0);
  FillWords(step.slot_counts, shape.ranks, 0);
  FillWords(step.row_base, shape.ranks * experts, 0);
  FillWords(step.num_dropped, 1, 0);
  if (step.slot_of == nullptr) return;
  FillWords(step.slot_of, shape.tokens * shape.top_k, kNoValue);
  FillWords(step.num_invalid, 1, 0);
}
__device__ bool HasNoGroups(const int32_t* expert_ids) { return expert_ids[0] < 0; }

// Block 0 places the groups while the other blocks clear the tables by row.
__global__ void __launch_bounds__(kBlockThreads)
    PrepareKernel(const __grid_constant__ DispatchUnpackStep step, RegionHeader header,
                  int64_t region_bytes) {
  const bool one_call = OfOneCall(step.check, step.recv, step.shape.ranks, region_bytes);
  if (blockIdx.x == 0) {
    one_call ? PlaceGroups(step, header, region_bytes) : PlaceNoGroups(step);
    return;
  }
  const int64_t thread = static_cast<int64_t>(blockIdx.x - 1) * kBlockThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x - 1) * kBlockThreads;
  const int64_t rows = step.shape.recv_rows;
  ForEachItem(thread, threads, rows * 3, [&](int64_t i) { step.src_info[i] = -1; });
  ForEachItem(thread, threads, rows, [&](int64_t row) {
    step.row_slot[row] = -1;
    step.router_weights[row] = one_call ? 0.0f : __uint_as_float(kNoValue);
  });
}

// One thread per entry (source, slot, k): fills the tables by row and by slot.
__global__ void __launch_bounds__(kBlockThreads)
    ScatterKernel(const __grid_constant__ DispatchUnpackStep step, DispatchMessage message,
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
        step.router_weights[row] = FloatAt(from, message.weight)[k];
      }
    }
    step.row_of[entry] = row;
  });
}

// Operands of PlaceKernel, for both kinds of dispatch. In a first dispatch ScatterKernel has
// already written the weights, so num_weights is 0. In a cached one rows are elements and no scales
// are kept.
struct PlaceStep {
  EpShape shape;
  const int32_t*
      expert_ids;  // first dispatch: see HasNoGroups; nullptr: the kernel must check the tags
  MixedCallCheck check;
  const uint8_t* recv;      // [R, region]
  const uint8_t* sent;      // of source 0, [n]: whether a slot has a message; nullptr: all have one
  const uint8_t* messages;  // of source 0
  int64_t region_bytes;     // stride between the messages of two sources
  int64_t message_bytes;
  int64_t payload;      // offset in a message
  int64_t scales;       // offset in a message
  int64_t row_bytes;    // of an output row
  int64_t scale_bytes;  // of a row of output scales; 0: none are kept by row
  int64_t scale_line;   // scales in columns: floats in a line; 0: they lie by row
  int64_t weight;       // offset in a message
  int64_t num_weights;
  const int32_t* row_of;        // [R, n, K]
  const int32_t* row_slot;      // [N]
  const int32_t* end_of_zeros;  // rows from here on are not cleared; nullptr: all are
  uint8_t* rows;
  uint8_t* scale_rows;
  float* router_weights;
};

// Called by the whole warp: copies a message's scales, in units of Unit, to the rows of the given
// lanes; if `from` is nullptr, clears them.
template <typename Unit>
__device__ void PlaceScaleUnits(const uint8_t* from, uint8_t* scale_rows, int64_t scale_bytes,
                                unsigned lanes, int32_t row) {
  const int64_t units = scale_bytes / static_cast<int64_t>(sizeof(Unit));
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* to = reinterpret_cast<Unit*>(scale_rows + FromLowest(left, row) * scale_bytes);
    for (int64_t i = Lane(); i < units; i += kWarpSize) {
      to[i] = from == nullptr ? Unit{} : reinterpret_cast<const Unit*>(from)[i];
    }
  }
}
// The same, to columns of floats.
__device__ void PlaceScaleColumns(const uint8_t* from, uint8_t* scales, int64_t scale_bytes,
                                  int64_t line, unsigned lanes, int32_t row) {
  for (unsigned left = lanes; left != 0; left &= left - 1) {
    auto* to = reinterpret_cast<uint32_t*>(scales) + FromLowest(left, row);
    for (int64_t i = Lane(); i < scale_bytes / 4; i += kWarpSize) {
      to[i * line] = from == nullptr ? 0 : reinterpret_cast<const uint32_t*>(from)[i];
    }
  }
}
__device__ void PlaceScales(const uint8_t* from, uint8_t* scale_rows, int64_t scale_bytes,
                            int64_t line, unsigned lanes, int32_t row) {
  if (scale_bytes == 0) return;
  if (line != 0) return PlaceScaleColumns(from, scale_rows, scale_bytes, line, lanes, row);
  if (scale_bytes % kVectorBytes == 0) {
    PlaceScaleUnits<uint4>(from, scale_rows, scale_bytes, lanes, row);
  } else {
    PlaceScaleUnits<uint8_t>(from, scale_rows, scale_bytes, lanes, row);
  }
}

__device__ bool IsSent(const PlaceStep& step, uint32_t slot) {
  const uint32_t tokens = static_cast<uint32_t>(step.shape.tokens);
  if (step.sent == nullptr) return true;
  return step.sent[(slot / tokens) * step.region_bytes + slot % tokens] != 0;
}

// Called by the whole warp: whether some slot writes the row. In a cached dispatch the tables have
// passed through the caller's program, which may have changed each of them separately.
__device__ bool IsFilled(const PlaceStep& step, int64_t row) {
  const int32_t slot = step.row_slot[row];
  if (slot < 0 || step.sent == nullptr) return slot >= 0;
  if (slot >= step.shape.slots() || !IsSent(step, static_cast<uint32_t>(slot))) return false;
  const bool names = Lane() < step.shape.top_k &&
                     step.row_of[slot * step.shape.top_k + Lane()] == static_cast<int32_t>(row);
  return __any_sync(kFullWarp, names) != 0;
}

// The items are first the slots, each of whose payloads is read once for all its rows, and then the
// rows that no slot fills.
template <typename Part>
__global__ void __launch_bounds__(kBlockThreads)
    PlaceKernel(const __grid_constant__ PlaceStep step) {
  const EpShape& shape = step.shape;
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int lane = Lane();
  const int64_t slots = shape.slots();
  if (step.expert_ids != nullptr
          ? HasNoGroups(step.expert_ids)
          : !OfOneCall(step.check, step.recv, shape.ranks, step.region_bytes)) {
    FillNoValue(step.rows, shape.recv_rows * step.row_bytes);
    const int64_t line = step.scale_line != 0 ? step.scale_line : shape.recv_rows;
    FillNoValue(step.scale_rows, line * step.scale_bytes);
    if (step.num_weights != 0) FillNoValue(step.router_weights, shape.recv_rows * kWeightBytes);
    return;
  }
  const int64_t zeros = step.end_of_zeros == nullptr ? shape.recv_rows : *step.end_of_zeros;
  ForEachPart(slots + zeros, step.row_bytes, [&](int64_t item, int64_t part) {
    if (item >= slots) {
      const int64_t row = item - slots;
      if (IsFilled(step, row)) return;
      RowPart(part, step.row_bytes).StoreZeros(step.rows + row * step.row_bytes);
      if (part != 0) return;
      if (step.num_weights != 0 && lane == 0) step.router_weights[row] = 0.0f;
      PlaceScales(nullptr, step.scale_rows, step.scale_bytes, step.scale_line, 1u,
                  static_cast<int32_t>(row));
      return;
    }
    const int32_t row = lane < shape.top_k
                            ? RowOrDropped(step.row_of[item * shape.top_k + lane], shape.recv_rows)
                            : -1;
    const unsigned lanes = __ballot_sync(kFullWarp, row >= 0);
    if (lanes == 0) return;
    const uint32_t slot = static_cast<uint32_t>(item);
    if (!IsSent(step, slot)) return;
    const uint8_t* message =
        step.messages + (slot / tokens) * step.region_bytes + (slot % tokens) * step.message_bytes;
    Part placed(part, step.row_bytes);
    placed.Load(message + step.payload, message + step.scales, kNoInputScale);
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      placed.Store(step.rows + FromLowest(left, row) * step.row_bytes);
    }
    if (part != 0) return;
    if (row >= 0 && lane < step.num_weights) {
      step.router_weights[row] = FloatAt(message, step.weight)[lane];
    }
    PlaceScales(message + step.scales, step.scale_rows, step.scale_bytes, step.scale_line, lanes,
                row);
  });
}

template <typename Part>
cudaError_t LaunchPlace(const PlaceStep& step, cudaStream_t stream) {
  const int64_t items = step.shape.slots() + step.shape.recv_rows;
  // A kernel that must check the tags has work even without rows.
  if (step.shape.recv_rows == 0 && step.expert_ids != nullptr) return cudaSuccess;
  return Launch(PlaceKernel<Part>, SomeRowGrid(items, step.row_bytes), kBlockThreads, 0, stream,
                step);
}

// Column words of a tile that a warp gathers.
constexpr int64_t kTileWords = 8;

// A warp gathers some columns of a tile. Lane i has the words of rows i, i + 32, i + 64 and i + 96,
// which are adjacent in a tile. The words of rows that no message fills become zero.
__global__ void __launch_bounds__(kBlockThreads)
    PlaceTilesKernel(const __grid_constant__ DispatchUnpackStep step, ScaleTiles tiles,
                     DispatchMessage message, int64_t header_bytes, int64_t region_bytes) {
  constexpr int kRows = static_cast<int>(kTileRows) / kWarpSize;
  static_assert(kRows == 4 && kTileColumns == 4);
  const EpShape& shape = step.shape;
  if (HasNoGroups(step.expert_ids)) {
    return FillNoValue(step.scales, tiles.tiles * tiles.column_words * kTileRows * kTileColumns);
  }
  const uint32_t tokens = static_cast<uint32_t>(shape.tokens);
  const int64_t runs = DivideUp(tiles.column_words, kTileWords);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + Warp();
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kWarpsPerBlock;
  ForEachItem(warp, warps, tiles.tiles * runs, [&](int64_t item) {
    const int64_t tile = item / runs;
    const int64_t first = item % runs * kTileWords;
    const RowsOfTile rows =
        FindRowsOfTile(tile, step.row_offsets, step.scales_offsets, shape.local_experts);
    const uint32_t* from[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = Lane() + i * kWarpSize;
      const int32_t slot = row < rows.count ? step.row_slot[rows.first + row] : -1;
      const uint32_t flat = static_cast<uint32_t>(slot);
      from[i] = slot < 0 ? nullptr
                         : reinterpret_cast<const uint32_t*>(
                               step.recv + (flat / tokens) * region_bytes + header_bytes +
                               (flat % tokens) * message.bytes + message.scales);
    }
    for (int64_t word = first; word < Min(first + kTileWords, tiles.column_words); ++word) {
      uint32_t words[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) words[i] = from[i] == nullptr ? 0 : from[i][word];
      uint8_t* to = step.scales + tiles.Word(tile, Lane(), word) * kTileColumns;
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  });
}

}  // namespace

template <typename Format>
cudaError_t DispatchUnpack(const DispatchUnpackStep& step, cudaStream_t stream) {
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
  const bool tiled = step.scale_layout == ScaleLayout::kTiled128x4;
  if (error == cudaSuccess && tiled) {
    const auto tiles =
        ScaleTiles::Of(shape.recv_rows, shape.local_experts, shape.hidden / Format::kBlock);
    const int64_t warps = tiles.tiles * DivideUp(tiles.column_words, kTileWords);
    error = Launch(PlaceTilesKernel, ItemGrid(warps * kWarpSize), kBlockThreads, 0, stream, step,
                   tiles, message, header.bytes, region_bytes);
  }
  const bool columns = step.scale_layout == ScaleLayout::kColumns;
  const int64_t line = columns ? ScaleLine(shape.recv_rows) : 0;
  if (error == cudaSuccess && line > shape.recv_rows) {
    // The end of a line belongs to no row.
    error = cudaMemset2DAsync(step.scales + shape.recv_rows * 4, static_cast<size_t>(line * 4), 0,
                              static_cast<size_t>((line - shape.recv_rows) * 4),
                              static_cast<size_t>(shape.hidden / Format::kBlock), stream);
  }
  if (error != cudaSuccess) return error;
  return LaunchPlace<PlacedPart>(
      {.shape = shape,
       .expert_ids = step.expert_ids,
       .check = {},
       .recv = step.recv,
       .sent = nullptr,
       .messages = step.recv + header.bytes,
       .region_bytes = region_bytes,
       .message_bytes = message.bytes,
       .payload = message.payload,
       .scales = message.scales,
       .row_bytes = payload_bytes,
       .scale_bytes = tiled ? 0 : Format::ScaleBytes(shape.hidden),
       .scale_line = line,
       .weight = message.weight,
       .num_weights = 0,
       .row_of = step.row_of,
       .row_slot = step.row_slot,
       .end_of_zeros = step.zero_tail ? nullptr : step.row_offsets + shape.local_experts,
       .rows = step.rows,
       .scale_rows = step.scales,
       .router_weights = step.router_weights},
      stream);
}

template <typename Format>
cudaError_t DispatchCachedUnpack(const DispatchCachedUnpackStep& step, cudaStream_t stream) {
  const EpShape& shape = step.shape;
  const auto message = DispatchCachedMessage::Of(
      PayloadBytes<Format>(shape), Format::ScaleBytes(shape.hidden), step.num_weights);
  const auto region = DispatchCachedRegion::Of(shape.tokens, message.bytes);
  const PlaceStep place{.shape = shape,
                        .expert_ids = nullptr,
                        .check = step.check,
                        .recv = step.recv,
                        .sent = step.recv + region.sent,
                        .messages = step.recv + region.messages,
                        .region_bytes = region.bytes,
                        .message_bytes = message.bytes,
                        .payload = message.payload,
                        .scales = message.scales,
                        .row_bytes = shape.row_bytes(),
                        .scale_bytes = 0,
                        .scale_line = 0,
                        .weight = message.weight,
                        .num_weights = step.num_weights,
                        .row_of = step.row_of,
                        .row_slot = step.row_slot,
                        .end_of_zeros = nullptr,
                        .rows = step.rows,
                        .scale_rows = nullptr,
                        .router_weights = step.router_weights};
  return VisitPlacedPart<Format>(
      step.element, [&]<typename Part>(TypeTag<Part>) { return LaunchPlace<Part>(place, stream); });
}

cudaError_t PreloadDispatchUnpackKernels() {
  cudaError_t error = cudaSuccess;
  const auto preload = [&](auto kernel) {
    if (error == cudaSuccess) error = Preload(kernel);
  };
  preload(PrepareKernel);
  preload(ScatterKernel);
  preload(PlaceTilesKernel);
  ForEachFormat([&]<typename Format>(Format) {
    for (const ElementType element : kElementTypes) {
      VisitPlacedPart<Format>(element,
                              [&]<typename Part>(TypeTag<Part>) { preload(PlaceKernel<Part>); });
    }
  });
  return error;
}

#define JAX_EP_INSTANTIATE(Format)                                                      \
  template cudaError_t DispatchUnpack<Format>(const DispatchUnpackStep&, cudaStream_t); \
  template cudaError_t DispatchCachedUnpack<Format>(const DispatchCachedUnpackStep&, cudaStream_t);
JAX_EP_TOKEN_FORMATS(JAX_EP_INSTANTIATE)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::cuda
