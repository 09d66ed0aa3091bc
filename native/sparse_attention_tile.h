// Attention of many query rows to one tile of cached rows: an online softmax, float32 inside.
//
//     s[i, j] = scale * query_i . row_j              the tile product of dots.h, straight from the cached rows
//     peak'   = max(peak, max_j s),  shrink = e^(peak - peak')
//     p[i, j] = e^(s - peak'),  total = total * shrink + sum_j p         0 for the keys row i must not see
//     acc[i]  = acc[i] * shrink + sum_j round(p[i, j]) row_j[: rank]     lanes run along rank
//
// The value product reads the tile in strips of a few vectors of columns: rows interleaved in the groups that
// `dot` sums, packed just before use so that all query rows meet them in L1. Weights are rounded to T.
// Keys are summed in order, and a key that is not seen adds an exact 0: a row's result depends on its own keys
// and on where the tiles begin, never on the rows beside it.
#pragma once

#include "dots.h"
#include "math.h"
#include "workspace.h"

namespace longspan {

constexpr int kTileKeys = 128;
constexpr int kStripVectors = 4;
#ifdef __AVX512F__
constexpr int kValueRows = 6;
#else
constexpr int kValueRows = 2;
#endif

// Over the keys so far: the largest score and the sum of e^(score - peak). An empty set has total 0.
struct Softmax {
  float peak = -INFINITY, total = 0;
};

// Brings rows that are needed soon into L2, a line at a time: what comes in bursts the processor drops.
class Prefetch {
 public:
  Prefetch(const void* const* rows, int64_t count, int64_t bytes)
      : next_(rows), end_(rows + count), bytes_(bytes) {}

  // A whole row, which the caller fetches line by line; null: there is no more.
  const char* row() { return next_ == end_ ? nullptr : static_cast<const char*>(*next_++); }

  void line() {
    if (line_ == last_) {
      line_ = row();
      if (!line_) return void(last_ = nullptr);
      last_ = line_ + bytes_;
    }
    __builtin_prefetch(line_, 0, 2);
    line_ = last_ - line_ > 64 ? line_ + 64 : last_;
  }

 private:
  const void* const* next_;
  const void* const* end_;
  int64_t bytes_;
  const char* line_ = nullptr;
  const char* last_ = nullptr;
};

namespace detail {

// scores [m][kTileKeys] = query_i . row_j, columns outside as in `dots`; each tile fetches a row of the next.
template <class T>
inline void score(const T* query, int64_t m, int64_t width, const T* const* rows, int count, Prefetch& ahead,
                  float* scores) {
  float c[kTileRows * kTileColumns + kLanes];
  const auto tile = [&]<int M, int N>(int64_t i, int64_t j) {
    const T* queries[M];
    for (int r = 0; r < M; ++r) queries[r] = query + (i + r) * width;
    if (const char* next = ahead.row())
      dot_tile<M, N, 1, T>(queries, rows + j, width, c, next, 64);
    else
      dot_tile<M, N, 0, T>(queries, rows + j, width, c);
    for (int r = 0; r < M; ++r) std::memcpy(scores + (i + r) * kTileKeys + j, c + r * N, N * sizeof(float));
  };
  const auto columns = [&]<int N>(int64_t j) {
    int64_t i = 0;
    for (; i + kTileRows <= m; i += kTileRows) tile.template operator()<kTileRows, N>(i, j);
    for (; i + 2 <= m; i += 2) tile.template operator()<2, N>(i, j);
    for (; i < m; ++i) tile.template operator()<1, N>(i, j);
  };
  int64_t j = 0;
  for (; j + kTileColumns <= count; j += kTileColumns) columns.template operator()<kTileColumns>(j);
  for (; j + 2 <= count; j += 2) columns.template operator()<2>(j);
  for (; j < count; ++j) columns.template operator()<1>(j);
}

// One row of scores becomes weights. `seen` keys count, `width` of the row is written, a multiple of 16.
template <class T>
inline float weigh(float* scores, int64_t seen, int width, float scale, Softmax& state, T* weights) {
  if (seen == 0) {
    for (int j = 0; j < width; j += kLanes) store(weights + j, zero());
    return 1.0f;
  }
  Floats largest = broadcast(-INFINITY);
  for (int j = 0; j < width; j += kLanes) {
    const Ints visible = lane_index() < int(seen - j);
    const Floats s = select(visible, load(scores + j) * scale, broadcast(-INFINITY));
    store(scores + j, s);
    largest = max(largest, s);
  }
  const float peak = std::max(state.peak, max_lane(largest));
  const float shrink = exp(broadcast(state.peak - peak))[0];
  Floats total = zero();
  for (int j = 0; j < width; j += kLanes) {
    const Floats p = exp(load(scores + j) - peak);
    total += p;
    store(weights + j, p);
  }
  state = {peak, state.total * shrink + sum(total)};
  return shrink;
}

// The strip [groups][N] of columns from `column` on, n <= 16 N of them, of `count` rows.
template <int N, class T>
inline void pack_strip(const T* const* rows, int count, int64_t column, int n, T* strip) {
  static const T zeros[kLanes * N] = {};
  T copies[kGroup<T>][kLanes * N] = {};
  for (int j = 0; j < count; j += kGroup<T>) {
    const T* group[kGroup<T>];
    for (int g = 0; g < kGroup<T>; ++g) {
      group[g] = j + g < count ? rows[j + g] + column : zeros;
      if (n < kLanes * N) {
        std::memcpy(copies[g], group[g], n * sizeof(T));
        group[g] = copies[g];
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      const auto packed = load_group(group, v * kLanes);
      std::memcpy(strip, &packed, sizeof packed);
      strip += Operand<T>::size;
    }
  }
}

// acc [M rows, `stride` apart][n <= 16 N] of weights [M][kTileKeys] and a strip; `first`: acc is empty yet.
template <int M, int N, class T>
inline void value_tile(const T* strip, int groups, const T* weights, const float* shrink, bool first, int n,
                       float* acc, int64_t stride, Prefetch& ahead) {
  const bool whole = N > 1 || n == kLanes;
  Floats sums[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) {
      const float* from = acc + i * stride + v * kLanes;
      sums[i][v] = first ? zero() : shrink[i] * (whole ? load(from) : load_part(from, n));
    }
  for (int g = 0; g < groups; ++g) {
    ahead.line();
    typename Operand<T>::Vector columns[N];
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) columns[v] = load_operand(strip + (g * N + v) * Operand<T>::size);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const auto weight = broadcast_operand(weights + i * kTileKeys + g * kGroup<T>);
#pragma GCC unroll 16
      for (int v = 0; v < N; ++v) sums[i][v] = dot(sums[i][v], columns[v], weight);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) {
      float* to = acc + i * stride + v * kLanes;
      if (whole)
        store(to, sums[i][v]);
      else
        store_part(to, sums[i][v], n);
    }
}

}  // namespace detail

// Scratch for tiles of up to `most` query rows; one per thread.
template <class T>
struct TileScratch {
  float* scores;   // [most][kTileKeys]
  T* weights;      // [most][kTileKeys]
  float* shrink;   // [most]
  T* strip;        // [kTileKeys / group][kStripVectors][16][group]

  TileScratch(Workspace& workspace, int64_t most)
      : scores(workspace.take<float>(most * kTileKeys)),
        weights(workspace.take<T>(most * kTileKeys)),
        shrink(workspace.take<float>(most)),
        strip(workspace.take<T>(kTileKeys * kStripVectors * kLanes)) {}
};

// `count` <= kTileKeys cached rows; query row i of m sees the first seen(i) of them, which may be none or more
// than all. acc [m][rank] and the softmax states go on from the tiles before, unless this is the first.
template <class T, class Seen>
void attend_tile(const T* query, int64_t m, int64_t width, const T* const* rows, int count, Seen&& seen,
                 float scale, int64_t rank, bool first, Softmax* states, float* acc, Prefetch& ahead,
                 const TileScratch<T>& scratch) {
  detail::score(query, m, width, rows, count, ahead, scratch.scores);
  const int padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < m; ++i) {
    const int64_t visible = std::clamp<int64_t>(seen(i), 0, count);
    scratch.shrink[i] = detail::weigh(scratch.scores + i * kTileKeys, visible, padded, scale, states[i],
                                      scratch.weights + i * kTileKeys);
  }
  const int groups = (count + kGroup<T> - 1) / kGroup<T>;
  const auto strip = [&]<int N>(int64_t column, int n) {
    detail::pack_strip<N>(rows, count, column, n, scratch.strip);
    const auto block = [&]<int M>(int64_t i) {
      detail::value_tile<M, N>(scratch.strip, groups, scratch.weights + i * kTileKeys, scratch.shrink + i, first,
                               n, acc + i * rank + column, rank, ahead);
    };
    int64_t i = 0;
    for (; i + kValueRows <= m; i += kValueRows) block.template operator()<kValueRows>(i);
    for (; i + 4 <= m; i += 4) block.template operator()<4>(i);
    for (; i + 2 <= m; i += 2) block.template operator()<2>(i);
    for (; i < m; ++i) block.template operator()<1>(i);
  };
  int64_t column = 0;
  for (; column + kStripVectors * kLanes <= rank; column += kStripVectors * kLanes)
    strip.template operator()<kStripVectors>(column, kStripVectors * kLanes);
  for (; column < rank; column += kLanes)
    strip.template operator()<1>(column, int(std::min<int64_t>(kLanes, rank - column)));
}

}  // namespace longspan
