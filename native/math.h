// exp, sigmoid, tanh, softplus and SiTU for 16 lanes: within 3e-7 of the true value, relatively.
#pragma once

#include "simd.h"

namespace longspan {

// e^x by 2^n * 2^f, |f| <= 1/2. Saturates to 0 and infinity; NaN stays NaN.
inline Floats exp(Floats x) {
  const Floats bounded = max(min(x, broadcast(89.0f)), broadcast(-104.0f));
  const Floats scaled = bounded * 1.44269504088896341f;
  const Floats n = (scaled + 12582912.0f) - 12582912.0f;  // to nearest: 1.5 * 2^23 leaves no fraction
  Floats f = bounded - n * 0.693359375f;  // ln 2 in two parts
  f = f - n * -2.12194440e-4f;
  Floats p = broadcast(1.9841270e-4f);
  p = p * f + 1.3888889e-3f;
  p = p * f + 8.3333333e-3f;
  p = p * f + 4.1666667e-2f;
  p = p * f + 1.6666667e-1f;
  p = p * f + 0.5f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  const Floats result = times_power(p, n);
  return select(x == x, result, x);
}

inline Floats sigmoid(Floats x) { return reciprocal(1.0f + exp(-x)); }

// Near 0 the odd series, so that small values keep their digits.
inline Floats tanh(Floats x) {
  const Floats square = x * x;
  Floats series = broadcast(62.0f / 2835.0f);
  series = series * square - 17.0f / 315.0f;
  series = series * square + 2.0f / 15.0f;
  series = series * square - 1.0f / 3.0f;
  const Floats near = x + x * square * series;
  const Floats far = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return select(square < 0.04f, near, far);
}

inline Floats silu(Floats x) { return x * sigmoid(x); }

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|;  log(1 + u) = 2 atanh(s), s = u / (2 + u) <= 1/3.
inline Floats softplus(Floats x) {
  const Floats u = exp(select(x > 0.0f, -x, x));
  const Floats s = u / (2.0f + u), square = s * s;
  Floats series = broadcast(2.0f / 15.0f);
  for (int k = 13; k > 0; k -= 2) series = series * square + 2.0f / float(k);
  return max(x, zero()) + s * series;
}

// x^-1/2 of one value, as torch computes it.
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }

}  // namespace longspan
