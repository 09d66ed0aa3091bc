// The gated MLP of dense layers and shared experts: down( activation( gate x, up x ) ).
#include "ffn.h"

namespace longspan {
namespace {

void ffn(const Ffn& weights, int64_t rows, Address x, Address out) {
  with_dtype(weights.gate.dtype, [&]<class T>(T) {
    Workspace workspace;
    auto* hidden = workspace.take<T>(rows * weights.gate.rows);
    pool()->run([&](Team& team) {
      weights.expand(team, rows, at<const T>(x), hidden);
      team.barrier();
      weights.contract(team, rows, hidden, at<T>(out));
    });
  });
}

}  // namespace

void bind_ffn(nb::module_& m) {
  nb::class_<Ffn>(m, "Ffn").def(nb::init<Tensor, Tensor, Tensor, Activation>());
  m.def("ffn", &ffn, Unlocked());
}

}  // namespace longspan
