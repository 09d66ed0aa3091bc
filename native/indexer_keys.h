// Scores of one query row against a block of 64 index keys, summed over heads in registers.
//
//     score[s] = sum_h w_h * relu(q_h . k_s)
//
// The factor 1 / sqrt(Di) is left out: it changes no choice, and without it equal sums stay equal.
//
// Rows (float, bf16): heads on the lanes. A row's query is turned once, [Hi, Di] -> words of one float or two
// bf16 in columns of 16 heads; a word of the key is broadcast straight from its page. Each head's sum runs
// over the words in order, then lanes times weights over groups of heads, then over the lanes as one tree.
//
// Codes (int8, see QuantizedKeys): keys on the lanes, four dims a step, a quad of the query broadcast. Codes
// are value + 128, so an accumulator starts at -128 * sum(q_h): the sum is whole and exact. Heads in order.
//
// A score depends on its row and its key alone. Keys beyond `count` have scores too, without meaning: they are
// those of another key or of unwritten codes. While a block is scored the next one is fetched.
#pragma once

#include "pages.h"
#include "quantize.h"
#include "simd.h"

namespace longspan {

constexpr int kKeyBlock = 64;

namespace detail {

inline Words broadcast_word(uint32_t x) { return x - Words{}; }

inline uint32_t read_word(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

}  // namespace detail

template <class T>
class RowKeys {
 public:
  using Element = T;
  struct Block {
    uint8_t* scratch;
    const T* keys[kKeyBlock];
  };

  RowKeys(Pages<const T> pages, int64_t heads, int64_t dim)
      : pages_(pages),
        heads_(heads),
        dim_(dim),
        whole_words_(dim / kPerWord),
        words_((dim + kPerWord - 1) / kPerWord),
        groups_((heads + kLanes - 1) / kLanes) {}

  int64_t scratch_bytes() const { return 0; }

  // Of a prepared row, in words: the query [words][groups * 16], then the weights.
  int64_t row_words() const { return (words_ + 1) * groups_ * kLanes; }

  void prepare(const T* query, const float* weight, uint32_t* row) const {
    const int64_t lanes = groups_ * kLanes;
    std::memset(row, 0, row_words() * sizeof(uint32_t));
    float* weights = reinterpret_cast<float*>(row + words_ * lanes);
    for (int64_t h = 0; h < heads_; ++h) {
      const T* q = query + h * dim_;
      for (int64_t i = 0; i < whole_words_; ++i) row[i * lanes + h] = detail::read_word(q + i * kPerWord);
      if (whole_words_ < words_) row[whole_words_ * lanes + h] = last_word(q);
      weights[h] = weight[h];
    }
  }

  void find(const int64_t* table, int64_t begin, int count, Block& block) const {
    int64_t page = begin / pages_.page_size, offset = begin % pages_.page_size;
    const T* key = pages_.row(table[page], offset);
    for (int i = 0; i < kKeyBlock; ++i) {
      block.keys[i] = key;
      if (i + 1 >= count) continue;
      key += pages_.row_stride;
      if (++offset < pages_.page_size) continue;
      offset = 0;
      key = pages_.row(table[++page], 0);
    }
  }

  void score(const uint32_t* row, const Block& block, int count, float* scores, const Block* ahead) const {
    for (int i = 0; i < count; i += kLanes) {
      Floats totals[kLanes];
      for (int j = 0; j < kLanes; j += kTile) {
        Floats* total = totals + j;
        for (int t = 0; t < kTile; ++t) total[t] = zero();
        const char* next = ahead ? reinterpret_cast<const char*>(ahead->keys[i + j]) : nullptr;
        const T* const* tile_keys = block.keys + i + j;
        int64_t group = 0;
        for (; group + 2 <= groups_; group += 2, next = nullptr) tile<2>(row, group, tile_keys, next, total);
        if (group < groups_) tile<1>(row, group, tile_keys, next, total);
      }
      store(scores + i, sum_each(totals));
    }
  }

 private:
  static constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);
  static constexpr int kTile = 8;  // keys

  uint32_t last_word(const T* row) const {  // bf16 of odd dim: the last number and nothing
    uint32_t word = 0;
    std::memcpy(&word, row + whole_words_ * kPerWord, sizeof(T));
    return word;
  }

  // Meanwhile fetches as much as the tile's keys hold from `next` on, if any. A function of its own: what the
  // caller keeps would push the keys' addresses out of the registers.
  template <int G>
  __attribute__((noinline)) void tile(const uint32_t* row, int64_t group, const T* const* block, const char* next, Floats* total) const {
    using Operand = typename longspan::Operand<T>::Vector;
    const int64_t lanes = groups_ * kLanes, whole_words = whole_words_;
    const uint32_t* column = row + group * kLanes;
    const T* keys[kTile];
    Floats acc[kTile][G];
#pragma GCC unroll 8
    for (int j = 0; j < kTile; ++j) {
      keys[j] = block[j];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) acc[j][g] = zero();
    }
    const auto step = [&](auto&& word) __attribute__((always_inline)) {
      Operand q[G];
#pragma GCC unroll 2
      for (int g = 0; g < G; ++g) std::memcpy(&q[g], column + g * kLanes, sizeof q[g]);
      column += lanes;
#pragma GCC unroll 8
      for (int j = 0; j < kTile; ++j) {
        const auto key = cast_bits<Operand>(detail::broadcast_word(word(j)));
#pragma GCC unroll 2
        for (int g = 0; g < G; ++g) acc[j][g] = dot(acc[j][g], key, q[g]);
      }
    };
    for (int64_t i = 0; i < whole_words; ++i) {
      if (next) __builtin_prefetch(next + i * kTile * sizeof(uint32_t));
      step([&](int j) { return detail::read_word(keys[j] + i * kPerWord); });
    }
    if (whole_words < words_) step([&](int j) { return last_word(keys[j]); });
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) {
      const Floats weight = load(reinterpret_cast<const float*>(column + g * kLanes));
      // A key that is not finite makes NaN of a lane without a head.
      const Ints used = lane_index() + int32_t((group + g) * kLanes) < int32_t(heads_);
#pragma GCC unroll 8
      for (int j = 0; j < kTile; ++j) total[j] += select(used, max(zero(), acc[j][g]), zero()) * weight;
    }
  }

  const Pages<const T> pages_;
  const int64_t heads_, dim_, whole_words_, words_, groups_;
};

// Int8 keys in pages as they lie; a query row of T is quantised here, a scale for each head.
template <class T>
class CodeKeys {
  static constexpr int kGroups = kKeyBlock / kLanes;

 public:
  using Element = T;
  struct Block {  // groups of 16 keys
    uint8_t* scratch;
    const uint8_t* codes[kGroups];
    const float* scale[kGroups];
  };

  // codes [pages, quads, page_size, 4] and scale [pages, page_size]; strides in elements.
  struct Layout {
    const uint8_t* codes;
    int64_t page_stride, quad_stride, key_stride;
    const float* scale;
    int64_t scale_page_stride, scale_stride;
    int64_t page_size;
  };

  CodeKeys(Layout pages, int64_t heads, int64_t dim)
      : pages_(pages),
        heads_(heads),
        dim_(dim),
        quads_((dim + 3) / 4),
        padded_heads_((heads + kTileHeads - 1) / kTileHeads * kTileHeads),
        in_place_(pages.key_stride == 4 && pages.scale_stride == 1 && pages.page_size % kLanes == 0) {}

  int64_t scratch_bytes() const { return in_place_ ? 0 : (quads_ + 1) * 4 * kKeyBlock; }

  // Of a prepared row, in words: quads [heads / 4][quads][4 heads], then the starts, then the weights.
  int64_t row_words() const { return padded_heads_ * (quads_ + 2); }

  void prepare(const T* query, const float* weight, uint32_t* row) const {
    std::memset(row, 0, row_words() * sizeof(uint32_t));
    auto* starts = reinterpret_cast<int32_t*>(row + padded_heads_ * quads_);
    auto* weights = reinterpret_cast<float*>(starts + padded_heads_);
    for (int64_t h = 0; h < heads_; ++h) {
      const T* q = query + h * dim_;
      const float scale = largest(q) / 127.0f;
      int32_t total = 0;
      auto* bytes = reinterpret_cast<int8_t*>(row + h / kTileHeads * quads_ * kTileHeads + h % kTileHeads);
      for (int64_t i = 0; i < dim_; i += kLanes) {
        const int n = int(std::min<int64_t>(kLanes, dim_ - i));
        const Ints whole = quantised(read(q + i, n), scale);
        for (int64_t j = 0; j < n; ++j) {
          bytes[(i + j) / 4 * 4 * kTileHeads + (i + j) % 4] = int8_t(whole[j]);
          total += whole[j];
        }
      }
      starts[h] = -128 * total;
      weights[h] = weight[h] * scale;
    }
  }

  // Where groups lie in one piece, there; else copies of their keys, codes and then scales.
  void find(const int64_t* table, int64_t begin, int count, Block& block) const {
    for (int g = 0; g < kGroups; ++g) {
      const int64_t first = begin + g * kLanes, left = begin + count - first;
      if (left <= 0) {
        block.codes[g] = block.codes[0];
        block.scale[g] = block.scale[0];
      } else if (in_place_) {
        const int64_t page = table[first / pages_.page_size], offset = first % pages_.page_size;
        block.codes[g] = code(page, offset);
        block.scale[g] = scale(page, offset);
      } else {
        uint8_t* codes = block.scratch + g * (quads_ + 1) * 4 * kLanes;
        float* scales = reinterpret_cast<float*>(codes + quads_ * 4 * kLanes);
        for (int64_t i = 0; i < kLanes; ++i) {
          const int64_t position = first + std::min(i, left - 1);
          const int64_t page = table[position / pages_.page_size], offset = position % pages_.page_size;
          const uint8_t* key = code(page, offset);
          for (int64_t q = 0; q < quads_; ++q)
            std::memcpy(codes + (q * kLanes + i) * 4, key + q * pages_.quad_stride, 4);
          scales[i] = *scale(page, offset);
        }
        block.codes[g] = codes;
        block.scale[g] = scales;
      }
    }
  }

  void score(const uint32_t* row, const Block& block, int count, float* scores, const Block* ahead) const {
    const auto* starts = reinterpret_cast<const int32_t*>(row + padded_heads_ * quads_);
    const auto* weights = reinterpret_cast<const float*>(starts + padded_heads_);
    for (int g = 0; g * kLanes < count; g += kTileGroups) {
      Floats total[kTileGroups] = {};
      for (int64_t h = 0; h < padded_heads_; h += kTileHeads) {
        if (ahead && in_place_) fetch(*ahead, g, h);
        tile(row + h * quads_, starts + h, weights + h, block.codes + g, total);
      }
      for (int i = 0; i < kTileGroups; ++i)
        store(scores + (g + i) * kLanes, total[i] * load(block.scale[g + i]));
    }
  }

 private:
  static constexpr int kTileHeads = 4, kTileGroups = 2;

  const uint8_t* code(int64_t page, int64_t offset) const {
    return pages_.codes + page * pages_.page_stride + offset * pages_.key_stride;
  }
  const float* scale(int64_t page, int64_t offset) const {
    return pages_.scale + page * pages_.scale_page_stride + offset * pages_.scale_stride;
  }

  // Each tile of a block fetches its share of the next one. Inlined, or GCC sees no effect and drops the call.
  inline __attribute__((always_inline)) void fetch(const Block& block, int group, int64_t head) const {
    const int64_t begin = head * quads_ / padded_heads_, end = (head + kTileHeads) * quads_ / padded_heads_;
    for (int g = group; g < group + kTileGroups; ++g) {
      if (head == 0) __builtin_prefetch(block.scale[g]);
      for (int64_t q = begin; q < end; ++q) __builtin_prefetch(block.codes[g] + q * pages_.quad_stride);
    }
  }

  static Floats read(const T* p, int n) { return n == kLanes ? load(p) : load_part(p, n); }

  // max |q_i|, as bits: there NaN is the greatest.
  float largest(const T* q) const {
    Ints most{};
    for (int64_t i = 0; i < dim_; i += kLanes) {
      const Ints size = cast_bits<Ints>(read(q + i, int(std::min<int64_t>(kLanes, dim_ - i)))) & 0x7fffffff;
      most = size > most ? size : most;
    }
    int32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits = std::max(bits, most[i]);
    return std::bit_cast<float>(bits);
  }

  void tile(const uint32_t* row, const int32_t* starts, const float* weights, const uint8_t* const* groups,
            Floats* total) const {
    const int64_t stride = in_place_ ? pages_.quad_stride : 4 * kLanes;
    Ints acc[kTileHeads][kTileGroups];
    const uint8_t* codes[kTileGroups];
#pragma GCC unroll 2
    for (int g = 0; g < kTileGroups; ++g) {
      codes[g] = groups[g];
#pragma GCC unroll 4
      for (int h = 0; h < kTileHeads; ++h) acc[h][g] = starts[h] - Ints{};
    }
    for (const uint32_t* end = row + quads_ * kTileHeads; row != end; row += kTileHeads) {
      Words keys[kTileGroups];
#pragma GCC unroll 2
      for (int g = 0; g < kTileGroups; ++g) {
        std::memcpy(&keys[g], codes[g], sizeof keys[g]);
        codes[g] += stride;
      }
#pragma GCC unroll 4
      for (int h = 0; h < kTileHeads; ++h) {
        const Words quad = detail::broadcast_word(row[h]);
#pragma GCC unroll 2
        for (int g = 0; g < kTileGroups; ++g) acc[h][g] = dot_bytes(acc[h][g], keys[g], quad);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kTileHeads; ++h)
#pragma GCC unroll 2
      for (int g = 0; g < kTileGroups; ++g)
        total[g] += max(zero(), __builtin_convertvector(acc[h][g], Floats)) * weights[h];
  }

  const Layout pages_;
  const int64_t heads_, dim_, quads_, padded_heads_;
  const bool in_place_;
};

}  // namespace longspan
