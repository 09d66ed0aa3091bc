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

  // The stages, parted by barriers: x [m, in] -> hidden, with room for 2 m width; in place; hidden -> out [m, out].
  template <class T>
  void expand(Team& team, int64_t m, const T* x, T* hidden) const {
    const int64_t width = gate.rows;
    multiply<T, T>(team, m, {{x, gate.cols, gate, hidden, width}, {x, up.cols, up, hidden + m * width, width}});
  }
  template <class T>
  void activate(Team& team, int64_t m, T* hidden) const {
    constexpr int64_t kGrain = 2048;
    const int64_t count = m * gate.rows;
    team.claim(count, kGrain, [&](int64_t begin, int64_t end) {
      activation.apply(hidden + begin, hidden + count + begin, hidden + begin, end - begin);
    });
  }
  template <class T>
  void contract(Team& team, int64_t m, const T* hidden, T* out) const {
    multiply<T, T>(team, m, {{hidden, gate.rows, down, out, down.rows}});
  }

  template <class T>
  void run(Team& team, int64_t m, const T* x, T* hidden, T* out) const {
    expand(team, m, x, hidden);
    team.barrier();
    activate(team, m, hidden);
    team.barrier();
    contract(team, m, hidden, out);
  }
};

}  // namespace longspan
