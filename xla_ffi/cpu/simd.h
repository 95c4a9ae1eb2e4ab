// How functions are compiled once per x86 instruction set and chosen when the library loads, so
// that one wheel runs everywhere and is fast where it can be. Used by rows.cc and quantize.cc.
#pragma once

// Sanitizers cannot instrument the resolvers that choose between clones.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define JAX_EP_SIMD_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define JAX_EP_SIMD_CLONES
#endif

// For loops that compute more than they move. Older compilers do not know the x86-64 levels.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__clang__) && __GNUC__ >= 12
#define JAX_EP_WIDE_SIMD_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define JAX_EP_WIDE_SIMD_CLONES JAX_EP_SIMD_CLONES
#endif
