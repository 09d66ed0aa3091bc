// Weights of a gated MLP, and its stages inside a region.
#pragma once

#include "linear.h"

namespace longspan {

struct Ffn {
  Weight gate, up;  // [width, in]
  Weight down;      // [out, width]
  Activation activation;

  Ffn(Tensor gate, Tensor up, Tensor down, Activation activation)
      : gate(std::move(gate)), up(std::move(up)), down(std::move(down)), activation(activation) {}

  // The two stages, parted by a barrier: x [m, in] -> hidden [m, width] -> out [m, out].
  template <class T>
  void expand(Team& team, int64_t m, const T* x, T* hidden) const {
    multiply_gated(team, m, x, gate, up, activation, hidden);
  }
  template <class T>
  void contract(Team& team, int64_t m, const T* hidden, T* out) const {
    multiply<T, T>(team, m, {{hidden, gate.rows, down, out, down.rows}});
  }
};

}  // namespace longspan
