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

// c [M][N] of the rows a[0..M) and b[0..N), k elements each. `ahead`, if any, is where memory is read next:
// as many bytes as the N columns hold are prefetched from there.
template <int M, int N, class T>
inline void dot_tile(const T* const* a, const T* const* b, int64_t k, float* c, const char* ahead = nullptr) {
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
    if (ahead) {
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) __builtin_prefetch(ahead + 64 * j);
      ahead += 64 * N;
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
  const auto tile = [&]<int M, int N>(int64_t i0, int64_t j0, const char* ahead) {
    for (int i = 0; i < M; ++i) rows[i] = a(i0 + i);
    dot_tile<M, N, T>(rows, columns, k, c, ahead);
    for (int i = 0; i < M; ++i) put(i0 + i, j0, c + i * N, N);
  };
  const auto column_block = [&]<int N>(int64_t j0) {
    for (int j = 0; j < N; ++j) columns[j] = b(j0 + j);
    const char* ahead = contiguous ? reinterpret_cast<const char*>(columns[0]) + kAhead : nullptr;
    int64_t i = 0;
    for (; i + kTileRows <= m; i += kTileRows, ahead = nullptr)
      tile.template operator()<kTileRows, N>(i, j0, ahead);
    for (; i + 2 <= m; i += 2, ahead = nullptr) tile.template operator()<2, N>(i, j0, ahead);
    for (; i < m; ++i, ahead = nullptr) tile.template operator()<1, N>(i, j0, ahead);
  };
  int64_t j = 0;
  if (m == 1)
    for (; j + kVectorColumns <= n; j += kVectorColumns) column_block.template operator()<kVectorColumns>(j);
  for (; j + kTileColumns <= n; j += kTileColumns) column_block.template operator()<kTileColumns>(j);
  for (; j + 2 <= n; j += 2) column_block.template operator()<2>(j);
  for (; j < n; ++j) column_block.template operator()<1>(j);
}

}  // namespace longspan
