// Vectors of 16 float lanes on every machine; the compiler splits them where registers are narrower.
//
// So lane l of a sum holds the same terms in the same order whatever the instruction set, the number of
// threads or the batch. `dot(acc, a, b)` adds to lane l the products of elements 2l and 2l + 1 (bfloat16)
// or of element l (float).
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace longspan {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));  // 8 of them
typedef int64_t Longs __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16 from_float<bf16>(float x) {  // to nearest even; NaN stays NaN
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// x after a trip through T: where the model rounds, the kernels round.
template <class T>
inline float round_to(float x) {
  return to_float(from_float<T>(x));
}

inline Floats broadcast(float x) { return x - Floats{}; }
inline Floats zero() { return Floats{}; }

template <class To, class From>
inline To cast_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return std::bit_cast<To>(x);
}

inline Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
// Of a NaN and a number the second argument.
inline Floats max(Floats a, Floats b) {
#ifdef __AVX512F__
  return Floats(_mm512_maskz_max_ps(0xffff, __m512(a), __m512(b)));
#else
  return a > b ? a : b;
#endif
}
inline Floats min(Floats a, Floats b) {
#ifdef __AVX512F__
  return Floats(_mm512_maskz_min_ps(0xffff, __m512(a), __m512(b)));
#else
  return a < b ? a : b;
#endif
}
inline Ints lane_index() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// x * 2^n for whole n of -150 to 128.
inline Floats times_power(Floats x, Floats n) {
#ifdef __AVX512F__
  return Floats(_mm512_maskz_scalef_ps(0xffff, __m512(x), __m512(n)));
#else
  // In two steps, so that neither end of the range overflows on the way.
  const Ints whole = __builtin_convertvector(n, Ints);
  const Ints half = whole >> 1;
  return x * cast_bits<Floats>(Ints((half + 127) << 23)) * cast_bits<Floats>(Ints((whole - half + 127) << 23));
#endif
}

// 1 / x for x >= 1: infinity gives 0, NaN stays NaN.
inline Floats reciprocal(Floats x) {
#ifdef __AVX512F__
  const Floats finite = min(broadcast(0x1.fffffep127f), x);
  const Floats guess = Floats(_mm512_rcp14_ps(__m512(finite)));
  return guess + guess * (1.0f - finite * guess);
#else
  return 1.0f / x;
#endif
}

// 16 floats from memory of type T.
inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Floats load(const bf16* p) {
#ifdef __AVX512F__
  return cast_bits<Floats>(Words(_mm512_slli_epi32(
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16)));
#else
  Words v;
  for (int i = 0; i < kLanes; ++i) v[i] = uint32_t(p[i].bits) << 16;
  return cast_bits<Floats>(v);
#endif
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, Floats v) {
#ifdef __AVX512BF16__
  const __m256bh narrow = _mm512_cvtneps_pbh(__m512(v));
  std::memcpy(p, &narrow, sizeof narrow);
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<bf16>(v[i]);
#endif
}

// The first n <= 16 lanes; the rest reads as 0 and is not written.
template <class T>
inline Floats load_part(const T* p, int n) {
  if (n == kLanes) return load(p);
  T copy[kLanes] = {};
  std::memcpy(copy, p, n * sizeof(T));
  return load(copy);
}
template <class T>
inline __attribute__((always_inline)) void store_part(T* p, Floats v, int n) {
  if (n == kLanes) return store(p, v);
  T copy[kLanes];
  store(copy, v);
  std::memcpy(p, copy, n * sizeof(T));
}

// What `dot` multiplies: 32 bf16 or 16 floats at a time.
template <class T>
struct Operand;
template <>
struct Operand<float> {
  using Vector = Floats;
  static constexpr int size = kLanes;
};
template <>
struct Operand<bf16> {
  using Vector = Halves;
  static constexpr int size = 2 * kLanes;
};

template <class T>
inline typename Operand<T>::Vector load_operand(const T* p) {
  typename Operand<T>::Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// The first n < size elements, zeros after them.
template <class T>
inline typename Operand<T>::Vector load_operand_part(const T* p, int n) {
#ifdef __AVX512BW__
  if constexpr (sizeof(T) == 2)
    return cast_bits<Halves>(_mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p));
  else
    return cast_bits<Floats>(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p));
#else
  typename Operand<T>::Vector v{};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
#endif
}

// The same one or two elements in every lane.
inline Floats broadcast_operand(const float* p) { return broadcast(*p); }
inline Halves broadcast_operand(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return cast_bits<Halves>(Words(Words{} + pair));
}

// Lane l: a[l] and b[l] as neighbours, rounded to bf16.
inline Halves interleave(Floats a, Floats b) {
#ifdef __AVX512BF16__
  const Words low = Words(_mm512_cvtepu16_epi32(std::bit_cast<__m256i>(_mm512_cvtneps_pbh(__m512(a)))));
  const Words high = Words(_mm512_cvtepu16_epi32(std::bit_cast<__m256i>(_mm512_cvtneps_pbh(__m512(b)))));
  return cast_bits<Halves>(Words(low | high << 16));
#else
  Halves pairs;
  for (int l = 0; l < kLanes; ++l) {
    pairs[2 * l] = from_float<bf16>(a[l]).bits;
    pairs[2 * l + 1] = from_float<bf16>(b[l]).bits;
  }
  return pairs;
#endif
}

inline Floats dot(Floats acc, Floats a, Floats b) { return acc + a * b; }
inline Floats dot(Floats acc, Halves a, Halves b) {
#ifdef __AVX512BF16__
  return Floats(_mm512_dpbf16_ps(__m512(acc), std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b)));
#else
  const Words x = cast_bits<Words>(a), y = cast_bits<Words>(b);
  acc += cast_bits<Floats>(Words(x & 0xffff0000u)) * cast_bits<Floats>(Words(y & 0xffff0000u));
  return acc + cast_bits<Floats>(Words(x << 16)) * cast_bits<Floats>(Words(y << 16));
#endif
}

// Adds to each lane the four products of its unsigned bytes of `codes` with its signed bytes of `q`.
inline Ints dot_bytes(Ints acc, Words codes, Words q) {
#ifdef __AVX512VNNI__
  return Ints(_mm512_dpbusd_epi32(__m512i(acc), __m512i(codes), __m512i(q)));
#else
  for (int byte = 0; byte < 32; byte += 8)
    acc += Ints(codes >> byte & 0xffu) * (Ints(q << (24 - byte)) >> 24);
  return acc;
#endif
}

// Bit i: lane i of a is greater than that of b.
inline uint32_t greater(Floats a, Floats b) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask(__m512(a), __m512(b), _CMP_GT_OQ);
#else
  const Ints yes = a > b;
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t(yes[i] & 1) << i;
  return mask;
#endif
}

// The lanes of `mask` side by side from p on, which has room for 16; what follows them there is undefined.
template <class Lanes>
inline void compress(void* p, Lanes v, uint32_t mask) {
#ifdef __AVX512F__  // by way of a register: to memory the instruction is slow
  const __m512i packed = _mm512_maskz_compress_epi32(__mmask16(mask), cast_bits<__m512i>(v));
  std::memcpy(p, &packed, sizeof packed);
#else
  Lanes packed{};
  for (int n = 0; mask; mask &= mask - 1) packed[n++] = v[std::countr_zero(mask)];
  std::memcpy(p, &packed, sizeof packed);
#endif
}

// The other way round, lanes along columns: lane l holds column `column` + l of a group of rows, as many as `dot`
// sums at a time; it meets one weight per row of the group, the same in all lanes.
template <class T>
constexpr int kGroup = Operand<T>::size / kLanes;

inline Floats load_group(const float* const* rows, int64_t column) { return load(rows[0] + column); }
inline Halves load_group(const bf16* const* rows, int64_t column) {
#ifdef __AVX512F__
  const auto wide = [&](int row) {
    return Words(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[row] + column))));
  };
  return cast_bits<Halves>(Words(wide(0) | wide(1) << 16));
#else
  Halves v;
  for (int i = 0; i < kLanes; ++i) v[2 * i] = rows[0][column + i].bits, v[2 * i + 1] = rows[1][column + i].bits;
  return v;
#endif
}

// Sum of all lanes, always as the same tree: halves, quarters, pairs. `sum_each` gives the same bits.
inline float sum(Floats v) {
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
}
inline float max_lane(Floats v) {
  v = max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

namespace detail {
// One level of the tree for two sums at once: the lower part of each group of lanes is a's, the upper b's.
inline Floats fold8(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline Floats fold4(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
inline Floats fold2(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline Floats fold1(Floats a, Floats b) {
  return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
}  // namespace detail

// Lane i of the result is sum(v[i]), bit for bit.
inline Floats sum_each(const Floats v[kLanes]) {
  using namespace detail;
  Floats f8[8], f4[4], f2[2];
  for (int i = 0; i < 8; ++i) f8[i] = fold8(v[i], v[i + 8]);
  for (int i = 0; i < 4; ++i) f4[i] = fold4(f8[i], f8[i + 4]);
  for (int i = 0; i < 2; ++i) f2[i] = fold2(f4[i], f4[i + 2]);
  return fold1(f2[0], f2[1]);
}

// v[i][j] <- v[j][i].
inline void transpose(Floats v[kLanes]) {
  Floats t[kLanes];
  for (int i = 0; i < 8; ++i) {
    t[i] = __builtin_shufflevector(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    t[i + 8] = __builtin_shufflevector(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 16; ++i)
    if (!(i & 4)) {
      v[i] = __builtin_shufflevector(t[i], t[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      v[i + 4] = __builtin_shufflevector(t[i], t[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  for (int i = 0; i < 16; ++i)
    if (!(i & 2)) {
      t[i] = __builtin_shufflevector(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      t[i + 2] = __builtin_shufflevector(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < 16; i += 2) {
    v[i] = __builtin_shufflevector(t[i], t[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    v[i + 1] = __builtin_shufflevector(t[i], t[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}

// Lane i < 8 of the result is sum(v[i]), bit for bit; the other lanes repeat them.
inline Floats sum_each8(const Floats v[8]) {
  using namespace detail;
  Floats f8[4], f4[2];
  for (int i = 0; i < 4; ++i) f8[i] = fold8(v[i], v[i + 4]);
  for (int i = 0; i < 2; ++i) f4[i] = fold4(f8[i], f8[i + 2]);
  Floats pairs = fold2(f4[0], f4[1]);  // lanes 2i and 2i + 1 belong to v[i]
  pairs += __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14);
}

}  // namespace longspan
