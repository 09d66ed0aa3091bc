// The lightning indexer, as ops/indexer.py has it: which cached tokens each row may attend to.
//
//     score[t, s] = sum_h w[t, h] * relu( qI[t, h] . kI[s] / sqrt(Di) )      s <= position of t
//     out[t]      = the positions of the top_k best, ascending, ties to the lower position
//                   or, where the pages hold a shard of the sequence, the best of it as candidates.h has them
//
// Rows that see no more than top_k tokens take them all, unscored. The others go in blocks of rows of one
// sequence: a block of keys is scored for all of them while it lies in the cache, and each row's choice is
// made as its scores pass (top_k.h). Few blocks are cut into pieces of their keys, so that one row uses all
// cores; the order of choice is total, so where the cuts are changes nothing.
//
// Workspace: a thread has the queries of kScoredRows rows and 2 top_k candidates of 8 bytes for each; pieces
// add top_k candidates for each row, at most kUnitsPerThread * kScoredRows * threads times. Nothing grows with
// the context.
#include "batch.h"
#include "candidates.h"
#include "indexer.h"
#include "indexer_keys.h"
#include "pool.h"
#include "tensor.h"
#include "top_k.h"
#include "workspace.h"

namespace longspan {
namespace {

constexpr int64_t kUnitsPerThread = 16;      // what there should be to claim
constexpr int64_t kWorthSharing = 1 << 20;  // multiplications

static_assert(kKeyBlock <= TopK::kMostAtOnce);

struct Candidates {  // of one row in one piece
  float* scores;
  int32_t* positions;
  int64_t count;
  bool broken;
};

template <class Keys>
struct Selection {
  using T = typename Keys::Element;
  const Keys& keys;
  const T* query;
  const float* weight;
  int64_t heads, dim, top_k;
  Batch& batch;
  bool packed;  // candidates, else positions
  int64_t width;
  int64_t* out;  // [tokens, width]

  void write(int64_t row, TopK& best) const {
    int64_t* chosen = out + row * width;
    best.finish();
    const int64_t count = best.broken() ? 0 : best.size();
    if (packed && count)
      pack(best, batch.shard, chosen);
    else
      std::copy_n(best.positions(), count, chosen);
    std::fill(chosen + count, chosen + width, packed ? kNoCandidate : kNoToken);
    if (best.broken()) chosen[0] = packed ? kBroken : kNonFinite;
  }

  // Of all that a row sees.
  void take_all(int64_t row) const {
    int64_t* chosen = out + row * width;
    const int64_t count = batch.visible[row];
    for (int64_t i = 0; i < count; ++i) chosen[i] = packed ? candidate(0, batch.shard.position(uint32_t(i))) : i;
    std::fill(chosen + count, chosen + width, packed ? kNoCandidate : kNoToken);
  }

  TopK choice(Workspace& workspace) const {
    const int64_t room = TopK::capacity(top_k);
    auto* scores = workspace.take<float>(room);
    return TopK(top_k, scores, workspace.take<int32_t>(room));
  }

  // Queries of rows begin .. end as the scores want them.
  void prepare(int64_t begin, int64_t end, uint32_t* prepared) const {
    for (int64_t row = begin; row < end; ++row, prepared += keys.row_words())
      keys.prepare(query + row * heads * dim, weight + row * heads, prepared);
  }

  // Scores keys begin .. end for the rows of a block, prepared one after another; calls done(row, its choice).
  template <class Done>
  void scan(const RowBlock& rows, const uint32_t* prepared, int64_t begin, int64_t end, Done&& done) const {
    Workspace workspace;
    const int64_t count = rows.end - rows.begin;
    auto* best = workspace.take<TopK>(count);
    for (int64_t r = 0; r < count; ++r) new (best + r) TopK(choice(workspace));
    const int64_t* table = batch.table(rows.seq);
    typename Keys::Block found[2];
    for (auto& block : found) block.scratch = workspace.take<uint8_t>(keys.scratch_bytes());
    const auto find = [&](int64_t at, auto& block) {
      keys.find(table, at, int(std::min<int64_t>(kKeyBlock, end - at)), block);
    };
    auto *block = &found[0], *next = &found[1];
    if (begin < end) find(begin, *block);
    for (int64_t at = begin; at < end; at += kKeyBlock, std::swap(block, next)) {
      const bool more = at + kKeyBlock < end;
      if (more) find(at + kKeyBlock, *next);
      for (int64_t r = 0; r < count; ++r) {
        const int seen = int(std::min<int64_t>({kKeyBlock, end - at, batch.visible[rows.begin + r] - at}));
        if (seen <= 0) continue;
        float scores[kKeyBlock];
        keys.score(prepared + r * keys.row_words(), *block, seen, scores, more && r == 0 ? next : nullptr);
        best[r].offer(scores, int32_t(at), seen);
      }
    }
    for (int64_t r = 0; r < count; ++r) done(rows.begin + r, best[r]);
  }

  void run() const {
    const std::vector<RowBlock>& blocks = batch.scored(top_k);
    for (int64_t row = 0; row < batch.tokens; ++row)
      if (batch.context[row] <= top_k) take_all(row);
    if (blocks.empty()) return;
    int64_t rows = 0, most = 0, work = 0;
    for (const RowBlock& block : blocks) {
      const int64_t seen = batch.visible[block.end - 1];
      rows += block.end - block.begin;
      most = std::max(most, seen);
      work += (block.end - block.begin) * seen * heads * dim;
    }
    if (work < kWorthSharing) {
      Pool::alone([&](Team& team) { run_whole(team, blocks); });
      return;
    }
    // A piece must be longer than what is chosen from it, or choosing twice is the work.
    const int64_t wanted = kUnitsPerThread * pool()->size() / int64_t(blocks.size());
    const int64_t pieces = std::min(wanted, most / (4 * top_k));
    if (pieces > 1)
      run_pieces(blocks, rows, pieces);
    else
      pool()->run([&](Team& team) { run_whole(team, blocks); });
  }

  void run_whole(Team& team, const std::vector<RowBlock>& blocks) const {
    team.claim(int64_t(blocks.size()), 1, [&](int64_t i, int64_t) {
      const RowBlock& rows = blocks[i];
      Workspace workspace;
      auto* prepared = workspace.take<uint32_t>((rows.end - rows.begin) * keys.row_words());
      prepare(rows.begin, rows.end, prepared);
      scan(rows, prepared, 0, batch.visible[rows.end - 1], [&](int64_t row, TopK& best) { write(row, best); });
    });
  }

  void run_pieces(const std::vector<RowBlock>& blocks, int64_t rows, int64_t pieces) const {
    Workspace workspace;
    auto* found = workspace.take<Candidates>(rows * pieces);
    auto* scores = workspace.take<float>(rows * pieces * top_k + kLanes);
    auto* positions = workspace.take<int32_t>(rows * pieces * top_k + kLanes);
    auto* prepared = workspace.take<uint32_t>(rows * keys.row_words());
    auto* row_of = workspace.take<int64_t>(rows);
    std::vector<int64_t> first_of;
    for (int64_t ordinal = 0; const RowBlock& block : blocks) {
      first_of.push_back(ordinal);
      for (int64_t row = block.begin; row < block.end; ++row) row_of[ordinal++] = row;
    }
    pool()->run([&](Team& team) {
      team.claim(int64_t(blocks.size()), 1, [&](int64_t b, int64_t) {
        prepare(blocks[b].begin, blocks[b].end, prepared + first_of[b] * keys.row_words());
      });
      team.barrier();
      team.claim(int64_t(blocks.size()) * pieces, 1, [&](int64_t unit, int64_t) {
        const int64_t b = unit / pieces, piece = unit % pieces;
        const int64_t end = batch.visible[blocks[b].end - 1];
        const int64_t length = ((end + pieces - 1) / pieces + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
        const int64_t begin = std::min(piece * length, end);  // the last pieces may be empty
        const uint32_t* queries = prepared + first_of[b] * keys.row_words();
        scan(blocks[b], queries, begin, std::min(begin + length, end), [&](int64_t row, TopK& best) {
          best.finish();
          const int64_t at = (first_of[b] + row - blocks[b].begin) * pieces + piece;
          found[at] = {scores + at * top_k, positions + at * top_k, best.size(), best.broken()};
          std::memcpy(found[at].scores, best.scores(), best.size() * sizeof(float));
          std::memcpy(found[at].positions, best.positions(), best.size() * sizeof(int32_t));
        });
      });
      team.barrier();
      team.claim(rows, 1, [&](int64_t ordinal, int64_t) {
        Workspace own;
        TopK best = choice(own);
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const Candidates& part = found[ordinal * pieces + piece];
          best.offer(part.scores, part.positions, part.count);
          if (part.broken) best.set_broken();
        }
        write(row_of[ordinal], best);
      });
    });
  }
};

void index_rows(Dtype dtype, Batch& batch, int64_t heads, int64_t dim, int64_t top_k, Address query, Address weight,
                Address pages, int64_t page_stride, int64_t row_stride, int64_t page_size, bool packed, int64_t width,
                Address out) {
  with_dtype(dtype, [&]<class T>(T) {
    const RowKeys<T> keys({at<const T>(pages), page_stride, row_stride, page_size}, heads, dim);
    const T* q = at<const T>(query);
    const float* w = at<const float>(weight);
    Selection<RowKeys<T>>{keys, q, w, heads, dim, top_k, batch, packed, width, at<int64_t>(out)}.run();
  });
}

void index_codes(Dtype dtype, Batch& batch, int64_t heads, int64_t dim, int64_t top_k, Address query, Address weight,
                 Address codes, int64_t page_stride, int64_t quad_stride, int64_t key_stride, Address scale,
                 int64_t scale_page_stride, int64_t scale_stride, int64_t page_size, bool packed, int64_t width,
                 Address out) {
  with_dtype(dtype, [&]<class T>(T) {
    const CodeKeys<T> keys({at<const uint8_t>(codes), page_stride, quad_stride, key_stride,
                            at<const float>(scale), scale_page_stride, scale_stride, page_size},
                           heads, dim);
    const T* q = at<const T>(query);
    const float* w = at<const float>(weight);
    Selection<CodeKeys<T>>{keys, q, w, heads, dim, top_k, batch, packed, width, at<int64_t>(out)}.run();
  });
}

}  // namespace

void bind_indexer(nb::module_& m) {
  m.def("index_rows", &index_rows, Unlocked());
  m.def("index_codes", &index_codes, Unlocked());
}

}  // namespace longspan
