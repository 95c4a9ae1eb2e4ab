// A PutAccess that does the worst that protocol/internode.h allows: a thread delivers pieces of
// puts and signals late and in random order, reads a put's source only when it delivers, and hides
// what has arrived until somebody settles. Used by internode_test.cc.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"

namespace jax_ep {

class AdversePuts {
 public:
  // `blocks` are by rank and must outlive this object.
  AdversePuts(std::vector<uint8_t*> blocks, uint64_t seed)
      : blocks_(std::move(blocks)),
        landed_(blocks_.size()),
        random_(seed),
        thread_([this] { Run(); }) {}
  ~AdversePuts() {
    ending_.store(true);
    thread_.join();
  }

  // What one thread of `rank` uses. It must live until its pieces have arrived.
  class Lane {
   public:
    Lane(AdversePuts& puts, uint32_t rank, bool fences, bool settles)
        : puts_(puts), rank_(rank), fences_(fences), settles_(settles) {}

    void Put(uint32_t rank, int64_t at, const void* from, int64_t bytes) const {
      puts_.Add({this, rank, fenced_, at, static_cast<const uint8_t*>(from), bytes, 0});
    }
    void Fence() const { fenced_ += fences_; }
    void Signal(uint32_t rank, int64_t at, uint64_t value) const {
      puts_.Add({this, rank, fenced_, at, nullptr, 0, value});
    }
    void Settle() const {
      if (settles_) puts_.Settle(rank_);
    }

   private:
    AdversePuts& puts_;
    const uint32_t rank_;
    const bool fences_, settles_;
    mutable uint64_t fenced_ = 0;
  };

 private:
  struct Piece {
    const Lane* lane;
    uint32_t rank;
    uint64_t fenced;  // how many fences its lane made before it
    int64_t at;
    const uint8_t* from;  // nullptr: a signal
    int64_t bytes;
    uint64_t value;
  };
  // A piece of a put that has reached its destination but is not visible yet.
  struct Landed {
    int64_t at;
    std::vector<uint8_t> bytes;
  };

  void Add(Piece piece) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (piece.bytes > 0) {
      Piece first = piece;
      first.bytes = random_.OneIn(2) ? piece.bytes : random_.In(1, piece.bytes);
      pieces_.push_back(first);
      piece.at += first.bytes;
      piece.from += first.bytes;
      piece.bytes -= first.bytes;
    }
    if (piece.from == nullptr) pieces_.push_back(piece);
  }

  void Settle(uint32_t rank) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Landed& landed : landed_[rank]) {
      std::memcpy(blocks_[rank] + landed.at, landed.bytes.data(), landed.bytes.size());
    }
    landed_[rank].clear();
  }

  // A signal waits for everything that its lane issued before the lane's last fence.
  bool MayArrive(const Piece& piece) const {
    if (piece.from != nullptr) return true;
    for (const Piece& other : pieces_) {
      if (other.lane == piece.lane && other.rank == piece.rank && other.fenced < piece.fenced) {
        return false;
      }
    }
    return true;
  }

  void Run() {
    for (;;) {
      bool rests;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (pieces_.empty() && ending_.load()) return;
        const auto last = static_cast<int64_t>(pieces_.size()) - 1;
        const auto index = last < 0 ? 0 : static_cast<size_t>(random_.In(0, last));
        if (last >= 0 && MayArrive(pieces_[index])) {
          std::swap(pieces_[index], pieces_.back());
          const Piece piece = pieces_.back();
          pieces_.pop_back();
          Deliver(piece);
        }
        rests = last < 0 || random_.OneIn(16);
      }
      if (rests) std::this_thread::yield();
    }
  }

  void Deliver(const Piece& piece) {
    uint8_t* to = blocks_[piece.rank] + piece.at;
    if (piece.from != nullptr && random_.OneIn(2)) {
      landed_[piece.rank].push_back({piece.at, {piece.from, piece.from + piece.bytes}});
      return;
    }
    if (piece.from != nullptr) {
      std::memcpy(to, piece.from, static_cast<size_t>(piece.bytes));
      return;
    }
    // Release; pairs with Acquire of the waiting thread.
    std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(to))
        .store(piece.value, std::memory_order_release);
  }

  const std::vector<uint8_t*> blocks_;
  std::vector<std::vector<Landed>> landed_;  // by rank
  std::mutex mutex_;
  Random random_;
  std::vector<Piece> pieces_;
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

}  // namespace jax_ep
