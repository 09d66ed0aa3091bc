// The best tokens of a row among those that a rank holds, as ops/indexer.py packs them: one whole number for score
// and position, the greater the better.
//
//     key = order(score) << 32 | (2^32 - 1 - position)        order: whole numbers in the order of the floats
//
// A list is descending and padded with kNoCandidate; kBroken comes first where a score was not finite.
#pragma once

#include <algorithm>
#include <limits>

#include "shard.h"
#include "top_k.h"
#include "workspace.h"

namespace longspan {

constexpr int64_t kNoCandidate = std::numeric_limits<int64_t>::min();
constexpr int64_t kBroken = std::numeric_limits<int64_t>::max();

inline int64_t candidate(int32_t order, uint32_t position) { return int64_t(order) << 32 | ~position; }
inline uint32_t position_of(int64_t candidate) { return ~uint32_t(candidate); }

// Sorts n items, ascending by the `bits` bits from bit `first` on; equal ones stay in order. Byte after byte, to and
// fro between `items` and `spare`: returns where they end up.
inline uint64_t* sort_by_bits(uint64_t* items, uint64_t* spare, int64_t n, int first, int bits) {
  for (const int end = first + bits; first < end; first += 8) {
    uint32_t place[257] = {};
    for (int64_t i = 0; i < n; ++i) ++place[(items[i] >> first & 255) + 1];
    for (int digit = 0; digit < 255; ++digit) place[digit + 1] += place[digit];
    for (int64_t i = 0; i < n; ++i) spare[place[items[i] >> first & 255]++] = items[i];
    std::swap(items, spare);
  }
  return items;
}

// A choice that is finished -> its candidates.
inline void pack(const TopK& best, const Shard& shard, int64_t* list) {
  const int64_t n = best.size();
  if (n == 0) return;
  Workspace workspace;
  auto* items = workspace.take<uint64_t>(n);
  auto* orders = workspace.take<int32_t>(n);
  for (int64_t i = 0; i < n; ++i) orders[i] = ordered(best.scores()[i] + 0.0f);  // of -0, the same as of 0
  const auto [lowest, highest] = std::minmax_element(orders, orders + n);
  const int64_t most = *highest;
  const int bits = std::bit_width(uint64_t(most - *lowest));
  // Positions ascend, and so they do among equal scores.
  for (int64_t i = 0; i < n; ++i)
    items[i] = uint64_t(most - orders[i]) << 32 | shard.position(uint32_t(best.positions()[i]));
  const uint64_t* sorted = sort_by_bits(items, workspace.take<uint64_t>(n), n, 32, bits);
  for (int64_t i = 0; i < n; ++i) list[i] = candidate(int32_t(most - int64_t(sorted[i] >> 32)), uint32_t(sorted[i]));
}

}  // namespace longspan
