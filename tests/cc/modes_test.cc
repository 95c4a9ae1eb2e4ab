// CombineUnpack of rows that are sent one by one, and with a shared expert's rows: sums are in
// order, and nothing is read out of bounds, whatever the tables say.
#include <cstdint>
#include <vector>

#include "check.h"
#include "steps_world.h"

namespace jax_ep {
namespace {

struct Case {
  EpShape shape;
  bool by_entry, weighted, residual;
  int64_t rows;  // of shared_rows, 0 for none
  int32_t part[2];
};

// The buffers of a call at their exact sizes, and what they hold as floats.
class Call {
 public:
  Call(const Case& made, Random& random) : made_(made) {
    const EpShape& shape = made_.shape;
    const CombineMessage message = CombineMessage::Of(shape.row_bytes(), 0, 0);
    slots_ = shape.tokens * (made_.by_entry ? shape.top_k : 1);
    messages_ = shape.ranks * slots_;
    const auto region = CombineRegion::Of(slots_, message.bytes);
    recv_.resize(static_cast<size_t>(shape.ranks * region.bytes));
    for (int64_t rank = 0; rank < shape.ranks; ++rank) {
      uint8_t* from = recv_.data() + rank * region.bytes;
      // Some ranks send too few messages or claim nonsense; what follows must not be read.
      const int64_t said = random.OneIn(4) ? random.In(-3, slots_ + 3) : slots_;
      sent_.push_back(said);
      const auto num_sums = static_cast<int32_t>(said);
      std::memcpy(from + region.num_sums, &num_sums, sizeof num_sums);
      for (int64_t i = 0; i < slots_; ++i) {
        Fill(random, from + region.messages + i * message.bytes, shape.hidden);
      }
    }
    const auto tokens = static_cast<size_t>(shape.tokens * shape.row_bytes());
    output_.resize(tokens), residual_.resize(tokens);
    Fill(random, residual_.data(), shape.tokens * shape.hidden);
    shared_.resize(static_cast<size_t>(made_.rows * shape.row_bytes()));
    Fill(random, shared_.data(), made_.rows * shape.hidden);
    for (int64_t i = 0; i < shape.tokens * shape.top_k; ++i) {
      // One in four is absent or out of range.
      const int64_t wild = random.OneIn(2) ? -1 : messages_ + random.In(0, 1 << 20);
      const int64_t slot = messages_ == 0 || random.OneIn(4) ? wild : random.In(0, messages_ - 1);
      slot_of_.push_back(static_cast<int32_t>(slot));
      weights_.push_back(static_cast<float>(random.In(-9, 9)) * 0x1.08p-3f);
    }
  }

  void Run(Random& random) {
    CombineUnpackStep step{
        {.slot_of = slot_of_.data(), .residual = made_.residual ? residual_.data() : nullptr},
        {made_.by_entry},
        made_.shape,
        ElementType::kFloat32,
        ElementType::kFloat32,
        false,
        0,
        recv_.data(),
        output_.data(),
        nullptr};
    step.entry_weights = made_.weighted ? weights_.data() : nullptr;
    step.shape.recv_rows = made_.rows;
    step.shared_rows = made_.rows > 0 ? shared_.data() : nullptr;
    step.shared_part = made_.part;
    RunTask(cpu::CombineUnpack(step), 2, random);
  }

  void Check() const {
    const EpShape& shape = made_.shape;
    const CombineMessage message = CombineMessage::Of(shape.row_bytes(), 0, 0);
    const auto region = CombineRegion::Of(slots_, message.bytes);
    for (int64_t token = 0; token < shape.tokens; ++token) {
      for (int64_t h = 0; h < shape.hidden; ++h) {
        float sum = 0.0f;
        std::vector<int64_t> seen;
        for (int64_t i = 0; i < shape.top_k; ++i) {
          const int64_t entry = token * shape.top_k + i;
          int64_t slot = slot_of_[static_cast<size_t>(entry)];
          if (!made_.by_entry) slot = Next(token, seen.empty() ? -1 : seen.back());
          if (slot < 0 || slot >= messages_) continue;
          seen.push_back(slot);
          const int64_t rank = slot / slots_, at = slot % slots_;
          if (at >= sent_[static_cast<size_t>(rank)]) continue;
          const uint8_t* from =
              recv_.data() + rank * region.bytes + region.messages + at * message.bytes;
          const float weight = made_.weighted ? weights_[static_cast<size_t>(entry)] : 1.0f;
          const float product = weight * Load(from, h);
          sum = sum + product;
        }
        const int64_t row = token - made_.part[0];
        if (row >= 0 && row < made_.part[1] && row < made_.rows) {
          sum = sum + Load(shared_.data(), row * shape.hidden + h);
        }
        if (made_.residual) sum = sum + Load(residual_.data(), token * shape.hidden + h);
        CHECK(Load(output_.data(), token * shape.hidden + h) == sum);
      }
    }
  }

 private:
  static void Fill(Random& random, uint8_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      StoreElement(to, ElementType::kFloat32, i,
                   static_cast<float>(random.In(-1000, 1000)) * 0x1.234p-7f);
    }
  }
  static float Load(const uint8_t* rows, int64_t index) {
    return LoadElement(rows, ElementType::kFloat32, index);
  }
  // The least of a token's slots above `floor`, or -1.
  int64_t Next(int64_t token, int64_t floor) const {
    int64_t found = -1;
    for (int64_t k = 0; k < made_.shape.top_k; ++k) {
      const int64_t slot = slot_of_[static_cast<size_t>(token * made_.shape.top_k + k)];
      if (slot > floor && slot < messages_ && (found < 0 || slot < found)) found = slot;
    }
    return found;
  }

  Case made_;
  int64_t slots_ = 0, messages_ = 0;  // of one rank, of all ranks
  std::vector<int64_t> sent_;
  std::vector<uint8_t> recv_, output_, residual_, shared_;
  std::vector<int32_t> slot_of_;
  std::vector<float> weights_;
};

void TestSums() {
  Random random(7);
  for (int round = 0; round < 300; ++round) {
    EpShape shape;
    shape.ranks = random.In(1, 4), shape.tokens = random.In(0, 9), shape.top_k = random.In(1, 9);
    shape.hidden = 4 * random.In(1, 300), shape.element_bytes = 4;
    const bool by_entry = random.OneIn(2);
    const Case made{shape,
                    by_entry,
                    by_entry && random.OneIn(2),
                    random.OneIn(2),
                    random.OneIn(2) ? random.In(1, 12) : 0,
                    {static_cast<int32_t>(random.In(-3, 9)),
                     random.OneIn(5) ? INT32_MAX : static_cast<int32_t>(random.In(-2, 12))}};
    Call call(made, random);
    call.Run(random);
    call.Check();
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestSums();
  return 0;
}
