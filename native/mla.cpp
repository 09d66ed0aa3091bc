// Multi-head latent attention before and after the attention itself, as ops/mla_prologue.py has it.
//
// Prologue, four stages; w is float32, all else rounds to T where the model does:
//
//     1   a = q_a x  (or q = q_proj x)    [c0 | kp] = kv_a x    k0 = wk x    w = weights_proj x / sqrt(Hi)
//     2   a = rms_norm(a)     page row = [rms_norm(c0) | kp]     key row = layer_norm(k0), int8 where keys are
//     3   q = q_b a           qI = wq_b a (or wq_b x, then in stage 1)
//     4   query_h = [W_UK_h^T qn_h | qp_h]
//
// A slot below 0 is none: what stage 2 would write there is left out.
//
// Epilogue, three stages: W_g x;  o_h = W_UV_h round(latent_out_h), o *= sigmoid(W_g x);  W_o o.
//
// W_UK meets q in rows of k = nope, too short for dots.h: it is packed once for panels.h, kGroup columns after
// kGroup columns, [heads, groups, nope / step, kGroup, step], with zeros beyond nope and rank. That copy costs
// heads * rank * nope elements a layer (real shape, bfloat16: 12 MiB), and what it was made from is not read again.
// All other weights are read in place. W_UK may have more heads than W_UV: queries are then made for other ranks too.
#include <nanobind/stl/array.h>

#include "linear.h"
#include "norm.h"
#include "pages.h"
#include "panels.h"
#include "quantize.h"
#include "workspace.h"

namespace longspan {
namespace {

constexpr int64_t kGroup = 64;      // columns of a packed W_UK side by side
constexpr int64_t kGroupRows = 256;  // rows that meet them at once
constexpr int64_t kValueRows = 128;  // rows that meet a W_UV at once
constexpr int64_t kValueRun = 48;    // its columns in one unit, when there are fewer rows

// A matrix for each head: [heads, rows, cols] with contiguous rows.
struct HeadWeights {
  Tensor owner;
  int64_t heads, rows, cols, head_stride, row_stride;

  explicit HeadWeights(Tensor t) : owner(std::move(t)) {
    if (owner.ndim() != 3 || (owner.shape(2) > 1 && owner.stride(2) != 1))
      throw std::invalid_argument("a matrix with contiguous rows for each head was expected");
    heads = int64_t(owner.shape(0));
    rows = int64_t(owner.shape(1));
    cols = int64_t(owner.shape(2));
    head_stride = owner.stride(0);
    row_stride = owner.stride(1);
  }
  template <class T>
  const T* row(int64_t head, int64_t row) const {
    return static_cast<const T*>(owner.data()) + head * head_stride + row * row_stride;
  }
};

struct Indexer {
  Weight query, key, head_weight;
  Vector norm_weight, norm_bias;  // float32
  float norm_eps;
};

struct Mla {
  std::optional<Weight> query_a;
  std::optional<Vector> query_norm;
  Weight query;  // q_b, or q_proj where there is no query_a
  Weight kv_a;
  Vector kv_a_norm;
  int64_t nope;
  HeadWeights up_key;  // packed: [heads, groups, elements of one group]
  HeadWeights up_value;  // [heads, value, rank]
  float norm_eps;
  std::optional<Indexer> indexer;
  std::optional<Weight> gate;
  Weight output;

  int64_t query_heads() const { return up_key.heads; }
  int64_t value_heads() const { return up_value.heads; }
  int64_t rank() const { return up_value.cols; }
  int64_t rope() const { return kv_a.rows - rank(); }
  bool index_from_latent() const { return query_a && query_a->rows == indexer->query.cols; }
};

// Memory of one layer: where its pages lie. Index keys are in `keys` or, as int8, in `codes` and `scales`.
struct MlaPages {
  using Place = std::array<int64_t, 3>;  // address, strides of page and row; address 0: there are none

  int64_t page_size;
  Place latent, keys, codes, scales;
  int64_t quad_stride;  // of codes

  MlaPages(int64_t page_size, Place latent, Place keys, Place codes, Place scales, int64_t quad_stride)
      : page_size(page_size), latent(latent), keys(keys), codes(codes), scales(scales), quad_stride(quad_stride) {}

  template <class T>
  T* slot(const Place& place, int64_t slot) const {
    return Pages<T>{at<T>(place[0]), place[1], place[2], page_size}.slot(slot);
  }

  // Quantises key [n] into its place; `row` has room for n rounded up to kLanes.
  template <class T>
  void put_codes(int64_t token, const T* key, int64_t n, uint8_t* row) const {
    *slot<float>(scales, token) = quantize_row(key, n, row);
    uint8_t* place = slot<uint8_t>(codes, token);
    for (int64_t i = 0; i < n; i += kQuad) std::memcpy(place + i / kQuad * quad_stride, row + i, kQuad);
  }
};

// round( (x - mean) * rsqrt(var + eps) * weight + bias ); out may be x.
template <class T>
void layer_norm(const T* x, const float* weight, const float* bias, float eps, int64_t n, T* out) {
  const auto values = [&](int64_t i) { return load_part(x + i, int(std::min<int64_t>(kLanes, n - i))); };
  Floats total = zero(), squares = zero();
  for (int64_t i = 0; i < n; i += kLanes) total += values(i);
  const float mean = sum(total) / float(n);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Ints inside = lane_index() < int32_t(n - i);
    const Floats off = select(inside, values(i) - mean, zero());
    squares += off * off;
  }
  const float scale = rsqrt(sum(squares) / float(n) + eps);
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, n - i));
    const Floats normal = (values(i) - mean) * scale;
    store_part(out + i, normal * load_part(weight + i, count) + load_part(bias + i, count), count);
  }
}

template <class T>
struct Prologue {
  const Mla& w;
  const MlaPages& pages;
  int64_t m;
  const T* x;
  const int64_t* slots;
  T *query_latent, *compressed, *key, *q;  // scratch
  T *query, *index_query;                  // [m, heads, rank + rope], [m, Hi * Di]
  float* index_weight;                     // [m, Hi]

  int64_t hidden() const { return w.kv_a.cols; }

  void project(Team& team, const Weight& weight, const T* rows, T* out) const {
    multiply<T, T>(team, m, {{rows, weight.cols, weight, out, weight.rows}});
  }

  // A row of q ends in a zero, which is what the last pair of an odd nope may meet.
  static int64_t q_stride(const Mla& w) { return w.query.rows + 2; }

  void project_query(Team& team, const T* rows) const {
    multiply<T, T>(team, m, {{rows, w.query.cols, w.query, q, q_stride(w)}});
  }

  void from_hidden(Team& team) const {
    if (w.query_a)
      project(team, *w.query_a, x, query_latent);
    else
      project_query(team, x);
    project(team, w.kv_a, x, compressed);
    if (!w.indexer) return;
    const Weight& heads = w.indexer->head_weight;
    project(team, w.indexer->key, x, key);
    multiply<T, float>(team, m, {{x, hidden(), heads, index_weight, heads.rows}});
    if (!w.index_from_latent()) project(team, w.indexer->query, x, index_query);
  }

  void finish_row(int64_t row) const {
    q[row * q_stride(w) + w.query.rows] = T{};
    if (w.query_a) {
      const int64_t width = w.query_a->rows;
      T* latent = query_latent + row * width;
      rms_norm(latent, w.query_norm->data<T>(), w.norm_eps, width, latent);
    }
    if (w.indexer) {
      const int64_t heads = w.indexer->head_weight.rows;
      const float scale = 1.0f / std::sqrt(float(heads));
      for (int64_t h = 0; h < heads; ++h) index_weight[row * heads + h] *= scale;
    }
    if (slots[row] >= 0) put(row, slots[row]);
  }

  void put(int64_t row, int64_t slot) const {
    const int64_t rank = w.rank();
    const T* raw = compressed + row * w.kv_a.rows;
    T* latent = pages.slot<T>(pages.latent, slot);
    rms_norm(raw, w.kv_a_norm.data<T>(), w.norm_eps, rank, latent);
    std::memcpy(latent + rank, raw + rank, w.rope() * sizeof(T));
    if (w.indexer) put_key(row, slot);
  }

  void put_key(int64_t row, int64_t slot) const {
    const Indexer& indexer = *w.indexer;
    const int64_t dim = indexer.key.rows;
    T* raw = key + row * dim;
    const bool quantised = pages.codes[0];
    T* normal = quantised ? raw : pages.slot<T>(pages.keys, slot);
    layer_norm(raw, indexer.norm_weight.data<float>(), indexer.norm_bias.data<float>(), indexer.norm_eps, dim,
               normal);
    if (!quantised) return;
    Workspace workspace;
    pages.put_codes(slot, normal, dim, workspace.take<uint8_t>(dim + kLanes));
  }

  void absorb(Team& team) const {
    const int64_t groups = w.up_key.rows, blocks = (m + kGroupRows - 1) / kGroupRows;
    team.claim(w.query_heads() * blocks * groups, 1, [&](int64_t unit, int64_t) {
      const int64_t begin = unit / groups % blocks * kGroupRows;
      absorb_group(unit / (groups * blocks), unit % groups, begin, std::min(begin + kGroupRows, m));
    });
  }

  void absorb_group(int64_t head, int64_t group, int64_t begin, int64_t end) const {
    const int64_t rank = w.rank(), nope = w.nope, rope = w.rope(), first = group * kGroup;
    constexpr int64_t step = kPanelStep<T>;
    const T* from = q + begin * q_stride(w) + head * (nope + rope);
    const auto to = [&](int64_t i) { return query + ((begin + i) * w.query_heads() + head) * (rank + rope); };
    if (group == 0)
      for (int64_t i = 0; i < end - begin; ++i)
        std::memcpy(to(i) + rank, from + i * q_stride(w) + nope, rope * sizeof(T));
    panel_product<T>(
        end - begin, kGroup, (nope + step - 1) / step * step, {from, q_stride(w), 1},
        w.up_key.row<T>(head, group), [](int64_t, int64_t) { return zero(); },
        [&](int64_t i, int64_t j, Floats sums) {
          const int64_t left = std::min<int64_t>(kLanes, rank - first - j);
          if (left > 0) store_part(to(i) + first + j, sums, int(left));
        });
  }

  void run(Team& team) const {
    from_hidden(team);
    team.barrier();
    team.claim(m, 1, [&](int64_t row, int64_t) { finish_row(row); });
    team.barrier();
    if (w.query_a) {
      project_query(team, query_latent);
      if (w.indexer && w.index_from_latent()) project(team, w.indexer->query, query_latent, index_query);
      team.barrier();
    }
    absorb(team);
  }
};

void mla_prologue(const Mla& w, const MlaPages& pages, int64_t rows, Address x, Address slots, Address query,
                  Address index_query, Address index_weight) {
  with_dtype(w.kv_a.dtype, [&]<class T>(T) {
    Workspace workspace;
    const auto scratch = [&](int64_t width) { return workspace.take<T>(rows * width); };
    const Prologue<T> prologue{
        .w = w,
        .pages = pages,
        .m = rows,
        .x = at<const T>(x),
        .slots = at<const int64_t>(slots),
        .query_latent = scratch(w.query_a ? w.query_a->rows : 0),
        .compressed = scratch(w.kv_a.rows),
        .key = scratch(w.indexer ? w.indexer->key.rows : 0),
        .q = scratch(Prologue<T>::q_stride(w)),
        .query = at<T>(query),
        .index_query = at<T>(index_query),
        .index_weight = at<float>(index_weight),
    };
    pool()->run([&](Team& team) { prologue.run(team); });
  });
}

template <class T>
struct Epilogue {
  const Mla& w;
  int64_t m;
  const float* latent_out;  // [m, heads, rank]
  const T* x;               // [m, hidden]
  T *gate, *attended;       // scratch
  T* out;                   // [m, hidden]

  int64_t width() const { return w.output.cols; }

  // Columns j0 .. j1 of head `head` of rows i0 .. i1; `rounded` has room for their latents.
  void expand(int64_t head, int64_t i0, int64_t i1, int64_t j0, int64_t j1, T* rounded) const {
    const int64_t rank = w.rank(), first = head * w.up_value.rows + j0;
    for (int64_t i = i0; i < i1; ++i)
      round_row(latent_out + (i * w.value_heads() + head) * rank, rounded + (i - i0) * rank);
    dots<true, T>(
        i1 - i0, j1 - j0, rank, [&](int64_t i) { return rounded + i * rank; },
        [&](int64_t j) { return w.up_value.row<T>(head, j0 + j); },
        [&](int64_t i, int64_t j, const float* c, int count) {
          store_part(attended + (i0 + i) * width() + first + j, load(c), count);
        });
    if (w.gate)
      for (int64_t i = i0; i < i1; ++i) open_gate(i * width() + first, i * width() + first + j1 - j0);
  }

  void round_row(const float* from, T* to) const {
    for (int64_t i = 0; i < w.rank(); i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, w.rank() - i));
      store_part(to + i, load_part(from + i, n), n);
    }
  }

  void open_gate(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += kLanes) {
      const int n = int(std::min<int64_t>(kLanes, end - i));
      store_part(attended + i, load_part(attended + i, n) * round_to<T>(sigmoid(load_part(gate + i, n))), n);
    }
  }

  void run(Team& team) const {
    const int64_t value = w.up_value.rows, run = m < kValueRows ? kValueRun : value;
    const int64_t rows = std::clamp<int64_t>(m, 1, kValueRows);
    const int64_t blocks = (m + rows - 1) / rows, runs = (value + run - 1) / run;
    if (w.gate) {
      multiply<T, T>(team, m, {{x, w.gate->cols, *w.gate, gate, width()}});
      team.barrier();
    }
    Workspace workspace;
    T* rounded = workspace.take<T>(rows * w.rank());
    team.claim(w.value_heads() * blocks * runs, 1, [&](int64_t unit, int64_t) {
      const int64_t head = unit / (blocks * runs), i = unit / runs % blocks * rows, j = unit % runs * run;
      expand(head, i, std::min(i + rows, m), j, std::min(j + run, value), rounded);
    });
    team.barrier();
    multiply<T, T>(team, m, {{attended, width(), w.output, out, w.output.rows}});
  }
};

void mla_epilogue(const Mla& w, int64_t rows, Address latent_out, Address x, Address out) {
  with_dtype(w.kv_a.dtype, [&]<class T>(T) {
    Workspace workspace;
    const Epilogue<T> epilogue{
        .w = w,
        .m = rows,
        .latent_out = at<const float>(latent_out),
        .x = at<const T>(x),
        .gate = workspace.take<T>(w.gate ? rows * w.gate->rows : 0),
        .attended = workspace.take<T>(rows * w.output.cols),
        .out = at<T>(out),
    };
    pool()->run([&](Team& team) { epilogue.run(team); });
  });
}

template <class Out, class In>
std::optional<Out> made(std::optional<In> given) {
  if (!given) return std::nullopt;
  return Out(std::move(*given));
}

}  // namespace

void bind_mla(nb::module_& m) {
  nb::class_<Indexer>(m, "Indexer")
      .def("__init__", [](Indexer* self, Tensor query, Tensor key, Tensor head_weight, Tensor norm_weight,
                          Tensor norm_bias, float norm_eps) {
        new (self) Indexer{.query = Weight(query),
                           .key = Weight(key),
                           .head_weight = Weight(head_weight),
                           .norm_weight = Vector(norm_weight),
                           .norm_bias = Vector(norm_bias),
                           .norm_eps = norm_eps};
      });
  using Maybe = std::optional<Tensor>;
  nb::class_<Mla>(m, "Mla").def(
      "__init__",
      [](Mla* self, Maybe query_a, Maybe query_norm, Tensor query, Tensor kv_a, Tensor kv_a_norm, int64_t nope,
         Tensor up_key, Tensor up_value, float norm_eps, std::optional<Indexer> indexer, Maybe gate,
         Tensor output) {
        new (self) Mla{.query_a = made<Weight>(query_a),
                       .query_norm = made<Vector>(query_norm),
                       .query = Weight(query),
                       .kv_a = Weight(kv_a),
                       .kv_a_norm = Vector(kv_a_norm),
                       .nope = nope,
                       .up_key = HeadWeights(up_key),
                       .up_value = HeadWeights(up_value),
                       .norm_eps = norm_eps,
                       .indexer = std::move(indexer),
                       .gate = made<Weight>(gate),
                       .output = Weight(output)};
      },
      nb::arg("query_a").none(), nb::arg("query_norm").none(), nb::arg("query"), nb::arg("kv_a"),
      nb::arg("kv_a_norm"), nb::arg("nope"), nb::arg("up_key"), nb::arg("up_value"), nb::arg("norm_eps"),
      nb::arg("indexer").none(), nb::arg("gate").none(), nb::arg("output"));
  using Place = MlaPages::Place;
  nb::class_<MlaPages>(m, "MlaPages").def(nb::init<int64_t, Place, Place, Place, Place, int64_t>());
  m.def("mla_prologue", &mla_prologue, Unlocked());
  m.def("mla_epilogue", &mla_epilogue, Unlocked());
}

}  // namespace longspan
