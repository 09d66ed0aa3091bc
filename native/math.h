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

// e^x of 8 doubles <= 0, within 1e-14 relatively. Below -708 it is 0: no double of full width is so small.
inline Doubles exp_negative(Doubles x) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: the sum leaves the whole number in its low bits
  const Doubles bounded = x > -708.0 ? x : -708.0 + Doubles{};
  const Doubles shifted = bounded * 1.4426950408889634 + kMagic;
  const Doubles n = shifted - kMagic;
  Doubles f = bounded - n * 0.693147180369123816490;  // ln 2 in two parts
  f = f - n * 1.90821492927058770002e-10;
  constexpr double factorials[] = {39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
  Doubles p = 1.0 / 479001600 + Doubles{};
  for (const double factorial : factorials) p = p * f + 1.0 / factorial;
  const Doubles result = cast_bits<Doubles>(Longs(cast_bits<Longs>(p) + (cast_bits<Longs>(shifted) << 52)));
  return x > -708.0 ? result : Doubles{};
}

inline Floats sigmoid(Floats x) { return reciprocal(1.0f + exp(-x)); }

// (tanh(x) / x - 1) / x^2 by its series in x^2, for |x| < 0.45: small values keep their digits.
inline Floats tanh_series(Floats square) {
  Floats series = broadcast(21844.0f / 6081075.0f);
  series = series * square - 1382.0f / 155925.0f;
  series = series * square + 62.0f / 2835.0f;
  series = series * square - 17.0f / 315.0f;
  series = series * square + 2.0f / 15.0f;
  return series * square - 1.0f / 3.0f;
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
