// NVSHMEM's symmetric heap: memory of which each process has a block at the same place, and where
// it is reached from here. The library is opened at run time. The module _native_shmem alone uses
// it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <functional>
#include <string>

namespace jax_ep::shmem {

// All throw std::runtime_error with what NVSHMEM or the loader says. Those behind Start are
// collective where it is said: every process calls them, in the same order, and each waits for all
// others without an end.

// Opens the library; returns its version. Nothing else may be called before. May be called again.
std::string Load(const std::string& path);

// Whether somebody in this process, jax_ep or another library, has started NVSHMEM.
bool Started();

// Names a start; made by one process, handed to all.
std::string UniqueId();

// Collective, once a process: this one is `pe` of `pes`, with this device and no other.
void Start(const std::string& unique_id, int pe, int pes, int32_t ordinal);

// Runs `work` where the device of Start is current; throws before it.
void OnStarted(const std::function<void()>& work);

// Tells device code that is linked with NVSHMEM about the start. On the device of Start.
void StartLibrary(CUlibrary library);

// Collective; 0 where the heap has no room. With any contents.
uint64_t Allocate(int64_t bytes);

// Collective; of an own block. Waits until all puts of all processes have arrived.
void Free(uint64_t block);

// Where this process's device reaches that block of `pe` by loads and stores; 0: it cannot.
uint64_t Reached(uint64_t block, int pe);

}  // namespace jax_ep::shmem
