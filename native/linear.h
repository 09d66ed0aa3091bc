// Products with the published [out, in] weights: out[i, n] = round( sum_k x[i, k] w[n, k] ), float32 inside.
#pragma once

#include "activation.h"
#include "dots.h"
#include "pool.h"
#include "tensor.h"
#include "workspace.h"

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

constexpr int64_t kColumnBytes = 64 << 10;  // of weights in one block
constexpr int64_t kRowBytes = 256 << 10;    // of rows in one block
constexpr int64_t kColumnGrain = 16;        // a whole number of tiles

// How one product is cut into units. Few rows: the weights stream from memory, and units are long runs of
// columns: half of them shared out evenly, then half of the rest, down to the grain, so that nobody waits long
// for the last. Many rows: blocks that fit the cache. The cut never changes a result.
struct Blocks {
  int64_t rows = 0, columns = 0;  // of the product; of a block, if there are blocks
  int64_t across = 0;             // blocks side by side; 0: there are runs
  int64_t threads = 1, last = 0;  // of runs: so many on each level, the last level
  int64_t units = 0;

  Blocks() = default;
  Blocks(int64_t m, int64_t n, int64_t k, int64_t bytes, int threads) : rows(m), columns(n), threads(threads) {
    if (m <= 8 * kTileRows) {
      while (n >> last > 2 * kColumnGrain * threads) ++last;
      units = (last + 1) * threads;
      return;
    }
    const auto round = [](int64_t x, int64_t to) { return std::max(to, x / to * to); };
    columns = round(std::min(kColumnBytes / (k * bytes), n / (4 * threads)), kColumnGrain);
    rows = std::min(m, round(kRowBytes / (k * bytes), kTileRows));
    across = (n + columns - 1) / columns;
    units = across * ((m + rows - 1) / rows);
  }

  // Calls work(i0, i1, j0, j1) with what unit `u` of an m x n product is; some runs are empty.
  template <class Work>
  void unit(int64_t u, int64_t m, int64_t n, Work&& work) const {
    if (!across) {
      const int64_t level = u / threads, begin = level_begin(level), end = level < last ? level_begin(level + 1) : n;
      const int64_t run = aligned((end - begin + threads - 1) / threads + kColumnGrain - 1);
      const int64_t j0 = begin + u % threads * run, j1 = std::min(end, j0 + run);
      if (j0 < j1) work(0, m, j0, j1);
      return;
    }
    const int64_t i0 = u / across * rows, j0 = u % across * columns;  // rows stay in L2 while columns pass
    work(i0, std::min(i0 + rows, m), j0, std::min(j0 + columns, n));
  }

 private:
  static int64_t aligned(int64_t j) { return j / kColumnGrain * kColumnGrain; }
  int64_t level_begin(int64_t level) const { return aligned(columns - (columns >> level)); }
};

template <class T, class Out>
void multiply_block(const Product<T, Out>& p, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  const T* w = p.weight.template data<T>();
  const int64_t k = p.weight.cols, stride = p.weight.stride;
  dots<true, T>(
      i1 - i0, j1 - j0, k, [&](int64_t i) { return p.x + (i0 + i) * p.x_stride; },
      [&](int64_t j) { return w + (j0 + j) * stride; },
      [&](int64_t i, int64_t j, const float* c, auto count) {
        store_part(p.out + (i0 + i) * p.out_stride + j0 + j, load(c), count);
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
    blocks[count] = {m, p.weight.rows, p.weight.cols, sizeof(T), team.size};
    total += blocks[count++].units;
  }
  team.claim(total, 1, [&](int64_t unit, int64_t) {
    int which = 0;
    while (unit >= blocks[which].units) unit -= blocks[which++].units;
    const auto& p = products.begin()[which];
    blocks[which].unit(unit, m, p.weight.rows, [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
      detail::multiply_block(p, i0, i1, j0, j1);
    });
  });
}

// hidden[i, n] = activation( round(gate_n x_i), round(up_n x_i) ) for m rows of `gate.cols` inputs: both products
// and the activation in one pass. No barrier after it.
template <class T>
void multiply_gated(Team& team, int64_t m, const T* x, const Weight& gate, const Weight& up,
                    const Activation& activation, T* hidden) {
  const int64_t n = gate.rows, k = gate.cols;
  const detail::Blocks blocks(m, n, k, sizeof(T), team.size);
  team.claim(blocks.units, 1, [&](int64_t unit, int64_t) {
    blocks.unit(unit, m, n, [&](int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
      const int64_t width = j1 - j0;
      Workspace workspace;
      T* products[2];
      const Weight* weights[2] = {&gate, &up};
      for (int half = 0; half < 2; ++half) {
        products[half] = workspace.take<T>((i1 - i0) * width);
        const Product<T> p{x + i0 * k, k, *weights[half], products[half] - j0, width};
        detail::multiply_block(p, 0, i1 - i0, j0, j1);
      }
      for (int64_t i = i0; i < i1; ++i) {
        const int64_t at = (i - i0) * width;
        activation.apply(products[0] + at, products[1] + at, hidden + i * n + j0, width);
      }
    });
  });
}

}  // namespace longspan
