// Merging attention over disjoint sets of tokens, as ops/partials.py has it, in place: line by line, a line being one
// head of one row.
//
//     m = max(lse, lse')     out = (out e^(lse - m) + out' e^(lse' - m)) / total
//     lse = m + log total    total = e^(lse - m) + e^(lse' - m)
//
// One of the two weighs 1, so only two empty sets (lse -inf) have a total below 1: they stay zeros. NaN of either lse
// makes all of its line NaN.
#include "pool.h"
#include "simd.h"
#include "tensor.h"

namespace longspan {
namespace {

constexpr int64_t kGrain = 16;           // lines
constexpr int64_t kAloneWork = 1 << 19;  // numbers that are not worth waking anybody

// out [width], part [width + 1], the last being its lse.
void merge_line(float* out, float& lse, const float* part, int64_t width) {
  const float other = part[width];
  const float peak = lse > other ? lse : other;
  const float anchor = peak == -INFINITY ? 0.0f : peak;
  const float mine = std::exp(lse - anchor), theirs = std::exp(other - anchor), total = mine + theirs;
  const float bounded = total < 1.0f ? 1.0f : total;
  const float keep = mine / bounded, share = theirs / bounded;
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) store(out + c, load(out + c) * keep + load(part + c) * share);
  for (; c < width; ++c) out[c] = out[c] * keep + part[c] * share;
  lse = peak + std::log(total);
}

void merge_partial(int64_t lines, int64_t width, Address out, Address lse, Address part) {
  const auto run = [&](Team& team) {
    team.claim(lines, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        merge_line(at<float>(out) + i * width, at<float>(lse)[i], at<const float>(part) + i * (width + 1), width);
    });
  };
  lines * width < kAloneWork ? Pool::alone(run) : pool()->run(run);
}

}  // namespace

void bind_partials(nb::module_& m) { m.def("merge_partial", &merge_partial, Unlocked()); }

}  // namespace longspan
