// The passes over an expert rank's rows that gradients need, on a CUDA stream.
#pragma once

#include <cuda_runtime_api.h>

#include "protocol/row_steps.h"

namespace jax_ep::cuda {

// Each enqueues its kernel; none allocates, waits or reads device memory on the host.
cudaError_t CombineBack(const CombineBackStep& step, cudaStream_t stream);
cudaError_t QuantizeCotangents(const QuantizeCotangentsStep& step, cudaStream_t stream);
cudaError_t DequantizeRows(const DequantizeRowsStep& step, cudaStream_t stream);

// Loads the kernels on the current device.
cudaError_t PreloadExpertRowKernels();

}  // namespace jax_ep::cuda
