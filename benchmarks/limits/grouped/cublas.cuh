// cuBLAS as the yardstick. It is loaded at run time, so that programs are built without it.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include <filesystem>
#include <string>

#include "grouped/report.cuh"

namespace jax_ep::cuda {

// Constants and functions as in cublas_api.h, in every version that knows Hopper.
struct Cublas {
  static constexpr int kSuccess = 0;
  static constexpr int kNone = 0;
  static constexpr int kTransposed = 1;
  static constexpr int kCompute32F = 68;
  static constexpr int kDefault = -1;

  using Handle = void*;
  int (*create)(Handle*);
  int (*set_stream)(Handle, cudaStream_t);
  int (*get_version)(Handle, int*);
  int (*multiply)(Handle, int, int, int, int, int, const void*, const void*, cudaDataType, int,
                  long long, const void*, cudaDataType, int, long long, const void*, void*,
                  cudaDataType, int, long long, int, int, int);
  Handle handle = nullptr;
  int version = 0;

  explicit Cublas(const std::string& path) {
    void* library = nullptr;
    if (!path.empty()) {
      library = Opened(path);
    } else {
      for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
        if (library == nullptr) library = Opened(name);
      }
    }
    if (library == nullptr) Fail("no cuBLAS: --cublas PATH says where libcublas.so.13 or .12 is");
    Find(library, "cublasCreate_v2", create);
    Find(library, "cublasSetStream_v2", set_stream);
    Find(library, "cublasGetVersion_v2", get_version);
    Find(library, "cublasGemmStridedBatchedEx", multiply);
    Check(create(&handle), "cublasCreate");
    Check(get_version(handle, &version), "cublasGetVersion");
  }

  static void Check(int status, const char* call) {
    if (status != kSuccess) Fail(std::string(call) + ": status " + std::to_string(status));
  }

 private:
  // Opens the library, and first libcublasLt, which it needs and a wheel has beside it.
  static void* Opened(const std::string& path) {
    const std::filesystem::path whole(path);
    std::string beside = whole.filename().string();
    beside.replace(0, std::string("libcublas").size(), "libcublasLt");
    dlopen((whole.parent_path() / beside).c_str(), RTLD_NOW | RTLD_GLOBAL);
    return dlopen(path.c_str(), RTLD_NOW);
  }

  template <typename Function>
  static void Find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) Fail(std::string("cuBLAS has no ") + name);
  }
};

}  // namespace jax_ep::cuda
