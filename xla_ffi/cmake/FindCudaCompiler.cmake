# Sets `result` to nvcc's path, from CUDA_HOME, CUDACXX, PATH or PyPI's nvidia-cuda-nvcc, or to "".
function(jax_ep_find_cuda_compiler result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import glob, sys; print(';'.join(g for p in sys.path for g in sorted(glob.glob(p + '/nvidia/*/bin'))))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE wheel_bins)
  find_program(
    JAX_EP_NVCC_PROGRAM nvcc
    HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" "$ENV{CUDACXX}"
    PATHS ${wheel_bins} /usr/local/cuda/bin)
  if(JAX_EP_NVCC_PROGRAM)
    set(${result} "${JAX_EP_NVCC_PROGRAM}" PARENT_SCOPE)
  else()
    set(${result} "" PARENT_SCOPE)
  endif()
endfunction()
