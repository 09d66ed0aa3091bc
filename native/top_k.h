// The k best of a stream of scores, chosen while it passes: higher score first, then lower position.
//
// Candidates come in order of position and are kept so: a buffer of 2k and a bit, and a threshold below which
// nothing can be among the k best any more. When the buffer is full, the k-th score is found by halving the
// range of scores until k are above the middle, and the k best move together. So the cost of a score that is
// not chosen is one comparison, and no array is as long as the stream.
//
// The order is total, so a choice among the choices of any parts is the choice of the whole. Scores are
// finite; one that is not sets `broken`.
#pragma once

#include "simd.h"

namespace longspan {

// Whole numbers in the order of the floats, and back.
inline int32_t ordered(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
inline float unordered(int32_t bits) { return std::bit_cast<float>(bits ^ (bits >> 31 & 0x7fffffff)); }

class TopK {
 public:
  static constexpr int64_t kMostAtOnce = 64;
  static int64_t capacity(int64_t k) { return 2 * k + 2 * kMostAtOnce; }

  // Either array has room for capacity(k).
  TopK(int64_t k, float* scores, int32_t* positions) : k_(k), scores_(scores), positions_(positions) {}

  // `count` <= kMostAtOnce scores of positions first, first + 1, ...; read up to the next multiple of 16.
  void offer(const float* scores, int32_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes)
      offer(load(scores + i), lane_index() + int32_t(first + i), lanes_below(count - i));
    if (size_ > 2 * k_) shrink();
  }

  // What another choice kept, all of it of higher positions.
  void offer(const float* scores, const int32_t* positions, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      Ints at;
      std::memcpy(&at, positions + i, sizeof at);
      offer(load(scores + i), at, lanes_below(count - i));
      if (size_ > 2 * k_) shrink();
    }
  }

  // Leaves the k best, or as many as there were.
  void finish() {
    if (size_ > k_) shrink();
  }

  int64_t size() const { return size_; }
  const float* scores() const { return scores_; }
  const int32_t* positions() const { return positions_; }
  bool broken() const { return broken_; }
  void set_broken() { broken_ = true; }

 private:
  static uint32_t lanes_below(int64_t count) { return count < kLanes ? (1u << count) - 1 : 0xffffu; }

  void offer(Floats scores, Ints positions, uint32_t seen) {
    const Floats size = max(scores, -scores);
    broken_ |= (seen & ~greater(broadcast(INFINITY), size)) != 0;
    const uint32_t better = seen & greater(scores, broadcast(threshold_));
    if (better) append(scores, positions, better);
  }

  void append(Floats scores, Ints positions, uint32_t chosen) {
    compress(scores_ + size_, scores, chosen);
    compress(positions_ + size_, positions, chosen);
    size_ += std::popcount(chosen);
  }

  int64_t count_above(float x) const {
    const Floats bound = broadcast(x);
    Ints counts[4] = {};
    for (int64_t i = 0; i < size_; i += 4 * kLanes)
      for (int j = 0; j < 4; ++j) counts[j] -= Ints(load(scores_ + i + j * kLanes) > bound);
    const Ints all = counts[0] + counts[1] + (counts[2] + counts[3]);
    int64_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += all[i];
    return total;
  }

  void shrink() {
    for (int64_t i = size_; i % kMostAtOnce; ++i) scores_[i] = -INFINITY;
    Floats peak = broadcast(-INFINITY);
    for (int64_t i = 0; i < size_; i += kLanes) peak = max(peak, load(scores_ + i));
    // At least k scores are above `low`, fewer than k above `high`.
    int64_t low = floor_, high = ordered(max_lane(peak)), above_low = size_, above_high = 0;
    while (above_low != k_ && high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      const int64_t above = count_above(unordered(int32_t(middle)));
      (above >= k_ ? low : high) = middle;
      (above >= k_ ? above_low : above_high) = above;
    }
    // All above `low` are wanted, or it and `high` are neighbours: then of those equal to `high` the first few.
    const bool exact = above_low == k_;
    int64_t room = exact ? 0 : k_ - above_high;
    const Floats lower = broadcast(unordered(int32_t(low)));
    const Floats cut = exact ? lower : broadcast(unordered(int32_t(high)));
    const int64_t count = size_;
    size_ = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Floats scores = load(scores_ + i);
      Ints positions;
      std::memcpy(&positions, positions_ + i, sizeof positions);
      const uint32_t better = greater(scores, cut);
      uint32_t equal = room ? greater(scores, lower) & ~better : 0;
      while (std::popcount(equal) > room) equal ^= std::bit_floor(equal);
      room -= std::popcount(equal);
      append(scores, positions, better | equal);
    }
    floor_ = int32_t(low);
    threshold_ = cut[0];
  }

  const int64_t k_;
  float* const scores_;
  int32_t* const positions_;
  int64_t size_ = 0;
  float threshold_ = -INFINITY;              // what is not above it has no chance
  int32_t floor_ = ordered(-INFINITY);       // what is kept is above it
  bool broken_ = false;
};

}  // namespace longspan
