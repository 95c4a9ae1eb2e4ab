// Stands in for CUDA's header of this name: the functions that the kernels' host code and
// benchmarks/calls/window_kernels call. Graphs and events are not emulated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotSupported = 801,
};
const char* cudaGetErrorString(cudaError_t error);

// ---- Devices ------------------------------------------------------------------------------------

struct cudaDeviceProp {
  char name[64];
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceSynchronize();
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

// ---- Memory -------------------------------------------------------------------------------------

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum { cudaHostAllocPortable = 1, cudaHostAllocMapped = 2 };

namespace jax_ep::emulator {
void* Allocate(size_t bytes);
}
template <typename T>
cudaError_t cudaMalloc(T** memory, size_t bytes) {
  *memory = static_cast<T*>(jax_ep::emulator::Allocate(bytes));
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaHostAlloc(T** memory, size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);

// ---- Streams and kernels ------------------------------------------------------------------------

using cudaStream_t = struct EmulatedStream*;
enum { cudaStreamNonBlocking = 1 };
struct cudaFuncAttributes {};
enum cudaLaunchAttributeID {
  cudaLaunchAttributePriority,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int priority;
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 grid, block;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
// Takes effect at once, so use it only on memory that nothing enqueued uses.
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
// Runs what is enqueued on all streams.
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
// The kernel's parameters have no types here, so include/cuda/common/launch.h does without it.
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return cudaErrorNotSupported;
}

// ---- Not emulated -------------------------------------------------------------------------------

using cudaEvent_t = struct EmulatedEvent*;
using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphExec_t = struct EmulatedGraphExec*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };

#define JAX_EP_NOT_EMULATED(name, ...) \
  inline cudaError_t name(__VA_ARGS__) { return cudaErrorNotSupported; }
JAX_EP_NOT_EMULATED(cudaEventCreate, cudaEvent_t*)
JAX_EP_NOT_EMULATED(cudaEventDestroy, cudaEvent_t)
JAX_EP_NOT_EMULATED(cudaEventRecord, cudaEvent_t, cudaStream_t)
JAX_EP_NOT_EMULATED(cudaEventElapsedTime, float*, cudaEvent_t, cudaEvent_t)
JAX_EP_NOT_EMULATED(cudaStreamBeginCapture, cudaStream_t, cudaStreamCaptureMode)
JAX_EP_NOT_EMULATED(cudaStreamEndCapture, cudaStream_t, cudaGraph_t*)
JAX_EP_NOT_EMULATED(cudaGraphInstantiate, cudaGraphExec_t*, cudaGraph_t, int)
JAX_EP_NOT_EMULATED(cudaGraphDestroy, cudaGraph_t)
JAX_EP_NOT_EMULATED(cudaGraphUpload, cudaGraphExec_t, cudaStream_t)
JAX_EP_NOT_EMULATED(cudaGraphLaunch, cudaGraphExec_t, cudaStream_t)
JAX_EP_NOT_EMULATED(cudaGraphExecDestroy, cudaGraphExec_t)
#undef JAX_EP_NOT_EMULATED
