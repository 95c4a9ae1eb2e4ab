// NVSHMEM's symmetric heap: memory in which each process has a block at the same offset, and the
// addresses by which this process reaches the blocks of others. The library is opened at run time,
// by the module _native_shmem only.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <string>

namespace jax_ep::shmem {

// All functions throw std::runtime_error with the message of NVSHMEM or the loader. Those marked
// collective must be called by every process in the same order; each waits for all others without a
// time limit.

// Opens the library and returns its version. Call it before anything else; further calls return the
// same.
std::string Load(const std::string& path);

// Whether anybody in this process, jax_ep or another library, has started NVSHMEM.
bool Started();

// Makes an id for a start. One process calls it and hands the id to all.
std::string UniqueId();

// Collective, once per process: starts NVSHMEM as `pe` of `pes` on this device and no other.
void Start(const std::string& unique_id, int pe, int pes, int32_t ordinal);

// Runs `work` with the device of Start current; throws if Start has not been called.
void OnStarted(const std::function<void()>& work);

// Initialises device code that is linked with NVSHMEM. Call it on the device of Start.
void StartLibrary(CUlibrary library);

// Collective. Returns uninitialised memory, or 0 if the heap has no room.
uint64_t Allocate(int64_t bytes);

// Collective, for an own block. Waits until all puts of all processes have arrived.
void Free(uint64_t block);

// Returns the address at which this process's device loads from and stores to that block of `pe`,
// or 0 if it cannot.
uint64_t Reached(uint64_t block, int pe);

}  // namespace jax_ep::shmem
