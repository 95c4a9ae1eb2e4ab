// The yardstick: one cuBLAS matmul with equally many rows for each group.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <string>

#include "grouped/cublas.cuh"
#include "kernels.cuh"
#include "operands.cuh"

namespace jax_ep::cuda {

class Batched : public Way {
 public:
  Batched(const Cublas& cublas, const Problem& problem) : cublas_(cublas), problem_(problem) {
    name = "batched";
    equal_groups = true;
  }

  std::string Order(int) override { return ""; }
  int orders() const override { return 1; }

  // cuBLAS's matrices are column-major, so to it everything is transposed.
  void Run(cudaStream_t stream) override {
    const float one = 1;
    const float zero = 0;
    const auto [groups, rows, n, k] =
        std::array{problem_.groups, problem_.rows, problem_.n, problem_.k};
    const int each = rows / groups;
    Cublas::Check(cublas_.set_stream(cublas_.handle, stream), "cublasSetStream");
    Cublas::Check(
        cublas_.multiply(cublas_.handle, problem_.transposed ? Cublas::kTransposed : Cublas::kNone,
                         Cublas::kNone, n, each, k, &one, problem_.b, CUDA_R_16BF,
                         problem_.transposed ? k : n, static_cast<long long>(n) * k, problem_.a,
                         CUDA_R_16BF, k, static_cast<long long>(each) * k, &zero, problem_.d,
                         CUDA_R_16BF, n, static_cast<long long>(each) * n, groups,
                         Cublas::kCompute32F, Cublas::kDefault),
        "cublasGemmStridedBatchedEx");
  }

 private:
  const Cublas& cublas_;
  Problem problem_;
};

}  // namespace jax_ep::cuda
