// What all kernels of matmuls have in common: what they are compiled for, their arguments, and the
// stages of operands in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/epilogues.cuh"
#include "cuda/matmul/units.cuh"

namespace jax_ep::cuda {

inline constexpr int kMatmulThreads = 384;
inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kStepBytes = 128;  // of the contracted dimension, per line
inline constexpr uint32_t kBoxBytes = 8192;  // 64 lines
inline constexpr uint32_t kLeftBoxes = 2;
inline constexpr uint32_t kMostRightBoxes = 4;
inline constexpr uint32_t kStageBytes = (kLeftBoxes + kMostRightBoxes) * kBoxBytes;
// Per thread of a warpgroup. Together these are all the registers that the block begins with.
inline constexpr int kFeederRegisters = 56;
inline constexpr int kMathRegisters = 224;
static_assert(kBoxBytes == kChunkBytes);

// What a kernel is compiled for.
template <MatmulKind kOf, typename ElementOf, Out kOut, bool kOfFewRows = false>
struct MatmulTraits {
  static constexpr MatmulKind kKind = kOf;
  // Whether groups have few rows, so that matrices are the left operands of products.
  static constexpr bool kFew = kOfFewRows;
  using Element = ElementOf;  // of 16-bit operands; void for codes
  static constexpr bool kCodes = OfCodes(kOf);
  static constexpr bool kOuter = kOf == MatmulKind::kOuter;
  // Whether lines of the operand lie across the contracted dimension (operand.h).
  static constexpr bool kLeftAcross = kOuter;
  static constexpr bool kRightAcross =
      kOuter || kOf == MatmulKind::kRows || kOf == MatmulKind::kGateUp;
  static constexpr bool kGateUp = kOf == MatmulKind::kGateUp || kOf == MatmulKind::kCodeGateUp;
  static constexpr bool kDownBack =
      kOf == MatmulKind::kDownBack || kOf == MatmulKind::kCodeDownBack;
  using Epilogue =
      std::conditional_t<kGateUp, SwiGlu<kCodes>,
                         std::conditional_t<kDownBack, SwiGluBack<kCodes>, StoreSums<kOut>>>;
  static constexpr int kSides = Epilogue::kSides;
  static constexpr int kColumns = Epilogue::kColumns;
  static constexpr int kSideColumns = kColumns / kSides;
  static constexpr int kOutSides = kDownBack ? 2 : 1;  // of each row of `out`
  // The size of an element of `out`. Only some kinds use MatmulStep::out_element.
  JAX_EP_HOST_DEVICE static int64_t OutBytes(ElementType out_element) {
    if (kCodes && (kGateUp || kDownBack)) return 1;
    if (kOut == Out::kEither) return out_element == ElementType::kFloat32 ? 4 : 2;
    return kOut == Out::kFloat32 ? 4 : 2;
  }
  static constexpr uint32_t kRightBoxes = kColumns / 64;
  static constexpr uint32_t kStep = kCodes ? 128 : 64;  // elements of the contracted dimension
  using Type = std::conditional_t<
      kCodes, ElementType,
      std::conditional_t<std::is_same_v<ElementOf, Float16>, FixedElement<ElementType::kFloat16>,
                         FixedElement<ElementType::kBFloat16>>>;
};

// The scales of codes (protocol/matmul_steps.h).
struct ScaleArguments {
  const float* rows;
  uint32_t row_stride;
  const float* right;
  int64_t per_group;
  int64_t per_k;
  int64_t per_side;
  int64_t per_b;
};

// The maps of operands and results. `both` is of to_both in kinds that have it.
struct MatmulMaps {
  CUtensorMap left, right;
  CUtensorMap out, both;
};

struct MatmulArguments {
  UnitPlan plan;
  ResultArguments result;
  ScaleArguments scales;
};

struct MatmulShared {
  uint64_t full[kStages];
  uint64_t free[kStages];
  uint64_t exchanged[2];  // of few rows (FewRowsMemory)
  TileRing ring;
};
// For codes, per stage: a scale for each row, and one for each 128 columns.
struct StageScales {
  float rows[kTileRows];
  float right[2];
};

// Shared memory holds MatmulShared and the scales of codes, then, aligned to an atom, the stages,
// then the drains. Together they take all that a block can have.
inline constexpr uint32_t kScalesBytes = kStages * static_cast<uint32_t>(sizeof(StageScales));
inline constexpr uint32_t kDrainsBytes = kWarpsOfMath * kDrains * kDrainBytes;
template <bool kCodes>
inline constexpr uint32_t kFrontBytes =
    (static_cast<uint32_t>(sizeof(MatmulShared)) + (kCodes ? kScalesBytes : 0) + kAtomBytes - 1) /
    kAtomBytes * kAtomBytes;
template <bool kCodes>
inline constexpr uint32_t kMatmulSharedBytes =
    kFrontBytes<kCodes> + kStages * kStageBytes + kDrainsBytes;

struct MatmulMemory {
  MatmulShared& shared;
  StageScales* scales;
  uint8_t* stages;
  uint8_t* drains;

  __device__ explicit MatmulMemory(uint32_t front_bytes)
      : shared(*reinterpret_cast<MatmulShared*>(SharedAtoms())),
        scales(reinterpret_cast<StageScales*>(SharedAtoms() + sizeof(MatmulShared))),
        stages(SharedAtoms() + front_bytes),
        drains(stages + kStages * kStageBytes) {}
};

using StageCursor = RingCursor<kStages>;

// A math warp's view of the stages.
class Stages {
 public:
  __device__ explicit Stages(const MatmulMemory& memory)
      : shared_(memory.shared),
        operands_(Uniform(OperandUnits(SharedAddress(memory.stages)))),
        scales_(Uniform(SharedAddress(memory.scales))),
        barriers_(Uniform(SharedAddress(memory.shared.full))),
        memory_(memory) {}

  // Goes on to a tile. Nothing of it has been awaited yet.
  __device__ void Begin(uint32_t stage) {
    at_.passed = stage;
    has_come_ = false;
  }
  // Waits for the operands of the next step.
  __device__ void Await() {
    if (!has_come_) cuda::Await(&shared_.full[stage()], at_.parity(), &shared_.ring.given_up);
  }
  // Tells both blocks that this warp has read stage `stage`.
  __device__ void Free(uint32_t stage) {
    // Other lanes may still read scales, or miss the end of the phase that they wait for.
    __syncwarp();
    if (Lane() < 2) MbarrierArriveAt(barriers_ + kToFree + stage * kBarrierBytes, Lane());
  }
  __device__ void Next() {
    ++at_.passed;
    has_come_ = false;
  }
  // Checks whether the operands of the next step are there, so that Await need not.
  __device__ void Look() {
    has_come_ = MbarrierHasEnded(barriers_ + stage() * kBarrierBytes, at_.parity());
  }
  // Steps over a tile of the other warpgroup.
  __device__ void Skip(int32_t steps) {
    JAX_EP_NO_UNROLL
    for (int32_t step = 0; step < steps; ++step) {
      Await();
      Free(stage());
      Next();
    }
  }

  __device__ uint32_t stage() const { return at_.slot(); }
  // The descriptor of the operand that lies `units` behind box `box` of stage 0.
  template <bool kAcross>
  __device__ uint64_t Operand(uint32_t box, uint32_t units) const {
    return OperandAt<kAcross>(operands_ + (box * kBoxBytes >> 4) + units);
  }
  // The distance from stage 0 to this one. Call it where it is used, or the compiler forgets that
  // all lanes have it.
  __device__ uint32_t units() const { return Uniform(stage() * (kStageBytes >> 4)); }
  __device__ uint8_t* lines() const { return memory_.stages + stage() * kStageBytes; }
  __device__ float RowScale(uint32_t row) const {
    return LoadShared(scales() + offsetof(StageScales, rows) + row * sizeof(float));
  }
  __device__ float RightScale(uint32_t half) const {
    return LoadShared(scales() + offsetof(StageScales, right) + half * sizeof(float));
  }

 private:
  static constexpr uint32_t kBarrierBytes = sizeof(uint64_t);
  static constexpr uint32_t kToFree = offsetof(MatmulShared, free) - offsetof(MatmulShared, full);

  __device__ uint32_t scales() const { return scales_ + stage() * sizeof(StageScales); }

  MatmulShared& shared_;
  const uint32_t operands_;  // in units of OperandAt
  const uint32_t scales_;
  const uint32_t barriers_;
  const MatmulMemory& memory_;
  StageCursor at_;
  bool has_come_ = false;
};

}  // namespace jax_ep::cuda
