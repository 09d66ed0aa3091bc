// What of a row's global choice a rank holds, from the candidates of all ranks (candidates.h).
//
// Keys are all different, so a candidate is chosen if fewer than top_k are greater: in a rank's own descending list
// those are the first few, and where they end is found by halves. No list is merged.
#include "candidates.h"
#include "indexer.h"
#include "pool.h"
#include "tensor.h"

namespace longspan {
namespace {

struct Merge {
  int64_t rows, width, top_k;
  Shard shard;
  const int64_t* candidates;  // [ranks, rows, width]
  int64_t* out;               // [rows, width]

  const int64_t* list(int64_t rank, int64_t row) const { return candidates + (rank * rows + row) * width; }

  // How many of a list are greater than `key`.
  int64_t greater_than(const int64_t* list, int64_t key) const {
    return std::partition_point(list, list + width, [=](int64_t other) { return other > key; }) - list;
  }

  // How many of the row's own candidates are chosen.
  int64_t chosen(int64_t row) const {
    const int64_t* own = list(shard.rank, row);
    int64_t sure = 0, end = greater_than(own, kNoCandidate);
    while (sure < end) {
      const int64_t middle = (sure + end) / 2;
      int64_t before = middle;
      for (int64_t r = 0; r < shard.size; ++r)
        if (r != shard.rank) before += greater_than(list(r, row), own[middle]);
      if (before < top_k)
        sure = middle + 1;
      else
        end = middle;
    }
    return sure;
  }

  void merge(int64_t row) const {
    int64_t* to = out + row * width;
    for (int64_t r = 0; r < shard.size; ++r)
      if (list(r, row)[0] == kBroken) {
        std::fill_n(to, width, kNoToken);
        to[0] = kNonFinite;
        return;
      }
    const int64_t count = chosen(row), *own = list(shard.rank, row);
    Workspace workspace;
    auto* items = workspace.take<uint64_t>(count);
    uint64_t all = 0;
    for (int64_t i = 0; i < count; ++i) all |= items[i] = shard.own(position_of(own[i]));
    const uint64_t* sorted = sort_by_bits(items, workspace.take<uint64_t>(count), count, 0, std::bit_width(all));
    std::copy_n(sorted, count, to);
    std::fill(to + count, to + width, kNoToken);
  }

  void run(Team& team) const {
    team.claim(rows, 1, [&](int64_t row, int64_t) { merge(row); });
  }
};

void merge_candidates(int64_t rows, int64_t width, const Shard& shard, int64_t top_k, Address candidates,
                      Address out) {
  if (width == 0) return;
  const Merge merge{rows, width, top_k, shard, at<const int64_t>(candidates), at<int64_t>(out)};
  if (rows == 1) return Pool::alone([&](Team& team) { merge.run(team); });
  pool()->run([&](Team& team) { merge.run(team); });
}

}  // namespace

void bind_candidates(nb::module_& m) { m.def("merge_candidates", &merge_candidates, Unlocked()); }

}  // namespace longspan
