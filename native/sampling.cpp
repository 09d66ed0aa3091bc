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
    const Masses m = mass(begin, count);
    for (int lane = 0; lane < count; ++lane) {
      const double weight = lane < 8 ? m.low[lane] : m.high[lane - 8];
      if (weight > 0) last = begin + lane;
      if ((before += weight) > target) return begin + lane;
    }
  }
  return last;
}

struct Candidates {  // in token order
  int64_t count;
  int32_t* token;
  float* y;
  double* mass;

  Masses masses(int64_t i, int n) const {
    double m[kLanes] = {};
    std::memcpy(m, mass + i, n * sizeof(double));
    return std::bit_cast<Masses>(m);
  }
};

// Where a walk down the values ends: all above `value` stay, and the first `ties` tokens of that value.
struct Cut {
  float value;
  int64_t ties;
};

struct Range {
  float low, high;
};

Range range_of(const float* y, int64_t n) {
  Floats low = broadcast(y[0]), high = low;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    low = min(low, load(y + i));
    high = max(high, load(y + i));
  }
  Range range{-max_lane(-low), max_lane(high)};
  for (; i < n; ++i) range = {std::min(range.low, y[i]), std::max(range.high, y[i])};
  return range;
}

// The walk keeps a token while it holds fewer than `limit` and less mass than `budget`, and always the first.
Cut find_cut(const Candidates& from, int64_t limit, double budget) {
  struct Bucket {
    int64_t count = 0;
    double mass = 0;
  };
  Workspace workspace;
  auto* inner_y = workspace.take<float>(from.count);
  auto* inner_mass = workspace.take<double>(from.count);
  const float* y = from.y;
  const double* mass = from.mass;
  int64_t n = from.count, held = 0;
  double before = 0;
  for (;;) {
    const Range range = range_of(y, n);
    if (range.low == range.high) {
      int64_t ties = 0;
      for (; ties < n && held < limit && (held == 0 || before < budget); ++ties, ++held) before += mass[0];
      return {range.low, ties};
    }
    // The largest value falls in bucket 0 and the least in another: every round leaves fewer.
    const double scale = (kBuckets - 1) / (double(range.high) - range.low);
    const auto bucket_of = [&](int64_t i) { return int32_t((double(range.high) - y[i]) * scale); };
    Bucket buckets[kBuckets];
    constexpr int64_t kChunk = 256;
    int32_t index[kChunk];
    for (int64_t begin = 0; begin < n; begin += kChunk) {
      const int64_t count = std::min(kChunk, n - begin);
      for (int64_t i = 0; i < count; ++i) index[i] = bucket_of(begin + i);
      for (int64_t i = 0; i < count; ++i) {
        ++buckets[index[i]].count;
        buckets[index[i]].mass += mass[begin + i];
      }
    }
    int b = 0;
    for (; b < kBuckets; ++b) {
      if (held + buckets[b].count >= limit || before + buckets[b].mass >= budget) break;
      held += buckets[b].count;
      before += buckets[b].mass;
    }
    if (b == kBuckets) return {range.low, n};
    int64_t inside = 0;
    for (int64_t i = 0; i < n; ++i) {
      inner_y[inside] = y[i];
      inner_mass[inside] = mass[i];
      inside += bucket_of(i) == b;
    }
    y = inner_y;
    mass = inner_mass;
    n = inside;
  }
}

void keep(Candidates& c, Cut cut) {
  int64_t kept = 0;
  for (int64_t i = 0; i < c.count; ++i) {
    const bool stays = c.y[i] > cut.value || (c.y[i] == cut.value && cut.ties-- > 0);
    c.token[kept] = c.token[i];
    c.y[kept] = c.y[i];
    c.mass[kept] = c.mass[i];
    kept += stays;
  }
  c.count = kept;
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
        in_block = max(select(lane_index() < rest, load_part(logits + i, rest), broadcast(-INFINITY)), in_block);
      store(maxima + begin / kBlock * kLanes, in_block);
      high = max(high, in_block);
    }
    peak = max_lane(high);
  }

  int64_t greedy() const {
    for (int64_t i = 0; i < vocab; ++i)
      if (logits[i] == peak) return i;
    return 0;
  }

  // -infinity for what min_p drops and beyond n.
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
  float top_p_floor(double total) const { return float(std::log((1.0 - top_p) * total / double(vocab)) - 1e-3); }

  // `place` has room for the vocabulary and kLanes more.
  void gather(float least, Candidates& place) const {
    least = std::max(least, kLeast);
    int64_t count = 0;
    for (int64_t i = 0; i < vocab; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, vocab - i));
      const Floats y = scaled(i, n);
      if (max_lane(y) < least) continue;
      float values[kLanes];
      store(values, y);
      for (int lane = 0; lane < kLanes; ++lane) {
        place.token[count] = int32_t(i + lane);
        place.y[count] = values[lane];
        count += values[lane] >= least;
      }
    }
    place.count = count;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Masses m = masses_of(load(place.y + i));
      std::memcpy(place.mass + i, &m, sizeof m);
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

    const int64_t room = vocab + kLanes;
    Candidates c{0, workspace.take<int32_t>(room), workspace.take<float>(room), workspace.take<double>(room)};
    gather(by_count ? top_k_floor() : top_p_floor(total), c);
    const auto kept = [&](int64_t i, int n) { return c.masses(i, n); };
    if (by_count) {
      keep(c, find_cut(c, top_k, INFINITY));
      total = sum_blocks(c.count, sums, kept);
    }
    if (by_mass) {
      keep(c, find_cut(c, vocab, top_p * total));
      total = sum_blocks(c.count, sums, kept);
    }
    return c.token[draw(c.count, uniform, sums, total, kept)];
  }
};

void sample(int64_t rows, int64_t vocab, Address logits, Address temperature, Address top_k, Address top_p,
            Address min_p, Address uniforms, Address tokens) {
  pool().run([&](Team& team) {
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
  pool().run([&](Team& team) {
    team.claim(num_rows * vocab, kCopied,
               [&](int64_t begin, int64_t end) { std::memcpy(to + begin, from + begin, (end - begin) * sizeof(float)); });
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
