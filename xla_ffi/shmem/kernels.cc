// Loads the image of the kernels in internode.cu through the driver and NVSHMEM.
#include "shmem/kernels.h"

#include <stdexcept>

#include "cuda/memory/driver.h"
#include "shmem/heap.h"

#if defined(JAX_EP_INTERNODE_IMAGE)
// Embeds a file that the build has made.
asm(".section .rodata\n"
    ".balign 64\n"
    "jax_ep_internode_image:\n"
    ".incbin \"" JAX_EP_INTERNODE_IMAGE
    "\"\n"
    ".byte 0\n"
    ".previous\n");
extern "C" const char jax_ep_internode_image[] __attribute__((visibility("hidden")));
#endif

namespace jax_ep::shmem {

cuda::InternodeKernels LoadKernels() {
#if defined(JAX_EP_INTERNODE_IMAGE)
  // Never unloaded, because captured graphs keep its kernels.
  static const cuda::InternodeKernels kernels = [] {
    cuda::InternodeKernels loaded{};
    OnStarted([&loaded] {
      const cuda::Driver& driver = cuda::Driver::Get();
      if (!driver.load_library || !driver.get_kernel || !driver.get_function || !driver.launch) {
        throw std::runtime_error(
            "jax_ep: the driver must know libraries, so be of CUDA 12 or newer");
      }
      CUlibrary library = nullptr;
      cuda::Check(driver.load_library(&library, jax_ep_internode_image, nullptr, nullptr, 0,
                                      nullptr, nullptr, 0),
                  "loading the kernels of transport shmem");
      StartLibrary(library);
      const auto find = [&](const char* name) {
        CUkernel kernel = nullptr;
        CUfunction function = nullptr;
        cuda::Check(driver.get_kernel(&kernel, library, name), name);
        cuda::Check(driver.get_function(&function, kernel), name);
        return reinterpret_cast<uint64_t>(function);
      };
      for (uint32_t i = 0; i < cuda::kNumInternodeKernels; ++i) {
        loaded.functions[i] = find(cuda::kInternodeKernelNames[i]);
      }
    });
    return loaded;
  }();
  return kernels;
#else
  throw std::runtime_error("jax_ep: must be built with NVSHMEM's device library");
#endif
}

}  // namespace jax_ep::shmem
