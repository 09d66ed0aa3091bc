// The best tokens of a row among those that a rank holds, as ops/indexer.py packs them: one whole number for score
// and position, the greater the better.
//
//     key = order(score) << 32 | (2^32 - 1 - position)        order: whole numbers in the order of the floats
//
// A list is descending and padded with kNoCandidate; kBroken comes first where a score was not finite.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "shard.h"
#include "top_k.h"
#include "workspace.h"

namespace longspan {

constexpr int64_t kNoCandidate = std::numeric_limits<int64_t>::min();
constexpr int64_t kBroken = std::numeric_limits<int64_t>::max();

inline int64_t candidate(int32_t order, uint32_t position) { return int64_t(order) << 32 | ~position; }
inline uint32_t position_of(int64_t candidate) { return ~uint32_t(candidate); }

// Sorts n < 2^32 items, ascending by the `bits` <= 32 bits from bit `first` on; equal ones stay in order. Byte after
// byte, to and fro between `items` and `spare`: returns where they end up.
inline uint64_t* sort_by_bits(uint64_t* items, uint64_t* spare, int64_t n, int first, int bits) {
  const int bytes = (bits + 7) / 8;
  uint32_t places[4][256] = {};
  const auto byte_of = [=](uint64_t item, int byte) { return item >> (first + 8 * byte) & 255; };
  for (int64_t i = 0; i < n; ++i)
    for (int byte = 0; byte < 4; ++byte) ++places[byte][byte_of(items[i], byte)];
  for (int byte = 0; byte < bytes; ++byte) {
    uint32_t* place = places[byte];
    for (uint32_t value = 0, before = 0; value < 256; ++value) before += std::exchange(place[value], before);
    for (int64_t i = 0; i < n; ++i) spare[place[byte_of(items[i], byte)]++] = items[i];
    std::swap(items, spare);
  }
  return items;
}

// A choice that is finished -> its candidates.
inline void pack(const TopK& best, const Shard& shard, int64_t* list) {
  const int64_t n = best.size();
  Workspace workspace;
  auto* items = workspace.take<uint64_t>(n);
  auto* orders = workspace.take<int32_t>(n);
  int32_t least = std::numeric_limits<int32_t>::max(), most = std::numeric_limits<int32_t>::min();
  for (int64_t i = 0; i < n; ++i) {
    orders[i] = ordered(best.scores()[i] + 0.0f);  // of -0, the same as of 0
    least = std::min(least, orders[i]);
    most = std::max(most, orders[i]);
  }
  // Below the best, so that fewer bits differ. Positions ascend, and so they do among equal scores.
  for (int64_t i = 0; i < n; ++i)
    items[i] = uint64_t(uint32_t(most) - uint32_t(orders[i])) << 32 | shard.position(uint32_t(best.positions()[i]));
  const int bits = std::bit_width(uint32_t(most) - uint32_t(least));
  const uint64_t* sorted = sort_by_bits(items, workspace.take<uint64_t>(n), n, 32, bits);
  for (int64_t i = 0; i < n; ++i)
    list[i] = candidate(int32_t(uint32_t(most) - uint32_t(sorted[i] >> 32)), uint32_t(sorted[i]));
}

}  // namespace longspan
