// Weights of a gated MLP, and its stages inside a region.
#pragma once

#include "activation.h"
#include "linear.h"
#include "workspace.h"

namespace longspan {

struct Ffn {
  Weight gate, up;  // [width, in]
  Weight down;      // [out, width]
  Activation activation;

  Ffn(Tensor gate, Tensor up, Tensor down, Activation activation)
      : gate(std::move(gate)), up(std::move(up)), down(std::move(down)), activation(activation) {}

  // x [m, in] -> out [m, out]; hidden has room for 2 m width. Ends without a barrier.
  template <class T>
  void run(Team& team, int64_t m, const T* x, T* hidden, T* out) const {
    const int64_t width = gate.rows;
    T* up_out = hidden + m * width;
    multiply<T, T>(team, m, {{x, gate.cols, gate, hidden, width}, {x, up.cols, up, up_out, width}});
    team.barrier();
    constexpr int64_t kGrain = 2048;
    team.claim(m * width, kGrain, [&](int64_t begin, int64_t end) {
      activation.apply(hidden + begin, up_out + begin, hidden + begin, end - begin);
    });
    team.barrier();
    multiply<T, T>(team, m, {{hidden, width, down, out, down.rows}});
  }
};

}  // namespace longspan
