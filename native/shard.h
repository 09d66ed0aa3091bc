// Which tokens of a sequence the pages at hand hold, as ops/shard.py has it: runs of `interleave` tokens go round
// the ranks, and a rank counts its own tokens from 0. A whole sequence is the shard of one rank.
#pragma once

#include <algorithm>
#include <cstdint>

namespace longspan {

struct Shard {
  int64_t rank, size, interleave;

  int64_t cycle() const { return size * interleave; }

  // Own tokens among the first n.
  int64_t count(int64_t n) const {
    return n / cycle() * interleave + std::clamp<int64_t>(n % cycle() - rank * interleave, 0, interleave);
  }

  // Where an own token lies in its sequence, and back. Narrow divisions: they are made for thousands a row.
  uint32_t position(uint32_t local) const {
    const uint32_t run = uint32_t(interleave);
    return local / run * uint32_t(cycle()) + uint32_t(rank) * run + local % run;
  }
  uint32_t local(uint32_t position) const {
    const uint32_t run = uint32_t(interleave);
    return position / uint32_t(cycle()) * run + position % run;
  }
};

}  // namespace longspan
