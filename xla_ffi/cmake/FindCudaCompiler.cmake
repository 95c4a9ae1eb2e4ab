# Sets `result` to whether this machine has an NVIDIA driver, or this Python JAX for CUDA. Device code
# takes several times as long to compile as all the rest.
function(jax_ep_wants_cuda result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import glob, sys, sysconfig; print(any(glob.glob(p + '/jax_cuda*_plugin') for p in [sysconfig.get_path('purelib'), *sys.path]))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE has_jax)
  set(${result} OFF PARENT_SCOPE)
  # The second one is the driver's in WSL.
  if(has_jax STREQUAL "True" OR EXISTS /proc/driver/nvidia/version
     OR EXISTS /usr/lib/wsl/lib/libcuda.so.1)
    set(${result} ON PARENT_SCOPE)
  endif()
endfunction()

# Sets `result` to nvcc's path, from CUDA_HOME, PATH or PyPI's nvidia-cuda-nvcc, or to "". In an
# isolated build, purelib leads to the packages of the environment that requested the build.
function(jax_ep_find_cuda_compiler result)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import glob, sys, sysconfig; print(';'.join(g for p in [sysconfig.get_path('purelib'), *sys.path] for g in sorted(glob.glob(p + '/nvidia/*/bin'))))"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE wheel_bins)
  find_program(
    JAX_EP_NVCC_PROGRAM nvcc
    HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
    PATHS ${wheel_bins} /usr/local/cuda/bin)
  set(${result} "" PARENT_SCOPE)
  if(JAX_EP_NVCC_PROGRAM)
    execute_process(COMMAND "${JAX_EP_NVCC_PROGRAM}" --version OUTPUT_VARIABLE version)
    string(REGEX MATCH "release ([0-9.]+)" version "${version}")
    if(CMAKE_MATCH_1 VERSION_LESS 12.5)
      message(WARNING "jax_ep: CUDA must be 12.5 or newer, got ${CMAKE_MATCH_1} at "
                      "${JAX_EP_NVCC_PROGRAM}: it is not used")
    elseif(JAX_EP_PLUGIN AND NOT CMAKE_MATCH_1 MATCHES "^${JAX_EP_PLUGIN}\\.")
      message(FATAL_ERROR "jax_ep: the plugin for CUDA ${JAX_EP_PLUGIN} needs its nvcc, got "
                          "${CMAKE_MATCH_1} at ${JAX_EP_NVCC_PROGRAM}; set CUDA_HOME")
    else()
      set(${result} "${JAX_EP_NVCC_PROGRAM}" PARENT_SCOPE)
    endif()
  endif()
endfunction()
