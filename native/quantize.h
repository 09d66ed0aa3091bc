// Symmetric int8 of one row, as ops/index_keys.py has it, in float32:
//
//     scale = max |x| / 127        code = 128 + round half to even( x / scale )
//
// A row of zeros has scale 0 and codes 128. A NaN or an infinity shows in the scale; what then is no number
// has code 128.
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace longspan {

constexpr int kQuad = 4;  // dimensions of an int8 key whose products one instruction sums
constexpr uint8_t kZeroCode = 128;

// x / scale to the nearest whole number, ties to even, within +-127; what is no number is 0.
inline Ints quantised(Floats x, float scale) {
  Floats q = x / broadcast(scale);
  q = select(max(q, -q) < INFINITY, q, zero());  // NaN as well
  q = max(min(q, broadcast(127.0f)), broadcast(-127.0f));
  return __builtin_convertvector((q + 12582912.0f) - 12582912.0f, Ints);  // 1.5 * 2^23 leaves no fraction
}

// x [n] -> codes [n rounded up to kLanes], kZeroCode beyond n; returns the scale.
template <class T>
inline float quantize_row(const T* x, int64_t n, uint8_t* codes) {
  typedef uint8_t Codes __attribute__((vector_size(kLanes)));
  const auto values = [&](int64_t i) { return load_part(x + i, int(std::min<int64_t>(kLanes, n - i))); };
  Floats peak = zero();
  Ints missing{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats v = values(i);
    peak = max(max(peak, v), -v);
    missing |= v != v;
  }
  const bool is_nan = sum(select(missing, broadcast(1.0f), zero())) != 0.0f;
  const float scale = is_nan ? std::numeric_limits<float>::quiet_NaN() : max_lane(peak) / 127.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Codes narrow = __builtin_convertvector(quantised(values(i), scale) + kZeroCode, Codes);
    std::memcpy(codes + i, &narrow, sizeof narrow);
  }
  return scale;
}

}  // namespace longspan
