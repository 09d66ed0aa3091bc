// Attention over cached latents in absorbed form, sparse or dense, with the log-sum-exp of each row and head.
//
//     score[h, s] = scale * query_h . row_s          row_s = [latent | rope key] as cached, s in the row's set
//     out_h = sum_s softmax(score)_s latent_s        lse_h = log sum_s e^score[h, s]
//
// A line is one head of one row; lines t * heads + h lie one after another. A block is a run of lines that
// share a list of cached rows: the heads of one row and its selected tokens (entries below 0 left out), or,
// dense, lines of one sequence and its tokens from 0 on, of which each line sees those up to its own.
// The list is cut in pieces of kPiece rows, the pieces in tiles; pieces are merged in order by peak and total:
// so every sum has one order, whatever runs beside it and on how many threads. A block that is large for its
// batch is spread over the team by pieces and lines, a few pieces at a time; the others are one unit of work.
//
// Tokens are those that the pages hold: of a shard of the sequence, its own, counted from 0. An empty set gives
// zeros and lse -inf; a row flagged kNonFinite by the indexer gives NaN.
#include "batch.h"
#include "indexer.h"
#include "pool.h"
#include "sparse_attention_cache.h"
#include "sparse_attention_tile.h"
#include "tensor.h"

namespace longspan {
namespace {

constexpr int64_t kPiece = 4 * kTileKeys;
constexpr int64_t kBlockLines = 128;   // their sums and queries stay in L2 while the cached rows pass
constexpr int64_t kFewLines = 12;      // below this a tile is too narrow to pay for its packing
constexpr int64_t kWave = 8;           // pieces of a spread block under way, per thread
constexpr int64_t kAloneWork = 1 << 18;  // multiply-adds that are not worth waking anybody
constexpr int64_t kDense = -1;

struct Block {
  int64_t begin, end;  // lines
  int64_t seq;
  int64_t keys;  // most rows of its list
  int64_t work;  // lines times keys
  int64_t lines() const { return end - begin; }
  int64_t pieces() const { return (keys + kPiece - 1) / kPiece; }
};

template <class T, class Format>
class Attention {
 public:
  using Cell = typename Format::Cell;

  Format cache;
  const Batch& batch;
  const T* query;           // [tokens, heads, width]
  const int64_t* selected;  // [tokens, top_k]
  int64_t top_k;            // kDense: every token up to the row's own
  int64_t heads, width, rank;
  float scale;
  float* out;  // [tokens, heads, rank]
  float* lse;  // [tokens, heads]

  void run() const {
    std::vector<Block> blocks = cut();
    int64_t work = 0;
    for (const Block& b : blocks) work += b.work;
    if (work * (width + rank) < kAloneWork)
      return Pool::alone([&](Team& team) { attend(team, blocks, blocks.begin(), nullptr, nullptr); });
    const auto team_pool = pool();
    const int threads = team_pool->size();
    const auto spread = std::stable_partition(blocks.begin(), blocks.end(), [&](const Block& b) {
      return threads > 1 && b.pieces() > 1 && b.work * 4 * threads > work;
    });
    int64_t room = 0;  // lines times pieces of a wave
    for (auto b = blocks.begin(); b != spread; ++b)
      room = std::max(room, b->lines() * std::min(b->pieces(), kWave * threads));
    Workspace workspace;
    auto* states = workspace.take<Softmax>(room + kBlockLines);
    auto* partial = workspace.take<float>(room * rank);
    team_pool->run([&](Team& team) { attend(team, blocks, spread, states, partial); });
  }

 private:
  // What a thread works with.
  struct Scratch {
    TileScratch<T> tile;
    typename Format::Tile rows;
    const Cell** cells;  // of a whole list if it is selected, else of a piece and the tile after it
    Softmax* states;     // [2][kBlockLines]
    float* sums;         // [kBlockLines][rank]

    Scratch(const Attention& a, Workspace& w)
        : tile(w, kBlockLines),
          rows(a.cache, w, kTileKeys),
          cells(w.take<const Cell*>(a.sparse() ? a.top_k : kPiece + kTileKeys)),
          states(w.take<Softmax>(2 * kBlockLines)),
          sums(w.take<float>(kBlockLines * a.rank)) {}
  };

  bool sparse() const { return top_k != kDense; }
  int64_t row_of(int64_t line) const { return line / heads; }

  std::vector<Block> cut() const {
    std::vector<Block> blocks;
    const auto add = [&](int64_t first_row, int64_t end_row, int64_t seq) {
      const int64_t end = end_row * heads, seen = batch.visible[end_row - 1];
      for (int64_t begin = first_row * heads; begin < end; begin += kBlockLines) {
        const int64_t stop = std::min(begin + kBlockLines, end);
        const int64_t keys = sparse() ? top_k : batch.visible[row_of(stop - 1)];
        blocks.push_back({begin, stop, seq, keys, (stop - begin) * std::min(keys, seen)});
      }
    };
    for (int64_t seq = 0; seq < batch.seqs; ++seq) {
      const int64_t begin = batch.query_starts[seq], end = batch.query_starts[seq + 1];
      if (!sparse() && begin < end) add(begin, end, seq);
      if (sparse())
        for (int64_t row = begin; row < end; ++row) add(row, row + 1, seq);
    }
    return blocks;
  }

  void attend(Team& team, const std::vector<Block>& blocks, std::vector<Block>::const_iterator spread,
              Softmax* states, float* partial) const {
    Workspace workspace;
    Scratch scratch(*this, workspace);
    for (auto b = blocks.begin(); b != spread; ++b) attend_together(team, *b, states, partial, scratch);
    // Backwards: the last blocks of a sequence see most.
    team.claim(blocks.end() - spread, 1,
               [&](int64_t i, int64_t) { attend_block(*(blocks.end() - 1 - i), scratch); });
  }

  // One thread, piece after piece.
  void attend_block(const Block& b, Scratch& scratch) const {
    Softmax* states = scratch.states;
    Softmax* next = scratch.states + kBlockLines;
    const int64_t keys = list(b, scratch);
    std::fill_n(states, b.lines(), Softmax{});
    for (int64_t begin = 0; begin < keys; begin += kPiece) {
      const bool first = begin == 0;
      float* sums = first ? out + b.begin * rank : scratch.sums;
      attend_piece(b, b.begin, b.end, begin, keys, first ? states : next, sums, scratch);
      for (int64_t i = 0; i < b.lines() && !first; ++i)
          merge(next[i], sums + i * rank, states[i], out + (b.begin + i) * rank);
    }
    for (int64_t i = 0; i < b.lines(); ++i) finish(b.begin + i, states[i]);
  }

  // The whole team: the pieces of a wave side by side, then their merge, line by line.
  void attend_together(Team& team, const Block& b, Softmax* states, float* partial, Scratch& scratch) const {
    const int64_t lines = b.lines(), wave = std::min(b.pieces(), kWave * team.size);
    Softmax* merged = states;
    states += kBlockLines;
    for (int64_t first = 0; first < b.pieces(); first += wave) {
      const int64_t pieces = std::min(wave, b.pieces() - first);
      const int64_t runs = std::clamp<int64_t>(2 * team.size / pieces, 1, (lines + kFewLines - 1) / kFewLines);
      const int64_t run = (lines + runs - 1) / runs;
      team.claim(pieces * runs, 1, [&](int64_t unit, int64_t) {
        const int64_t p = unit % pieces, begin = (first + p) * kPiece;
        const int64_t from = std::min(unit / pieces * run, lines), to = std::min(from + run, lines);
        Softmax* state = first + p == 0 ? merged : states + p * lines;
        float* sums = first + p == 0 ? out + b.begin * rank : partial + p * lines * rank;
        const int64_t keys = list(b, scratch);
        if (from == to) return;
        attend_piece(b, b.begin + from, b.begin + to, begin, keys, state + from, sums + from * rank, scratch);
      });
      team.barrier();
      team.claim(lines, 1, [&](int64_t i, int64_t) {
        for (int64_t p = first == 0; p < pieces; ++p)
          merge(states[p * lines + i], partial + (p * lines + i) * rank, merged[i], out + (b.begin + i) * rank);
        if (first + pieces == b.pieces()) finish(b.begin + i, merged[i]);
      });
      team.barrier();
    }
  }

  // The length of a block's list; a selected one is written down.
  int64_t list(const Block& b, Scratch& scratch) const {
    if (!sparse()) return b.keys;
    const int64_t* entries = selected + row_of(b.begin) * top_k;
    const int64_t* table = batch.table(b.seq);
    int64_t count = 0;
    for (int64_t i = 0; i < top_k; ++i)
      if (entries[i] >= 0) scratch.cells[count++] = cache.cell(table, entries[i]);
    return count;
  }

  // Lines [from, to) of a block over its piece from `begin` on, which may be empty -> their states and sums.
  void attend_piece(const Block& b, int64_t from, int64_t to, int64_t begin, int64_t keys, Softmax* states,
                    float* sums, Scratch& scratch) const {
    const int64_t end = std::min(begin + kPiece, keys), ahead = std::min(end + kTileKeys, keys);
    std::fill_n(states, to - from, Softmax{});
    const Cell** cells = scratch.cells;  // of the list from `begin` on
    if (sparse()) {
      cells += begin;
    } else {
      const int64_t* table = batch.table(b.seq);
      for (int64_t position = begin; position < ahead; ++position)
        cells[position - begin] = cache.cell(table, position);
    }
    for (int64_t at = begin; at < end; at += kTileKeys) {
      const int count = int(std::min<int64_t>(kTileKeys, end - at));
      const auto next = reinterpret_cast<const void* const*>(cells + (at - begin) + count);
      Prefetch prefetch(next, std::min<int64_t>(kTileKeys, ahead - at - count), cache.bytes());
      const auto seen = [&](int64_t i) { return (sparse() ? keys : batch.visible[row_of(from + i)]) - at; };
      const T* const* rows = scratch.rows.rows(cells + (at - begin), count);
      attend_tile(query + from * width, to - from, width, rows, count, seen, scale, rank, at == begin, states, sums,
                  prefetch, scratch.tile);
    }
  }

  // Takes another piece into the sums of a line.
  void merge(const Softmax& piece, const float* sums, Softmax& into, float* merged) const {
    if (piece.total == 0) return;
    const float peak = std::max(into.peak, piece.peak);
    const float keep = std::exp(into.peak - peak), share = std::exp(piece.peak - peak);
    into = {peak, into.total * keep + piece.total * share};
    for (int64_t c = 0; c < rank; ++c) merged[c] = merged[c] * keep + sums[c] * share;
  }

  void finish(int64_t line, const Softmax& state) const {
    const bool flagged = top_k > 0 && selected[row_of(line) * top_k] == kNonFinite;
    float* row = out + line * rank;
    if (flagged || state.total == 0) {
      std::fill_n(row, rank, flagged ? NAN : 0.0f);
      lse[line] = flagged ? NAN : -INFINITY;
      return;
    }
    for (int64_t c = 0; c < rank; ++c) row[c] /= state.total;
    lse[line] = state.peak + std::log(state.total);
  }
};

void sparse_attention(Dtype dtype, const Batch& batch, Address latent, int64_t page_stride, int64_t row_stride,
                      int64_t page_size, Address query, int64_t heads, int64_t width, int64_t rank, float scale,
                      Address selected, int64_t top_k, Address out, Address lse) {
  with_dtype(dtype, [&]<class T>(T) {
    const ModelRows<T> cache{{at<const T>(latent), page_stride, row_stride, page_size}, width};
    const Attention<T, ModelRows<T>> attention{
        cache, batch, at<const T>(query), at<const int64_t>(selected), top_k, heads, width, rank, scale,
        at<float>(out), at<float>(lse)};
    attention.run();
  });
}

}  // namespace

void bind_sparse_attention(nb::module_& m) { m.def("sparse_attention", &sparse_attention, Unlocked()); }

}  // namespace longspan
