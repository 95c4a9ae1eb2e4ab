# The native module jax_ep._native_cuda. It does not link libcuda, so it imports where there is no
# GPU.
if(NOT CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER "${JAX_EP_NVCC}")
endif()
if(NOT CMAKE_CUDA_ARCHITECTURES)
  # Ampere and Hopper as machine code; newer GPUs compile the PTX when the module loads.
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
# Not FindCUDAToolkit, which requires a shared cudart that PyPI's toolkit does not have.
get_filename_component(jax_ep_toolkit "${CMAKE_CUDA_COMPILER}" REALPATH)
get_filename_component(jax_ep_toolkit "${jax_ep_toolkit}" DIRECTORY)
find_library(
  JAX_EP_CUDART cudart_static
  HINTS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} "${jax_ep_toolkit}/../lib64"
        "${jax_ep_toolkit}/../lib" REQUIRED)
add_library(jax_ep_cudart INTERFACE)
target_include_directories(jax_ep_cudart SYSTEM
                           INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(jax_ep_cudart INTERFACE "${JAX_EP_CUDART}" ${CMAKE_DL_LIBS} rt
                                              Threads::Threads)

# What is defined first is compiled first: with the handlers last, one core would compile them alone.
add_library(jax_ep_cuda_handlers OBJECT ffi/cuda_handlers.cc)
target_include_directories(jax_ep_cuda_handlers SYSTEM PRIVATE "${XLA_FFI_INCLUDE}")
nanobind_opt_size(jax_ep_cuda_handlers)
add_library(
  jax_ep_cuda OBJECT
  cuda/collective/dispatch_pack.cu cuda/collective/dispatch_unpack.cu
  cuda/collective/combine.cu cuda/quantize.cu
  cuda/expert_rows.cu cuda/init.cu cuda/internode/calls.cc cuda/memory/driver.cc cuda/memory/fabric.cc
  cuda/memory/lasting.cc cuda/memory/window_support.cc cuda/memory/windows.cc cuda/router.cu)
# These need Hopper. Without older architectures they compile in three quarters of the time.
add_library(
  jax_ep_windows OBJECT
  cuda/window/dispatch.cu cuda/window/dispatch_halves.cu cuda/window/dispatch_cached.cu
  cuda/window/combine.cu cuda/window/combine_send.cu cuda/window/combine_recv.cu
  cuda/low_latency/dispatch.cu cuda/low_latency/combine.cu)
set(jax_ep_windows_for ${CMAKE_CUDA_ARCHITECTURES})
list(FILTER jax_ep_windows_for EXCLUDE REGEX "^[5-8][0-9]")
if(jax_ep_windows_for)
  set_target_properties(jax_ep_windows PROPERTIES CUDA_ARCHITECTURES "${jax_ep_windows_for}")
endif()
# These use tensor-core instructions that only Hopper has: they run on 9.0 and are not compiled for
# newer GPUs.
add_library(
  jax_ep_matmul OBJECT
  cuda/matmul/fp8.cu cuda/matmul/fprop.cu cuda/matmul/gate_up.cu cuda/matmul/grouped_matmul.cc
  cuda/matmul/mxfp4.cu cuda/matmul/quantize_matrices.cu cuda/matmul/tensor_map.cc
  cuda/matmul/wgrad.cu)
set_target_properties(jax_ep_matmul PROPERTIES CUDA_ARCHITECTURES 90a-real)
# These are compiled from the PTX of 8.0 for every GPU, so that what runs on one of them is what runs
# on all.
add_library(
  jax_ep_portable OBJECT
  cuda/portable/dgrad.cu cuda/portable/fprop.cu cuda/portable/portable.cc cuda/portable/swiglu.cu
  cuda/portable/wgrad.cu)
set_target_properties(jax_ep_portable PROPERTIES CUDA_ARCHITECTURES OFF)
foreach(jax_ep_arch ${CMAKE_CUDA_ARCHITECTURES})
  string(REGEX MATCH "^[0-9]+" jax_ep_number "${jax_ep_arch}")
  if(jax_ep_number LESS 80)
    continue()
  endif()
  set(jax_ep_codes "sm_${jax_ep_number}")
  if(NOT jax_ep_arch MATCHES "-real$")
    list(APPEND jax_ep_codes compute_80)  # newer GPUs compile this when the module loads
  endif()
  foreach(jax_ep_code ${jax_ep_codes})
    target_compile_options(
      jax_ep_portable
      PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_80,code=${jax_ep_code}>)
  endforeach()
endforeach()
foreach(part jax_ep_cuda_handlers jax_ep_cuda jax_ep_windows jax_ep_matmul jax_ep_portable)
  set_target_properties(${part} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${part} PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
  target_compile_options(
    ${part} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Xcompiler=-Wall,-Wextra>
                    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>)
  target_link_libraries(${part} PUBLIC jax_ep_cudart)
endforeach()

nanobind_add_module(_native_cuda STABLE_ABI NB_STATIC ffi/cuda_module.cc
                    ffi/cuda_reports.cc ffi/window_group.cc)
target_include_directories(_native_cuda SYSTEM PRIVATE "${XLA_FFI_INCLUDE}")
target_compile_options(_native_cuda PRIVATE -Wall -Wextra)
target_link_libraries(_native_cuda PRIVATE jax_ep_cuda_handlers jax_ep_cuda jax_ep_windows
                                           jax_ep_matmul jax_ep_portable Threads::Threads)
jax_ep_link_portably(_native_cuda)
install(TARGETS _native_cuda LIBRARY DESTINATION "${JAX_EP_DESTINATION}")
