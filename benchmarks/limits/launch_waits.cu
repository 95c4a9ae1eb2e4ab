// Finds what the host cannot do while a kernel runs, and which launches that holds up. Prints one
// JSON object; launch_waits.py builds and runs it.
//
// A kernel on GPU 0 waits for the host, as a transport's kernel waits for a peer. Meanwhile one
// thread does one thing, and other threads launch small kernels, one on each GPU. What returns only
// after the kernel has been let go waits for it.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu_limits/report.cuh"

// Kernels that are looked up by name in a loaded module.
extern "C" {

// Ends by itself after `ns`, whatever the host does.
__global__ void WaitForHost(const volatile int* go, uint64_t ns) {
  uint64_t began, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*go == 0 && now - began < ns);
}

__global__ void Small(int* out) {
  if (out != nullptr) *out = 1;
}

// Needs `sizeof values` bytes of local memory per thread, more than the driver keeps at first.
__global__ void MuchLocalMemory(int* out) {
  volatile int values[2048];
#pragma unroll 1
  for (int i = 0; i < 2048; ++i) values[i * 7 % 2048] = i;
  if (out != nullptr) *out = values[threadIdx.x];
}
}

namespace jax_ep::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHold{300};            // what waits for the kernel takes this long
constexpr milliseconds kSettle{30};           // for threads to start
constexpr uint64_t kLimitNs = 3000000000ull;  // for the waiting kernel
constexpr size_t kBytes = 64 << 20;
constexpr size_t kHostBytes = 1 << 20;
constexpr int kManyBlocks = 4096;  // so that local memory is needed for all multiprocessors

template <typename Function>
Function DriverFunction(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) Fail(std::string("the driver lacks ") + name);
  return reinterpret_cast<Function>(entry);
}

void CheckDriver(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) Fail(std::string(what) + ": error " + std::to_string(result));
}

// Loads modules as XLA does.
struct Modules {
  std::string image;
  decltype(&cuModuleLoadData) load = DriverFunction<decltype(load)>("cuModuleLoadData", 7000);
  decltype(&cuModuleUnload) unload = DriverFunction<decltype(unload)>("cuModuleUnload", 7000);
  decltype(&cuModuleGetFunction) get = DriverFunction<decltype(get)>("cuModuleGetFunction", 7000);
  decltype(&cuLaunchKernel) launch = DriverFunction<decltype(launch)>("cuLaunchKernel", 7000);

  CUmodule Load() const {
    CUmodule module;
    CheckDriver(load(&module, image.data()), "cuModuleLoadData");
    return module;
  }
  CUfunction Find(CUmodule module, const char* name) const {
    CUfunction function;
    CheckDriver(get(&function, module, name), "cuModuleGetFunction");
    return function;
  }
  void Launch(CUfunction function, unsigned blocks, cudaStream_t stream) const {
    int* out = nullptr;
    void* arguments[] = {&out};
    CheckDriver(launch(function, blocks, 1, 1, 256, 1, 1, 0, stream, arguments, nullptr),
                "cuLaunchKernel");
  }
};

cudaStream_t NewStream() {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

// One thing that a program does. `prepare` runs before the kernel begins. Cases do not free what
// they allocate: freeing may wait, and the program is short.
struct Case {
  const char* what;
  std::function<void()> prepare;
  std::function<void()> act;
};

std::vector<Case> Cases(const Modules& modules, cudaStream_t stream) {
  static CUmodule module;
  static CUfunction function;
  static void* memory;
  static const std::vector<char> pageable(kHostBytes);
  const auto load = [&modules] { module = modules.Load(); };
  const auto find = [&modules](const char* name) { function = modules.Find(module, name); };
  const auto launch = [&modules, stream](unsigned blocks) {
    modules.Launch(function, blocks, stream);
  };
  const auto load_and_find = [=](const char* name) {
    return [=] {
      load();
      find(name);
    };
  };
  const auto load_and_launch = [=](const char* name, unsigned blocks) {
    return [=] {
      load();
      find(name);
      launch(blocks);
    };
  };
  const auto allocate = [] { CHECK_CUDA(cudaMalloc(&memory, kBytes)); };
  const auto pin = [] { CHECK_CUDA(cudaMallocHost(&memory, kHostBytes)); };
  const auto nothing = [] {};
  return {
      {"launch a kernel again", load_and_launch("Small", 1), [=] { launch(1); }},
      {"load a module", nothing, load},
      {"launch a kernel of a loaded module for the first time", load_and_find("Small"),
       [=] { launch(1); }},
      {"launch a kernel that needs more local memory than any before",
       load_and_find("MuchLocalMemory"), [=] { launch(kManyBlocks); }},
      {"the same again", load_and_launch("MuchLocalMemory", kManyBlocks),
       [=] { launch(kManyBlocks); }},
      {"unload a module", load_and_launch("Small", 1),
       [&modules] { CheckDriver(modules.unload(module), "cuModuleUnload"); }},
      {"allocate memory", nothing, allocate},
      {"free memory", allocate, [] { CHECK_CUDA(cudaFree(memory)); }},
      {"allocate memory in a stream's order", nothing,
       [stream] { CHECK_CUDA(cudaMallocAsync(&memory, kBytes, stream)); }},
      {"allocate pinned memory", nothing, pin},
      {"free pinned memory", pin, [] { CHECK_CUDA(cudaFreeHost(memory)); }},
      {"copy from memory that is not pinned", allocate,
       [stream] {
         CHECK_CUDA(
             cudaMemcpyAsync(memory, pageable.data(), kHostBytes, cudaMemcpyHostToDevice, stream));
       }},
      {"make a stream", nothing, [] { NewStream(); }},
      {"capture and launch a graph", load_and_launch("Small", 1),
       [=] {
         cudaGraph_t graph;
         cudaGraphExec_t executable;
         CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
         launch(1);
         CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
         CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
         CHECK_CUDA(cudaGraphLaunch(executable, stream));
       }},
  };
}

// What a program does with GPU 1, or with both, while a thread loads a module on GPU 0.
std::vector<Case> CasesBetween() {
  static char* memory[2];
  static cudaStream_t streams[2];
  static cudaEvent_t events[2];
  static void* more;
  static std::vector<char> pageable(kHostBytes);
  for (int gpu = 0; gpu < 2; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    CHECK_CUDA(cudaMalloc(&memory[gpu], kHostBytes));
    streams[gpu] = NewStream();
    CHECK_CUDA(cudaEventCreateWithFlags(&events[gpu], cudaEventDisableTiming));
    CHECK_CUDA(cudaEventRecord(events[gpu], streams[gpu]));
  }
  const auto copy = [](int from, int to, int by) {
    return [=] {
      CHECK_CUDA(cudaSetDevice(by));
      CHECK_CUDA(
          cudaMemcpyAsync(memory[to], memory[from], 64, cudaMemcpyDeviceToDevice, streams[by]));
    };
  };
  const auto copy_peer = [](int from, int to, int by) {
    return [=] {
      CHECK_CUDA(cudaSetDevice(by));
      CHECK_CUDA(cudaMemcpyPeerAsync(memory[to], to, memory[from], from, 64, streams[by]));
    };
  };
  const auto wait = [](int event, int by) {
    return [=] {
      CHECK_CUDA(cudaSetDevice(by));
      CHECK_CUDA(cudaStreamWaitEvent(streams[by], events[event], 0));
    };
  };
  const auto on_gpu_1 = [](auto&& act) {
    return [=] {
      CHECK_CUDA(cudaSetDevice(1));
      act();
    };
  };
  const auto allocate = on_gpu_1([] { CHECK_CUDA(cudaMalloc(&more, kBytes)); });
  const auto nothing = [] {};
  return {
      {"nothing", nothing, nothing},
      {"copy from GPU 0 to GPU 1 on a stream of GPU 0", nothing, copy(0, 1, 0)},
      {"copy from GPU 0 to GPU 1 on a stream of GPU 1", nothing, copy(0, 1, 1)},
      {"copy from GPU 1 to GPU 0 on a stream of GPU 0", nothing, copy(1, 0, 0)},
      {"copy from GPU 1 to GPU 0 on a stream of GPU 1", nothing, copy(1, 0, 1)},
      {"the same as a copy between peers, from GPU 0 to GPU 1 on a stream of GPU 0", nothing,
       copy_peer(0, 1, 0)},
      {"from GPU 0 to GPU 1 on a stream of GPU 1", nothing, copy_peer(0, 1, 1)},
      {"from GPU 1 to GPU 0 on a stream of GPU 0", nothing, copy_peer(1, 0, 0)},
      {"from GPU 1 to GPU 0 on a stream of GPU 1", nothing, copy_peer(1, 0, 1)},
      {"let a stream of GPU 0 wait for an event of GPU 1", nothing, wait(1, 0)},
      {"let a stream of GPU 1 wait for an event of GPU 0", nothing, wait(0, 1)},
      {"ask for an event of GPU 0", nothing, on_gpu_1([] { cudaEventQuery(events[0]); })},
      {"wait for an event of GPU 0", nothing, on_gpu_1([] { cudaEventSynchronize(events[0]); })},
      {"ask where memory of GPU 0 is", nothing, on_gpu_1([] {
         cudaPointerAttributes found;
         CHECK_CUDA(cudaPointerGetAttributes(&found, memory[0]));
       })},
      {"allocate memory on GPU 1", nothing, allocate},
      {"free memory of GPU 1", allocate, on_gpu_1([] { CHECK_CUDA(cudaFree(more)); })},
      {"allocate pinned memory", nothing,
       on_gpu_1([] { CHECK_CUDA(cudaHostAlloc(&more, kHostBytes, cudaHostAllocPortable)); })},
      {"copy from GPU 1 to memory that is not pinned", nothing, on_gpu_1([] {
         CHECK_CUDA(cudaMemcpyAsync(pageable.data(), memory[1], kHostBytes, cudaMemcpyDeviceToHost,
                                    streams[1]));
       })},
      {"capture and launch a graph on GPU 1", nothing, on_gpu_1([] {
         cudaGraph_t graph;
         cudaGraphExec_t executable;
         CHECK_CUDA(cudaStreamBeginCapture(streams[1], cudaStreamCaptureModeRelaxed));
         Small<<<1, 32, 0, streams[1]>>>(nullptr);
         CHECK_CUDA(cudaStreamEndCapture(streams[1], &graph));
         CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
         CHECK_CUDA(cudaGraphLaunch(executable, streams[1]));
       })},
      {"make a stream on GPU 1", nothing, on_gpu_1([] { NewStream(); })},
      {"make an event on GPU 1", nothing, on_gpu_1([] {
         cudaEvent_t event;
         CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
       })},
  };
}

// Launches kernels on one GPU, from a thread of its own, until End.
class Launches {
 public:
  explicit Launches(int device) : thread_([this, device] { Run(device); }) {}
  void Restart() { worst_ms_ = 0; }
  // Returns the milliseconds that the longest launch since Restart took on the host.
  double End() {
    stop_ = true;
    thread_.join();
    return worst_ms_;
  }

 private:
  void Run(int device) {
    CHECK_CUDA(cudaSetDevice(device));
    const cudaStream_t stream = NewStream();
    while (!stop_) {
      const double began = Seconds();
      Small<<<1, 32, 0, stream>>>(nullptr);
      CHECK_CUDA(cudaGetLastError());
      const double ms = (Seconds() - began) * 1e3;
      if (ms > worst_ms_) worst_ms_ = ms;
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

  std::atomic<bool> stop_{false};
  std::atomic<double> worst_ms_{0};
  std::thread thread_;  // declared last, since it uses the others
};

JsonObject Measure(const Case& work, int device, int gpus, cudaStream_t waiting, int* go) {
  CHECK_CUDA(cudaSetDevice(device));
  work.prepare();
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<std::unique_ptr<Launches>> beside;
  for (int gpu = 0; gpu < gpus; ++gpu) beside.push_back(std::make_unique<Launches>(gpu));
  // Time for each thread to make a stream and launch for the first time.
  std::this_thread::sleep_for(kSettle);

  volatile int& let_go = *go;
  let_go = 0;
  CHECK_CUDA(cudaSetDevice(0));
  WaitForHost<<<1, 1, 0, waiting>>>(go, kLimitNs);
  CHECK_CUDA(cudaGetLastError());
  std::this_thread::sleep_for(kSettle);
  for (const auto& launches : beside) launches->Restart();

  double ms = 0;
  std::thread thread([&] {
    CHECK_CUDA(cudaSetDevice(device));
    const double began = Seconds();
    work.act();
    ms = (Seconds() - began) * 1e3;
  });
  std::this_thread::sleep_for(kHold);
  let_go = 1;
  thread.join();

  JsonObject row;
  row.Add("what", work.what).Add("gpu", device).Add("ms", ms);
  std::vector<JsonObject> others;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    others.push_back(
        JsonObject().Add("gpu", gpu).Add("ms", beside[static_cast<size_t>(gpu)]->End()));
  }
  for (int gpu = 0; gpu < gpus; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  return row.Add("launches", others);
}

// Measures a case beside a thread that loads a module on GPU 0, where a kernel runs.
JsonObject MeasureBetween(const Case& work, const Modules& modules, cudaStream_t waiting, int* go) {
  work.prepare();
  for (int gpu = 0; gpu < 2; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  Launches beside(1);
  std::this_thread::sleep_for(kSettle);

  volatile int& let_go = *go;
  let_go = 0;
  CHECK_CUDA(cudaSetDevice(0));
  WaitForHost<<<1, 1, 0, waiting>>>(go, kLimitNs);
  CHECK_CUDA(cudaGetLastError());
  std::this_thread::sleep_for(kSettle);
  std::thread loads([&] {
    CHECK_CUDA(cudaSetDevice(0));
    modules.Load();
  });
  std::this_thread::sleep_for(kSettle);
  beside.Restart();

  double ms = 0;
  std::thread thread([&] {
    const double began = Seconds();
    work.act();
    ms = (Seconds() - began) * 1e3;
  });
  std::this_thread::sleep_for(kHold);
  let_go = 1;
  thread.join();
  loads.join();
  JsonObject row;
  row.Add("what", work.what).Add("ms", ms).Add("launches_ms", beside.End());
  for (int gpu = 0; gpu < 2; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  return row;
}

// Measures a case on GPU 0, one of whose streams waits for an event behind a kernel on GPU 1.
JsonObject MeasureBehind(const Case& work, int* go) {
  CHECK_CUDA(cudaSetDevice(1));
  static const cudaStream_t waiting = NewStream();
  cudaEvent_t behind;
  CHECK_CUDA(cudaEventCreateWithFlags(&behind, cudaEventDisableTiming));
  CHECK_CUDA(cudaSetDevice(0));
  static const cudaStream_t after = NewStream();
  work.prepare();
  CHECK_CUDA(cudaDeviceSynchronize());
  Launches on_0(0), on_1(1);
  std::this_thread::sleep_for(kSettle);

  volatile int& let_go = *go;
  let_go = 0;
  CHECK_CUDA(cudaSetDevice(1));
  WaitForHost<<<1, 1, 0, waiting>>>(go, kLimitNs);
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaEventRecord(behind, waiting));
  CHECK_CUDA(cudaSetDevice(0));
  CHECK_CUDA(cudaStreamWaitEvent(after, behind, 0));
  Small<<<1, 32, 0, after>>>(nullptr);
  CHECK_CUDA(cudaGetLastError());
  std::this_thread::sleep_for(kSettle);
  on_0.Restart();
  on_1.Restart();

  double ms = 0;
  std::thread thread([&] {
    CHECK_CUDA(cudaSetDevice(0));
    const double began = Seconds();
    work.act();
    ms = (Seconds() - began) * 1e3;
  });
  std::this_thread::sleep_for(kHold);
  let_go = 1;
  thread.join();
  JsonObject row;
  row.Add("what", work.what).Add("ms", ms);
  row.Add("launches_0_ms", on_0.End()).Add("launches_1_ms", on_1.End());
  for (int gpu = 0; gpu < 2; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  return row;
}

// Enables peer access as JAX does.
void EnablePeers(int gpus) {
  for (int gpu = 0; gpu < gpus; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    for (int peer = 0; peer < gpus; ++peer) {
      if (peer != gpu) CHECK_CUDA(cudaDeviceEnablePeerAccess(peer, 0));
    }
  }
}

void Run(const char* image) {
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  const int gpus = std::min(count, 2);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  Report().Add("device", properties.name).Add("count", gpus);
  Report().Add("hold_ms", static_cast<double>(kHold.count()));
  EnablePeers(gpus);

  Modules modules;
  std::ifstream file(image, std::ios::binary);
  modules.image.assign(std::istreambuf_iterator<char>(file), {});
  if (modules.image.empty()) Fail(std::string("cannot read ") + image);

  CHECK_CUDA(cudaSetDevice(0));
  int* go;
  CHECK_CUDA(cudaHostAlloc(&go, sizeof *go, cudaHostAllocPortable));
  const cudaStream_t waiting = NewStream();
  *go = 1;
  WaitForHost<<<1, 1, 0, waiting>>>(go, 1);
  CHECK_CUDA(cudaDeviceSynchronize());

  std::vector<JsonObject> rows;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    CHECK_CUDA(cudaSetDevice(gpu));
    for (const Case& work : Cases(modules, NewStream())) {
      rows.push_back(Measure(work, gpu, gpus, waiting, go));
    }
  }
  Report().Add("rows", rows);
  if (gpus > 1) {
    std::vector<JsonObject> between;
    for (const Case& work : CasesBetween()) {
      between.push_back(MeasureBetween(work, modules, waiting, go));
    }
    Report().Add("between", between);
    CHECK_CUDA(cudaSetDevice(0));
    std::vector<JsonObject> behind;
    for (const Case& work : Cases(modules, NewStream())) behind.push_back(MeasureBehind(work, go));
    Report().Add("behind", behind);
  }
  std::puts(Report().Text().c_str());
}

}  // namespace
}  // namespace jax_ep::cuda

int main(int argc, char** argv) {
  if (argc != 2) jax_ep::cuda::Fail("usage: launch_waits CUBIN");
  jax_ep::cuda::Run(argv[1]);
}
