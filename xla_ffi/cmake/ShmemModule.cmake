# The native module jax_ep._native_shmem, where NVSHMEM's headers are: in NVSHMEM_HOME or in PyPI's
# nvidia-nvshmem-cu13. Nothing of NVSHMEM is linked: it is opened at run time.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import sys, sysconfig; print(';'.join(p + '/nvidia/nvshmem/include' for p in [sysconfig.get_path('purelib'), *sys.path] if p))"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE jax_ep_wheel_nvshmem)
find_path(
  JAX_EP_NVSHMEM_INCLUDE nvshmem_host.h
  HINTS "$ENV{NVSHMEM_HOME}/include"
  PATHS ${jax_ep_wheel_nvshmem})
if(JAX_EP_NVSHMEM_INCLUDE)
  nanobind_add_module(_native_shmem STABLE_ABI NB_STATIC shmem/module.cc shmem/heap.cc
                      cuda/driver.cc)
  target_include_directories(_native_shmem PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_include_directories(_native_shmem SYSTEM PRIVATE "${JAX_EP_NVSHMEM_INCLUDE}")
  target_compile_options(_native_shmem PRIVATE -Wall -Wextra)
  target_link_libraries(_native_shmem PRIVATE jax_ep_cudart Threads::Threads)
  install(TARGETS _native_shmem LIBRARY DESTINATION jax_ep)
else()
  message(STATUS "jax_ep: no headers of NVSHMEM in NVSHMEM_HOME or the package "
                 "nvidia-nvshmem-cu13: transport shmem is left out")
endif()
