// Weight matrices of routed experts, packed (MXFP4) or plain, and their products with rows of x.
//
//     c[i, j] = sum_k x[i, k] * code[j, k] * 2^(e[j, k / 32] - 127)
//
// Packed codes are used as they lie in the file: [out, in / 2] bytes, low nibble first, and one E8M0 byte for
// 32 inputs. A step takes 128 inputs: 64 bytes are words as wide as T, of C codes each (bfloat16 4, float 8).
// Word i shifted by 4 j starts with the code of input C i + j, and a table in a register turns it into its
// value. So x is arranged once: within 128 inputs, all with k % C = 0 come first, then all with k % C = 1 ...
// Lane l of the products of a step then belongs to the group l / 4, and the scales apply once a step.
//
// `in` is a multiple of 32: the last step of a row may be partial; arranged rows are padded with zeros.
// The sum order is that of k for every tile, so a row's result does not depend on what else is in the batch.
// Scale byte 0 is 2^-127; 255 (NaN) never comes here.
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

// x [n] -> out [arranged_size(n)].
template <class T>
inline void arrange(const T* x, int64_t n, T* out) {
  constexpr int C = kCodes<T>, words = kStepInputs / C;
  int64_t k = 0;
  for (; k + kStepInputs <= n; k += kStepInputs)
    for (int j = 0; j < C; ++j)
      for (int i = 0; i < words; ++i) out[k + j * words + i] = x[k + i * C + j];
  if (k == n) return;
  std::fill(out + k, out + k + kStepInputs, T{});
  for (; k < n; ++k) out[arranged_at<T>(k)] = x[k];
}

namespace detail {

template <class T>
struct Codes;
template <>
struct Codes<bf16> {
  using Words = Halves;
  static Halves table() {  // twice: a lookup takes five bits of a word, the fifth belongs to the next code
    return Halves{0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,  //
                  0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,  //
                  0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,  //
                  0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  }
  static Halves values(Halves words, Halves table) {
#ifdef __AVX512BW__
    return cast_bits<Halves>(_mm512_permutexvar_epi16(cast_bits<__m512i>(words), cast_bits<__m512i>(table)));
#else
    Halves v;
    for (int i = 0; i < 32; ++i) v[i] = table[words[i] & 15];
    return v;
#endif
  }
};
template <>
struct Codes<float> {
  using Words = longspan::Words;
  static Floats table() {
    return Floats{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  }
  static Floats values(longspan::Words words, Floats table) {
#ifdef __AVX512F__
    return Floats(_mm512_permutexvar_ps(cast_bits<__m512i>(words), __m512(table)));
#else
    Floats v;
    for (int i = 0; i < kLanes; ++i) v[i] = table[words[i] & 15];
    return v;
#endif
  }
};

// The first n <= 64 bytes, zeros after them.
template <class Words>
inline Words load_bytes(const uint8_t* p, int n) {
#ifdef __AVX512BW__
  return cast_bits<Words>(_mm512_maskz_loadu_epi8(~0ull >> (64 - n), p));
#else
  Words v{};
  std::memcpy(&v, p, n);
  return v;
#endif
}

// Lane l is 2^(e - 127) for e = byte l / 4 of `exponents`. What the shift makes of 0 becomes the subnormal 2^-127.
inline Floats group_scales(uint32_t exponents) {
#ifdef __AVX512BW__
  const __m512i control = _mm512_set_epi32(0x03ffffff, 0x03ffffff, 0x03ffffff, 0x03ffffff, 0x02ffffff, 0x02ffffff,
                                           0x02ffffff, 0x02ffffff, 0x01ffffff, 0x01ffffff, 0x01ffffff, 0x01ffffff,
                                           0x00ffffff, 0x00ffffff, 0x00ffffff, 0x00ffffff);
  const __m512i top = _mm512_shuffle_epi8(_mm512_set1_epi32(int(exponents)), control);
  return cast_bits<Floats>(_mm512_max_epu32(_mm512_srli_epi32(top, 1), _mm512_set1_epi32(0x00400000)));
#else
  Words bits;
  for (int l = 0; l < kLanes; ++l) bits[l] = std::max((exponents >> (l / 4 * 8) & 0xff) << 23, 0x00400000u);
  return cast_bits<Floats>(bits);
#endif
}

// c [M][stride] of M arranged rows and N packed rows from `codes` and `scales` on, k inputs each.
template <int M, int N, class T>
inline void packed_tile(const T* const* x, const uint8_t* codes, const uint8_t* scales, int64_t k, float* c,
                        int64_t stride, const char* ahead) {
  using Words = typename Codes<T>::Words;
  constexpr int C = kCodes<T>, words = kStepInputs / C;
  const int64_t codes_stride = k / 2, scales_stride = k / kGroupInputs;
  const auto table = Codes<T>::table();
  Floats acc[M * N];
#pragma GCC unroll 32
  for (int i = 0; i < M * N; ++i) acc[i] = zero();
  const T* rows[M];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) rows[i] = x[i];

  const auto step = [&](int64_t at, auto&& load_codes, auto&& load_scales) __attribute__((always_inline)) {
    Words packed[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) packed[n] = load_codes(codes + n * codes_stride + at / 2);
    Floats part[M * N];
#pragma GCC unroll 8
    for (int j = 0; j < C; ++j) {
      decltype(Codes<T>::table()) value[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) value[n] = Codes<T>::values(packed[n] >> (4 * j), table);
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) {
        const auto row = load_operand(rows[i] + at + j * words);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) part[i * N + n] = dot(j ? part[i * N + n] : zero(), row, value[n]);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Floats scale = group_scales(load_scales(scales + n * scales_stride + at / kGroupInputs));
#pragma GCC unroll 8
      for (int i = 0; i < M; ++i) acc[i * N + n] += part[i * N + n] * scale;
    }
  };

  int64_t at = 0;
  for (; at + kStepInputs <= k; at += kStepInputs) {
    if (ahead) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) __builtin_prefetch(ahead + 64 * n);
      ahead += 64 * N;
    }
    step(
        at, [](const uint8_t* p) { return load_bytes<Words>(p, 64); },
        [](const uint8_t* p) {
          uint32_t four;
          std::memcpy(&four, p, 4);
          return four;
        });
  }
  if (const int rest = int(k - at))
    step(
        at, [&](const uint8_t* p) { return load_bytes<Words>(p, rest / 2); },
        [&](const uint8_t* p) {
          uint32_t some = 0;
          std::memcpy(&some, p, rest / kGroupInputs);
          return some;
        });

  float sums[M * N];
  sum_all<M * N>(acc, sums);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) std::memcpy(c + i * stride, sums + i * N, N * sizeof(float));
}

#ifdef __AVX512F__
constexpr int kPackedRows = 6, kPackedColumns = 2, kPackedVectorColumns = 4;
#else
constexpr int kPackedRows = 2, kPackedColumns = 2, kPackedVectorColumns = 2;
#endif

}  // namespace detail

// One [out, in] matrix of an expert, in memory that Python keeps.
class ExpertMatrix {
 public:
  explicit ExpertMatrix(Tensor plain) : weight_(std::move(plain)) {}
  ExpertMatrix(Tensor codes, Tensor scales) : weight_(std::move(codes)), scales_(std::move(scales)), packed_(true) {
    if (weight_.dtype != Dtype::uint8 || scales_.dtype != Dtype::uint8 || weight_.stride != weight_.cols ||
        scales_.stride != scales_.cols || weight_.rows != scales_.rows ||
        weight_.cols * 2 != scales_.cols * kGroupInputs)
      throw std::invalid_argument("packed weights are dense uint8: codes [out, in / 2] and scales [out, in / 32]");
  }

  bool packed() const { return packed_; }
  int64_t rows() const { return weight_.rows; }
  int64_t cols() const { return packed_ ? 2 * weight_.cols : weight_.cols; }
  Dtype dtype() const { return weight_.dtype; }

  // c[i][j] for rows x(i), i < m, and weight rows j0 + j, j < n; rows are arranged if the matrix is packed.
  template <class T, class Rows>
  void product(int64_t m, Rows&& x, int64_t j0, int64_t n, float* c, int64_t stride) const {
    if (packed_)
      packed_product<T>(m, x, j0, n, c, stride);
    else
      dots<true, T>(
          m, n, weight_.cols, x, [&](int64_t j) { return weight_.data<T>() + (j0 + j) * weight_.stride; },
          [&](int64_t i, int64_t j, const float* values, int count) {
            std::copy(values, values + count, c + i * stride + j);
          });
  }

 private:
  // Rows are the outer loop: a tile of them stays in L1 while the packed rows, the smaller side, come from L2.
  template <class T, class Rows>
  void packed_product(int64_t m, Rows&& x, int64_t j0, int64_t n, float* c, int64_t stride) const {
    using namespace detail;
    constexpr int64_t kAhead = 8192;  // bytes
    const int64_t k = cols();
    const auto rows_block = [&]<int M, int Most>(int64_t i0) {
      const T* rows[M];
      for (int i = 0; i < M; ++i) rows[i] = x(i0 + i);
      const auto tile = [&]<int N>(int64_t j) {
        const uint8_t* codes = weight_.data<uint8_t>() + (j0 + j) * weight_.stride;
        const char* ahead = i0 ? nullptr : reinterpret_cast<const char*>(codes) + kAhead;
        packed_tile<M, N, T>(rows, codes, scales_.data<uint8_t>() + (j0 + j) * scales_.stride, k,
                             c + i0 * stride + j, stride, ahead);
      };
      int64_t j = 0;
      for (; j + Most <= n; j += Most) tile.template operator()<Most>(j);
      for (; j < n; ++j) tile.template operator()<1>(j);
    };
    int64_t i = 0;
    for (; i + kPackedRows <= m; i += kPackedRows)
      rows_block.template operator()<kPackedRows, kPackedColumns>(i);
    for (; i + 2 <= m; i += 2) rows_block.template operator()<2, kPackedColumns>(i);
    for (; i < m; ++i) rows_block.template operator()<1, kPackedVectorColumns>(i);
  }

  Weight weight_;  // packed: the codes
  Weight scales_;
  bool packed_ = false;
};

}  // namespace longspan
