// Attention over depth and the RMSNorm that follows it; plain residuals are the case without blocks.
//
//     prefix' = round(prefix + update)       sources = blocks..., prefix'
//     e_j = sum_i score_i s_ji * rsqrt(mean(s_j^2) + eps);  a = softmax(e);  mix = round( sum_j a_j s_j )
//     x = rms_norm(mix)
//
// Rows are shared out over the team; a lone row is cut in pieces of kPiece columns, whose partial sums are
// added in order of the pieces, so that one token uses all cores and gets the same bits as in a batch.
#include "norm.h"
#include "pool.h"
#include "tensor.h"
#include "workspace.h"

namespace longspan {
namespace {

constexpr int64_t kPiece = 1024;
constexpr int kMostSources = 1024;

struct Partial {  // of one piece of one source
  float squares, scores;
};

template <class T>
struct Residual {
  const T* sources[kMostSources];
  int64_t strides[kMostSources];
  int count;
  const T* prefix;  // with `update`, what the last source is made of; null: it is there already
  const T* update;
  T* sum;
  const float* score;
  const T* weight;
  float eps;
  int64_t width;
  T* out;

  void add(int64_t row, int64_t begin, int64_t end) const {
    if (!update) return;
    const int64_t at = row * width;
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) store(sum + at + i, load(prefix + at + i) + load(update + at + i));
    if (const int rest = int(end - i))
      store_part(sum + at + i, load_part(prefix + at + i, rest) + load_part(update + at + i, rest), rest);
  }

  Partial look(int64_t row, int source, int64_t begin, int64_t end) const {
    const T* s = sources[source] + row * strides[source];
    Floats squares = zero(), scores = zero();
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      const Floats v = load(s + i);
      squares += v * v;
      scores += v * load(score + i);
    }
    if (const int rest = int(end - i)) {
      const Floats v = load_part(s + i, rest);
      squares += v * v;
      scores += v * load_part(score + i, rest);
    }
    return {longspan::sum(squares), longspan::sum(scores)};
  }

  // partials [sources][pieces] -> the weight of each source.
  void weigh(const Partial* partials, int64_t pieces, float* share) const {
    float peak = -INFINITY, total = 0;
    for (int j = 0; j < count; ++j) {
      float squares = 0, scores = 0;
      for (int64_t p = 0; p < pieces; ++p) {
        squares += partials[j * pieces + p].squares;
        scores += partials[j * pieces + p].scores;
      }
      share[j] = scores * rsqrt(squares / float(width) + eps);
      peak = std::max(peak, share[j]);
    }
    for (int j = 0; j < count; ++j) total += share[j] = std::exp(share[j] - peak);
    for (int j = 0; j < count; ++j) share[j] /= total;
  }

  void mix(int64_t row, const float* share, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, end - i));
      Floats mixed = zero();
      for (int j = 0; j < count; ++j) {
        const T* s = sources[j] + row * strides[j] + i;
        mixed += share[j] * (n == kLanes ? load(s) : load_part(s, n));
      }
      if (n == kLanes)
        store(out + row * width + i, mixed);
      else
        store_part(out + row * width + i, mixed, n);
    }
  }

  void normalise(int64_t row, const T* x) const { rms_norm(x, weight, eps, width, out + row * width); }
};

template <class T>
void run_rows(Team& team, const Residual<T>& r, int64_t rows) {
  const int64_t pieces = (r.width + kPiece - 1) / kPiece;
  std::vector<Partial> partials(r.count * pieces);
  team.claim(rows, 1, [&](int64_t row, int64_t) {
    r.add(row, 0, r.width);
    const T* mixed = r.sources[0] + row * r.strides[0];
    if (r.count > 1) {
      for (int j = 0; j < r.count; ++j)
        for (int64_t p = 0; p < pieces; ++p)
          partials[j * pieces + p] = r.look(row, j, p * kPiece, std::min((p + 1) * kPiece, r.width));
      float share[kMostSources];
      r.weigh(partials.data(), pieces, share);
      r.mix(row, share, 0, r.width);
      mixed = r.out + row * r.width;
    }
    r.normalise(row, mixed);
  });
}

template <class T>
void run_lone_row(Team& team, const Residual<T>& r, Partial* partials) {
  const int64_t pieces = (r.width + kPiece - 1) / kPiece;
  const auto piece = [&](int64_t p, auto&& work) { work(p * kPiece, std::min((p + 1) * kPiece, r.width)); };
  team.claim(pieces, 1, [&](int64_t p, int64_t) {
    piece(p, [&](int64_t begin, int64_t end) { r.add(0, begin, end); });
    for (int j = 0; j < r.count; ++j)
      piece(p, [&](int64_t begin, int64_t end) { partials[j * pieces + p] = r.look(0, j, begin, end); });
  });
  team.barrier();
  float share[kMostSources];
  r.weigh(partials, pieces, share);
  team.claim(pieces, 1, [&](int64_t p, int64_t) {
    piece(p, [&](int64_t begin, int64_t end) { r.mix(0, share, begin, end); });
  });
  team.barrier();
  if (team.rank == 0) r.normalise(0, r.out);
}

void attention_residual(Dtype dtype, int64_t rows, int64_t width, const std::vector<Address>& blocks,
                        const std::vector<int64_t>& strides, Address prefix, Address update, Address sum,
                        Address score, Address weight, float eps, Address out) {
  if (blocks.size() >= kMostSources) throw std::invalid_argument("too many sources");
  with_dtype(dtype, [&]<class T>(T) {
    Residual<T> r;
    r.count = int(blocks.size()) + 1;
    for (size_t j = 0; j < blocks.size(); ++j) {
      r.sources[j] = at<const T>(blocks[j]);
      r.strides[j] = strides[j];
    }
    r.sources[blocks.size()] = at<const T>(sum);
    r.strides[blocks.size()] = width;
    r.prefix = at<const T>(prefix);
    r.update = at<const T>(update);
    r.sum = at<T>(sum);
    r.score = at<const float>(score);
    r.weight = at<const T>(weight);
    r.eps = eps;
    r.width = width;
    r.out = at<T>(out);
    Workspace workspace;
    auto* partials = workspace.take<Partial>(r.count * ((width + kPiece - 1) / kPiece));
    // Below this a region costs more than the row.
    if (rows == 1 && r.count > 1 && r.count * width >= 16 * kPiece)
      pool()->run([&](Team& team) { run_lone_row(team, r, partials); });
    else if (rows * r.count * width < 16 * kPiece)
      Pool::alone([&](Team& team) { run_rows(team, r, rows); });
    else
      pool()->run([&](Team& team) { run_rows(team, r, rows); });
  });
}

}  // namespace

void bind_attention_residual(nb::module_& m) {
  m.def("attention_residual", &attention_residual, Unlocked());
}

}  // namespace longspan
