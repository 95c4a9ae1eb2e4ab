// What all kernels of matmuls have in common: what they are compiled for, their arguments, and the
// stages of operands in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/shared_memory.cuh"
#include "cuda/matmul/epilogues.cuh"
#include "cuda/matmul/scheduler.cuh"

namespace jax_ep::cuda {

inline constexpr int kMatmulThreads = 384;
inline constexpr uint32_t kStages = 4;
inline constexpr uint32_t kBlockKBytes = 128;
inline constexpr uint32_t kBoxBytes = 8192;  // 64 lines
inline constexpr uint32_t kABoxes = 2;
inline constexpr uint32_t kMostBBoxes = 4;
inline constexpr uint32_t kStageBytes = (kABoxes + kMostBBoxes) * kBoxBytes;
// Per thread of a warpgroup. Together these are all the registers that the block begins with.
inline constexpr int kLoadRegisters = 56;
inline constexpr int kMathRegisters = 224;
static_assert(kBoxBytes == kChunkBytes);

// What a kernel is compiled for.
template <MatmulKind kOf, typename ElementOf, ElementD kElementD, bool kOfFewRows = false>
struct MatmulTraits {
  static constexpr MatmulKind kKind = kOf;
  // Whether groups have few rows, so that wgmma gets the operands swapped.
  static constexpr bool kFew = kOfFewRows;
  using Element = ElementOf;  // of 16-bit operands; void for fp8
  static constexpr bool kFp8 = IsFp8(kOf);
  static constexpr bool kWgrad = IsWgrad(kOf);
  static constexpr bool kAMnMajor = kOf == MatmulKind::kWgrad;
  static constexpr bool kBMnMajor =
      kAMnMajor || kOf == MatmulKind::kFprop || kOf == MatmulKind::kGateUp;
  static constexpr bool kGateUp = kOf == MatmulKind::kGateUp || kOf == MatmulKind::kFp8GateUp;
  static constexpr bool kDownDgrad =
      kOf == MatmulKind::kDownDgrad || kOf == MatmulKind::kFp8DownDgrad;
  static constexpr bool kMayHaveBias = kOf == MatmulKind::kFprop || kOf == MatmulKind::kFp8Matmul;
  // Whether gate and up have maps of their own, as operands that N or K spans.
  static constexpr bool kHasUpMap = kOf == MatmulKind::kGateUp || kOf == MatmulKind::kDgrad;
  using Epilogue = std::conditional_t<
      kGateUp, Activate<kFp8>,
      std::conditional_t<kDownDgrad, ActivateDgrad<kFp8>, StoreSums<kElementD, kMayHaveBias>>>;
  static constexpr int kSides = Epilogue::kSides;
  static constexpr int kBlockN = Epilogue::kBlockN;
  static constexpr int kSideN = kBlockN / kSides;
  static constexpr int kDSides = kDownDgrad ? 2 : 1;  // of each row of D
  // The size of an element of D. Only some kinds use MatmulStep::out_element.
  JAX_EP_HOST_DEVICE static int64_t DBytes(ElementType out_element) {
    if (kFp8 && (kGateUp || kDownDgrad)) return 1;
    if (kElementD == ElementD::kEither) return out_element == ElementType::kFloat32 ? 4 : 2;
    return kElementD == ElementD::kFloat32 ? 4 : 2;
  }
  static constexpr uint32_t kBBoxes = kBlockN / 64;
  static constexpr uint32_t kBlockK = kFp8 ? 128 : 64;  // elements of the contracted dimension
  using Type = std::conditional_t<
      kFp8, ElementType,
      std::conditional_t<std::is_same_v<ElementOf, Float16>, FixedElement<ElementType::kFloat16>,
                         FixedElement<ElementType::kBFloat16>>>;
};

// The scales of fp8 (protocol/matmul_steps.h).
struct ScaleArguments {
  const float* a;
  uint32_t a_stride;  // between rows, or in kFp8Wgrad between blocks of M
  const float* b;
  int64_t per_group;
  int64_t per_k;
  int64_t per_side;
  int64_t per_n;
};

// The maps of operands and results. `b_up` is that of up, and `b` that of gate, in kinds that have
// Traits::kHasUpMap. `gate_up_rows` is of to_gate_up_rows in kinds that have it.
struct MatmulMaps {
  CUtensorMap a, b, b_up;
  CUtensorMap d, gate_up_rows;
};

struct MatmulArguments {
  SchedulerArguments scheduler;
  int32_t side_blocks;  // kDgrad: blocks of K of each side
  ResultArguments result;
  ScaleArguments scales;
};

struct MatmulShared {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t exchanged[2];  // of few rows (FewRowsMemory)
  TileRing ring;
};
// For fp8, per stage: a scale for each row, and one for each 128 columns.
struct StageScales {
  float a[kBlockM];
  float b[2];
};

// Shared memory holds MatmulShared and the scales of fp8, then, aligned to an atom, the stages,
// then the drains. Together they take all that a block can have.
inline constexpr uint32_t kScalesBytes = kStages * static_cast<uint32_t>(sizeof(StageScales));
inline constexpr uint32_t kDrainsBytes = kMathWarps * kDrains * kDrainBytes;
template <bool kFp8>
inline constexpr uint32_t kFrontBytes =
    (static_cast<uint32_t>(sizeof(MatmulShared)) + (kFp8 ? kScalesBytes : 0) + kAtomBytes - 1) /
    kAtomBytes * kAtomBytes;
template <bool kFp8>
inline constexpr uint32_t kMatmulSharedBytes =
    kFrontBytes<kFp8> + kStages * kStageBytes + kDrainsBytes;

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
  // Waits for the operands of the next block of K.
  __device__ void Await() {
    if (!has_come_) cuda::Await(&shared_.full[stage()], at_.parity(), &shared_.ring.given_up);
  }
  // Tells both blocks that this warp has read stage `stage`.
  __device__ void Release(uint32_t stage) {
    // Other lanes may still read scales, or miss the end of the phase that they wait for.
    __syncwarp();
    if (Lane() < 2) MbarrierArriveAt(barriers_ + kToEmpty + stage * kBarrierBytes, Lane());
  }
  __device__ void Next() {
    ++at_.passed;
    has_come_ = false;
  }
  // Checks whether the operands of the next block of K are there, so that Await need not.
  __device__ void Look() {
    has_come_ = MbarrierHasEnded(barriers_ + stage() * kBarrierBytes, at_.parity());
  }
  // Steps over a tile of the other warpgroup.
  __device__ void Skip(int32_t k_blocks) {
    JAX_EP_NO_UNROLL
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
      Await();
      Release(stage());
      Next();
    }
  }

  __device__ uint32_t stage() const { return at_.slot(); }
  // The descriptor of the operand that lies `units` behind box `box` of stage 0.
  template <bool kMnMajor>
  __device__ uint64_t Operand(uint32_t box, uint32_t units) const {
    return OperandAt<kMnMajor>(operands_ + (box * kBoxBytes >> 4) + units);
  }
  // The distance from stage 0 to this one. Call it where it is used, or the compiler forgets that
  // all lanes have it.
  __device__ uint32_t units() const { return Uniform(stage() * (kStageBytes >> 4)); }
  __device__ uint8_t* lines() const { return memory_.stages + stage() * kStageBytes; }
  __device__ float AScale(uint32_t row) const {
    return LoadShared(scales() + offsetof(StageScales, a) + row * sizeof(float));
  }
  __device__ float BScale(uint32_t half) const {
    return LoadShared(scales() + offsetof(StageScales, b) + half * sizeof(float));
  }

 private:
  static constexpr uint32_t kBarrierBytes = sizeof(uint64_t);
  static constexpr uint32_t kToEmpty = offsetof(MatmulShared, empty) - offsetof(MatmulShared, full);

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
