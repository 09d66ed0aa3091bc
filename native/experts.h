// Weight matrices of routed experts, packed (MXFP4) or plain, and their products with rows of x.
//
//     c[i, j] = sum_k x[i, k] w[j, k]        packed: w[j, k] = code[j, k] * 2^(e[j, k / 32] - 127), exact in T
//
// Packed codes are used as they lie in the file: [out, in / 2] bytes, low nibble first, and one E8M0 byte for
// 32 inputs. A step takes 128 inputs: 64 bytes are words as wide as T, of C codes each (bfloat16 4, float 8).
// Word i shifted by 4 j starts with the code of input C i + j, and a table in a register turns it into its
// value. So x is arranged once: within 128 inputs, all with k % C = 0 come first, then all with k % C = 1 ...
// The 128 bits of words that belong to a group of 32 inputs share a scale.
//
// Few rows meet weights that are unpacked in registers; for more, a block of weight rows is unpacked once, into
// a panel, and `dots` does the rest. Both sum in the same order, so a row's result does not depend on what else
// is in the batch. `in` is a multiple of 32: the last step may be partial; arranged rows end with zeros.
//
// Scale bytes are 0..252; of bfloat16, weights under scale byte 0, all below 2^-124, count as 0.
#pragma once

#include "dots.h"
#include "tensor.h"

namespace longspan {

constexpr int kStepInputs = 128;
constexpr int kGroupInputs = 32;

inline int64_t arranged_size(int64_t n) { return (n + kStepInputs - 1) / kStepInputs * kStepInputs; }

template <class T>
constexpr int kCodes = 2 * sizeof(T);  // in a word

// Where input k lies in an arranged row.
template <class T>
inline int64_t arranged_at(int64_t k) {
  const int64_t within = k % kStepInputs;
  return k - within + within % kCodes<T> * (kStepInputs / kCodes<T>) + within / kCodes<T>;
}

// x [32], the inputs from k on, k a multiple of 32 -> their places in an arranged row.
template <class T>
inline void arrange_group(const T* x, int64_t k, T* row) {
  constexpr int C = kCodes<T>, run = kGroupInputs / C;
  T* out = row + arranged_at<T>(k);
  for (int j = 0; j < C; ++j) {
    T piece[run];
    for (int i = 0; i < run; ++i) piece[i] = x[i * C + j];
    std::memcpy(out + j * (kStepInputs / C), piece, sizeof piece);
  }
}

// Zeros from input n on, a multiple of 32, to the end of an arranged row.
template <class T>
inline void end_arranged(int64_t n, T* row) {
  const T none[kGroupInputs] = {};
  for (int64_t k = n; k < arranged_size(n); k += kGroupInputs) arrange_group(none, k, row);
}

// x [n], n a multiple of 32 -> out [arranged_size(n)].
template <class T>
inline void arrange(const T* x, int64_t n, T* out) {
  for (int64_t k = 0; k < n; k += kGroupInputs) arrange_group(x + k, k, out);
  end_arranged(n, out);
}

namespace detail {

typedef uint8_t Exponents __attribute__((vector_size(16)));  // of a strip of four steps

// The values of codes in T. `values` looks at the lowest four bits of each word. A strip's exponents become its
// `scales`, and `of_step` gives those of one step: group g in the g-th 128 bits, as `values` wants them.
template <class T>
struct Codes;

// bfloat16: exponents are 8 bits, so a scale is an offset of the whole number. The table holds the values times
// 2^126 and 0 for 0, and the scale is taken off with saturation at 0, which leaves zeros alone.
template <>
struct Codes<bf16> {
  using Words = Halves;
  using Scales = Halves;
  static Halves table() {  // twice: a lookup takes five bits of a word, the fifth belongs to the next code
    return Halves{0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0,  //
                  0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0,  //
                  0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0,  //
                  0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0};
  }
  static Scales scales(Exponents exponents) {
    typedef uint16_t Sixteen __attribute__((vector_size(32)));
    constexpr uint16_t kTop = 253 << 7;  // where the table has 1
#ifdef __AVX512BW__
    const Sixteen bits = Sixteen(_mm256_cvtepu8_epi16(__m128i(exponents))) << 7;
#else
    const Sixteen bits = __builtin_convertvector(exponents, Sixteen) << 7;
#endif
    const Sixteen offsets = bits == 0 ? Sixteen{} - 1 : kTop - bits;
    return __builtin_shufflevector(offsets, offsets, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,  //
                                   0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  template <int step>
  static Scales of_step(Scales s) {
    constexpr int a = 4 * step, b = a + 1, c = a + 2, d = a + 3;
    return __builtin_shufflevector(s, s, a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b,  //
                                   c, c, c, c, c, c, c, c, d, d, d, d, d, d, d, d);
  }
  static Halves values(Halves words, Halves table, Scales scales) {
#ifdef __AVX512BW__
    const __m512i top = _mm512_permutexvar_epi16(cast_bits<__m512i>(words), cast_bits<__m512i>(table));
    return cast_bits<Halves>(_mm512_subs_epu16(top, cast_bits<__m512i>(scales)));
#else
    Halves v;
    for (int i = 0; i < 32; ++i) v[i] = std::max(table[words[i] & 15], scales[i]) - scales[i];
    return v;
#endif
  }
};

// float: a product.
template <>
struct Codes<float> {
  using Words = longspan::Words;
  using Scales = Floats;
  static Floats table() {
    return Floats{0.0f, 0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                  0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  }
  static Scales scales(Exponents exponents) {
    const Ints bits = __builtin_convertvector(exponents, Ints) << 23;
    return cast_bits<Floats>(Ints(bits == 0 ? Ints{} + 0x00400000 : bits));  // 2^-127 is a subnormal
  }
  template <int step>
  static Scales of_step(Scales s) {
    constexpr int a = 4 * step, b = a + 1, c = a + 2, d = a + 3;
    return __builtin_shufflevector(s, s, a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
  }
  static Floats values(longspan::Words words, Floats table, Scales scales) {
#ifdef __AVX512F__
    return Floats(_mm512_permutexvar_ps(cast_bits<__m512i>(words), __m512(table))) * scales;
#else
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = table[words[i] & 15];
    return v * scales;
#endif
  }
};

template <class V>
inline V load_bytes(const uint8_t* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
// The first n bytes, at least one; zeros after them.
template <class V>
inline V load_bytes(const uint8_t* p, int64_t n) {
  if (n >= int64_t(sizeof(V))) return load_bytes<V>(p);
#ifdef __AVX512BW__
  if constexpr (sizeof(V) == 64)
    return cast_bits<V>(_mm512_maskz_loadu_epi8(~0ull >> (64 - n), p));
  else
    return cast_bits<V>(_mm_maskz_loadu_epi8(__mmask16((1u << n) - 1), p));
#else
  V v{};
  std::memcpy(&v, p, n);
  return v;
#endif
}

struct PackedRow {
  const uint8_t* codes;
  const uint8_t* exponents;
};

// Walks N packed rows of k inputs: `step(at, words, scales)` for 128 inputs at a time, N words and N scales.
template <int N, class T, class Step>
inline __attribute__((always_inline)) void walk(const PackedRow* packed, int64_t k, Step&& step) {
  using Words = typename Codes<T>::Words;
  using Scales = typename Codes<T>::Scales;
  constexpr int kStrip = 4 * kStepInputs;
  Words words[N];
  Scales strip[N], scales[N];
  PackedRow rows[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) rows[n] = packed[n];
  const auto one = [&]<int S>(int64_t at, auto&& load) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      words[n] = load.template operator()<Words>(rows[n].codes + at / 2, (k - at) / 2);
      scales[n] = Codes<T>::template of_step<S>(strip[n]);
    }
    step(at, words, scales);
  };
  const auto four = [&]<bool whole>(int64_t at, auto&& load) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      strip[n] = Codes<T>::scales(
          load.template operator()<Exponents>(rows[n].exponents + at / kGroupInputs, (k - at) / kGroupInputs));
    one.template operator()<0>(at, load);
    if (whole || at + kStepInputs < k) one.template operator()<1>(at + kStepInputs, load);
    if (whole || at + 2 * kStepInputs < k) one.template operator()<2>(at + 2 * kStepInputs, load);
    if (whole || at + 3 * kStepInputs < k) one.template operator()<3>(at + 3 * kStepInputs, load);
  };
  int64_t at = 0;
  for (; at + kStrip <= k; at += kStrip)
    four.template operator()<true>(at, []<class V>(const uint8_t* p, int64_t) { return load_bytes<V>(p); });
  if (at < k)
    four.template operator()<false>(
        at, []<class V>(const uint8_t* p, int64_t n) { return load_bytes<V>(p, n); });
}

constexpr int kToL2 = 2;  // L1 has too few requests under way: it ends at three fifths of the bandwidth

// c [M][stride] of M arranged rows and N packed rows, k inputs each. `ahead` is where memory is read next: as
// much as the N rows hold is prefetched from there.
template <int M, int N, class T>
inline void packed_tile(const T* const* x, const PackedRow* w, int64_t k, float* c, int64_t stride,
                        PackedRow ahead) {
  constexpr int C = kCodes<T>, size = kStepInputs / C;
  const auto table = Codes<T>::table();
  Floats acc[M * N];
#pragma GCC unroll 32
  for (int i = 0; i < M * N; ++i) acc[i] = zero();
  const T* rows[M];
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) rows[i] = x[i];
  walk<N, T>(w, k, [&](int64_t at, const auto* words, const auto* scales) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) __builtin_prefetch(ahead.codes + 64 * n, 0, kToL2);
    __builtin_prefetch(ahead.exponents, 0, kToL2);
    ahead = {ahead.codes + 64 * N, ahead.exponents + 4 * N};
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      typename Operand<T>::Vector row[M];
#pragma GCC unroll 4
      for (int i = 0; i < M; ++i) row[i] = load_operand(rows[i] + at + j * size);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const auto value = Codes<T>::values(words[n] >> (4 * j), table, scales[n]);
#pragma GCC unroll 4
        for (int i = 0; i < M; ++i) acc[i * N + n] = dot(acc[i * N + n], row[i], value);
      }
    }
  });
  float sums[M * N];
  sum_all<M * N>(acc, sums);
#pragma GCC unroll 4
  for (int i = 0; i < M; ++i) std::memcpy(c + i * stride, sums + i * N, N * sizeof(float));
}

// A packed row of k inputs -> its values, arranged [arranged_size(k)].
template <class T>
inline void unpack(const PackedRow& row, int64_t k, T* out) {
  constexpr int C = kCodes<T>, size = kStepInputs / C;
  const auto table = Codes<T>::table();
  walk<1, T>(&row, k, [&](int64_t at, const auto* words, const auto* scales) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      const auto value = Codes<T>::values(words[0] >> (4 * j), table, scales[0]);
      std::memcpy(out + at + j * size, &value, sizeof value);
    }
  });
}

constexpr int kPackedRows = 4;  // at most: from five on, a panel is worth it
#ifdef __AVX512F__
constexpr int kPackedColumns = 4;
#else
constexpr int kPackedColumns = 2;
#endif

}  // namespace detail

// One [out, in] matrix of an expert, in memory that Python keeps.
class ExpertMatrix {
 public:
  explicit ExpertMatrix(Tensor plain) : weight_(std::move(plain)) {}
  ExpertMatrix(Tensor codes, Tensor exponents)
      : weight_(std::move(codes)), exponents_(std::move(exponents)), packed_(true) {
    if (weight_.dtype != Dtype::uint8 || exponents_.dtype != Dtype::uint8 || weight_.rows != exponents_.rows ||
        weight_.cols * 2 != exponents_.cols * kGroupInputs)
      throw std::invalid_argument("packed weights are uint8: codes [out, in / 2] and exponents [out, in / 32]");
  }

  bool packed() const { return packed_; }
  int64_t rows() const { return weight_.rows; }
  int64_t cols() const { return packed_ ? 2 * weight_.cols : weight_.cols; }
  Dtype dtype() const { return weight_.dtype; }

  // What `product` wants for n weight rows.
  int64_t panel_size(int64_t n) const { return packed_ ? n * arranged_size(cols()) : 0; }

  // Weight rows [j0, j0 + n), before `rows` rows in all meet them in one or several products: unpacked into the
  // panel, if that is worth it.
  template <class T>
  void prepare(int64_t rows, int64_t j0, int64_t n, T* panel) const {
    if (!packed_ || rows <= detail::kPackedRows) return;
    const int64_t size = arranged_size(cols());
    for (int64_t j = 0; j < n; ++j) detail::unpack(row(j0 + j), cols(), panel + j * size);
  }

  // c [m][stride] of rows x(i), i < m, of `rows` in all; they are arranged if the matrix is packed. What the
  // caller reads afterwards, the rows of `next` from `j_next` on, is prefetched.
  template <class T, class Rows>
  void product(int64_t rows, int64_t m, Rows&& x, int64_t j0, int64_t n, const T* panel, float* c,
               int64_t stride, const ExpertMatrix& next, int64_t j_next) const {
    if (packed_ && rows <= detail::kPackedRows) return few<T>(m, x, j0, n, c, stride, next, j_next);
    const auto put = [&](int64_t i, int64_t j, const float* values, int count) {
      for (int t = 0; t < count; ++t) c[i * stride + j + t] = values[t];
    };
    if (const int64_t size = arranged_size(cols()); packed_)
      dots<false, T>(m, n, size, x, [&](int64_t j) { return panel + j * size; }, put);
    else
      dots<true, T>(
          m, n, cols(), x, [&](int64_t j) { return weight_.data<T>() + (j0 + j) * weight_.stride; }, put);
  }

 private:
  detail::PackedRow row(int64_t j) const {
    return {weight_.data<uint8_t>() + j * weight_.stride, exponents_.data<uint8_t>() + j * exponents_.stride};
  }

  template <class T, class Rows>
  void few(int64_t m, Rows&& x, int64_t j0, int64_t n, float* c, int64_t stride, const ExpertMatrix& next,
           int64_t j_next) const {
    using namespace detail;
    constexpr int64_t kAhead = 8192;  // bytes of codes
    const int64_t tiles = std::max<int64_t>(1, kAhead / (kPackedColumns * weight_.cols));
    const int64_t lead = std::min(n, tiles * kPackedColumns);
    const auto all = [&]<int M>() {
      const T* rows[M];
      for (int i = 0; i < M; ++i) rows[i] = x(i);
      const auto tile = [&]<int N>(int64_t j) {
        PackedRow columns[N];
        for (int i = 0; i < N; ++i) columns[i] = row(j0 + j + i);
        const int64_t later = j + lead;
        packed_tile<M, N, T>(rows, columns, cols(), c + j, stride,
                             later < n || !next.packed_ ? row(j0 + later) : next.row(j_next + later - n));
      };
      int64_t j = 0;
      for (; j + kPackedColumns <= n; j += kPackedColumns) tile.template operator()<kPackedColumns>(j);
      for (; j < n; ++j) tile.template operator()<1>(j);
    };
    if (m == 1) return all.template operator()<1>();
    if (m == 2) return all.template operator()<2>();
    if (m == 3) return all.template operator()<3>();
    if (m == 4) return all.template operator()<4>();
  }

  Weight weight_;  // packed: the codes
  Weight exponents_;
  bool packed_ = false;
};

}  // namespace longspan
