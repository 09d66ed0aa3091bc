// The two forms of KDA's recurrence on one head. State S [dim, width] in float32, rows `stride` apart.
//
//     S' = diag(decay) S;   d = beta (v - S'^T k);   S = S' + k d^T;   o = S^T q
//
// Token by token, a state is read once from memory: 64 KB at dim 128 stay in L2 for the second pass and are
// written from there. For many tokens, chunks of kChunk, with G the running sum of log decays in a chunk (the work
// with S is the same for every size of chunk, that inside a chunk grows with it: 32 is faster than 64):
//
//     A_rs = beta_r sum_i k_ri k_si e^(G_ri - G_si), s < r       P_rs = sum_i q_ri k_si e^(G_ri - G_si), s <= r
//     d_r = beta_r (v_r - (k_r e^G_r)^T S) - sum_{s<r} A_rs d_s  o_r = (q_r e^G_r)^T S + sum_{s<=r} P_rs d_s
//     S <- diag(e^G_end) S + sum_s (k_s e^(G_end - G_s)) d_s^T
//
// e^(G_r - G_s) is never made of differences but is the product of the decays between s and r, which has all
// its digits and fades to 0. Between tiles of kTile rows it is split where the tile of s ends, both parts being
// such products; inside a tile it runs along with r. The triangle is solved in float32; the other products
// are of T.
#pragma once

#include "kda_rows.h"
#include "panels.h"

namespace longspan {

struct HeadState {
  float* data;
  int64_t stride;
};

namespace detail {

// N vectors of columns from j on, all rows of the state.
template <int N>
inline void recur_columns(int64_t dim, const float* q, const float* k, const float* v, const float* decay,
                          float beta, float* s, int64_t stride, float* o) {
  Floats delta[N], sums[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) sums[j] = zero();
  for (int64_t i = 0; i < dim; ++i) {
    const Floats key = broadcast(k[i] * decay[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[j] += key * load(s + i * stride + j * kLanes);
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) {
    delta[j] = beta * (load(v + j * kLanes) - sums[j]);
    sums[j] = zero();
  }
  for (int64_t i = 0; i < dim; ++i) {
    const Floats key = broadcast(k[i]), query = broadcast(q[i]), fade = broadcast(decay[i]);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      float* at = s + i * stride + j * kLanes;
      const Floats next = fade * load(at) + key * delta[j];
      store(at, next);
      sums[j] += query * next;
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) store(o + j * kLanes, sums[j]);
}

}  // namespace detail

// `count` tokens after one another: rows, o [count, width]. Columns don't see each other, so a block of them
// takes all tokens in turn: one token reads whole cache lines side by side, many keep a block in L1.
inline void kda_recur(int64_t dim, int64_t width, int64_t count, const HeadRows& rows, HeadState s, float* o) {
  int64_t j = 0;
  const auto columns = [&]<int N>() {
    for (; j + N * kLanes <= width; j += N * kLanes)
      for (int64_t t = 0; t < count; ++t) {
        const int64_t at = t * width;
        detail::recur_columns<N>(dim, rows.q + at, rows.k + at, rows.v + at + j, rows.decay + at, rows.beta[t],
                                 s.data + j, s.stride, o + at + j);
      }
  };
  if (count == 1) columns.template operator()<8>();
  columns.template operator()<2>();
  columns.template operator()<1>();
}

template <class T>
class KdaChunk {
 public:
  static constexpr int64_t kChunk = 32, kTile = kLanes;

  static int64_t scratch(int64_t width) {  // floats
    return width * (5 * kChunk + 2 * kTile + 2 + width) + 2 * kChunk * kChunk;
  }

  KdaChunk(int64_t width, float* memory) : width_(width) {
    const auto take = [&]<class X>(X*& array, int64_t count) {
      array = reinterpret_cast<X*>(memory);
      memory += count;
    };
    take(delta_, kChunk * width);
    take(fading_, kTile * width);
    take(running_, width);
    take(total_, width);
    take(a_, kChunk * kChunk);
    take(p_, kChunk * kChunk);
    take(left_, 2 * kChunk * width);
    take(right_, kTile * width);
    take(out_, kChunk * width);
    take(delta_panel_, kChunk * width);
    take(state_panel_, width * width);
  }

  // count <= kChunk tokens -> o [count][width]; `rows` and `o` have room for whole tiles.
  void run(int64_t count, HeadRows rows, HeadState s, float* o) {
    const int64_t n = (count + kTile - 1) / kTile * kTile, width = width_;
    pad(count, n, rows);

    for (int64_t i = 0; i < width; i += 2)
      for (int64_t j = 0; j < width; j += kLanes)
        store_pair(state_panel_, width, i, j, load(s.data + i * s.stride + j), load(s.data + (i + 1) * s.stride + j));
    decayed_from(0, n, rows);
    std::copy(running_, running_ + width, total_);
    panel_product<T>(
        2 * n, width, width, PanelLeft<T>{left_, width, 1}, state_panel_, [](int64_t, int64_t) { return zero(); },
        [&](int64_t i, int64_t j, Floats x) {
          if (i < n)
            store(delta_ + i * width + j, rows.beta[i] * (load(rows.v + i * width + j) - x));
          else
            store(o + (i - n) * width + j, x);
        });

    for (int64_t tile = 0; tile < n; tile += kTile) scores(tile, n, rows);
    for (int64_t tile = 0; tile < n; tile += kTile) solve(tile);

    for (int64_t r = 0; r < n; r += 2)
      for (int64_t j = 0; j < width; j += kLanes)
        store_pair(delta_panel_, width, r, j, load(delta_ + r * width + j), load(delta_ + (r + 1) * width + j));
    for (int64_t tile = 0; tile < n; tile += kTile) {
      float* to = o + tile * width;
      panel_product<T>(
          kTile, width, tile + kTile, PanelLeft<T>{p_ + tile * kChunk, kChunk, 1}, delta_panel_,
          [&](int64_t i, int64_t j) { return load(to + i * width + j); },
          [&](int64_t i, int64_t j, Floats x) { store(to + i * width + j, x); });
    }

    decayed_to_end(n, rows);
    panel_product<T>(
        width, width, n, PanelLeft<T>{out_, kPanelStep<T>, width}, delta_panel_,
        [&](int64_t i, int64_t j) { return total_[i] * load(s.data + i * s.stride + j); },
        [&](int64_t i, int64_t j, Floats x) { store(s.data + i * s.stride + j, x); });
  }

 private:
  // Rows that change nothing.
  void pad(int64_t count, int64_t n, HeadRows rows) const {
    for (float* x : {rows.q, rows.k, rows.v}) std::fill(x + count * width_, x + n * width_, 0.0f);
    std::fill(rows.decay + count * width_, rows.decay + n * width_, 1.0f);
    std::fill(rows.beta + count, rows.beta + n, 0.0f);
  }

  // left_ <- rows first.. of k, then of q, each times the decays from `first` up to its own; running_ <- all of them.
  void decayed_from(int64_t first, int64_t n, HeadRows rows) {
    const int64_t width = width_;
    std::fill(running_, running_ + width, 1.0f);
    for (int64_t r = first; r < n; ++r) {
      T* k = left_ + (r - first) * width;
      T* q = k + (n - first) * width;
      for (int64_t j = 0; j < width; j += kLanes) {
        const Floats faded = load(running_ + j) * load(rows.decay + r * width + j);
        store(running_ + j, faded);
        store(k + j, faded * load(rows.k + r * width + j));
        store(q + j, faded * load(rows.q + r * width + j));
      }
    }
  }

  // out_ <- k, each row times the decays after it, packed along the tokens.
  void decayed_to_end(int64_t n, HeadRows rows) {
    const int64_t width = width_;
    std::fill(running_, running_ + width, 1.0f);
    for (int64_t r = n - 2; r >= 0; r -= 2)
      for (int64_t j = 0; j < width; j += kLanes) {
        const float* k = rows.k + r * width + j;
        const float* decay = rows.decay + r * width + j;
        const Floats after = load(running_ + j), between = after * load(decay + width);
        store(running_ + j, between * load(decay));
        store_pair(out_, width, r, j, between * load(k), after * load(k + width));
      }
  }

  // N vectors of key s of the tile, from j on, run to its end: what the rows r of k and q on their way see of it, and
  // what is left of it.
  template <int N>
  void fade(int64_t tile, int64_t s, int64_t j, HeadRows rows, Floats* a, Floats* p) {
    const int64_t width = width_;
    const float* k = rows.k + tile * width + j;
    const float* q = rows.q + tile * width + j;
    const float* decay = rows.decay + tile * width + j;
    Floats key[N], with_q = j ? p[s] : zero();
#pragma GCC unroll 8
    for (int x = 0; x < N; ++x) {
      key[x] = load(k + s * width + x * kLanes);
      with_q += key[x] * load(q + s * width + x * kLanes);
    }
    p[s] = with_q;
    for (int64_t r = s + 1; r < kTile; ++r) {
      Floats with_k = j ? a[r] : zero();
      with_q = j ? p[r] : zero();
#pragma GCC unroll 8
      for (int x = 0; x < N; ++x) {
        const int64_t at = r * width + x * kLanes;
        key[x] *= load(decay + at);
        with_k += key[x] * load(k + at);
        with_q += key[x] * load(q + at);
      }
      a[r] = with_k;
      p[r] = with_q;
    }
#pragma GCC unroll 8
    for (int x = 0; x < N; ++x) store(fading_ + s * width + j + x * kLanes, key[x]);
  }

  // Columns tile .. tile + kTile of -A and P.
  void scores(int64_t tile, int64_t n, HeadRows rows) {
    const int64_t width = width_, end = tile + kTile, below = n - end;
    Floats a[kTile], p[kTile];              // of the key at hand, by row
    Floats a_sums[kTile], p_sums[kTile];  // by key
    for (int64_t s = 0; s < kTile; ++s) {
      a[s] = zero();
      if (s) p[s - 1] = zero();
      int64_t j = 0;
      for (; j + 8 * kLanes <= width; j += 8 * kLanes) fade<8>(tile, s, j, rows, a, p);
      for (; j < width; j += kLanes) fade<1>(tile, s, j, rows, a, p);
      a_sums[s] = sum_each(a);
      p_sums[s] = sum_each(p);
    }
    transpose(a_sums);
    transpose(p_sums);
    for (int64_t r = 0; r < kTile; ++r) {
      store(a_ + (tile + r) * kChunk + tile, -rows.beta[tile + r] * a_sums[r]);
      store(p_ + (tile + r) * kChunk + tile, p_sums[r]);
    }
    if (!below) return;
    for (int64_t j = 0; j < width; j += kLanes) {
      Floats keys[kTile];
      for (int64_t s = 0; s < kTile; ++s) keys[s] = load(fading_ + s * width + j);
      transpose(keys);
      for (int64_t i = 0; i < kLanes; i += 2) store_pair(right_, kTile, j + i, 0, keys[i], keys[i + 1]);
    }
    decayed_from(end, n, rows);
    panel_product<T>(
        2 * below, kTile, width, PanelLeft<T>{left_, width, 1}, right_, [](int64_t, int64_t) { return zero(); },
        [&](int64_t i, int64_t, Floats x) {
          if (i < below)
            store(a_ + (end + i) * kChunk + tile, -rows.beta[end + i] * x);
          else
            store(p_ + (end + i - below) * kChunk + tile, x);
        });
  }

  // Rows tile .. tile + kTile of delta_, which holds the right side; the rows before are solved.
  void solve(int64_t tile) {
    const int64_t width = width_;
    const auto subtract = [&](int64_t first, int64_t m, int64_t from, int64_t count) {
      float* to = delta_ + first * width;
      panel_product<float>(
          m, width, count, PanelLeft<float>{a_ + first * kChunk + from, kChunk, 1}, delta_ + from * width,
          [&](int64_t i, int64_t j) { return load(to + i * width + j); },
          [&](int64_t i, int64_t j, Floats x) { store(to + i * width + j, x); });
    };
    subtract(tile, kTile, 0, tile);
    for (int64_t r = 1; r < kTile; ++r) subtract(tile + r, 1, tile, r);
  }

  const int64_t width_;
  float *delta_, *fading_, *running_, *total_, *a_;
  T *p_, *left_, *right_, *out_, *delta_panel_, *state_panel_;
};

}  // namespace longspan
