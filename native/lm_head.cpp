// Logits in float32: the products of the last hidden states with the vocabulary.
#include "linear.h"

namespace longspan {
namespace {

void lm_head(const Weight& weight, int64_t rows, Address x, Address out) {
  with_dtype(weight.dtype, [&]<class T>(T) {
    pool()->run([&](Team& team) {
      multiply<T, float>(team, rows, {{at<const T>(x), weight.cols, weight, at<float>(out), weight.rows}});
    });
  });
}

}  // namespace

void bind_lm_head(nb::module_& m) { m.def("lm_head", &lm_head, Unlocked()); }

}  // namespace longspan
