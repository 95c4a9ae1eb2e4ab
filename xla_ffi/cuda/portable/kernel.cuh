// Grouped matmuls for compute capability 8.0 and newer. Eight warps compute a tile of 128 x 256 of
// D, each 64 x 64. Operands pass through stages in shared memory, each 64 bytes of K deep, which
// asynchronous copies fill kStages - 1 steps ahead, also from one tile to the next. Blocks stay and
// take every gridDim.x-th tile, so the cost follows the rows that groups hold.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/elements.cuh"
#include "cuda/common/primitives.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/activations.cuh"
#include "cuda/matmul/group_pieces.cuh"
#include "cuda/portable/kinds.h"
#include "cuda/portable/mma.cuh"
#include "protocol/matmul_steps.h"

namespace jax_ep::cuda::portable {

inline constexpr int32_t kBlockM = 128;
inline constexpr int32_t kBlockN = 256;
inline constexpr int32_t kStepBytes = 64;  // of K
inline constexpr int32_t kWarpM = 64;
inline constexpr int32_t kWarpN = 64;
inline constexpr int kThreads = 256;
inline constexpr int kStages = 4;
inline constexpr uint32_t kABytes = kBlockM * kStepBytes;
inline constexpr uint32_t kBBytes = kBlockN * kStepBytes;
inline constexpr uint32_t kStageBytes = kABytes + kBBytes;
// Copies of a thread per stage.
inline constexpr int kACopies = kABytes / 16 / kThreads;
inline constexpr int kBCopies = kBBytes / 16 / kThreads;
// Tiles of a group are taken in bands of so many rows of tiles, column by column, so that the
// blocks that run at one time share operands in L2.
inline constexpr int32_t kBandTiles = 8;
// More than the tiles that are loaded and not yet multiplied.
inline constexpr int kRing = 8;

struct Arguments : ActivationOptions {
  const int32_t* sizes;
  int32_t groups;
  int32_t m;  // rows of all operands but matrices
  const uint8_t* a;
  const uint8_t* b;
  int64_t to_up;     // bytes from a matrix of gate to that of up
  int32_t k;         // contracted, of each side; of kWgrad the rows of D
  int32_t k_sides;   // of K
  int32_t n;         // columns of D, per side
  int64_t row_n;     // columns of a row of B, where that lies across
  int64_t matrix_n;  // columns of a matrix
  const float* bias;
  uint8_t* d;
  uint8_t* gate_up_rows;
  uint8_t* to_gate_up_rows;
};

// What a kind of matmul is made of.
template <MatmulKind kKind_, typename Element_, typename Out_>
struct Traits {
  static constexpr MatmulKind kKind = kKind_;
  static constexpr bool kExact = std::is_same_v<Element_, ExactFloat>;
  using Element = std::conditional_t<kExact, float, Element_>;
  using Out = Out_;
  static constexpr int32_t kBytes = sizeof(Element);
  static constexpr int32_t kStep = kStepBytes / kBytes;  // elements of K per step
  static constexpr int32_t kVector = 16 / kBytes;        // elements per copy
  static constexpr bool kWgrad = kKind == MatmulKind::kWgrad;
  static constexpr bool kGateUp = kKind == MatmulKind::kGateUp;
  static constexpr bool kMayHaveBias = kGateUp || kKind == MatmulKind::kFprop;
  // A and B lie with M or N along their rows, not K.
  static constexpr bool kAAcross = kWgrad;
  static constexpr bool kBAcross = kWgrad || kGateUp || kKind == MatmulKind::kFprop;
  static constexpr int32_t kSides = kGateUp ? 2 : 1;
  static constexpr int32_t kColumns = kBlockN / kSides;  // of a side, per tile
};

struct Tile {
  int32_t group;
  int32_t row;     // the first one of D; of kWgrad within the group's matrix
  int32_t rows;    // that exist, at most kBlockM
  int32_t column;  // the first one of a side
  int32_t first;   // kWgrad: the first row of the group
  int32_t k;       // elements to contract, of each side
  int32_t steps;   // at least 1; 0 means that there are no more tiles
};

// Where the tiles and rows of a group begin. The last entry has the ends.
struct GroupStart {
  uint32_t tile;
  int32_t row;
};
// As many groups have their starts in shared memory.
inline constexpr int32_t kTable = 256;

template <typename Traits>
__device__ int32_t TilesAcross(const Arguments& with) {
  return (with.n + Traits::kColumns - 1) / Traits::kColumns;
}
// The rows of tiles in a group of this many rows.
template <typename Traits>
__device__ int32_t TilesDown(const Arguments& with, int32_t rows) {
  return ((Traits::kWgrad ? with.k : rows) + kBlockM - 1) / kBlockM;
}

template <typename Traits>
__device__ void LoadPieces(GroupPieces<Arguments>& pieces, const Arguments& with) {
  pieces.Load([&](int32_t group, int32_t size) {
    return group < with.groups ? TilesAcross<Traits>(with) * TilesDown<Traits>(with, size) : 0;
  });
}

// Called by a warp, where there are at most kTable groups.
template <typename Traits>
__device__ void FillTable(const Arguments& with, GroupStart* table) {
  if (Lane() == 0) table[0] = {0, 0};
  GroupPieces<Arguments> pieces(with);
  do {
    LoadPieces<Traits>(pieces, with);
    pieces.AtLane(
        [&](int32_t group, int32_t row, uint32_t tile) { table[group + 1] = {tile, row}; });
  } while (pieces.Advance());
  __syncwarp();
}

// Finds the tile with this number. Called by a warp.
template <typename Traits>
__device__ Tile FindTile(const Arguments& with, const GroupStart* table, uint32_t number) {
  GroupPiece piece;
  if (with.groups <= kTable) {
    int32_t base = 0;
    unsigned later;
    do {
      const int32_t group = base + Lane();
      later = __ballot_sync(kFullWarp, group < with.groups && number < table[group + 1].tile);
      base += kWarpSize;
    } while (later == 0 && base < with.groups);
    if (later == 0) return Tile{};
    const int32_t group = base - kWarpSize + __ffs(static_cast<int>(later)) - 1;
    const GroupStart start = table[group];
    piece = {group, start.row, table[group + 1].row - start.row,
             static_cast<int32_t>(number - start.tile)};
  } else {
    GroupPieces<Arguments> pieces(with);
    while (true) {
      LoadPieces<Traits>(pieces, with);
      if (number < pieces.end()) break;
      if (!pieces.Advance()) return Tile{};
    }
    piece = pieces.Find(number);
  }
  const int32_t across = TilesAcross<Traits>(with), down = TilesDown<Traits>(with, piece.size);
  const int32_t band = piece.index / (kBandTiles * across);
  const int32_t within = piece.index - band * kBandTiles * across;
  const int32_t width = min(kBandTiles, down - band * kBandTiles);
  const int32_t m = band * kBandTiles + within % width;
  Tile tile;
  tile.group = piece.group;
  tile.column = within / width * Traits::kColumns;
  tile.first = piece.start;
  tile.row = m * kBlockM + (Traits::kWgrad ? 0 : piece.start);
  tile.rows = min(kBlockM, (Traits::kWgrad ? with.k : piece.size) - m * kBlockM);
  tile.k = Traits::kWgrad ? piece.size : with.k;
  tile.steps = max(1, (tile.k + Traits::kStep - 1) / Traits::kStep * with.k_sides);
  return tile;
}

// ---- Copies to shared memory --------------------------------------------------------------------

// Along rows of 64 bytes of K: chunk c of row r is at 64 * r + 16 * (c ^ (r / 2 % 4)), so that
// eight rows of a fragment lie in different banks.
__device__ __forceinline__ uint32_t AlongOffset(uint32_t row, uint32_t chunk) {
  return row * kStepBytes + ((chunk ^ (row >> 1 & 3)) << 4);
}

// Across, rows of K are `pitch` bytes. Fragments of 16-bit elements take 16 bytes of eight rows,
// those of 32 bits take 4 bytes in two chunks of four rows.
template <typename Element>
__device__ __forceinline__ uint32_t AcrossOffset(uint32_t k, uint32_t chunk, uint32_t pitch) {
  const uint32_t turn = sizeof(Element) == 2 ? k & 7 : (k & 3) << 1;
  return k * pitch + ((chunk ^ turn) << 4);
}

// What one thread copies of an operand: kCopies chunks of 16 bytes per step. Across, they lie in
// one row of K, 16 * kPerRow bytes from each other, and the second half belongs to the second side
// if there is one. Along, they lie in rows of M or N.
template <typename Element, bool kAcross, int kCopies, int kSides>
struct Feed {
  static constexpr int32_t kVector = 16 / static_cast<int32_t>(sizeof(Element));
  static constexpr int32_t kStep = kStepBytes / static_cast<int32_t>(sizeof(Element));
  static constexpr int32_t kPerRow = kAcross ? kThreads / kStep : kStepBytes / 16;  // threads
  static constexpr int32_t kRows = kThreads / kPerRow;
  static constexpr uint32_t kPitch = kCopies * kPerRow * 16;                      // across
  static constexpr uint32_t kNext = kAcross ? kPerRow * 16 : kRows * kStepBytes;  // in a stage

  const uint8_t* from;
  uint32_t bytes[kCopies];  // of copy i within M or N: 16 or 0

  static __device__ int32_t Row() { return static_cast<int32_t>(threadIdx.x) / kPerRow; }
  static __device__ int32_t Chunk() { return static_cast<int32_t>(threadIdx.x) % kPerRow; }
  static __device__ uint32_t Offset() {
    const uint32_t row = static_cast<uint32_t>(Row()), chunk = static_cast<uint32_t>(Chunk());
    return kAcross ? AcrossOffset<Element>(row, chunk, kPitch) : AlongOffset(row, chunk);
  }

  // `base` is the first element of the tile, of whose M or N `within` exist; rows there are `pitch`
  // bytes.
  __device__ void Start(const uint8_t* base, int64_t pitch, int32_t within) {
    from = base + Row() * pitch + Chunk() * 16;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int32_t chunk = Chunk() + i % (kCopies / kSides) * kPerRow;
      bytes[i] = (kAcross ? chunk * kVector : Row() + i * kRows) < within ? 16 : 0;
    }
  }
  // Copies `first` and the next one. `pitch` is as above, the second side is `side` bytes further
  // on, and `left` of K is left; with `kWhole` at least a step.
  template <bool kWhole>
  __device__ void CopyTwo(uint32_t to, int first, int64_t pitch, int64_t side, int32_t left) const {
    const bool real = left > (kAcross ? Row() : Chunk() * kVector);
#pragma unroll
    for (int i = first; i < first + 2; ++i) {
      constexpr int kOfSide = kCopies / kSides;
      const uint8_t* at =
          kAcross ? from + i % kOfSide * kNext + i / kOfSide * side : from + pitch * (kRows * i);
      CopyOrZero(to + i * kNext, at, kWhole || real ? bytes[i] : 0);
    }
  }
};

// ---- Fragments ----------------------------------------------------------------------------------

// The fragments of one product over K of a warp: four of 16 rows, and eight of 8 columns.
struct Fragments {
  uint32_t a[4][4];
  uint32_t b[8][2];
};

// Where a lane's fragments are in the first slot.
template <typename Traits>
class FragmentPlaces {
 public:
  using Element = typename Traits::Element;

  __device__ explicit FragmentPlaces(uint32_t stages) {
    const uint32_t lane = Lane(), m = Warp() / 4 * kWarpM;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if constexpr (!Traits::kAAcross) {
        a_[i] = AlongOffset(m + lane % 16, 2 * (i % 2) + lane / 16);
      } else if constexpr (!kWords) {
        const uint32_t chunk = (m + 16 * i) / 8 + lane / 8 % 2;
        a_[i] = AcrossOffset<Element>(lane % 8 + lane / 16 * 8, chunk, kAPitch);
      } else {
        a_[i] = WordOffset(m + 8 * i, kAPitch);
      }
      if constexpr (!Traits::kBAcross) {
        const uint32_t row = Column(0) + lane % 8 + lane / 16 * 8;
        b_[i] = kABytes + AlongOffset(row, 2 * (i % 2) + lane / 8 % 2);
      } else if constexpr (!kWords) {
        const uint32_t chunk = Column(2 * i) / 8 + lane / 16;
        b_[i] = kABytes + AcrossOffset<Element>(lane % 16, chunk, kBPitch);
      } else {
        b_[i] = kABytes + WordOffset(Column(0) + 8 * i, kBPitch);
      }
      a_[i] += stages;
      b_[i] += stages;
    }
  }

  // Loads fragment `i` of A. `kk` counts products over K within a stage.
  __device__ void LoadA(Fragments& to, uint32_t slot, uint32_t kk, uint32_t i) const {
    const uint32_t stage = slot * kStageBytes;
    if constexpr (!Traits::kAAcross) {
      LoadFragments(to.a[i], stage + a_[kk] + 16 * i * kStepBytes);
    } else if constexpr (!kWords) {
      LoadFragmentsTransposed(to.a[i], stage + a_[i] + 16 * kk * kAPitch);
    } else {
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
        const uint32_t column = 16 * i + r % 2 * 8, k = 8 * kk + r / 2 * 4;
        to.a[i][r] = LoadShared(stage + a_[column / 8 % 4] + column / 32 * 128 + k * kAPitch);
      }
    }
  }
  // Loads fragments 2 * `j` and 2 * `j` + 1 of B.
  __device__ void LoadB(Fragments& to, uint32_t slot, uint32_t kk, uint32_t j) const {
    const uint32_t stage = slot * kStageBytes;
    uint32_t b[4];
    const uint32_t first = Column(2 * j) - Column(0);
    if constexpr (!Traits::kBAcross) {
      LoadFragments(b, stage + b_[kk] + first * kStepBytes);
    } else if constexpr (!kWords) {
      LoadFragmentsTransposed(b, stage + b_[j] + 16 * kk * kBPitch);
    } else {
#pragma unroll
      for (uint32_t r = 0; r < 4; ++r) {
        const uint32_t column = first + r / 2 * 8, k = 8 * kk + r % 2 * 4;
        b[r] = LoadShared(stage + b_[column / 8 % 4] + column / 32 * 128 + k * kBPitch);
      }
    }
    to.b[2 * j][0] = b[0], to.b[2 * j][1] = b[1];
    to.b[2 * j + 1][0] = b[2], to.b[2 * j + 1][1] = b[3];
  }

 private:
  static constexpr bool kWords = sizeof(Element) == 4;
  static constexpr uint32_t kAPitch = kBlockM * sizeof(Element);
  static constexpr uint32_t kBPitch = kBlockN * sizeof(Element);

  // Of the word at K = lane % 4, column `at` + lane / 4.
  static __device__ uint32_t WordOffset(uint32_t at, uint32_t pitch) {
    const uint32_t lane = Lane(), column = at + lane / 4;
    return AcrossOffset<Element>(lane % 4, column / 4, pitch) + column % 4 * 4;
  }
  // The first column of fragment `j`. With two sides a warp has 32 columns of each.
  static __device__ uint32_t Column(uint32_t j) {
    const uint32_t warp = Warp() % 4;
    if constexpr (Traits::kSides == 2) {
      return j / 4 * (kBlockN / 2) + warp * (kWarpN / 2) + j % 4 * 8;
    } else {
      return warp * kWarpN + j * 8;
    }
  }

  uint32_t a_[4];
  uint32_t b_[4];
};

// Splits the bits of a float into the bits that TF32 has and the rest, which TF32 may round. An
// infinity has no rest, and neither part of a NaN is a number.
__device__ __forceinline__ void SplitToTf32(uint32_t bits, uint32_t& high, uint32_t& low) {
  high = bits & 0xFFFFE000u;
  const bool infinite = (bits & 0x7FFFFFFFu) == 0x7F800000u;
  low = infinite ? 0 : FloatBits(BitsFloat(bits) - BitsFloat(high));
}

// The sums of a warp: four rows of fragments, eight columns.
struct Sums {
  float of[4][8][4];

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int r = 0; r < 4; ++r) of[i][j][r] = 0;
      }
    }
  }
  // Adds the products of fragment `i` of A. Fragments are added in order.
  template <typename Element, bool kExact>
  __device__ __forceinline__ void Add(Fragments& with, int i) {
    if constexpr (kExact) {
      AddExact(with, i);
      return;
    }
    if constexpr (sizeof(Element) == 4) {
#pragma unroll
      for (int r = 0; r < 4; ++r) with.a[i][r] = RoundToTf32(with.a[i][r]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (i != 0) continue;
        with.b[j][0] = RoundToTf32(with.b[j][0]);
        with.b[j][1] = RoundToTf32(with.b[j][1]);
      }
    }
#pragma unroll
    for (int l = 0; l < 8; ++l) {
      const int j = i % 2 == 0 ? l : 7 - l;  // so that the next product shares an operand
      MultiplyAdd<Element>(of[i][j], with.a[i], with.b[j][0], with.b[j][1]);
    }
  }

  // The same of float32, as the sum of three products of TF32. What is left out is the product of
  // both low parts, 2^-22 of the whole.
  __device__ __forceinline__ void AddExact(const Fragments& with, int i) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) SplitToTf32(with.a[i][r], high[r], low[r]);
    // Tensor cores round sums towards zero, which adds up over K. So they sum no more than the
    // three products of 8 elements, which are added while the next ones are multiplied.
    float sums[2][4];
#pragma unroll
    for (int l = 0; l < 8; ++l) {
      const int j = i % 2 == 0 ? l : 7 - l;
      uint32_t b_high[2], b_low[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) SplitToTf32(with.b[j][r], b_high[r], b_low[r]);
      float (&sum)[4] = sums[l % 2];
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[r] = 0;
      // The small ones first.
      MultiplyAdd<float>(sum, low, b_high[0], b_high[1]);
      MultiplyAdd<float>(sum, high, b_low[0], b_low[1]);
      MultiplyAdd<float>(sum, high, b_high[0], b_high[1]);
      if (l > 0) AddInOrder(of[i][i % 2 == 0 ? j - 1 : j + 1], sums[1 - l % 2]);
    }
    AddInOrder(of[i][i % 2 == 0 ? 7 : 0], sums[1]);
  }
};

// ---- Results ------------------------------------------------------------------------------------

// Exchanges words in a quad: lane i gets word i of all four lanes, in their order.
__device__ __forceinline__ uint4 TransposeQuad(uint4 words) {
  const uint32_t lane = Lane();
  uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (uint32_t by = 1; by < 4; by *= 2) {
    const bool odd = (lane & by) != 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if ((i & by) != 0) continue;
      const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? w[i] : w[i | by], by);
      (odd ? w[i] : w[i | by]) = other;
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

template <typename T>
__device__ __forceinline__ uint32_t Rounded(float low, float high) {
  return RoundTwo<T>(low, high);
}

// A lane's part of 32 columns of a row of D: two of each eight. `at` is the first of the 32, of
// which those below `end` exist.
template <typename Out>
__device__ __forceinline__ void StoreRow(uint8_t* row, const float (&values)[8], int32_t at,
                                         int32_t end, bool exists) {
  const int32_t lane = Lane();
  if constexpr (sizeof(Out) == 2) {
    const uint4 own =
        make_uint4(Rounded<Out>(values[0], values[1]), Rounded<Out>(values[2], values[3]),
                   Rounded<Out>(values[4], values[5]), Rounded<Out>(values[6], values[7]));
    const uint4 whole = TransposeQuad(own);
    const int32_t column = at + lane % 4 * 8;
    if (exists && column < end) *reinterpret_cast<uint4*>(row + int64_t{column} * 2) = whole;
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int32_t column = at + 8 * c + lane % 4 * 2;
      if (exists && column < end) {
        *reinterpret_cast<float2*>(row + int64_t{column} * 4) =
            make_float2(values[2 * c], values[2 * c + 1]);
      }
    }
  }
}

// The same part of a row that was stored.
template <typename In>
struct StoredPart {
  static constexpr bool kHalf = sizeof(In) == 2;
  using Part = std::conditional_t<kHalf, uint4, float2>;
  Part parts[kHalf ? 1 : 4];

  __device__ void Load(const uint8_t* row, int32_t at, int32_t end, bool exists) {
    const int32_t lane = Lane();
#pragma unroll
    for (int c = 0; c < (kHalf ? 1 : 4); ++c) {
      const int32_t column = at + (kHalf ? lane % 4 * 8 : 8 * c + lane % 4 * 2);
      parts[c] = {};
      if (exists && column < end) {
        const uint8_t* from = row + int64_t{column} * static_cast<int64_t>(sizeof(In));
        parts[c] = *reinterpret_cast<const Part*>(from);
      }
    }
  }
  __device__ void Get(float (&values)[8]) const {
    if constexpr (kHalf) {
      const uint4 own = TransposeQuad(parts[0]);
      const uint32_t words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        values[2 * c] = ToFloat(In{static_cast<uint16_t>(words[c])});
        values[2 * c + 1] = ToFloat(In{static_cast<uint16_t>(words[c] >> 16)});
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) values[2 * c] = parts[c].x, values[2 * c + 1] = parts[c].y;
    }
  }
};

// A lane's rows of a tile: two of each fragment of A.
struct LaneRow {
  int64_t row;  // of D, or of kWgrad in the group's matrix
  bool exists;

  __device__ LaneRow(const Tile& tile, int i, int half) {
    const int32_t within = Warp() / 4 * kWarpM + 16 * i + 8 * half + Lane() / 4;
    row = int64_t{tile.row} + within;
    exists = within < tile.rows;
  }
};

// Returns a lane's sums in 32 columns of a row: those of fragments `first` to `first` + 3.
__device__ __forceinline__ void Take(const Sums& sums, int i, int half, int first,
                                     float (&values)[8]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    values[2 * c] = sums.of[i][first + c][2 * half];
    values[2 * c + 1] = sums.of[i][first + c][2 * half + 1];
  }
}

// The lane's elements of a group's bias of a side, in 32 columns from `at` on.
struct BiasPart {
  float values[8];

  __device__ BiasPart(const Arguments& with, int64_t side, int32_t at) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int32_t column = at + 8 * c + Lane() % 4 * 2;
      float2 two = make_float2(0.0f, 0.0f);
      if (with.bias != nullptr && column < with.n) {
        two = *reinterpret_cast<const float2*>(with.bias + side * with.n + column);
      }
      values[2 * c] = two.x, values[2 * c + 1] = two.y;
    }
  }
  __device__ void AddTo(float (&sums)[8]) const {
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[c] = Add(sums[c], values[c]);
  }
};

template <typename Traits>
__device__ __forceinline__ void FinishGateUp(const Arguments& with, const Tile& tile,
                                             const Sums& sums) {
  using Out = typename Traits::Out;
  const int64_t line = int64_t{with.n} * static_cast<int64_t>(sizeof(Out));
  const int32_t at = tile.column + Warp() % 4 * (kWarpN / 2);
  const BiasPart of_gate(with, 2 * int64_t{tile.group}, at);
  const BiasPart of_up(with, 2 * int64_t{tile.group} + 1, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const LaneRow to(tile, i, half);
      float gate[8], up[8], h[8];
      Take(sums, i, half, 0, gate);
      Take(sums, i, half, 4, up);
      of_gate.AddTo(gate);
      of_up.AddTo(up);
      WithActivation(with, [&](auto activation) {
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          h[c] = Multiply(activation.OfGate(gate[c]), activation.OfUp(up[c]));
        }
      });
      StoreRow<Out>(with.d + to.row * line, h, at, with.n, to.exists);
      if (with.gate_up_rows != nullptr) {
        uint8_t* rows = with.gate_up_rows + to.row * 2 * line;
        StoreRow<Out>(rows, gate, at, with.n, to.exists);
        StoreRow<Out>(rows + line, up, at, with.n, to.exists);
      }
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void FinishDownDgrad(const Arguments& with, const Tile& tile,
                                                const Sums& sums) {
  using Out = typename Traits::Out;
  const int64_t line = int64_t{with.n} * static_cast<int64_t>(sizeof(Out));
  const int32_t first = tile.column + Warp() % 4 * kWarpN;
  // Loads of so many rows wait for memory at one time.
  constexpr int kHalves = sizeof(Out) == 2 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int begin = 0; begin < 2; begin += kHalves) {
      StoredPart<Out> gates[kHalves][2], ups[kHalves][2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const LaneRow from(tile, i, begin + half);
        const uint8_t* rows = with.gate_up_rows + from.row * 2 * line;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          gates[half][part].Load(rows, first + 32 * part, with.n, from.exists);
          ups[half][part].Load(rows + line, first + 32 * part, with.n, from.exists);
        }
      }
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const LaneRow to(tile, i, begin + half);
        uint8_t* rows = with.to_gate_up_rows + to.row * 2 * line;
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float to_h[8], gate[8], up[8], to_gate[8], to_up[8];
          Take(sums, i, begin + half, 4 * part, to_h);
          gates[half][part].Get(gate);
          ups[half][part].Get(up);
          WithActivation(with, [&](auto activation) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
              const GateAndDerivative of_gate = activation.Both(gate[c]);
              to_up[c] = Multiply(to_h[c], of_gate.value);
              if constexpr (!decltype(activation)::kUpIsPlain) {
                to_up[c] = Multiply(to_up[c], activation.UpDerivative(up[c]));
              }
              to_gate[c] = Multiply(Multiply(to_h[c], of_gate.derivative), activation.OfUp(up[c]));
            }
          });
          StoreRow<Out>(rows, to_gate, first + 32 * part, with.n, to.exists);
          StoreRow<Out>(rows + line, to_up, first + 32 * part, with.n, to.exists);
        }
      }
    }
  }
}

// Finishes a warp's sums of a tile.
template <typename Traits>
__device__ __forceinline__ void Finish(const Arguments& with, const Tile& tile, const Sums& sums) {
  using Out = typename Traits::Out;
  if constexpr (Traits::kGateUp) {
    FinishGateUp<Traits>(with, tile, sums);
  } else if constexpr (Traits::kKind == MatmulKind::kDownDgrad) {
    FinishDownDgrad<Traits>(with, tile, sums);
  } else {
    const int64_t line = int64_t{with.n} * static_cast<int64_t>(sizeof(Out));
    const int64_t before = Traits::kWgrad ? int64_t{tile.group} * with.k : 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int32_t at = tile.column + Warp() % 4 * kWarpN + 32 * part;
      const BiasPart bias(with, tile.group, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const LaneRow to(tile, i, half);
          float values[8];
          Take(sums, i, half, 4 * part, values);
          if constexpr (Traits::kMayHaveBias) bias.AddTo(values);
          StoreRow<Out>(with.d + (before + to.row) * line, values, at, with.n, to.exists);
        }
      }
    }
  }
}

// ---- The kernel ---------------------------------------------------------------------------------

template <typename Traits>
struct Loader {
  static constexpr int64_t kBytes = Traits::kBytes;
  const Arguments& with;
  Feed<typename Traits::Element, Traits::kAAcross, kACopies, 1> a;
  Feed<typename Traits::Element, Traits::kBAcross, kBCopies, Traits::kSides> b;
  int32_t left = 0;         // of K, or of its side
  int32_t steps = 0;        // that are left of the tile
  int32_t whole_steps = 0;  // of these, with all of K
  uint32_t a_to;
  uint32_t b_to;

  __device__ Loader(const Arguments& with, uint32_t stages)
      : with(with), a_to(stages + a.Offset()), b_to(stages + kABytes + b.Offset()) {}

  // Bytes between rows of the operands.
  __device__ int64_t APitch() const { return int64_t{with.k} * with.k_sides * kBytes; }
  __device__ int64_t BPitch() const {
    return (Traits::kBAcross ? with.row_n : int64_t{with.k}) * kBytes;
  }

  __device__ void Start(const Tile& tile) {
    const int64_t k = with.k;
    steps = tile.steps;
    left = tile.k;
    whole_steps = left / Traits::kStep;
    const int32_t columns = with.n - tile.column;
    if constexpr (Traits::kWgrad) {
      a.Start(with.a + (tile.first * k + tile.row) * kBytes, APitch(), tile.rows);
      b.Start(with.b + (tile.first * with.row_n + tile.column) * kBytes, BPitch(), columns);
      return;
    }
    a.Start(with.a + tile.row * APitch(), APitch(), tile.rows);
    const uint8_t* matrix = with.b + tile.group * (k * with.matrix_n * kBytes);
    const int64_t column = Traits::kBAcross ? tile.column : tile.column * k;
    b.Start(matrix + column * kBytes, BPitch(), columns);
  }
  // Goes on to the second side of K: rows of A lie behind those of the first side, and matrices
  // elsewhere.
  __device__ void StartUp() {
    const int64_t passed = int64_t{(with.k + Traits::kStep - 1) / Traits::kStep} * kStepBytes;
    a.from += with.k * kBytes - passed;
    b.from += with.to_up - passed;
    left = with.k;
    whole_steps = left / Traits::kStep;
  }
  // Whether the first side of K has ended, and not the tile.
  __device__ bool AtUp() const { return left <= 0 && steps > 0; }
  // Without a tile: copies zeros.
  __device__ void Stop() { left = 0; }
  // One of the three parts of a step's copies.
  template <bool kWhole>
  __device__ void Copy(uint32_t slot, int part) {
    const uint32_t stage = slot * kStageBytes;
    if (part == 0) a.template CopyTwo<kWhole>(stage + a_to, 0, APitch(), 0, left);
    if (part == 1) b.template CopyTwo<kWhole>(stage + b_to, 0, BPitch(), with.to_up, left);
    if (part == 2) {
      b.template CopyTwo<kWhole>(stage + b_to, 2, BPitch(), with.to_up, left);
      a.from += Traits::kAAcross ? Traits::kStep * APitch() : kStepBytes;
      b.from += Traits::kBAcross ? Traits::kStep * BPitch() : kStepBytes;
      left -= Traits::kStep;
      --steps;
      --whole_steps;
    }
  }
};
static_assert(kACopies == 2 && kBCopies == 4);

inline constexpr uint32_t kMemoryBytes =
    kStages * kStageBytes + kRing * sizeof(Tile) + (kTable + 1) * sizeof(GroupStart);
// What blocks may have on GPUs of compute capability 8.6 to 12.0.
static_assert(kMemoryBytes <= 99 * 1024);

template <typename Traits>
__global__ void __launch_bounds__(kThreads, 1) Kernel(const Arguments with) {
  uint8_t* memory = SharedBytes();
  Tile* ring = reinterpret_cast<Tile*>(memory + kStages * kStageBytes);
  GroupStart* table = reinterpret_cast<GroupStart*>(ring + kRing);
  const uint32_t stages = SharedAddress(memory);
  uint32_t found = 0;  // tiles in the ring
  const auto find = [&] {
    if (Warp() == 0) {
      const Tile tile = FindTile<Traits>(with, table, blockIdx.x + found * gridDim.x);
      if (Lane() == 0) ring[found % kRing] = tile;
    }
    ++found;
  };
  if (Warp() == 0 && with.groups <= kTable) FillTable<Traits>(with, table);
  find();
  find();
  __syncthreads();

  Loader<Traits> loader(with, stages);
  uint32_t loading = 0;  // the tile that is next to be loaded
  const auto next_tile = [&] {
    const Tile tile = ring[loading % kRing];
    if (tile.steps == 0) {
      loader.Stop();
      return;
    }
    loader.Start(tile);
    // The tile after the next one: a barrier lies between this and whoever reads it.
    if (loading > 0) find();
    ++loading;
  };
  const auto next_step = [&] {
    if (loader.steps <= 0) {
      next_tile();
    } else if (Traits::kKind == MatmulKind::kDgrad && loader.AtUp()) {
      loader.StartUp();
    }
  };
#pragma unroll
  for (uint32_t slot = 0; slot < kStages - 1; ++slot) {
    next_step();
#pragma unroll
    for (int part = 0; part < 3; ++part) loader.template Copy<false>(slot, part);
    EndCopies();
    __syncthreads();
  }

  // Each step has two products over 32 bytes of K. Copies and loads of fragments lie between
  // products, so that warps, which a barrier keeps together, do not all do the same at one time.
  using Element = typename Traits::Element;
  const FragmentPlaces<Traits> places(stages);
  // Exact products have no registers for two sets of fragments. They take three times as long, so
  // loads matter less, and come after them.
  constexpr bool kAhead = !Traits::kExact;
  Fragments fragments[kAhead ? 2 : 1];
  constexpr int kSecond = kAhead ? 1 : 0;
  Sums sums;
  const auto load = [&]<uint32_t kSlot, int kTo>(int i) {
    places.LoadA(fragments[kAhead ? kTo : 0], kSlot, kTo, i);
    places.LoadB(fragments[kAhead ? kTo : 0], kSlot, kTo, i);
  };
  const auto load_all = [&]<uint32_t kSlot, int kTo>() {
    __syncwarp();  // or the compiler would load before the products after all
#pragma unroll
    for (int i = 0; i < 4; ++i) load.template operator()<kSlot, kTo>(i);
  };
  const auto first = [&]<uint32_t kSlot, bool kWorks, bool kWhole>() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kWorks && kAhead) load.template operator()<kSlot, 1>(i);
      if (i < 3) loader.template Copy<kWhole>((kSlot + kStages - 1) % kStages, i);
      if constexpr (kWorks) sums.Add<Element, Traits::kExact>(fragments[0], i);
    }
    if constexpr (kWorks && !kAhead) load_all.template operator()<kSlot, 1>();
    EndCopies();
  };
  const auto second = [&]<uint32_t kSlot, bool kWorks>() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kAhead) load.template operator()<kSlot, 0>(i);
      if constexpr (kWorks) sums.Add<Element, Traits::kExact>(fragments[kSecond], i);
    }
    if constexpr (!kAhead) load_all.template operator()<kSlot, 0>();
  };
  // One step, of whose operands `fragments[0]` has the first half.
  const auto step = [&]<uint32_t kSlot, bool kWorks>() {
    if (loader.whole_steps > 0) {
      first.template operator()<kSlot, kWorks, true>();
    } else {
      next_step();
      first.template operator()<kSlot, kWorks, false>();
    }
    AwaitCopies<kStages - 2>();
    __syncthreads();
    second.template operator()<(kSlot + 1) % kStages, kWorks>();
  };
  uint32_t slot = 0;
  // The slots are constants in addresses. A tile begins in the slot after that of the last one.
  const auto multiply = [&]<bool kWorks>(int32_t steps) {
    switch (slot) {
      while (true) {
        case 0:
          step.template operator()<0, kWorks>();
          slot = 1;
          if (--steps == 0) break;
          [[fallthrough]];
        case 1:
          step.template operator()<1, kWorks>();
          slot = 2;
          if (--steps == 0) break;
          [[fallthrough]];
        case 2:
          step.template operator()<2, kWorks>();
          slot = 3;
          if (--steps == 0) break;
          [[fallthrough]];
        default:
          step.template operator()<3, kWorks>();
          slot = 0;
          if (--steps == 0) break;
      }
    }
  };
  AwaitCopies<kStages - 2>();
  __syncthreads();
  second.template operator()<0, false>();
  for (uint32_t number = 0;; ++number) {
    const int32_t steps = ring[number % kRing].steps;
    if (steps == 0) break;
    sums.Clear();
    // Products of rows that do not exist are left out, half a tile at a time.
    if (Warp() / 4 * kWarpM < ring[number % kRing].rows) {
      multiply.template operator()<true>(steps);
    } else {
      multiply.template operator()<false>(steps);
    }
    Finish<Traits>(with, ring[number % kRing], sums);
  }
  AwaitCopies<0>();
}
static_assert(kStages == 4);

}  // namespace jax_ep::cuda::portable
