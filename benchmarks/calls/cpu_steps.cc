// Times the CPU steps of the collective transport on one thread against memcpy, and prints JSON.
// benchmarks/calls/cpu_steps.py builds and runs it and says how bytes are counted.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/denormals.h"
#include "cpu/steps.h"
#include "formats/combine_wire.h"
#include "formats/registry.h"
#include "protocol/layout.h"

namespace jax_ep {
namespace {

constexpr int64_t kRanks = 4;
constexpr int64_t kExperts = 256;
constexpr int64_t kTopK = 8;
constexpr int64_t kHidden = 7168;
constexpr int64_t kRowBytes = kHidden * 2;
constexpr int64_t kPageBytes = 4096;

// Memory that has been written before the clock starts, on ordinary pages.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : bytes_(RoundUp(std::max<int64_t>(bytes, 1), kPageBytes)),
        data_(static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, static_cast<size_t>(bytes_)))) {
    if (data_ == nullptr) {
      std::fprintf(stderr, "cpu_steps: needs %lld more bytes of memory\n",
                   static_cast<long long>(bytes_));
      std::exit(1);
    }
    std::memset(data_.get(), 0, static_cast<size_t>(bytes_));
  }
  uint8_t* data() const { return data_.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  void FillBFloat16(std::mt19937_64& random) {
    auto* values = as<uint16_t>();
    for (int64_t i = 0; i < bytes_ / 2; ++i) {
      values[i] = static_cast<uint16_t>(0x3E00 + (random() & 0x81FF));  // 0.125 to 2, both signs
    }
  }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  int64_t bytes_;
  std::unique_ptr<uint8_t, Free> data_;
};

struct Copy {
  uint8_t* to;
  const uint8_t* from;
};

// A step to measure: how to start it, how many payload rows it must read and write, and, for steps
// that only copy, each of its copies.
struct Measured {
  std::string name;
  int64_t rows_read;
  int64_t rows_written;
  int64_t written_row_bytes;
  std::function<cpu::RowTask()> start;
  std::vector<Copy> copies;
};

struct Times {
  std::vector<double> step, memcpy_once, memcpy_rows;
};

// The thread's CPU time: equal to wall time on an idle machine, and without what other processes
// take on a busy one.
double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double Seconds(const std::function<void()>& work) {
  const double begin = ThreadSeconds();
  work();
  return ThreadSeconds() - begin;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

// Rank 0 of the group, with T tokens per rank. It is the source in pack and combine_unpack, and in
// unpack and combine_pack the destination of what all ranks packed.
class Bench {
 public:
  Bench(int64_t tokens, std::mt19937_64& random) : random_(random), T_(tokens) {
    shape_ = {.ranks = kRanks,
              .local_experts = kExperts / kRanks,
              .tokens = tokens,
              .top_k = kTopK,
              .hidden = kHidden,
              .element_bytes = 2,
              .recv_rows = RoundUp(tokens * kTopK * 5 / 4, 128)};
    tokens_.FillBFloat16(random);
    combine_recv_.FillBFloat16(random);
    // One call's messages: every rank sends a sum for each of its slots.
    const auto num_sums = static_cast<int32_t>(T_);
    for (int64_t source = 0; source < kRanks; ++source) {
      uint8_t* region = combine_recv_.data() + source * combine_region_.bytes;
      std::memset(region, 0, static_cast<size_t>(combine_region_.messages));
      std::memcpy(region + combine_region_.num_sums, &num_sums, sizeof num_sums);
    }
    expert_out_.FillBFloat16(random);
  }

  void DrawRouting() {
    // Rank 0 goes last, so that its own steps find its tables.
    for (int64_t source = kRanks - 1; source >= 0; --source) {
      DrawIds();
      RunAll(StartDispatchPack());
      std::memcpy(recv_.data() + source * region_, send_.data(), static_cast<size_t>(region_));
    }
    RunAll(StartDispatchUnpack());
  }

  // Must be called after DrawRouting.
  std::vector<Measured> Steps() {
    const auto* slot_of = slot_of_.as<int32_t>();
    const auto* row_of = row_of_.as<int32_t>();
    std::vector<Copy> packed, unpacked;
    for (int64_t token = 0; token < T_; ++token) {
      const int32_t* slots = slot_of + token * kTopK;
      for (int64_t k = 0; k < kTopK; ++k) {
        if (std::find(slots, slots + k, slots[k]) != slots + k) continue;
        packed.push_back({send_.data() + MessageAt(slots[k]), tokens_.data() + token * kRowBytes});
      }
    }
    int64_t slots_read = 0;
    for (int64_t slot = 0; slot < kRanks * T_; ++slot) {
      const size_t before = unpacked.size();
      for (int64_t k = 0; k < kTopK; ++k) {
        const int32_t row = row_of[slot * kTopK + k];
        if (row < 0) continue;
        unpacked.push_back({rows_.data() + row * kRowBytes, recv_.data() + MessageAt(slot)});
      }
      slots_read += unpacked.size() > before;
    }
    const auto sent = static_cast<int64_t>(packed.size());
    const auto received = static_cast<int64_t>(unpacked.size());
    std::vector<Measured> steps{
        {"pack", T_, sent, kRowBytes, [this] { return StartDispatchPack(); }, std::move(packed)},
        {"unpack", slots_read, received, kRowBytes, [this] { return StartDispatchUnpack(); },
         std::move(unpacked)},
        {"combine_pack",
         received,
         slots_read,
         kRowBytes,
         [this] { return StartCombinePack(); },
         {}},
        {"combine_unpack", sent, T_, kRowBytes, [this] { return StartCombineUnpack(); }, {}}};
    ForEachFormat([&]<typename Format>(Format) {
      if constexpr (QuantizedFormat<Format>) {
        steps.push_back({std::string("pack ") + Format::kName,
                         T_,
                         sent,
                         Format::PayloadBytes(kHidden, 2) + Format::ScaleBytes(kHidden),
                         [this] { return StartDispatchPack<Format>(); },
                         {}});
      }
    });
    return steps;
  }

  static int64_t BytesOf(const Measured& step) {
    return step.rows_read * kRowBytes + step.rows_written * step.written_row_bytes;
  }
  // One contiguous memcpy that reads and writes as many bytes as the step.
  void MemcpyOnce(const Measured& step) {
    std::memcpy(copy_to_.data(), copy_from_.data(), static_cast<size_t>(BytesOf(step) / 2));
  }

  static void RunAll(const cpu::RowTask& task) { task.run(0, task.items); }

 private:
  int64_t MessageAt(int64_t flat_slot) const {
    return flat_slot / T_ * region_ + header_.bytes + flat_slot % T_ * message_.bytes;
  }

  void DrawIds() {
    std::vector<int32_t> experts(kExperts);
    for (int32_t e = 0; e < kExperts; ++e) experts[static_cast<size_t>(e)] = e;
    for (int64_t token = 0; token < T_; ++token) {
      for (int64_t k = 0; k < kTopK; ++k) {
        const auto other =
            k + static_cast<int64_t>(random_() % static_cast<uint64_t>(kExperts - k));
        std::swap(experts[static_cast<size_t>(k)], experts[static_cast<size_t>(other)]);
      }
      std::copy_n(experts.data(), kTopK, ids_.as<int32_t>() + token * kTopK);
    }
  }

  template <typename Format = Bf16Format>
  cpu::RowTask StartDispatchPack() {
    return cpu::DispatchPack<Format>({{},
                                      shape_,
                                      ElementType::kBFloat16,
                                      tokens_.data(),
                                      ids_.as<int32_t>(),
                                      weights_.as<float>(),
                                      &input_scale_,
                                      send_.data(),
                                      slot_of_.as<int32_t>(),
                                      position_.as<int32_t>(),
                                      &num_invalid_,
                                      nullptr});
  }
  cpu::RowTask StartDispatchUnpack() {
    return cpu::DispatchUnpack<Bf16Format>(
        {{rows_.data(), nullptr, row_offsets_.as<int32_t>(), group_sizes_.as<int32_t>(),
          expert_counts_.as<int32_t>(), expert_ids_.as<int32_t>(), nullptr, src_info_.as<int32_t>(),
          router_weights_.as<float>(), &num_dropped_, row_of_.as<int32_t>(),
          row_slot_.as<int32_t>(), slot_counts_.as<int32_t>()},
         {false, ScaleLayout::kRows},
         shape_,
         recv_.data(),
         row_base_.as<int32_t>()});
  }
  cpu::RowTask StartCombinePack() {
    return cpu::CombinePack({{expert_out_.data(), router_weights_.as<float>(), nullptr,
                              row_of_.as<int32_t>(), slot_counts_.as<int32_t>()},
                             {},
                             shape_,
                             ElementType::kBFloat16,
                             ElementType::kBFloat16,
                             false,
                             0,
                             combine_send_.data()});
  }
  cpu::RowTask StartCombineUnpack() {
    return cpu::CombineUnpack({{.slot_of = slot_of_.as<int32_t>()},
                               {},
                               shape_,
                               ElementType::kBFloat16,
                               ElementType::kBFloat16,
                               false,
                               0,
                               combine_recv_.data(),
                               output_.data(),
                               nullptr});
  }

  std::mt19937_64& random_;
  const int64_t T_;
  EpShape shape_;
  const RegionHeader header_ = RegionHeader::Of(kExperts / kRanks);
  const DispatchMessage message_ = DispatchMessage::Of(kRowBytes, 0, kTopK);
  const int64_t region_ = header_.bytes + T_ * message_.bytes;
  const CombineRegion combine_region_ =
      CombineRegion::Of(T_, CombineMessageOf(kHidden, ElementType::kBFloat16, false, 0).bytes);
  const int64_t rows_at_most_ = RoundUp(T_ * kTopK * 5 / 4, 128);
  const int64_t copy_bytes_ = (rows_at_most_ + kRanks * T_) * kRowBytes / 2;
  Memory tokens_{T_ * kRowBytes}, ids_{T_ * kTopK * 4}, weights_{T_ * kTopK * 4};
  Memory send_{kRanks * region_}, recv_{kRanks * region_};
  Memory slot_of_{T_ * kTopK * 4}, position_{T_ * kTopK * 4};
  Memory rows_{rows_at_most_ * kRowBytes}, expert_out_{rows_at_most_ * kRowBytes};
  Memory src_info_{rows_at_most_ * 12}, router_weights_{rows_at_most_ * 4};
  Memory row_slot_{rows_at_most_ * 4}, row_of_{kRanks * T_ * kTopK * 4};
  Memory row_offsets_{kExperts * 4}, group_sizes_{kExperts * 4}, expert_counts_{kExperts * 4};
  Memory expert_ids_{kExperts * 4}, slot_counts_{kRanks * 4}, row_base_{kExperts * 4};
  Memory combine_send_{kRanks * combine_region_.bytes};
  Memory combine_recv_{kRanks * combine_region_.bytes};
  Memory output_{T_ * kRowBytes};
  Memory copy_from_{copy_bytes_}, copy_to_{copy_bytes_};
  const float input_scale_ = 448.0f;
  int32_t num_invalid_ = 0, num_dropped_ = 0;
};

// Compares times that were measured right after each other: `ratio` is the median over repeats of
// memcpy's time over the step's.
void Print(int64_t tokens, const Measured& step, const Times& times, bool last) {
  std::vector<double> ratios, row_ratios;
  for (size_t i = 0; i < times.step.size(); ++i) {
    ratios.push_back(times.memcpy_once[i] / times.step[i]);
    if (!step.copies.empty()) row_ratios.push_back(times.memcpy_rows[i] / times.step[i]);
  }
  const auto bytes = static_cast<double>(Bench::BytesOf(step));
  std::printf(
      "    {\"tokens\": %lld, \"step\": \"%s\", \"rows_read\": %lld, "
      "\"rows_written\": %lld, \"step_us\": %.1f, \"memcpy_us\": %.1f, ",
      static_cast<long long>(tokens), step.name.c_str(), static_cast<long long>(step.rows_read),
      static_cast<long long>(step.rows_written), Median(times.step) * 1e6,
      Median(times.memcpy_once) * 1e6);
  if (!row_ratios.empty()) {
    std::printf("\"memcpy_rows_us\": %.1f, \"ratio_to_memcpy_rows\": %.3f, ",
                Median(times.memcpy_rows) * 1e6, Median(row_ratios));
  }
  std::printf("\"gb_per_s\": %.2f, \"ratio\": %.3f, \"ratio_low\": %.3f, \"ratio_high\": %.3f}%s\n",
              bytes / Median(times.step) / 1e9, Median(ratios),
              *std::min_element(ratios.begin(), ratios.end()),
              *std::max_element(ratios.begin(), ratios.end()), last ? "" : ",");
}

void Run(int64_t tokens, int draws, int repeats, std::mt19937_64& random, bool last) {
  Bench bench(tokens, random);
  std::vector<Measured> steps;
  std::vector<Times> times;
  for (int draw = 0; draw < draws; ++draw) {
    bench.DrawRouting();
    steps = bench.Steps();
    times.resize(steps.size());
    for (size_t i = 0; i < steps.size(); ++i) {
      const Measured& step = steps[i];
      for (int repeat = -1; repeat < repeats; ++repeat) {
        const double took = Seconds([&] { Bench::RunAll(step.start()); });
        const double once = Seconds([&] { bench.MemcpyOnce(step); });
        const double by_row = Seconds([&] {
          for (const Copy& copy : step.copies) std::memcpy(copy.to, copy.from, kRowBytes);
        });
        if (repeat < 0) continue;  // warms up
        times[i].step.push_back(took);
        times[i].memcpy_once.push_back(once);
        times[i].memcpy_rows.push_back(by_row);
      }
    }
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    Print(tokens, steps[i], times[i], last && i + 1 == steps.size());
  }
}

}  // namespace
}  // namespace jax_ep

// cpu_steps SEED DRAWS REPEATS T...: draws the routing DRAWS times and measures each draw REPEATS
// times.
int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "usage: cpu_steps SEED DRAWS REPEATS TOKENS...\n");
    return 2;
  }
  std::mt19937_64 random(std::strtoull(argv[1], nullptr, 10));
  const jax_ep::cpu::ScopedDenormals denormals;
  std::printf(
      "{\n  \"ranks\": %lld, \"experts\": %lld, \"top_k\": %lld, \"hidden\": %lld, "
      "\"element_bytes\": 2,\n  \"results\": [\n",
      static_cast<long long>(jax_ep::kRanks), static_cast<long long>(jax_ep::kExperts),
      static_cast<long long>(jax_ep::kTopK), static_cast<long long>(jax_ep::kHidden));
  for (int i = 4; i < argc; ++i) {
    jax_ep::Run(std::atoll(argv[i]), std::atoi(argv[2]), std::atoi(argv[3]), random, i + 1 == argc);
  }
  std::printf("  ]\n}\n");
  return 0;
}
