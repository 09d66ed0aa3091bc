// The gated activation of every MLP and expert, as ops/activation.py has it.
//
//     situ(g, u) = round( [b tanh(g/b) sigmoid(g)] * [c tanh(u/c)] )       silu(g, u) = round( round(silu(g)) * u )
#pragma once

#include "norm.h"

namespace longspan {

// A quotient not yet divided: the three of SiTU share one division.
struct Ratio {
  Floats over, under;  // under in [1, 2]
};
inline Ratio operator*(Ratio a, Ratio b) { return {a.over * b.over, a.under * b.under}; }

// tanh as in math.h, and sigmoid by e^-|x|.
inline Ratio tanh_ratio(Floats x) {
  const Floats square = x * x, size = max(x, -x), e = exp(-2.0f * size);
  const Ints near = size < 0.45f;
  const Floats far = select(x < 0.0f, e - 1.0f, 1.0f - e);
  return {select(near, x + x * (square * tanh_series(square)), far), select(near, broadcast(1.0f), 1.0f + e)};
}
inline Ratio sigmoid_ratio(Floats x) {
  const Floats e = exp(-max(x, -x));
  return {select(x < 0.0f, e, broadcast(1.0f)), 1.0f + e};
}

struct Activation {
  bool situ = false;
  float beta = 1.0f;
  float linear_beta = 0.0f;  // 0: the up branch is left as it is

  template <class T>
  Floats operator()(Floats gate, Floats up) const {
    if (!situ) return round_to<T>(silu(gate)) * up;
    Ratio r = tanh_ratio(gate * (1.0f / beta)) * sigmoid_ratio(gate);
    float factor = beta;
    if (linear_beta != 0.0f) {
      r = r * tanh_ratio(up * (1.0f / linear_beta));
      factor *= linear_beta;
    } else {
      r.over *= up;
    }
    return factor * r.over / r.under;
  }

  // out[i] = activation(gate[i], up[i]); out may be gate.
  template <class T>
  void apply(const T* gate, const T* up, T* out, int64_t n) const {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, (*this).template operator()<T>(load(gate + i), load(up + i)));
    if (const int rest = int(n - i))
      store_part(out + i, (*this).template operator()<T>(load_part(gate + i, rest), load_part(up + i, rest)), rest);
  }
};

}  // namespace longspan
