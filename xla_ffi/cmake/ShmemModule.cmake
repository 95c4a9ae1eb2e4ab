# The native module jax_ep._native_shmem, built if NVSHMEM's headers are found: in NVSHMEM_HOME or
# in PyPI's nvidia-nvshmem-cu13. Its host library is opened at run time; the kernels of
# shmem/internode.cu are linked with its device library into an image that the module carries.
option(JAX_EP_SHMEM "Fail where NVSHMEM's headers are not found" OFF)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import sys, sysconfig; print(';'.join(p + '/nvidia/nvshmem' for p in [sysconfig.get_path('purelib'), *sys.path] if p))"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE jax_ep_wheel_nvshmem)
find_path(
  JAX_EP_NVSHMEM_INCLUDE nvshmem_host.h
  HINTS "$ENV{NVSHMEM_HOME}/include"
  PATHS ${jax_ep_wheel_nvshmem}
  PATH_SUFFIXES include)
if(JAX_EP_NVSHMEM_INCLUDE)
  nanobind_add_module(_native_shmem STABLE_ABI NB_STATIC shmem/module.cc shmem/heap.cc
                      shmem/kernels.cc cuda/memory/driver.cc)
  target_include_directories(_native_shmem PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_include_directories(_native_shmem SYSTEM PRIVATE "${JAX_EP_NVSHMEM_INCLUDE}")
  target_compile_options(_native_shmem PRIVATE -Wall -Wextra)
  target_link_libraries(_native_shmem PRIVATE jax_ep_cudart Threads::Threads)
  jax_ep_link_portably(_native_shmem)
  install(TARGETS _native_shmem LIBRARY DESTINATION "${JAX_EP_DESTINATION}")
  find_file(
    JAX_EP_NVSHMEM_DEVICE libnvshmem_device.a
    HINTS "${JAX_EP_NVSHMEM_INCLUDE}/../lib")
  if(JAX_EP_NVSHMEM_DEVICE)
    # Linked machine code only, which runs on the GPUs of its own generation. It is made for the
    # generations that this compiler and NVSHMEM have in common.
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
                    OUTPUT_VARIABLE jax_ep_gpu_code COMMAND_ERROR_IS_FATAL ANY)
    set(jax_ep_internode_targets)
    foreach(jax_ep_generation IN ITEMS 90 100 120)
      if(jax_ep_gpu_code MATCHES "sm_${jax_ep_generation}[^0-9a-z]")
        list(APPEND jax_ep_internode_targets
             "-gencode=arch=compute_${jax_ep_generation},code=sm_${jax_ep_generation}")
      endif()
    endforeach()
    set(jax_ep_internode_object "${CMAKE_CURRENT_BINARY_DIR}/internode.o")
    set(jax_ep_internode_image "${CMAKE_CURRENT_BINARY_DIR}/internode.fatbin")
    add_custom_command(
      OUTPUT "${jax_ep_internode_image}"
      COMMAND
        "${CMAKE_CUDA_COMPILER}" -std=c++20 -O3 -rdc=true ${jax_ep_internode_targets}
        -I "${CMAKE_CURRENT_SOURCE_DIR}" -isystem "${JAX_EP_NVSHMEM_INCLUDE}" -MD -MF
        "${jax_ep_internode_object}.d" -MT "${jax_ep_internode_image}" -c
        "${CMAKE_CURRENT_SOURCE_DIR}/shmem/internode.cu" -o "${jax_ep_internode_object}"
      COMMAND
        "${CMAKE_CUDA_COMPILER}" ${jax_ep_internode_targets} -dlink -fatbin
        "${jax_ep_internode_object}" "${JAX_EP_NVSHMEM_DEVICE}" -o
        "${jax_ep_internode_image}"
      DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/shmem/internode.cu"
      DEPFILE "${jax_ep_internode_object}.d"
      VERBATIM)
    set_source_files_properties(shmem/kernels.cc PROPERTIES OBJECT_DEPENDS
                                                            "${jax_ep_internode_image}")
    target_compile_definitions(_native_shmem
                               PRIVATE "JAX_EP_INTERNODE_IMAGE=\"${jax_ep_internode_image}\"")
  else()
    message(STATUS "jax_ep: no libnvshmem_device.a beside NVSHMEM's headers: transport shmem "
                   "serves ranks of one node alone")
  endif()
elseif(JAX_EP_SHMEM)
  message(FATAL_ERROR "jax_ep: JAX_EP_SHMEM=ON needs NVSHMEM's headers in NVSHMEM_HOME or the "
                      "package nvidia-nvshmem-cu13, found none")
else()
  message(STATUS "jax_ep: no headers of NVSHMEM in NVSHMEM_HOME or the package "
                 "nvidia-nvshmem-cu13: transport shmem is left out")
endif()
