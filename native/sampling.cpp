// Penalties, and from a batch of logits to one token per row, as ops/sampling.py has it.
//
//     y = (l - max l) / temperature, float32        mass = e^y, double; 0 below min_p and below e^-708
//
// The token drawn is the first whose cumulative mass, in token order, passes uniform * total. Masses are summed
// in blocks of kBlock, so that only one block is walked token by token.
//
// top_k and top_p keep the first tokens of a walk down the values, ties to the lower token. Nothing is sorted:
// a floor that the walk can't reach leaves few candidates, and where it ends is found by buckets of values,
// finer and finer inside the one bucket it ends in (`find_cut`), down to tokens of one value.
//
//     floor of top_k     the k-th largest of the maxima of many disjoint sets of tokens
//     floor of top_p     log((1 - top_p) * total / vocab): all tokens below it together weigh too little
//
// Rows are independent and each is computed by one thread. A row without a finite maximum gives some token.
#include <array>

#include "math.h"
#include "pool.h"
#include "tensor.h"
#include "workspace.h"

namespace longspan {
namespace {

constexpr int64_t kBlock = 1024;
constexpr int kBuckets = 1024;
constexpr float kLeast = -708.0f;  // e^y of less is 0

struct Masses {  // of 16 tokens
  Doubles low, high;
};

Masses masses_of(Floats y) {
  typedef float Half __attribute__((vector_size(32)));
  struct Halved {
    Half low, high;
  };
  const auto halved = std::bit_cast<Halved>(y);
  return {exp_negative(__builtin_convertvector(halved.low, Doubles)),
          exp_negative(__builtin_convertvector(halved.high, Doubles))};
}

int64_t blocks_in(int64_t n) { return (n + kBlock - 1) / kBlock; }

// sums[b] of each block of n tokens, whose masses are mass(i, count), 0 beyond count; returns the total.
template <class Mass>
double sum_blocks(int64_t n, double* sums, Mass&& mass) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Masses acc{};
    const int64_t end = std::min(begin + kBlock, n);
    for (int64_t i = begin; i < end; i += kLanes) {
      const Masses m = mass(i, int(std::min<int64_t>(kLanes, end - i)));
      acc.low += m.low;
      acc.high += m.high;
    }
    acc.low += acc.high;
    double sum = 0;
    for (int lane = 0; lane < 8; ++lane) sum += acc.low[lane];
    total += sums[begin / kBlock] = sum;
  }
  return total;
}

// The first index whose cumulative mass passes uniform * total; by rounding past the end, the last that weighs.
template <class Mass>
int64_t draw(int64_t n, double uniform, const double* sums, double total, Mass&& mass) {
  const double target = std::min(uniform * total, std::nextafter(total, 0.0));
  double before = 0;
  int64_t begin = 0, last = 0;
  for (; begin + kBlock < n && before + sums[begin / kBlock] <= target; begin += kBlock)
    before += sums[begin / kBlock];
  for (; begin < n; begin += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, n - begin));
    const auto weights = std::bit_cast<std::array<double, kLanes>>(mass(begin, count));
    for (int lane = 0; lane < count; ++lane) {
      if (weights[lane] > 0) last = begin + lane;
      if ((before += weights[lane]) > target) return begin + lane;
    }
  }
  return last;
}

struct Candidates {  // in token order; both arrays have room for kLanes more
  int64_t count;
  int32_t* token;
  float* y;

  // -infinity beyond the last.
  Floats values(int64_t i) const {
    const Floats v = load(y + i);
    return count - i >= kLanes ? v : select(lane_index() < int32_t(count - i), v, broadcast(-INFINITY));
  }

  // Adds those of tokens i, i + 1, ... whose bit is set. They may be its own, if no later than `i`.
  void add(Ints tokens, Floats ys, uint32_t chosen) {
    compress(token + count, tokens, chosen);
    compress(y + count, ys, chosen);
    count += std::popcount(chosen);
  }
};

// Where a walk down the values ends: all above `value` stay, and the first `ties` tokens of that value.
struct Cut {
  float value;
  int64_t ties;
};

// The walk keeps a token while what it holds is less than `budget`, and always the first. A token counts as its
// mass or as 1.
template <bool by_mass>
Cut find_cut(const Candidates& from, double budget) {
  constexpr float kWiden = 0x1p100f;  // exact, and no difference of two values is too small for its reciprocal
  Workspace workspace;
  Candidates inner{0, nullptr, workspace.take<float>(from.count + kLanes)};
  Candidates now = from;
  double held = 0;
  for (bool first = true;;) {
    Floats lowest = broadcast(INFINITY), highest = broadcast(-INFINITY);
    for (int64_t i = 0; i < now.count; i += kLanes) {
      const Floats y = now.values(i);
      highest = max(highest, y);
      lowest = min(lowest, select(y > -INFINITY, y, lowest));
    }
    const float low = -max_lane(-lowest), high = max_lane(highest);
    if (low == high) {
      const double weight = by_mass ? masses_of(highest).low[0] : 1.0;
      int64_t ties = 0;
      for (; ties < now.count && ((first && ties == 0) || held < budget); ++ties) held += weight;
      return {low, ties};
    }
    // The largest value falls in bucket 0 and the least in another: every round leaves fewer.
    const float scale = (kBuckets - 1) / ((high - low) * kWiden);
    const auto place_of = [&](Floats y) { return (high - y) * kWiden * scale; };
    double buckets[kBuckets + 1] = {};
    for (int64_t i = 0; i < now.count; i += kLanes) {
      const Floats y = now.values(i);
      const Ints bucket = __builtin_convertvector(min(place_of(y), broadcast(float(kBuckets))), Ints);
      const auto places = std::bit_cast<std::array<int32_t, kLanes>>(bucket);
      const auto weights = std::bit_cast<std::array<double, kLanes>>(
          by_mass ? masses_of(y) : Masses{1.0 + Doubles{}, 1.0 + Doubles{}});
      for (int lane = 0; lane < kLanes; ++lane) buckets[places[lane]] += weights[lane];
    }
    int b = 0;
    for (; b < kBuckets && held + buckets[b] < budget; ++b) held += buckets[b];
    if (b == kBuckets) return {low, now.count};
    const Candidates all = now;
    now = {0, nullptr, inner.y};
    for (int64_t i = 0; i < all.count; i += kLanes) {
      const Floats y = all.values(i), place = place_of(y);
      const uint32_t inside = greater(broadcast(float(b + 1)), place) & ~greater(broadcast(float(b)), place);
      compress(now.y + now.count, y, inside);
      now.count += std::popcount(inside);
    }
    first = first && b == 0;
  }
}

void keep(Candidates& c, Cut cut) {
  const Candidates all = c;
  c.count = 0;
  for (int64_t i = 0; i < all.count; i += kLanes) {
    const Floats y = all.values(i);
    Ints tokens;
    std::memcpy(&tokens, all.token + i, sizeof tokens);
    const uint32_t above = greater(y, broadcast(cut.value));
    uint32_t ties = ~(above | greater(broadcast(cut.value), y)) & 0xffff;
    while (std::popcount(ties) > cut.ties) ties ^= std::bit_floor(ties);
    cut.ties -= std::popcount(ties);
    c.add(tokens, y, above | ties);
  }
}

struct Row {
  const float* logits;
  int64_t vocab;
  float temperature, top_p, min_p;
  int64_t top_k;
  double uniform;

  float peak = -INFINITY;
  float floor = -INFINITY;  // of y, by min_p
  float* maxima = nullptr;  // [blocks][kLanes] largest logit of each lane of each block: disjoint sets

  void find_peak() {
    Floats high = broadcast(-INFINITY);
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
      Floats in_block = broadcast(-INFINITY);
      const int64_t end = std::min(begin + kBlock, vocab);
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes) in_block = max(load(logits + i), in_block);
      if (const int rest = int(end - i))
        in_block = select(lane_index() < rest, max(load_part(logits + i, rest), in_block), in_block);
      store(maxima + begin / kBlock * kLanes, in_block);
      high = max(high, in_block);
    }
    peak = max_lane(high);
  }

  int64_t greedy() const {
    int64_t i = 0;
    while (i + kBlock < vocab && max_lane(load(maxima + i / kBlock * kLanes)) != peak) i += kBlock;
    for (; i < vocab; ++i)
      if (logits[i] == peak) return i;
    return 0;
  }

  // Values of tokens i, i + 1, ...: -infinity for what min_p drops and beyond n.
  Floats scaled(int64_t i, int n) const {
    Floats y = (load_part(logits + i, n) - peak) / temperature;
    if (n < kLanes) y = select(lane_index() < n, y, broadcast(-INFINITY));
    return select(y < floor, broadcast(-INFINITY), y);
  }

  Masses masses(int64_t i, int n) const { return masses_of(scaled(i, n)); }

  // Below it nothing is among the top_k.
  float top_k_floor() const {
    const int64_t sets = blocks_in(vocab) * kLanes;
    if (top_k > sets) return kLeast;
    std::nth_element(maxima, maxima + top_k - 1, maxima + sets, std::greater<>());
    return (maxima[top_k - 1] - peak) / temperature;
  }
  // Nor here among the top_p; the margin is for the rounding of the sums.
  float top_p_floor(double total) const {
    return float(std::log((1.0 - top_p) * total / double(vocab)) - 1e-3);
  }

  // Tokens of at least `least` -> c, which is empty.
  void gather(float least, Candidates& c) const {
    const Floats below = broadcast(std::nextafter(std::max(least, kLeast), -INFINITY));
    for (int64_t i = 0; i < vocab; i += kLanes) {
      const Floats y = scaled(i, int(std::min<int64_t>(kLanes, vocab - i)));
      if (const uint32_t chosen = greater(y, below)) c.add(lane_index() + int32_t(i), y, chosen);
    }
  }

  int64_t sample() {
    Workspace workspace;
    maxima = workspace.take<float>(blocks_in(vocab) * kLanes);
    find_peak();
    if (!(temperature > 0)) return greedy();
    if (!std::isfinite(peak)) return 0;
    if (min_p > 0) floor = std::log(min_p);
    auto* sums = workspace.take<double>(blocks_in(vocab));
    const auto every = [&](int64_t i, int n) { return masses(i, n); };
    const bool by_count = top_k > 0 && top_k < vocab, by_mass = top_p < 1;
    double total = by_count ? 0 : sum_blocks(vocab, sums, every);
    if (!by_count && !by_mass) return draw(vocab, uniform, sums, total, every);

    Candidates c{0, workspace.take<int32_t>(vocab + kLanes), workspace.take<float>(vocab + kLanes)};
    gather(by_count ? top_k_floor() : top_p_floor(total), c);
    const auto kept = [&](int64_t i, int) { return masses_of(c.values(i)); };
    if (by_count) {
      keep(c, find_cut<false>(c, double(top_k)));
      total = sum_blocks(c.count, sums, kept);
    }
    if (by_mass) {
      keep(c, find_cut<true>(c, top_p * total));
      total = sum_blocks(c.count, sums, kept);
    }
    return c.token[draw(c.count, uniform, sums, total, kept)];
  }
};

void sample(int64_t rows, int64_t vocab, Address logits, Address temperature, Address top_k, Address top_p,
            Address min_p, Address uniforms, Address tokens) {
  pool()->run([&](Team& team) {
    team.claim(rows, 1, [&](int64_t r, int64_t) {
      Row row{.logits = at<const float>(logits) + r * vocab,
              .vocab = vocab,
              .temperature = at<const float>(temperature)[r],
              .top_p = at<const float>(top_p)[r],
              .min_p = at<const float>(min_p)[r],
              .top_k = at<const int64_t>(top_k)[r],
              .uniform = at<const double>(uniforms)[r]};
      at<int64_t>(tokens)[r] = row.sample();
    });
  });
}

// `out` gets a copy of the logits and, at each of n different places (rows[i], tokens[i]), the penalised one.
void apply_penalties(int64_t num_rows, int64_t vocab, Address logits, int64_t n, Address rows, Address tokens,
                     Address counts, Address presence, Address frequency, Address repetition, Address out) {
  constexpr int64_t kCopied = 1 << 16, kGrain = 1024;
  const auto* from = at<const float>(logits);
  auto* to = at<float>(out);
  pool()->run([&](Team& team) {
    team.claim(num_rows * vocab, kCopied, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, (end - begin) * sizeof(float));
    });
    team.barrier();
    team.claim(n, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = at<const int64_t>(rows)[i], place = row * vocab + at<const int64_t>(tokens)[i];
        const int64_t count = at<const int64_t>(counts)[i];
        const float factor = at<const float>(repetition)[row];
        float value = from[place] > 0 ? from[place] / factor : from[place] * factor;
        value -= at<const float>(frequency)[row] * float(count);
        if (count > 0) value -= at<const float>(presence)[row];
        to[place] = value;
      }
    });
  });
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample", &sample, Unlocked());
  m.def("apply_penalties", &apply_penalties, Unlocked());
}

}  // namespace longspan
