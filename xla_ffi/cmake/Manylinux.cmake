# Links the native modules for manylinux_2_28, however new this machine's glibc is. Zig (PyPI's
# ziglang) brings stubs of every glibc; libstdc++ is linked statically. The g++ must have been built
# for a glibc older than 2.38, because the headers of 2.38 rename functions.
set(JAX_EP_ZIG "" CACHE STRING "Zig's command: link for manylinux_2_28 with it")
if(JAX_EP_ZIG)
  set(jax_ep_archives)
  foreach(jax_ep_archive IN ITEMS libstdc++.a libgcc_eh.a libgcc.a)
    execute_process(
      COMMAND "${CMAKE_CXX_COMPILER}" "-print-file-name=${jax_ep_archive}"
      OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE jax_ep_path COMMAND_ERROR_IS_FATAL ANY)
    string(APPEND jax_ep_archives " ${jax_ep_path}")
  endforeach()
  string(CONCAT CMAKE_CXX_CREATE_SHARED_MODULE
         "${JAX_EP_ZIG} cc -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.2.28 -fPIC -shared -Wl,-s -Wl,--gc-sections "
         "-Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map -o <TARGET> <OBJECTS> "
         "<LINK_LIBRARIES> ${jax_ep_archives} -lpthread -ldl -lrt -lm")
endif()

# Gives a module what the static libstdc++ needs from a newer glibc.
function(jax_ep_link_portably target)
  if(JAX_EP_ZIG)
    target_sources(${target} PRIVATE cmake/old_glibc.cc)
  endif()
endfunction()
