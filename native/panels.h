// Matrix products whose right side is small, hot and packed: lanes run along the columns of the result.
//
//     c[i, j] = start(i, j) + sum_k a[i, k] b[k, j]        float32 sums of T x T products
//
// dots.h wants both sides as rows along k and pays a sum of lanes per result, which is little when k is a hidden
// size. Here k is a chunk or a head, so b is packed instead: [k / step][n][step], where step = 2 neighbours of k
// for bfloat16 and 1 for float, which makes b a plain matrix. a[i, k] lies at a + i * row + k * along. All sizes
// are whole: k a multiple of 2, n a multiple of kLanes.
#pragma once

#include "simd.h"

namespace longspan {

template <class T>
constexpr int kPanelStep = Operand<T>::size / kLanes;

// Columns j .. j + 16 of rows k (even) and k + 1 of a packed b.
inline void store_pair(float* b, int64_t n, int64_t k, int64_t j, Floats even, Floats odd) {
  store(b + k * n + j, even);
  store(b + (k + 1) * n + j, odd);
}
inline void store_pair(bf16* b, int64_t n, int64_t k, int64_t j, Floats even, Floats odd) {
  const Halves pairs = interleave(even, odd);
  std::memcpy(b + k * n + 2 * j, &pairs, sizeof pairs);
}

template <class T>
struct PanelLeft {
  const T* data;
  int64_t row, along;
};

namespace detail {

template <int M, int N, class T, class Start, class Put>
inline void panel_tile(int64_t i, int64_t j, int64_t k, PanelLeft<T> a, const T* b, int64_t n, Start&& start,
                       Put&& put) {
  Floats acc[M * N];
#pragma GCC unroll 16
  for (int x = 0; x < M * N; ++x) acc[x] = start(i + x / N, j + x % N * kLanes);
  const T* left = a.data + i * a.row;
  const T* right = b + j * kPanelStep<T>;
  for (int64_t at = 0; at < k; at += kPanelStep<T>) {
    typename Operand<T>::Vector column[N];
#pragma GCC unroll 8
    for (int y = 0; y < N; ++y) column[y] = load_operand(right + at * n + y * Operand<T>::size);
#pragma GCC unroll 16
    for (int x = 0; x < M; ++x) {
      const auto value = broadcast_operand(left + x * a.row + at * a.along);
#pragma GCC unroll 8
      for (int y = 0; y < N; ++y) acc[x * N + y] = dot(acc[x * N + y], value, column[y]);
    }
  }
#pragma GCC unroll 16
  for (int x = 0; x < M * N; ++x) put(i + x / N, j + x % N * kLanes, acc[x]);
}

}  // namespace detail

// put(i, j, sums) takes columns j .. j + 16 of row i < m. A row's sums don't depend on m.
template <class T, class Start, class Put>
inline void panel_product(int64_t m, int64_t n, int64_t k, PanelLeft<T> a, const T* b, Start&& start, Put&& put) {
  const auto columns = [&]<int N>(int64_t j) {
    constexpr int M = 16 / N;
    int64_t i = 0;
    for (; i + M <= m; i += M) detail::panel_tile<M, N, T>(i, j, k, a, b, n, start, put);
    for (; i < m; ++i) detail::panel_tile<1, N, T>(i, j, k, a, b, n, start, put);
  };
  int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) columns.template operator()<4>(j);
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) columns.template operator()<2>(j);
  for (; j < n; j += kLanes) columns.template operator()<1>(j);
}

}  // namespace longspan
