// Products with the published [out, in] weights: out[i, n] = round( sum_k x[i, k] w[n, k] ), float32 inside.
#pragma once

#include "dots.h"
#include "pool.h"
#include "tensor.h"

namespace longspan {

// One product of a stage. `Out` is T, or float where the model keeps sums wide (router, index weights, logits).
template <class T, class Out = T>
struct Product {
  const T* x;  // [m, w.cols]
  int64_t x_stride;
  const Weight& weight;
  Out* out;  // [m, w.rows]
  int64_t out_stride;
};

namespace detail {

constexpr int64_t kColumnBytes = 64 << 10;  // of weights that stay in L2 while rows pass
constexpr int64_t kRowBytes = 256 << 10;    // of rows that stay in L2 while columns pass
constexpr int64_t kColumnGrain = 24;        // a whole number of tiles of either width

struct Blocks {
  int64_t rows, columns;  // of one unit
  int64_t down, across;   // units
  int64_t count() const { return down * across; }
};

inline Blocks blocks_of(int64_t m, int64_t n, int64_t k, int64_t bytes, int threads) {
  const auto round = [](int64_t x, int64_t to) { return std::max(to, x / to * to); };
  int64_t columns = round(std::min(kColumnBytes / (k * bytes), n / (4 * threads)), kColumnGrain);
  int64_t rows = round(kRowBytes / (k * bytes), kTileRows);
  rows = std::min(rows, std::max<int64_t>(m, 1));
  return {rows, columns, (m + rows - 1) / rows, (n + columns - 1) / columns};
}

template <class T, class Out>
void multiply_block(const Product<T, Out>& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const T* w = p.weight.template data<T>();
  const int64_t k = p.weight.cols, stride = p.weight.stride;
  dots<true, T>(
      i1 - i0, j1 - j0, k, [&](int64_t i) { return p.x + (i0 + i) * p.x_stride; },
      [&](int64_t j) { return w + (j0 + j) * stride; },
      [&](int64_t i, int64_t j, const float* c, int count) {
        Out* out = p.out + (i0 + i) * p.out_stride + j0 + j;
        if constexpr (std::is_same_v<Out, float>)
          std::memcpy(out, c, count * sizeof(float));
        else
          store_part(out, load(c), count);
      });
}

}  // namespace detail

// All products of m rows each, shared out over the team. No barrier after it.
template <class T, class Out>
void multiply(Team& team, int64_t m, std::initializer_list<Product<T, Out>> products) {
  constexpr int kMost = 8;
  detail::Blocks blocks[kMost];
  int64_t total = 0;
  int count = 0;
  for (const auto& p : products) {
    blocks[count] = detail::blocks_of(m, p.weight.rows, p.weight.cols, sizeof(T), team.size);
    total += blocks[count++].count();
  }
  team.claim(total, 1, [&](int64_t unit, int64_t) {
    int which = 0;
    while (unit >= blocks[which].count()) unit -= blocks[which++].count();
    const auto& b = blocks[which];
    const auto& p = products.begin()[which];
    const int64_t i0 = unit % b.down * b.rows, j0 = unit / b.down * b.columns;
    detail::multiply_block(p, i0, std::min(i0 + b.rows, m), j0, std::min(j0 + b.columns, p.weight.rows));
  });
}

}  // namespace longspan
