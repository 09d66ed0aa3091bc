// The one matrix kernel: dot products of rows with rows, tile by tile, straight from where the rows lie.
//
//     c[i, j] = sum_k a[i, k] b[j, k]        lanes run along k, one accumulator per (i, j), float32
//
// Published weights are [out, in], cached keys are [token, dim]: both are rows to meet other rows, so no
// operand is ever packed, and a gathered set of rows is a list of pointers. Every (i, j) is summed in the
// same order in every tile, so a row's result does not depend on what else is in the batch.
#pragma once

#include <algorithm>

#include "simd.h"

namespace longspan {

namespace detail {

template <int M, int N, class T, class LoadA, class LoadB>
inline __attribute__((always_inline)) void tile_step(Floats* acc, LoadA&& a, LoadB&& b) {
  typename Operand<T>::Vector row[M];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) row[i] = a(i);
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) {
    const auto column = b(j);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) acc[i * N + j] = dot(acc[i * N + j], row[i], column);
  }
}

template <int count>
inline __attribute__((always_inline)) void sum_all(const Floats* acc, float* c) {
  constexpr int whole = count / 16 * 16, eight = whole + (count - whole) / 8 * 8;
#pragma GCC unroll 4
  for (int i = 0; i < whole; i += 16) store(c + i, sum_each(acc + i));
  if constexpr (eight > whole) {
    const Floats sums = sum_each8(acc + whole);
    std::memcpy(c + whole, &sums, 8 * sizeof(float));
  }
#pragma GCC unroll 8
  for (int i = eight; i < count; ++i) c[i] = sum(acc[i]);
}

}  // namespace detail

// c [M][N] of the rows a[0..M) and b[0..N), k elements each. Every step prefetches `lines` cache lines from
// `ahead` on, and moves on by `stride` bytes.
template <int M, int N, int lines, class T>
inline void dot_tile(const T* const* a, const T* const* b, int64_t k, float* c, const char* ahead = nullptr,
                     int64_t stride = 0) {
  constexpr int step = Operand<T>::size;
  Floats acc[M * N];
#pragma GCC unroll 32
  for (int i = 0; i < M * N; ++i) acc[i] = zero();
  const T* rows[M];
  const T* columns[N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) rows[i] = a[i];
#pragma GCC unroll 16
  for (int j = 0; j < N; ++j) columns[j] = b[j];
  int64_t at = 0;
  for (; at + step <= k; at += step) {
    if constexpr (lines > 0) {
#pragma GCC unroll 8
      for (int j = 0; j < lines; ++j) __builtin_prefetch(ahead + 64 * j, 0, 2);  // into L2
      ahead += stride;
    }
    detail::tile_step<M, N, T>(
        acc, [&](int i) { return load_operand(rows[i] + at); }, [&](int j) { return load_operand(columns[j] + at); });
  }
  if (const int rest = int(k - at))
    detail::tile_step<M, N, T>(
        acc, [&](int i) { return load_operand_part(rows[i] + at, rest); },
        [&](int j) { return load_operand_part(columns[j] + at, rest); });
  detail::sum_all<M * N>(acc, c);
}

// The tile of matrix times matrix, and how many weight rows one input row meets at once.
#ifdef __AVX512F__
constexpr int kTileRows = 4, kTileColumns = 6, kVectorColumns = 8;
#else
constexpr int kTileRows = 2, kTileColumns = 2, kVectorColumns = 4;
#endif

// Calls put(i, j, values, count) with c[i, j .. j + count) for all rows a(i), i < m, and columns b(j), j < n;
// `a` and `b` give row pointers, `values` may be read up to 16 floats on. Columns are the outer loop: they are
// read once and stay in cache while the rows pass. `contiguous` columns are prefetched in memory order.
template <bool contiguous, class T, class RowsA, class RowsB, class Put>
inline void dots(int64_t m, int64_t n, int64_t k, RowsA&& a, RowsB&& b, Put&& put) {
  constexpr int64_t kAhead = 16384;  // bytes; what one core has under way at full bandwidth
  float c[kTileRows * kTileColumns + kLanes];
  const T* rows[kTileRows];
  const T* columns[kVectorColumns];
  const auto tile = [&]<int M, int N, int lines>(int64_t i0, int64_t j0, const char* ahead, int64_t stride) {
    for (int i = 0; i < M; ++i) rows[i] = a(i0 + i);
    dot_tile<M, N, lines, T>(rows, columns, k, c, ahead, stride);
    for (int i = 0; i < M; ++i) put(i0 + i, j0, c + i * N, N);
  };
  // The next columns lie kAhead bytes on and are as many as these: their lines are fetched by the first tiles
  // of rows, a few at each step.
  const auto column_block = [&]<int N, int lines>(int64_t j0) {
    for (int j = 0; j < N; ++j) columns[j] = b(j0 + j);
    const char* ahead = reinterpret_cast<const char*>(columns[0]) + kAhead;
    const char* end = ahead + N * k * int64_t(sizeof(T));
    const auto run = [&]<int M>(int64_t i) {
      const int64_t stride = ahead < end ? 64 * lines : 0;
      tile.template operator()<M, N, lines>(i, j0, ahead, stride);
      ahead += stride * (k / Operand<T>::size);
    };
    int64_t i = 0;
    for (; i + kTileRows <= m; i += kTileRows) run.template operator()<kTileRows>(i);
    for (; i + 2 <= m; i += 2) run.template operator()<2>(i);
    for (; i < m; ++i) run.template operator()<1>(i);
  };
  const auto columns_by = [&]<int N>(int64_t j0) {
    if constexpr (!contiguous)
      column_block.template operator()<N, 0>(j0);
    else if (m <= kTileRows)
      column_block.template operator()<N, N>(j0);
    else if (m <= 8 * kTileRows)
      column_block.template operator()<N, (N + 1) / 2>(j0);
    else
      column_block.template operator()<N, 1>(j0);
  };
  int64_t j = 0;
  if (m == 1)
    for (; j + kVectorColumns <= n; j += kVectorColumns) columns_by.template operator()<kVectorColumns>(j);
  for (; j + kTileColumns <= n; j += kTileColumns) columns_by.template operator()<kTileColumns>(j);
  for (; j + 2 <= n; j += 2) columns_by.template operator()<2>(j);
  for (; j < n; ++j) columns_by.template operator()<1>(j);
}

}  // namespace longspan
