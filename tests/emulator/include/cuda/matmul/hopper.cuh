// Takes the place of xla_ffi/cuda/matmul/hopper.cuh on the include path: its functions, name by
// name, over emulator.h.
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/ptx.cuh"
#include "cuda/matmul/operand.h"
#include "cuda_runtime.h"
#include "formats/numbers.h"

namespace jax_ep::cuda {

// ---- Clusters of two blocks ---------------------------------------------------------------------

inline uint32_t ClusterRank() { return emulator::current->block->rank(); }
using emulator::ClusterSync;
inline bool IsElected() {
  __syncwarp();
  return threadIdx.x % 32 == 0;
}
inline void FenceMbarrierInit() { emulator::FenceMbarriers(); }
inline void MbarrierArrive(uint64_t* barrier) { emulator::MbarrierArrive(barrier, ClusterRank()); }
template <typename T>
T Uniform(T value) {
  return __shfl_sync(~0u, value, 0);
}
template <typename T>
T* SharedPointer(uint32_t address) {
  return reinterpret_cast<T*>(emulator::SharedPointer(address));
}
inline void MbarrierExpectAt(uint32_t barrier, uint32_t bytes) {
  MbarrierExpect(SharedPointer<uint64_t>(barrier), bytes);
}
inline bool MbarrierHasEnded(uint32_t barrier, uint32_t parity) {
  return emulator::MbarrierTryWait(SharedPointer<uint64_t>(barrier), parity);
}
inline void MbarrierArriveAt(uint32_t barrier, uint32_t rank) {
  emulator::MbarrierArrive(SharedPointer<uint64_t>(barrier), rank);
}
inline float LoadShared(uint32_t address) { return *SharedPointer<float>(address); }

// ---- Kernels that overlap -----------------------------------------------------------------------

inline void LetNextKernelBegin() { emulator::LetNextLaunchBegin(); }
inline void AwaitPreviousKernel() { emulator::AwaitPreviousLaunch(); }

// ---- Tensor copies ------------------------------------------------------------------------------

struct BoxPlace {
  int32_t at[4];
};

inline void PrefetchTensorMap(const CUtensorMap*) {}

inline void LoadBox(uint32_t shared, const CUtensorMap* map, const BoxPlace& place,
                    uint32_t barrier, bool multicast) {
  const emulator::Unseen unseen;
  emulator::TensorMap tensor;
  std::memcpy(&tensor, map->opaque, sizeof tensor);
  emulator::TensorLoad(SharedPointer<void>(shared), tensor, place.at,
                       SharedPointer<uint64_t>(barrier), multicast);
}
inline void TensorLoad(uint32_t shared, const CUtensorMap* map, BoxPlace place, uint32_t barrier) {
  LoadBox(shared, map, place, barrier, false);
}
inline void TensorLoadMulticast(uint32_t shared, const CUtensorMap* map, BoxPlace place,
                                uint32_t barrier) {
  LoadBox(shared, map, place, barrier, true);
}
inline void TensorStore(const CUtensorMap* map, BoxPlace place, uint32_t shared) {
  const emulator::Unseen unseen;
  emulator::TensorMap tensor;
  std::memcpy(&tensor, map->opaque, sizeof tensor);
  emulator::TensorStore(tensor, place.at, SharedPointer<void>(shared));
}

// ---- Warpgroups ---------------------------------------------------------------------------------

inline constexpr uint32_t kWarpgroupThreads = emulator::kWarpgroupThreads;

template <int kRegisters>
void GrowRegisters() {
  emulator::SetRegisters(kRegisters, true);
}
template <int kRegisters>
void ShrinkRegisters() {
  emulator::SetRegisters(kRegisters, false);
}

inline void WgmmaFence() { emulator::FenceProducts(); }
inline void WgmmaCommit() { emulator::CommitProducts(); }
template <int kPending>
void WgmmaWait() {
  emulator::WaitForProducts(kPending);
}
template <int kCount>
void HoldSums(float (&)[kCount]) {}

template <typename Element, bool kAMnMajor, bool kBMnMajor>
void Wgmma(float (&sums)[128], uint64_t a, uint64_t b, bool add) {
  constexpr auto kOperands = std::is_same_v<Element, Float16> ? emulator::Operands::kFloat16
                                                              : emulator::Operands::kBFloat16;
  emulator::IssueProduct({kOperands, 256, kAMnMajor, kBMnMajor, add, a, b}, sums);
}
inline void WgmmaFp8(float (&sums)[64], uint64_t a, uint64_t b, bool add) {
  emulator::IssueProduct({emulator::Operands::kE4M3, 128, false, false, add, a, b}, sums);
}

template <typename Element, int kRows>
void WgmmaFewRows(float (&sums)[kRows / 2], uint64_t columns, uint64_t rows, bool add) {
  constexpr bool kFp8 = std::is_void_v<Element>;
  constexpr auto kOperands = kFp8                               ? emulator::Operands::kE4M3
                             : std::is_same_v<Element, Float16> ? emulator::Operands::kFloat16
                                                                : emulator::Operands::kBFloat16;
  emulator::IssueProduct({kOperands, kRows, !kFp8, false, add, columns, rows}, sums);
}

template <int kRows>
void WgmmaOfRegisters(float (&sums)[kRows / 2], const uint32_t (&columns)[4], uint64_t rows,
                      bool add) {
  emulator::IssueProduct({emulator::Operands::kBFloat16, kRows, false, false, add, 0, rows, true},
                         sums, columns);
}

// ---- A warp's registers to shared memory --------------------------------------------------------

inline void StoreMatrices(void* line, const uint32_t (&words)[4]) {
  const auto* all = emulator::ExchangeWords({words[0], words[1], words[2], words[3]}, "stmatrix");
  const uint32_t lane = emulator::Lane();
  const auto word = [&](uint32_t i) { return all[lane % 8 * 4 + i][lane / 8]; };
  *static_cast<uint4*>(line) = make_uint4(word(0), word(1), word(2), word(3));
}

inline void StoreTransposed(void* line, const uint32_t (&words)[4]) {
  const auto* all =
      emulator::ExchangeWords({words[0], words[1], words[2], words[3]}, "stmatrix.trans");
  const uint32_t lane = emulator::Lane();
  const auto element = [&](uint32_t row) {
    return all[row * 4 + lane % 8 / 2][lane / 8] >> lane % 2 * 16 & 0xFFFF;
  };
  const auto word = [&](uint32_t i) { return element(2 * i) | element(2 * i + 1) << 16; };
  *static_cast<uint4*>(line) = make_uint4(word(0), word(1), word(2), word(3));
}

// Several threads may store the same zeros while products read another thread's. For races the
// store therefore counts as a read of the bytes that were there before.
inline void StoreZeros(void* to) {
  emulator::Reads(to, sizeof(uint4));
  const emulator::Unseen unseen;
  std::memset(to, 0, sizeof(uint4));
}

// ---- Arithmetic ---------------------------------------------------------------------------------

}  // namespace jax_ep::cuda
