// What a step computes, as ops/batch.py has it, in the form all layers of the step share: built once a step.
#pragma once

#include <algorithm>
#include <vector>

#include "shard.h"
#include "tensor.h"

namespace longspan {

// Rows begin .. end of one sequence that are worked on together.
struct RowBlock {
  int64_t seq, begin, end;
};

// Rows of one sequence.
struct Piece {
  int64_t seq, first, count;
};

// Neighbouring rows of a step. What an operator makes of one segment on its way stays in cache.
struct Segment {
  static constexpr int64_t kRows = 512;
  static constexpr int64_t kCut = 64;  // sequences are cut at multiples of this from their first row

  int64_t first, count;
  std::vector<Piece> pieces;  // most rows first
};

struct Batch {
  int64_t tokens = 0, seqs = 0;
  const int64_t* query_starts;   // [seqs + 1]
  const int64_t* context_lens;   // [seqs]
  const int64_t* block_tables;   // [seqs, >= pages in use], rows `table_stride` apart
  int64_t table_stride = 0;
  const int64_t* slot_mapping;   // [tokens]
  const int64_t* state_slots;    // [seqs]
  Shard shard;                   // of each sequence, what the pages hold
  std::vector<int64_t> row_seq;  // [tokens] the sequence of each row
  std::vector<int64_t> context;  // [tokens] how many tokens of its sequence the row may look at, itself included
  std::vector<int64_t> visible;  // [tokens] how many of those the pages hold
  std::vector<Segment> segments;  // all rows

  Batch(int64_t tokens, int64_t seqs, Address query_starts, Address context_lens, Address block_tables,
        int64_t table_stride, Address slot_mapping, Address state_slots, Shard shard)
      : tokens(tokens),
        seqs(seqs),
        query_starts(at<const int64_t>(query_starts)),
        context_lens(at<const int64_t>(context_lens)),
        block_tables(at<const int64_t>(block_tables)),
        table_stride(table_stride),
        slot_mapping(at<const int64_t>(slot_mapping)),
        state_slots(at<const int64_t>(state_slots)),
        shard(shard),
        row_seq(tokens),
        context(tokens),
        visible(tokens) {
    for (int64_t s = 0; s < seqs; ++s)
      for (int64_t row = this->query_starts[s]; row < this->query_starts[s + 1]; ++row) {
        row_seq[row] = s;
        context[row] = this->context_lens[s] + row - this->query_starts[s] + 1;
        visible[row] = shard.count(context[row]);
      }
    for (int64_t first = 0; first < tokens; first += segments.back().count) segments.push_back(segment_from(first));
  }

  const int64_t* table(int64_t seq) const { return block_tables + seq * table_stride; }
  int64_t length(int64_t seq) const { return query_starts[seq + 1] - query_starts[seq]; }

  // The rows with more than top_k tokens up to them, in blocks of at most kScoredRows. One top_k a step: kept.
  static constexpr int64_t kScoredRows = 8;
  const std::vector<RowBlock>& scored(int64_t top_k) {
    if (scored_top_k_ == top_k) return scored_;
    scored_top_k_ = top_k;
    scored_.clear();
    for (int64_t s = 0; s < seqs; ++s) {
      const int64_t end = query_starts[s + 1];
      int64_t row = query_starts[s] + std::max<int64_t>(0, top_k - context_lens[s]);
      for (; row < end; row += kScoredRows) scored_.push_back({s, row, std::min(row + kScoredRows, end)});
    }
    return scored_;
  }

 private:
  Segment segment_from(int64_t first) const {
    int64_t end = std::min(first + Segment::kRows, tokens);
    if (end < tokens) end -= (end - query_starts[row_seq[end]]) % Segment::kCut;
    Segment segment{first, end - first, {}};
    for (int64_t row = first; row < end;) {
      const int64_t stop = std::min(query_starts[row_seq[row] + 1], end);
      segment.pieces.push_back({row_seq[row], row, stop - row});
      row = stop;
    }
    std::stable_sort(segment.pieces.begin(), segment.pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.count > b.count; });
    return segment;
  }

  int64_t scored_top_k_ = -1;
  std::vector<RowBlock> scored_;
};

}  // namespace longspan
