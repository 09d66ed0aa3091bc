// The gated activation of every MLP and expert, as ops/activation.py has it.
//
//     situ(g, u) = round( [b tanh(g/b) sigmoid(g)] * [c tanh(u/c)] )       silu(g, u) = round( round(silu(g)) * u )
#pragma once

#include "norm.h"

namespace longspan {

struct Activation {
  bool situ = false;
  float beta = 1.0f;
  float linear_beta = 0.0f;  // 0: the up branch is left as it is

  template <class T>
  Floats operator()(Floats gate, Floats up) const {
    if (!situ) return round_to<T>(silu(gate)) * up;
    const Floats squashed = beta * tanh(gate / beta) * sigmoid(gate);
    if (linear_beta != 0.0f) up = linear_beta * tanh(up / linear_beta);
    return squashed * up;
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
