// KDA, one head of one sequence, row by row: what goes into the recurrence and what is made of its output.
//
//     conv = round( silu( sum_j tap_j x[t - history + j] ) )                       of q, k and v
//     q = conv_q rsqrt(sum conv_q^2 + 1e-6) / sqrt(dim)       k = conv_k rsqrt(sum conv_k^2 + 1e-6)
//     decay = e^g, g = bound sigmoid(rate (forget + dt_bias)), or -rate softplus(forget + dt_bias)
//     beta = sigmoid(beta)
//     y = round( o_norm round(o) rsqrt(mean(round(o)^2) + eps) sigmoid(gate) )
//
// The inputs before the first row come from the window, or are zeros. At the end the window holds the last
// `history` inputs, also when there are fewer rows than that.
#pragma once

#include "kda.h"
#include "norm.h"

namespace longspan {

// Rows of one head as the recurrence reads them, `width` floats each; lanes beyond dim are 0 in q, k and v.
struct HeadRows {
  float *q, *k, *v, *decay;  // [rows][width]
  float* beta;               // [rows]
};

inline float sum_of_squares(const float* x, int64_t width) {
  Floats squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) squares += load(x + i) * load(x + i);
  return sum(squares);
}

// The first n of 16 elements at p, n being whatever is left.
template <class T>
inline Floats load_rest(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load_part(p, int(n));
}
template <class T>
inline void store_rest(T* p, Floats v, int64_t n) {
  if (n >= kLanes)
    store(p, v);
  else
    store_part(p, v, int(n));
}

template <class T>
class KdaInput {
 public:
  static constexpr int64_t kBlock = 16;  // rows at a time, so that they stay in L1

  static int64_t scratch(const Kda& w) { return (w.history + kBlock) * 3 * w.width; }

  // A sequence that begins has nothing in its window.
  KdaInput(const Kda& w, const KdaRows<T>& rows, int64_t head, int64_t first, KdaWindow<T> window, bool begins,
           float* raw)
      : w_(w), rows_(rows), window_(window), head_(head), row_(first), raw_(raw) {
    if (begins || window.channel != 1) std::fill(raw, raw + w.history * 3 * w.width, 0.0f);
    if (begins) return;
    if (window.channel != 1)
      each_in_window([&](T& x, float& wide) { wide = to_float(x); });
    else
      for (int64_t j = 0; j < w.history; ++j) widen(window.data + j * window.row, raw + j * 3 * w.width);
  }

  // The next `count` rows.
  void read(int64_t count, HeadRows out) {
    const int64_t width = w_.width;
    for (int64_t done = 0; done < count; done += kBlock) {
      const int64_t n = std::min(kBlock, count - done), at = done * width;
      block(n, {out.q + at, out.k + at, out.v + at, out.decay + at, out.beta + done});
      row_ += n;
    }
  }

  // The inputs that the next step needs.
  void save() const {
    if (window_.channel != 1) return each_in_window([](T& x, float& wide) { x = from_float<T>(wide); });
    for (int64_t j = 0; j < w_.history; ++j)
      for (int64_t part = 0; part < 3; ++part)
        for (int64_t i = 0; i < w_.dim; i += kLanes)
          store_rest(window_.data + j * window_.row + part * rows_.inner + i,
                     load(raw_ + (j * 3 + part) * w_.width + i), w_.dim - i);
  }

 private:
  // f(what lies in the window, its place among the raw inputs), the rows of a channel together.
  template <class F>
  void each_in_window(F&& f) const {
    for (int64_t part = 0; part < 3; ++part)
      for (int64_t i = 0; i < w_.dim; ++i)
        for (int64_t j = 0; j < w_.history; ++j)
          f(window_.data[j * window_.row + (part * rows_.inner + i) * window_.channel],
            raw_[(j * 3 + part) * w_.width + i]);
  }

  void widen(const T* x, float* out) const {
    for (int64_t part = 0; part < 3; ++part)
      for (int64_t i = 0; i < w_.dim; i += kLanes)
        store(out + part * w_.width + i, load_rest(x + part * rows_.inner + i, w_.dim - i));
  }

  void block(int64_t n, HeadRows out) const {
    const int64_t width = w_.width, dim = w_.dim, inner = rows_.inner, history = w_.history;
    float* fresh = raw_ + history * 3 * width;
    for (int64_t r = 0; r < n; ++r) widen(rows_.qkv + (row_ + r) * 3 * inner + head_ * dim, fresh + r * 3 * width);
    for (int64_t part = 0; part < 3; ++part) {
      float* to = part == 0 ? out.q : part == 1 ? out.k : out.v;
      history == 3 ? convolve<4>(n, part, to) : convolve<0>(n, part, to);
    }
    // The last inputs move to the front, oldest first: towards smaller addresses, so in order.
    std::copy(raw_ + n * 3 * width, raw_ + (n + history) * 3 * width, raw_);
    const float root = 1.0f / std::sqrt(float(dim));
    for (int64_t r = 0; r < n; ++r) {
      normalise(out.q + r * width, root);
      normalise(out.k + r * width, 1.0f);
      decay(rows_.forget + (row_ + r) * inner + head_ * dim, out.decay + r * width);
      out.beta[r] = sigmoid(broadcast(to_float(rows_.beta[(row_ + r) * w_.heads + head_])))[0];
    }
  }

  // `size` is that of the kernel where the compiler may know it.
  template <int size>
  void convolve(int64_t n, int64_t part, float* out) const {
    const int64_t width = w_.width, kernel = size ? size : w_.history + 1;
    const float* taps = w_.taps.data() + (head_ * kernel * 3 + part) * width;
    const T* next = rows_.qkv + (row_ + kBlock) * 3 * rows_.inner + part * rows_.inner + head_ * w_.dim;
    for (int64_t i = 0; i < width; i += kLanes)
      for (int64_t r = 0; r < n; ++r) {
        __builtin_prefetch(next + r * 3 * rows_.inner + i);
        Floats x = zero();
        for (int64_t j = 0; j < kernel; ++j)
          x += load(taps + j * 3 * width + i) * load(raw_ + ((r + j) * 3 + part) * width + i);
        store(out + r * width + i, round_to<T>(silu(x)));
      }
  }

  void normalise(float* x, float scale) const {
    constexpr float kEps = 1e-6f;
    const float factor = rsqrt(sum_of_squares(x, w_.width) + kEps) * scale;
    for (int64_t i = 0; i < w_.width; i += kLanes) store(x + i, load(x + i) * factor);
  }

  void decay(const T* forget, float* out) const {
    const float rate = w_.rate[head_];
    const float* bias = w_.dt_bias.data() + head_ * w_.width;
    for (int64_t i = 0; i < w_.dim; i += kLanes) {
      __builtin_prefetch(forget + kBlock * rows_.inner + i);
      const Floats z = load_rest(forget + i, w_.dim - i) + load(bias + i);
      store(out + i, exp(w_.lower_bound ? *w_.lower_bound * sigmoid(rate * z) : -rate * softplus(z)));
    }
  }

  const Kda& w_;
  const KdaRows<T>& rows_;
  const KdaWindow<T> window_;
  int64_t head_, row_;
  float* raw_;  // [history + kBlock][q | k | v][width]
};

// y of `count` rows from o [count][width], which it overwrites.
template <class T>
inline void kda_output(const Kda& w, const KdaRows<T>& rows, int64_t head, int64_t first, int64_t count, float* o) {
  constexpr int64_t kAhead = 4;  // rows
  for (int64_t r = 0; r < count; ++r, o += w.width) {
    for (int64_t i = 0; i < w.width; i += kLanes) store(o + i, round_to<T>(load(o + i)));
    const float scale = rsqrt(sum_of_squares(o, w.width) / float(w.dim) + w.norm_eps);
    const int64_t at = (first + r) * rows.inner + head * w.dim;
    for (int64_t i = 0; i < w.dim; i += kLanes) {
      __builtin_prefetch(rows.gate + at + kAhead * rows.inner + i);
      const Floats gate = sigmoid(load_rest(rows.gate + at + i, w.dim - i));
      store_rest(rows.y + at + i, load(o + i) * scale * load(w.output_norm.data() + i) * gate, w.dim - i);
    }
  }
}

}  // namespace longspan
