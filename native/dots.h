// The one matrix kernel: dot products of rows with rows, tile by tile, straight from where the rows lie.
//
//     c[i, j] = sum_k a[i, k] b[j, k]        lanes run along k, one accumulator per (i, j), float32
//
// Published weights are [out, in], cached keys are [token, dim]: both are rows to meet other rows, so no
// operand is ever packed, and a gathered set of rows is a list of pointers. Every (i, j) is summed in the
// same order in every tile, so a row's result does not depend on what else is in the batch.
#pragma once

#include <algorithm>
#include <type_traits>

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

namespace detail {

// acc [M][N]: the lanes of the products of the rows a[0..M) and b[0..N), k elements each. Every step prefetches
// `lines` cache lines from `ahead` on, and moves on by `stride` bytes.
template <int M, int N, int lines, class T>
inline __attribute__((always_inline)) void accumulate(const T* const* a, const T* const* b, int64_t k, Floats* acc,
                                                      const char* ahead, int64_t stride) {
  constexpr int step = Operand<T>::size;
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
    tile_step<M, N, T>(
        acc, [&](int i) { return load_operand(rows[i] + at); }, [&](int j) { return load_operand(columns[j] + at); });
  }
  if (const int rest = int(k - at))
    tile_step<M, N, T>(
        acc, [&](int i) { return load_operand_part(rows[i] + at, rest); },
        [&](int j) { return load_operand_part(columns[j] + at, rest); });
}

// The sums of `count` vectors in the first lanes.
template <int count>
inline __attribute__((always_inline)) Floats sum_row(const Floats* acc) {
  if constexpr (count == 8) return sum_each8(acc);
  Floats sums = zero();
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) sums[i] = sum(acc[i]);
  return sums;
}

}  // namespace detail

// c [M][N] of the rows a[0..M) and b[0..N), k elements each; prefetches as `dots` does.
template <int M, int N, int lines, class T>
inline void dot_tile(const T* const* a, const T* const* b, int64_t k, float* c, const char* ahead = nullptr,
                     int64_t stride = 0) {
  Floats acc[M * N];
  detail::accumulate<M, N, lines, T>(a, b, k, acc, ahead, stride);
  detail::sum_all<M * N>(acc, c);
}

// The tile of matrix times matrix: the sums of one row of it come out side by side in a register.
#ifdef __AVX512F__
constexpr int kTileRows = 3, kTileColumns = 8;
#else
constexpr int kTileRows = 2, kTileColumns = 2;
#endif

// Calls put(i, j, values, count) with c[i, j .. j + count) for all rows a(i), i < m, and columns b(j), j < n;
// `a` and `b` give row pointers; `values` may be read up to 16 floats on; `count` is a constant of the type. Columns are the outer loop: they are
// read once and stay in cache while the rows pass. `contiguous` columns are prefetched in memory order.
template <bool contiguous, class T, class RowsA, class RowsB, class Put>
inline void dots(int64_t m, int64_t n, int64_t k, RowsA&& a, RowsB&& b, Put&& put) {
  constexpr int64_t kAhead = 16384;  // bytes; what one core has under way at full bandwidth
  const T* rows[kTileRows];
  const T* columns[kTileColumns];
  const auto tile = [&]<int M, int N, int lines>(int64_t i0, int64_t j0, const char* ahead, int64_t stride) {
    for (int i = 0; i < M; ++i) rows[i] = a(i0 + i);
    Floats acc[M * N];
    detail::accumulate<M, N, lines, T>(rows, columns, k, acc, ahead, stride);
#pragma GCC unroll 4
    for (int i = 0; i < M; ++i) {
      alignas(64) float c[kLanes];
      store(c, detail::sum_row<N>(acc + i * N));
      put(i0 + i, j0, c, std::integral_constant<int, N>());
    }
  };
  // The next columns lie kAhead bytes on and are as many as these. Few rows: memory is the limit, and all
  // tiles fetch their share at each step. Many rows: the first tile fetches, the others only compute.
  const auto column_block = [&]<int N, int first, int others>(int64_t j0) {
    for (int j = 0; j < N; ++j) columns[j] = b(j0 + j);
    const char* ahead = reinterpret_cast<const char*>(columns[0]) + kAhead;
    const char* end = ahead + N * k * int64_t(sizeof(T));
    const auto run = [&]<int M, int lines>(int64_t i) {
      const int64_t stride = ahead < end ? 64 * lines : 0;
      tile.template operator()<M, N, lines>(i, j0, ahead, stride);
      ahead += stride * (k / Operand<T>::size);
    };
    int64_t i = 0;
    if (m >= kTileRows) {
      run.template operator()<kTileRows, first>(0);
      for (i = kTileRows; i + kTileRows <= m; i += kTileRows) run.template operator()<kTileRows, others>(i);
    }
    if (kTileRows > 2 && i + 2 <= m) {
      run.template operator()<2, first>(i);
      i += 2;
    }
    for (; i < m; ++i) run.template operator()<1, first>(i);
  };
  const auto columns_by = [&]<int N>(int64_t j0) {
    if constexpr (!contiguous)
      column_block.template operator()<N, 0, 0>(j0);
    else if (m <= kTileRows || m > 8 * kTileRows)
      column_block.template operator()<N, N, 0>(j0);
    else
      column_block.template operator()<N, (N + 1) / 2, (N + 1) / 2>(j0);
  };
  int64_t j = 0;
  for (; j + kTileColumns <= n; j += kTileColumns) columns_by.template operator()<kTileColumns>(j);
  if (kTileColumns > 4 && j + 4 <= n) {
    columns_by.template operator()<4>(j);
    j += 4;
  }
  if (kTileColumns > 2 && j + 2 <= n) {
    columns_by.template operator()<2>(j);
    j += 2;
  }
  for (; j < n; ++j) columns_by.template operator()<1>(j);
}

}  // namespace longspan
