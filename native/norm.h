// RMSNorm of one row, rounding where the model rounds: w * round( x * rsqrt(mean(x^2) + eps) ).
#pragma once

#include "math.h"

namespace longspan {

template <class T>
inline float mean_square(const T* x, int64_t n) {
  Floats squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats v = load(x + i);
    squares += v * v;
  }
  if (i < n) {
    const Floats v = load_part(x + i, int(n - i));
    squares += v * v;
  }
  return sum(squares) / float(n);
}

// 16 lanes after a trip through T.
template <class T>
inline Floats round_to(Floats v) {
  if constexpr (sizeof(T) == 4) return v;
  T rounded[kLanes];
  store(rounded, v);
  return load(rounded);
}

template <class T>
inline void rms_norm(const T* x, const T* weight, float eps, int64_t n, T* out) {
  const float scale = rsqrt(mean_square(x, n) + eps);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(weight + i) * round_to<T>(load(x + i) * scale));
  if (const int rest = int(n - i))
    store_part(out + i, load_part(weight + i, rest) * round_to<T>(load_part(x + i, rest) * scale), rest);
}

}  // namespace longspan
