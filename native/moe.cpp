// The latent mixture of experts: `routed_experts` and `moe_output`. With expert parallelism the first is taken in two,
// `route_experts` and `mix_experts`, between which rows go to where their experts are, and r is summed over ranks.
//
//     I, w = choose(gate x)                       z = latent_down x  or  x
//     e_i  = down_i act(gate_i z, up_i z)         r = round( sum_{i in I} w_i e_i ), float32, ascending i
//     out  = latent_up rms_norm(r)  or  r,  + shared(x)
//
// The (token, choice) pairs are sorted by expert, those without one (below 0) are left out, and an expert that is
// hit is read once. Its work is shared out as blocks of weight rows: gate and up of a block together, with the
// activation; then, when the hidden rows are complete, down. A last stage adds up each token's expert outputs in the
// order of its choices, which ascend. At most kPairBytes of hidden rows and outputs exist at a time: beyond, the
// sorted pairs are taken in several rounds, and float32 sums are kept between them, so rounds change no bit.
//
// Experts are looked up when first hit: an operator returns those it does not know and expects to be called again.
#include <optional>

#include "experts.h"
#include "ffn.h"
#include "router.h"

namespace longspan {
namespace {

struct Expert {
  ExpertMatrix gate, up;  // [width, in]
  ExpertMatrix down;      // [in, width]
};

struct Moe {
  Router router;
  std::optional<Weight> latent_down, latent_up;  // [latent, hidden] and back; none: experts work at full width
  std::optional<Vector> latent_norm;
  float eps;
  std::optional<Ffn> shared;
  Activation activation;
  std::vector<std::optional<Expert>> bank;  // [experts]
  bool any_packed = false;
  int64_t width = 0;  // of the experts, known from the first on

  Moe(const Router& router, std::optional<Tensor> down, std::optional<Tensor> norm, std::optional<Tensor> up,
      float eps, const Ffn* shared, Activation activation)
      : router(router), eps(eps), activation(activation), bank(router.experts()) {
    if (down) latent_down.emplace(*down);
    if (norm) latent_norm.emplace(*norm);
    if (up) latent_up.emplace(*up);
    if (shared) this->shared.emplace(*shared);
  }

  Dtype dtype() const { return router.gate.dtype; }
  int64_t hidden() const { return router.gate.cols; }
  int64_t in() const { return latent_down ? latent_down->rows : hidden(); }

  void provide(int64_t index, ExpertMatrix gate, ExpertMatrix up, ExpertMatrix down) {
    if (width == 0) width = gate.rows();
    const auto fits = [&](const ExpertMatrix& m, int64_t rows, int64_t cols) {
      return m.rows() == rows && m.cols() == cols && (m.packed() || m.dtype() == dtype());
    };
    if (!fits(gate, width, in()) || !fits(up, width, in()) || !fits(down, in(), width))
      throw std::invalid_argument("the matrices of an expert do not fit the layer");
    any_packed |= gate.packed() || up.packed();
    bank.at(index) = Expert{std::move(gate), std::move(up), std::move(down)};
  }
};

constexpr int64_t kBlockRows = 48;          // rows of x that a unit takes at a time: whole tiles
constexpr int64_t kMostColumns = 64;        // columns of a unit, whole groups; half as many where its unpacked
constexpr int64_t kPanelBytes = 512 << 10;  // weights would take more than this, half of L2
constexpr int64_t kPairBytes = 64 << 20;
constexpr int64_t kPiece = 512;  // columns of a token that are added up at a time

// Pairs of one expert: [begin, end) of the sorted pairs.
struct Segment {
  const Expert* expert;
  int64_t begin, end;
};

// The choices of some rows, and the rows as experts see them.
template <class T>
struct Choices {
  int64_t tokens, chosen;  // of each token
  const T* z;              // [tokens, in]
  const int64_t* experts;  // [tokens, chosen]
  const float* shares;     // [tokens, chosen]
};

// Chooses, and writes z where the experts are latent.
template <class T>
void choose(Team& team, const Moe& moe, int64_t tokens, const T* x, float* logits, T* z, int64_t* experts,
            float* shares) {
  const Router& router = moe.router;
  multiply<T, float>(team, tokens, {{x, moe.hidden(), router.gate, logits, router.experts()}});
  if (moe.latent_down) multiply<T, T>(team, tokens, {{x, moe.hidden(), *moe.latent_down, z, moe.in()}});
  team.barrier();
  team.claim(tokens, 1, [&](int64_t t, int64_t) {
    router.choose(logits + t * router.experts(), experts + t * router.chosen, shares + t * router.chosen);
  });
}

// Their experts, each times its share, summed up.
template <class T, class Out>
struct Mixture {
  const Moe& moe;
  const Choices<T> rows;
  Out* out;  // [tokens, in]
  const int64_t tokens = rows.tokens, chosen = rows.chosen, pairs = tokens * chosen;
  const int64_t in = moe.in(), in_arranged = arranged_size(in);
  Workspace workspace;
  T* arranged = workspace.take<T>(moe.any_packed ? tokens * in_arranged : 0);  // z, [tokens, in_arranged]
  int32_t* token = workspace.take<int32_t>(pairs);  // of each sorted pair
  int32_t* place = workspace.take<int32_t>(pairs);  // of each pair (token, choice) among the sorted, or -1
  std::vector<int64_t> missing;
  std::vector<int64_t> starts = std::vector<int64_t>(moe.bank.size() + 1);

  // Of the present round: sorted pairs [first, last) of `sorted`.
  int64_t first = 0, last = 0, sorted = 0;
  int64_t hidden_stride = 0;
  T* hidden = nullptr;    // [pairs of a round, hidden_stride], arranged if the expert's `down` is packed
  T* outputs = nullptr;   // [pairs of a round, in]
  float* sums = nullptr;  // [tokens, in], if there are several rounds

  Mixture(const Moe& moe, const Choices<T>& rows, Out* out) : moe(moe), rows(rows), out(out) {}

  // The experts that are missing; none: the sums are made.
  std::vector<int64_t> run() {
    sort();
    if (missing.empty()) compute();
    return std::move(missing);
  }

 private:
  // Stable counting sort of the pairs by expert; notes the experts that are missing.
  void sort() {
    for (int64_t p = 0; p < pairs; ++p)
      if (rows.experts[p] >= 0) ++starts[rows.experts[p] + 1];
    for (size_t e = 0; e < moe.bank.size(); ++e) {
      if (starts[e + 1] && !moe.bank[e]) missing.push_back(int64_t(e));
      starts[e + 1] += starts[e];
    }
    sorted = starts.back();
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t p = 0; p < pairs; ++p) {
      place[p] = rows.experts[p] < 0 ? -1 : int32_t(next[rows.experts[p]]++);
      if (place[p] >= 0) token[place[p]] = int32_t(p / chosen);
    }
  }

  void compute() {
    hidden_stride = arranged_size(moe.width);
    const int64_t most = std::max<int64_t>(1, kPairBytes / int64_t(sizeof(T) * (hidden_stride + in)));
    hidden = workspace.take<T>(std::min(most, sorted) * hidden_stride);
    outputs = workspace.take<T>(std::min(most, sorted) * in);
    if (sorted > most) sums = workspace.take<float>(tokens * in);
    std::vector<Segment> segments;
    do {  // once also without any pair: the sums are zeros
      last = std::min(first + most, sorted);
      segments.clear();
      for (size_t e = 0; e < moe.bank.size(); ++e) {
        const int64_t begin = std::max(first, starts[e]), end = std::min(last, starts[e + 1]);
        if (begin < end) segments.push_back({&*moe.bank[e], begin, end});
      }
      pool()->run([&](Team& team) {
        if (moe.any_packed && first == 0) {
          team.claim(tokens, 1, [&](int64_t t, int64_t) { arrange(rows.z + t * in, in, arranged + t * in_arranged); });
          team.barrier();
        }
        each_unit(team, segments, moe.width, 2 * in_arranged,
                  [&](const Segment& s, int64_t j, int64_t n) { expand(s, j, n); });
        team.barrier();
        each_unit(team, segments, in, hidden_stride,
                  [&](const Segment& s, int64_t j, int64_t n) { contract(s, j, n); });
        team.barrier();
        add_up(team);
      });
      first = last;
    } while (first < sorted);
  }

  // work(segment, j, n) for blocks of all columns of all segments; `size` is what a column takes in a panel.
  template <class Work>
  void each_unit(Team& team, const std::vector<Segment>& segments, int64_t columns, int64_t size, Work&& work) {
    const int64_t bytes = size * kMostColumns * int64_t(sizeof(T));
    const int64_t block = bytes <= kPanelBytes ? kMostColumns : kMostColumns / 2;
    const int64_t blocks = (columns + block - 1) / block;
    const int64_t units = int64_t(segments.size()) * blocks;
    const int64_t grain = std::clamp<int64_t>(units / (16 * team.size), 1, 4);  // neighbours: memory in order
    team.claim(units, grain, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t j = unit % blocks * block;
        work(segments[unit / blocks], j, std::min(block, columns - j));
      }
    });
  }

  // Hidden columns [j0, j0 + n) of the pairs of an expert.
  void expand(const Segment& s, int64_t j0, int64_t n) {
    const Expert& expert = *s.expert;
    const int64_t pairs = s.end - s.begin;
    alignas(64) float gate[kBlockRows * kMostColumns], up[kBlockRows * kMostColumns];
    T columns[kBlockRows * kMostColumns];
    Workspace scratch;
    T* gate_panel = scratch.take<T>(expert.gate.panel_size(n));
    T* up_panel = scratch.take<T>(expert.up.panel_size(n));
    expert.gate.prepare(pairs, j0, n, gate_panel);
    expert.up.prepare(pairs, j0, n, up_panel);
    for (int64_t begin = s.begin; begin < s.end; begin += kBlockRows) {
      const int64_t m = std::min(kBlockRows, s.end - begin);
      const auto product = [&](const ExpertMatrix& matrix, const T* panel, float* c, const ExpertMatrix& next,
                               int64_t j_next) {
        const T* from = matrix.packed() ? arranged : rows.z;
        const int64_t stride = matrix.packed() ? in_arranged : in;
        const auto row = [&](int64_t i) { return from + token[begin + i] * stride; };
        matrix.product(pairs, m, row, j0, n, panel, c, n, next, j_next);
      };
      product(expert.gate, gate_panel, gate, expert.up, j0);
      product(expert.up, up_panel, up, expert.gate, j0 + n);
      each_lanes(m * n, [&](int64_t i, auto&& load_some, auto&& store_some) {
        const Floats g = round_to<T>(load_some(gate + i)), u = round_to<T>(load_some(up + i));
        store_some(columns + i, moe.activation.template operator()<T>(g, u));
      });
      for (int64_t i = 0; i < m; ++i) {
        T* row = hidden + (begin + i - first) * hidden_stride;
        const T* made = columns + i * n;
        if (!expert.down.packed()) {
          std::copy(made, made + n, row + j0);
          continue;
        }
        for (int64_t t = 0; t < n; t += kGroupInputs) arrange_group(made + t, j0 + t, row);
        if (j0 + n == moe.width) end_arranged(moe.width, row);
      }
    }
  }

  // Output columns [j0, j0 + n) of the pairs of an expert.
  void contract(const Segment& s, int64_t j0, int64_t n) {
    const ExpertMatrix& down = s.expert->down;
    const int64_t pairs = s.end - s.begin;
    alignas(64) float c[kBlockRows * kMostColumns];
    Workspace scratch;
    T* panel = scratch.take<T>(down.panel_size(n));
    down.prepare(pairs, j0, n, panel);
    for (int64_t begin = s.begin; begin < s.end; begin += kBlockRows) {
      const int64_t m = std::min(kBlockRows, s.end - begin);
      const T* from = hidden + (begin - first) * hidden_stride;
      const auto row = [&](int64_t i) { return from + i * hidden_stride; };
      down.product(pairs, m, row, j0, n, panel, c, n, down, j0 + n);
      for (int64_t i = 0; i < m; ++i)
        each_lanes(n, [&](int64_t t, auto&& load_some, auto&& store_some) {
          store_some(outputs + (begin + i - first) * in + j0 + t, load_some(c + i * n + t));
        });
    }
  }

  void add_up(Team& team) {
    const int64_t pieces = (in + kPiece - 1) / kPiece;
    team.claim(tokens * pieces, 4, [&](int64_t begin, int64_t end) {
      for (int64_t unit = begin; unit < end; ++unit) add_up(unit / pieces, unit % pieces * kPiece);
    });
  }

  void add_up(int64_t t, int64_t j0) {
    const T* of_round[Router::kMostChosen];
    float share[Router::kMostChosen];
    int count = 0;
    for (int64_t p = t * chosen; p < (t + 1) * chosen; ++p)
      if (first <= place[p] && place[p] < last) {
        share[count] = rows.shares[p];
        of_round[count++] = outputs + (place[p] - first) * in + j0;
      }
    each_lanes(std::min(kPiece, in - j0), [&](int64_t i, auto&& load_some, auto&& store_some) {
      Floats total = first ? load_some(sums + t * in + j0 + i) : zero();
      for (int c = 0; c < count; ++c) total += share[c] * load_some(of_round[c] + i);
      if (last < sorted)
        store_some(sums + t * in + j0 + i, total);
      else
        store_some(out + t * in + j0 + i, total);
    });
  }

  // f(i, load, store) for 16 of n elements at a time; the last may be fewer.
  template <class F>
  static void each_lanes(int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
      f(i, [](const auto* p) { return load(p); }, [](auto* p, Floats v) { store(p, v); });
    if (const int rest = int(n - i))
      f(
          i, [=](const auto* p) { return load_part(p, rest); },
          [=](auto* p, Floats v) { store_part(p, v, rest); });
  }
};

void route_experts(const Moe& moe, int64_t tokens, Address x, Address z, Address experts, Address shares) {
  with_dtype(moe.dtype(), [&]<class T>(T) {
    Workspace workspace;
    auto* logits = workspace.take<float>(tokens * moe.router.experts());
    pool()->run([&](Team& team) {
      choose(team, moe, tokens, at<const T>(x), logits, at<T>(z), at<int64_t>(experts), at<float>(shares));
    });
  });
}

std::vector<int64_t> mix_experts(const Moe& moe, int64_t tokens, int64_t chosen, Address z, Address experts,
                                 Address shares, Address out) {
  if (chosen > Router::kMostChosen) throw std::invalid_argument("a token may choose 1024 experts at most");
  return with_dtype(moe.dtype(), [&]<class T>(T) {
    const Choices<T> rows{tokens, chosen, at<const T>(z), at<const int64_t>(experts), at<const float>(shares)};
    return Mixture<T, float>(moe, rows, at<float>(out)).run();
  });
}

std::vector<int64_t> routed_experts(const Moe& moe, int64_t tokens, Address x, Address out) {
  return with_dtype(moe.dtype(), [&]<class T>(T) {
    const int64_t chosen = moe.router.chosen;
    Workspace workspace;
    auto* logits = workspace.take<float>(tokens * moe.router.experts());
    auto* experts = workspace.take<int64_t>(tokens * chosen);
    auto* shares = workspace.take<float>(tokens * chosen);
    T* latent = workspace.take<T>(moe.latent_down ? tokens * moe.in() : 0);
    const T* z = moe.latent_down ? latent : at<const T>(x);
    pool()->run([&](Team& team) { choose(team, moe, tokens, at<const T>(x), logits, latent, experts, shares); });
    return Mixture<T, T>(moe, {tokens, chosen, z, experts, shares}, at<T>(out)).run();
  });
}

// x feeds the shared experts, r the way back from the latent space; each stage advances both.
template <class T>
struct Output {
  const Moe& moe;
  const int64_t tokens;
  const T *r, *x;
  T* out;
  Workspace workspace;
  const int64_t hidden = moe.hidden(), in = moe.in(), width = moe.shared ? moe.shared->gate.rows : 0;
  T* normed = workspace.take<T>(moe.latent_norm ? tokens * in : 0);
  T* inner = workspace.take<T>(tokens * width);
  T* shared = moe.shared ? workspace.take<T>(tokens * hidden) : nullptr;

  Output(const Moe& moe, int64_t tokens, const T* r, const T* x, T* out)
      : moe(moe), tokens(tokens), r(r), x(x), out(out) {}

  void run(Team& team) {
    if (moe.shared) moe.shared->expand(team, tokens, x, inner);
    if (moe.latent_norm)
      team.claim(tokens, 1, [&](int64_t t, int64_t) {
        rms_norm(r + t * in, moe.latent_norm->template data<T>(), moe.eps, in, normed + t * in);
      });
    team.barrier();
    if (moe.shared) moe.shared->contract(team, tokens, inner, shared);
    const T* routed = r;
    if (moe.latent_up) {
      multiply<T, T>(team, tokens, {{moe.latent_norm ? normed : r, in, *moe.latent_up, out, hidden}});
      routed = out;
    }
    if (!moe.shared) return;
    team.barrier();
    constexpr int64_t kGrain = 2048;
    team.claim(tokens * hidden, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += kLanes) {
        const int n = int(std::min<int64_t>(kLanes, end - i));
        if (n == kLanes)
          store(out + i, load(routed + i) + load(shared + i));
        else
          store_part(out + i, load_part(routed + i, n) + load_part(shared + i, n), n);
      }
    });
  }
};

void moe_output(const Moe& moe, int64_t tokens, Address r, Address x, Address out) {
  with_dtype(moe.dtype(), [&]<class T>(T) {
    Output<T> output(moe, tokens, at<const T>(r), at<const T>(x), at<T>(out));
    pool()->run([&](Team& team) { output.run(team); });
  });
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::class_<Router>(m, "Router").def(nb::init<Tensor, Tensor, int, int, int, bool, float>());
  nb::class_<ExpertMatrix>(m, "ExpertMatrix").def(nb::init<Tensor>()).def(nb::init<Tensor, Tensor>());
  nb::class_<Moe>(m, "Moe")
      .def(nb::init<const Router&, std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>, float,
                    const Ffn*, Activation>(),
           nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none(),
           nb::arg())
      .def("provide", &Moe::provide);
  m.def("route_experts", &route_experts, Unlocked());
  m.def("mix_experts", &mix_experts, Unlocked());
  m.def("routed_experts", &routed_experts, Unlocked());
  m.def("moe_output", &moe_output, Unlocked());
}

}  // namespace longspan
