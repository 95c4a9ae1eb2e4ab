// The part of CUDA's runtime that cuda_runtime_api.h declares: memory with guard pages, devices,
// and streams that run when the host waits for one.
#include "cuda_runtime_api.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <mutex>

struct EmulatedStream {
  int launches = 0;
  char orders[2];  // released by its launches, in turns
  std::deque<std::unique_ptr<jax_ep::emulator::Launch>> queue;
};

namespace jax_ep::emulator {
namespace {

constexpr size_t kPage = 4096;

// Host threads prepare ranks at the same time; kernels run in one of them.
std::recursive_mutex mutex;
thread_local int current_device = 0;
std::vector<std::unique_ptr<EmulatedStream>> streams;
std::map<int, EmulatedStream> null_streams;
std::map<const uint8_t*, Guarded> allocations;  // by end

template <typename Visit>
void ForEachStream(Visit visit) {
  for (auto& stream : streams) visit(*stream);
  for (auto& [device, stream] : null_streams) visit(stream);
}

// Plain loads and stores that hit a page without access.
void DieOfSignal(int, siginfo_t* info, void*) {
  Die("a load or store at %p, which is in no allocation", info->si_addr);
}

void CatchFaults() {
  static uint8_t stack[64 << 10];
  const stack_t own{.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof stack};
  sigaltstack(&own, nullptr);
  struct sigaction action{};
  action.sa_sigaction = DieOfSignal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace

Guarded AllocateGuarded(size_t bytes, size_t align) {
  const size_t whole = (bytes + align - 1) / align * align;
  Guarded memory;
  memory.mapped = (whole + kPage - 1) / kPage * kPage + 2 * kPage;
  void* mapping = mmap(nullptr, memory.mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) Die("no memory for %zu bytes", bytes);
  memory.mapping = static_cast<uint8_t*>(mapping);
  uint8_t* end = memory.mapping + memory.mapped - kPage;
  mprotect(memory.mapping, kPage, PROT_NONE);
  mprotect(end, kPage, PROT_NONE);
  std::memset(memory.mapping + kPage, kUnwritten, memory.mapped - 2 * kPage);
  memory.at = end - whole;
  memory.bytes = bytes;
  return memory;
}

void FreeGuarded(const Guarded& memory) {
  // The bytes between the allocation and the pages without access.
  const uint8_t* end = memory.mapping + memory.mapped - kPage;
  const auto unwritten = [](uint8_t byte) { return byte == kUnwritten; };
  if (!std::all_of<const uint8_t*>(memory.mapping + kPage, memory.at, unwritten)) {
    Die("a store before the shared memory of a block");
  }
  if (!std::all_of<const uint8_t*>(memory.at + memory.bytes, end, unwritten)) {
    Die("a store behind the shared memory of a block");
  }
  munmap(memory.mapping, memory.mapped);
}

void* SharedObject(std::type_index type, size_t bytes) {
  const Unseen unseen;
  Block& block = *current->block;
  Guarded& memory = block.objects[type];
  if (memory.at == nullptr) {
    memory = AllocateGuarded(bytes, kSharedAlign);
    size_t all = block.launch->shared_bytes;
    for (const auto& [of, object] : block.objects) all += object.bytes;
    if (all > kMostSharedBytes) Die("%zu bytes of shared memory", all);
  }
  return memory.at;
}

void* Allocate(size_t bytes) {
  const std::lock_guard guard(mutex);
  const Guarded memory = AllocateGuarded(bytes, kCopyAlign);
  allocations[memory.mapping + memory.mapped - kPage] = memory;
  return memory.at;
}

void Reset() {
  const std::lock_guard guard(mutex);
  for (const auto& [end, memory] : allocations) munmap(memory.mapping, memory.mapped);
  allocations.clear();
  streams.clear();
}

void CheckGlobal(const void* at, size_t bytes, size_t align, const char* what) {
  const Unseen unseen;
  const auto* byte = static_cast<const uint8_t*>(at);
  const auto found = allocations.upper_bound(byte);
  if (found == allocations.end() || byte < found->second.at || byte + bytes > found->first) {
    Die("%s: %zu bytes at %p, which are of no allocation", what, bytes, at);
  }
  if (reinterpret_cast<uintptr_t>(at) % align != 0) Die("%s: %p is not aligned", what, at);
}

void Enqueue(Launch launch, EmulatedStream* stream) {
  const std::lock_guard guard(mutex);
  launch.device = current_device;
  launch.on_stream = stream != nullptr;
  if (stream == nullptr) stream = &null_streams[current_device];
  launch.number = stream->launches++;
  launch.ends = &stream->orders[launch.number % 2];
  launch.follows = &stream->orders[1 - launch.number % 2];
  const Fault& missing = GetSettings().missing;
  if (launch.on_stream && launch.device == missing.device && launch.number >= missing.launch) {
    return;
  }
  if (launch.blocks() == 0 || launch.grid.z != 1 || launch.threads == 0 ||
      launch.threads % kWarpLanes != 0 || launch.shared_bytes > kMostSharedBytes ||
      launch.grid.x % launch.cluster != 0) {
    Die("a launch of %u x %u x %u blocks of %u threads, %u in a cluster, with %zu bytes of shared "
        "memory",
        launch.grid.x, launch.grid.y, launch.grid.z, launch.threads, launch.cluster,
        launch.shared_bytes);
  }
  launch.overlaps = launch.early && !stream->queue.empty() ? 1 : 0;
  stream->queue.push_back(std::make_unique<Launch>(std::move(launch)));
}

std::vector<Launch*> FirstLaunches() {
  std::vector<Launch*> launches;
  ForEachStream([&](EmulatedStream& stream) {
    if (stream.queue.empty()) return;
    const Launch& first = *stream.queue.front();
    launches.push_back(stream.queue.front().get());
    if (stream.queue.size() == 1 || first.let_go < first.blocks()) return;
    if (stream.queue[1]->early) launches.push_back(stream.queue[1].get());
  });
  return launches;
}

void PopEnded() {
  // Copies may outlive their block, but not their kernel.
  if (CopiesUnderWay()) return;
  ForEachStream([](EmulatedStream& stream) {
    if (!stream.queue.empty() && stream.queue.front()->ended == stream.queue.front()->blocks()) {
      stream.queue.pop_front();
      if (!stream.queue.empty()) stream.queue.front()->overlaps = 0;
    }
  });
}

}  // namespace jax_ep::emulator

// ---- The runtime --------------------------------------------------------------------------------

using namespace jax_ep::emulator;

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNotSupported ? "not emulated" : "an error of the emulated runtime";
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= GetSettings().gpus) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = GetSettings().gpus;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = GetSettings().multiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::snprintf(properties->name, sizeof properties->name, "emulated GPU (EMULATED_SEED=%llu)",
                static_cast<unsigned long long>(GetSettings().seed));
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaStreamSynchronize(nullptr); }

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  if (bytes != 0) std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes != 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  const std::lock_guard guard(mutex);
  streams.push_back(std::make_unique<EmulatedStream>());
  *stream = streams.back().get();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  const std::lock_guard guard(mutex);
  CatchFaults();
  RunAll();
  ForEachStream([](EmulatedStream& stream) {
    for (const char& order : stream.orders) Acquire(&order);
  });
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return static_cast<size_t>(value) > kMostSharedBytes ? cudaErrorInvalidValue : cudaSuccess;
}
