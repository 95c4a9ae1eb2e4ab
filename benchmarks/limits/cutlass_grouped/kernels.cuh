// CUTLASS's grouped matmuls for Hopper, as its builders make them: which of them are timed, and how
// to call them if only the device has the sizes of groups.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "cutlass/version.h"
#include "gpu_limits/report.cuh"
#include "operands.cuh"

namespace jax_ep::cuda {

// A way to multiply, made for one problem.
class Way {
 public:
  virtual ~Way() = default;
  virtual void Run(cudaStream_t stream) = 0;
  // Selects one of `orders()` orders of tiles, and returns its name.
  virtual std::string Order(int choice) = 0;
  virtual int orders() const = 0;

  std::string_view name;
  bool fp8 = false;
  bool equal_groups = false;
};

using Shapes = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
using Shape = Shapes::UnderlyingProblemShape;

// What a kernel reads for each group, on the device.
template <typename Gemm>
struct Tables {
  using Kernel = typename Gemm::GemmKernel;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;
  using A = typename Kernel::ElementA;
  using B = typename Kernel::ElementB;

  Shape* shapes;
  const A** a;
  const B** b;
  cutlass::bfloat16_t** d;
  StrideA* stride_a;
  StrideB* stride_b;
  StrideD* stride_d;
  const float** scales_a;
  const float** scales_b;
};

// The strides, which are the same for all groups, and where the first group begins.
template <typename Gemm>
struct Starts {
  using Kernel = typename Gemm::GemmKernel;

  const typename Kernel::ElementA* a;
  const typename Kernel::ElementB* b;
  cutlass::bfloat16_t* d;
  typename Kernel::InternalStrideA stride_a;
  typename Kernel::InternalStrideB stride_b;
  typename Kernel::InternalStrideD stride_d;
  const float* scales_a;
  const float* scales_b;
};

constexpr int kMaxGroups = 256;

// Turns the sizes of groups, which only the device knows, into shapes and pointers. Runs as one
// block of kMaxGroups threads. A group may begin at any row.
template <typename Gemm>
__global__ void FillTables(Tables<Gemm> tables, Starts<Gemm> starts, const int32_t* sizes,
                           int groups, int n, int k) {
  __shared__ int ends[kMaxGroups];
  const int group = static_cast<int>(threadIdx.x);
  const int size = group < groups ? sizes[group] : 0;
  ends[group] = size;
  __syncthreads();
  for (int distance = 1; distance < kMaxGroups; distance *= 2) {
    const int before = group < distance ? 0 : ends[group - distance];
    __syncthreads();
    ends[group] += before;
    __syncthreads();
  }
  if (group >= groups) return;
  const int64_t begin = ends[group] - size;
  tables.shapes[group] = Shape{size, n, k};
  tables.a[group] = starts.a + begin * k;
  tables.b[group] = starts.b + int64_t{group} * n * k;
  tables.d[group] = starts.d + begin * n;
  tables.stride_a[group] = starts.stride_a;
  tables.stride_b[group] = starts.stride_b;
  tables.stride_d[group] = starts.stride_d;
  if (tables.scales_a == nullptr) return;
  tables.scales_a[group] = starts.scales_a + begin * (k / kScaled);
  tables.scales_b[group] = starts.scales_b + int64_t{group} * (n / kScaled) * (k / kScaled);
}

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_256;
using cute::_64;

struct Cooperative {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Fp8Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperativeFP8Blockwise;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

struct Pingpong {
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Fp8Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpongFP8Blockwise;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// Scales of rows and weights, with those of a row side by side as in jax_ep: [rows, k / 128] and
// [groups, n / 128, k / 128].
using ScalesOf =
    cutlass::detail::Sm90BlockwiseScaleConfig<1, kScaled, kScaled, cute::GMMA::Major::K,
                                              cute::GMMA::Major::K>;

// The kernel for one type of elements and one layout of weights.
template <typename Element, bool kFp8, typename LayoutB, typename Tile, typename Cluster,
          typename Schedule>
struct Built {
  using RowMajor = cutlass::layout::RowMajor;
  static constexpr int kAligned = 16 / sizeof(Element);

  // C is void: nothing is added to the products, which leaves shared memory for more stages.
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor*, 8,
      cutlass::bfloat16_t, RowMajor*, 8, typename Schedule::Epilogue>::CollectiveOp;

  template <typename Layout, typename Scales>
  using Operand = cute::conditional_t<kFp8, cute::tuple<Layout*, Scales*>, Layout*>;

  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element,
      Operand<RowMajor, decltype(ScalesOf::deduce_layoutSFA())>, kAligned, Element,
      Operand<LayoutB, decltype(ScalesOf::deduce_layoutSFB())>, kAligned, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cute::conditional_t<kFp8, typename Schedule::Fp8Mainloop,
                          typename Schedule::Mainloop>>::CollectiveOp;

  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<Shapes, Mainloop, Epilogue>>;
};

inline void CheckCutlass(cutlass::Status status, std::string_view way) {
  if (status == cutlass::Status::kSuccess) return;
  Fail(std::string(way) + ": CUTLASS says " + cutlass::cutlassGetStatusString(status));
}

template <typename Gemm, bool kFp8>
class Grouped : public Way {
 public:
  using Kernel = typename Gemm::GemmKernel;
  static_assert(Kernel::SharedStorageSize <= 227 * 1024);  // what a block may have on Hopper

  explicit Grouped(std::string_view named, const Problem& problem) : problem_(problem) {
    name = named;
    fp8 = kFp8;
    const size_t groups = static_cast<size_t>(problem.groups);
    Allocate(tables_.shapes, groups);
    Allocate(tables_.a, groups);
    Allocate(tables_.b, groups);
    Allocate(tables_.d, groups);
    Allocate(tables_.stride_a, groups);
    Allocate(tables_.stride_b, groups);
    Allocate(tables_.stride_d, groups);
    // Only the first entry of a stride matters, and it does not depend on the number of rows.
    const int rows = 1;
    starts_.stride_a = cutlass::make_cute_packed_stride(typename Kernel::InternalStrideA{},
                                                        cute::make_shape(rows, problem.k, 1));
    starts_.stride_b = cutlass::make_cute_packed_stride(typename Kernel::InternalStrideB{},
                                                        cute::make_shape(problem.n, problem.k, 1));
    starts_.stride_d = cutlass::make_cute_packed_stride(typename Kernel::InternalStrideD{},
                                                        cute::make_shape(rows, problem.n, 1));
    starts_.d = reinterpret_cast<cutlass::bfloat16_t*>(problem.d);
    if constexpr (kFp8) {
      Allocate(tables_.scales_a, groups);
      Allocate(tables_.scales_b, groups);
      Allocate(layout_a_, groups);
      Allocate(layout_b_, groups);
      starts_.a = reinterpret_cast<const cutlass::float_e4m3_t*>(problem.codes_a);
      starts_.b = reinterpret_cast<const cutlass::float_e4m3_t*>(problem.codes_b);
      starts_.scales_a = problem.scales_a;
      starts_.scales_b = problem.scales_b;
    } else {
      starts_.a = reinterpret_cast<const cutlass::bfloat16_t*>(problem.a);
      starts_.b = reinterpret_cast<const cutlass::bfloat16_t*>(problem.b);
    }
    hardware_ = cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>(0);
    Order(0);
  }

  ~Grouped() override {
    for (void* each : owned_) cudaFree(each);
    cudaFree(workspace_);
  }

  // Sets the side along which tiles follow each other. If only the device knows the shapes, CUTLASS
  // takes one line of tiles at a time, whatever `max_swizzle_size` says.
  std::string Order(int choice) override {
    using Raster = cutlass::gemm::kernel::detail::RasterOrderOptions;
    const bool along_rows = choice == 0;
    typename Gemm::Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.problem_shape = {problem_.groups, tables_.shapes, nullptr};
    arguments.mainloop.ptr_A = tables_.a;
    arguments.mainloop.dA = tables_.stride_a;
    arguments.mainloop.ptr_B = tables_.b;
    arguments.mainloop.dB = tables_.stride_b;
    if constexpr (kFp8) {
      arguments.mainloop.ptr_SFA = tables_.scales_a;
      arguments.mainloop.layout_SFA = layout_a_;
      arguments.mainloop.ptr_SFB = tables_.scales_b;
      arguments.mainloop.layout_SFB = layout_b_;
    }
    arguments.epilogue.thread.alpha = 1;
    arguments.epilogue.thread.beta = 0;
    arguments.epilogue.ptr_D = tables_.d;
    arguments.epilogue.dD = tables_.stride_d;
    arguments.hw_info = hardware_;
    arguments.scheduler.raster_order = along_rows ? Raster::AlongM : Raster::AlongN;
    CheckCutlass(Gemm::can_implement(arguments), name);
    if (workspace_ == nullptr) {
      CHECK_CUDA(cudaMalloc(&workspace_, Gemm::get_workspace_size(arguments)));
    }
    CheckCutlass(gemm_.initialize(arguments, workspace_), name);
    return along_rows ? "rows" : "columns";
  }

  int orders() const override { return 2; }

  void Run(cudaStream_t stream) override {
    FillTables<Gemm><<<1, kMaxGroups, 0, stream>>>(tables_, starts_, problem_.sizes,
                                                   problem_.groups, problem_.n, problem_.k);
    CHECK_CUDA(cudaGetLastError());
    CheckCutlass(gemm_.run(stream), name);
  }

 private:
  template <typename T>
  void Allocate(T*& pointer, size_t count) {
    void* made = nullptr;
    CHECK_CUDA(cudaMalloc(&made, count * sizeof(T)));
    CHECK_CUDA(cudaMemset(made, 0, count * sizeof(T)));
    owned_.push_back(made);
    pointer = static_cast<T*>(made);
  }

  Problem problem_;
  Tables<Gemm> tables_{};
  Starts<Gemm> starts_{};
  // The kernel computes these from the shapes.
  decltype(ScalesOf::deduce_layoutSFA())* layout_a_ = nullptr;
  decltype(ScalesOf::deduce_layoutSFB())* layout_b_ = nullptr;
  cutlass::KernelHardwareInfo hardware_;
  Gemm gemm_;
  void* workspace_ = nullptr;
  std::vector<void*> owned_;
};

using Ways = std::vector<std::unique_ptr<Way>>;

// Adds the bfloat16 kernels. Weights stay as they lie in memory: contiguous along n, or along k for
// gradients of rows.
template <typename LayoutB>
void AddBfloat16(Ways& ways, const Problem& problem) {
  const auto add = [&]<typename Tile, typename Cluster, typename Schedule>(
                       std::string_view name, Tile, Cluster, Schedule) {
    using Gemm = typename Built<cutlass::bfloat16_t, false, LayoutB, Tile, Cluster, Schedule>::Gemm;
    ways.push_back(std::make_unique<Grouped<Gemm, false>>(name, problem));
  };
  using cute::Shape;
  add("cooperative 128x256x64, 2x1", Shape<_128, _256, _64>{}, Shape<_2, _1, _1>{}, Cooperative{});
  add("cooperative 128x256x64, 1x2", Shape<_128, _256, _64>{}, Shape<_1, _2, _1>{}, Cooperative{});
  add("pingpong 128x128x64, 2x1", Shape<_128, _128, _64>{}, Shape<_2, _1, _1>{}, Pingpong{});
  add("pingpong 64x256x64, 1x2", Shape<_64, _256, _64>{}, Shape<_1, _2, _1>{}, Pingpong{});
}

// Adds the kernels for e4m3 with scales. Weights must be contiguous along k.
inline void AddFp8(Ways& ways, const Problem& problem) {
  const auto add = [&]<typename Tile, typename Cluster, typename Schedule>(
                       std::string_view name, Tile, Cluster, Schedule) {
    using Gemm = typename Built<cutlass::float_e4m3_t, true, cutlass::layout::ColumnMajor, Tile,
                                Cluster, Schedule>::Gemm;
    ways.push_back(std::make_unique<Grouped<Gemm, true>>(name, problem));
  };
  using cute::Shape;
  add("fp8 cooperative 128x128x128, 1x2", Shape<_128, _128, _128>{}, Shape<_1, _2, _1>{},
      Cooperative{});
  add("fp8 pingpong 64x128x128, 1x2", Shape<_64, _128, _128>{}, Shape<_1, _2, _1>{}, Pingpong{});
}

}  // namespace jax_ep::cuda
