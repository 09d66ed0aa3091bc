// Which tokens of a sequence the pages at hand hold, as ops/shard.py has it: runs of `interleave` tokens go round
// the ranks, and a rank counts its own tokens from 0. A whole sequence is the shard of one rank.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace longspan {

class Shard {
 public:
  const int64_t rank, size;

  Shard(int64_t rank, int64_t size, int64_t interleave)
      : rank(rank),
        size(size),
        run_(uint32_t(interleave)),
        others_(uint32_t((size - 1) * interleave)),
        before_(uint32_t(rank * interleave)),
        shift_(std::has_single_bit(run_) ? std::countr_zero(run_) : -1) {}

  // Own tokens among the first n.
  int64_t count(int64_t n) const {
    const int64_t turn = run_ + others_;
    return n / turn * run_ + std::clamp<int64_t>(n % turn - before_, 0, run_);
  }

  // Where an own token lies in its sequence, and back. Asked for thousands of tokens a row, so without divisions
  // where that can be.
  uint32_t position(uint32_t own) const {
    return own + (shift_ < 0 ? own / run_ : own >> shift_) * others_ + before_;
  }
  uint32_t own(uint32_t position) const { return position - position / (run_ + others_) * others_ - before_; }

 private:
  const uint32_t run_, others_, before_;  // tokens of a rank in a turn, of all others, of those before this one
  const int shift_;
};

}  // namespace longspan
